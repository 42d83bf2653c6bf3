"""Reads the folder of a training's checkpoints, in which a saved step is complete or absent.

    step-00000100       the newest step has the most rollbacks, and of these the largest number
    step-00000100.2     this step was saved after two rollbacks
      manifest.json     training, step, metrics; save: the same on all nodes; back_to: the step to
                        which the last rollback before it went; size and xxh128 of each other file;
                        a checksum of itself
      config.json       the training's settings, for people and programs
      input.pt          states of all ranks' loaders
      random.pt         states of their random generators
      states/model.pt   a state that ``save`` was given
      states/model/     a state of which each rank has a part
      writer/           what the caller's writer made
    .saving-NAME        an incomplete step; the next owner of the lock removes it
    .removed-NAME       a step that was removed, and .old-NAME one that was replaced: likewise
    .lock               held by the process that writes
    .rank-RANK, history.jsonl, metrics.csv    see ``training_history.py``

A file of SHARED_BYTES or more with the same bytes as in the two steps before is a hard link to the
file of the older one. In a remote, the manifest of such a step has the format SHARED, and all its
large files are objects by their xxh128 in shared/, which stay as long as a step has them.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash

from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointCorrupt, VersionMismatch

StepManifest = JsonObject
Entry = list[int | str]
"""Size and xxh128 of a file."""

FORMAT = "datatrove_ckpt.TrainingCheckpoints 1"
SHARED = "datatrove_ckpt.TrainingCheckpoints 2"
SHARED_BYTES = 1 << 20
MANIFEST = "manifest.json"
CONFIG = "config.json"
_BLOCK = 1 << 20
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class StepName(NamedTuple):
    """The name of a saved step. Names are ordered by age."""

    rollbacks: int
    step: int

    def __str__(self) -> str:
        if self.rollbacks:
            return f"step-{self.step:08}.{self.rollbacks}"
        return f"step-{self.step:08}"


def step_names(names: Iterable[str]) -> list[StepName]:
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted(StepName(int(match[2] or 0), int(match[1])) for match in matches)


def steps_in(folder: Path) -> list[StepName]:
    return step_names(path.name for path in folder.iterdir())


def read_manifest(folder: Path, name: StepName) -> StepManifest:
    """Reads the manifest of a step.

    Raises:
        CheckpointCorrupt: the manifest is missing or damaged.
        VersionMismatch: another version of this package wrote it.
    """
    path = folder / str(name) / MANIFEST
    data = None
    if path.is_file():
        data = path.read_bytes()
    return parse_manifest(data, str(path), name)


def whole_manifests(
    names: Iterable[StepName], read: Callable[[StepName], StepManifest]
) -> dict[StepName, StepManifest]:
    manifests = dict[StepName, StepManifest]()
    for name in names:
        with suppress(CheckpointCorrupt):
            manifests[name] = read(name)
    return manifests


def check_files(
    folder: Path,
    name: StepName,
    full: bool = True,
    parts: Container[str] | None = None,
) -> None:
    """Raises CheckpointCorrupt if a file has changed.

    Args:
        full: read each file; otherwise compare only the sizes.
        parts: only files of these parts are checked, see ``part_of``; None: all files.
    """
    step = folder / str(name)
    entries = read_manifest(folder, name)["files"]
    if parts is not None:
        entries = {file: entry for file, entry in entries.items() if part_of(file) in parts}
    for file, (size, _) in entries.items():
        path = step / file
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing.")
        found_size = path.stat().st_size
        if found_size != size:
            raise CheckpointCorrupt(f"{path} has {found_size} bytes instead of {size}.")
    if full:
        with ThreadPoolExecutor() as pool:
            hashed = pool.map(size_and_hash, [blocks(step / file) for file in entries])
            for (file, entry), actual in zip(entries.items(), hashed, strict=True):
                if actual != entry:
                    raise CheckpointCorrupt(f"{step / file} has not the bytes it was saved with.")


def part_of(file: str) -> str:
    """Returns the part of a step that has a file: "states/model", "input", "random", "writer"."""
    part, _, rest = file.partition("/")
    if part == "states":
        part = f"states/{rest.partition('/')[0]}"
    return part.removesuffix(".pt")


def rolled_back_steps(manifests: Mapping[StepName, StepManifest]) -> set[StepName]:
    rollbacks = {
        StepName(name.rollbacks, manifest["back_to"])
        for name, manifest in manifests.items()
        if manifest.get("back_to") is not None
    }
    return {name for name in manifests for back in rollbacks if is_left_behind(name, back)}


def is_left_behind(name: StepName, back: StepName) -> bool:
    return name.rollbacks < back.rollbacks and name.step > back.step


def size_of(manifest: StepManifest) -> int:
    return sum(size for size, _ in manifest["files"].values())


def places_of(name: StepName, manifest: StepManifest) -> dict[str, tuple[str, Entry]]:
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


def size_and_hash(blocks: Iterable[bytes]) -> Entry:
    digest = xxhash.xxh3_128()
    size = 0
    for block in blocks:
        digest.update(block)
        size += len(block)
    return [size, digest.hexdigest()]


def sealed(manifest: StepManifest) -> bytes:
    return orjson.dumps(manifest | {"checksum": xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))})


def parse_manifest(data: bytes | None, place: str, name: StepName) -> StepManifest:
    if data is None:
        raise CheckpointCorrupt(f"{place} is missing.")
    try:
        manifest = orjson.loads(data)
        checksum = manifest.pop("checksum")
        is_whole = sealed(manifest) == data and checksum
        version = manifest["format"]
        saved = StepName(manifest["rollbacks"], manifest["step"])
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CheckpointCorrupt(f"{place} is damaged.")
    if version not in (FORMAT, SHARED):  # no older step may take its place
        raise VersionMismatch(
            f"{place} is of another version of this package ({version}, not {FORMAT} or {SHARED})."
        )
    if saved != name:
        raise CheckpointCorrupt(f"{place} is a copy of {saved}.")
    return dict(manifest)


def is_training(path: str | None) -> bool:
    folder = Path(path or "/dev/null")
    return folder.is_dir() and bool(steps_in(folder))
