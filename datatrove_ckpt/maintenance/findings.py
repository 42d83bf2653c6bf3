"""What a verification finds: problems, work that is not finished, and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.maintenance.inspect import RankFolder, RankStatus, name_place

CONDEMNING = frozenset({"missing", "truncated", "grown", "altered"})
"""The kinds of problems for which ``repair`` has a chunk made again."""


@dataclass(slots=True)
class Problem:
    """Something that is wrong, or, in ``Report.unfinished``, only not done yet. Its text says what to do."""

    kind: str
    message: str
    root: str = ""
    rank: int | None = None
    chunk_index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        place = name_place(self.root, self.rank, self.chunk_index)
        return f"{place}: {self.message}" if place else self.message


@dataclass(slots=True)
class CommittedChunk:
    """What the output files of a chunk should be, and how many documents they should hold (None: cannot be told)."""

    rank: RankFolder
    index: int
    files: list[OutputFile]
    documents: int | None

    def __str__(self) -> str:
        return name_place(self.rank.root, self.rank.number, self.index)


@dataclass
class Report:
    """What was found.

    ``output`` is the output folder by name, ``folder`` as datatrove opens it. ``repair_command`` mends what this
    report condemns.
    """

    checkpoints: Path
    output: str
    folder: Any
    repair_command: str
    ranks: list[RankFolder] = field(default_factory=list)
    summaries: list[RankStatus] = field(default_factory=list)
    chunks: list[CommittedChunk] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)

    def add_problem(
        self, kind: str, message: str, rank: RankFolder | None = None, chunk_index: int | None = None, path: Any = None
    ) -> None:
        self.problems.append(_problem(kind, message, rank, chunk_index, path))

    def add_unfinished(
        self, message: str, rank: RankFolder, chunk_index: int | None = None, path: str | None = None
    ) -> None:
        self.unfinished.append(_problem("unfinished", message, rank, chunk_index, path))

    @property
    def number_of_files(self) -> int:
        return sum(len(chunk.files) for chunk in self.chunks)

    @property
    def states(self) -> dict[tuple[str, int], str]:
        """The state of each rank, by ``RankFolder.key``."""
        return {(summary.root, summary.rank): summary.state for summary in self.summaries}


def _problem(kind: str, message: str, rank: RankFolder | None, chunk_index: int | None, path: Any) -> Problem:
    root, number = rank.key if rank else ("", None)
    return Problem(kind, message, root, number, chunk_index, None if path is None else str(path))
