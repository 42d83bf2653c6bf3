"""RunState: the state of a run, printed by ``status`` and drawn by ``report``. Plain data.

Times are Unix seconds, durations seconds, rates per second; None is unknown.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import orjson

from datatrove_ckpt.checkpoint.history_read import AttemptSummary
from datatrove_ckpt.checkpoint.history_records import InputPosition, Silence, Wait
from datatrove_ckpt.checkpoint.numbers import DocumentCounts, Rates, RunNumbers, sum_delivered
from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.claims.claims import Claimant
from datatrove_ckpt.common import JsonObject

State = Literal["damaged", "failed", "lost", "interrupted", "unfinished", "running", "finished"]
"""What a rank does now, in the order in which people want to know it.

    running       a process works on it
    finished      every document of its input is committed
    interrupted   it was asked to stop, and saved what it had
    failed        it was ended by an error
    lost          its last attempt was killed: kill -9, out of memory, a node that is gone
    unfinished    not finished, and nothing says why: its history is missing
    damaged       a file of its checkpoint cannot be used
"""

Trouble = Literal[
    "damaged", "failed", "lost", "silent", "stuck", "slow", "interrupted", "unfinished"
]
"""Why a rank needs attention, the most urgent first. ``silent`` to ``slow`` are ranks that run.

    silent        its process is there, and has written no line of its history for minutes
    stuck         it writes lines, and no document or answer has come for minutes; or for half a
                  minute all requests fail
    slow          it is far behind the median of the ranks that run and those that are finished
    unfinished    it is not finished, and no rank of the run goes on
"""


_LEAST_DOCUMENTS = 10
_LEAST_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class RunSums(RunNumbers):
    """The numbers of a rank now, and sums over ranks.

    Attributes:
        rates: of the last minutes, while it runs.
        as_of: time of the last line of a lost rank, or of a rank that runs for a second or longer
            and is not silent; else None. Of several ranks the oldest, of running ranks if any.
        time_left: at the present rate; None if the end of the input is not known, if nothing runs,
            or if nothing has been answered for longer than that.
    """

    position: InputPosition = field(default_factory=InputPosition)
    rates: Rates = field(default_factory=Rates)
    as_of: float | None = None
    time_left: float | None = None


@dataclass(slots=True)
class RankState(RunSums):
    """One rank.

    Attributes:
        root: "" or its retry of dead letters, such as "retry-00001".
        folder: its files, or a copy of them.
        has_rate: ``rates`` cover at least five minutes, so that they can be compared.
        attempts: those that the history still names.
        last_word: time of the last change of any of its files.
        last_change: of its journals and commits, if it runs, or its last attempt has no end line;
            else 0.
        holder: host and pid of the process that has its lock.
        is_copy: read from a mirror, where locks cannot be seen.
    """

    root: str
    rank: int
    folder: Path
    state: State
    trouble: Trouble | None = None
    reason: str = ""
    has_rate: bool = False
    attempts: list[AttemptSummary] = field(default_factory=list)
    wait: Wait = field(default_factory=Wait)
    last_word: float | None = None
    last_change: float = 0.0
    last_commit: float | None = None
    holder: JsonObject | None = None
    is_copy: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether averages count: few documents or seconds show chance or the start of servers."""
        return self.work.documents >= _LEAST_DOCUMENTS and self.seconds >= _LEAST_SECONDS

    def need_attention(self, trouble: Trouble, reason: str) -> None:
        self.trouble = trouble
        self.reason = reason

    @property
    def share(self) -> float | None:
        if self.state == "finished":
            return 1.0
        return self.position.share

    @property
    def goes_on(self) -> bool:
        return self.state == "finished" or (
            self.state == "running" and self.trouble not in ("silent", "stuck")
        )

    @property
    def attempt(self) -> AttemptSummary | None:
        if self.attempts:
            return self.attempts[-1]
        return None

    @property
    def process(self) -> str:
        """The process that works on it, or was the last to: "pid 42 on node7, Slurm job 17_5"."""
        last = self.attempt or AttemptSummary(0, 0.0, 0.0)
        if self.holder is None:
            return f"pid {last.pid} on {last.place}"
        where = replace(last, host=str(self.holder.get("host"))).place
        return f"pid {self.holder.get('pid')} on {where}"


@dataclass(slots=True)
class Totals(RunSums):
    """Sums over the ranks of a run, or over its retries of dead letters.

    Attributes:
        total_is_estimated: inputs of ranks without a start count as the mean of the other inputs.
        average: over the ``working_seconds``, in which at least one rank worked.
        halted: ranks at a halt, whose work is not in the time left.
    """

    states: Counter[str] = field(default_factory=Counter)
    not_started: int = 0
    total_is_estimated: bool = False
    average: Rates = field(default_factory=Rates)
    working_seconds: float = 0.0
    halted: int = 0
    started: float | None = None


@dataclass(slots=True)
class RunState:
    """The whole run.

    Attributes:
        what: the folder or URL that was read, for people.
        command: resumes the run; "" if it is not known.
        logs: the ``logging_dir``, if it is known.
        newest: time of the newest change that was seen.
        tasks: number of ranks of the run; 0: unknown.
        identity: the settings that all ranks share.
        missing: ranks of the run that have no folder.
        gone: missing ranks that had committed chunks.
        foreign: ranks with higher numbers than the run has. They are not counted.
        workers: the processes that have claimed ranks, or may do so.
        given_up: ranks that workers no longer try, with the causes.
        retries: of dead letters: they read documents that ``ranks`` have read before.
    """

    what: str
    is_copy: bool
    read_at: float
    command: str = ""
    logs: str | None = None
    newest: float | None = None
    tasks: int = 0
    identity: JsonObject = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    workers: list[Claimant] = field(default_factory=list)
    given_up: dict[int, str] = field(default_factory=dict)
    ranks: list[RankState] = field(default_factory=list)
    retries: list[RankState] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    retried: Totals = field(default_factory=Totals)

    @property
    def together(self) -> Totals:
        """Returns sums with retries; a document that a retry has written is not dead."""
        again = replace(
            self.retried,
            unfinished=DocumentCounts(),
            unfinished_chunks=0,
            dead_letters=Counter(),
            exact=True,
        )
        sums = sum((self.totals, again), RunNumbers())
        found = replace(self.totals, **sums.fields())
        if self.retries:
            found.counts = sum_delivered(
                (rank.rank, rank.counts) for rank in (*self.ranks, *self.retries)
            )
        found.states = found.states + again.states
        found.rates += again.rates
        found.as_of = found.as_of or again.as_of
        return found

    @property
    def causes(self) -> Counter[str]:
        """Returns the known causes of remaining dead letters."""
        found = (self.totals.dead_letters, self.retried.dead_letters)
        return next(
            (causes for causes in found if 0 < causes.total() <= self.together.counts.dead),
            Counter(),
        )

    @property
    def troubled(self) -> list[RankState]:
        """Ranks with trouble, the most urgent first."""
        found = [rank for rank in (*self.ranks, *self.retries) if rank.trouble is not None]
        return sorted(
            found, key=lambda rank: (TROUBLES.index(rank.trouble or "slow"), rank.root, rank.rank)
        )

    @property
    def is_damaged(self) -> bool:
        return bool(self.totals.states["damaged"] or self.retried.states["damaged"])

    @property
    def is_mostly_dead(self) -> bool:
        """Whether most documents are dead, of at least 20."""
        done = self.together.done
        return 2 * done.dead > done.read >= 20

    @property
    def is_finished(self) -> bool:
        return (
            bool(self.ranks)
            and not self.totals.not_started
            and set(self.totals.states) == {"finished"}
        )


TROUBLES: tuple[Trouble, ...] = get_args(Trouble)


VERSION = 2
"""Version of the JSON. New keys do not change it."""


def to_json(state: RunState) -> bytes:
    """Returns the JSON of ``status --json``. docs/status.md explains it."""
    content = {
        "version": VERSION,
        "what": state.what,
        "is_copy": state.is_copy,
        "read_at": state.read_at,
        "newest": state.newest,
        "is_finished": state.is_finished,
        "delivered": state.together.counts,
        "tasks": state.tasks,
        "missing": state.missing,
        "gone": state.gone,
        "foreign": state.foreign,
        "workers": [worker._asdict() for worker in state.workers],
        "given_up": {str(rank): cause for rank, cause in state.given_up.items()},
        "totals": state.totals,
        "retried": state.retried,
        "ranks": [*state.ranks, *state.retries],
    }
    return orjson.dumps(content, _plain, orjson.OPT_INDENT_2)


def _plain(value: object) -> object:
    if isinstance(value, InputPosition):
        return {**value._asdict(), "share": value.share}
    if isinstance(value, Silence | Wait | SkippedLines):
        return value._asdict()
    return str(value)  # a path
