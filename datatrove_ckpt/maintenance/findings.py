"""What ``verify`` finds: problems, and the chunks that were committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.ledger import JobSums, RankLedger, name_place
from datatrove_ckpt.output.hub import HubFolder

REDO_KINDS = frozenset({"missing", "truncated", "grown", "altered"})
"""The kinds of problems after which ``repair`` lets a chunk be processed again."""


@dataclass(slots=True)
class Problem:
    """One problem, or, in ``Report.unfinished``, work that is not done yet."""

    kind: str
    message: str
    root: str = ""
    rank: int | None = None
    chunk_index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        place = name_place(self.root, self.rank, self.chunk_index)
        if place:
            return f"{place}: {self.message}"
        return self.message


@dataclass(slots=True)
class CommittedChunk:
    """``documents``: the number of documents in its files; None: unknown."""

    rank: RankLedger
    index: int
    files: list[OutputFile]
    documents: int | None

    def __str__(self) -> str:
        return name_place(*self.rank.key, self.index)


@dataclass
class Report:
    """What ``verify`` found.

    Attributes:
        repair_command: the command that repairs the chunks to redo.
        ranks: without their commits, which ``chunks`` has.
        not_started: ranks that are not there, and of which nothing shows that they ever were.
        uncounted: the writers whose rows cannot be counted.
    """

    checkpoints: Path
    repair_command: str
    output: str = ""
    folder: DataFolder = field(init=False)
    ranks: list[RankLedger] = field(default_factory=list)
    sums: JobSums = field(default_factory=JobSums)
    chunks: list[CommittedChunk] = field(default_factory=list)
    not_started: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)

    def add_problem(
        self,
        kind: str,
        message: str,
        rank: RankLedger | None = None,
        chunk_index: int | None = None,
        path: object = None,
    ) -> None:
        found = Problem(kind, message, chunk_index=chunk_index)
        if rank is not None:
            found.root, found.rank = rank.key
        if path is not None:
            found.path = str(path)
        if kind == "unfinished":
            self.unfinished.append(found)
        else:
            self.problems.append(found)

    @property
    def templates(self) -> list[str]:
        return sorted(
            {
                str(rank.run["output_filename"])
                for rank in self.ranks
                if "output_filename" in rank.run
            }
        )

    @cached_property
    def hub(self) -> HubFolder | None:
        return HubFolder.of(self.folder)

    @property
    def tasks(self) -> int:
        """0: not known."""
        tasks = [rank.run.get("tasks") or 0 for rank in self.ranks if not rank.root]
        return max(tasks, default=0)
