"""Compares the files in an output folder with the files that a checkpoint's commits name.

Names, sizes and stamps (time of change and inode, or ETag) are compared, and on the hub the hashes
of its listings. Only files whose stamp differs from their commit are read.

One listing finds the files of a template, and their sizes. Locally, only folders are read in which
a file of the template may be. Object stores that can list by prefix list the names of one rank. On
the hub, the common folder of all names is listed.
"""

import hashlib
import inspect
import os
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.commits import OutputFile, stamp_of
from datatrove_ckpt.checkpoint.publish_intents import PublishIntents
from datatrove_ckpt.checkpoint.rank_summary import Include, RankSummary, describe_chunk, read_rank
from datatrove_ckpt.common.retrying import RetryPolicy, file_system_call
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.output.file_names import (
    STAGING,
    fields_of_documents,
    plain,
)
from datatrove_ckpt.output.hub import HubFile, HubFolder, is_missing_repository
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls

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
        touched: committed files whose stamp differs from their commit.
        altered: committed files whose content differs from their commit.
        by_rank: files that the template may have named, and no commit names, each with the folder
            of its retry or "".
        hub_files: the hub's entries; empty elsewhere.
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
    """Lists the existing files of ``committed``, by their plain paths, and files that the template
    may have named.

    Args:
        rank: the rank whose other files are listed; None: all ranks.
        with_others: whether to list other files. Else the hub needs one request for 500 names.
    """
    template = writer.output_filename
    placeholder = "\0"
    values = dict.fromkeys(template.get_identifiers(), placeholder)
    if rank is not None:
        values["rank"] = f"{rank:05d}"
    # The common start of all names. Folders below may be parts of the names.
    head, _, after = template.substitute(values).partition(placeholder)
    everywhere = "/" in after or bool(fields_of_documents(template))
    base, start = posixpath.split(head)
    if base:
        head = start if plain(base) == "." else f"{plain(base)}/{start}"
    if writer.max_file_size > 0:  # a number stands before each name
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
        PublicationStopped: the calls were stopped.
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
    """Lists the committed files of a folder, and at least the other files whose names start with
    ``head``. Raises OSError.

    Args:
        everywhere: whether to list subfolders.
        without: a local folder that is not listed.
    """
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
            # Files of an earlier template.
            if any(name not in remote and not name.startswith(head) for name in committed):
                remote |= _find(folder, "")
        for name, info in remote.items():
            listing.note(name, info.get("size"), [remote_stamp(info)], committed.get(name))
    return listing


# Names of file systems for a value that changes with a file, the most reliable first.
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
    """Returns the stamp of a remote file (see ``OutputFile``)."""
    return stamp_of(next((str(info[tag]) for tag in _TAGS if info.get(tag)), ""))


def local_stamps(status: os.stat_result) -> list[int]:
    """Returns the stamp of a local file, and its stamp in commits of earlier releases, which had
    the time that a user can put back.
    """
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
    return str(digest.hexdigest())


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
                    with suppress(FileNotFoundError):  # removed meanwhile
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
    """Returns the kind and the description of a file's problem.

    Args:
        size: current size in bytes; None: the file does not exist.
    """
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: it has the committed size and another content"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


def other_content(location: str, names: Sequence[str]) -> OutputMismatch:
    """Returns the refusal to replace files that this rank has not published."""
    return OutputMismatch(
        f"{location} has other content, which this task has not published, under these names: "
        f"{first_names(names)}. Nothing was overwritten. Probably another run writes to the same "
        "folder with the same output_filename. Stop one of the runs, and start it anew with "
        "folders of its own. The other run continues with the same command, once files that are "
        "not its own are deleted from the folder. If there is no other run (a file was copied "
        "there, or the checkpoint is older than the output), move that content out of the folder, "
        "and run the same command again."
    )


STRAY_ADVICE = (
    "Documents may be in the output twice. Move such files out of the output folder, or delete "
    "them if nothing else needs them"
)
"""Advice for files of a template that no commit names."""


@dataclass(slots=True)
class CommittedFile(OutputFile):
    """A file of a commit, with its plain path. It has no hash, because a job may have millions of
    files.

    Attributes:
        root: folder of the retry that wrote the file, or "".
    """

    root: str = ""
    rank: int = 0
    chunk_index: int = 0

    @property
    def place(self) -> str:
        return describe_chunk(self.root, self.rank, self.chunk_index)


class RankCommits:
    """Reads the output files that the commits of a rank, and of its retries, name. Raises
    CheckpointError.

    Args:
        retries: ``retry_folders(root)``; None: list them.
        read: ``read_rank``, or the method of the rank's lease.

    Attributes:
        unfinished: root and index of the chunks with a journal: their output may exist, and is
            written again.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        retries: Iterable[Path] | None = None,
        read: Callable[[Path, Include], RankSummary] = read_rank,
    ) -> None:
        self.rank = rank
        self.files: list[CommittedFile] = []
        self.has_run = False
        self.is_finished = False
        self.unfinished: set[tuple[str, int]] = set()
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
    """Whether any rank has committed a chunk."""
    logs = root.glob(f"*/{layout.COMMITS}")
    return any(log.stat().st_size for log in logs)


def first_names(names: Sequence[str], max_names: int = 3) -> str:
    texts = list(names[:max_names])
    if len(names) > max_names:
        texts.append(f"and {len(names) - max_names} more")
    return "; ".join(texts)
