"""Compares an output folder with the checkpoints: each committed file is there, and no unknown
file.

Names, sizes and stamps (time of change and inode, or ETag) are compared, and on the hub the hashes
of its listings. Only files whose stamp differs from their commit are read.

Whose is a file? A record beside the folder names the run to which the folder belongs (``owner``).
In the folder, the template and the rank in a file's name show which rank may have written it. It is
that rank's own file if a commit names it, and, until the rank is complete, if an intent to publish
does, or the chunk in its name is not committed yet. Every other file of its name is refused: when a
rank starts, resumes and is complete, and before a job. Committed files that are missing, or have
another content, are refused likewise.

One listing finds the files of a template, and their sizes. Locally, only folders are read in which
a file of the template may be. Object stores that can list by prefix list the names of one rank. On
the hub, the common folder of all names is listed.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

import xxhash
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import OutputFile, read_commits, stamp_of
from datatrove_ckpt.checkpoint.identity import recorded_output
from datatrove_ckpt.checkpoint.intents import Intents
from datatrove_ckpt.checkpoint.layout import COMMITS, rank_folder, retry_folders
from datatrove_ckpt.checkpoint.ledger import RankLedger, Want, read_rank
from datatrove_ckpt.common.formatting import plural, repair_command
from datatrove_ckpt.common.retrying import file_system_call
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.output.folders import stands_elsewhere
from datatrove_ckpt.output.hub import HubFile, HubFolder, is_missing_repository
from datatrove_ckpt.output.hub_access import private_if_made
from datatrove_ckpt.output.names import (
    STAGING,
    fields_of_documents,
    output_pattern,
    plain,
    rank_and_chunk,
)
from datatrove_ckpt.output.owner import Homes, OutputOwnership

Info = Mapping[str, Any]
"""What a file system of fsspec tells of a file."""

_BLOCK = 1 << 20
_NUMBER = "000_"  # in front of the first file of a writer with max_file_size


@dataclass
class FoundFiles:
    """The files in an output folder.

    Attributes:
        sizes: in bytes, by path; None: the store does not return a size.
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

    def note(self, name: str, size: int | None, stamp: int, file: OutputFile | None) -> None:
        if file is not None:
            name = file.path
            if file.stamp not in (0, stamp) and file.size == size:
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
    others: bool = True,
) -> FoundFiles:
    """Lists the existing files of ``committed``, by their plain paths, and files that the template
    may have named.

    Args:
        rank: only look for other files of this rank.
        others: look for other files at all. Without them the hub needs one request for 500 names.
    """
    head, everywhere = _head(writer.output_filename, rank)
    numbered = writer.max_file_size > 0
    try:
        return list_files(
            writer.output_folder, committed, head, everywhere, numbered, others, STAGING
        )
    except OSError as error:
        if committed or private_if_made(writer) is None or not is_missing_repository(error):
            raise
        return FoundFiles()  # a run makes it


def list_files(
    folder: DataFolder,
    committed: Mapping[str, OutputFile],
    head: str = "",
    everywhere: bool = True,
    numbered: bool = False,
    others: bool = True,
    without: str = "",
) -> FoundFiles:
    """Lists a folder: the committed files, and at least the others whose names start with ``head``.
    Raises OSError.

    Args:
        everywhere: also those in the folders below that.
        numbered: a number stands before each name.
        without: a local folder that is left out.
    """
    found = FoundFiles()
    hub = HubFolder.of(folder)
    if folder.is_local():
        root = Path(folder.resolve_paths(""))
        for name, status in _scan(root, head, everywhere, without):
            found.note(name, status.st_size, local_stamp(status), committed.get(name))
        # These are behind a link, or of an earlier template.
        for name in [name for name in committed if name not in found.sizes]:
            with suppress(FileNotFoundError, NotADirectoryError):
                status = (root / name).stat()
                found.note(name, status.st_size, local_stamp(status), committed[name])
    elif hub is not None:
        found.hub_files = _hub_files(hub, posixpath.dirname(head), committed, others)
        for name, file in found.hub_files.items():
            found.note(name, file.size, file.stamp, committed.get(name))
    else:
        for name, info in _remote_files(folder, head, numbered, committed).items():
            found.note(name, info.get("size"), remote_stamp(info), committed.get(name))
    return found


def _hub_files(
    hub: HubFolder, base: str, committed: Collection[str], others: bool
) -> dict[str, HubFile]:
    """Returns the part of the folder with files of the template, and committed files elsewhere."""
    files: dict[str, HubFile] = {}
    with file_system_call():
        if others:
            files = {
                posixpath.join(base, name): file for name, file in hub.below(base).files().items()
            }
        return files | hub.look_up([name for name in committed if name not in files])


def _remote_files(
    folder: DataFolder, head: str, numbered: bool, committed: Collection[str]
) -> dict[str, Info]:
    with file_system_call():
        folder.invalidate_cache()
        remote = _find(folder, head, numbered)
        # These come from an earlier template, or have a number other than the first.
        if any(name not in remote and not name.startswith(head) for name in committed):
            remote |= _find(folder, "", numbered=False)
    return remote


# File systems' names for a value that changes with a file, the surest first.
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
    """See ``OutputFile``."""
    return stamp_of(next((str(info[tag]) for tag in _TAGS if info.get(tag)), ""))


def local_stamp(status: os.stat_result) -> int:
    return stamp_of(f"{status.st_mtime_ns}:{status.st_ino}")


def content_hash(folder: DataFolder, path: str) -> str:
    hub = HubFolder.of(folder)
    if hub is None or hub.is_bucket:
        options = {} if hub is None else {"block_size": 0}  # else an old listing has its size
        with folder.open(path, "rb", **options) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    content = xxhash.xxh3_128()
    for block in hub.blocks(path, _BLOCK):
        content.update(block)
    return str(content.hexdigest())


def _head(template: Template, rank: int | None) -> tuple[str, bool]:
    """Returns the common start of all names, and whether folders below are part of the names."""
    mark = "\0"
    values = dict.fromkeys(template.get_identifiers(), mark)
    if rank is not None:
        values["rank"] = f"{rank:05d}"
    head, _, rest = template.substitute(values).partition(mark)
    base = posixpath.dirname(head)
    if base:
        head = f"{plain(base)}/{posixpath.basename(head)}"
    return head, "/" in rest or bool(fields_of_documents(template))


def _scan(
    root: Path, head: str, everywhere: bool, without: str
) -> Iterator[tuple[str, os.stat_result]]:
    """Yields files whose names start with ``head``, perhaps after a number (max_file_size).

    Only these are examined: a shared folder may hold a million files, and each stat be a request.
    """
    base, start = posixpath.split(head)
    may_be_ours = re.compile(rf"(\d+_)?{re.escape(start)}").match
    waiting = [base]
    while waiting:
        name = waiting.pop()
        try:
            found = os.scandir(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if name == base:
                raise
            continue
        with found:
            for entry in found:  # no list: a million take 200 MB
                if name == base and not may_be_ours(entry.name):
                    continue
                path = posixpath.join(name, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if everywhere and path != without:
                        waiting.append(path)
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield path, entry.stat()


def _find(folder: DataFolder, head: str, numbered: bool) -> dict[str, Info]:
    base, start = posixpath.split(head)
    find = getattr(folder.fs, "_find", folder.fs.find)
    options = {}
    if start and "prefix" in inspect.signature(find).parameters:
        options["prefix"] = _NUMBER + start if numbered else start
    try:
        listed = folder.find(base, detail=True, **options)
    except FileNotFoundError:
        return {}
    return {path: info for path, info in listed.items() if info["type"] != "directory"}


_SHOWN = 3
_TO_DELETE = 20


def file_problem(file: OutputFile, size: int | None) -> tuple[str, str]:
    """Returns the kind and the description of a file's problem.

    Args:
        size: its size now, in bytes; None: it does not exist.
    """
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: it has the committed size and another content"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


def other_content(where: str, names: Sequence[str]) -> OutputMismatch:
    """Returns the refusal to replace files that this rank has not published."""
    return OutputMismatch(
        f"{where} has other content, which this task has not published, under these names: "
        f"{some(names)}. Nothing was overwritten. Probably another job writes to the same folder "
        "with the same output_filename. Stop one of the jobs, and start it anew with "
        "folders of its own. The other one goes on with the same command, once files that are "
        "not its own are deleted from the folder. If there is no other job (a file was copied "
        "there, or the checkpoint is older than the output), move that content out of the folder, "
        "and run the same command again."
    )


STRAY_ADVICE = (
    "Documents may be in the output twice. Move such files out of the output folder, or delete "
    "them if nothing else needs them"
)
"""What to do about files of a template that no commit names."""


@dataclass(slots=True)
class CommittedFile(OutputFile):
    """A file of a commit, with its plain path, without its hash, because a job may have millions.

    ``root``: the folder of the retry that wrote it, or "".
    """

    root: str = ""
    rank: int = 0
    chunk_index: int = 0

    @property
    def place(self) -> str:
        place = f"task {self.rank}, chunk {self.chunk_index}"
        return f"{self.root}, {place}" if self.root else place


class RankCommits:
    """What the checkpoint of a rank, and of its retries, record about output files. Raises
    CheckpointError.

    Args:
        retries: ``retry_folders(root)``; None: list them.
        read: ``read_rank``, or the method of the rank's lease.
        want: what else to read for ``seen``, which gets each ledger.

    Attributes:
        unfinished: root and index of the chunks with a journal: their output may be there, and is
            made again.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        retries: Iterable[Path] | None = None,
        read: Callable[[str, int, Path, Want], RankLedger] = read_rank,
        want: Want = Want.COMMITS,
        seen: Callable[[RankLedger], None] = lambda found: None,
    ) -> None:
        self.rank = rank
        self.folder = rank_folder(root, rank)
        self.files: list[CommittedFile] = []
        self.has_run = False
        self.is_finished = False
        self.unfinished: set[tuple[str, int]] = set()
        if retries is None:
            retries = retry_folders(root)
        names = {root: ""} | {retry: retry.name for retry in retries}
        for checkpoint, name in names.items():
            folder = rank_folder(checkpoint, rank)
            if folder.is_dir():
                found = read(name, rank, folder, want)
                self._add(found)
                seen(found)

    def _add(self, found: RankLedger) -> None:
        if found.damage is not None:
            raise found.damage
        for commit in found.commits.values():
            for file in commit.files:
                committed = CommittedFile(
                    plain(file.path),
                    file.size,
                    "",
                    file.hub_hash,
                    file.stamp,
                    root=found.root,
                    rank=self.rank,
                    chunk_index=commit.chunk_index,
                )
                self.files.append(committed)
        if not found.root:
            self.has_run = bool(found.run)
            self.is_finished = found.is_finished
        self.unfinished |= {(found.root, index) for index in found.open_chunks}


def published_names(root: Path, rank: int) -> set[str] | None:
    """Returns the names of all files that a rank and its retries may have published; None: a part
    of them is not known.

    Commits are read after the intents, so the rank may be at work.
    """
    folders = [rank_folder(one, rank) for one in (root, *retry_folders(root))]
    intents = [Intents(folder) for folder in folders if folder.is_dir()]
    if not all(one.is_kept for one in intents):
        return None
    committed = {plain(file.path) for file in RankCommits(root, rank).files}
    return committed.union(*(one.names for one in intents))


def has_commits(root: Path) -> bool:
    """Whether a task has committed a chunk."""
    logs = root.glob(f"*/{COMMITS}")
    return any(log.stat().st_size for log in logs)


def _recorded_folder(root: Path, ranks: Iterable[RankCommits]) -> str | None:
    return recorded_output(root)


class OutputCheck:
    """The checks of one step's output folder. Each refusal is an OutputMismatch.

    Args:
        run: see ``Homes``; ``root`` and ``mirror``, too.
        logging_dir: the executor's, for the command that repairs; None: no marker was written.
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
        self.owner = OutputOwnership(
            writer.output_folder, writer.output_filename.template, Homes(root, mirror, run)
        )
        self.where = str(writer.output_folder.resolve_paths(""))
        self._mirror = mirror
        self._logging_dir = logging_dir
        self._template = writer.output_filename.template
        self._any_writer = output_pattern(self._template, any_writer=True)
        self._ours = output_pattern(self._template)

    def by_name(self, commits: Iterable[RankCommits]) -> dict[str, CommittedFile]:
        """Returns the committed files by their paths. Refuses two commits that name one file."""
        committed: dict[str, CommittedFile] = {}
        for one in chain.from_iterable(rank_commits.files for rank_commits in commits):
            other = committed.setdefault(one.path, one)
            if other is not one:
                raise OutputMismatch(
                    f"{self.where}: {one.path} was written by {other.place} and by {one.place}. "
                    f"One overwrote the other's documents: output_filename {self._template!r} "
                    "gives both the same name. Choose one that begins with "
                    "${rank}/${chunk_index}/.",
                    starts_over="anew",
                )
        return committed

    def look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None = None,
        others: bool = True,
        contents: bool = True,
    ) -> FoundFiles:
        """Lists the output folder, see ``list_output``. Refuses a folder of another run. Raises
        OSError.

        Args:
            contents: read the files that were touched.
        """
        self.owner.check(self.is_unused)
        found = list_output(self.writer, committed, rank, others)
        if contents:
            for name in found.touched:
                one = committed[name]
                commit = read_commits(rank_folder(self.root / one.root, one.rank) / COMMITS)[
                    one.chunk_index
                ]
                kept = next(file.xxh128 for file in commit.files if plain(file.path) == one.path)
                if kept != self._hash(name):
                    found.altered.add(name)
        checkpoint = None
        if self.root.is_relative_to(self.where):
            checkpoint = f"{self.root.relative_to(self.where).as_posix()}/"
        for name in found.sizes:
            if name in committed:
                continue
            match = self._any_writer.fullmatch(name)
            if match is not None and (checkpoint is None or not name.startswith(checkpoint)):
                (root, number), _ = rank_and_chunk(match)
                found.by_rank[number].append((root, name))
        return found

    def is_name_of_run(self, name: str) -> bool:
        """Whether the present ``output_filename`` may give this name."""
        return self._ours.fullmatch(name) is not None

    def is_unused(self) -> bool:
        return not any(
            self._any_writer.fullmatch(name) for name in list_output(self.writer, {}).sizes
        )

    def _hash(self, name: str) -> str:
        try:
            with file_system_call():
                return content_hash(self.writer.output_folder, name)
        except FileNotFoundError:
            return ""

    # what is refused -----------------------------------------------------------------------------

    def refuse_lost(self, committed: Mapping[str, CommittedFile], found: FoundFiles) -> None:
        wrong = [one for one in committed.values() if not found.is_right(one)]
        if not wrong:
            return
        self._refuse_other_folder(wrong[0])
        shown = [f"{one.path} {file_problem(one, found.size(one))[1]}" for one in wrong]
        moved = ""
        if not found.sizes:
            moved = "The folder is empty: was it moved? Set the output folder to its new place. "
        raise OutputMismatch(
            f"{self.where}: output files differ from what was committed ({len(wrong)} of "
            f"{len(committed)}): {some(shown)}. {moved}Put them back, or have them made again: "
            f"{self._repair(found, wrong)}. Files that nobody touched were not read: "
            f"datatrove-ckpt verify {shlex.quote(str(self.root))} --full does that."
        )

    def _refuse_other_folder(self, one: CommittedFile) -> None:
        """Refuses if a former output folder still exists."""
        recorded = _recorded_folder(self.root, [RankCommits(self.root, one.rank)])
        if recorded and stands_elsewhere(recorded, self.writer.output_folder):
            raise OutputMismatch(
                f"{self.where} lacks output files that were committed, such as {one.path} "
                f"({one.place}). They were written to {recorded}, and that folder still exists. "
                "Nothing was changed. Set the output folder back to it; or copy all its "
                "files to the new folder, and run the same command again."
            )

    def refuse_foreign(
        self, rank: int, found: FoundFiles, own: Container[str] = (), root: str = ""
    ) -> None:
        """Refuses uncommitted files of a rank that are not its own.

        Args:
            own: see ``published`` and ``unfinished``; none at the first start.
            root: the folder of a retry that starts; "": the rank, and all its retries.
        """
        names = sorted(
            name for retry, name in found.by_rank[rank] if root in ("", retry) and name not in own
        )
        if not names:
            return
        verify = shlex.join(["datatrove-ckpt", "verify", str(self.root)])
        mirror = ""
        if self._mirror:  # without it, a folder that another node has continued is used as it is
            mirror = f" If the mirror {self._mirror} could not be read, keep them until it can be."
        raise OutputMismatch(
            f"{self.where} holds {plural(len(names), 'file')} that output_filename "
            f"{self._template!r} may have named, and that no commit of task {rank} names: "
            f"{some(names, _TO_DELETE)}. Another run wrote them (datatrove's own InferenceRunner, "
            "or one whose checkpoint was deleted), or they were copied there. "
            f"{STRAY_ADVICE} ({verify} names all of them); or choose another output folder, or "
            f"bring the checkpoint back; and run the same command again.{mirror} To continue a "
            "run of datatrove's own, choose other folders, and set finished_from to the old ones."
        )

    def published(self, rank: int, found: FoundFiles) -> Collection[str]:
        """Returns the names that a rank may have published before it resumes."""
        names = [name for _, name in found.by_rank[rank]]
        if not names:
            return ()
        published = published_names(self.root, rank)
        if published is None:
            return [name for name in names if self.is_name_of_run(name)]
        return published

    def unfinished(self, commits: RankCommits, found: FoundFiles) -> Collection[str]:
        """Returns the files of chunks that a complete rank, or a retry of it, has yet to commit."""
        names = []
        for _, name in found.by_rank[commits.rank]:
            match = self._ours.fullmatch(name)
            if match is None:
                continue
            (root, _), chunk_index = rank_and_chunk(match)
            if (root, chunk_index) in commits.unfinished:
                names.append(name)
        return names

    def _repair(self, found: FoundFiles, wrong: list[CommittedFile]) -> str:
        """Returns the command that repairs, and what to do then."""
        retry = ""
        if all(file.root for file in wrong):
            retry = ", with retry_dead_letters"
        elif any(file.root for file in wrong):
            retry = ", and with retry_dead_letters when it is done"
        output = None
        if not found.sizes:
            output = self.where  # the folder may be gone, and then repair wants it named
        command = repair_command(str(self.root), logging_dir=self._logging_dir, output=output)
        return f"{command}, then run the same command again{retry}"


def some(names: Sequence[str], most: int = _SHOWN) -> str:
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"and {len(names) - most} more")
    return "; ".join(shown)
