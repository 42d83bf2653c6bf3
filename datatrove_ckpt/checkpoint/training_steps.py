"""The folder of a training's checkpoints, as it is read: a saved step is complete or absent.

step-00000100      the newest is the one of the most rollbacks, then steps; after two:
step-00000100.2
manifest.json    training, step, metrics; save: the same on all nodes; back_to: the step to which
the last rollback before it went; size and xxh128 of each other file; a checksum of itself
config.json      the training's settings, for people and programs
input.pt         states of all ranks' loaders; random.pt: of their random generators
states/model.pt  a state that ``save`` was given; states/model/: one of which each rank has a
part
writer/          what the caller's writer made
A file of SHARED_BYTES or more whose bytes the step before has is another name of that file. In a
remote, the manifest of such a step has the format SHARED, and all its large files are objects by
their xxh128 in shared/, which stay as long as a step has them.
.saving-NAME       not complete; .removed-NAME, .old-NAME (replaced): the next owner of the lock
removes them
.lock              held by the process that writes
.rank-RANK         when a rank last took a step, where, and its variables of NCCL
history.jsonl      what was saved, restored, rolled back; metrics.csv: the loss curve

A stop loses the steps after the last save, and the training makes them again. So the metrics of a
step take the place of those of all later steps before it in the file. Events: saved, failed,
restored, rolled back, not copied, and metrics, which may be of each step.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError, VersionMismatch

Manifest = JsonObject
Entry = list[int | str]
"""Size and xxh128 of a file."""

FORMAT = "datatrove_ckpt.TrainingCheckpoints 1"
SHARED = "datatrove_ckpt.TrainingCheckpoints 2"
SHARED_BYTES = 1 << 20
MANIFEST = "manifest.json"
CONFIG = "config.json"
_BLOCK = 1 << 20  # stays in the cache of a CPU
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class StepName(NamedTuple):
    """Names are ordered by age."""

    rollbacks: int
    step: int

    def __str__(self) -> str:
        if self.rollbacks:
            return f"step-{self.step:08}.{self.rollbacks}"
        return f"step-{self.step:08}"


def step_names(names: Iterable[str]) -> list[StepName]:
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(StepName(int(match[2] or 0), int(match[1])) for match in found)


def steps_in(folder: Path) -> list[StepName]:
    return step_names(path.name for path in folder.iterdir())


def read_manifest(folder: Path, name: StepName) -> Manifest:
    """Raises CheckpointCorrupt if the manifest is missing or damaged, VersionMismatch for another
    version.
    """
    path = folder / str(name) / MANIFEST
    data = None
    if path.is_file():
        data = path.read_bytes()
    return opened(data, str(path), name)


def readable(
    names: Iterable[StepName], read: Callable[[StepName], Manifest]
) -> dict[StepName, Manifest]:
    """Returns the manifests of the steps that have a whole one."""
    found = dict[StepName, Manifest]()
    for name in names:
        with suppress(CheckpointCorrupt):
            found[name] = read(name)
    return found


def check_files(
    folder: Path,
    name: StepName,
    full: bool = True,
    load: Callable[[str, CheckedFile], None] | None = None,
    loaded: Container[str] = (),
) -> None:
    """Raises CheckpointCorrupt if a file has changed.

    Args:
        full: reads each file; else compares sizes alone.
        load: called with each file of ``loaded``, so that it is read once.
    """

    def read(file: str) -> Entry:
        path = folder / str(name) / file
        with explained("read", path), CheckedFile(path) as content:
            if load is not None and file in loaded:
                load(file, content)
            return content.entry()

    entries = read_manifest(folder, name)["files"]
    for file, (size, _) in entries.items():
        path = folder / str(name) / file
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing.")
        there = path.stat().st_size
        if there != size:
            raise CheckpointCorrupt(f"{path} has {there} bytes instead of {size}.")
    if full:
        with ThreadPoolExecutor() as pool:
            others = [file for file in entries if file not in loaded]
            hashed = pool.map(read, others)
            # In this thread, because what other threads free is not used again.
            found = {file: read(file) for file in entries if file in loaded}
            found |= zip(others, hashed, strict=True)
        for file, entry in entries.items():
            if found[file] != entry:
                path = folder / str(name) / file
                raise CheckpointCorrupt(f"{path} has not the bytes it was saved with.")


def left_behind(manifests: Mapping[StepName, Manifest]) -> set[StepName]:
    """Returns the steps after those to which rollbacks went back."""
    rollbacks = {
        StepName(name.rollbacks, manifest["back_to"])
        for name, manifest in manifests.items()
        if manifest.get("back_to") is not None
    }
    return {name for name in manifests for back in rollbacks if is_left_behind(name, back)}


def is_left_behind(name: StepName, back: StepName) -> bool:
    return name.rollbacks < back.rollbacks and name.step > back.step


def size_of(manifest: Manifest) -> int:
    return sum(size for size, _ in manifest["files"].values())


def places_of(name: StepName, manifest: Manifest) -> dict[str, tuple[str, Entry]]:
    """Returns where each file of a step is in a remote, and its size and hash."""
    places = {file: (f"{name}/{file}", entry) for file, entry in manifest["files"].items()}
    if manifest["format"] == SHARED:
        for file, (_, entry) in places.items():
            if is_large(entry):
                places[file] = (f"shared/{entry[1]}", entry)
    return places


def is_large(entry: Entry) -> bool:
    return int(entry[0]) >= SHARED_BYTES


def blocks(path: Path) -> Iterator[bytes]:
    with explained("read", path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


class CheckedFile(io.FileIO):
    """A file that hashes the bytes that are read in their order, as ``torch.load`` reads most."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._digest = xxhash.xxh3_128()
        self._hashed = 0

    def readinto(self, buffer: Any) -> int:
        start = self.tell()
        if self._hashed < start <= self._hashed + _BLOCK:  # between tensors are gaps
            self.seek(self._hashed)
            self._hash(self.read(start - self._hashed))
            self.seek(start)
        view = memoryview(buffer).cast("B")
        count = 0
        while size := super().readinto(view[count : count + _BLOCK]):
            if start + count == self._hashed:
                self._hash(view[count : count + size])
            count += size
        return count

    def entry(self) -> Entry:
        """Reads the rest."""
        self.seek(self._hashed)
        while block := self.read(_BLOCK):
            self._hash(block)
        return [self._hashed, self._digest.hexdigest()]

    def _hash(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._hashed += len(data)


def size_and_hash(content: Iterable[bytes]) -> Entry:
    digest = xxhash.xxh3_128()
    size = 0
    for block in content:
        digest.update(block)
        size += len(block)
    return [size, digest.hexdigest()]


def sealed(manifest: Manifest) -> bytes:
    return orjson.dumps(manifest | {"checksum": xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))})


def opened(data: bytes | None, where: str, name: StepName) -> Manifest:
    """``data``: None: there is no manifest."""
    if data is None:
        raise CheckpointCorrupt(f"{where} is missing.")
    try:
        manifest = orjson.loads(data)
        checksum = manifest.pop("checksum")
        is_whole = sealed(manifest) == data and checksum
        version = manifest["format"]
        saved = StepName(manifest["rollbacks"], manifest["step"])
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CheckpointCorrupt(f"{where} is damaged.")
    if version not in (FORMAT, SHARED):  # no older step may take its place
        raise VersionMismatch(
            f"{where} is of another version of this package ({version}, not {FORMAT} or {SHARED})."
        )
    if saved != name:
        raise CheckpointCorrupt(f"{where} is a copy of {saved}.")
    return dict(manifest)


def config_file(config: object) -> bytes:
    """Returns what ``config.json`` holds of a dict, dataclass or Namespace: all but secrets.

    Returns nothing of None. Raises ConfigError if JSON cannot hold it.
    """
    if config is None:
        return b""
    plain = _plain(config, "config")
    if not isinstance(plain, dict):
        raise ConfigError(f"config is {plain!r:.60}. Give a dict, a dataclass or a Namespace.")
    return json.dumps(plain, indent=2, ensure_ascii=False).encode() + b"\n"


def _plain(value: object, place: str) -> object:
    if isinstance(value, Namespace):
        value = vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{place}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{place}.{number}") for number, each in enumerate(value)]
    if redaction.is_surely_secret(place, value):
        return redaction.HIDDEN
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if is_number or isinstance(value, str | None):
        return value
    text = " ".join(repr(value).split())
    raise ConfigError(f"{place} is {text:.60}, which JSON cannot hold. Give plain values.")


def is_training(what: str | None) -> bool:
    """Returns whether a folder holds steps of a training."""
    folder = Path(what or "/dev/null")
    return folder.is_dir() and bool(steps_in(folder))


def give_sign(folder: Path, rank: int, ranks: int, step: int) -> None:
    """Writes that a rank takes steps. The training continues on a full disk."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    sign = {
        **files.this_process(),
        "rank": rank,
        "ranks": ranks,
        "step": step,
        "at": time.time(),
        "variables": _plain(variables, "nccl"),
    }
    with suppress(OSError):
        (folder / f".rank-{rank:05}").write_bytes(orjson.dumps(sign))


def read_signs(folder: Path) -> list[JsonObject]:
    """Returns the last sign of each rank. One that is written at this moment may be missing."""
    signs: list[JsonObject] = []
    for path in sorted(folder.glob(".rank-*")):
        with suppress(ValueError, OSError):
            signs.append(orjson.loads(path.read_bytes()))
    newest = max((sign["at"], sign["ranks"]) for sign in signs) if signs else (0.0, 0)
    return [sign for sign in signs if sign["rank"] < newest[1]]  # it may have had more ranks


HISTORY = "history.jsonl"

Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


def read_events(folder: Path) -> Iterator[JsonObject]:
    """Yields the events; skips a line that a kill has torn."""
    path = folder / HISTORY
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                event = orjson.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def curve(events: Iterable[JsonObject]) -> list[Row]:
    """Returns the metrics of the steps that the training has made, in their order."""
    rows: list[Row] = []
    for event in events:
        if event["event"] != "metrics":
            continue
        step = int(event["step"])
        while rows and rows[-1][0] > step:
            rows.pop()
        if rows and rows[-1][0] == step:
            rows[-1][1].update(event["metrics"])
        else:
            rows.append((step, dict(event["metrics"])))
    return rows


class TrainingHistory:
    """Appends events. They wait in memory while another process may own the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # the training logs, and its writing thread notes
        self._waiting: list[JsonObject] = []

    def note(self, is_owner: bool, event: str, step: int, **others: object) -> None:
        """Raises StorageFailed."""
        with self._lock:
            self._waiting.append({"event": event, "step": step, "at": time.time(), **others})
            if is_owner:
                lines = b"".join(orjson.dumps(each) + b"\n" for each in self._waiting)
                files.disk.append(self._folder / HISTORY, lines)
                self._waiting = []  # of a full disk, they come with the next event

    def write_curve(self) -> None:
        """Writes the CSV file anew, which takes seconds after many steps. Raises StorageFailed."""
        rows = curve(read_events(self._folder))
        if not rows:
            return
        columns = [*dict.fromkeys(name for _, row in rows for name in row)]
        text = io.StringIO()
        table = csv.DictWriter(text, ["step", *columns], lineterminator="\n")
        table.writeheader()
        for step, metrics in rows:
            metrics |= {name: math.nan for name, value in metrics.items() if value is None}
            table.writerow({"step": step, **metrics})
        files.disk.replace(
            self._folder / "metrics.csv", text.getvalue().encode(), files.PUBLIC_FILE
        )
