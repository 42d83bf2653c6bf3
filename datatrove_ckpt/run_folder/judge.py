"""Decides what a rank does, whether it needs attention, and why. Limits are minutes: a line per
minute is due.

A running rank has a process that holds its lock. Where locks are invisible (in a mirror's copy, and
on some file systems), a rank runs as long as its history grows.
"""

from __future__ import annotations

import datetime
import socket
import statistics
from collections import Counter
from collections.abc import Sequence

from datatrove_ckpt.checkpoint.history_read import RATE_SECONDS, AttemptSummary, History
from datatrove_ckpt.checkpoint.history_records import (
    WAITS_FOR_BATCHES,
    InputPosition,
    Progress,
)
from datatrove_ckpt.checkpoint.layout import CACHE, RUN
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.checkpoint.numbers import DocumentCounts, Rates, RunNumbers, WorkCounts
from datatrove_ckpt.common.formatting import duration, plural
from datatrove_ckpt.run_folder.run_state import RankState

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
_HOST = socket.gethostname()


def rank_state(ledger: RankLedger, now: float, copied_at: float | None) -> RankState:
    """Returns the state of one rank.

    Args:
        ledger: with history, journals and causes of dead letters.
        copied_at: when the version was uploaded that the ledger was read of; None: it is no copy.
    """
    numbers = RunNumbers()
    if ledger.damage is None:
        numbers = ledger.numbers()
    rank = RankState(
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
    rank.last_commit = ledger.last_commit
    if rank.is_copy:
        rank.last_commit = ledger.sums.at
    rank.attempts = recent.attempts
    last = recent.last
    # Otherwise more is done than that line shows.
    if last is not None and (last.documents.read or not rank.documents):
        rank.position = _reached(last, rank)
    _judge(rank, recent, ledger.is_finished, now, copied_at)
    if rank.state in ("lost", "running") and not rank.is_copy:  # it worked until then at least
        changes = [at for name, at in ledger.written.items() if name not in (RUN, CACHE)]
        rank.last_change = min(now, max(changes, default=0.0))
    times = [recent.last_at, rank.last_commit, rank.last_change or None]
    rank.last_word = max((at for at in times if at is not None), default=None)
    return rank


def _reached(last: Progress, rank: RankState) -> InputPosition:
    """Returns the position of the last line, for the documents that were counted since then, or
    taken back.
    """
    position = last.position
    then = last.documents.read
    if position.total is None or not rank.exact or not then:
        return position
    return position._replace(done=min(position.total, round(position.done * rank.documents / then)))


def _judge(
    rank: RankState, recent: History, is_finished: bool, now: float, copied_at: float | None
) -> None:
    attempt = rank.attempt
    # An attempt without a number in the history ended before its first line.
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
        rank.uncertain += 1
        rank.lost_in_flight += attempt.in_flight or 0
        age = duration(max(0.0, now - attempt.last_seen))
        how = "its last attempt was killed, its node was lost, or its disk was full"
        rank.need_attention("lost", f"{how}; its last line is {age} old: {rank.process}")
    else:
        _judge_ended(rank, attempt, now)


def _goes_on(rank: RankState, attempt: AttemptSummary | None, now: float, uploaded: float) -> bool:
    """Whether an attempt may still run although no lock is visible."""
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
    _measure(rank, recent, last)
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


def _measure(rank: RankState, recent: History, last: Progress) -> None:
    seconds = recent.seconds
    if seconds:
        rank.in_flight = last.in_flight
        rank.waiting = last.waiting
        rank.as_of = last.at
        rank.wait = last.wait
        if not last.silence.lasts:
            rank.rates = recent.rates()
    if rank.position.total is not None and rank.rates.input > 0 and seconds >= _MIN_SECONDS - 1:
        left = max(0, rank.position.total - rank.position.done) / rank.rates.input
        if left >= rank.wait.quiet:
            rank.time_left = left
    rank.has_rate = seconds >= RATE_SECONDS - 1


def _stuck(recent: History, last: Progress, now: float) -> str:
    nothing = f"no answer and no document for {duration(last.wait.quiet + now - last.at)}"
    words = {"start": "was started", "restart": "was started again", "death": "died"}
    event = next(reversed(recent.servers), None)
    if event is not None and event.what in words:
        server = "its server"
        if " " in event.name:  # of one of several models
            server = f"{server} {event.name}"
        text = f"{nothing}: {server} {words[event.what]} {duration(now - event.at)} ago"
        if event.why:
            return f"{text} ({event.why})"
        return text
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
        if attempt.what != WAITS_FOR_BATCHES:
            reason = f"{attempt.how_it_ended} {ago}; what it did is saved"
            rank.need_attention("interrupted", reason)
    else:
        rank.state = "unfinished"  # repaired since, or its input has grown


def find_slow(ranks: Sequence[RankState]) -> None:
    """Marks the ranks that are far behind the median of the others.

    Finished ranks count with their averages. A slow rank has few documents and few tokens, and does
    not wait for its last answers.
    """
    running = [
        rank for rank in ranks if rank.state == "running" and rank.trouble is None and rank.has_rate
    ]
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
            median = f"the median of {len(peers)} tasks is {documents:.3g}"
            rank.need_attention("slow", f"{own[0]:.3g} documents/s; {median}")


def find_left(ranks: Sequence[RankState]) -> None:
    if any(rank.state == "running" for rank in ranks):
        return
    for rank in ranks:
        if rank.state == "unfinished" and rank.trouble is None:
            rank.need_attention(
                "unfinished", "nothing runs, and it is not finished; what it did is saved"
            )


def _speed(done: Rates | WorkCounts, seconds: float = 1.0) -> tuple[float, float]:
    return done.documents / seconds, (
        done.prompt_tokens + done.completion_tokens or done.requests
    ) / seconds


def done_rates(counts: DocumentCounts, done: int) -> Rates:
    return Rates(counts.read, counts.requests, counts.prompt_tokens, counts.completion_tokens, done)
