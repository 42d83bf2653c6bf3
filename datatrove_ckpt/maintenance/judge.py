"""Decides what a rank does, whether it needs attention, and why. The limits are minutes: a line is due each minute.

A rank that runs has a process that holds its lock. But the lock of a mirror's copy cannot be seen, and on some file
systems neither can that of a process on another node. There, a rank runs as long as its history goes on.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence

from datatrove_ckpt.checkpoint.history_reader import (
    RATE_SECONDS,
    STUCK_SECONDS,
    AttemptSummary,
    Rates,
    RecentHistory,
    downtime,
)
from datatrove_ckpt.checkpoint.history_records import InputPosition, Progress
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, RUN
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.checkpoint.versions import RESHARDS
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.run_state import RankState

SILENT_SECONDS = 180.0
"""A rank that runs and has written no line for so long is silent."""
COPY_SECONDS = 1200.0
"""The same for a mirror: with ``mirror_seconds: auto``, up to ten minutes are between two uploads."""
SLOW_SHARE = 0.5
"""A rank that is slower than this share of the median is slow."""
LOOP_ATTEMPTS = 3
"""A rank is looping if so many attempts in a row ended, and none of them finished a document."""
MAX_RESTARTS = 5
"""A rank is restarting if its servers were started again so often in ten minutes."""
_MIN_PEERS = 4
_MIN_SECONDS = 60.0
_FIRST_SECONDS = 5.0
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
        rank.trouble, rank.reason = "damaged", str(ledger.damage)
        return rank
    sums, recent, written = ledger.sums, ledger.history, ledger.written
    rank.counts, rank.chunks, rank.files = sums.counts, len(sums.indices), sums.files
    rank.last_commit = sums.at if rank.is_copy else ledger.last_commit
    rank.unfinished, rank.journals = ledger.unfinished, len(ledger.open_chunks)
    rank.exact = ledger.journals is not None or ledger.has_said_its_end
    rank.attempts, rank.number_of_attempts = recent.attempts, ledger.attempts
    rank.seconds, rank.dead_letters = sums.seconds, ledger.causes
    if (last := recent.last) is not None:
        rank.position, rank.work, rank.seconds = last.position, last.total, max(rank.seconds, last.seconds.total)
    rank.reshards = ledger.run.get(RESHARDS, 0)
    if rank.reshards and not ledger.is_finished and (last is None or last.attempt < rank.number_of_attempts):
        rank.position = InputPosition()  # of the share before
    _judge(rank, recent, ledger.is_finished, now, copied_at)
    if rank.state in ("lost", "running") and not rank.is_copy:  # it worked until then at least
        rank.last_change = min(now, max((at for name, at in written.items() if name not in (RUN, CACHE)), default=0.0))
    times = [recent.last_at, rank.last_commit, rank.last_change or None]
    if recent.last_at is None:
        times += [at for name, at in written.items() if name != COMMITS]
    rank.last_word = max((at for at in times if at is not None), default=None)
    return rank


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
        rank.trouble, rank.reason = "lost", _lost(attempt, now)
    else:
        _judge_ended(rank, attempt, now)
    for earlier in rank.attempts[:-1]:
        earlier.without_a_word = earlier.ended is None
    rank.lost_in_flight = sum(one.in_flight for one in rank.attempts if one.without_a_word)
    rank.downtime = downtime(rank.attempts)


def _goes_on(rank: RankState, attempt: AttemptSummary | None, now: float, uploaded: float) -> bool:
    """Whether an attempt whose lock nobody is seen to hold may still run."""
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
        rank.trouble, rank.reason = "silent", f"no word for {duration(quiet)} from {_process(rank)}"
        return
    rank.in_flight, rank.waiting, rank.as_of = last.in_flight, last.waiting, last.at
    rank.rates = recent.rates() if len(recent.window) > 1 else _first_rates(rank, last, now)
    if rank.position.total is not None and rank.rates.input > 0:
        rank.time_left = max(0, rank.position.total - rank.position.done) / rank.rates.input
    rank.has_rate = len(recent.window) > 1 and recent.window[-1].at - recent.window[0].at >= RATE_SECONDS - 1
    if recent.is_stuck:
        rank.trouble, rank.reason = "stuck", _stuck(recent, now)
    elif loop := _barren(rank):
        rank.trouble, rank.reason = "looping", _looping(rank, loop, now)
    else:
        _judge_restarts(rank, recent, last)


def _barren(rank: RankState) -> list[AttemptSummary]:
    """The last attempts that ended by themselves and finished no document; none if they are few."""
    found: list[AttemptSummary] = []
    for attempt in reversed(rank.attempts[:-1]):
        is_barren = attempt.documents is None or (attempt.own == 0 and attempt.documents >= rank.documents)
        if not is_barren or attempt.why in ("done", "stopped"):
            break
        found.append(attempt)
    return found if len(found) >= LOOP_ATTEMPTS else []


def _looping(rank: RankState, loop: list[AttemptSummary], now: float) -> str:
    assert rank.attempt is not None
    how = f"; the last error: {loop[0].what}" if loop[0].ended is not None else ""
    silent = sum(one.ended is None for one in loop)
    ended = f", {silent} of them without a word" if silent else ""
    return (
        f"the last {len(loop)} attempts ended{ended}, and no document was finished for "
        f"{duration(now - loop[-1].started)}; attempt {rank.attempt.number} runs{how}"
    )


def _judge_restarts(rank: RankState, recent: RecentHistory, last: Progress) -> None:
    then = recent.before(STUCK_SECONDS)
    if then is None:
        return
    restarts = last.own.restarts - then.own.restarts
    if restarts >= MAX_RESTARTS:
        span = duration(recent.window[-1].at - then.at)
        death = next((event for event in reversed(recent.servers) if event.what == "death" and event.why), None)
        why = f"; one died of: {death.why}" if death is not None else ""
        rank.trouble, rank.reason = "restarting", f"its servers were started again {restarts} times in {span}{why}"


def _first_rates(rank: RankState, last: Progress, now: float) -> Rates:
    """In the first minute of an attempt: of the documents that were finished since its first line."""
    seconds = now - last.at
    if seconds < _FIRST_SECONDS or not rank.exact or rank.is_copy:
        return Rates()
    names = ("requests", "prompt_tokens", "completion_tokens")
    then = last.documents
    done = {name: getattr(rank.counts, name) + getattr(rank.unfinished, name) - getattr(then, name) for name in names}
    rates = {name: max(0, number) / seconds for name, number in done.items()}
    return Rates(documents=max(0, rank.documents - then.read) / seconds, **rates)


def _stuck(recent: RecentHistory, now: float) -> str:
    last = recent.last
    assert last is not None
    first = recent.since or last
    nothing = f"no answer and no document for {duration(now - first.at)}"
    event = recent.servers[-1] if recent.servers else None
    if event is not None and event.what in ("start", "restart", "death"):
        why = f" ({event.why})" if event.why else ""
        words = {"start": "is starting", "restart": "is starting again", "death": "died"}
        since = f"its server {words[event.what]} since {duration(now - event.at)}"
        return f"{nothing}: {since if event.what != 'death' else f'its server died{why}'}"
    since_then = {name: count - first.own.errors.get(name, 0) for name, count in last.own.errors.items()}
    errors = ", ".join(f"{count} {name}" for name, count in _most(since_then) if count > 0)
    queue = f"{plural(last.in_flight, 'request')} in flight, {last.waiting} waiting"
    return f"{nothing}: {queue}" + (f"; errors since then: {errors}" if errors else "")


def _most(errors: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(errors.items(), key=lambda item: -item[1])[:3]


def _judge_ended(rank: RankState, attempt: AttemptSummary, now: float) -> None:
    ago = f"{duration(now - (attempt.ended or now))} ago"
    if attempt.why == "error":
        rank.state = "failed"
        rank.trouble, rank.reason = "failed", f"{ago} on {attempt.host}: {attempt.what}"
    elif attempt.why == "stopped":
        rank.state = "interrupted"
        what = f" by {attempt.what}" if attempt.what else ""
        rank.trouble, rank.reason = "interrupted", f"stopped{what} {ago}; what it did is saved"
    else:
        rank.state = "unfinished"  # repaired since, or its input has grown


def _lost(attempt: AttemptSummary, now: float) -> str:
    age = duration(max(0.0, now - attempt.last_seen))
    return f"attempt {attempt.number} ended without a word; its last line is {age} old: {_of(attempt)}"


def _process(rank: RankState) -> str:
    if rank.holder is not None:
        return f"pid {rank.holder.get('pid')} on {rank.holder.get('host')}, which holds its lock"
    return _of(rank.attempt) if rank.attempt else "its process"


def _of(attempt: AttemptSummary) -> str:
    job = f", Slurm job {attempt.slurm_job}" if attempt.slurm_job else ""
    return f"pid {attempt.pid} on {attempt.host}{job}"


def find_slow(ranks: Sequence[RankState]) -> None:
    """Marks the ranks that are far behind the median of the others.

    A rank that is finished counts with its average, so the last one of a run is compared, too. A rank with long
    documents finishes fewer of them, and is not slow: both documents and tokens must be few.
    """
    running = [rank for rank in ranks if rank.state == "running" and rank.trouble is None and rank.has_rate]
    if not running:
        return
    finished = [speed for rank in ranks if rank.state == "finished" and (speed := _average(rank))[1]]
    peers = [speed for rank in running if (speed := _speed(rank.rates))[1]] + finished
    if len(peers) < _MIN_PEERS:
        return
    documents, tokens = (statistics.median(numbers) for numbers in zip(*peers, strict=True))
    for rank in running:
        own = _speed(rank.rates)
        if own[0] < SLOW_SHARE * documents and own[1] < SLOW_SHARE * tokens:
            rank.trouble, rank.reason = "slow", _slow(own[0], documents, len(peers), len(finished))


def find_left(ranks: Sequence[RankState]) -> None:
    """Marks the unfinished ranks of a run in which nothing goes on."""
    if any(rank.state == "running" for rank in ranks):
        return
    for rank in ranks:
        if rank.state == "unfinished" and rank.trouble is None:
            rank.trouble, rank.reason = "unfinished", "nothing runs, and it is not finished; what it did is saved"


def _slow(own: float, median: float, peers: int, finished: int) -> str:
    among = f" ({finished} of them finished)" if finished else ""
    return f"{own:.3g} documents/s; the median of {peers} ranks{among} is {median:.3g}"


def _speed(rates: Rates) -> tuple[float, float]:
    """Documents and tokens per second; requests, if no server counts tokens."""
    return rates.documents, rates.prompt_tokens + rates.completion_tokens or rates.requests


def _average(rank: RankState) -> tuple[float, float]:
    """The same over all attempts; nothing if they took less than a minute: that is the start of servers, mostly."""
    work, seconds = rank.work, rank.seconds
    if seconds < _MIN_SECONDS:
        return 0.0, 0.0
    return work.documents / seconds, (work.prompt_tokens + work.completion_tokens or work.requests) / seconds
