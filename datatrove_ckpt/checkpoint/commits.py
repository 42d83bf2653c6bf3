"""CommitLog decides which chunks are done. The other files can be rebuilt, or are for people.

A lost commit must not look like an unfinished chunk: its output would seem another run's, and its
documents be paid for twice.

Each line is synced before the next line is written, so a crash tears at most one line
(``lines.may_be_torn``). Everything else at the end of the log is damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import xxhash

from datatrove_ckpt.checkpoint import checksummed_lines, files
from datatrove_ckpt.checkpoint.layout import checkpoints_of
from datatrove_ckpt.common.counts import (
    NO_SECONDS,
    CompletedWork,
    DocumentCounts,
    LogHistogram,
    Seconds,
    WorkStats,
)
from datatrove_ckpt.common.formatting import repair_command
from datatrove_ckpt.errors import CheckpointCorrupt

ENDS = "ends"
REASONS = "reasons"
LENGTHS = "lengths"
_ENDS = ("answers", "cut_off", "empty")
MAX_GAP = 1_000_000
"""Limit of the chunks that a run has in progress. A larger gap between two chunks is damage."""


class CommitsDamaged(CheckpointCorrupt):
    """Commits are lost or damaged. ``repair`` can rebuild the log from the undamaged commits."""

    def __init__(self, path: Path, damage: str, logging_dir: str | None = None) -> None:
        command = repair_command(str(checkpoints_of(path.parent)), logging_dir=logging_dir)
        super().__init__(
            f"{damage} Keep the task's output files. {checksummed_lines.RESTORE}{command}, then "
            "run again."
        )
        self.path = path
        self.log = path
        self.damage = damage
        self.logging_dir = logging_dir

    def __reduce__(self) -> tuple[type[CommitsDamaged], tuple[Path, str, str | None]]:
        # Pool workers pickle the error.
        return type(self), (self.log, self.damage, self.logging_dir)


def stamp_of(text: str) -> int:
    # 53 bits: every reader of JSON keeps them.
    return xxhash.xxh3_64_intdigest(text.encode()) >> 11 if text else 0


@dataclass(slots=True)
class OutputFile:
    """A published file.

    Attributes:
        hub_hash: the hash in the hub's listing: SHA-256, or git's hash of a file outside LFS. "" in
            a bucket, outside the hub, and in commits of an earlier release.
        stamp: hash of change time and inode, or of the ETag. As in git's index, a file is read only
            if its stamp has changed. 0: unknown.
        rows: number of rows if a document has several (``explode``); else 0.
    """

    path: str
    size: int
    xxh128: str
    hub_hash: str = ""
    stamp: int = 0
    rows: int = 0

    def to_json(self) -> checksummed_lines.Json:
        """Omits unknown values, as earlier releases did."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value or name not in ("hub_hash", "stamp", "rows")
        }


@dataclass(slots=True)
class Commit:
    """A finished chunk.

    Attributes:
        position: the reader's state right after the chunk's last document; None: the reader has no
            state.
        last_input: fingerprint of the last document; a resumed rank compares it with the input.
        dead_letters_size: size of dead_letters.jsonl in bytes, including this chunk.
    """

    chunk_index: int
    first_ordinal: int
    counts: DocumentCounts
    files: list[OutputFile] = field(default_factory=list)
    position: checksummed_lines.Json | None = None
    last_input: str = ""
    dead_letters_size: int = 0
    work: checksummed_lines.Json = field(default_factory=WorkStats().fields)
    seconds: Seconds = NO_SECONDS
    at: float = 0.0

    @property
    def next_ordinal(self) -> int:
        return self.first_ordinal + self.counts.read

    @classmethod
    def from_json(cls, body: bytes) -> Commit:
        data = orjson.loads(body)
        work = data["work"]
        counts = DocumentCounts(
            **data.pop("tally"),
            **dict(zip(_ENDS, work.pop(ENDS), strict=True)),
            reasons=Counter(work.pop(REASONS, {})),
            lengths=LogHistogram(dict(work.pop(LENGTHS, ()))),
        )
        data["files"] = [OutputFile(**file) for file in data["files"]]
        data["seconds"] = Seconds(*data["seconds"])
        for file in data["files"]:
            parts = set(file.path.split("/"))
            if file.path.startswith("/") or ".." in parts or parts <= {"", "."}:
                raise ValueError(f"{file.path!r} is no name of an output file")
        return cls(counts=counts, **data)

    def to_json(self) -> bytes:
        """Returns the body of the commit's line.

        On disk ``counts`` is called "tally", as in version 0.1. "work" also holds the ends of
        answers, which earlier releases ignore.
        """
        tally = self.counts.fields()
        work = {**self.work, ENDS: [tally.pop(name) for name in _ENDS]}
        reasons = tally.pop(REASONS)
        if reasons:
            work[REASONS] = reasons
        lengths = tally.pop(LENGTHS)
        if lengths:
            work[LENGTHS] = sorted(lengths.items())
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "counts"}
        fields |= {"tally": tally, "files": [file.to_json() for file in self.files], "work": work}
        return orjson.dumps(fields, list)  # of tuples


def read_commits(path: Path) -> dict[int, Commit]:
    """Returns the commits in the file by chunk index, in the order of the lines. Changes nothing.

    Raises:
        CommitsDamaged: a damaged line that no crash explains, or two lines for one chunk.
        CheckpointCorrupt: a line of another version.
    """
    return scan_commits(path)[0]


def read_whole_commits(path: Path) -> list[Commit]:
    """Returns the commits of all whole lines, in order; skips damaged lines."""
    return [
        _parse(path, number, line)
        for number, _, line in checksummed_lines.scan_lines(path)
        if line is not None
    ]


def scan_commits(path: Path) -> tuple[dict[int, Commit], int]:
    """Returns the commits as ``read_commits`` does, and the offset of a torn tail."""
    commits = {}
    size = dead_letters_size = 0
    for number, line in _whole_lines(path):
        commit = _parse(path, number, line)
        if commit.chunk_index in commits:
            raise CommitsDamaged(
                path, f"{path}, line {number}: chunk {commit.chunk_index} is committed twice."
            )
        if commit.dead_letters_size < dead_letters_size:
            damage = "the lines are not in their order."
            raise CommitsDamaged(path, f"{path}, line {number}: {damage}")
        commits[commit.chunk_index] = commit
        dead_letters_size = commit.dead_letters_size
        size = line.offset + line.length
    return commits, size


def _whole_lines(path: Path) -> Iterator[tuple[int, checksummed_lines.ChecksummedLine]]:
    try:
        yield from enumerate(checksummed_lines.read_lines(path, "", synced=True), 1)
    except CheckpointCorrupt as error:
        raise CommitsDamaged(path, str(error).rstrip()) from error


def _parse(path: Path, number: int, line: checksummed_lines.ChecksummedLine) -> Commit:
    try:
        return Commit.from_json(line.body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(
            path,
            f", line {number}: the line is no commit of this version ({error!r}). Keep the "
            "task's output files. Use the version that wrote it, or restore a copy.",
        ) from error


def sum_commits(commits: Collection[Commit]) -> CompletedWork:
    counts = sum((commit.counts for commit in commits), DocumentCounts())
    work = sum((WorkStats.from_json(commit.work) for commit in commits), WorkStats())
    seconds = NO_SECONDS
    for commit in commits:
        seconds = seconds.or_later(commit.seconds)
    return CompletedWork(counts, work, seconds)


def count_unbroken(commits: Iterable[int]) -> int:
    indices = set(commits)
    return next(index for index in range(len(indices) + 1) if index not in indices)


def read_last_chunk(path: Path) -> int | None:
    """Returns the chunk in last_chunk; None if the file is missing or holds no number.

    This chunk and all chunks before it were committed: the file is written after the commit is
    synced, and ``repair``, a restored mirror and a new start correct or remove it first.
    """
    text = checksummed_lines.content_of(path) or b""
    if text.strip().isdigit() and len(text) < 20:
        return int(text)
    return None


class CommitLog:
    """``commits.jsonl`` of one rank, in the order in which chunks were committed.

    Opening the log cuts off a torn tail.

    Args:
        scanned: result of ``scan_commits``, if no process has written to the file since.
    """

    def __init__(self, path: Path, scanned: tuple[dict[int, Commit], int] | None = None) -> None:
        self.commits, size = scanned or scan_commits(path)
        self.file = files.AppendFile(path, size)
        self.file.sync()

    def append(self, commit: Commit) -> None:
        """Appends and syncs the line.

        Once this returns, the chunk is done and survives power loss.
        """
        self.file.append(checksummed_lines.add_checksum(commit.to_json()))
        self.file.sync()
        self.commits[commit.chunk_index] = commit

    def unbroken(self) -> list[Commit]:
        return [self.commits[index] for index in range(count_unbroken(self.commits))]
