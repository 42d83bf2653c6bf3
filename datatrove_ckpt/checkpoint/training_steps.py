"""The folder of a training's checkpoints, as it is read: a saved step is complete or absent.

step-00000100      the newest is the one of the most rollbacks, then steps; after two:
step-00000100.2
manifest.json    training, step, metrics; save: the same on all nodes; back_to: the step to which
the last rollback before it went; size and xxh128 of each other file; a checksum of itself
input.pt         states of all ranks' loaders; random.pt: of their random generators
states/model.pt  a state that ``save`` was given; states/model/: one of which each rank has a
part
writer/          what the caller's writer made
.saving-NAME       not complete; .removed-NAME, .old-NAME (replaced): the next owner of the lock
removes them
.lock              held by the process that writes
history.jsonl      what was saved, restored, rolled back; metrics.csv: the loss curve; see
``training_history``
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash

from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointCorrupt, VersionMismatch

Manifest = JsonObject
Entry = list[int | str]
"""Size and xxh128 of a file."""

FORMAT = "datatrove_ckpt.TrainingCheckpoints 1"
MANIFEST = "manifest.json"
_BLOCK = 8 << 20
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class StepName(NamedTuple):
    """Names are ordered by age."""

    rollbacks: int
    step: int

    def __str__(self) -> str:
        if self.rollbacks:
            return f"step-{self.step:08}.{self.rollbacks}"
        return f"step-{self.step:08}"

    @classmethod
    def parse(cls, name: str) -> StepName | None:
        found = _NAME.fullmatch(name)
        if found:
            return cls(int(found[2] or 0), int(found[1]))
        return None


def step_names(names: Iterable[str]) -> list[StepName]:
    found = map(StepName.parse, names)
    return sorted(name for name in found if name is not None)


def read_manifest(folder: Path, name: StepName) -> Manifest:
    """Raises CheckpointCorrupt if the manifest is missing or damaged, VersionMismatch for another
    version.
    """
    path = folder / str(name) / MANIFEST
    if not path.is_file():
        raise CheckpointCorrupt(f"{path} is missing.")
    return opened(path.read_bytes(), str(path), name)


def check_files(folder: Path, name: StepName) -> None:
    """Reads each file. Raises CheckpointCorrupt if one has changed."""
    for file, entry in read_manifest(folder, name)["files"].items():
        path = folder / str(name) / file
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing.")
        if size_and_hash(path) != entry:
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


def blocks(path: Path) -> Iterator[bytes]:
    with explained("read", path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def size_and_hash(path: Path) -> Entry:
    digest = xxhash.xxh3_128()
    size = 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    return [size, digest.hexdigest()]


def sealed(manifest: Manifest) -> bytes:
    return orjson.dumps(manifest | {"checksum": xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))})


def opened(data: bytes, where: str, name: StepName) -> Manifest:
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
    if version != FORMAT:  # no older step may take its place
        raise VersionMismatch(
            f"{where} is of another version of this package ({version}, not {FORMAT})."
        )
    if saved != name:
        raise CheckpointCorrupt(f"{where} is a copy of {saved}.")
    return dict(manifest)


def is_training(what: str | None) -> bool:
    """Returns whether a folder holds steps of a training."""
    folder = Path(what or "/dev/null")
    return folder.is_dir() and bool(step_names(path.name for path in folder.iterdir()))
