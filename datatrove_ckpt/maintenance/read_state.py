"""Reads all ranks of a run into one ``RunState``. Changes nothing, and takes no lock for longer than a look.

with open_place("s3://bucket/mirror", wanted=wanted_files) as place:
    state = read_run_state(place)
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.dealt_out import refuse_lost_ranks, refuse_lost_shares, retired_ranks
from datatrove_ckpt.checkpoint.forks import is_unstarted
from datatrove_ckpt.checkpoint.history_reader import RATE_SECONDS, Rates
from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.ledger import Limits, Want, check_readable, few, find_ranks, not_permitted, read_rank
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.checkpoint.versions import settings_in
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.maintenance.judge import find_left, find_slow, rank_state
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals
from datatrove_ckpt.maintenance.where import Place

# Of all ranks together: what may be large is read for some ranks, and estimated for many.
_JOURNAL_BYTES = 1 << 22
_LETTER_BYTES = 1 << 25
_MOST_BYTES = 1 << 23
# More ranks than this are worth a few more processes.
_MANY, _PART, _MOST_PROCESSES = 2000, 250, 8
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
    began = time.monotonic()
    found = find_ranks(place.folder)
    state = RunState(place.what, place.is_copy, time.time() if now is None else now)
    limits = Limits(_share(_JOURNAL_BYTES, len(found)), _share(_LETTER_BYTES, len(found)))
    tasks = [(*one, limits, state.read_at, _copied_at(place, *one[:2])) for one in found]
    try:
        for rank in _read_all(tasks):
            rank.reason = place.said(rank.reason)
            (state.retries if rank.root else state.ranks).append(rank)
    except PermissionError as error:
        raise not_permitted(place.folder, error) from None
    run = _first_run(state.ranks)
    state.identity = {"format": run["format"], **settings_in(run)} if run else {}
    state.tasks = int(state.identity.get("tasks") or 0) or (place.tasks if place.config else 0)
    _sort_out(state, place.folder)
    find_slow(state.ranks)
    find_left(state.ranks + state.retries)
    state.totals = add_up(state.ranks, state.read_at, state.tasks)
    state.retried = add_up(state.retries, state.read_at)
    state.is_unstarted = is_unstarted(run) and not state.totals.attempts
    state.is_half_resharded = (place.folder / layout.RESHARD_PLAN).exists()
    try:
        refuse_half_resharded(place.folder)
        refuse_lost_shares(place.folder, [one.rank for one in sorted(state.ranks, key=lambda one: one.reshards)[-1:]])
        if not place.is_copy:  # a mirror may get these from another node
            refuse_lost_ranks(place.folder)
    except CheckpointError as error:
        state.refusal = place.said(str(error))
    words = [rank.last_word for rank in (*state.ranks, *state.retries) if rank.last_word is not None]
    state.newest = max(words, default=None)
    state.seconds_to_read = time.monotonic() - began
    return state


_Task = tuple[str, int, Path, Limits, float, float | None]
"""Root, number and folder of a rank, and what ``rank_state`` needs besides."""
_WANTED = Want.HISTORY | Want.JOURNALS | Want.LETTERS


def _read_all(tasks: list[_Task]) -> list[RankState]:
    """Reads the ranks; very many of them in several processes. A fork is safe only while there is one thread."""
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if len(tasks) < _MANY or processes < 2 or threading.active_count() > 1:
        return _read_some(tasks)
    parts = [tasks[start : start + _PART] for start in range(0, len(tasks), _PART)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        return [rank for part in pool.map(_read_some, parts) for rank in part]


def _read_some(tasks: list[_Task]) -> list[RankState]:
    return [_read_one(*task) for task in tasks]


def _read_one(root: str, number: int, folder: Path, limits: Limits, now: float, copied_at: float | None) -> RankState:
    """
    Raises:
        PermissionError: a file may not be read.
    """
    ledger = read_rank(root, number, folder, _WANTED, limits)
    check_readable(ledger)
    return rank_state(ledger, now, copied_at)


def _share(budget: int, ranks: int) -> int:
    return min(_MOST_BYTES, budget // ranks)


def _sort_out(state: RunState, folder: Path) -> None:
    """Which ranks are missing, and which do not belong to the run."""
    if not state.tasks:
        return
    retired: set[int] = set()
    with suppress(CheckpointError):  # ``refusal`` has it
        retired = retired_ranks(folder)
    for rank in state.ranks:
        if rank.rank in retired:  # the rest of its input is in the shares of others
            rank.position = rank.position._replace(total=rank.position.done)
    state.foreign = [rank.rank for rank in state.ranks if rank.rank >= state.tasks and rank.rank not in retired]
    state.ranks = [rank for rank in state.ranks if rank.rank not in state.foreign]
    there = {rank.rank for rank in state.ranks}
    state.missing = [number for number in range(state.tasks) if number not in there]
    if state.missing:
        with suppress(OSError):
            begun = {path.name for path in layout.last_chunk_file(folder, 0).parent.iterdir()}
            state.gone = [one for one in state.missing if layout.last_chunk_file(folder, one).name in begun]


def _copied_at(place: Place, root: str, number: int) -> float | None:
    if place.mirror is None:
        return None
    copied = place.mirror.ranks.get(f"{root}/{number:05d}".lstrip("/"))
    return (copied.when if copied else None) or 0.0


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
    totals, causes = Totals(), Counter[str]()
    for rank in ranks:
        totals.states[rank.state] += 1
        totals.counts.add(rank.counts)
        totals.unfinished.add(rank.unfinished)
        totals.chunks += rank.chunks
        totals.files += rank.files
        totals.unfinished_chunks += rank.journals
        totals.work = totals.work.plus(rank.work)
        totals.work_is_at_least = totals.work_is_at_least or rank.work_is_at_least
        totals.lost_in_flight += rank.lost_in_flight
        totals.in_flight += rank.in_flight
        totals.waiting += rank.waiting
        totals.attempts += rank.number_of_attempts
        totals.attempts_without_a_word += sum(attempt.without_a_word for attempt in rank.attempts)
        totals.exact = totals.exact and rank.exact
        causes.update(rank.dead_letters)
    totals.rates = _rates_now(ranks, now)
    running = [rank for rank in ranks if rank.state == "running"]
    totals.as_of = min((rank.as_of for rank in running or ranks if rank.as_of is not None), default=None)
    totals.dead_letters = few(causes)
    totals.not_started = max(0, tasks - sum(rank.rank < tasks for rank in ranks))
    spans = sorted(span for rank in ranks for span in _spans(rank, now))
    totals.started = spans[0][0] if spans else None
    totals.working_seconds = _covered(spans)
    totals.average = _average(totals)
    _add_input(totals, ranks)
    return totals


def _rates_now(ranks: list[RankState], now: float) -> Rates:
    """Of the ranks that run; and, if one has begun in these minutes, of those that have finished meanwhile, too.

    Else the rate of many short tasks would be that of the few that run, which have done nothing yet.
    """
    rates, since = Rates(), now - RATE_SECONDS
    running = [(rank, rank.attempt) for rank in ranks if rank.state == "running" and rank.attempt is not None]
    finished = [(rank, rank.attempt) for rank in ranks if rank.state == "finished" and rank.attempt is not None]
    finished = [(rank, attempt) for rank, attempt in finished if attempt.last_seen > since and rank.documents]
    begun = max((attempt.started for _, attempt in running), default=since)
    if begun <= since or not finished:
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
    for attempt in rank.attempts:
        runs = rank.state == "running" and attempt is rank.attempt and not rank.is_copy
        seen = max(attempt.last_seen, rank.last_change) if attempt is rank.attempt else attempt.last_seen
        yield attempt.started, now if runs else attempt.ended or seen


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals that are sorted by their starts."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _average(totals: Totals) -> Rates:
    seconds = totals.working_seconds
    # Of an attempt that was killed at once, the documents are known, and not the time.
    if not seconds or (seconds < _FIRST_SECONDS and totals.attempts_without_a_word):
        return Rates()
    average = Rates()
    for counts in (totals.counts, totals.unfinished):
        average.add(_done(counts, 0), 1 / seconds)
    return average


def _add_input(totals: Totals, ranks: list[RankState]) -> None:
    """Sums up the input. The ranks that are not started are taken to have as much as the others, on average."""
    known = [rank for rank in ranks if rank.position.total is not None]
    units = {rank.position.unit for rank in known}
    if len(units) != 1:
        return
    done = sum(rank.position.done for rank in known)
    total = sum(rank.position.total or 0 for rank in known)
    others = len(ranks) - len(known) + totals.not_started
    if others and any(rank.reshards for rank in ranks):
        return  # what the others have was dealt out anew by what was left
    if others:
        total += total * others // len(known)
        totals.total_is_estimated = True
    totals.position = InputPosition(done, total, units.pop())
    totals.average.input = done / totals.working_seconds if totals.average.documents else 0.0
    totals.time_left = _time_left(totals, ranks)


def _time_left(totals: Totals, ranks: list[RankState]) -> float | None:
    """At the rate of now: what is left, ranks at a halt excepted, but at least what the last rank needs."""
    if totals.rates.input <= 0 or totals.position.total is None:
        return None
    halted = [rank for rank in ranks if not rank.goes_on]
    totals.halted = len(halted)
    rest = sum((one.position.total or 0) - one.position.done for one in halted if one.position.total is not None)
    left = max(0, totals.position.total - totals.position.done - rest) / totals.rates.input
    return max(left, *(rank.time_left or 0.0 for rank in ranks))
