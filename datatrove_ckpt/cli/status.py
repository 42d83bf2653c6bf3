"""``datatrove-ckpt status``: the state of a whole run. Imports no datatrove.

Exit codes: 0 all is well; 1 something is damaged; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from datatrove_ckpt.checkpoint.ledger import OTHERS, name_place
from datatrove_ckpt.cli.printing import takes_unicode, write_out
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.config.paths import start_command
from datatrove_ckpt.formatting import byte_size, duration, figure, filled_cells, percent, plural, ranges, short
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals, dump, to_json


def status(arguments: argparse.Namespace) -> int:
    """Prints the state of the run. Returns the exit code."""
    with place_of(arguments, wanted_files) as place:
        state = read_run_state(place)
    if arguments.json:
        write_out(dump(to_json(state)).decode() + "\n")
    else:
        unicode = takes_unicode()
        ranks = ["", *table([*state.ranks, *state.retries], state.read_at, unicode)] if arguments.all else []
        lines = describe(state, unicode)
        if sys.stdout.isatty():
            lines = wrapped(lines, shutil.get_terminal_size().columns)
        write_out("\n".join([*lines, *ranks]) + "\n")
    return int(state.is_damaged)


_INDENT = re.compile(r"(?: +\w* +)?")


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """The lines, long ones as several of at most ``width`` characters, if no word of theirs is longer."""
    for line in (part for text in lines for part in text.split("\n")):
        indent = " " * len(_INDENT.match(line)[0])  # type: ignore[index]  # it always matches
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


# text -----------------------------------------------------------------------------------------------------------------

# The state of a run as lines for people: sums first, then the ranks that need attention, then a table of ranks.


MAX_TROUBLED = 20
"""Of each kind of trouble, so many reasons are shown with their ranks; of the others, the ranks' numbers."""
_BAR = 24
_LEAST_FREE = 1 << 20  # bytes
_LABEL = 10
_BETWEEN_SECONDS = 15.0  # from one task's end to the next one's start, with the start of its process
# A rank knows the size of its input once it has read something, and writes it with the next minute.
_FIRST_SECONDS = 120.0


_STATES = ("damaged", "failed", "lost", "interrupted", "unfinished", "running", "finished")


def _bar(share: float, unicode: bool, width: int = _BAR) -> str:
    """A bar of ``width`` characters."""
    share = min(1.0, max(0.0, share))
    if unicode:
        return filled_cells(share, width, "░")
    full = int(share * width)
    return "#" * full + "-" * (width - full)


def describe(state: RunState, unicode: bool = True) -> Iterator[str]:
    """The sums and the exceptions. ``unicode``: the terminal takes more than ASCII."""
    yield from _describe_totals(state, unicode)
    yield ""
    yield from _describe_trouble(state)
    if not state.totals.states["running"] and not state.retried.states["running"]:
        yield from _what_next(state)
    yield from _full_disk(state)


def _what_next(state: RunState) -> Iterator[str]:
    """What goes on with a run of which nothing runs."""
    failed = [rank.rank for rank in state.ranks if rank.state == "failed"]
    command = start_command(state.given) if state.given else "the command that started it"
    if state.is_damaged:
        yield "Nothing runs, and `run` refuses to start with this, but takes what is missing from a mirror that has it."
    elif _has_just_finished_a_rank(state):
        yield f"The run is between two tasks, or has just ended. To resume it if it has ended: {command}"
    elif failed:
        yield (
            f"Nothing runs. First correct what ended rank{'s' * (len(failed) > 1)} {ranges(failed)}, or the same error "
            f"comes again. To resume then: {command}"
        )
    elif state.missing and not state.gone and set(state.totals.states) == {"finished"}:
        yield (
            "Nothing runs at the moment. Of the ranks that have not started, those of a Slurm array wait in its queue, "
            f"and those of another node start there. If nothing is to start them: {command}"
        )
    elif not state.is_finished:
        yield f"Nothing runs, and the run is not finished. To resume: {command}"


def _has_just_finished_a_rank(state: RunState) -> bool:
    ranks = [rank for rank in (*state.ranks, *state.retries) if rank.last_word == state.newest]
    seconds = state.read_at - (state.newest or 0.0)
    return not state.is_finished and seconds < _BETWEEN_SECONDS and any(rank.state == "finished" for rank in ranks)


def _full_disk(state: RunState) -> Iterator[str]:
    """Where a disk is full, a rank cannot even write why it ends."""
    if state.is_copy or not state.ranks or all(rank.state in ("running", "finished") for rank in state.ranks):
        return
    with suppress(OSError):
        free = shutil.disk_usage(state.ranks[0].folder).free
        if free < _LEAST_FREE:
            yield (
                f"The disk of {state.what} is full: {byte_size(free)} are free. Ranks may have ended for that reason, "
                "and could not write it down. Make room, and run the same command again."
            )


# sums ----------------------------------------------------------------------------------------------------------------


def _describe_totals(state: RunState, unicode: bool) -> Iterator[str]:
    """The sums, a line for each topic that there is something to say about."""
    totals = state.together
    yield f"{state.what}: {_ranks(state)}; {age(state)}"
    yield _share(state, unicode)
    yield _topic("documents", _documents(totals) if totals.documents or not state.is_finished else "none in the input")
    if totals.started is not None:
        yield _topic("rate", _rate(totals))
        yield _topic("tokens", _tokens(totals))
        yield _topic("requests", _requests(state, totals))
        yield from _troubles_of_requests(totals, _ago(state))
        yield _topic("attempts", _attempts(totals))
    else:
        yield _topic("requests", f"{totals.done.requests:,} answered, {_sum_of_tokens(totals)}")
    if odd := totals.done.odd_answers:
        yield _topic("answers", odd.strip())
    if totals.done.dead > 0:
        yield _topic("dead", _dead(state, totals))
    if state.missing:
        yield _topic("missing", f"not started: {ranges(state.missing)}")
    if state.gone:
        what = "`run` restores them from the mirror, or refuses while their output files are there"
        yield _topic("", f"removed, though they had begun: {ranges(state.gone)}; {what}")
    if state.foreign:
        ranks = f"{plural(state.tasks, 'rank')}: {ranges(state.foreign)}"
        yield _topic("foreign", f"folders that do not belong to the run of {ranks}; they are not counted")
    if state.retries:
        retried = state.retried
        tries = "1 try" if retried.documents == 1 else f"{retried.documents:,} tries"
        now = f"; {plural(running, 'rank')} at work" if (running := retried.states["running"]) else ""
        yield _topic("retries", f"{tries} of dead letters, {retried.counts.written:,} of them written{now}")


def _topic(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}} {text}"


def _ranks(state: RunState) -> str:
    totals = state.totals
    states = [f"{totals.states[name]} {name}" for name in _STATES if totals.states[name]]
    states += [f"{totals.not_started} not started"] if totals.not_started else []
    return f"{plural(len(state.ranks) + totals.not_started, 'rank')} ({', '.join(states)})"


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


def _share(state: RunState, unicode: bool) -> str:
    totals = state.totals
    share = 1.0 if state.is_finished else totals.position.share
    if share is None:
        first = state.read_at - (totals.started or 0.0) < _FIRST_SECONDS
        return f"  no percentage{' yet' if first else ''}: it is not known how much of the input is done"
    bar = _bar(share, unicode)
    if state.is_finished:
        return f"  {bar} finished"
    about = "about " if totals.total_is_estimated else ""
    if totals.time_left is None:
        left = "time left not known yet" if totals.states["running"] else "nothing runs"
    else:
        end = datetime.datetime.fromtimestamp(state.read_at + totals.time_left).astimezone()
        left = f"about {duration(totals.time_left)} left, until {end:%a %d %b %H:%M}"
        left += f", not counting {plural(totals.halted, 'rank')} without progress" if totals.halted else ""
    return f"  {bar} {about}{percent(share)} of the input{'' if totals.exact else _ago(state)}, {left}"


def _documents(totals: Totals) -> str:
    done, written = totals.done, f"{totals.counts.written:,} written in {_plural(totals.chunks, 'chunk')}"
    text = f"{done.read:,} done: {written}, {done.dropped:,} dropped, {done.dead:,} dead"
    if totals.unfinished_chunks:
        about = "" if totals.exact else "about "
        text += f", {about}{totals.unfinished.written:,} in {_plural(totals.unfinished_chunks, 'unfinished chunk')}"
    return text


def _plural(number: int, noun: str) -> str:
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


def _requests(state: RunState, totals: Totals) -> str:
    work, done = totals.work, totals.done.requests
    sent = f"{'at least ' * totals.work_is_at_least}{work.sent:,} sent, {work.cached:,} answered from cache"
    if totals.work_is_at_least and not work.sent + work.cached:
        sent = "not known how many were sent"
    text = f"{done:,} of documents that are done; {sent}"
    told = [rank.as_of is not None for rank in (*state.ranks, *state.retries) if rank.state == "running"]
    if any(told):  # the others are in their first ten seconds
        least = "at least " * (not all(told))
        text += f"; {least}{totals.in_flight:,} in flight, {totals.waiting:,} waiting{_ago(state)}"
    return text


def _troubles_of_requests(totals: Totals, ago: str) -> Iterator[str]:
    work = totals.work
    wasted = {
        "sent again after an error": work.retries,
        "to be sent again: their server died, or the run stopped": work.resent,
        "in flight shortly before attempts were killed": totals.lost_in_flight,
    }
    said = [f"{count:,} {what}" for what, count in wasted.items() if count]
    if totals.attempts_without_a_word and not totals.lost_in_flight:
        said.append("not known what was in flight when attempts were killed")
    if said:
        yield _topic("wasted", ", ".join(said))
    if work.restarts:
        yield _topic("servers", _plural(work.restarts, "restart"))
    if work.errors:
        yield _topic("errors", _most(work.errors) + ago)


def _most(numbers: Mapping[str, int]) -> str:
    ordered = sorted(((name, count) for name, count in numbers.items() if name != OTHERS), key=lambda item: -item[1])
    shown = [f"{count:,} {name}" for name, count in ordered[:5]]
    others = sum(count for _, count in ordered[5:]) + numbers.get(OTHERS, 0)
    return ", ".join([*shown, f"{others:,} {OTHERS}"] if others else shown)


def _attempts(totals: Totals) -> str:
    silent = totals.attempts_without_a_word
    return f"{totals.attempts:,}" + (f", {silent:,} of them killed" if silent else "")


def _dead(state: RunState, totals: Totals) -> str:
    said = [_most(state.causes)]
    said += [f"{totals.unfinished.dead:,} in unfinished chunks"] if totals.unfinished.dead else []
    return f"{totals.done.dead:,}: {', '.join(filter(None, said))}".removesuffix(": ")


# exceptions ----------------------------------------------------------------------------------------------------------


def _describe_trouble(state: RunState) -> Iterator[str]:
    """The ranks that need attention, each with its reason."""
    troubled = state.troubled
    if troubled:
        yield f"{_plural(len(troubled), 'rank')} {'needs' if len(troubled) == 1 else 'need'} attention:"
    if state.is_mostly_dead:
        often = "".join(f", most often {cause}" for cause, _ in state.causes.most_common(1))
        yield f"More than half of the documents are dead letters{often}. Correct that, and retry them at the end."
    elif not troubled:
        yield "No rank needs attention."
    for trouble in dict.fromkeys(rank.trouble for rank in troubled):
        ranks = [rank for rank in troubled if rank.trouble == trouble]
        alike: dict[tuple[str, str], list[RankState]] = {}
        for rank in ranks:
            alike.setdefault((rank.root, rank.reason), []).append(rank)
        groups = list(alike.values())
        for group in groups[:MAX_TROUBLED]:
            reason = group[0].reason.replace("\n", "\n    ")
            yield f"  {_places(group)}: {trouble}: {reason}"
        if others := [rank for group in groups[MAX_TROUBLED:] for rank in group]:
            yield f"  {trouble}, too: {_plural(len(others), 'rank')}: {ranges([rank.rank for rank in others])}"


def _places(ranks: Sequence[RankState]) -> str:
    """One rank, or those of one root with the same reason: "ranks 3, 5-9"."""
    if len(ranks) == 1:
        return name_place(ranks[0].root, ranks[0].rank)
    root = ranks[0].root
    return (f"{root}, " if root else "") + f"ranks {ranges([rank.rank for rank in ranks])}"


# table ---------------------------------------------------------------------------------------------------------------

_TABLE_BAR = 10


def table(ranks: Sequence[RankState], now: float, unicode: bool = True) -> Iterator[str]:
    """A header, and a line for each rank."""
    yield (
        f"{'rank':>6}  {'state':<11}  {'input':<{_TABLE_BAR + 8}}  {'documents':>11}  {'per second':>10}  "
        f"{'left':>8}  {'changed':>8}  notes"
    )
    for rank in ranks:
        yield _row(rank, now, unicode)


def _row(rank: RankState, now: float, unicode: bool) -> str:
    name = f"{rank.root}/{rank.rank}" if rank.root else f"{rank.rank}"
    shown = rank.trouble or rank.state
    share = 1.0 if rank.state == "finished" else rank.position.share
    done = "" if share is None else f"{_bar(share, unicode, _TABLE_BAR)} {percent(share):>7}"
    rate = figure(rank.rates.documents) if rank.state == "running" and rank.rates.documents else ""
    left = "" if rank.time_left is None else duration(rank.time_left)
    word = "" if rank.last_word is None or rank.state == "finished" else duration(max(1.0, now - rank.last_word))
    notes = rank.reason.partition("\n")[0] or rank.process * (rank.state == "running")
    numbers = f"{rank.documents:>11,}  {rate:>10}  {left:>8}  {word:>8}"
    return f"{name:>6}  {shown:<11}  {done:<{_TABLE_BAR + 8}}  {numbers}  {notes}".rstrip()
