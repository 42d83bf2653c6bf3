"""Sums over the ranks of a run: rates, averages, the input, and the time that is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from datatrove_ckpt.checkpoint.history_read import RATE_SECONDS, AttemptSummary
from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.checkpoint.ledger import few
from datatrove_ckpt.checkpoint.numbers import Rates, RunNumbers
from datatrove_ckpt.run_folder.judge import done_rates
from datatrove_ckpt.run_folder.run_state import RankState, State, Totals


def add_up(ranks: list[RankState], now: float, tasks: int = 0) -> Totals:
    """Returns the sums over some ranks.

    Args:
        now: Unix seconds.
        tasks: number of ranks of the run; 0: as many as there are.
    """
    totals = Totals(**sum(ranks, RunNumbers()).fields())
    totals.states = Counter(rank.state for rank in ranks)
    totals.rates = _rates_now(ranks, now)
    running = [rank for rank in ranks if rank.state == "running"]
    totals.as_of = min(
        (rank.as_of for rank in running or ranks if rank.as_of is not None), default=None
    )
    totals.dead_letters = few(totals.dead_letters)
    totals.not_started = max(0, tasks - sum(rank.rank < tasks for rank in ranks))
    spans = sorted(span for rank in ranks for span in _spans(rank, now))
    if spans:
        totals.started = spans[0][0]
    # Finished documents of a killed attempt show more of its time than its lines.
    totals.working_seconds = max([_covered(spans), *(rank.seconds for rank in ranks)])
    _add_input(totals, ranks)
    if totals.working_seconds:
        done = done_rates(totals.done, totals.position.done)
        totals.average = done * (1 / totals.working_seconds)
    return totals


def _rates_now(ranks: list[RankState], now: float) -> Rates:
    """Returns the rates of running ranks and, if a rank began in these minutes, of ranks that
    finished meanwhile.

    Otherwise many short tasks would have the rate of the few that have just begun.
    """
    rates = Rates()
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
        rates += done_rates(rank.counts, rank.position.done) * (share / seconds)
    return rates


def _with_attempt(ranks: list[RankState], state: State) -> list[tuple[RankState, AttemptSummary]]:
    return [(rank, rank.attempts[-1]) for rank in ranks if rank.state == state and rank.attempts]


def _spans(rank: RankState, now: float) -> Iterator[tuple[float, float]]:
    """Start and end of each attempt.

    One that runs has worked until now, though its last line is older.
    """
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
    covered = 0.0
    until = float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _add_input(totals: Totals, ranks: list[RankState]) -> None:
    """Adds inputs; an unknown input counts as the mean of the others."""
    known = [rank for rank in ranks if rank.position.total is not None]
    units = {rank.position.unit for rank in known}
    if len(units) != 1:
        return
    done = sum(rank.position.done for rank in known)
    total = sum(rank.position.total or 0 for rank in known)
    # A finished rank without a document had no input.
    others = totals.not_started + sum(
        rank.position.total is None and (rank.state != "finished" or rank.documents > 0)
        for rank in ranks
    )
    with_input = max((rank.position.tasks or 0 for rank in known), default=0)
    if with_input:
        others = min(others, max(0, with_input - len(known)))
    if others:
        begun = sum(rank.documents for rank in ranks if rank.position.total is None)
        per_document = done / max(1, sum(rank.documents for rank in known))
        done += min(round(begun * per_document), total * others // len(known))
        total += total * others // len(known)
        totals.total_is_estimated = True
    totals.position = InputPosition(done, total, units.pop())
    totals.time_left = _time_left(totals, ranks)


def _time_left(totals: Totals, ranks: list[RankState]) -> float | None:
    """Without the work of ranks at a halt, but at least what the last rank needs."""
    if totals.rates.input <= 0 or totals.position.total is None:
        return None
    halted = [rank for rank in ranks if not rank.goes_on]
    totals.halted = len(halted)
    rest = sum(
        (one.position.total or 0) - one.position.done
        for one in halted
        if one.position.total is not None
    )
    left = max(0, totals.position.total - totals.position.done - rest) / totals.rates.input
    left = max(left, *(rank.time_left or 0.0 for rank in ranks))
    quiet = min((rank.wait.quiet for rank in ranks if rank.state == "running"), default=0.0)
    if left < quiet:
        return None
    return left
