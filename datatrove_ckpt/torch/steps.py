"""The folders of ``TrainingCheckpoints``: a saved step is complete or absent.

    step-00000100      the newest is the one of the most rollbacks, then steps; after two:
                       step-00000100.2
      manifest.json    training, step, metrics; size and xxh128 of each other file; a checksum of
                       itself
      input.pt         states of all ranks' loaders; random.pt: of their random generators
      states/model.pt  a state that ``save`` was given; states/model/: one of which each rank has a
                       part
      writer/          what the caller's writer made
    .saving-NAME       not complete; .removed-NAME, .old-NAME (replaced): the next owner of the lock
                       removes them
    .lock              held by the process that writes
    history.jsonl      what was saved, restored, rolled back

In the remote the manifest is written last, and removed first. Its ``owner`` names the process that
copies there.
"""

from __future__ import annotations

import os
import pickle
import re
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import orjson
import torch
import xxhash

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointLocked,
    ConfigError,
    Fenced,
    VersionMismatch,
)
from datatrove_ckpt.mirror.object_store import ObjectStore

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Manifest = JsonObject
Contents = dict[str, object]
"""By the file's name what ``torch.save`` takes, or blocks of bytes."""

_Entry: TypeAlias = list[int | str]
"""Size and xxh128 of a file."""

_FORMAT = "datatrove_ckpt.TrainingCheckpoints 1"
_MANIFEST = "manifest.json"
_OWNER = "owner"
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


class Steps:
    """The saved steps in a folder, and in a remote place. One rank at a time changes a folder.

    Methods that write raise StorageFailed for the disk, and OSError and others for the remote.
    """

    def __init__(self, folder: Path, remote: str | None) -> None:
        self.folder = folder
        self.training = ""
        """Identifies the training."""
        self._owner = ""
        self._unlock: weakref.finalize[[files.Lock, int], object] | None = None
        self.store: ObjectStore | None = None
        if remote is not None:
            self.store = ObjectStore(remote)
        files.disk.make_dirs(folder)

    @property
    def is_locked(self) -> bool:
        return self._unlock is not None and self._unlock.alive

    def lock(self) -> None:
        """Locks the folder, and removes what an ended process left. Raises CheckpointLocked."""
        if self.is_locked:
            return
        path = self.folder / ".lock"
        try:
            self._unlock = weakref.finalize(self, _release, files.Lock(path), os.getpid())
        except CheckpointLocked:
            holder = files.name_holder(files.lock_holder(path) or {})
            raise CheckpointLocked(
                f"{self.folder}: another training, or an earlier process of this one, saves into "
                f"it: {holder}. Stop it, or choose another folder."
            ) from None
        self._clean()

    def unlock(self) -> None:
        if self._unlock is not None:
            self._unlock()

    def _clean(self) -> None:
        for path in self.folder.iterdir():
            replaced = self.folder / path.name.removeprefix(".old-")
            if replaced != path and not replaced.exists():  # the new step never took its place
                files.disk.rename(path, replaced)
            elif path.name.startswith((".saving-", ".old-", ".removed-")):
                files.disk.remove_tree(path)

    # write ---------------------------------------------------------------------------------------

    def begin(self, name: StepName) -> Path:
        staging = self.folder / f".saving-{name}"
        files.disk.remove_tree(staging)
        for path in (staging, staging / "states", staging / "writer"):
            files.disk.make_dir(path, files.PUBLIC_FOLDER)
        return staging

    def abandon(self, name: StepName) -> None:
        files.disk.remove_tree(self.folder / f".saving-{name}")

    def finish(
        self,
        name: StepName,
        contents: Contents,
        metrics: dict[str, float],
        of: Manifest | None = None,
    ) -> Manifest:
        self.write(name, contents, metrics, of)
        return self.publish(name)

    def write(
        self,
        name: StepName,
        contents: Contents,
        metrics: dict[str, float],
        of: Manifest | None = None,
    ) -> None:
        """Completes the staged step: hashes and syncs its files, writes the contents, and writes
        the manifest last.

        Args:
            of: the manifest of the step, if this is a copy.
        """
        staging = self.folder / f".saving-{name}"
        entries = dict[str, _Entry]()
        for path in sorted(path for path in staging.rglob("*") if path.is_file()):
            entries[str(path.relative_to(staging))] = _size_and_hash(path)
            files.disk.sync(path)
        for file, content in contents.items():
            files.disk.make_dirs((staging / file).parent)
            entries[file] = _write(staging / file, content)
        manifest = {
            "format": _FORMAT,
            "training": self.training,
            "step": name.step,
            "rollbacks": name.rollbacks,
        }
        manifest |= {"at": time.time(), "metrics": metrics, **(of or {}), "files": entries}
        files.disk.write_new(staging / _MANIFEST, [_sealed(manifest)], files.PUBLIC_FILE)
        for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            files.disk.sync_dir(folder)

    def publish(self, name: StepName) -> Manifest:
        staging = self.folder / f".saving-{name}"
        old = self._set_aside(name, "old")
        files.disk.rename(staging, self.folder / str(name))
        files.disk.sync_dir(self.folder)
        files.disk.remove_tree(old)
        return self.manifest(name)

    def remove(self, name: StepName) -> None:
        files.disk.remove_tree(self._set_aside(name, "removed"))

    def _set_aside(self, name: StepName, why: str) -> Path:
        aside = self.folder / f".{why}-{name}"
        files.disk.remove_tree(aside)
        if (self.folder / str(name)).exists():
            files.disk.rename(self.folder / str(name), aside)
        return aside

    def note(self, **record: object) -> None:
        files.disk.append(
            self.folder / "history.jsonl", orjson.dumps(record | {"at": time.time()}) + b"\n"
        )

    # read ----------------------------------------------------------------------------------------

    def names(self) -> list[StepName]:
        return _step_names(path.name for path in self.folder.iterdir())

    def manifest(self, name: StepName) -> Manifest:
        """Raises CheckpointCorrupt if the manifest is missing or damaged, VersionMismatch for
        another version.
        """
        path = self.folder / str(name) / _MANIFEST
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing.")
        return _opened(path.read_bytes(), str(path), name)

    def check(self, name: StepName) -> None:
        """Reads each file. Raises CheckpointCorrupt if one has changed."""
        for file, entry in self.manifest(name)["files"].items():
            path = self.folder / str(name) / file
            if not path.is_file():
                raise CheckpointCorrupt(f"{path} is missing.")
            found = _size_and_hash(path)
            if found[0] != entry[0]:
                raise CheckpointCorrupt(f"{path} has {found[0]} bytes instead of {entry[0]}.")
            if found != entry:
                raise CheckpointCorrupt(f"{path} has not the bytes it was saved with.")

    def check_training(self, manifest: Manifest, where: str) -> None:
        """Raises CheckpointCorrupt if a step is of another training."""
        if self.training and manifest["training"] != self.training:
            raise CheckpointCorrupt(f"{where} is of another training.")

    def load(self, name: StepName, file: str, only_plain: bool = True) -> Any:
        """Loads a file of ``torch.save`` into the host's memory. Call ``check`` before."""
        path = self.folder / str(name) / file
        if not path.is_file():
            raise ConfigError(f"{path.parent} holds no {path.stem!r}: it was saved without.")
        with explained("read", path):
            try:
                return torch.load(path, map_location="cpu", weights_only=only_plain)
            except pickle.UnpicklingError as error:
                raise ConfigError(
                    f"{path} holds more than plain values and tensors: set only_plain=False."
                ) from error

    # remote --------------------------------------------------------------------------------------

    def upload(self, name: StepName) -> None:
        assert self.store is not None
        try:
            if self.remote_manifest(name) == self.manifest(name):
                return
            self.store.remove(f"{name}/{_MANIFEST}")
        except CheckpointCorrupt:
            pass
        for file in self.manifest(name)["files"]:
            self.store.put_file(f"{name}/{file}", self.folder / str(name) / file)
        self.store.put(f"{name}/{_MANIFEST}", (self.folder / str(name) / _MANIFEST).read_bytes())

    def remote_names(self) -> list[StepName]:
        if self.store is None:
            return []
        return _step_names(self.store.names())

    def remote_manifests(self) -> tuple[dict[StepName, Manifest], set[StepName]]:
        """Returns the manifests of complete steps, and the names of incomplete ones."""
        found = dict[StepName, Manifest]()
        incomplete = set[StepName]()
        for name in self.remote_names():
            try:
                found[name] = self.remote_manifest(name)
            except CheckpointCorrupt:
                incomplete.add(name)
        return found, incomplete

    def remote_manifest(self, name: StepName) -> Manifest:
        """Raises CheckpointCorrupt if the manifest is missing or damaged."""
        assert self.store is not None
        data = self.store.read(f"{name}/{_MANIFEST}", 64 << 20)
        where = f"{self.store.url}/{name}/{_MANIFEST}"
        if data is None:
            raise CheckpointCorrupt(f"{where} is missing.")
        return _opened(data, where, name)

    def refuse_others(self, there: dict[StepName, Manifest]) -> None:
        """Raises ConfigError if a step in the remote is of another training."""
        others = [name for name, manifest in there.items() if manifest["training"] != self.training]
        if self.store is not None and self.training and others:
            raise ConfigError(
                f"{self.store.url} holds {max(others)} of another training. Choose another remote."
            )

    def own_remote(self) -> None:
        """Raises Fenced if a later process copies there: this node was given up for lost."""
        assert self.store is not None
        if not self._owner:
            self._owner = uuid.uuid4().hex
            self.store.put(_OWNER, self._owner.encode())
        elif self.store.read(_OWNER, 100) != self._owner.encode():
            raise Fenced(f"A later process of this training copies to {self.store.url}.")

    def fetch(self, name: StepName) -> None:
        """Copies a step from the remote.

        Raises CheckpointCorrupt if it is damaged or another training's.
        """
        assert self.store is not None
        manifest = self.remote_manifest(name)
        self.check_training(manifest, f"{self.store.url}/{name}")
        staging = self.begin(name)
        try:
            for file, entry in manifest["files"].items():
                files.disk.make_dirs((staging / file).parent)
                if _write(staging / file, self.store.get_file(f"{name}/{file}")) != entry:
                    raise CheckpointCorrupt(
                        f"{self.store.url}/{name}/{file} has not the bytes it was saved with."
                    )
        except Exception as error:
            self.abandon(name)
            if isinstance(error, FileNotFoundError):
                raise CheckpointCorrupt(
                    f"{self.store.url}/{name} lacks a file: {error}."
                ) from error
            raise
        self.finish(name, {}, {}, manifest)

    def remove_remote(self, name: StepName) -> None:
        assert self.store is not None
        self.store.remove(f"{name}/{_MANIFEST}")
        self.store.remove_below(str(name))


def _step_names(names: Iterable[str]) -> list[StepName]:
    found = map(StepName.parse, names)
    return sorted(name for name in found if name is not None)


def _release(lock: files.Lock, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        lock.release(remove=True)


def _write(path: Path, content: object) -> _Entry:
    file = _File(path)
    try:
        if isinstance(content, Iterator):
            for block in content:
                file.write(block)
        else:
            torch.save(content, file)
    except RuntimeError as error:
        raise file.failed or error from error
    finally:
        file.close()
    files.disk.sync(path)
    return [file.size, file.hexdigest()]


class _File(files.HashedFile):
    """Keeps the disk's error, which torch does not pass on."""

    failed: Exception | None = None

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except Exception as error:
            self.failed = error
            raise


def blocks(path: Path) -> Iterator[bytes]:
    with explained("read", path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _size_and_hash(path: Path) -> _Entry:
    digest = xxhash.xxh3_128()
    size = 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    return [size, digest.hexdigest()]


def _sealed(manifest: Manifest) -> bytes:
    return orjson.dumps(manifest | {"checksum": xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))})


def _opened(data: bytes, where: str, name: StepName) -> Manifest:
    try:
        manifest = orjson.loads(data)
        checksum = manifest.pop("checksum")
        is_whole = _sealed(manifest) == data and checksum
        version = manifest["format"]
        saved = StepName(manifest["rollbacks"], manifest["step"])
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CheckpointCorrupt(f"{where} is damaged.")
    if version != _FORMAT:  # no older step may take its place
        raise VersionMismatch(
            f"{where} is of another version of this package ({version}, not {_FORMAT})."
        )
    if saved != name:
        raise CheckpointCorrupt(f"{where} is a copy of {saved}.")
    return dict(manifest)
