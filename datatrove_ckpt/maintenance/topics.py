"""The sums of a run as lines of text: ``status`` prints them, and a report begins with them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import get_args

from datatrove_ckpt.checkpoint.ledger import few, name_place
from datatrove_ckpt.formatting import duration, figure, percent, plural, ranges, short
from datatrove_ckpt.maintenance.run_state import RunState, State, Totals

# A rank knows the size of its input once it has read something, and writes it with the next minute.
_FIRST_SECONDS = 120.0
_SHOWN_CAUSES = 5


def topics(state: RunState) -> Iterator[tuple[str, str]]:
    """Each topic that there is something to say about, with that."""
    totals = state.together
    documents = "none in the input" if state.is_finished and not totals.documents else _documents(totals)
    yield "documents", documents
    if totals.started is not None:
        yield "rate", _rate(totals)
        yield "tokens", _tokens(totals)
        yield "requests", _requests(totals)
        yield from _in_flight(state, totals)
        yield from _troubles_of_requests(totals, _ago(state))
        yield "attempts", _attempts(totals)
    else:
        yield "requests", f"{totals.done.requests:,} answered, {_sum_of_tokens(totals)}"
    if odd := totals.done.odd_answers:
        yield "answers", odd.strip()
    if totals.skipped:
        yield "skipped", totals.skipped.text
    if totals.done.dead > 0:
        yield "dead", _dead(state, totals)
    if state.missing:
        yield "missing", f"not started: {ranges(state.missing)}"
    if state.gone:
        what = "`run` restores them from the mirror, or refuses while their output files are there"
        yield "", f"removed, though they had begun: {ranges(state.gone)}; {what}"
    if state.foreign:
        ranks = f"{plural(state.tasks, 'rank')}: {ranges(state.foreign)}"
        yield "foreign", f"folders that do not belong to the run of {ranks}; they are not counted"
    if state.retries:
        retried = state.retried
        tries = "1 try" if retried.documents == 1 else f"{retried.documents:,} tries"
        now = f"; {plural(running, 'rank')} at work" if (running := retried.states["running"]) else ""
        yield "retries", f"{tries} of dead letters, {retried.counts.written:,} of them written{now}"


def ranks_of(state: RunState) -> str:
    """How many ranks there are, by what they do."""
    not_started = state.totals.not_started
    states = [f"{state.totals.states[name]} {name}" for name in get_args(State) if state.totals.states[name]]
    if not_started:
        states.append(f"{not_started} not started")
    return f"{plural(len(state.ranks) + not_started, 'rank')} ({', '.join(states)})"


def age(state: RunState) -> str:
    """How old the data is."""
    if state.newest is None:
        return "last change not known"
    seconds = max(0.0, state.read_at - state.newest)
    old = "less than 1 s" if seconds < 1 else duration(seconds)
    return f"last change {old} ago" + (", as its mirror shows" if state.is_copy else "")


def _ago(state: RunState) -> str:
    """How old the lines are that tell where the ranks stand, with a space before it; empty if they are new."""
    seconds = state.read_at - (state.together.as_of or state.read_at)
    return f" as of {duration(round(seconds))} ago" if seconds >= 1 else ""


def progress_of(state: RunState) -> str:
    """How much of the input is done, and when the rest will be."""
    totals = state.totals
    share = totals.position.share
    if state.is_finished:
        return "finished"
    if share is None:
        first = state.read_at - (totals.started or 0.0) < _FIRST_SECONDS
        return f"no percentage{' yet' if first else ''}: it is not known how much of the input is done"
    about = "about " if totals.total_is_estimated else ""
    if totals.time_left is None:
        left = "time left not known yet" if totals.states["running"] else "nothing runs"
    else:
        end = datetime.datetime.fromtimestamp(state.read_at + totals.time_left).astimezone()
        left = f"about {duration(totals.time_left)} left, until {end:%a %d %b %H:%M}"
        left += f", not counting {plural(totals.halted, 'rank')} without progress" if totals.halted else ""
    return f"{about}{percent(share)} of the input{'' if totals.exact else _ago(state)}, {left}"


def _documents(totals: Totals) -> str:
    done, written = totals.done, f"{totals.counts.written:,} written in {counted(totals.chunks, 'chunk')}"
    text = f"{done.read:,} done: {written}, {done.dropped:,} dropped, {done.dead:,} dead"
    if totals.unfinished_chunks:
        about = "" if totals.exact else "about "
        text += f", {about}{totals.unfinished.written:,} in {counted(totals.unfinished_chunks, 'unfinished chunk')}"
    return text


def counted(number: int, noun: str) -> str:
    """A count with its noun, as ``plural``, with commas between thousands."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _rate(totals: Totals) -> str:
    is_new = totals.as_of is None and not totals.rates.documents
    now = "no rate yet; " if is_new else f"{figure(totals.rates.documents)} documents/s now; "
    now *= totals.states["running"] > 0
    worked = duration(totals.working_seconds)
    if totals.documents and not totals.average.documents:
        return f"{now}no average yet, after {worked} at work"
    return f"{now}{figure(totals.average.documents)} documents/s on average over {worked} at work"


def _tokens(totals: Totals) -> str:
    rates = totals.rates
    now = f"; {figure(rates.prompt_tokens)} and {figure(rates.completion_tokens)} per second now"
    return _sum_of_tokens(totals) + (now if totals.states["running"] else "")


def _sum_of_tokens(totals: Totals) -> str:
    done = totals.done
    return f"{short(done.prompt_tokens)} prompt and {short(done.completion_tokens)} completion tokens"


def _requests(totals: Totals) -> str:
    work = totals.work
    at_least = "at least " if totals.killed else ""
    sent = f"{at_least}{work.sent:,} sent, {work.cached:,} answered from cache"
    return f"{totals.done.requests:,} of documents that are done; {sent}"


def _in_flight(state: RunState, totals: Totals) -> Iterator[tuple[str, str]]:
    """What the ranks wait for, except those in their first ten seconds, of which that is not known yet."""
    running = [rank for rank in (*state.ranks, *state.retries) if rank.state == "running" and rank.as_of is not None]
    if not running:
        return
    text = f"{totals.in_flight:,}, {totals.waiting:,} waiting{_ago(state)}"
    longest = max(running, key=lambda rank: rank.wait.oldest)
    if longest.wait.oldest:
        document = f" (document {longest.wait.document})" if longest.wait.document else ""
        place = name_place(longest.root, longest.rank)
        text += f"; the oldest for {duration(longest.wait.oldest)}: {place}{document}"
    yield "in flight", text


def _troubles_of_requests(totals: Totals, ago: str) -> Iterator[tuple[str, str]]:
    work = totals.work
    wasted = {
        "sent again after an error": work.retries,
        "lost when their server died or the run stopped": work.resent,
        "in flight shortly before attempts were killed": totals.lost_in_flight,
    }
    said = [f"{count:,} {what}" for what, count in wasted.items() if count]
    if totals.killed and not totals.lost_in_flight:
        said.append("not known what was in flight when attempts were killed")
    if said:
        yield "wasted", ", ".join(said)
    if work.restarts:
        yield "servers", counted(work.restarts, "restart")
    if work.errors:
        yield "errors", _named_counts(work.errors) + ago


def _named_counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in few(numbers, _SHOWN_CAUSES).items())


def _attempts(totals: Totals) -> str:
    killed = ""
    if totals.killed:
        killed = f", {totals.killed:,} of them killed"
    return f"{totals.number_of_attempts:,}{killed}; {duration(totals.seconds)} together"


def _dead(state: RunState, totals: Totals) -> str:
    parts = []
    if state.causes:
        parts.append(_named_counts(state.causes))
    if totals.unfinished.dead:
        parts.append(f"{totals.unfinished.dead:,} in unfinished chunks")
    number = f"{totals.done.dead:,}"
    return f"{number}: {', '.join(parts)}" if parts else number
