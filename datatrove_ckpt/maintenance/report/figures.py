"""The numbers at the top of the page. Each is one that ``status --json`` has, too, and ``key`` is its path there.

A path with " + " is the sum of two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.report.content import Figure
from datatrove_ckpt.maintenance.report.scales import compact, grouped, percent, short
from datatrove_ckpt.maintenance.run_state import RunState, Totals


def figures(run: RunState) -> Iterator[Figure]:
    """The figures of a run, its retries of dead letters left out."""
    totals = run.totals
    yield Figure("totals.documents", "Documents", totals.documents, grouped(totals.documents), _share(totals))
    yield _rate(totals)
    yield _time(run)
    work = totals.work
    for key, label in (("prompt_tokens", "Prompt tokens"), ("completion_tokens", "Completion tokens")):
        number = getattr(totals.done, key)
        now = getattr(totals.rates if _runs(totals) else totals.average, key)
        yield Figure(_both(key), label, number, short(number), f"{compact(now)} per second")
    requests = totals.done.requests
    per_document = f"{requests / totals.documents:.2f} per document" if totals.documents else ""
    yield Figure(_both("requests"), "Requests", requests, short(requests), per_document)
    share = percent(min(1.0, work.cached / requests)) if requests else "0 %"
    yield Figure("totals.work.cached", "From the cache", work.cached, short(work.cached), f"{share} of all answers")
    yield _retries(totals)
    yield _answers(totals)
    lost, silent = totals.lost_in_flight, totals.attempts_without_a_word
    why = "in flight at the last lines of attempts that were killed"
    text = "not known" if silent and not lost else short(lost)
    yield Figure("totals.work.lost_in_flight", "Sent again", lost, text, why)
    yield _attempts(totals)
    yield _dead(run)
    yield _ranks(run)


def _runs(totals: Totals) -> bool:
    return bool(totals.states["running"])


def _share(totals: Totals) -> str:
    share = totals.position.share
    if share is None:
        return "of an input of unknown size"
    return f"{percent(share)} of the input" + (", estimated" if totals.total_is_estimated else "")


def _rate(totals: Totals) -> Figure:
    average = round(totals.average.documents, 6)
    if not _runs(totals):
        return Figure("totals.average.documents", "Average rate", average, compact(average), "documents per second")
    now = round(totals.rates.documents, 6)
    return Figure("totals.rates.documents", "Rate now", now, compact(now), f"documents/s; average {compact(average)}")


def _time(run: RunState) -> Figure:
    totals = run.totals
    if totals.time_left is not None and _runs(totals):
        ready = datetime.fromtimestamp(run.read_at + totals.time_left, UTC)
        when = f"until {ready:%b} {ready.day}, {ready:%H:%M} UTC"
        left = round(totals.time_left, 3)
        return Figure("totals.time_left_seconds", "Time left", left, duration(totals.time_left), when)
    worked = round(totals.working_seconds, 3)
    since = "" if totals.started is None else f"since {datetime.fromtimestamp(totals.started, UTC):%Y-%m-%d %H:%M} UTC"
    return Figure("totals.working_seconds", "Time worked", worked, duration(worked), since)


def _both(key: str) -> str:
    """Of documents that are done, committed or not. That is exact, however many attempts were killed."""
    return f"totals.committed.{key} + totals.unfinished.{key}"


def _retries(totals: Totals) -> Figure:
    retries, restarts = totals.work.retries, totals.work.restarts
    tone = "warning" if restarts else ""
    return Figure("totals.work.retries", "Retries", retries, short(retries), plural(restarts, "server restart"), tone)


def _answers(totals: Totals) -> Figure:
    done = totals.done
    tone = "warning" if done.cut_off or done.empty else ""
    text, note = short(done.cut_off), f"{short(done.empty)} empty, of {short(done.answers)} answers"
    if done.read and not done.answers:  # an earlier release did not note it
        text, note = "not known", ""
    return Figure(_both("cut_off"), "Cut-off answers", done.cut_off, text, note, tone)


def _attempts(totals: Totals) -> Figure:
    silent = totals.attempts_without_a_word
    note = f"{silent} ended without a word" if silent else "none ended without a word"
    return Figure(
        "totals.attempts", "Attempts", totals.attempts, grouped(totals.attempts), note, "warning" if silent else ""
    )


def _dead(run: RunState) -> Figure:
    dead = run.together.counts.dead
    note = plural(len(run.totals.dead_letters), "cause") if dead else "every document was processed"
    if run.retries:
        note += f"; {grouped(run.retried.counts.written)} written by retries"
    return Figure("delivered.dead", "Dead letters", dead, grouped(dead), note, "warning" if dead else "")


def _ranks(run: RunState) -> Figure:
    totals, number = run.totals, max(run.tasks, len(run.ranks))
    states = [f"{count} {state}" for state, count in totals.states.most_common()]
    states += [f"{totals.not_started} not started"] if totals.not_started else []
    bad = totals.states["failed"] + totals.states["damaged"] + totals.states["lost"]
    tone = "critical" if bad else ""
    return Figure("totals.tasks", "Ranks", run.tasks or None, grouped(number), ", ".join(states), tone)
