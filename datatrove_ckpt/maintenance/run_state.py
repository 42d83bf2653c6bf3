"""RunState: the state of a whole run, as ``status`` prints it and ``report`` draws it. Plain data, nothing is read.

    where.py          WHAT (folder, mirror, YAML file) -> a folder with the ranks' files
    judge.py          a rank's ledger -> RankState: which are slow, silent, stuck or failed, and why
    read_state.py     all ranks -> RunState; start reading here

Times are Unix seconds, durations seconds, rates per second. None means: not known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_reader import AttemptSummary, Rates
from datatrove_ckpt.checkpoint.history_records import InputPosition, WorkCounts

State = Literal["running", "finished", "interrupted", "failed", "lost", "unfinished", "damaged"]
"""What a rank does now.

    running       a process works on it
    finished      every document of its input is committed
    interrupted   it was asked to stop, and saved what it had
    failed        it was ended by an error
    lost          its last attempt ended without a word: kill -9, out of memory, a node that is gone
    unfinished    not finished, and nothing says why: its history is missing
    damaged       a file of its checkpoint cannot be used
"""

Trouble = Literal[
    "damaged", "failed", "lost", "silent", "stuck", "looping", "restarting", "slow", "interrupted", "unfinished"
]
"""Why a rank needs attention, the most urgent first. ``silent`` to ``slow`` are ranks that run.

    silent        its process is there, and has written no line of its history for minutes
    stuck         it writes lines, and no document or answer has come for minutes
    looping       its attempts end again and again, and no document is finished
    restarting    its servers are started again and again
    slow          it is far behind the median of the ranks that run and those that are finished
    unfinished    it is not finished, and no rank of the run goes on
"""


@dataclass(slots=True)
class RankState:
    """One rank.

    Attributes:
        root: "" or the retry of dead letters that it belongs to, such as "retry-00001".
        folder: its files, or a copy of them.
        trouble, reason: why it needs attention; None and "" if it does not.
        counts, chunks, files: what is committed.
        unfinished: the documents in journals of chunks that are not committed, by ``journals``.
        exact: whether ``unfinished`` was counted; else it is as old as the last line of the history.
        reshards: how many times the input was dealt out anew.
        position: how much of its input is done; not known of a share that it has not begun with.
        work: what all its attempts did, as of the last line of the history.
        lost_in_flight: requests in flight when an attempt ended without a word, as of its last line: they are sent
            again, and their answers may have been paid for.
        rates: of the last minutes, while it runs. ``has_rate``: of five minutes at least, so that it can be compared.
        seconds: what its attempts took together.
        downtime: seconds between attempts that were cut short and the ones after them.
        in_flight, waiting: requests at its last line, while it runs.
        as_of: time of that line; also if its last attempt ended without a word.
        dead_letters: by cause; no more than were read.
        attempts: those that the history still names.
        number_of_attempts: all of them.
        last_word: time of the last change of any of its files.
        last_change: of its journals and commits, if it runs, or its last attempt ended without a word; else 0.
        time_left: of this rank, at its present rate.
        holder: host and pid of the process that has its lock.
        is_copy: read from a mirror, where locks cannot be seen.
    """

    root: str
    rank: int
    folder: Path
    state: State
    trouble: Trouble | None = None
    reason: str = ""
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    chunks: int = 0
    files: int = 0
    unfinished: DocumentCounts = field(default_factory=DocumentCounts)
    journals: int = 0
    exact: bool = True
    reshards: int = 0
    position: InputPosition = field(default_factory=InputPosition)
    work: WorkCounts = field(default_factory=WorkCounts)
    lost_in_flight: int = 0
    rates: Rates = field(default_factory=Rates)
    has_rate: bool = False
    seconds: float = 0.0
    downtime: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    as_of: float | None = None
    dead_letters: Counter[str] = field(default_factory=Counter)
    attempts: list[AttemptSummary] = field(default_factory=list)
    number_of_attempts: int = 0
    last_word: float | None = None
    last_change: float = 0.0
    last_commit: float | None = None
    time_left: float | None = None
    holder: dict[str, Any] | None = None
    is_copy: bool = False

    @property
    def documents(self) -> int:
        """Documents that are done, committed or not."""
        return self.counts.read + self.unfinished.read

    @property
    def requests(self) -> int:
        """Requests of documents that are done."""
        return self.counts.requests + self.unfinished.requests

    @property
    def goes_on(self) -> bool:
        """Whether it is finished, or runs and gets ahead."""
        return self.state == "finished" or (
            self.state == "running" and self.trouble not in ("silent", "stuck", "looping")
        )

    @property
    def work_is_at_least(self) -> bool:
        """Whether the history does not say all that was sent: it is older than the files, or ends without a word."""
        silent = any(attempt.without_a_word for attempt in self.attempts)
        return silent or self.work.sent + self.work.cached < self.requests

    @property
    def attempt(self) -> AttemptSummary | None:
        """The last one."""
        return self.attempts[-1] if self.attempts else None


@dataclass(slots=True)
class Totals:
    """Sums over the ranks of a run, or over its retries of dead letters.

    Attributes:
        average: documents and so on for each second in which at least one rank worked.
        working_seconds: the number of these seconds.
        time_left: None if the end of the input is not known, or nothing runs. Without the work of ``halted`` ranks.
        halted: ranks that are started and do not go on, if there is a time left.
        not_started: ranks that have no folder.
        attempts_without_a_word: among ``attempts``.
        as_of: when the oldest of the lines was written that tell where the ranks that run stand; if none runs, those
            whose last attempt ended without a word.
    """

    states: Counter[str] = field(default_factory=Counter)
    not_started: int = 0
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    unfinished: DocumentCounts = field(default_factory=DocumentCounts)
    chunks: int = 0
    files: int = 0
    unfinished_chunks: int = 0
    position: InputPosition = field(default_factory=InputPosition)
    total_is_estimated: bool = False
    """The input of ranks that are not started is taken to be as large as the mean of the others'."""
    work: WorkCounts = field(default_factory=WorkCounts)
    work_is_at_least: bool = False
    lost_in_flight: int = 0
    rates: Rates = field(default_factory=Rates)
    average: Rates = field(default_factory=Rates)
    working_seconds: float = 0.0
    time_left: float | None = None
    halted: int = 0
    in_flight: int = 0
    waiting: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    attempts_without_a_word: int = 0
    started: float | None = None
    exact: bool = True
    as_of: float | None = None

    @property
    def done(self) -> DocumentCounts:
        """Documents that are done, committed or not."""
        found = replace(self.counts)
        found.add(self.unfinished)
        return found

    @property
    def documents(self) -> int:
        return self.counts.read + self.unfinished.read


@dataclass(slots=True)
class RunState:
    """The whole run.

    Attributes:
        what: the folder or URL that was read, for people.
        read_at: when it was read.
        seconds_to_read: how long that took.
        newest: time of the newest change that was seen. ``read_at - newest`` is how old the data is.
        tasks: number of ranks of the run; 0 if nothing tells it.
        identity: the settings that all ranks share.
        missing: ranks of the run that have no folder.
        gone: of these, ranks that had committed chunks: their folders were removed.
        foreign: ranks with higher numbers than the run has. They are nowhere counted.
        refusal: why no rank of it can start, and what to do; empty if nothing is known to refuse it.
        is_half_resharded: this is because `reshard` was interrupted, so nothing is damaged.
        is_unstarted: a fork has made it, and no process has worked on it yet.
        ranks, retries: in ascending order. Retries of dead letters read documents that ``ranks`` have read before.
    """

    what: str
    is_copy: bool
    read_at: float
    seconds_to_read: float = 0.0
    newest: float | None = None
    tasks: int = 0
    identity: dict[str, Any] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    refusal: str = ""
    is_half_resharded: bool = False
    is_unstarted: bool = False
    ranks: list[RankState] = field(default_factory=list)
    retries: list[RankState] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    retried: Totals = field(default_factory=Totals)

    @property
    def together(self) -> Totals:
        """The sums with those of retries. Each document counts once: one that a retry has written is not dead."""
        own, again = self.totals, self.retried
        counts = replace(own.counts)
        counts.add_retry(again.counts)
        sums = {name: getattr(own, name) + getattr(again, name) for name in _TOGETHER}
        at_least = own.work_is_at_least or again.work_is_at_least
        return replace(own, counts=counts, work=own.work.plus(again.work), work_is_at_least=at_least, **sums)

    @property
    def troubled(self) -> list[RankState]:
        """The ranks that need attention, the most urgent first."""
        found = [rank for rank in (*self.ranks, *self.retries) if rank.trouble is not None]
        return sorted(found, key=lambda rank: (TROUBLES.index(rank.trouble or "slow"), rank.root, rank.rank))

    @property
    def is_damaged(self) -> bool:
        """Whether a file of the run cannot be used, or is missing."""
        damaged = self.totals.states["damaged"] or self.retried.states["damaged"]
        return bool(damaged or (self.refusal and not self.is_half_resharded))

    @property
    def is_dealt_anew(self) -> bool:
        """Whether the number of tasks was changed since the run began."""
        return any(rank.reshards for rank in self.ranks)

    @property
    def is_finished(self) -> bool:
        """Whether every rank is finished, those included that are not started."""
        return bool(self.ranks) and not self.totals.not_started and set(self.totals.states) == {"finished"}


_TOGETHER = ("chunks", "files", "attempts", "attempts_without_a_word", "lost_in_flight", "in_flight", "waiting")
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)
