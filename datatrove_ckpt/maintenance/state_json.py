"""``RunState`` as the JSON of ``status --json``, which ``status.schema.json`` describes (see docs/status.md).

``report`` shows the same figures. Times are ISO 8601 in UTC, and null if they are not known.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_reader import AttemptSummary, Rates
from datatrove_ckpt.checkpoint.history_records import InputPosition, WorkCounts
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals

VERSION = 1
"""Of the JSON. New keys may come without a new version."""
SCHEMA = Path(__file__).with_name("status.schema.json")


def to_json(state: RunState) -> Json:
    """The whole run."""
    return {
        "version": VERSION,
        "what": state.what,
        "is_copy": state.is_copy,
        "read_at": _time(state.read_at),
        "newest_at": _time(state.newest),
        "age_seconds": None if state.newest is None else round(max(0.0, state.read_at - state.newest), 3),
        "is_finished": state.is_finished,
        "delivered": _counts(state.together.counts),
        "totals": _totals(state.totals, state.tasks),
        "retried": _totals(state.retried, 0) if state.retries else None,
        "not_started": state.missing,
        "gone": state.gone,
        "foreign": state.foreign,
        "refusal": state.refusal,
        "attention": [_trouble(rank) for rank in state.troubled],
        "ranks": [_rank(rank) for rank in (*state.ranks, *state.retries)],
    }


def dump(content: Json, indent: bool = True) -> bytes:
    """As text."""
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 if indent else None)


def _totals(totals: Totals, tasks: int) -> Json:
    return {
        "tasks": tasks or None,
        "states": dict(sorted(totals.states.items())),
        "not_started": totals.not_started,
        **_documents(totals.documents, totals.counts, totals.unfinished, totals.exact),
        "chunks": totals.chunks,
        "unfinished_chunks": totals.unfinished_chunks,
        "input": _input(totals.position) | {"total_is_estimated": totals.total_is_estimated},
        "work": _work(totals.work, totals.lost_in_flight, totals.work_is_at_least),
        "rates": _rates(totals.rates),
        "average": _rates(totals.average),
        "working_seconds": round(totals.working_seconds, 3),
        "time_left_seconds": _seconds(totals.time_left),
        "as_of": _time(totals.as_of),
        "in_flight": totals.in_flight,
        "waiting": totals.waiting,
        "dead_letters": dict(totals.dead_letters.most_common()),
        "attempts": totals.attempts,
        "attempts_without_a_word": totals.attempts_without_a_word,
        "started_at": _time(totals.started),
    }


def _rank(rank: RankState) -> Json:
    return {
        "root": rank.root,
        "rank": rank.rank,
        "state": rank.state,
        "trouble": rank.trouble,
        "reason": rank.reason,
        **_documents(rank.documents, rank.counts, rank.unfinished, rank.exact),
        "chunks": rank.chunks,
        "unfinished_chunks": rank.journals,
        "input": _input(rank.position),
        "work": _work(rank.work, rank.lost_in_flight, rank.work_is_at_least),
        "rates": _rates(rank.rates),
        "seconds": round(rank.seconds, 3),
        "downtime_seconds": round(rank.downtime, 3),
        "time_left_seconds": _seconds(rank.time_left),
        "as_of": _time(rank.as_of),
        "in_flight": rank.in_flight,
        "waiting": rank.waiting,
        "dead_letters": dict(rank.dead_letters.most_common()),
        "attempts": rank.number_of_attempts,
        "attempt": None if rank.attempt is None else _attempt(rank.attempt),
        "attempts_without_a_word": [one.number for one in rank.attempts if one.without_a_word],
        "last_word_at": _time(rank.last_word),
        "last_commit_at": _time(rank.last_commit),
        "holder": rank.holder,
    }


def _trouble(rank: RankState) -> Json:
    return {"root": rank.root, "rank": rank.rank, "trouble": rank.trouble, "reason": rank.reason}


def _documents(documents: int, committed: DocumentCounts, unfinished: DocumentCounts, exact: bool) -> Json:
    counts = {"committed": _counts(committed), "unfinished": _counts(unfinished)}
    return {"documents": documents, **counts, "exact": exact}


_COUNTS = tuple(DocumentCounts.__dataclass_fields__)


def _counts(counts: DocumentCounts) -> Json:
    return {name: max(0, getattr(counts, name)) for name in _COUNTS}  # asdict takes ten times as long


def _work(work: WorkCounts, lost_in_flight: int, is_at_least: bool) -> Json:
    numbers = {name: getattr(work, name) for name in _WORK}
    return {**numbers, "lost_in_flight": lost_in_flight, "errors": work.errors, "is_at_least": is_at_least}


_WORK = tuple(name for name in WorkCounts.__dataclass_fields__ if name != "errors")


def _input(position: InputPosition) -> Json:
    share = position.share
    return {
        "done": position.done,
        "total": position.total,
        "unit": position.unit,
        "share": None if share is None else round(share, 6),
    }


def _rates(rates: Rates) -> Json:
    return {name: round(value, 6) for name, value in asdict(rates).items()} if rates != _NOTHING else _ZEROS.copy()


_NOTHING = Rates()
_ZEROS = asdict(_NOTHING)


def _attempt(attempt: AttemptSummary) -> Json:
    return {
        "number": attempt.number,
        "started_at": _time(attempt.started),
        "last_seen_at": _time(attempt.last_seen),
        "ended_at": _time(attempt.ended),
        "why": attempt.why,
        "what": attempt.what,
        "host": attempt.host,
        "pid": attempt.pid,
        "slurm_job": attempt.slurm_job,
        "version": attempt.version,
        "without_a_word": attempt.without_a_word,
        "in_flight": attempt.in_flight,
    }


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _time(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds")
