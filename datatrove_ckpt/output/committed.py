"""Compares an output folder with what the checkpoints say: every committed file is there, and no unknown one.

Names, sizes and stamps (time of change and inode, or ETag) are compared, and on the hub the hashes that its listings
hold. A file with another stamp than its commit names is read, and its hash compared: so a file that was replaced by
one of the same size is noticed, and a million files that nobody touched cost nothing.

    when                                what is refused
    at each look                        a folder that belongs to another run (``owner``)
    a rank starts for the first time    any file that its template may have named
    a rank resumes                      files that neither a commit nor an intent to publish names
    a rank resumes, or is complete      committed files that are missing, or have another content
    a rank is complete                  files that its template may have named, and no commit does

The last check only warns of a file whose name does not tell its rank, or that has a chunk index which the rank does not
have: fields of documents may have made such a name in another run. The first does not: then the user chooses.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from string import Template
from typing import Any

import xxhash
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint.commits import Commit, OutputFile, read_commits, stamp_of
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.intents import Intents
from datatrove_ckpt.checkpoint.job import recorded_output
from datatrove_ckpt.checkpoint.layout import COMMITS, RUN, rank_folder, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.ledger import RankLedger, Want, read_rank
from datatrove_ckpt.doors import Repair, written
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.output.folders import stands_elsewhere
from datatrove_ckpt.output.hub import HubFile, HubFolder, is_missing_repository, private_if_made
from datatrove_ckpt.output.names import STAGING, fields_of_documents, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.owner import Homes, Ownership
from datatrove_ckpt.retrying import failure_line, file_system_call

# Which files of a template lie in an output folder, and how large they are: one listing, however many there are.
#
# Locally only the folders are read in which a file of the template may be. On object stores that can list by prefix
# (s3fs, gcsfs, adlfs), only the names of one rank are listed, 1000 per request. The hub is asked afresh each time, for
# the folder that all names of the template have in common.


_BLOCK = 1 << 20
_NUMBER = "000_"  # in front of the first file of a writer with max_file_size


@dataclass
class FoundFiles:
    """What lies in an output folder.

    Attributes:
        sizes: in bytes, by path; None: the store tells no size.
        touched: committed files with another stamp than their commit names.
        altered: committed files with another content than their commit names.
        by_rank: the files that the template may have named, and no commit names, each with the folder of its retry
            ("": of no retry).
        hub_files: what the hub tells of the files; empty elsewhere.
    """

    sizes: dict[str, int | None] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)
    by_rank: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    hub_files: dict[str, HubFile] = field(default_factory=dict)

    def show(self, files: Mapping[str, HubFile]) -> None:
        """Adds what a later look at the hub has found."""
        self.hub_files |= files
        self.sizes |= {name: file.size for name, file in files.items()}

    def note(self, name: str, size: int | None, stamp: int, file: OutputFile | None) -> None:
        """Adds a file. ``file``: what a commit says of it; None: no commit names it."""
        self.sizes[name if file is None else file.path] = size  # no second copy of a million names
        if file is not None and file.stamp not in (0, stamp) and file.size == size:
            self.touched.add(plain(file.path))

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
    writer: DiskWriter, committed: Mapping[str, OutputFile], rank: int | None = None, others: bool = True
) -> FoundFiles:
    """Lists an output folder.

    It finds every file that exists among ``committed``, and every other one that the template may have named. It may
    find more.

    Args:
        committed: by their plain paths.
        rank: only look for other files of this rank.
        others: look for other files at all. Without them the hub needs one request for 500 names.

    Raises:
        OSError: the folder cannot be read. One that does not exist holds no files.
    """
    folder = writer.output_folder
    head, everywhere = _head(writer.output_filename, rank)
    if folder.is_local():
        root = Path(folder.resolve_paths(""))
        found = FoundFiles()
        for name, status in _scan(root, head, everywhere):
            found.note(name, status.st_size, local_stamp(status), committed.get(name))
        for name, status in _look_at(root, [name for name in committed if name not in found.sizes]):
            found.note(name, status.st_size, local_stamp(status), committed[name])
        return found
    if (hub := HubFolder.of(folder)) is not None:
        try:
            with file_system_call():
                # The part of the folder where files of the template may be, and committed files elsewhere.
                base = posixpath.dirname(head)
                listed = hub.below(base).files() if others else {}
                files = {posixpath.join(base, name): file for name, file in listed.items()}
                files |= hub.look_up([name for name in committed if name not in files])
            found = FoundFiles(hub_files=files)
            for name, file in files.items():
                found.note(name, file.size, file.stamp, committed.get(name))
            return found
        except OSError as error:
            if committed or private_if_made(writer) is None or not is_missing_repository(error):
                raise
            return FoundFiles()  # a run makes it
    try:
        with file_system_call():
            folder.invalidate_cache()
            remote = _find(folder, head, writer.max_file_size > 0)
            # Files that an earlier template named, or those with a number other than the first.
            if any(name not in remote and not name.startswith(head) for name in committed):
                remote |= _find(folder, "", numbered=False)
            return _noted(remote, committed)
    except PermissionError as error:
        logger.warning(
            f"{folder.resolve_paths('')} may not be listed ({failure_line(error)}), so its committed files are looked "
            "up one by one, and files that no commit names are not seen. On S3, allow s3:ListBucket."
        )
        with file_system_call():
            return _noted(dict(_look_up(folder, committed)), committed)


def _noted(infos: Mapping[str, Mapping[str, Any]], committed: Mapping[str, OutputFile]) -> FoundFiles:
    found = FoundFiles()
    for name, info in infos.items():
        found.note(name, info.get("size"), remote_stamp(info), committed.get(name))
    return found


# What a file system calls a value that changes with a file, the surest first.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")


def remote_stamp(info: Mapping[str, Any]) -> int:
    """The stamp of a file, see ``OutputFile``, from what fsspec tells of it."""
    return stamp_of(next((str(info[tag]) for tag in _TAGS if info.get(tag)), ""))


def local_stamp(status: os.stat_result) -> int:
    """The stamp of a file on a disk."""
    return stamp_of(f"{status.st_mtime_ns}:{status.st_ino}")


def content_hash(folder: DataFolder, path: str) -> str:
    """The xxh128 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    hub = HubFolder.of(folder)
    if hub is None or hub.is_bucket:
        with folder.open(path, "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    content = xxhash.xxh3_128()
    for block in hub.blocks(path, _BLOCK):
        content.update(block)
    return str(content.hexdigest())


def _head(template: Template, rank: int | None) -> tuple[str, bool]:
    """What all names start with, and whether the folders below that are part of the names, too."""
    known = {} if rank is None else {"rank": f"{rank:05d}"}
    mark = "\0"
    unknown = {name: mark for name in template.get_identifiers() if name not in known}
    filled = template.substitute(known | unknown)
    head, _, rest = filled.partition(mark)
    base = posixpath.dirname(head)
    head = f"{plain(base)}/{posixpath.basename(head)}" if base else head
    return head, "/" in rest or bool(fields_of_documents(template))


def _scan(root: Path, head: str, everywhere: bool) -> Iterator[tuple[str, os.stat_result]]:
    """The files whose names start with ``head``, perhaps after a number, as writers with max_file_size give it.

    Only these are looked at: a folder that all ranks share may hold a million files, and to look at one may take a
    request to a file server.
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
            continue  # not a folder of ours
        with found:
            for entry in found:  # not a list of them: a million take 200 MB
                path = posixpath.join(name, entry.name)
                if name == base and not may_be_ours(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting += [path] if everywhere and path != STAGING else []
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield path, entry.stat()


def _look_at(root: Path, names: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Names that the scan has not met: behind a symbolic link, or of an earlier template."""
    for name in names:
        try:
            yield name, (root / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue


def _look_up(folder: DataFolder, names: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in names:
        # To whom may not list, S3 does not tell a missing file from a forbidden one.
        with suppress(FileNotFoundError, PermissionError):
            yield plain(name), folder.info(name)


def _find(folder: DataFolder, head: str, numbered: bool) -> dict[str, Mapping[str, Any]]:
    base, start = posixpath.split(head)
    find = getattr(folder.fs, "_find", folder.fs.find)
    options = {}
    if start and "prefix" in inspect.signature(find).parameters:
        options["prefix"] = (_NUMBER if numbered else "") + start
    try:
        listed = folder.find(base, detail=True, **options)
    except FileNotFoundError:
        return {}
    return {path: info for path, info in listed.items() if info["type"] != "directory"}


def file_problem(file: OutputFile, size: int | None) -> tuple[str, str]:
    """The kind and the description of what is wrong with a file that is not right.

    Args:
        size: its size now, in bytes; None: it does not exist.
    """
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: it has the committed size and another content"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


def other_job() -> str:
    """What to do about another job that writes to the same folder."""
    return (
        f"Stop one of the jobs, and start it anew with {written.own_folders}. The other one goes on with the same "
        "command, "
        "once files that are not its own are deleted from the folder."
    )


def other_content(where: str, names: Sequence[str]) -> OutputMismatch:
    """The refusal to replace files that this rank has not published."""
    is_are, it = ("is", "it") if len(names) == 1 else ("are", "them")
    return OutputMismatch(
        f"{where}: {_some(list(names[:_SHOWN]), len(names))} {is_are} there with other content, which this rank has "
        "not published. Nothing was overwritten. Probably another job writes to the same folder with the same "
        f"output_filename. {other_job()} If there is no other job (a file was copied there, or the checkpoint is older "
        f"than the output), move {it} out of the folder, and run the same command again."
    )


def stray_advice(number: int) -> str:
    """What to do about files of a template that no commit names. ``run`` and ``verify`` say the same."""
    it, its = ("it", "Its") if number == 1 else ("them", "Their")
    return (
        f"{its} documents may be in the output twice. Move {it} out of the output folder, or delete {it} if nothing "
        f"else needs {it}"
    )


_SHOWN = 3
_TO_DELETE = 20


@dataclass(slots=True)
class CommittedFile(OutputFile):
    """A file that a commit names, with its plain path. ``root``: the folder of the retry that wrote it, or "".

    It lacks the hash of the content, which is not needed: a job may have millions of files.
    """

    root: str = ""
    rank: int = 0
    chunk_index: int = 0

    @property
    def place(self) -> str:
        return f"{self.root}{', ' if self.root else ''}rank {self.rank}, chunk {self.chunk_index}"


class RankCommits:
    """What the checkpoint of a rank, and those of its retries, say about output files.

    Args:
        root: ``checkpoints_local_dir``.
        retries: ``retry_folders(root)``; None: look.
        read: ``read_commits``, or that of the checkpoint that is open.
        want: what else to read for ``seen``, which gets each ledger.

    Attributes:
        unfinished: root and index of the chunks with a journal: output may be there, and is made again.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        retries: Iterable[Path] | None = None,
        read: Callable[[Path], dict[int, Commit]] = read_commits,
        want: Want = Want.COMMITS,
        seen: Callable[[RankLedger], None] = lambda found: None,
    ) -> None:
        self.rank = rank
        self.folder = rank_folder(root, rank)
        self.files: list[CommittedFile] = []
        self.has_run = self.is_finished = False
        self._read = read
        self.unfinished: set[tuple[str, int]] = set()
        for checkpoint in (root, *(retry_folders(root) if retries is None else retries)):
            if (folder := rank_folder(checkpoint, rank)).is_dir():
                name = "" if checkpoint == root else checkpoint.name
                found = read_rank(name, rank, folder, want, read=read)
                self._add(found)
                seen(found)

    def _add(self, found: RankLedger) -> None:
        if found.damage is not None:
            raise found.damage
        for commit in found.commits.values():
            for file in commit.files:
                known = (plain(file.path), file.size, "", file.hub_hash, file.stamp)
                self.files.append(CommittedFile(*known, found.root, self.rank, commit.chunk_index))
        if not found.root:
            self.has_run, self.is_finished = bool(found.run), found.is_finished
        self.unfinished |= {(found.root, index) for index in found.open_chunks}

    @cached_property
    def chunks(self) -> set[int]:
        """What the rank itself, not a retry of it, has committed. Read again if it is asked for: a job has millions."""
        return set(self._read(self.folder / COMMITS))


def published_names(root: Path, rank: int) -> set[str] | None:
    """The names of all files that a rank and its retries may have published; None: a part of them is not known.

    The commits are read after the intents, so the rank may be at work meanwhile.

    Args:
        root: ``checkpoints_local_dir``.
    """
    folders = [rank_folder(one, rank) for one in (root, *retry_folders(root))]
    intents = [Intents(folder) for folder in folders if folder.is_dir()]
    if not all(one.is_kept for one in intents):
        return None
    committed = {plain(file.path) for file in RankCommits(root, rank).files}
    return committed.union(*(one.names for one in intents))


def committed_files(writer: DiskWriter, root: Path) -> int:
    """How many files in the writer's output folder the commits of all ranks name.

    Args:
        root: ``checkpoints_local_dir``.

    Raises:
        CheckpointError: a checkpoint is damaged, or cannot be read.
    """
    commits = [RankCommits(root, rank) for rank in (rank_numbers(root) if root.is_dir() else ())]
    is_here = _recorded_folder(root, commits) in (writer.output_folder.resolve_paths(""), None)
    return sum(len(each.files) for each in commits) if is_here else 0


def _recorded_folder(root: Path, ranks: Iterable[RankCommits]) -> str | None:
    """The output folder of the last start."""
    paths = (each.folder / RUN for each in ranks)
    return recorded_output(root, (read_run(path) for path in paths if path.exists()))


class OutputCheck:
    """The checks of one step's output folder.

    Args:
        root: ``checkpoints_local_dir``.
        mirror: ``checkpoints_remote_dir``.
        run: see ``Homes``.
        logging_dir: the executor's, to be named in the command that repairs; None: no marker was written.
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
        self.owner = Ownership(writer.output_folder, writer.output_filename.template, Homes(root, mirror, run))
        self.where = str(writer.output_folder.resolve_paths(""))
        self._logging_dir = logging_dir
        self._template = writer.output_filename.template
        self._is_certain = not fields_of_documents(writer.output_filename)
        self._any_writer = output_pattern(self._template, any_writer=True)
        self._ours = output_pattern(self._template)
        self._of_rank = lru_cache(maxsize=1000)(partial(output_pattern, self._template, True))

    def by_name(self, commits: Iterable[RankCommits]) -> dict[str, CommittedFile]:
        """The committed files by their paths.

        Raises:
            OutputMismatch: two commits name one file: one of them has overwritten the other's documents.
        """
        committed: dict[str, CommittedFile] = {}
        for one in (one for rank_commits in commits for one in rank_commits.files):
            if (other := committed.setdefault(one.path, one)) is not one:
                raise OutputMismatch(
                    f"{self.where}: {one.path} was written by {other.place} and by {one.place}. One overwrote the "
                    f"other's documents: output_filename {self._template!r} gives both the same name. Choose one that "
                    f"begins with ${{rank}}/${{chunk_index}}/, and another {written.folders}, and start again."
                )
        return committed

    def look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None = None,
        others: bool = True,
        contents: bool = True,
    ) -> FoundFiles:
        """Lists the output folder, see ``list_output``.

        Args:
            others: also look for files that no commit names.
            contents: read the files that were touched.

        Raises:
            OutputMismatch: it belongs to another run.
            OSError: it cannot be listed, or a touched file cannot be read.
        """
        self.owner.check(self.is_unused)
        found = list_output(self.writer, committed, rank, others)
        for name in found.touched if contents else ():
            if self._committed_hash(committed[name]) != self._hash(name):
                found.altered.add(name)
        inside = self.root.relative_to(self.where).as_posix() if self.root.is_relative_to(self.where) else None
        for name in found.sizes:
            match = None if name in committed else self._any_writer.fullmatch(name)
            if match is not None and (inside is None or not name.startswith(f"{inside}/")):
                (root, number), _ = rank_and_chunk(match)
                found.by_rank[number].append((root, name))
        return found

    def is_unused(self) -> bool:
        """Whether the folder holds no file that the template may have named."""
        return not any(self._any_writer.fullmatch(name) for name in list_output(self.writer, {}).sizes)

    def _hash(self, name: str) -> str:
        try:
            with file_system_call():
                return content_hash(self.writer.output_folder, name)
        except FileNotFoundError:
            return ""

    def _committed_hash(self, one: CommittedFile) -> str:
        """From the commit's line: ``CommittedFile`` has no hash."""
        commit = read_commits(rank_folder(self.root / one.root, one.rank) / COMMITS)[one.chunk_index]
        return next(file.xxh128 for file in commit.files if plain(file.path) == one.path)

    # what is refused -------------------------------------------------------------------------------------------------

    def refuse_lost(self, committed: Mapping[str, CommittedFile], found: FoundFiles) -> None:
        """Refuses an output folder in which committed files are missing or changed.

        Raises:
            OutputMismatch: naming some of them, and the command that has them made again.
        """
        wrong = [one for one in committed.values() if not found.is_right(one)]
        if not wrong:
            return
        self._refuse_other_folder(wrong[0])
        shown = [f"{one.path} {file_problem(one, found.size(one))[1]}" for one in wrong[:_SHOWN]]
        raise OutputMismatch(
            f"{self.where}: output files differ from what was committed ({len(wrong)} of {len(committed)}): "
            f"{_some(shown, len(wrong))}. {_was_moved(found)}Put them back, or have them made again: ",
            self._repair(found, wrong),
            ". Files that nobody touched were not read: "
            f"datatrove-ckpt verify {shlex.quote(str(self.root))} --full does that.",
        )

    def _refuse_other_folder(self, one: CommittedFile) -> None:
        """Raises if the output was in another folder before, which exists: nothing is lost then."""
        recorded = _recorded_folder(self.root, [RankCommits(self.root, one.rank)])
        if recorded and stands_elsewhere(recorded, self.writer.output_folder):
            raise OutputMismatch(
                f"{self.where} lacks output files that were committed, such as {one.path} ({one.place}). They were "
                f"written to {recorded}, and that folder still exists. Nothing was changed. Set "
                f"{written.output_folder} "
                "back to it; or copy all its files to the new folder, and run the same command again."
            )

    def refuse_existing(self, commits: RankCommits, found: FoundFiles, root: str = "") -> None:
        """Refuses the first start of a rank, or of its retry, into a folder that holds its files already.

        Args:
            root: the folder of the retry; "": the rank itself.

        Raises:
            OutputMismatch: naming some of them, and the ways out.
        """
        names = sorted(name for retry, name in found.by_rank[commits.rank] if root in ("", retry))
        if names:
            raise OutputMismatch(
                f"{self.where} holds {plural(len(names), 'file')} that output_filename {self._template!r} may have "
                f"named for rank {commits.rank} ({_some(names[:_SHOWN], len(names))}), but "
                f"{rank_folder(self.root / root, commits.rank)} is a new checkpoint, which knows none of them. Another "
                "run wrote them (datatrove's own InferenceRunner, or one whose checkpoint was deleted), and they would "
                f"be overwritten, or stand beside the new ones. Choose another {written.output_folder}, bring the "
                "checkpoint "
                "back, or delete these files to have everything made again. To continue a run of datatrove's own, "
                "choose other folders, and set finished_from to the old ones."
            )

    def refuse_strangers(self, commits: RankCommits, found: FoundFiles, intended: Container[str] | None = None) -> None:
        """Refuses to resume a rank while files are there that another run wrote.

        Args:
            intended: the names that the rank was about to publish; None: every name that this run gives.

        Raises:
            OutputMismatch: naming some of them, and the ways out.
        """
        names = sorted(name for _, name in found.by_rank[commits.rank] if not self._is_own(name, intended))
        which = f"no commit of rank {commits.rank} names"
        if not self._is_certain:
            self._refuse(names, which, certain=False)
        elif names:
            raise OutputMismatch(
                f"{self._what(names, which, _TO_DELETE)} Another run wrote them, or datatrove's own InferenceRunner; "
                f"this run has not published them. {stray_advice(len(names))}, and run the same command again."
            )

    def _is_own(self, name: str, intended: Container[str] | None) -> bool:
        return self._ours.fullmatch(name) is not None if intended is None else name in intended

    def refuse_unknown(self, commits: RankCommits, found: FoundFiles) -> None:
        """Refuses to call a rank complete while files of its template are there that no commit names.

        Raises:
            OutputMismatch: naming some of them.
        """
        files = found.by_rank[commits.rank]
        unknown = [(root, name) for root, name in files if not self._may_be_committed(commits, name)]
        which = f"no commit of rank {commits.rank} names"
        certain = {name for _, name in unknown if self._is_certain or self._is_superseded(commits, name)}
        self._refuse(sorted(certain), which)
        self._refuse(sorted({name for _, name in unknown}), which, certain=False)

    def _is_superseded(self, commits: RankCommits, name: str) -> bool:
        """Whether a chunk of this rank wrote the file, in an attempt whose documents went to other files later."""
        match = self._ours.fullmatch(name)
        if match is None:
            return False
        (root, rank), chunk_index = rank_and_chunk(match)
        if not root and chunk_index not in commits.chunks:
            return False
        # Fields of documents may hold numbers, too: is there another rank that may have given this name?
        numbers = set(re.findall(r"(?=(\d{5,}))", name)) if "rank" in match.groupdict() else set()
        others = {digits[:end] for digits in numbers for end in range(5, len(digits) + 1)} - {f"{rank:05d}"}
        return not any(self._of_rank(rank=number).fullmatch(name) for number in others)

    def refuse_other_ranks(self, found: FoundFiles, tasks: int) -> None:
        """Refuses files of ranks that the job does not have: it ran with another number of tasks before.

        Raises:
            OutputMismatch: naming some of them.
        """
        others = {rank: files for rank, files in found.by_rank.items() if rank >= tasks}
        names = sorted(name for files in others.values() for _, name in files)
        which = f"are of ranks that a job with tasks={tasks} does not have"
        self._refuse(names, which, self._is_certain)

    def _what(self, names: list[str], which: str, shown: int = _SHOWN) -> str:
        return (
            f"{self.where} holds {plural(len(names), 'file')} that output_filename {self._template!r} may have named, "
            f"and that {which}: {_some(names[:shown], len(names))}."
        )

    def _refuse(self, names: list[str], which: str, certain: bool = True) -> None:
        """Only warns of files that may be others'."""
        if names and certain:
            verify = shlex.join(["datatrove-ckpt", "verify", str(self.root)])
            raise OutputMismatch(
                f"{self._what(names, which, _TO_DELETE)} {stray_advice(len(names))} ({verify} names all of them), and "
                "run the same command again: it has nothing else left to do for what is complete."
            )
        if names:
            logger.warning(f"{self._what(names, which)} {stray_advice(len(names))}.")

    def _may_be_committed(self, commits: RankCommits, name: str) -> bool:
        match = self._ours.fullmatch(name)
        if match is None:
            return False
        (root, _), chunk_index = rank_and_chunk(match)
        return (root, chunk_index) in commits.unfinished

    def _repair(self, found: FoundFiles, wrong: list[CommittedFile]) -> Repair:
        """What has lost files made again."""
        retry = ""
        if all(file.root for file in wrong):
            retry = "now"
        elif any(file.root for file in wrong):
            retry = "later"
        # The folder may be gone, and then repair wants it named.
        output = None if found.sizes else self.where
        return Repair(str(self.root), self._logging_dir, output, retry)


def _was_moved(found: FoundFiles) -> str:
    if found.sizes:
        return ""
    return f"The folder is empty: was it moved? Set {written.output_folder} to its new place, or move it back. "


def _some(names: list[str], number: int) -> str:
    return "; ".join(names) + (f"; and {number - len(names)} more" if number > len(names) else "")
