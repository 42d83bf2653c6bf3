"""RunNumbers: what a rank, or a run, has done over all attempts. Every display reads this record.

Documents come from commits and journals, requests from the history.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import WorkCounts
from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.common.formatting import plural

_ADDED = (
    "counts",
    "unfinished",
    "chunks",
    "files",
    "unfinished_chunks",
    "lost_in_flight",
    "number_of_attempts",
    "killed",
    "uncertain",
    "seconds",
    "in_flight",
    "waiting",
    "work",
    "skipped",
)


@dataclass(slots=True, kw_only=True)
class RunNumbers:
    """The numbers of a rank, or the sums over several ranks.

    Attributes:
        counts, chunks, files: what is committed.
        unfinished: the documents in journals of uncommitted chunks, by ``unfinished_chunks``.
        exact: ``unfinished`` was counted; else it is as old as the history's last line.
        work: what all attempts did, as of the history's last line.
        lost_in_flight: requests in flight at the last line of killed attempts; they are sent again,
            and perhaps paid twice.
        number_of_attempts: all attempts.
        killed: attempts without an end line.
        uncertain: attempts that have ended, and whose last answers are not in the history.
        seconds: sum over the attempts of all ranks.
        in_flight, waiting: requests at the last line, while the rank runs.
        skipped: lines of the input that were no documents.
        dead_letters: by cause; no more than were read.
    """

    counts: DocumentCounts = field(default_factory=DocumentCounts)
    unfinished: DocumentCounts = field(default_factory=DocumentCounts)
    chunks: int = 0
    files: int = 0
    unfinished_chunks: int = 0
    exact: bool = True
    work: WorkCounts = field(default_factory=WorkCounts)
    lost_in_flight: int = 0
    number_of_attempts: int = 0
    killed: int = 0
    uncertain: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    skipped: SkippedLines = field(default_factory=SkippedLines)
    dead_letters: Counter[str] = field(default_factory=Counter)

    @property
    def at_least(self) -> str:
        """The prefix of numbers from the history, whose last minute a kill or a full disk loses."""
        if self.uncertain:
            return "at least "
        return ""

    @property
    def documents(self) -> int:
        return self.counts.read + self.unfinished.read

    @property
    def done(self) -> DocumentCounts:
        """Their documents by outcome, with their requests, tokens and answers."""
        return self.counts + self.unfinished

    @property
    def paid(self) -> str:
        """Describes the answers' price as reported by servers; "" without a report."""
        work = self.work
        said = []
        if work.cached_tokens:
            said.append(
                f"{work.cached_tokens:,} of {work.prompt_tokens:,} prompt tokens cached by servers"
            )
        if work.reasoning_tokens:
            said.append(
                f"{work.reasoning_tokens:,} of {work.completion_tokens:,} completion tokens for "
                "reasoning"
            )
        said += [f"{plural(count, 'answer')} in tier {name}" for name, count in work.tiers.items()]
        if work.cost:
            said.append(f"cost {work.cost / 1e9:.6g}")
        if not said:
            return ""
        return self.at_least + ", ".join(said)

    def add(self, other: RunNumbers) -> None:
        self.dead_letters.update(other.dead_letters)
        self.exact = self.exact and other.exact
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
