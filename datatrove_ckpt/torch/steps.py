"""Writes and reads the saved steps of ``TrainingCheckpoints``, and copies them to the remote.

``step_folder.py`` describes the folder. In the remote the manifest is written last, and removed
first. The remote's ``owner`` names the process that copies there.
"""

import hashlib
import os
import pickle
import time
import uuid
import weakref
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import datatrove_ckpt.torch.step_folder as step_folder
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder, name_holder
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointLocked,
    ConfigError,
    Fenced,
    StorageFailed,
)
from datatrove_ckpt.torch.step_folder import (
    MANIFEST,
    Entry,
    StepManifest,
    StepName,
    blocks,
    is_large,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Contents = dict[str, object]
"""Values for ``torch.save``, or blocks of bytes, by the file's name."""

_OWNER = "owner"
_BEGIN_BYTES = 8 << 20


class Steps:
    """The saved steps in a folder, and in a remote place. One rank at a time changes a folder.

    Methods that write raise StorageFailed for the disk, and OSError and others for the remote.
    """

    def __init__(
        self, folder: Path, store: ObjectStore | None, only_plain: bool, config: bytes
    ) -> None:
        self.folder = folder
        self._only_plain = only_plain
        self._config = config
        self.training = ""
        """Identifies the training."""
        self.back_to: int | None = None
        """The step to which the last rollback went, if steps follow it."""
        self.damaged = set[StepName]()
        """Steps that were found damaged, and were not saved again."""
        self._whole = dict[StepName, StepManifest]()
        """The last two steps that this process has written, or read as a whole. Others may have
        removed them.
        """
        self._owner = ""
        self._unlock: weakref.finalize[[Lock, int], object] | None = None
        self.store = store
        files.disk.make_dirs(folder)

    @property
    def _remote(self) -> ObjectStore:
        assert self.store is not None
        return self.store

    @property
    def url(self) -> str:
        return self._remote.url

    @property
    def is_locked(self) -> bool:
        return self._unlock is not None and self._unlock.alive

    def lock(self) -> None:
        """Raises CheckpointLocked."""
        if self.is_locked:
            return
        path = self.folder / ".lock"
        try:
            self._unlock = weakref.finalize(self, _release, Lock(path), os.getpid())
        except CheckpointLocked:
            holder = name_holder(lock_holder(path) or {})
            raise CheckpointLocked(
                f"{self.folder}: another training, or an earlier process of this one, saves into "
                f"it: {holder}. Stop it, or choose another folder."
            ) from None
        for path in self.folder.iterdir():
            replaced = self.folder / path.name.removeprefix(".old-")
            if replaced != path and not replaced.exists():
                files.disk.rename(path, replaced)
            elif path.name.startswith((".saving-", ".old-", ".removed-")):
                files.disk.remove_tree(path)

    def unlock(self) -> None:
        if self._unlock is not None:
            self._unlock()

    # write ---------------------------------------------------------------------------------------

    def begin(self, name: StepName) -> Path:
        staging = self.folder / f".saving-{name}"
        files.disk.remove_tree(staging)
        for path in (staging, staging / "states", staging / "writer"):
            files.disk.make_dir(path, files.PUBLIC_FOLDER)
        return staging

    def abandon(self, name: StepName) -> None:
        files.disk.remove_tree(self.folder / f".saving-{name}")

    def write(self, name: StepName, contents: Contents, of: StepManifest) -> None:
        """Completes the staged step: hashes and syncs its files, writes the contents, and writes
        the manifest last.
        """
        staging = self.folder / f".saving-{name}"
        if self._config:
            contents = {**contents, step_folder.CONFIG: iter([self._config])}
        entries = dict[str, Entry]()
        paths = sorted(path for path in staging.rglob("*") if path.is_file())
        hashed: Iterator[Entry] = map(step_folder.size_and_hash, map(blocks, paths))
        with ThreadPoolExecutor() as pool:
            with suppress(RuntimeError):
                hashed = pool.map(step_folder.size_and_hash, map(blocks, paths))
            for path in paths:
                files.disk.sync(path)
            for path, entry in zip(paths, hashed, strict=True):
                entries[str(path.relative_to(staging))] = entry
                self._share(path, entry)
        for file, value in contents.items():
            entries[file] = self._put(staging / file, value)
        manifest = {
            "format": step_folder.FORMAT,
            "training": self.training,
            "step": name.step,
            "rollbacks": name.rollbacks,
            "back_to": self.back_to,
        }
        manifest |= {"at": time.time(), **of, "files": entries}
        self._complete(staging, manifest)

    def _put(self, path: Path, value: object) -> Entry:
        files.disk.make_dirs(path.parent)
        file = _File(path)
        try:
            if isinstance(value, Iterator):
                for block in value:
                    file.write(block)
            else:
                torch.save(value, file)
        except RuntimeError as error:
            raise file.failed or error from error
        finally:
            file.close()
        entry: Entry = [file.size, file.hexdigest()]
        if not self._share(path, entry):
            files.disk.sync(path)
        return entry

    def _share(self, path: Path, entry: Entry) -> bool:
        """Links the file to an equal file of an older step.

        Steps share two copies in turn: damage of one leaves the steps of the other whole.
        """
        if not is_large(entry):
            return False
        # Each large file of a save asks, and all steps may be kept.
        names = sorted(set(self.names()) - self.damaged)[-2:]
        manifests = step_folder.whole_manifests(names, self.manifest) | self._whole
        sources = [
            (name, self.folder / str(name) / file)
            for name, manifest in sorted(manifests.items())[-2:]
            for file, other in manifest["files"].items()
            if other == entry
        ]
        if len(dict(sources)) < 2:
            return False
        linked = path.with_name(f"{path.name}.linked")
        for name, before in sources:
            with suppress(OSError, StorageFailed):  # the step was removed, or no hard links
                saved_at = (self.folder / str(name) / MANIFEST).stat().st_mtime_ns
                is_same = before.stat().st_mtime_ns <= saved_at
                if is_same and name not in self._whole:
                    is_same = step_folder.size_and_hash(blocks(before)) == entry
                if is_same:
                    files.disk.link(before, linked)
                    files.disk.rename(linked, path)
                    return True
        return False

    def _complete(self, staging: Path, manifest: StepManifest) -> None:
        files.disk.write_new(staging / MANIFEST, [step_folder.sealed(manifest)], files.PUBLIC_FILE)
        for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            files.disk.sync_dir(folder)

    def publish(self, name: StepName) -> None:
        staging = self.folder / f".saving-{name}"
        old = self._set_aside(name, "old")
        files.disk.rename(staging, self.folder / str(name))
        files.disk.sync_dir(self.folder)
        files.disk.remove_tree(old)
        self.damaged.discard(name)
        self._note_whole(name)

    def _note_whole(self, name: StepName) -> None:
        self._whole = dict([*self._whole.items(), (name, self.manifest(name))][-2:])

    def remove(self, name: StepName) -> None:
        files.disk.remove_tree(self._set_aside(name, "removed"))

    def _set_aside(self, name: StepName, label: str) -> Path:
        aside = self.folder / f".{label}-{name}"
        files.disk.remove_tree(aside)
        if (self.folder / str(name)).exists():
            files.disk.rename(self.folder / str(name), aside)
        return aside

    # read ----------------------------------------------------------------------------------------

    def names(self) -> list[StepName]:
        return step_folder.steps_in(self.folder)

    def manifest(self, name: StepName) -> StepManifest:
        return step_folder.read_manifest(self.folder, name)

    def manifests(self) -> dict[StepName, StepManifest]:
        return step_folder.whole_manifests(set(self.names()) - self.damaged, self.manifest)

    def damage(self, name: StepName, parts: Container[str] | None = None) -> str:
        """Returns why the step in the folder, or these parts of it, cannot be used; "": they are
        whole.

        Raises as ``check_files`` and ``check_training``, except CheckpointCorrupt.
        """
        try:
            step_folder.check_files(self.folder, name, parts=parts)
            self.check_training(self.manifest(name), self.folder / str(name))
        except CheckpointCorrupt as error:
            self._whole.clear()  # they may have the damaged file
            return str(error)
        if parts is None:
            self._note_whole(name)
        return ""

    def check_training(self, manifest: StepManifest, place: object) -> None:
        if self.training and manifest["training"] != self.training:
            raise CheckpointCorrupt(f"{place} is of another training.")

    def load(self, name: StepName, file: str, mapped: bool = False) -> Any:
        """Returns a file of ``torch.save`` in the host's memory. Call ``damage`` before.

        With ``mapped``, the memory of tensors is the file, for a caller that copies all tensors.
        """
        path = self.folder / str(name) / file
        if not path.is_file():
            raise ConfigError(f"{path.parent} holds no {path.stem!r}: it was saved without.")
        with explained("read", path):
            try:
                return torch.load(
                    path, map_location="cpu", weights_only=self._only_plain, mmap=mapped
                )
            except RuntimeError:
                if not mapped:
                    raise
                return self.load(name, file)
            except pickle.UnpicklingError as error:
                raise ConfigError(
                    f"{path} holds more than plain values and tensors: set only_plain=False."
                ) from error

    # remote --------------------------------------------------------------------------------------

    def upload(self, name: StepName, there: dict[StepName, StepManifest]) -> None:
        """Until this returns, no older copy may be removed. Large files that a step ``there`` has
        are not sent again.

        Raises CheckpointCorrupt if the copy differs.
        """
        self._remote.delete(f"{name}/{MANIFEST}")
        stored = dict[str, Entry]()
        for other in there.keys() - {name}:
            stored |= step_folder.places_of(other, there[other]).values()
        sources = {tuple(each): place for place, each in stored.items() if is_large(each)}
        manifest = self.manifest(name)
        if not sources.keys().isdisjoint(map(tuple, manifest["files"].values())):
            manifest["format"] = step_folder.SHARED
        sent = list[tuple[str, Entry, Path]]()
        shared = self._remote.names("shared")  # others may remove old objects
        for file, (place, entry) in step_folder.places_of(name, manifest).items():
            path = self.folder / str(name) / file
            source = sources.get(tuple(entry))
            is_there = place in stored and entry[1] in shared
            if source is not None and not is_there:
                with suppress(FileNotFoundError, CheckpointCorrupt):
                    self._remote.copy(source, place, path)
                    self._compare(place, entry, path)
                    is_there = True
            if not is_there:
                self._remote.put(place, path)
                sent.append((place, entry, path))
        # A node that is about to go may have no time to compare.
        self._remote.put(f"{name}/{MANIFEST}", step_folder.sealed(manifest))
        try:
            for copy in sent:
                self._compare(*copy)
        except Exception:
            self._remote.delete(f"{name}/{MANIFEST}")
            raise

    def _compare(self, copy: str, entry: Entry, path: Path) -> None:
        md5 = self._remote.md5(copy)
        if len(md5) == 32:  # of parts, or encrypted, S3 has another hash
            digest = hashlib.md5(usedforsecurity=False)
            for block in blocks(path):
                digest.update(block)
            if digest.hexdigest() == md5:
                return
        if step_folder.size_and_hash(self._remote.blocks(copy)) != entry:
            raise CheckpointCorrupt(f"{self.url}/{copy} has not the bytes that were copied.")

    def remote_names(self) -> list[StepName]:
        if self.store is None:
            return []
        return step_folder.step_names(self.store.names())

    def remote_manifests(self) -> tuple[dict[StepName, StepManifest], set[StepName]]:
        names = self.remote_names()
        manifests = step_folder.whole_manifests(names, self.remote_manifest)
        return manifests, set(names) - manifests.keys()

    def remote_manifest(self, name: StepName) -> StepManifest:
        data = self._remote.read(f"{name}/{MANIFEST}", 64 << 20)
        return step_folder.parse_manifest(data, f"{self.url}/{name}/{MANIFEST}", name)

    def refuse_others(self, there: dict[StepName, StepManifest]) -> None:
        foreign = [
            name for name, manifest in there.items() if manifest["training"] != self.training
        ]
        if self.training and foreign:
            raise ConfigError(
                f"{self.url} holds {max(foreign)} of another training. Choose another remote."
            )

    def own_remote(self) -> None:
        """Makes this process the owner of the remote. Raises Fenced if a later process copies
        there: this node was given up for lost.
        """
        if not self._owner:
            owner = uuid.uuid4().hex
            self._remote.put(_OWNER, owner.encode())
            self._owner = owner
        elif self._remote.read(_OWNER, 100) != self._owner.encode():
            raise Fenced(f"A later process of this training copies to {self.url}.")

    def fetch(self, name: StepName) -> None:
        """Raises CheckpointCorrupt if the step is damaged or another training's."""
        manifest = self.remote_manifest(name)
        self.check_training(manifest, f"{self.url}/{name}")
        staging = self.begin(name)
        try:
            for file, (place, entry) in step_folder.places_of(name, manifest).items():
                if self._put(staging / file, self._remote.blocks(place)) != entry:
                    raise CheckpointCorrupt(
                        f"{self.url}/{place} has not the bytes it was saved with."
                    )
            self._complete(staging, manifest | {"format": step_folder.FORMAT})
        except FileNotFoundError as error:
            raise CheckpointCorrupt(f"{self.url}/{name} lacks a file: {error}.") from error
        else:
            self.publish(name)
        finally:
            self.abandon(name)

    def remove_remote(self, name: StepName) -> None:
        self._remote.delete(f"{name}/{MANIFEST}")
        self._remote.delete_tree(str(name))

    def remove_shared(self, staying: Iterable[StepManifest]) -> None:
        """Removes large files in the remote that no step of ``staying`` or of the folder has: a
        listing of the remote may lag.
        """
        manifests = [*staying, *step_folder.whole_manifests(self.names(), self.manifest).values()]
        needed = {entry[1] for manifest in manifests for entry in manifest["files"].values()}
        unused = self._remote.names("shared").keys() - needed
        self.own_remote()  # what a later process copies from now on stays
        for digest in unused:
            self._remote.delete(f"shared/{digest}")


def _release(lock: Lock, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        lock.release(remove=True)


class _File(files.HashedFile):
    """Keeps the disk's error, which torch does not pass on. Begins to write before the sync."""

    failed: Exception | None = None
    _begun = 0

    def write(self, data: "ReadableBuffer") -> int:
        try:
            count = super().write(data)
        except Exception as error:
            self.failed = error
            raise
        length = self.size - self._begun
        if length > _BEGIN_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, self._begun, length, os.POSIX_FADV_DONTNEED)
            self._begun = self.size
        return count
