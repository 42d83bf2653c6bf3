"""What each interruption cost: attempts that ended before their rank was done, and servers that died meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

from datatrove_ckpt.maintenance.report.content import Interruption
from datatrove_ckpt.maintenance.report.rank_log import AttemptLog, RankLog

Number = TypeVar("Number", int, float)
NO_WORD = "without a word"
"""How attempts end that are killed with -9, run out of memory, or lose their node."""
_TOGETHER_SECONDS = 60.0  # between two lines of a history: when exactly a rank died is not known
_MAX_NAMES = 8


def interruptions(rank: str, log: RankLog, is_running: bool) -> Iterator[Interruption]:
    """In the order of time.

    Args:
        is_running: the last attempt has not ended.
    """
    attempts = log.attempts
    for attempt, following in pairwise(attempts):
        yield from _deaths(rank, attempt)
        if not attempt.is_done:
            away = max(0.0, following.first_at - attempt.last_at)
            yield Interruption(
                rank,
                attempt.last_at,
                how_it_ended(attempt),
                _place(attempt),
                away,
                _until_ready(following),
                _in_flight(attempt),
            )
    if attempts:
        last = attempts[-1]
        yield from _deaths(rank, last)
        if not is_running and not last.is_done:
            yield Interruption(rank, last.last_at, how_it_ended(last), _place(last), repeated=_in_flight(last))


def how_it_ended(attempt: AttemptLog) -> str:
    """A few words."""
    end = attempt.end
    if end is None:
        return NO_WORD
    return f"stopped by {end.what}" if end.why == "stopped" and end.what else end.what or end.why


def _place(attempt: AttemptLog) -> str:
    if attempt.start is None:
        return ""
    return attempt.start.host + (f", Slurm job {attempt.start.job}" if attempt.start.job else "")


def together(found: Iterable[Interruption]) -> list[Interruption]:
    """Those of several ranks that ended in one minute, and in one way, as one. In the order of time."""
    groups: list[list[Interruption]] = []
    newest: dict[tuple[str, bool], tuple[list[Interruption], set[str]]] = {}
    for one in sorted(found, key=lambda one: one.at):
        way = one.why, one.away is None
        group, ranks = newest.get(way, ([], set()))
        if not group or one.rank in ranks or one.at - group[0].at > _TOGETHER_SECONDS:
            group, ranks = newest[way] = [], set()
            groups.append(group)
        group.append(one)
        ranks.add(one.rank)
    return [_joined(group) for group in groups]


def _joined(group: list[Interruption]) -> Interruption:
    first = group[0]
    if len(group) == 1:
        return first
    places = sorted({one.place for one in group})
    place = places[0] if len(places) == 1 else f"{len(places)} places: {places[0]}, ..."
    return Interruption(
        f"{len(group)} ranks: {_names([one.rank for one in group])}",
        first.at,
        first.why,
        place,
        _sum(one.away for one in group),
        _sum(one.starting for one in group),
        None if any(one.repeated is None for one in group) else _sum(one.repeated for one in group),
        len(group),
    )


def _names(ranks: list[str]) -> str:
    """Neighbours are a range: "0-3, 7"."""
    numbers = sorted(int(rank) for rank in ranks if rank.isdecimal())
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    names += sorted(rank for rank in ranks if not rank.isdecimal())
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def _sum(values: Iterable[Number | None]) -> Number | None:
    """None if nothing is known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _in_flight(attempt: AttemptLog) -> int | None:
    """Requests that were in flight at its last line. Those are sent again.

    None: its last line knows of none, but came before it was killed.
    """
    known = attempt.minutes[-1].in_flight if attempt.minutes else None
    return known or (known if attempt.end is not None else None)


def _until_ready(attempt: AttemptLog) -> float | None:
    """Seconds from the attempt's start until its first server answered."""
    ready = next((event.at for event in attempt.servers if event.what in ("ready", "reused")), None)
    return None if ready is None else max(0.0, ready - attempt.first_at)


def _deaths(rank: str, attempt: AttemptLog) -> Iterator[Interruption]:
    """Servers that died in the attempt, until each answered again."""
    for index, event in enumerate(attempt.servers):
        if event.what == "death":
            later = (one for one in attempt.servers[index + 1 :] if one.name == event.name and one.what == "ready")
            ready = next(later, None)
            why = f"server {event.name} died: {event.why}" if event.why else f"server {event.name} died"
            starting = None if ready is None else max(0.0, ready.at - event.at)
            yield Interruption(rank, event.at, why, _place(attempt), 0.0, starting)
