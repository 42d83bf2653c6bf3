"""CommitLog: which chunks are done. This file alone decides it; all other files can be rebuilt or are for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lines import Json, read_lines, seal, whole_size
from datatrove_ckpt.errors import CheckpointCorrupt


@dataclass(slots=True)
class OutputFile:
    """A published file: its path below the output folder, size in bytes, and xxh128 of its content."""

    path: str
    size: int
    xxh128: str


@dataclass(slots=True)
class DocumentCounts:
    """Numbers of documents by outcome, and of their requests and tokens."""

    read: int = 0
    written: int = 0
    dropped: int = 0
    dead: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, outcome: str, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Adds one document."""
        self.read += 1
        self.written += outcome == "written"
        self.dropped += outcome == "dropped"
        self.dead += outcome == "dead"
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def add(self, other: DocumentCounts) -> None:
        self.read += other.read
        self.written += other.written
        self.dropped += other.dropped
        self.dead += other.dead
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens


@dataclass(slots=True)
class Commit:
    """One finished chunk.

    Attributes:
        position: the reader's state right after the chunk's last document; None if the reader has no state.
        last_input: fingerprint of that document, by which a resumed rank notices another input.
        dead_letters_size: size of dead_letters.jsonl in bytes, with the dead letters of this chunk.
    """

    chunk_index: int
    first_ordinal: int
    counts: DocumentCounts
    files: list[OutputFile] = field(default_factory=list)
    position: Json | None = None
    last_input: str = ""
    dead_letters_size: int = 0

    @property
    def next_ordinal(self) -> int:
        return self.first_ordinal + self.counts.read

    @classmethod
    def from_json(cls, body: bytes) -> Commit:
        data = orjson.loads(body)
        counts = DocumentCounts(**data.pop("tally"))
        data["files"] = [OutputFile(**file) for file in data["files"]]
        return cls(counts=counts, **data)

    def to_json(self) -> bytes:
        """Returns the body of the commit's line. On disk ``counts`` is called "tally", since version 0.1."""
        fields = asdict(self)
        return orjson.dumps({"tally" if name == "counts" else name: value for name, value in fields.items()})


def read_commits(path: Path) -> dict[int, Commit]:
    """Returns the commits in the file by chunk index, in the order of the lines. Changes nothing.

    Raises:
        CheckpointCorrupt: a damaged line before the last, or two lines for one chunk.
    """
    commits: dict[int, Commit] = {}
    for number, line in enumerate(read_lines(path), 1):
        commit = Commit.from_json(line.body)
        if commit.chunk_index in commits:
            raise CheckpointCorrupt(f"{path}, line {number}: chunk {commit.chunk_index} is committed twice.")
        commits[commit.chunk_index] = commit
    return commits


class CommitLog:
    """``commits.jsonl`` of one rank, in the order in which chunks were committed. Opening it cuts off a torn tail.

    Raises:
        CheckpointCorrupt: see ``read_commits``.
    """

    def __init__(self, path: Path) -> None:
        self.commits = read_commits(path)
        lines = list(read_lines(path))
        if path.exists() and path.stat().st_size > whole_size(lines):
            files.disk.truncate(path, whole_size(lines))
        self._file = files.AppendFile(path)
        self._file.sync()

    def append(self, commit: Commit) -> None:
        """Appends and syncs the line. Once this returns, the chunk is done and survives power loss."""
        self._file.append(seal(commit.to_json()))
        self._file.sync()
        self.commits[commit.chunk_index] = commit

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.size

    def unbroken(self) -> list[Commit]:
        """Returns the commits of chunks 0, 1, 2, ... up to the first chunk that has none."""
        run: list[Commit] = []
        while (commit := self.commits.get(len(run))) is not None:
            run.append(commit)
        return run
