"""The result of ``verify``: problems, unfinished work, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.ledger import RankLedger, name_place
from datatrove_ckpt.output.hub import HubFolder

REDO_KINDS = frozenset({"missing", "truncated", "grown", "altered", "twice"})
"""The kinds of problems after which ``repair`` lets a chunk be processed again."""


@dataclass(slots=True)
class Problem:
    """One problem, or, in ``Report.unfinished``, work that is not done yet. The message says what to do."""

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
    """A committed chunk: its output files, and the number of documents in them (None: unknown)."""

    rank: RankLedger
    index: int
    files: list[OutputFile]
    documents: int | None

    def __str__(self) -> str:
        return name_place(self.rank.root, self.rank.number, self.index)


@dataclass
class Report:
    """What ``verify`` found.

    Attributes:
        repair_command: the command that repairs the chunks to redo.
        output: the output folder's name.
        folder: the same as datatrove's ``DataFolder``.
        ranks: without their commits, which ``chunks`` has.
        uncounted: the writers whose rows cannot be counted.
    """

    checkpoints: Path
    repair_command: str
    output: str = ""
    folder: Any = None
    ranks: list[RankLedger] = field(default_factory=list)
    chunks: list[CommittedChunk] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)

    def add_problem(
        self, kind: str, message: str, rank: RankLedger | None = None, chunk_index: int | None = None, path: Any = None
    ) -> None:
        self.problems.append(_problem(kind, message, rank, chunk_index, path))

    def add_unfinished(
        self, message: str, rank: RankLedger | None = None, chunk_index: int | None = None, path: str | None = None
    ) -> None:
        self.unfinished.append(_problem("unfinished", message, rank, chunk_index, path))

    @property
    def redo_advice(self) -> str:
        """The last sentence about a file that `repair` makes again."""
        return f" To redo it: {self.repair_command}, then run again."

    @cached_property
    def hub(self) -> HubFolder | None:
        """The output folder on the hub; None if it is elsewhere."""
        return HubFolder.of(self.folder)

    @property
    def tasks(self) -> int:
        """The number of tasks of the run; 0 if no run.json tells."""
        return max((rank.run.get("tasks") or 0 for rank in self.ranks if not rank.root), default=0)

    @property
    def number_of_files(self) -> int:
        return sum(len(chunk.files) for chunk in self.chunks)


def _problem(kind: str, message: str, rank: RankLedger | None, chunk_index: int | None, path: Any) -> Problem:
    root, number = rank.key if rank else ("", None)
    return Problem(kind, message, root, number, chunk_index, None if path is None else str(path))
