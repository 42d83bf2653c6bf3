"""The owner of an output folder: one run for each ``output_filename``, named by a small file beside
the folder.

The file is made before the first request, so that only one of several runs succeeds: by a link on a
disk, a conditional PUT on S3 and Google Cloud Storage, a commit with its parent on the hub. On
other stores and in buckets of the hub, the file is written, and read again a second later and at
the first publication: until then, two runs that start within that second may both continue.

The file is not in the folder, because datatrove's readers take every file there for data. The root
of a bucket or repository has no place beside it: there the file is hidden in it, and other readers
skip it. If it cannot be written, only ``Target.publish`` separates two runs.

A file that names another run refuses this run until a person removes the file, except for a removed
run with checkpoints in this run's place.

A run is known by its mirror, or by its ``checkpoints_local_dir`` and its identity, as of its first
start. The file ``home`` in that folder keeps them, in case the folder is moved or copied, or the
settings change.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash
from datatrove.io import DataFolder
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import content_of
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.output.file_names import stem
from datatrove_ckpt.output.hub import HubFolder, is_missing_repository

_MOST_BYTES = 1 << 20


class OutputOwner(NamedTuple):
    """A run, as the record of an output folder names it.

    Attributes:
        home: its mirror, or its ``checkpoints_local_dir``, as of the run's first start.
        run: the hash of its identity at that time.
        key: random, so that a later run in its place differs; "": not known.
        host: where the record was written.
        replaces: the key of the removed run in this place, if its record existed when this run
            began.
    """

    home: str
    run: str
    key: str
    host: str
    replaces: str = ""


class RunOrigin(NamedTuple):
    """The places by which a run is known: where it began, and its settings now.

    Attributes:
        root: ``checkpoints_local_dir``.
        mirror: ``checkpoints_remote_dir``.
        run: the hash of the run's identity; None: any hash.
    """

    root: Path
    mirror: str | None
    run: str | None = None

    @property
    def kept(self) -> OutputOwner | None:
        path = self.root / layout.HOME
        if not path.exists():
            return None
        return OutputOwner(**orjson.loads(path.read_bytes()))

    @property
    def place(self) -> str:
        if self.mirror is None:
            return str(self.root.absolute())
        if "://" in self.mirror:
            return self.mirror.rstrip("/")
        return str(Path(self.mirror).absolute())

    def new_record(self, key: str = "", replaces: str = "") -> OutputOwner:
        return OutputOwner(self.place, self.run or "", key, socket.gethostname(), replaces)

    def owns(self, owner: OutputOwner) -> bool:
        kept = self.kept
        own = kept or self.new_record()
        if own.key and own.key == owner.key:
            return True
        if own.home != owner.home:
            return False
        if self.mirror is not None or (kept is not None and not kept.key):
            return True  # a mirror belongs to one run
        # A node with its own disk began the run, perhaps at the same moment.
        is_same = own.run == owner.run or (kept is None and self.run is None)
        return is_same and own.host != owner.host

    def is_gone(self, owner: OutputOwner, is_unused: Callable[[], bool]) -> bool:
        """Whether a record names an earlier run, whose checkpoints were here, and were removed or
        moved.
        """
        kept = self.kept
        if kept is not None:  # by another rank, or before a kill, and the record comes next
            return bool(owner.key) and kept.replaces == owner.key
        if owner.home != str(self.root.absolute()):
            return False
        return owner.host == socket.gethostname() or is_unused()

    def keep(self, owner: OutputOwner) -> OutputOwner:
        """Records the run, unless another rank has, and returns the record."""
        path = self.root / layout.HOME
        if not path.exists():
            files.keep_first(path, orjson.dumps(owner._asdict()), files.PRIVATE_FILE)
        return self.kept or owner


class OutputOwnership:
    """A run's claim on an output folder.

    Args:
        template: the writer's ``output_filename``. Templates that differ in the ending alone have
            one owner.
    """

    def __init__(self, folder: DataFolder, template: str, homes: RunOrigin) -> None:
        self._folder = folder
        self._template = template
        self._homes = homes
        self._record = _record(
            folder, f"{layout.OWNER}{xxhash.xxh3_64_hexdigest(stem(template).encode())}"
        )

    def check(self, is_unused: Callable[[], bool] = lambda: False) -> bool:
        """Returns whether this run owns the folder; False: it may become the owner. Changes
        nothing.

        Args:
            is_unused: returns whether the folder holds no file of the template. Then a removed run
                that had its checkpoints in this place is no owner any more.

        Raises:
            OutputMismatch: another run owns the folder.
            OSError: the record cannot be read.
        """
        return self._compare(is_unused)[0]

    def _compare(self, is_unused: Callable[[], bool]) -> tuple[bool, OutputOwner | None]:
        owner = self._record.read()
        if owner is None or self._homes.owns(owner):
            return owner is not None, owner
        if self._homes.is_gone(owner, is_unused):
            return False, owner
        raise self._refusal(owner)

    def claim(self, is_unused: Callable[[], bool]) -> None:
        """Makes this run the owner, unless another run is. A second call only compares.

        A run without checkpoints cannot own a folder.

        Raises:
            OutputMismatch: another run owns the folder.
            OSError: the record can be neither read nor written.
        """
        if self._homes.run is None:
            return
        try:
            is_owned, owner = self._compare(is_unused)
            if is_owned and owner is not None:
                self._homes.keep(owner)
                return
            if owner is not None and not is_unused():
                # All files are its own, unless a rank of this run has replaced the record.
                homes = self._homes
                if homes.mirror is None and homes.kept is None and self._record.read() == owner:
                    raise self._refusal(owner)
            replaces = "" if owner is None else owner.key
            kept = self._homes.keep(self._homes.new_record(secrets.token_hex(8), replaces))
            if owner is not None:
                self._record.remove()
            self._record.create(orjson.dumps(kept._asdict()))
            self.check()
        except PermissionError as error:
            logger.warning(
                f"{self._record.place} cannot be written ({retrying.failure_line(error)}), so "
                f"nothing shows other runs that {self._folder.resolve_paths('')} belongs to this "
                "run: start no other run into it."
            )

    def _refusal(self, owner: OutputOwner) -> OutputMismatch:
        where = self._folder.resolve_paths("")
        return OutputMismatch(
            f"{where} belongs to another run, with checkpoints in {owner.home} (host "
            f"{owner.host}): both runs would write files that output_filename {self._template!r} "
            "names. Nothing was written. Choose another output folder for this run. If "
            "the other run is no more, or its output was moved away, remove its files there, and "
            f"the file that names it, {shlex.quote(self._record.place)}; then run again."
        )


def owners_of(folder: DataFolder) -> list[OutputOwner]:
    """Returns the owners of a folder, one for each template that has a record.

    Raises OSError.
    """
    pattern = folder.fs._strip_protocol(_record(folder, f"{layout.OWNER}*").place)
    with retrying.file_system_call():
        names = folder.fs.glob(pattern)
    records = (_record(folder, layout.OWNER + name.rpartition(layout.OWNER)[2]) for name in names)
    return [*filter(None, (record.read() for record in records))]


# where the record is -----------------------------------------------------------------------------


def _record(folder: DataFolder, name: str) -> _OwnerRecord:
    if folder.is_local():
        place = Path(folder.resolve_paths("")).resolve()
        return _LocalRecord(place.with_name(f".{place.name}.{name}"))
    hub = HubFolder.of(folder)
    if hub is None:
        root, slash, path = folder.path.rstrip("/").partition("/")  # a bucket, or nothing
        place = folder.fs.unstrip_protocol(_beside(root + slash, path, name))
        return _StoredRecord(str(place), folder.fs.storage_options)
    path = _beside("", hub.path, name)
    if hub.is_bucket:
        return _StoredRecord(f"hf://buckets/{hub.repo}/{path}", folder.fs.storage_options)
    return _HubRecord(hub, path)


def _beside(root: str, path: str, name: str) -> str:
    """Returns the path beside the root; a bucket's or repository's root has none."""
    parent, last = posixpath.split(path)
    if last:
        last = f".{last}"
    return posixpath.join(root, parent, f"{last}.{name}")


class _OwnerRecord:
    place: str

    def read(self) -> OutputOwner | None:
        data = self.content()
        if data is None:
            return None
        try:
            return OutputOwner(**orjson.loads(data))
        except (orjson.JSONDecodeError, TypeError):
            return OutputOwner("(unknown: the record is damaged)", "", "damaged", "")

    def create(self, data: bytes) -> None:
        """Writes the file, unless there is one. Raises OSError."""
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def content(self) -> bytes | None:
        raise NotImplementedError


class _LocalRecord(_OwnerRecord):
    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)

    def content(self) -> bytes | None:
        return content_of(self._path)

    def create(self, data: bytes) -> None:
        folder = self._path.parent
        files.disk.make_dirs(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        files.keep_first(self._path, data)
        files.disk.sync_dir(folder)

    def remove(self) -> None:
        files.disk.remove(self._path)


class _StoredRecord(_OwnerRecord):
    def __init__(self, place: str, options: Mapping[str, object]) -> None:
        url, _, self._name = place.rpartition("/")
        self._store = ObjectStore(url, options=options)
        self.place = place

    def content(self) -> bytes | None:
        return self._store.read(self._name, _MOST_BYTES)

    def create(self, data: bytes) -> None:
        self._store.create(self._name, data)

    def remove(self) -> None:
        self._store.delete(self._name)


class _HubRecord(_OwnerRecord):
    """Each commit names its parent, so of two runs only one makes the next commit."""

    def __init__(self, hub: HubFolder, path: str) -> None:
        self._hub = replace(hub, path="")
        self._path = path
        self.place = f"{self._hub.url}/{path}"

    def content(self) -> bytes | None:
        try:
            found = self._hub.look_up([self._path])
        except OSError as error:
            if is_missing_repository(error):
                return None
            raise
        if not found:
            return None
        return b"".join(self._hub.blocks(self._path, _MOST_BYTES))

    def create(self, data: bytes) -> None:
        from huggingface_hub import CommitOperationAdd

        add = [CommitOperationAdd(self._path, data)]
        self._change(False, partial(self._hub.commit, add, "Note the run that writes here"))

    def remove(self) -> None:
        self._change(
            True, partial(self._hub.remove, [self._path], "Remove the note of a run that is gone")
        )

    def _change(self, is_there: bool, commit: Callable[..., None]) -> None:
        head = self._hub.head()
        if bool(self._hub.look_up([self._path], head)) != is_there:
            return
        try:
            commit(head=head)
        except OSError as error:
            status = retrying.http_status(error)
            if status == 429 and not is_there:  # each commit of files compares, too
                raise PermissionError(str(error)) from error
            if status != 412:  # another rank or run was first
                raise
