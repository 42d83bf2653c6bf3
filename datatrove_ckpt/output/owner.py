"""Records the owner of an output folder, one run for each ``output_filename``, in a small file
beside the folder (the record).

The record is made before the first request, so that only one of several runs succeeds: by a link on
a disk, a conditional PUT on S3 and Google Cloud Storage, a commit with its parent on the hub. On
other stores and in buckets of the hub, the record is written, and read again a second later and at
the first publication: until then, two runs that start within that second may both continue.

The record is not in the folder, because datatrove's readers read every file there as data. There is
nothing beside the root of a bucket or repository: there the record is a hidden file in the root,
which other readers skip. If it cannot be written, only ``OutputTarget.publish`` separates two runs.

A record of another run refuses this run until a person removes the record, except for a removed run
whose checkpoints were where this run has its checkpoints.

A record identifies a run by its mirror, or by its ``checkpoints_local_dir`` and its identity, as of
its first start. The file ``home`` in ``checkpoints_local_dir`` holds them, in case the folder is
moved or copied, or the settings change.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

_MAX_BYTES = 1 << 20


class OutputOwner(NamedTuple):
    """A run in the record of an output folder.

    Attributes:
        home: mirror of the run, or its ``checkpoints_local_dir``, as of its first start.
        run: hash of its identity at that time.
        key: random text, by which a later run with the same ``home`` differs; "": unknown.
        host: host that wrote the record.
        replaces: key of the removed run with the same ``home``, if its record existed when this run
            began.
    """

    home: str
    run: str
    key: str
    host: str
    replaces: str = ""


class RunOrigin(NamedTuple):
    """The origin by which an owner record identifies a run.

    Attributes:
        root: ``checkpoints_local_dir``.
        mirror: ``checkpoints_remote_dir``.
        run: hash of the run's identity; None: any hash.
    """

    root: Path
    mirror: str | None
    run: str | None = None

    @property
    def file(self) -> Path:
        return self.root / layout.HOME

    @property
    def recorded(self) -> OutputOwner | None:
        """Returns the record in ``home``; None if the file is missing or damaged."""
        return _parsed(content_of(self.file) or b"")

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
        recorded = self.recorded
        record = recorded or self.new_record()
        if record.key and record.key == owner.key:
            return True
        if record.home != owner.home:
            return False
        if self.mirror is not None or (recorded is not None and not recorded.key):
            return True  # a mirror belongs to one run
        # A node with its own disk began the run, perhaps at the same moment.
        is_same = record.run == owner.run or (recorded is None and self.run is None)
        return is_same and record.host != owner.host

    def is_gone(self, owner: OutputOwner, is_unused: Callable[[], bool]) -> bool:
        """Whether a record names an earlier run whose checkpoints were here, and were removed or
        moved.
        """
        recorded = self.recorded
        if recorded is not None:  # written by another rank, or before a kill; the record comes next
            return bool(owner.key) and recorded.replaces == owner.key
        if owner.home != str(self.root.absolute()):
            return False
        return owner.host == socket.gethostname() or is_unused()

    def record(self, owner: OutputOwner) -> OutputOwner:
        """Records the run in ``home``, unless another rank has, and returns the record."""
        if self.file.exists() and self.recorded is None:
            files.disk.remove(self.file)  # it is damaged
        if not self.file.exists():
            files.keep_first(self.file, orjson.dumps(owner._asdict()), files.PRIVATE_FILE)
        return self.recorded or owner


def _parsed(data: bytes) -> OutputOwner | None:
    try:
        return OutputOwner(**orjson.loads(data))
    except (orjson.JSONDecodeError, TypeError):
        return None


@dataclass(eq=False)
class OutputOwnership:
    """A run's claim on an output folder.

    Args:
        template: the writer's ``output_filename``. Templates that differ only in the ending have
            one owner.
        is_unused: returns whether the folder holds no file of the template. Then a removed run with
            the same ``home`` no longer owns the folder.
    """

    _folder: DataFolder
    _template: str
    _origin: RunOrigin
    _is_unused: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        template_hash = xxhash.xxh3_64_hexdigest(stem(self._template).encode())
        self._record = _record(self._folder, f"{layout.OWNER}{template_hash}")

    def check(self) -> bool:
        """Whether this run owns the folder; False if it may become the owner. Changes nothing.

        Raises:
            OutputMismatch: another run owns the folder.
            OSError: the record cannot be read.
        """
        return self._compare()[0]

    def _compare(self) -> tuple[bool, OutputOwner | None]:
        owner = self._record.read()
        if owner is None or self._origin.owns(owner):
            return owner is not None, owner
        if self._origin.is_gone(owner, self._is_unused):
            return False, owner
        raise self._refusal(owner)

    def claim(self) -> None:
        """Makes this run the owner, unless the folder has another. A second call only compares.

        A run without checkpoints cannot own a folder.

        Raises:
            OutputMismatch: another run owns the folder.
            OSError: the record can be neither read nor written.
        """
        if self._origin.run is None:
            return
        try:
            is_owned, owner = self._compare()
            if is_owned and owner is not None:
                self._origin.record(owner)
                return
            if owner is not None and not self._is_unused():
                # All files belong to the owner, unless a rank of this run has replaced the record.
                origin = self._origin
                if (
                    origin.mirror is None
                    and origin.recorded is None
                    and self._record.read() == owner
                ):
                    raise self._refusal(owner)
            replaces = "" if owner is None else owner.key
            recorded = self._origin.record(self._origin.new_record(secrets.token_hex(8), replaces))
            if owner is not None:
                self._record.remove()
            self._record.create(orjson.dumps(recorded._asdict()))
            self.check()
        except PermissionError as error:
            logger.warning(
                f"{self._record.place} cannot be written ({retrying.failure_line(error)}), so "
                f"nothing shows other runs that {self._folder.resolve_paths('')} belongs to this "
                "run: start no other run into it."
            )

    def _refusal(self, owner: OutputOwner) -> OutputMismatch:
        location = self._folder.resolve_paths("")
        advice = ""
        if owner.home == self._origin.place:
            advice = (
                f"If it is this very run, whose file {self._origin.file} is missing or damaged, "
                f"copy {shlex.quote(self._record.place)} there, and run again. Else: "
            )
        return OutputMismatch(
            f"{location} belongs to another run, with checkpoints in {owner.home} (host "
            f"{owner.host}): both runs would write files that output_filename {self._template!r} "
            f"names. Nothing was written. {advice}Choose another output folder for this run. If "
            "the other run is no more, or its output was moved away, remove its files there, and "
            f"the file that names it, {shlex.quote(self._record.place)}; then run again."
        )


def owners_of(folder: DataFolder) -> list[OutputOwner]:
    """Returns the owners of a folder, one for each template with a record. Raises OSError."""
    pattern = folder.fs._strip_protocol(_record(folder, f"{layout.OWNER}*").place)
    with retrying.file_system_call():
        names = folder.fs.glob(pattern)
    records = (_record(folder, layout.OWNER + name.rpartition(layout.OWNER)[2]) for name in names)
    return [*filter(None, (record.read() for record in records))]


# where the record is -----------------------------------------------------------------------------


def _record(folder: DataFolder, name: str) -> _OwnerRecord:
    if folder.is_local():
        location = Path(folder.resolve_paths("")).resolve()
        return _LocalRecord(location.with_name(f".{location.name}.{name}"))
    hub = HubFolder.of(folder)
    if hub is None:
        root, slash, path = folder.path.rstrip("/").partition("/")  # a bucket, or nothing
        location = folder.fs.unstrip_protocol(_beside(root + slash, path, name))
        return _StoredRecord(str(location), folder.fs.storage_options)
    path = _beside("", hub.path, name)
    if hub.is_bucket:
        return _StoredRecord(f"hf://buckets/{hub.repo}/{path}", folder.fs.storage_options)
    return _HubRecord(hub, path)


def _beside(root: str, path: str, name: str) -> str:
    """Returns the path of a record beside a folder, or in the root of a bucket or repository."""
    parent, last = posixpath.split(path)
    if last:
        last = f".{last}"
    return posixpath.join(root, parent, f"{last}.{name}")


class _OwnerRecord:
    place: str

    def read(self) -> OutputOwner | None:
        data = self.read_data()
        if data is None:
            return None
        return _parsed(data) or OutputOwner("(unknown: the record is damaged)", "", "damaged", "")

    def create(self, data: bytes) -> None:
        """Writes the record, unless it exists. Raises OSError."""
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def read_data(self) -> bytes | None:
        raise NotImplementedError


class _LocalRecord(_OwnerRecord):
    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)

    def read_data(self) -> bytes | None:
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

    def read_data(self) -> bytes | None:
        return self._store.read(self._name, _MAX_BYTES)

    def create(self, data: bytes) -> None:
        self._store.create(self._name, data)

    def remove(self) -> None:
        self._store.delete(self._name)


class _HubRecord(_OwnerRecord):
    """A record in a repository. Each commit names its parent, so only one of two runs succeeds."""

    def __init__(self, hub: HubFolder, path: str) -> None:
        self._hub = replace(hub, path="")
        self._path = path
        self.place = f"{self._hub.url}/{path}"

    def read_data(self) -> bytes | None:
        try:
            existing = self._hub.look_up([self._path])
        except OSError as error:
            if is_missing_repository(error):
                return None
            raise
        if not existing:
            return None
        return b"".join(self._hub.blocks(self._path, _MAX_BYTES))

    def create(self, data: bytes) -> None:
        from huggingface_hub import CommitOperationAdd

        add = [CommitOperationAdd(self._path, data)]
        self._change(False, partial(self._hub.commit, add, "Record the run that writes here"))

    def remove(self) -> None:
        self._change(
            True,
            partial(
                self._hub.remove, [self._path], "Remove the record of a run that no longer exists"
            ),
        )

    def _change(self, is_there: bool, commit: Callable[..., None]) -> None:
        head = self._hub.head()
        if bool(self._hub.look_up([self._path], head)) != is_there:
            return
        try:
            commit(head=head)
        except OSError as error:
            status = retrying.http_status(error)
            if status == 429 and not is_there:  # each commit of files also compares
                raise PermissionError(str(error)) from error
            if status != 412:  # another rank or run was first
                raise
