"""Decides what a rank does, whether it needs attention, and why. The limits are minutes: a line is due each minute.

A rank that runs has a process that holds its lock. But the lock of a mirror's copy cannot be seen, and on some file
systems neither can that of a process on another node. There, a rank runs as long as its history goes on.
"""

from __future__ import annotations

import socket
import statistics
from collections import Counter
from collections.abc import Sequence

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
    rank.last_commit = sums.at if rank.is_copy else ledger.last_commit
    rank.attempts = recent.attempts
    rank.seconds = sums.seconds
    if (last := recent.last) is not None:
        if last.documents.read or not rank.documents:  # else more is done than that line knows
            rank.position = _reached(last, rank)
        rank.seconds = max(rank.seconds, last.seconds.total)
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
        rank.as_of = recent.last.at if recent.last is not None else None
        attempt.without_a_word = True
        rank.killed += 1
        rank.lost_in_flight += attempt.in_flight
        age = duration(max(0.0, now - attempt.last_seen))
        said = f"attempt {attempt.number} was killed, or its node was lost; its last line is {age} old: {rank.process}"
        rank.trouble = "lost"
        rank.reason = said
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
    if quiet > (COPY_SECONDS if rank.is_copy else SILENT_SECONDS):
        holds = ", which holds its lock" if rank.holder is not None else ""
        rank.trouble = "silent"
        rank.reason = f"no word for {duration(quiet)} from {rank.process}{holds}"
        return
    seconds = recent.seconds
    if seconds:
        rank.in_flight = last.in_flight
        rank.waiting = last.waiting
        rank.as_of = last.at
        rank.wait = last.wait
        rank.rates = Rates() if last.silence.lasts else recent.rates()
    elif rank.attempt is not None and not rank.is_copy:  # the line of its start tells nothing yet: count
        done = rank.done
        before = last.documents
        factor = 1 / max(now - rank.attempt.started, 1.0)
        for counts, sign in ((done, factor), (before, -factor)):
            rank.rates.add(done_rates(counts, 0), sign)
    if rank.position.total is not None and rank.rates.input > 0 and seconds >= _MIN_SECONDS - 1:
        left = max(0, rank.position.total - rank.position.done) / rank.rates.input
        rank.time_left = left if left >= rank.wait.quiet else None
    rank.has_rate = seconds >= RATE_SECONDS - 1
    if last.silence.lasts:
        rank.trouble = "stuck"
        rank.outage = last.silence._replace(seconds=last.silence.seconds + now - last.at)
    elif last.wait.quiet >= STUCK_SECONDS:
        rank.trouble = "stuck"
        rank.reason = _stuck(recent, last, now)
    elif loop := _barren(rank):
        rank.trouble = "looping"
        rank.reason = _looping(rank, loop, now)
    else:
        _judge_restarts(rank, recent, now)


def _barren(rank: RankState) -> list[AttemptSummary]:
    """The last attempts that ended by themselves and finished no document; none if they are few."""
    found: list[AttemptSummary] = []
    for attempt in reversed(rank.attempts[:-1]):
        is_barren = attempt.documents is None or (attempt.own == 0 and attempt.documents >= rank.documents)
        if not is_barren or attempt.why in ("done", "stopped"):
            break
        found.append(attempt)
    if len(found) >= LOOP_ATTEMPTS:
        return found
    return []


def _looping(rank: RankState, loop: list[AttemptSummary], now: float) -> str:
    assert rank.attempt is not None
    how = f"; the last error: {loop[0].what}" if loop[0].ended is not None else ""
    silent = sum(one.ended is None for one in loop)
    ended = f", {silent} of them killed" if silent else ""
    return (
        f"the last {len(loop)} attempts ended{ended}, and no document was finished for "
        f"{duration(now - loop[-1].started)}; attempt {rank.attempt.number} runs{how}"
    )


def _judge_restarts(rank: RankState, recent: RecentHistory, now: float) -> None:
    lately = [event for event in recent.servers if now - event.at <= STUCK_SECONDS]
    restarts = sum(event.what == "restart" for event in lately)
    if restarts >= MAX_RESTARTS:
        death = next((event for event in reversed(lately) if event.what == "death" and event.why), None)
        why = f"; one died of: {death.why}" if death is not None else ""
        span = duration(STUCK_SECONDS)
        rank.trouble = "restarting"
        rank.reason = f"its servers were started again {restarts} times in {span}{why}"


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
    event = recent.servers[-1] if recent.servers else None
    if event is not None and event.what in ("start", "restart", "death"):
        why = f" ({event.why})" if event.why else ""
        words = {"start": "is starting", "restart": "is starting again", "death": "died"}
        server = f"its server {event.name}" if " " in event.name else "its server"  # of one of several models
        since = f"{server} {words[event.what]} since {duration(now - event.at)}"
        return f"{nothing}: {since if event.what != 'death' else f'{server} died{why}'}"
    first = recent.window[0] if recent.window else last
    lately = {name: count - first.own.errors.get(name, 0) for name, count in last.own.errors.items()}
    errors = ", ".join(f"{count} {name}" for name, count in Counter(lately).most_common(3) if count > 0)
    queue = f"{plural(last.in_flight, 'request')} in flight, {last.waiting} waiting"
    return f"{nothing}: {queue}" + (f"; errors in the last {duration(recent.seconds)}: {errors}" if errors else "")


def _judge_ended(rank: RankState, attempt: AttemptSummary, now: float) -> None:
    ago = f"{duration(now - (attempt.ended or now))} ago"
    if attempt.why == "error":
        rank.state = "failed"
        rank.trouble = "failed"
        rank.reason = f"{ago} on {attempt.host}: {attempt.what}"
    elif attempt.why == "stopped":
        rank.state = "interrupted"
        what = f" by {attempt.what}" if attempt.what else ""
        rank.trouble = "interrupted"
        rank.reason = f"stopped{what} {ago}; what it did is saved"
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
    finished = [speed for rank in measured if (speed := _speed(rank.work, rank.seconds))[1]]
    peers = [speed for rank in running if (speed := _speed(rank.rates))[1]] + finished
    if len(peers) < _MIN_PEERS:
        return
    documents, tokens = (statistics.median(numbers) for numbers in zip(*peers, strict=True))
    for rank in running:
        own = _speed(rank.rates)
        if own[0] < SLOW_SHARE * documents and own[1] < SLOW_SHARE * tokens:
            among = f" ({len(finished)} of them finished)" if finished else ""
            said = f"{own[0]:.3g} documents/s; the median of {len(peers)} ranks{among} is {documents:.3g}"
            rank.trouble = "slow"
            rank.reason = said


def find_left(ranks: Sequence[RankState]) -> None:
    """Marks the unfinished ranks of a run in which nothing goes on."""
    if any(rank.state == "running" for rank in ranks):
        return
    for rank in ranks:
        if rank.state == "unfinished" and rank.trouble is None:
            rank.trouble = "unfinished"
            rank.reason = "nothing runs, and it is not finished; what it did is saved"


def _speed(done: Rates | WorkCounts, seconds: float = 1.0) -> tuple[float, float]:
    """Documents and tokens per second of what was done in so many; requests, if no server counts tokens."""
    return done.documents / seconds, (done.prompt_tokens + done.completion_tokens or done.requests) / seconds


def done_rates(counts: DocumentCounts, done: int) -> Rates:
    return Rates(counts.read, counts.requests, counts.prompt_tokens, counts.completion_tokens, done)
