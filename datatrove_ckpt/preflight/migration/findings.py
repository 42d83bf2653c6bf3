"""What ``migrate`` finds and does, chunk by chunk and document by document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.lines import Json

LACKS = "datatrove calls its chunk finished, but the chunk's output lacks it"


class Left(NamedTuple):
    """A document that the next run processes, in a chunk that datatrove's run has begun.

    ``why``: what is wrong with that which datatrove has kept of it; "": it has kept nothing, so it was not finished.
    ``text``: hash of its text.
    """

    ordinal: int
    id: str
    why: str
    text: int = 0


@dataclass
class Chunk:
    """A chunk that datatrove's run has begun.

    Attributes:
        finished: all its documents are accounted for, and its files stay as they are.
        counts: of its documents: read, and of those that are kept, written and dropped. With their requests and tokens,
            as far as their results tell.
        files: its output files. They stay if it is finished, else they are moved aside.
        left: documents that the next run processes.
        problems: what is wrong with its files.
    """

    index: int
    first_ordinal: int
    finished: bool = False
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    files: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    position: Json | None = None
    last_input: str = ""

    @property
    def kept(self) -> int:
        """Number of documents that are not processed again."""
        return self.counts.written + self.counts.dropped

    @property
    def redone(self) -> list[Left]:
        """Those of which datatrove has kept something that cannot be trusted."""
        return [one for one in self.left if one.why]


@dataclass
class Shape:
    """What the rows that are kept look like. Without ``executor.json``, they alone tell these settings.

    Attributes:
        rows: number of rows that would show it.
        with_key: number of those with the key of the results.
        most_results: the most results of a row.
    """

    rows: int = 0
    with_key: int = 0
    most_results: int = 0

    @classmethod
    def sum(cls, shapes: Iterable[Shape]) -> Shape:
        """Of all ranks."""
        total = cls()
        for shape in shapes:
            total.rows += shape.rows
            total.with_key += shape.with_key
            total.most_results = max(total.most_results, shape.most_results)
        return total

    def see(self, results: int | None) -> None:
        """A row with so many results; -1: without the key; None: it cannot show it."""
        if results is not None:
            self.rows += 1
            self.with_key += results >= 0
            self.most_results = max(self.most_results, results)


@dataclass
class Rank:
    """A rank of datatrove's run.

    Attributes:
        done: it has a checkpoint of this program already, so nothing is taken over.
        chunks: in ascending order.
        aside: output files that are moved aside, because their documents are in others, or will be.
        shape: of the rows that were found.
        made_with: what is known of the settings that made its documents, see ``Findings``.
    """

    rank: int
    done: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    shape: Shape = field(default_factory=Shape)
    made_with: Json | None = None

    @property
    def kept(self) -> int:
        """Number of documents that are not processed again."""
        return sum(chunk.kept for chunk in self.chunks)

    def to_json(self) -> Json:
        return {
            "rank": self.rank,
            "done": self.done,
            "chunks": [_chunk_json(chunk) for chunk in self.chunks],
            "moved_aside": self.aside,
        }


def _chunk_json(chunk: Chunk) -> Json:
    return {
        "chunk": chunk.index,
        "finished": chunk.finished,
        "documents": chunk.counts.read,
        "written": chunk.counts.written,
        "dropped": chunk.counts.dropped,
        "files": chunk.files if chunk.finished else [],
        "problems": chunk.problems,
        "redone": [{"document": one.ordinal, "id": one.id, "why": one.why} for one in chunk.redone],
        "not_finished": [{"document": one.ordinal, "id": one.id} for one in chunk.left if not one.why],
    }


@dataclass
class Findings:
    """Attributes:
    ranks: in ascending order.
    tasks: number of ranks of the run.
    why_not_same: why datatrove's requests are not known to have had the settings of CONFIG; "" if they had.
    other_settings: those that differ, by name: datatrove's and ours; without secrets.
    missing: ranks of which there is no trace, with output files that are there nevertheless.
    warnings: what to look at.
    """

    ranks: list[Rank] = field(default_factory=list)
    tasks: int = 0
    why_not_same: str = ""
    other_settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    missing: dict[int, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Number of documents that are not processed again."""
        return sum(rank.kept for rank in self.ranks)

    def made_with(self, kept: int) -> Json:
        """What is known of the settings that made the documents that are kept."""
        other = {name: {"datatrove": one, "config": two} for name, (one, two) in self.other_settings.items()}
        return {"documents": kept, "same_settings": not self.why_not_same, "why": self.why_not_same, "other": other}

    def to_json(self) -> Json:
        return {
            "ranks": [rank.to_json() for rank in self.ranks],
            "made_with": self.made_with(self.kept),
            "missing_ranks": [{"rank": rank, "output": names} for rank, names in sorted(self.missing.items())],
            "warnings": self.warnings,
        }
