"""Decides what a rank does, whether it needs attention, and why. The limits are minutes: a line is due each minute.

A rank that runs has a process that holds its lock. But the lock of a mirror's copy cannot be seen, and on some file
systems neither can that of a process on another node. There, a rank runs as long as its history goes on.
"""

from __future__ import annotations

import socket
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_log import (
    RATE_SECONDS,
    AttemptSummary,
    Rates,
    RecentHistory,
    downtime,
)
from datatrove_ckpt.checkpoint.history_records import InputPosition, Progress, Silence, WorkCounts
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, RUN
from datatrove_ckpt.checkpoint.ledger import (
    RankLedger,
)
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.run_state import RankState

SILENT_SECONDS = 180.0
"""A rank that runs and has written no line for so long is silent."""
COPY_SECONDS = 1200.0
"""The same for a mirror: with ``mirror_seconds: auto``, up to ten minutes are between two uploads."""
STUCK_SECONDS = 600.0
"""A rank in which nothing is finished for so long is stuck, and in which servers are started again so often as
``MAX_RESTARTS`` is restarting."""
SLOW_SHARE = 0.5
"""A rank that is slower than this share of the median is slow."""
LOOP_ATTEMPTS = 3
"""A rank is looping if so many attempts in a row ended, and none of them finished a document."""
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
        rank.trouble = "damaged"
        rank.reason = str(ledger.damage)
        return rank
    sums = ledger.sums
    recent = ledger.history
    written = ledger.written
    rank.add(ledger.numbers())
    rank.last_commit = ledger.last_commit
    if rank.is_copy:
        rank.last_commit = sums.at
    rank.attempts = recent.attempts
    rank.seconds = sums.seconds
    last = recent.last
    if last is not None:
        if last.documents.read or not rank.documents:  # else more is done than that line knows
            rank.position = _reached(last, rank)
        rank.seconds = max(rank.seconds, last.seconds.total)
    _judge(rank, recent, ledger.is_finished, now, copied_at)
    if rank.state in ("lost", "running") and not rank.is_copy:  # it worked until then at least
        changes = [at for name, at in written.items() if name not in (RUN, CACHE)]
        rank.last_change = min(now, max(changes, default=0.0))
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


def _judge(rank: RankState, recent: RecentHistory, is_finished: bool, now: float, copied_at: float | None) -> None:
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
        rank.trouble = "lost"
        rank.reason = (
            f"attempt {attempt.number} was killed, or its node was lost; its last line is {age} old: {rank.process}"
        )
    else:
        _judge_ended(rank, attempt, now)
    rank.downtime = downtime(rank.attempts)


def _goes_on(rank: RankState, attempt: AttemptSummary | None, now: float, uploaded: float) -> bool:
    """Whether an attempt may still run although no process is seen to hold its lock."""
    if attempt is None or attempt.ended is not None:
        return False
    if rank.is_copy:
        return now - max(attempt.last_seen, uploaded) <= COPY_SECONDS
    return attempt.host != _HOST and now - attempt.last_seen <= SILENT_SECONDS


def _judge_running(rank: RankState, recent: RecentHistory, now: float, uploaded: float) -> None:
    last = recent.last
    if recent.last_at is None or last is None:
        return
    quiet = now - max(recent.last_at, uploaded)
    allowed = COPY_SECONDS if rank.is_copy else SILENT_SECONDS
    if quiet > allowed:
        rank.trouble = "silent"
        rank.reason = f"no word for {duration(quiet)} from {rank.process}"
        if rank.holder is not None:
            rank.reason += ", which holds its lock"
        return
    _measure(rank, recent, last, now)
    if last.silence.lasts:
        rank.trouble = "stuck"
        rank.outage = last.silence._replace(seconds=last.silence.seconds + now - last.at)
    elif last.wait.quiet >= STUCK_SECONDS:
        rank.trouble = "stuck"
        rank.reason = _stuck(recent, last, now)
    else:
        loop = _barren(rank)
        if len(loop) >= LOOP_ATTEMPTS:
            rank.trouble = "looping"
            rank.reason = _looping(rank, loop, now)
        else:
            _judge_restarts(rank, recent, now)


def _measure(rank: RankState, recent: RecentHistory, last: Progress, now: float) -> None:
    """Sets rates, and the time that is left."""
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
        rank.rates.add(done_rates(rank.done, 0), factor)
        rank.rates.add(done_rates(last.documents, 0), -factor)
    if rank.position.total is not None and rank.rates.input > 0 and seconds >= _MIN_SECONDS - 1:
        left = max(0, rank.position.total - rank.position.done) / rank.rates.input
        if left >= rank.wait.quiet:
            rank.time_left = left
    rank.has_rate = seconds >= RATE_SECONDS - 1


def _barren(rank: RankState) -> list[AttemptSummary]:
    """The last attempts that ended by themselves and finished no document."""
    found: list[AttemptSummary] = []
    for attempt in reversed(rank.attempts[:-1]):
        is_barren = attempt.documents is None or (attempt.own == 0 and attempt.documents >= rank.documents)
        if not is_barren or attempt.why in ("done", "stopped"):
            break
        found.append(attempt)
    return found


def _looping(rank: RankState, loop: list[AttemptSummary], now: float) -> str:
    assert rank.attempt is not None
    text = f"the last {len(loop)} attempts ended"
    killed = sum(attempt.ended is None for attempt in loop)
    if killed:
        text += f", {killed} of them killed"
    text += f", and no document was finished for {duration(now - loop[-1].started)}"
    text += f"; attempt {rank.attempt.number} runs"
    if loop[0].ended is not None:
        text += f"; the last error: {loop[0].what}"
    return text


def _judge_restarts(rank: RankState, recent: RecentHistory, now: float) -> None:
    lately = [event for event in recent.servers if now - event.at <= STUCK_SECONDS]
    restarts = sum(event.what == "restart" for event in lately)
    if restarts < MAX_RESTARTS:
        return
    rank.trouble = "restarting"
    rank.reason = f"its servers were started again {restarts} times in {duration(STUCK_SECONDS)}"
    deaths = [event.why for event in lately if event.what == "death" and event.why]
    if deaths:
        rank.reason += f"; one died of: {deaths[-1]}"


def find_outages(ranks: Sequence[RankState]) -> None:
    """Gives the ranks that one outage has met one reason: they share a server, and lost it within a minute."""
    met = [(rank.outage, rank) for rank in ranks if rank.outage is not None]
    met.sort(key=lambda pair: (str(pair[0]), -pair[0].seconds))
    first: Silence | None = None
    for outage, rank in met:
        if first is None or str(outage) != str(first) or first.seconds - outage.seconds > _MIN_SECONDS:
            first = outage
        seconds = duration(min(first.patience, first.seconds))
        rank.reason = f"no answer for {seconds}: {first}; stops at {first.patience:g} s (server_patience_seconds)"


def _stuck(recent: RecentHistory, last: Progress, now: float) -> str:
    nothing = f"no answer and no document for {duration(last.wait.quiet + now - last.at)}"
    server = _server_at_work(recent, now)
    if server:
        return f"{nothing}: {server}"
    text = f"{nothing}: {plural(last.in_flight, 'request')} in flight, {last.waiting} waiting"
    first = recent.window[0] if recent.window else last
    lately = Counter(last.own.errors) - Counter(first.own.errors)
    if lately:
        errors = ", ".join(f"{count} {name}" for name, count in lately.most_common(3))
        text += f"; errors in the last {duration(recent.seconds)}: {errors}"
    return text


def _server_at_work(recent: RecentHistory, now: float) -> str:
    """What the last line about a server says of one that does not serve; empty if it serves."""
    if not recent.servers:
        return ""
    event = recent.servers[-1]
    server = "its server"
    if " " in event.name:  # of one of several models
        server += f" {event.name}"
    since = duration(now - event.at)
    if event.what == "start":
        return f"{server} is starting since {since}"
    if event.what == "restart":
        return f"{server} is starting again since {since}"
    if event.what == "death":
        return f"{server} died ({event.why})" if event.why else f"{server} died"
    return ""


def _judge_ended(rank: RankState, attempt: AttemptSummary, now: float) -> None:
    ago = f"{duration(now - (attempt.ended or now))} ago"
    if attempt.why == "error":
        rank.state = "failed"
        rank.trouble = "failed"
        rank.reason = f"{ago} on {attempt.host}: {attempt.what}"
    elif attempt.why == "stopped":
        by = f" by {attempt.what}" if attempt.what else ""
        rank.state = "interrupted"
        rank.trouble = "interrupted"
        rank.reason = f"stopped{by} {ago}; what it did is saved"
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
    finished = [speed for speed in finished if speed.tokens]
    peers = [_speed(rank.rates) for rank in running]
    peers = [speed for speed in peers if speed.tokens] + finished
    if len(peers) < _MIN_PEERS:
        return
    documents = statistics.median(speed.documents for speed in peers)
    tokens = statistics.median(speed.tokens for speed in peers)
    among = f" ({len(finished)} of them finished)" if finished else ""
    for rank in running:
        own = _speed(rank.rates)
        if own.documents < SLOW_SHARE * documents and own.tokens < SLOW_SHARE * tokens:
            rank.trouble = "slow"
            rank.reason = f"{own.documents:.3g} documents/s; the median of {len(peers)} ranks{among} is {documents:.3g}"


def find_left(ranks: Sequence[RankState]) -> None:
    """Marks the unfinished ranks of a run in which nothing goes on."""
    if any(rank.state == "running" for rank in ranks):
        return
    for rank in ranks:
        if rank.state == "unfinished" and rank.trouble is None:
            rank.trouble = "unfinished"
            rank.reason = "nothing runs, and it is not finished; what it did is saved"


class _Speed(NamedTuple):
    """Per second; ``tokens`` are requests, if no server counts tokens."""

    documents: float
    tokens: float


def _speed(done: Rates | WorkCounts, seconds: float = 1.0) -> _Speed:
    tokens = done.prompt_tokens + done.completion_tokens or done.requests
    return _Speed(done.documents / seconds, tokens / seconds)


def done_rates(counts: DocumentCounts, done: int) -> Rates:
    return Rates(counts.read, counts.requests, counts.prompt_tokens, counts.completion_tokens, done)
