"""Reads all ranks of a run into one ``RunState``. Changes nothing, and holds no lock.

with open_place("s3://bucket/mirror", wanted=wanted_files) as place:
    state = read_run_state(place)
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_read import RATE_SECONDS, AttemptSummary, History, Rates
from datatrove_ckpt.checkpoint.history_records import InputPosition, Progress, WorkCounts
from datatrove_ckpt.checkpoint.identity import read_run, settings_in
from datatrove_ckpt.checkpoint.job import removed_ranks
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, RUN
from datatrove_ckpt.checkpoint.ledger import (
    Limits,
    RankLedger,
    Want,
    check_readable,
    few,
    find_ranks,
    not_permitted,
    read_rank,
)
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.errors import CheckpointError, CheckpointLocked
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals
from datatrove_ckpt.maintenance.where import Place

# Of all ranks together: what may be large is read for some ranks, and estimated for many.
_JOURNAL_BYTES = 1 << 22
_LETTER_BYTES = 1 << 25
_MOST_BYTES = 1 << 23
# More ranks than this are worth a few more processes.
_MANY = 2000
_PART = 250
_MOST_PROCESSES = 8
_FIRST_SECONDS = 10.0  # the first line after the start of an attempt
_NOT_FOR_ALL = (layout.CACHE, layout.RETRY_INPUT)


def wanted_files(name: str, size: int) -> bool:
    """Which files of a mirror are needed: not the large ones."""
    return name not in _NOT_FOR_ALL and size <= _MOST_BYTES


def read_run_state(place: Place, now: float | None = None) -> RunState:
    """Reads the ranks of a place.

    Args:
        now: the time, in Unix seconds; None: ask the clock.

    Raises:
        ConfigError: there is no rank, or this user may not read one.
    """
    found = find_ranks(place.folder)
    if now is None:
        now = time.time()
    state = RunState(place.what, place.is_copy, now)
    if place.config:
        state.given = place.given
        state.tasks = place.tasks
    limits = Limits(*(min(_MOST_BYTES, budget // len(found)) for budget in (_JOURNAL_BYTES, _LETTER_BYTES)))
    tasks = [(*one, limits, state.read_at, _copied_at(place, *one[:2])) for one in found]
    try:
        for rank in _read_all(tasks):
            rank.reason = place.said(rank.reason)
            ranks = state.retries if rank.root else state.ranks
            ranks.append(rank)
    except PermissionError as error:
        raise not_permitted(place.folder, error) from None
    run = _first_run(state.ranks)
    if run:
        state.identity = {"format": run["format"], **settings_in(run)}
        state.tasks = int(state.identity.get("tasks") or state.tasks)
    _sort_out(state, place.folder)
    find_slow(state.ranks)
    find_left(state.ranks + state.retries)
    state.totals = add_up(state.ranks, state.read_at, state.tasks)
    state.retried = add_up(state.retries, state.read_at)
    words = [rank.last_word for rank in (*state.ranks, *state.retries) if rank.last_word is not None]
    state.newest = max(words, default=None)
    return state


def check_idle(place: Place, ranks: list[RankLedger]) -> None:
    """Checks that no process works on the ranks, as far as the mirror shows.

    Raises:
        CheckpointLocked: one does.
    """
    state = read_run_state(place)
    running = {(rank.root, rank.rank): rank for rank in (*state.ranks, *state.retries) if rank.state == "running"}
    for rank in ranks:
        found = running.get(rank.key)
        if found is not None:
            raise CheckpointLocked(
                f"{rank.place}: {found.process} works on this rank, or was killed less than 20 minutes "
                f"ago, as its mirror {place.what} shows. Wait for it to end, or stop it, and run the same "
                "command again."
            )


_Task = tuple[str, int, Path, Limits, float, float | None]
"""Root, number and folder of a rank, and what ``rank_state`` needs besides."""
_WANTED = Want.HISTORY | Want.JOURNALS | Want.LETTERS


def _read_all(tasks: list[_Task]) -> list[RankState]:
    """Reads the ranks; very many of them in several processes. A fork is safe only while there is one thread."""
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    if len(tasks) < _MANY or processes < 2 or threading.active_count() > 1:
        return _read_some(tasks)
    parts = [tasks[start : start + _PART] for start in range(0, len(tasks), _PART)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        return [rank for part in pool.map(_read_some, parts) for rank in part]


def _read_some(tasks: list[_Task]) -> list[RankState]:
    """
    Raises:
        PermissionError: a file may not be read.
    """
    found = []
    for root, number, folder, limits, now, copied_at in tasks:
        ledger = read_rank(root, number, folder, _WANTED, limits)
        check_readable(ledger)
        found.append(rank_state(ledger, now, copied_at))
    return found


def _sort_out(state: RunState, folder: Path) -> None:
    """Finds the ranks that are missing, and those that do not belong to the run."""
    numbers = {rank.rank for rank in state.ranks}
    state.missing = [rank for rank in range(state.tasks) if rank not in numbers]
    state.gone = removed_ranks(folder, state.missing)
    state.foreign = [rank.rank for rank in state.ranks if 0 < state.tasks <= rank.rank]
    state.ranks = [rank for rank in state.ranks if rank.rank not in state.foreign]


def _copied_at(place: Place, root: str, number: int) -> float | None:
    if place.mirror is None:
        return None
    copied = place.mirror.ranks.get(f"{root}/{number:05d}".lstrip("/"))
    if copied is None:
        return 0.0
    return copied.when or 0.0


def _first_run(ranks: list[RankState]) -> Json:
    """The run.json of the first rank of which it can be read: all ranks share its settings."""
    for path in (rank.folder / layout.RUN for rank in ranks):
        with suppress(CheckpointError):
            if path.is_file():
                return read_run(path)
    return {}


# sums ----------------------------------------------------------------------------------------------------------------


def add_up(ranks: list[RankState], now: float, tasks: int = 0) -> Totals:
    """The sums over some ranks.

    Args:
        now: the time, in Unix seconds.
        tasks: number of ranks of the run; 0: as many as there are.
    """
    totals = Totals()
    per_document = _input_per_document(ranks)
    for rank in ranks:
        if rank.state == "running" and not rank.rates.input:  # in its first seconds
            rank.rates.input = rank.rates.documents * per_document
        totals.add(rank)
        totals.states[rank.state] += 1
    totals.rates = _rates_now(ranks, now)
    running = [rank for rank in ranks if rank.state == "running"]
    totals.as_of = min((rank.as_of for rank in running or ranks if rank.as_of is not None), default=None)
    totals.dead_letters = few(totals.dead_letters)
    totals.not_started = max(0, tasks - sum(rank.rank < tasks for rank in ranks))
    spans = sorted(span for rank in ranks for span in _spans(rank, now))
    if spans:
        totals.started = spans[0][0]
    totals.working_seconds = _covered(spans)
    totals.average = _average(totals)
    _add_input(totals, ranks)
    return totals


def _rates_now(ranks: list[RankState], now: float) -> Rates:
    """Of the ranks that run; and, if one has begun in these minutes, of those that have finished meanwhile, too.

    Else the rate of many short tasks would be that of the few that run, which have done nothing yet.
    """
    rates = Rates()
    since = now - RATE_SECONDS
    running = [(rank, rank.attempt) for rank in ranks if rank.state == "running" and rank.attempt is not None]
    finished = [(rank, rank.attempt) for rank in ranks if rank.state == "finished" and rank.attempt is not None]
    finished = [(rank, attempt) for rank, attempt in finished if attempt.last_seen > since and rank.documents]
    begun = max((attempt.started for _, attempt in running), default=since)
    if begun <= since or not finished or not any(rank.goes_on for rank, _ in running):
        for rank, _ in running:
            rates.add(rank.rates)
        return rates
    seconds = now - max(since, min(attempt.started for _, attempt in running + finished))
    for rank, attempt in running:
        rates.add(rank.rates, (now - max(attempt.started, since)) / seconds)
    for rank, attempt in finished:
        length = max(attempt.last_seen - attempt.started, 1e-3)
        share = min(1.0, (attempt.last_seen - since) / length) * attempt.own / rank.documents
        rates.add(_done(rank.counts, rank.position.done), share / seconds)
    return rates


def _done(counts: DocumentCounts, done: int) -> Rates:
    return Rates(counts.read, counts.requests, counts.prompt_tokens, counts.completion_tokens, done)


def _spans(rank: RankState, now: float) -> Iterator[tuple[float, float]]:
    """Start and end of each attempt. One that runs has worked until now, though its last line is older."""
    for attempt in rank.attempts[:-1]:
        yield attempt.started, attempt.ended or attempt.last_seen
    last = rank.attempt
    if last is None:
        return
    if rank.state == "running" and not rank.is_copy:
        yield last.started, now
    else:
        yield last.started, last.ended or max(last.last_seen, rank.last_change)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals that are sorted by their starts."""
    covered = 0.0
    until = float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _average(totals: Totals) -> Rates:
    seconds = totals.working_seconds
    # Of an attempt that was killed at once, the documents are known, and not the time.
    if not seconds or (seconds < _FIRST_SECONDS and totals.killed):
        return Rates()
    average = Rates()
    average.add(_done(totals.done, 0), 1 / seconds)
    return average


def _input_per_document(ranks: list[RankState]) -> float:
    known = [rank for rank in ranks if rank.position.total is not None]
    return sum(rank.position.done for rank in known) / max(1, sum(rank.documents for rank in known))


def _add_input(totals: Totals, ranks: list[RankState]) -> None:
    """Sums up the input. Ranks whose input is not known yet are taken to have as much as the others, on average."""
    known = [rank for rank in ranks if rank.position.total is not None]
    units = {rank.position.unit for rank in known}
    if len(units) != 1:
        return
    done = sum(rank.position.done for rank in known)
    total = sum(rank.position.total or 0 for rank in known)
    others = len(ranks) - len(known) + totals.not_started
    if others:
        begun = sum(rank.documents for rank in ranks if rank.position.total is None)
        done += min(round(begun * _input_per_document(ranks)), total * others // len(known))
        total += total * others // len(known)
        totals.total_is_estimated = True
    totals.position = InputPosition(done, total, units.pop())
    totals.time_left = _time_left(totals, ranks)


def _time_left(totals: Totals, ranks: list[RankState]) -> float | None:
    """At the rate of now: what is left, ranks at a halt excepted, but at least what the last rank needs."""
    if totals.rates.input <= 0 or totals.position.total is None:
        return None
    halted = [rank for rank in ranks if not rank.goes_on]
    totals.halted = len(halted)
    rest = sum((one.position.total or 0) - one.position.done for one in halted if one.position.total is not None)
    left = max(0, totals.position.total - totals.position.done - rest) / totals.rates.input
    left = max(left, *(rank.time_left or 0.0 for rank in ranks))
    quiet = min((rank.wait.quiet for rank in ranks if rank.state == "running"), default=0.0)
    if left < quiet:
        return None
    return left


# what a rank does -----------------------------------------------------------------------------------------------------

# Decides what a rank does, whether it needs attention, and why. The limits are minutes: a line is due each minute.
#
# A rank that runs has a process that holds its lock. But the lock of a mirror's copy cannot be seen, and on some file
# systems neither can that of a process on another node. There, a rank runs as long as its history goes on.


SILENT_SECONDS = 180.0
"""A rank that runs and has written no line for so long is silent."""
COPY_SECONDS = 1200.0
"""The same for a mirror: with ``mirror_seconds: auto``, up to ten minutes are between two uploads."""
STUCK_SECONDS = 600.0
"""A rank in which nothing is finished for so long is stuck, and in which servers are started again so often as
``MAX_RESTARTS`` is restarting."""
SLOW_SHARE = 0.5
"""A rank that is slower than this share of the median is slow."""
MAX_RESTARTS = 5
"""A rank is restarting if its servers were started again so often in ten minutes."""
_MIN_PEERS = 4
_MIN_SECONDS = 60.0
_HOST = socket.gethostname()


def rank_state(ledger: RankLedger, now: float, copied_at: float | None) -> RankState:
    """The state of one rank.

    Args:
        ledger: with history, journals and causes of dead letters.
        now: the time, in Unix seconds.
        copied_at: when the version was uploaded that the ledger was read of; None: it is no copy.
    """
    rank = RankState(ledger.root, ledger.number, ledger.folder, "damaged", is_copy=copied_at is not None)
    rank.holder = ledger.holder
    if ledger.damage is not None:
        rank.need_attention("damaged", str(ledger.damage))
        return rank
    recent = ledger.history
    written = ledger.written
    rank.add(ledger.numbers())
    rank.last_commit = ledger.last_commit
    if rank.is_copy:
        rank.last_commit = ledger.sums.at
    rank.attempts = recent.attempts
    last = recent.last
    if last is not None and (last.documents.read or not rank.documents):  # else more is done than that line knows
        rank.position = _reached(last, rank)
    _judge(rank, recent, ledger.is_finished, now, copied_at)
    if rank.state in ("lost", "running") and not rank.is_copy:  # it worked until then at least
        rank.last_change = min(now, max((at for name, at in written.items() if name not in (RUN, CACHE)), default=0.0))
    times = [recent.last_at, rank.last_commit, rank.last_change or None]
    if recent.last_at is None:
        times += [at for name, at in written.items() if name != COMMITS]
    rank.last_word = max((at for at in times if at is not None), default=None)
    return rank


def _reached(last: Progress, rank: RankState) -> InputPosition:
    """The position of the last line, brought up to the documents that were counted since then."""
    position = last.position
    then = last.documents.read
    if position.total is None or not rank.exact or rank.documents <= then:
        return position
    return position._replace(done=min(position.total, round(position.done * rank.documents / then)))


def _judge(rank: RankState, recent: History, is_finished: bool, now: float, copied_at: float | None) -> None:
    """Sets state, trouble and reason, and what depends on the state."""
    attempt = rank.attempt
    # An attempt whose number the history does not have has ended before its first line.
    if is_finished:
        rank.state = "finished"
    elif rank.holder is not None or _goes_on(rank, attempt, now, copied_at or 0.0):
        rank.state = "running"
        _judge_running(rank, recent, now, copied_at or 0.0)
    elif attempt is None:
        rank.state = "unfinished"
    elif attempt.ended is None:
        rank.state = "lost"
        if recent.last is not None:
            rank.as_of = recent.last.at
        attempt.without_a_word = True
        rank.killed += 1
        rank.lost_in_flight += attempt.in_flight
        age = duration(max(0.0, now - attempt.last_seen))
        how = f"attempt {attempt.number} was killed, or its node was lost"
        rank.need_attention("lost", f"{how}; its last line is {age} old: {rank.process}")
    else:
        _judge_ended(rank, attempt, now)


def _goes_on(rank: RankState, attempt: AttemptSummary | None, now: float, uploaded: float) -> bool:
    """Whether an attempt may still run although no process is seen to hold its lock."""
    if attempt is None or attempt.ended is not None:
        return False
    if rank.is_copy:
        return now - max(attempt.last_seen, uploaded) <= COPY_SECONDS
    return attempt.host != _HOST and now - attempt.last_seen <= SILENT_SECONDS


def _judge_running(rank: RankState, recent: History, now: float, uploaded: float) -> None:
    last = recent.last
    if recent.last_at is None or last is None:
        return
    quiet = now - max(recent.last_at, uploaded)
    limit = COPY_SECONDS if rank.is_copy else SILENT_SECONDS
    if quiet > limit:
        reason = f"no word for {duration(quiet)} from {rank.process}"
        if rank.holder is not None:
            reason = f"{reason}, which holds its lock"
        rank.need_attention("silent", reason)
        return
    seconds = recent.seconds
    if seconds:
        rank.in_flight = last.in_flight
        rank.waiting = last.waiting
        rank.as_of = last.at
        rank.wait = last.wait
        if not last.silence.lasts:
            rank.rates = recent.rates()
    elif rank.attempt is not None and not rank.is_copy:  # the line of its start tells nothing yet: count
        factor = 1 / max(now - rank.attempt.started, 1.0)
        rank.rates.add(_done(rank.done, 0), factor)
        rank.rates.add(_done(last.documents, 0), -factor)
    if rank.position.total is not None and rank.rates.input > 0 and seconds >= _MIN_SECONDS - 1:
        left = max(0, rank.position.total - rank.position.done) / rank.rates.input
        if left >= rank.wait.quiet:
            rank.time_left = left
    rank.has_rate = seconds >= RATE_SECONDS - 1
    if last.silence.lasts:
        rank.need_attention("stuck", _silenced(last))
    elif last.wait.quiet >= STUCK_SECONDS:
        rank.need_attention("stuck", _stuck(recent, last, now))
    else:
        _judge_restarts(rank, recent, now)


def _judge_restarts(rank: RankState, recent: History, now: float) -> None:
    lately = [event for event in recent.servers if now - event.at <= STUCK_SECONDS]
    restarts = sum(event.what == "restart" for event in lately)
    if restarts >= MAX_RESTARTS:
        reason = f"its servers were started again {restarts} times in {duration(STUCK_SECONDS)}"
        deaths = [event.why for event in lately if event.what == "death" and event.why]
        if deaths:
            reason = f"{reason}; one died of: {deaths[-1]}"
        rank.need_attention("restarting", reason)


def _silenced(last: Progress) -> str:
    """To the minute, so that the ranks that one outage has met have one reason."""
    since = datetime.datetime.fromtimestamp(last.at - last.silence.seconds).astimezone()
    patience = f"{last.silence.patience:g} s (server_patience_seconds)"
    return f"{last.silence}: no answer since {since:%H:%M}; a rank stops after {patience}"


def _stuck(recent: History, last: Progress, now: float) -> str:
    nothing = f"no answer and no document for {duration(last.wait.quiet + now - last.at)}"
    words = {"start": "is starting", "restart": "is starting again", "death": "died"}
    event = next(reversed(recent.servers), None)
    if event is not None and event.what in words:
        server = "its server"
        if " " in event.name:  # of one of several models
            server = f"{server} {event.name}"
        text = f"{nothing}: {server} {words[event.what]}"
        if event.what != "death":
            return f"{text} since {duration(now - event.at)}"
        return f"{text} ({event.why})" if event.why else text
    text = f"{nothing}: {plural(last.in_flight, 'request')} in flight, {last.waiting} waiting"
    if recent.window is not None:
        lately = Counter(last.own.errors)
        lately.subtract(recent.window[0].own.errors)
        errors = ", ".join(f"{count} {name}" for name, count in lately.most_common(3) if count > 0)
        if errors:
            text = f"{text}; errors in the last {duration(recent.seconds)}: {errors}"
    return text


def _judge_ended(rank: RankState, attempt: AttemptSummary, now: float) -> None:
    ago = f"{duration(now - (attempt.ended or now))} ago"
    if attempt.why == "error":
        rank.state = "failed"
        rank.need_attention("failed", f"{ago} on {attempt.host}: {attempt.what}")
    elif attempt.why == "stopped":
        rank.state = "interrupted"
        rank.need_attention("interrupted", f"{attempt.how_it_ended} {ago}; what it did is saved")
    else:
        rank.state = "unfinished"  # repaired since, or its input has grown


def find_slow(ranks: Sequence[RankState]) -> None:
    """Marks the ranks that are far behind the median of the others.

    A rank that is finished counts with its average, so the last one of a run is compared, too. A rank with long
    documents finishes fewer of them, and is not slow: both documents and tokens must be few. Neither is a rank that
    waits for its last answers.
    """
    running = [rank for rank in ranks if rank.state == "running" and rank.trouble is None and rank.has_rate]
    running = [rank for rank in running if not rank.wait.all_started]
    measured = [rank for rank in ranks if rank.state == "finished" and rank.is_measured]
    finished = [_speed(rank.work, rank.seconds) for rank in measured]
    speeds = finished + [_speed(rank.rates) for rank in running]
    peers = [(documents, tokens) for documents, tokens in speeds if tokens]
    if len(peers) < _MIN_PEERS:
        return
    documents, tokens = (statistics.median(numbers) for numbers in zip(*peers, strict=True))
    for rank in running:
        own = _speed(rank.rates)
        if own[0] < SLOW_SHARE * documents and own[1] < SLOW_SHARE * tokens:
            median = f"the median of {len(peers)} ranks is {documents:.3g}"
            rank.need_attention("slow", f"{own[0]:.3g} documents/s; {median}")


def find_left(ranks: Sequence[RankState]) -> None:
    """Marks the unfinished ranks of a run in which nothing goes on."""
    if any(rank.state == "running" for rank in ranks):
        return
    for rank in ranks:
        if rank.state == "unfinished" and rank.trouble is None:
            rank.need_attention("unfinished", "nothing runs, and it is not finished; what it did is saved")


def _speed(done: Rates | WorkCounts, seconds: float = 1.0) -> tuple[float, float]:
    """Documents and tokens per second of what was done in so many; requests, if no server counts tokens."""
    return done.documents / seconds, (done.prompt_tokens + done.completion_tokens or done.requests) / seconds
