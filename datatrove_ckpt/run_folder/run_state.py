"""The state of a run, printed by ``status`` and drawn by ``report``.

Times are Unix seconds, durations seconds, rates per second; None is unknown.

``rank_state`` decides what a rank does, and whether and why it needs attention. Limits are minutes:
a line per minute is due. A running rank has a process that holds its lock. Where locks are
invisible (in a mirror's copy, and on some file systems), a rank runs as long as its history grows.
"""

import datetime
import shlex
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import orjson

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.history import (
    RATE_SECONDS,
    WAITS_FOR_BATCHES,
    AttemptSummary,
    History,
    ProgressRecord,
    WaitStatus,
)
from datatrove_ckpt.checkpoint.identity import settings_in
from datatrove_ckpt.checkpoint.job_file import removed_ranks
from datatrove_ckpt.checkpoint.rank_summary import (
    Include,
    JobTotals,
    RankSummary,
    find_ranks,
    merged_causes,
    read_rank,
)
from datatrove_ckpt.checkpoint.run_limits import Limits, RunTotals, recorded_limits
from datatrove_ckpt.claims.claims import Claimant, claimants, given_up, open_store
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import (
    DocumentCounts,
    InputPosition,
    LogHistogram,
    Processed,
    RunNumbers,
    WorkCounts,
)
from datatrove_ckpt.common.formatting import duration, plural, time_left, without_flag
from datatrove_ckpt.config.paths import COMMAND_FILE
from datatrove_ckpt.errors import CheckpointLocked, CkptError
from datatrove_ckpt.run_folder.run_location import RunLocation

RankState = Literal["damaged", "failed", "lost", "interrupted", "unfinished", "running", "finished"]
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
    unfinished    it is not finished, and no rank of the run works
"""


@dataclass(slots=True, kw_only=True)
class RunSums(RunNumbers):
    """The numbers of a rank now, and sums over ranks.

    Attributes:
        rates: of the last minutes, while it runs.
        as_of: time of the last line of a lost rank, or of a rank that runs for a second or longer
            and is not silent; else None. Of several ranks the oldest, of running ranks if any.
        time_left: seconds at the present rate; None if the end of the input is not known, if
            nothing runs, or if nothing has been answered for longer than that.
    """

    position: InputPosition = InputPosition()
    rates: Processed = Processed()
    as_of: float | None = None
    time_left: float | None = None


@dataclass(slots=True)
class RankStatus(RunSums):
    """One rank.

    Attributes:
        root: "" or its retry of dead letters, such as "retry-00001".
        has_rate: ``rates`` cover at least five minutes, so that they can be compared.
        last_word: last change of any of its files.
        last_change: time of its last change to journals or commits, if it runs, or its last
            attempt has no end line; else 0.
        holder: host and pid of the process that has its lock.
        is_copy: it was read from a mirror, where locks cannot be seen.
    """

    root: str
    rank: int
    folder: Path
    state: RankState
    trouble: Trouble | None = None
    reason: str = ""
    has_rate: bool = False
    attempts: list[AttemptSummary] = field(default_factory=list)
    wait: WaitStatus = WaitStatus()
    last_word: float | None = None
    last_change: float = 0.0
    last_commit: float | None = None
    holder: JsonObject | None = None
    is_copy: bool = False

    def need_attention(self, trouble: Trouble, reason: str) -> None:
        self.trouble = trouble
        self.reason = reason

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
        """The current or last process: "pid 42 on node7, Slurm job 17_5"."""
        last = self.attempt or AttemptSummary(0, 0.0, 0.0)
        if self.holder is None:
            return f"pid {last.pid} on {last.place}"
        place = replace(last, host=str(self.holder.get("host"))).place
        return f"pid {self.holder.get('pid')} on {place}"


@dataclass(slots=True)
class Totals(RunSums):
    """Sums over ranks, or over retries of dead letters.

    Attributes:
        total_is_estimated: inputs of ranks without a start count as the mean of the other inputs.
        average: rates over the ``working_seconds``, in which at least one rank worked.
        halted: ranks at a halt, whose work is not in the time left.
    """

    states: Counter[str] = field(default_factory=Counter)
    not_started: int = 0
    total_is_estimated: bool = False
    average: Processed = Processed()
    working_seconds: float = 0.0
    halted: int = 0
    started: float | None = None


@dataclass
class RunState:
    """The whole run.

    Attributes:
        command: resumes the run; "" if unknown.
        tasks: number of ranks of the run; 0: unknown.
        gone: missing ranks that had committed chunks.
        limits: limits of the last start; none if they are not known here.
        foreign: ranks with higher numbers than the run has. They are not counted.
        workers: the processes that have claimed ranks, or may do so.
        given_up: ranks that workers no longer try, with the causes.
        retries: retries of dead letters, which read documents that ``ranks`` have read before.
        samples: what ``run --sample`` took, all samples together.
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
    ranks: list[RankStatus] = field(default_factory=list)
    retries: list[RankStatus] = field(default_factory=list)
    limits: Limits = Limits()
    totals: Totals = field(default_factory=Totals)
    retried: Totals = field(default_factory=Totals)
    samples: RunNumbers = field(default_factory=RunNumbers)

    @property
    def all_ranks(self) -> list[RankStatus]:
        return self.ranks + self.retries

    @property
    def sampled(self) -> WorkCounts:
        return self.samples.work

    @property
    def delivered(self) -> DocumentCounts:
        return self.together.counts

    @cached_property
    def together(self) -> Totals:
        job = JobTotals()
        for rank in self.all_ranks:
            job.add(rank.root, rank.rank, rank)
        return replace(
            self.totals,
            **job.numbers.fields(),
            states=self.totals.states + self.retried.states,
            rates=self.totals.rates + self.retried.rates,
            as_of=self.totals.as_of or self.retried.as_of,
        )

    @property
    def run_totals(self) -> RunTotals:
        return RunTotals.of(self.together.work, self.delivered.written)

    @property
    def causes(self) -> Counter[str]:
        candidates = (self.totals.dead_letters, self.retried.dead_letters)
        return next(
            (causes for causes in candidates if 0 < causes.total() <= self.delivered.dead),
            Counter(),
        )

    @property
    def troubled(self) -> list[RankStatus]:
        return [
            rank
            for trouble in get_args(Trouble)
            for rank in self.all_ranks
            if rank.trouble == trouble
        ]

    @property
    def is_damaged(self) -> bool:
        return bool(self.totals.states["damaged"] or self.retried.states["damaged"])

    @property
    def is_at_work(self) -> bool:
        """Includes a process between two tasks."""
        return any(rank.state == "running" for rank in self.all_ranks) or any(
            worker.is_alive for worker in self.workers
        )

    @property
    def is_finished(self) -> bool:
        return (
            bool(self.ranks)
            and not self.totals.not_started
            and set(self.totals.states) == {"finished"}
        )


_KEYS = [
    "what",
    "is_copy",
    "read_at",
    "newest",
    "is_finished",
    "delivered",
    "tasks",
    "missing",
    "gone",
    "foreign",
    "workers",
    "given_up",
    "limits",
    "totals",
    "retried",
    "sampled",
]


def to_json(state: RunState) -> bytes:
    """Returns the JSON that docs/status.md explains."""
    fields = {
        "version": 2,  # new keys do not change it
        **{key: getattr(state, key) for key in _KEYS},
        "ranks": state.all_ranks,
    }
    option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS
    return orjson.dumps(fields, _plain, option)


def _plain(value: object) -> object:
    if isinstance(value, LogHistogram):
        return value.percentiles
    if isinstance(value, Counter):
        return dict(value)
    if isinstance(value, InputPosition):
        return {**value._asdict(), "share": value.share}
    if isinstance(value, WaitStatus | Claimant):
        return value._asdict()
    return str(value)


# sums over ranks: rates, averages, the input, and the time that is left ---------------------------


def add_up(ranks: list[RankStatus], now: float, tasks: int = 0) -> Totals:
    """Returns the sums over some ranks.

    Args:
        tasks: number of ranks of the run; 0: as many as there are.
    """
    totals = Totals(**sum(ranks, RunNumbers()).fields())
    totals.states = Counter(rank.state for rank in ranks)
    totals.rates = _rates_now(ranks, now)
    running = [rank for rank in ranks if rank.state == "running"]
    totals.as_of = min(
        (rank.as_of for rank in running or ranks if rank.as_of is not None), default=None
    )
    totals.dead_letters = merged_causes(totals.dead_letters)
    totals.not_started = max(0, tasks - sum(rank.rank < tasks for rank in ranks))
    spans = []
    for rank in ranks:
        for attempt in rank.attempts:
            end = attempt.ended or attempt.last_seen
            if attempt is rank.attempt:
                end = attempt.ended or max(end, rank.last_change)
                if rank.state == "running" and not rank.is_copy:
                    end = now
            spans.append((attempt.started, end))
    spans.sort()
    if spans:
        totals.started = spans[0][0]
    covered = 0.0
    until = float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    # Finished documents of a killed attempt show more of its time than its lines.
    totals.working_seconds = max([covered, *(rank.seconds for rank in ranks)])
    _add_input(totals, ranks)
    if totals.working_seconds:
        done = totals.done.processed(totals.position.done)
        totals.average = done * (1 / totals.working_seconds)
    return totals


def _rates_now(ranks: list[RankStatus], now: float) -> Processed:
    """If a rank began in these minutes, ranks that finished meanwhile count: else many short tasks
    would have the rate of the few that have just begun.
    """
    rates = Processed()
    since = now - RATE_SECONDS
    running = _with_attempt(ranks, "running")
    finished = [
        (rank, attempt)
        for rank, attempt in _with_attempt(ranks, "finished")
        if attempt.last_seen > since and rank.documents
    ]
    goes_on = any(rank.goes_on for rank, _ in running)
    has_begun = any(attempt.started > since for _, attempt in running)
    if not (goes_on and has_begun and finished):
        return sum((rank.rates for rank, _ in running), rates)
    first = min(attempt.started for _, attempt in running + finished)
    seconds = now - max(first, since)
    for rank, attempt in running:
        rates += rank.rates * ((now - max(attempt.started, since)) / seconds)
    for rank, attempt in finished:
        length = max(attempt.last_seen - attempt.started, 1e-3)
        within = min(1.0, (attempt.last_seen - since) / length)
        share = within * attempt.own / rank.documents
        rates += rank.counts.processed(rank.position.done) * (share / seconds)
    return rates


def _with_attempt(
    ranks: list[RankStatus], state: RankState
) -> list[tuple[RankStatus, AttemptSummary]]:
    return [(rank, rank.attempts[-1]) for rank in ranks if rank.state == state and rank.attempts]


def _add_input(totals: Totals, ranks: list[RankStatus]) -> None:
    with_total = [rank for rank in ranks if rank.position.total is not None]
    units = {rank.position.unit for rank in with_total}
    if len(units) != 1:
        return
    done = sum(rank.position.done for rank in with_total)
    total = sum(rank.position.total or 0 for rank in with_total)
    # A finished rank without a document had no input.
    without_total = totals.not_started + sum(
        rank.position.total is None and (rank.state != "finished" or rank.documents > 0)
        for rank in ranks
    )
    with_input = max((rank.position.tasks or 0 for rank in with_total), default=0)
    if with_input:
        without_total = min(without_total, max(0, with_input - len(with_total)))
    if without_total:
        total += total * without_total // len(with_total)
        totals.total_is_estimated = True
    totals.position = InputPosition(done, total, units.pop())
    if totals.rates.input <= 0:
        return
    # Without the work of ranks at a halt, but at least what the last rank needs.
    remaining = total - done
    halted = [rank for rank in ranks if not rank.goes_on]
    totals.halted = len(halted)
    for rank in halted:
        if rank.position.total is not None:
            remaining -= rank.position.total - rank.position.done
    quiet = min((rank.wait.quiet for rank in ranks if rank.state == "running"), default=0.0)
    slowest = [rank.time_left for rank in ranks if rank.time_left is not None]
    totals.time_left = time_left(max(0, remaining), totals.rates.input, quiet, slowest)


SILENT_SECONDS = 180.0
"""A rank that runs and has written no line for so long is silent."""
COPY_SECONDS = 1200.0
"""``SILENT_SECONDS`` of a mirror: ``mirror_seconds: auto`` may wait ten minutes."""
STUCK_SECONDS = 600.0
"""A rank in which nothing is finished for so long is stuck."""
SLOW_SHARE = 0.5
"""A rank that is slower than this share of the median is slow."""
_MIN_PEERS = 4
_MIN_SECONDS = 60.0


def rank_state(ledger: RankSummary, now: float, copied_at: float | None) -> RankStatus:
    """Returns the state of one rank.

    Args:
        copied_at: time at which the copied version was uploaded; None: it is no copy.
    """
    numbers = RunNumbers()
    if ledger.damage is None:
        numbers = ledger.numbers()
    rank = RankStatus(
        ledger.root,
        ledger.number,
        ledger.folder,
        "damaged",
        is_copy=copied_at is not None,
        holder=ledger.holder,
        **numbers.fields(),
    )
    if ledger.damage is not None:
        rank.need_attention("damaged", str(ledger.damage))
        return rank
    recent = ledger.history
    last = recent.last
    rank.last_commit = ledger.last_commit
    rank.attempts = recent.attempts
    # Otherwise more is done than that line shows.
    if last is not None and (last.documents.read or not rank.documents):
        done = last.position.done
        if last.documents.read > rank.documents:  # ``repair`` has taken commits back
            done = done * rank.documents // last.documents.read
        rank.position = last.position._replace(done=done)
    attempt = rank.attempt
    quiet = now - max(recent.last_at or 0.0, copied_at or 0.0)
    limit = COPY_SECONDS if rank.is_copy else SILENT_SECONDS
    # An attempt may run although no lock is visible.
    may_run = False
    if attempt is not None and attempt.ended is None:
        may_run = rank.is_copy or attempt.host != socket.gethostname()
    # An attempt without a number in the history ended before its first line.
    if ledger.is_finished:
        rank.state = "finished"
    elif rank.holder is not None or (quiet <= limit and may_run):
        rank.state = "running"
        if last is not None and quiet > limit:
            reason = f"no word for {duration(quiet)} from {rank.process}"
            if rank.holder is not None:
                reason += ", which holds its lock"
            rank.need_attention("silent", reason)
        elif last is not None:
            _judge_running(rank, recent, last, now)
    elif attempt is None:
        rank.state = "unfinished"
    elif attempt.ended is None:
        rank.state = "lost"
        attempt.without_a_word = True
        rank.killed += 1
        rank.uncertain += 1
        rank.lost_in_flight += attempt.in_flight or 0
        age = duration(max(0.0, now - attempt.last_seen))
        how = "its last attempt was killed, or its node lost, or its disk full"
        rank.need_attention("lost", f"{how}; its last line is {age} old: {rank.process}")
        if last is not None:
            rank.as_of = last.at
    else:
        _judge_ended(rank, attempt, now)
    if rank.state in ("lost", "running") and not rank.is_copy:  # at least until then
        rank.last_change = min(now, ledger.written)
    words = (recent.last_at or 0.0, rank.last_commit or 0.0, rank.last_change)
    rank.last_word = max(words) or None
    return rank


def _judge_running(rank: RankStatus, recent: History, last: ProgressRecord, now: float) -> None:
    seconds = recent.seconds
    if seconds:
        rank.in_flight = last.in_flight
        rank.waiting = last.waiting
        rank.as_of = last.at
        rank.wait = last.wait
        if not last.silence.lasts:
            rank.rates = recent.rates()
    if rank.position.total is not None and seconds >= _MIN_SECONDS - 1:
        remaining = max(0, rank.position.total - rank.position.done)
        rank.time_left = time_left(remaining, rank.rates.input, rank.wait.quiet)
    rank.has_rate = seconds >= RATE_SECONDS - 1
    if last.silence.lasts:
        # To the minute, so that all ranks in one outage have one reason.
        since = datetime.datetime.fromtimestamp(last.at - last.silence.seconds).astimezone()
        reason = f"{last.silence}: no answer since {since:%H:%M}"
        if last.silence.patience:
            patience = f"{last.silence.patience:g} s (server_patience_seconds)"
            reason = f"{reason}; a task stops after {patience}"
        else:
            reason = f"{reason}; each request waits for its request_timeout"
        rank.need_attention("stuck", reason)
    elif last.wait.quiet >= STUCK_SECONDS:
        rank.need_attention("stuck", _stuck(recent, last, now))


def _stuck(recent: History, last: ProgressRecord, now: float) -> str:
    nothing = f"no answer and no document for {duration(last.wait.quiet + now - last.at)}"
    words = {"start": "was started", "restart": "was started again", "death": "died"}
    event = next(reversed(recent.servers), None)
    if event is not None and event.what in words:
        server = "its server"
        if " " in event.name:
            server = f"{server} {event.name}"
        text = f"{nothing}: {server} {words[event.what]} {duration(now - event.at)} ago"
        if event.why:
            return f"{text} ({event.why})"
        return text
    text = f"{nothing}: {plural(last.in_flight, 'request')} in flight, {last.waiting} waiting"
    if recent.then is not None:
        lately = Counter(last.own.errors)
        lately.subtract(recent.then.own.errors)
        errors = ", ".join(f"{count} {name}" for name, count in lately.most_common(3) if count > 0)
        if errors:
            text = f"{text}; errors in the last {duration(recent.seconds)}: {errors}"
    return text


def _judge_ended(rank: RankStatus, attempt: AttemptSummary, now: float) -> None:
    ago = f"{duration(now - (attempt.ended or now))} ago"
    if attempt.why == "error":
        rank.state = "failed"
        rank.need_attention("failed", f"{ago} on {attempt.host}: {attempt.what}")
    elif attempt.why == "stopped":
        rank.state = "interrupted"
        if attempt.what not in (WAITS_FOR_BATCHES, "until", "max_cost", "max_total_tokens"):
            reason = f"{attempt.outcome} {ago}"
            rank.need_attention("interrupted", reason)
    else:
        rank.state = "unfinished"  # repaired since, or its input has grown


def find_slow(ranks: Sequence[RankStatus]) -> None:
    """Marks the ranks that are far behind the median of the others.

    A slow rank has few documents and few tokens, and does not wait for its last answers.
    """
    running = [
        rank
        for rank in ranks
        if rank.state == "running"
        and rank.trouble is None
        and rank.has_rate
        and not rank.wait.all_started
    ]
    # Few documents or seconds show chance.
    speeds = [
        _speed(rank.work, rank.seconds)
        for rank in ranks
        if rank.state == "finished" and rank.work.documents >= 10 and rank.seconds >= 10
    ]
    speeds += [_speed(rank.rates) for rank in running]
    peers = [speed for speed in speeds if speed[1]]
    if len(peers) < _MIN_PEERS:
        return
    documents, tokens = (statistics.median(numbers) for numbers in zip(*peers, strict=True))
    for rank in running:
        rate = _speed(rank.rates)
        if rate[0] < SLOW_SHARE * documents and rate[1] < SLOW_SHARE * tokens:
            median = f"the median of {len(peers)} tasks is {documents:.3g}"
            rank.need_attention("slow", f"{rate[0]:.3g} documents/s; {median}")


def _speed(done: Processed | WorkCounts, seconds: float = 1.0) -> tuple[float, float]:
    return done.documents / seconds, (
        done.prompt_tokens + done.completion_tokens or done.requests
    ) / seconds


# all ranks of a run ------------------------------------------------------------------------------

# Limit for all ranks together.
_BYTES = 1 << 24
_MAX_BYTES = 1 << 23


def wanted_files(name: str, size: int) -> bool:
    return name not in (layout.CACHE, layout.RETRY_INPUT) and size <= _MAX_BYTES


def read_run_state(location: RunLocation, now: float | None = None) -> RunState:
    """Reads the ranks of a location.

    Raises:
        ConfigError: there is no rank, or this user may not read a rank.
    """
    folders = find_ranks(location.folder)
    if now is None:
        now = time.time()
    state = RunState(location.what, location.is_copy, now)
    state.logs = location.logging_dir
    state.limits = recorded_limits(location.folder)
    if location.config:
        state.command = shlex.join(["datatrove-ckpt", "run", *location.given])
        state.tasks = location.tasks
    elif location.logging_dir:
        # Redaction may have hidden a quote of the command.
        with suppress(OSError, ValueError):
            logs = Path(location.logging_dir)
            command, _, started_in = (logs / COMMAND_FILE).read_text().partition("\n")
            # The folder was moved or copied.
            if started_in and not (Path(started_in).exists() and logs.samefile(started_in)):
                elsewhere = without_flag(shlex.split(command), "--run-folder")
                command = shlex.join([*elsewhere, "--run-folder", str(logs.parent)])
            state.command = command
    run: Json = {}
    for folder in folders:
        include = Include.HISTORY | Include.JOURNALS | Include.LETTERS
        if not run:
            include |= Include.SETTINGS
        ledger = read_rank(folder, include, _BYTES // len(folders))
        copied_at = None
        if location.mirror is not None:
            copied = location.mirror.ranks.get(str(ledger.key))
            # None: a refresh failed halfway.
            copied_at = 0.0 if copied is None else copied.when
        rank = rank_state(ledger, now, copied_at)
        if ledger.root:
            state.retries.append(rank)
        else:
            state.ranks.append(rank)
            run = run or ledger.run
    if run:
        state.identity = {"format": run["format"], **settings_in(run)}
        state.tasks = int(state.identity.get("tasks") or state.tasks)
    numbers = {rank.rank for rank in state.ranks}
    state.missing = [rank for rank in range(state.tasks) if rank not in numbers]
    state.gone = removed_ranks(location.folder, state.missing)
    state.foreign = [rank.rank for rank in state.ranks if 0 < state.tasks <= rank.rank]
    state.ranks = [rank for rank in state.ranks if rank.rank not in state.foreign]
    find_slow(state.ranks)
    with suppress(OSError, CkptError):  # claims are hints
        _read_claims(state, location)
    if not state.is_at_work:
        for rank in state.all_ranks:
            if rank.state == "unfinished" and rank.trouble is None:
                rank.need_attention("unfinished", "nothing runs, and it is not finished")
    state.totals = add_up(state.ranks, state.read_at, state.tasks)
    state.retried = add_up(state.retries, state.read_at)
    words = [rank.last_word for rank in state.all_ranks if rank.last_word is not None]
    state.newest = max(words, default=None)
    for sample in layout.sample_folders(location.folder):
        for folder in layout.rank_folders(sample):
            state.samples += read_rank(folder, Include.HISTORY).numbers()
    return state


def _read_claims(state: RunState, location: RunLocation) -> None:
    folder = location.logging_dir
    if folder is None and not location.is_copy:
        folder = str(location.folder.parent / "logs")
    if folder is None or ("://" not in folder and not Path(folder, "claims").is_dir()):
        return
    store = open_store(f"{folder.rstrip('/')}/claims")
    finished = {rank.rank for rank in state.ranks if rank.state == "finished"}
    for worker in claimants(store):
        unfinished = [rank for rank in worker.ranks if rank not in finished]
        if unfinished or worker.is_alive:
            state.workers.append(worker._replace(ranks=unfinished))
    state.given_up = given_up(store)
    if any(worker.is_alive and not worker.runs_all for worker in state.workers):
        for rank in state.ranks:
            if rank.state in ("failed", "interrupted") and rank.rank not in state.given_up:
                rank.trouble = None  # a worker starts it again


def check_idle(location: RunLocation, ranks: list[RankSummary]) -> None:
    """Raises CheckpointLocked if a process works on the ranks, as far as the mirror shows."""
    state = read_run_state(location)
    running = {
        (rank.root, rank.rank): rank.process for rank in state.all_ranks if rank.state == "running"
    }
    for rank in ranks:
        if rank.key in running:
            raise CheckpointLocked(
                f"{rank.place}: {running[rank.key]} works on this task, or did in the last 20 "
                f"minutes (mirror {location.what}). Wait for it, or stop it, and run again."
            )
