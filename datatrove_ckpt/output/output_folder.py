"""OutputFolder checks to which run an output folder belongs, and which files are in it.

A record beside the folder names the run to which the folder belongs (``OutputOwnership``). In the
folder, the template and the rank in a file's name show which rank may have written the file. The
file belongs to this rank if a commit names it; until the rank is complete also if an intent to
publish names it, or the chunk in its name is not committed yet. All other files with the rank's
names are refused: when a rank starts, resumes and is complete, and before a job. Missing and
changed committed files are also refused.

Names, sizes and stamps (time of change and inode, or ETag) are compared with those of the commits,
and on the hub the hashes of its listings. Files are read only if their stamp differs.

The record of the owner, one run for each ``output_filename``, is made before the first request, so
that only one of several runs succeeds: by a link on a disk, a conditional PUT on S3 and Google
Cloud Storage, a commit with its parent on the hub.

The record is not in the folder, because datatrove's readers read every file there as data. In the
root of a bucket or repository, it is a hidden file, which other readers skip.

A record of another run refuses this run until a person removes the record, except for a removed run
whose checkpoints were where this run has its checkpoints.

A record identifies a run by its mirror, or by its ``checkpoints_local_dir`` and its identity, as of
its first start. The file ``home`` in ``checkpoints_local_dir`` holds them, in case the folder is
moved or copied, or the settings change.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import posixpath
import secrets
import shlex
import socket
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import content_of, explained
from datatrove_ckpt.checkpoint.commits import OutputFile, read_commits, stamp_of
from datatrove_ckpt.checkpoint.job_file import recorded_output
from datatrove_ckpt.checkpoint.publish_intents import PublishIntents
from datatrove_ckpt.checkpoint.rank_summary import Include, RankSummary, describe_chunk, read_rank
from datatrove_ckpt.common.formatting import plural, repair_command
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.retrying import RetryPolicy, failure_line, file_system_call, http_status
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.output.file_names import (
    STAGING,
    fields_of_documents,
    output_pattern,
    plain,
    rank_and_chunk,
    stem,
)
from datatrove_ckpt.output.hub import HubFile, HubFolder, is_missing_repository
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls, check_access
from datatrove_ckpt.output.writer_checks import stands_elsewhere

_MAX_BYTES = 1 << 20


class OutputOwner(NamedTuple):
    """A run in the record of an output folder.

    Attributes:
        home: mirror of the run, or its ``checkpoints_local_dir``, as of its first start.
        run: hash of its identity at that time.
        key: random text, by which a later run with the same ``home`` differs; "": unknown.
        replaces: key of the removed run with the same ``home``, if its record existed when this run
            began.
    """

    home: str
    run: str
    key: str
    host: str
    replaces: str = ""


class RunOrigin(NamedTuple):
    """The origin by which a record identifies a run. ``run``: hash of its identity; None: any."""

    root: Path
    mirror: str | None
    run: str | None = None

    @property
    def file(self) -> Path:
        return self.root / layout.HOME

    @property
    def recorded(self) -> OutputOwner | None:
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
        if self.file.exists() and self.recorded is None:
            files.disk.remove(self.file)
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

    def check(self) -> OutputOwner | None:
        """Returns the record of this run, or of a removed run that it may replace; None without
        one.

        Raises:
            OutputMismatch: another run owns the folder.
            OSError: the record cannot be read.
        """
        owner = self._record.read()
        origin = self._origin
        if owner is None or origin.owns(owner) or origin.is_gone(owner, self._is_unused):
            return owner
        raise self._refusal(owner)

    def claim(self) -> None:
        """Makes this run the owner, unless the folder has another. A second call only compares.

        A run without checkpoints cannot own a folder.
        """
        if self._origin.run is None:
            return
        try:
            owner = self.check()
            origin = self._origin
            if owner is not None and origin.owns(owner):
                origin.record(owner)
                return
            # All files belong to the owner, unless a rank of this run has replaced the record.
            if (
                owner is not None
                and not self._is_unused()
                and origin.mirror is None
                and origin.recorded is None
                and self._record.read() == owner
            ):
                raise self._refusal(owner)
            replaces = "" if owner is None else owner.key
            recorded = origin.record(origin.new_record(secrets.token_hex(8), replaces))
            if owner is not None:
                self._record.remove()
            self._record.create(orjson.dumps(recorded._asdict()))
            self.check()
        except PermissionError as error:
            logger.warning(
                f"{self._record.place} cannot be written ({failure_line(error)}), so other runs "
                f"do not see that {self._folder.resolve_paths('')} belongs to this run: start no "
                "other into it."
            )

    def _refusal(self, owner: OutputOwner) -> OutputMismatch:
        location = self._folder.resolve_paths("")
        advice = ""
        if owner.home == self._origin.place:
            advice = (
                f"If it is this run, whose file {self._origin.file} is lost, copy "
                f"{shlex.quote(self._record.place)} there, and run again. Else: "
            )
        return OutputMismatch(
            f"{location} belongs to another run, with checkpoints in {owner.home} (host "
            f"{owner.host}): both write {self._template!r}. {advice}Choose another output "
            "folder. If the other run is no more, remove its files there, and "
            f"{shlex.quote(self._record.place)}; then run again."
        )


def owners_of(folder: DataFolder) -> list[OutputOwner]:
    pattern = folder.fs._strip_protocol(_record(folder, f"{layout.OWNER}*").place)
    with file_system_call():
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
        root, slash, path = folder.path.rstrip("/").partition("/")
        location = folder.fs.unstrip_protocol(_beside(root + slash, path, name))
        return _StoredRecord(str(location), folder.fs.storage_options)
    path = _beside("", hub.path, name)
    if hub.is_bucket:
        return _StoredRecord(f"hf://buckets/{hub.repo}/{path}", folder.fs.storage_options)
    return _HubRecord(hub, path)


def _beside(root: str, path: str, name: str) -> str:
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
            status = http_status(error)
            if status == 429 and not is_there:  # each commit of files also compares
                raise PermissionError(str(error)) from error
            if status != 412:
                raise


Info = Mapping[str, Any]
"""The attributes of a file, from a file system of fsspec."""


_LIST_SECONDS = 600.0

LAG_LOOKS = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further lookup of files that the hub does not show yet: its listing may lag
behind its newest commits.
"""


@dataclass
class OutputListing:
    """The files in an output folder.

    Attributes:
        sizes: size in bytes by path; None: the store does not return a size.
        touched: committed files with another stamp.
        altered: committed files with other content.
        by_rank: files that the template may have named, and no commit names, each with the folder
            of its retry or "".
    """

    sizes: dict[str, int | None] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)
    by_rank: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    hub_files: dict[str, HubFile] = field(default_factory=dict)

    def show(self, files: Mapping[str, HubFile]) -> None:
        self.hub_files |= files
        self.sizes |= {name: file.size for name, file in files.items()}

    def note(
        self, name: str, size: int | None, stamps: Sequence[int], file: OutputFile | None
    ) -> None:
        if file is not None:
            name = file.path
            if file.stamp not in (0, *stamps) and file.size == size:
                self.touched.add(plain(name))
        self.sizes[name] = size

    def size(self, file: OutputFile) -> int | None:
        return self.sizes.get(plain(file.path))

    def is_right(self, file: OutputFile) -> bool:
        name = plain(file.path)
        if name in self.altered:
            return False
        if name in self.hub_files:
            return self.hub_files[name].holds(file.size, file.hub_hash)
        return name in self.sizes and self.sizes[name] in (file.size, None)


def list_output(
    writer: DiskWriter,
    committed: Mapping[str, OutputFile],
    rank: int | None = None,
    with_others: bool = True,
) -> OutputListing:
    """Lists the existing ``committed`` files, and files that the template may have named.

    Args:
        rank: the rank whose other files are listed; None: all ranks.
        with_others: whether to list other files. Else the hub needs one request for 500 names.
    """
    template = writer.output_filename
    placeholder = "\0"
    values = dict.fromkeys(template.get_identifiers(), placeholder)
    if rank is not None:
        values["rank"] = f"{rank:05d}"
    # Folders below may be parts of the names.
    head, _, after = template.substitute(values).partition(placeholder)
    everywhere = "/" in after or bool(fields_of_documents(template))
    base, start = posixpath.split(head)
    if base:
        head = start if plain(base) == "." else f"{plain(base)}/{start}"
    if writer.max_file_size > 0:
        head = posixpath.join(posixpath.dirname(head), "")
    try:
        return list_files(writer.output_folder, committed, head, everywhere, with_others, STAGING)
    except OSError as error:
        is_made = getattr(writer, "private", None) is not None  # a run makes a missing repository
        if committed or not is_made or not is_missing_repository(error):
            raise
        return OutputListing()


def listed(
    calls: InterruptibleCalls,
    look: Callable[[], OutputListing],
    files: Iterable[OutputFile],
    policy: RetryPolicy | None = None,
) -> OutputListing:
    """Lists a remote folder, and on the hub looks up missing ``files`` again.

    Raises:
        OutputFailed: the folder cannot be listed.
    """
    listing = calls.retry("cannot be listed", look, policy, _LIST_SECONDS)
    hub = calls.hub
    if hub is None:
        return listing
    for seconds in LAG_LOOKS:
        files = [file for file in files if not listing.is_right(file)]
        if not files:
            break
        calls.sleep(seconds)
        newest = partial(hub.newest, [plain(file.path) for file in files])
        listing.show(calls.retry("cannot be listed", newest, policy, _LIST_SECONDS))
    return listing


def list_files(
    folder: DataFolder,
    committed: Mapping[str, OutputFile],
    head: str = "",
    everywhere: bool = True,
    with_others: bool = True,
    without: str = "",
) -> OutputListing:
    """Lists committed files, and at least the others whose names start with ``head``."""
    listing = OutputListing()
    hub = HubFolder.of(folder)
    if folder.is_local():
        root = Path(folder.resolve_paths(""))
        for name, status in _scan(root, head, everywhere, without):
            listing.note(name, status.st_size, local_stamps(status), committed.get(name))
        # Files behind a link, or of an earlier template.
        for name in [name for name in committed if name not in listing.sizes]:
            with suppress(FileNotFoundError, NotADirectoryError):
                status = (root / name).stat()
                listing.note(name, status.st_size, local_stamps(status), committed[name])
    elif hub is not None:
        base = posixpath.dirname(head)
        with file_system_call():
            if with_others:
                for name, file in hub.below(base).files().items():
                    listing.hub_files[posixpath.join(base, name)] = file
            missing = [name for name in committed if name not in listing.hub_files]
            listing.hub_files |= hub.look_up(missing)
        for name, file in listing.hub_files.items():
            listing.note(name, file.size, [file.stamp], committed.get(name))
    else:
        with file_system_call():
            folder.invalidate_cache()
            remote = _find(folder, head)
            if any(name not in remote and not name.startswith(head) for name in committed):
                remote |= _find(folder, "")
        for name, info in remote.items():
            listing.note(name, info.get("size"), [remote_stamp(info)], committed.get(name))
    return listing


_TAGS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)


def remote_stamp(info: Info) -> int:
    return stamp_of(next((str(info[tag]) for tag in _TAGS if info.get(tag)), ""))


def local_stamps(status: os.stat_result) -> list[int]:
    """Returns the stamps of this and of earlier releases, whose time a user can put back."""
    changed = stamp_of(f"changed {status.st_ctime_ns}:{status.st_ino}")
    return [changed, stamp_of(f"{status.st_mtime_ns}:{status.st_ino}")]


def content_hash(folder: DataFolder, path: str) -> str:
    hub = HubFolder.of(folder)
    if hub is None or hub.is_bucket:
        options = (
            {} if hub is None else {"block_size": 0}
        )  # else the size of an old listing is used
        with folder.open(path, "rb", **options) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    digest = xxhash.xxh3_128()
    for block in hub.blocks(path, 1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _scan(
    root: Path, head: str, everywhere: bool, without: str
) -> Iterator[tuple[str, os.stat_result]]:
    """Yields files whose names start with ``head``.

    Other files cost no stat: a shared folder may hold a million files, and a stat may be a request.
    """
    base, start = posixpath.split(head)
    waiting = [base]
    while waiting:
        name = waiting.pop()
        try:
            entries = os.scandir(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if name == base:
                raise
            continue
        with entries:
            for entry in entries:  # no list: a million entries take 200 MB
                if name == base and not entry.name.startswith(start):
                    continue
                path = posixpath.join(name, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if everywhere and path != without:
                        waiting.append(path)
                elif entry.is_file():
                    with suppress(FileNotFoundError):
                        yield path, entry.stat()


def _find(folder: DataFolder, head: str) -> dict[str, Info]:
    base, start = posixpath.split(head)
    options = {}
    if start and "prefix" in inspect.signature(folder.fs.find).parameters:
        options["prefix"] = start
    try:
        listed = folder.find(base, detail=True, **options)
    except FileNotFoundError:
        return {}
    return {path: info for path, info in listed.items() if info["type"] != "directory"}


def file_problem(file: OutputFile, size: int | None) -> tuple[str, str]:
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: it has another content"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


def other_content(location: str, names: Sequence[str]) -> OutputMismatch:
    return OutputMismatch(
        f"{location} has files that this task has not published: {first_names(names)}. If "
        "another run writes there, start one over in other folders. Move what is not this run's "
        "away, and run again."
    )


STRAY_ADVICE = (
    "Documents may be in the output twice. Move such files out of the folder, or delete them if "
    "nothing else needs them"
)
"""Advice for files of a template that no commit names."""


@dataclass(slots=True)
class CommittedFile(OutputFile):
    """A file of a commit, without its hash, because a job may have millions."""

    root: str = ""
    rank: int = 0
    chunk_index: int = 0

    @property
    def place(self) -> str:
        return describe_chunk(self.root, self.rank, self.chunk_index)


class RankCommits:
    """Reads the files that the commits of a rank and its retries name. Raises CheckpointError.

    Attributes:
        unfinished: root and index of chunks with a journal, whose output is written again.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        retries: Iterable[Path] | None = None,
        read: Callable[[Path, Include], RankSummary] = read_rank,
    ) -> None:
        self.rank = rank
        self.files = []
        self.has_run = False
        self.is_finished = False
        self.unfinished = set()
        if retries is None:
            retries = layout.retry_folders(root)
        for checkpoint in (root, *retries):
            folder = layout.rank_folder(checkpoint, rank)
            if not folder.is_dir():
                continue
            summary = read(folder, Include.COMMITS)
            if summary.damage is not None:
                raise summary.damage
            for commit in summary.commits.values():
                chunk = (summary.root, rank, commit.chunk_index)
                for file in commit.files:
                    committed = CommittedFile(
                        plain(file.path), file.size, "", file.hub_hash, file.stamp, 0, *chunk
                    )
                    self.files.append(committed)
            if not summary.root:
                self.has_run = bool(summary.run)
                self.is_finished = summary.is_finished
            self.unfinished |= {(summary.root, index) for index in summary.open_chunks}


def published_names(root: Path, rank: int) -> set[str] | None:
    """Returns the names of all files that a rank and its retries may have published; None if they
    are not all known.

    Commits are read after the intents, so the rank may be running.
    """
    folders = layout.folders_of(root, rank)
    intents = [PublishIntents(folder) for folder in folders if folder.is_dir()]
    if not all(intent.is_kept for intent in intents):
        return None
    committed = {plain(file.path) for file in RankCommits(root, rank).files}
    return committed.union(*(intent.names for intent in intents))


def has_commits(root: Path) -> bool:
    logs = root.glob(f"*/{layout.COMMITS}")
    return any(log.stat().st_size for log in logs)


def first_names(names: Sequence[str], max_names: int = 3) -> str:
    texts = list(names[:max_names])
    if len(names) > max_names:
        texts.append(f"and {len(names) - max_names} more")
    return "; ".join(texts)


class OutputFolder:
    """The output folder of one step. Each refusal is an OutputMismatch.

    Args:
        root, mirror, run: see ``RunOrigin``.
        logging_dir: the executor's ``logging_dir``, for the repair command; None: no marker was
            written.
    """

    def __init__(
        self,
        writer: DiskWriter,
        root: Path,
        mirror: str | None = None,
        logging_dir: str | None = None,
        run: str | None = None,
    ) -> None:
        self.writer = writer
        self.root = root
        self.hub = HubFolder.of(writer.output_folder)
        self.location = str(writer.output_folder.resolve_paths(""))
        self.calls = InterruptibleCalls(self.location, self.hub)
        """Runs all calls and pauses for the folder and its target. ``ChunkOutput.stop`` ends them.
        """
        self._template = writer.output_filename.template
        self._owner = OutputOwnership(
            writer.output_folder, self._template, RunOrigin(root, mirror, run), self._is_unused
        )
        self._mirror = mirror
        self._logging_dir = logging_dir
        self._any_writer = output_pattern(self._template, any_writer=True)
        self.ours = output_pattern(self._template)
        """The names that the present ``output_filename`` may give."""

    def check_access(self) -> None:
        if self.hub is not None:
            private = None
            if not has_commits(self.root):  # else a new repository would lack committed files
                private = getattr(self.writer, "private", None)
            check_access(self.hub, private, self.calls)

    def claim(self) -> None:
        if self.writer.output_folder.is_local():
            with explained("read", Path(self.location).absolute()):
                self._owner.claim()
        else:
            self.calls.retry("cannot be claimed for this run", self._owner.claim)

    def refuse_existing(self, rank: int, retry: str) -> None:
        """Claims the folder for the first start of a rank.

        Raises:
            OutputMismatch: files exist that this rank would write.
        """
        self.check_access()
        listing = self.look(self.by_name([RankCommits(self.root, rank)]), rank)
        self.refuse_foreign(rank, listing, root=retry)
        self.claim()

    def check_moved(self) -> None:
        """Checks names and sizes of committed files, before a job first starts with another output
        folder.

        Raises:
            OutputMismatch: committed files are not in this folder, or it belongs to another run.
        """
        ranks = layout.rank_numbers(self.root)
        committed = self.by_name(RankCommits(self.root, rank) for rank in ranks)
        if committed:
            self.refuse_lost(committed, self.look(committed, contents=False))

    def by_name(self, commits: Iterable[RankCommits]) -> dict[str, CommittedFile]:
        """Refuses two commits that name one file."""
        committed: dict[str, CommittedFile] = {}
        for file in chain.from_iterable(rank_commits.files for rank_commits in commits):
            other = committed.setdefault(file.path, file)
            if other is not file:
                raise OutputMismatch(
                    f"{self.location}: {file.path} was written by {other.place} and by "
                    f"{file.place}. One overwrote the other. Choose an output_filename (now "
                    f"{self._template!r}) that begins with ${{rank}}/${{chunk_index}}/.",
                    starts_over="anew",
                )
        return committed

    def look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None = None,
        with_others: bool = True,
        contents: bool = True,
        policy: RetryPolicy | None = None,
    ) -> OutputListing:
        """Refuses another run's folder. ``contents``: reads files whose stamp has changed."""
        look = partial(self._look, committed, rank, with_others, contents)
        if self.writer.output_folder.is_local():
            with explained("read", Path(self.location).absolute()):
                return look()
        return listed(self.calls, look, committed.values(), policy)

    def _look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None,
        with_others: bool,
        contents: bool,
    ) -> OutputListing:
        self._owner.check()
        listing = list_output(self.writer, committed, rank, with_others)
        if contents:
            commits_of = cache(read_commits)
            for name in listing.touched:
                chunk = committed[name]
                folder = layout.rank_folder(self.root / chunk.root, chunk.rank)
                commit = commits_of(folder / layout.COMMITS)[chunk.chunk_index]
                expected = next(file.xxh128 for file in commit.files if plain(file.path) == name)
                actual = ""
                with suppress(FileNotFoundError), file_system_call():
                    actual = content_hash(self.writer.output_folder, name)
                if actual != expected:
                    listing.altered.add(name)
        checkpoint = None
        if self.root.is_relative_to(self.location):
            checkpoint = f"{self.root.relative_to(self.location).as_posix()}/"
        for name in listing.sizes:
            if name in committed:
                continue
            match = self._any_writer.fullmatch(name)
            if match is not None and (checkpoint is None or not name.startswith(checkpoint)):
                (root, number), _ = rank_and_chunk(match)
                listing.by_rank[number].append((root, name))
        return listing

    def _is_unused(self) -> bool:
        return not any(
            self._any_writer.fullmatch(name) for name in list_output(self.writer, {}).sizes
        )

    def refuse_lost(self, committed: Mapping[str, CommittedFile], listing: OutputListing) -> None:
        wrong = [file for file in committed.values() if not listing.is_right(file)]
        if not wrong:
            return
        first = wrong[0]
        recorded = recorded_output(self.root)
        if recorded and stands_elsewhere(recorded, self.writer.output_folder):
            raise OutputMismatch(
                f"{self.location} lacks committed files, such as {first.path} ({first.place}), "
                f"which were written to {recorded}. Set the output folder back to that, or copy "
                "its files, and run again."
            )
        problems = [f"{file.path} {file_problem(file, listing.size(file))[1]}" for file in wrong]
        moved = ""
        output = None
        if not listing.sizes:
            moved = "The folder is empty. If it was moved, set the output folder to the new one. "
            output = self.location  # the folder may be missing, and then repair needs its name
        repair = repair_command(str(self.root), logging_dir=self._logging_dir, output=output)
        retry = ""
        if any(file.root for file in wrong):
            retry = ", and with retry_dead_letters when it is done"
        raise OutputMismatch(
            f"{self.location}: output files differ from their commits ({len(wrong)} of "
            f"{len(committed)}): {first_names(problems)}. {moved}Put them back, or have them "
            f"made again: {repair}, then run again{retry}. To read all: datatrove-ckpt verify "
            f"{shlex.quote(str(self.root))} --full"
        )

    def refuse_foreign(
        self,
        rank: int,
        listing: OutputListing,
        commits: RankCommits | None = None,
        is_complete: bool = False,
        root: str = "",
    ) -> None:
        """Refuses foreign uncommitted files.

        Args:
            commits: None: at its first start no file is the rank's own.
            root: folder of a retry that starts; "": the rank, and all its retries.
        """
        own_names: Container[str] = ()
        if commits is not None and listing.by_rank[rank]:
            own_names = self._own(commits, listing, is_complete)
        names = sorted(
            name
            for retry, name in listing.by_rank[rank]
            if root in ("", retry) and name not in own_names
        )
        if not names:
            return
        verify = shlex.join(["datatrove-ckpt", "verify", str(self.root)])
        mirror = ""
        if self._mirror:  # without it, a folder that another node has continued is used as it is
            mirror = f" Keep them until the mirror {self._mirror} can be read."
        raise OutputMismatch(
            f"{self.location} holds {plural(len(names), 'file')} of output_filename "
            f"{self._template!r} that no commit of task {rank} names: {first_names(names, 20)}. "
            f"{STRAY_ADVICE} ({verify} lists all), choose another output folder, or bring the "
            f"checkpoint back; and run again.{mirror} To continue a run of datatrove's own, choose "
            "other folders, and set finished_from to the old ones."
        )

    def _own(
        self, commits: RankCommits, listing: OutputListing, is_complete: bool
    ) -> Container[str]:
        """Returns the uncommitted files that a rank may have published: the files of its intents;
        for a complete rank, and without intents, the files with its names.
        """
        if not is_complete:
            published = published_names(self.root, commits.rank)
            if published is not None:
                return published
        own_names = []
        for _, name in listing.by_rank[commits.rank]:
            match = self.ours.fullmatch(name)
            if match is None:
                continue
            (root, _), chunk_index = rank_and_chunk(match)
            # The rank, or a retry of a complete rank, has yet to commit these.
            if not is_complete or (root, chunk_index) in commits.unfinished:
                own_names.append(name)
        return own_names
