"""The state of a run as lines for people: sums first, then the ranks that need attention, then a table of ranks."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from datatrove_ckpt.checkpoint.ledger import OTHERS, name_place
from datatrove_ckpt.formatting import byte_size, duration, plural
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals

MAX_TROUBLED = 20
"""Of each kind of trouble, so many reasons are shown with their ranks; of the others, the ranks' numbers."""
_BAR = 24
_LEAST_FREE = 1 << 20  # bytes
_LABEL = 10
# A rank knows the size of its input once it has read something, and writes it with the next minute.
_FIRST_SECONDS = 120.0
# A run that would take this many times less if its largest rank were divided is uneven; but not if it ends soon anyway.
_UNEVEN, _SOON_SECONDS, _MOST = 2.0, 600.0, 0.9
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


@dataclass(frozen=True)
class Style:
    """How to draw. ``unicode``: the terminal takes more than ASCII. ``color``: it takes colours."""

    unicode: bool = True
    color: bool = False

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and code else text

    def bar(self, share: float, width: int = _BAR) -> str:
        """A bar of ``width`` characters."""
        share = min(1.0, max(0.0, share))
        if not self.unicode:
            full = int(share * width)
            return "#" * full + "-" * (width - full)
        eighths = int(share * width * 8)
        part = " ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""
        return ("█" * (eighths // 8) + part).ljust(width, "░")


PLAIN = Style()
_COLORS = {
    "damaged": "1;31",
    "failed": "1;31",
    "lost": "1;31",
    "silent": "31",
    "stuck": "31",
    "looping": "31",
    "restarting": "33",
    "slow": "33",
    "interrupted": "33",
    "unfinished": "33",
    "running": "32",
    "finished": "2",
}


def describe(state: RunState, style: Style = PLAIN) -> Iterator[str]:
    """The sums and the exceptions."""
    yield from describe_totals(state, style)
    yield ""
    yield from describe_trouble(state, style)
    if not state.totals.states["running"] and not state.retried.states["running"]:
        yield from _what_next(state)
    yield from _full_disk(state)


def _what_next(state: RunState) -> Iterator[str]:
    """What goes on with a run of which nothing runs."""
    if state.is_damaged or state.refusal:
        yield "Nothing runs, and `run` refuses to start with this, but takes what is missing from a mirror that has it."
    elif state.is_unstarted:
        yield f"{state.what} is a fork that has not started. Start it with `datatrove-ckpt run`."
    elif not state.is_finished:
        tasks = f", with --executor.tasks={state.tasks}" if state.is_dealt_anew else ""
        again = f"Run the command that started it again{tasks}: it goes on from here."
        yield f"Nothing runs, and the run is not finished. {again}"


def _full_disk(state: RunState) -> Iterator[str]:
    """Where a disk is full, a rank cannot even write why it ends."""
    if state.is_copy or not state.ranks or all(rank.state in ("running", "finished") for rank in state.ranks):
        return
    with suppress(OSError):
        free = shutil.disk_usage(state.ranks[0].folder).free
        if free < _LEAST_FREE:
            yield (
                f"The disk of {state.what} is full: {byte_size(free)} are free. Ranks that ended there may have ended "
                "for that, without a word. Make room, and run the same command again."
            )


# sums ----------------------------------------------------------------------------------------------------------------


def describe_totals(state: RunState, style: Style = PLAIN) -> Iterator[str]:
    """The sums, a line for each topic that there is something to say about."""
    totals = state.together
    yield f"{style.paint(state.what, '1')}: {_ranks(state)}; {age(state)}"
    yield _share(state, style)
    yield _line("documents", _documents(totals) if totals.documents or not state.is_finished else "none in the input")
    if advice := _uneven(state):
        yield _line("reshard", advice)
    if totals.started is not None:
        yield _line("rate", _rate(totals))
        yield _line("tokens", _tokens(totals))
        yield _line("requests", _requests(totals, _ago(state)))
        yield from _troubles_of_requests(totals, _ago(state))
        yield _line("attempts", _attempts(totals))
    else:
        yield _line("requests", f"{totals.done.requests:,} answered, {_sum_of_tokens(totals)}")
    if odd := totals.done.odd_answers:
        yield _line("answers", odd.strip())
    if totals.done.dead > 0:
        yield _line("dead", _dead(state))
    if state.missing:
        yield _line("missing", f"not started: {_ranges(state.missing)}")
    if state.gone:
        what = "`run` restores them from the mirror, or refuses while their output files are there"
        yield _line("", f"removed, though they had begun: {_ranges(state.gone)}; {what}")
    if state.foreign:
        ranks = f"{plural(state.tasks, 'rank')}: {_ranges(state.foreign)}"
        yield _line("foreign", f"folders that do not belong to the run of {ranks}; they are not counted")
    if state.retries:
        retried = state.retried
        yield _line(
            "retries", f"{retried.documents:,} dead letters retried, {retried.counts.written:,} of them written"
        )


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}} {text}"


def _ranks(state: RunState) -> str:
    totals = state.totals
    states = [f"{totals.states[name]} {name}" for name in _COLORS if totals.states[name]]
    states += [f"{totals.not_started} not started"] if totals.not_started else []
    return f"{plural(len(state.ranks) + totals.not_started, 'rank')} ({', '.join(states)})"


def age(state: RunState) -> str:
    """How old the data is."""
    if state.newest is None:
        return "of unknown age"
    seconds = max(0.0, state.read_at - state.newest)
    old = "less than 1 s" if seconds < 1 else duration(seconds)
    return f"newest word {old} old" + (", read from a copy" if state.is_copy else "")


def _ago(state: RunState) -> str:
    """How old the lines are that tell where the ranks stand, with a space before it; empty if they are new."""
    seconds = 0.0 if state.totals.as_of is None else state.read_at - state.totals.as_of
    return f" as of {duration(round(seconds))} ago" if seconds >= 1 else ""


def _share(state: RunState, style: Style) -> str:
    totals = state.totals
    share = 1.0 if state.is_finished else totals.position.share
    if share is None and state.is_dealt_anew:
        return "  no percentage: not every rank has begun since the input was dealt out anew, or its size is not known"
    if share is None:
        first = state.read_at - (totals.started or 0.0) < _FIRST_SECONDS
        return f"  no percentage{' yet' if first else ''}: the size of the input is not known"
    bar = style.paint(style.bar(share), "32" if style.color else "")
    if state.is_finished:
        return f"  {bar} finished"
    about = "about " if totals.total_is_estimated else ""
    if totals.time_left is None:
        left = "no time left to tell: nothing runs" if not totals.states["running"] else "no rate yet"
    else:
        end = datetime.datetime.fromtimestamp(state.read_at + totals.time_left).astimezone()
        left = f"about {duration(totals.time_left)} left, until {end:%a %d %b %H:%M}"
        left += f", without {plural(totals.halted, 'rank')} at a halt" if totals.halted else ""
    return f"  {bar} {about}{percent(share)} of the input{_ago(state)}, {left}"


def _uneven(state: RunState) -> str:
    """Says that few ranks hold most of what is left, and what to do; empty if dealing it out anew would gain little."""
    tasks, open_ranks = max(state.tasks, len(state.ranks)), [one for one in state.ranks if one.state != "finished"]
    known = [one.position for one in open_ranks if one.position.total is not None]
    left = sorted((max(0, (one.total or 0) - one.done) for one in known), reverse=True)
    if tasks < 2 or state.totals.not_started or len(known) < len(open_ranks) or not sum(left):
        return ""
    longer = left[0] * tasks / sum(left)
    times = [one.time_left for one in open_ranks if one.time_left is not None]
    if longer < _UNEVEN or (times and max(times) < _SOON_SECONDS):
        return ""
    few = next(number for number in range(1, len(left) + 1) if sum(left[:number]) >= _MOST * sum(left))
    return (
        f"{few} of {tasks} ranks hold {percent(sum(left[:few]) / sum(left))} of what is left; dealt out to all, it "
        f"would take about 1/{longer:.0f} of the time: datatrove-ckpt reshard, see docs/recovery.md"
    )


def percent(share: float) -> str:
    """Never 100 % before the end."""
    shown = 100.0 if share >= 1 else min(99.9, 100 * share)
    return f"{shown:.1f} %"


def _documents(totals: Totals) -> str:
    counts = totals.counts
    outcomes = f"{counts.written:,} written, {counts.dropped:,} dropped, {counts.dead:,} dead"
    text = f"{totals.documents:,} done; {counts.read:,} ({outcomes}) in {_plural(totals.chunks, 'chunk')}"
    if totals.unfinished_chunks:
        about = "" if totals.exact else "about "
        text += f", {about}{totals.unfinished.read:,} in {_plural(totals.unfinished_chunks, 'unfinished chunk')}"
    return text


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _rate(totals: Totals) -> str:
    now = f"{figure(totals.rates.documents)} documents/s now; " if totals.states["running"] else ""
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


def _requests(totals: Totals, ago: str) -> str:
    work, done = totals.work, totals.done.requests
    sent = f"{'at least ' * totals.work_is_at_least}{work.sent:,} sent, {work.cached:,} answered from cache"
    if totals.work_is_at_least and not work.sent + work.cached:
        sent = "not known how many were sent"
    text = f"{done:,} of documents that are done; {sent}"
    if totals.states["running"]:
        text += f"; {totals.in_flight:,} in flight, {totals.waiting:,} waiting{ago}"
    return text


def _troubles_of_requests(totals: Totals, ago: str) -> Iterator[str]:
    work = totals.work
    wasted = {
        "sent again after an error": work.retries,
        "sent again after their server died": work.resent,
        "in flight at the last lines of attempts that ended without a word": totals.lost_in_flight,
    }
    said = [f"{count:,} {what}" for what, count in wasted.items() if count]
    if totals.attempts_without_a_word and not totals.lost_in_flight:
        said.append("not known what was in flight when attempts ended without a word")
    if said:
        yield _line("wasted", ", ".join(said))
    if work.restarts:
        yield _line("servers", _plural(work.restarts, "restart"))
    if work.errors:
        yield _line("errors", _most(work.errors) + ago)


def _most(numbers: Mapping[str, int]) -> str:
    ordered = sorted(((name, count) for name, count in numbers.items() if name != OTHERS), key=lambda item: -item[1])
    shown = [f"{count:,} {name}" for name, count in ordered[:5]]
    others = sum(count for _, count in ordered[5:]) + numbers.get(OTHERS, 0)
    return ", ".join([*shown, f"{others:,} {OTHERS}"] if others else shown)


def _attempts(totals: Totals) -> str:
    silent = totals.attempts_without_a_word
    return f"{totals.attempts:,}" + (f", {silent:,} of which ended without a word" if silent else "")


def _dead(state: RunState) -> str:
    """Those that are left. The causes of those that a retry has taken are not said."""
    dead = state.together.done.dead
    found = (state.totals.dead_letters, state.retried.dead_letters)
    causes = next((_most(causes) for causes in found if 0 < causes.total() <= dead), "")
    return f"{dead:,}" + (f": {causes}" if causes else "")


def figure(value: float) -> str:
    """Three digits: "0.123", "12.3", "1,234"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short(value: int) -> str:
    """A large number: "12,345", "1.23 M"."""
    for unit, size in _UNITS:
        if value >= 100 * size or (value >= size and size > 1e3):
            return f"{value / size:.3g} {unit}"
    return f"{value:,}"


# exceptions ----------------------------------------------------------------------------------------------------------


def describe_trouble(state: RunState, style: Style = PLAIN) -> Iterator[str]:
    """The ranks that need attention, each with its reason."""
    troubled = state.troubled
    if state.refusal:
        yield state.refusal
    if troubled:
        yield f"{_plural(len(troubled), 'rank')} {'needs' if len(troubled) == 1 else 'need'} attention:"
    elif not state.refusal:
        yield "No rank needs attention."
    for trouble in dict.fromkeys(rank.trouble for rank in troubled):
        ranks = [rank for rank in troubled if rank.trouble == trouble]
        alike: dict[tuple[str, str], list[RankState]] = {}
        for rank in ranks:
            alike.setdefault((rank.root, rank.reason), []).append(rank)
        groups = list(alike.values())
        for group in groups[:MAX_TROUBLED]:
            yield f"  {_places(group)}: {style.paint(str(trouble), _COLORS[str(trouble)])}: {group[0].reason}"
        if others := [rank for group in groups[MAX_TROUBLED:] for rank in group]:
            yield f"  {trouble}, too: {_plural(len(others), 'rank')}: {_ranges([rank.rank for rank in others])}"


def _places(ranks: Sequence[RankState]) -> str:
    """One rank, or those of one root with the same reason: "ranks 3, 5-9"."""
    if len(ranks) == 1:
        return name_place(ranks[0].root, ranks[0].rank)
    root = ranks[0].root
    return (f"{root}, " if root else "") + f"ranks {_ranges([rank.rank for rank in ranks])}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers of ranks, runs of them as "3-7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(numbers)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:50]]
    return ", ".join(shown) + (", ..." if len(runs) > 50 else "")


# table ---------------------------------------------------------------------------------------------------------------

_TABLE_BAR = 10


def table(ranks: Sequence[RankState], now: float, style: Style = PLAIN) -> Iterator[str]:
    """A header, and a line for each rank."""
    yield (
        f"{'rank':>6}  {'state':<11}  {'input':<{_TABLE_BAR + 8}}  {'documents':>11}  {'per second':>10}  "
        f"{'left':>8}  {'word':>8}  notes"
    )
    for rank in ranks:
        yield _row(rank, now, style)


def _row(rank: RankState, now: float, style: Style) -> str:
    name = f"{rank.root}/{rank.rank}" if rank.root else f"{rank.rank}"
    shown = rank.trouble or rank.state
    state = style.paint(f"{shown:<11}", _COLORS.get(shown, ""))
    share = 1.0 if rank.state == "finished" else rank.position.share
    done = "" if share is None else f"{style.bar(share, _TABLE_BAR)} {percent(share):>7}"
    rate = figure(rank.rates.documents) if rank.state == "running" and rank.rates.documents else ""
    left = "" if rank.time_left is None else duration(rank.time_left)
    word = "" if rank.last_word is None or rank.state == "finished" else duration(max(1.0, now - rank.last_word))
    notes = rank.reason.partition("\n")[0] or _where(rank)
    numbers = f"{rank.documents:>11,}  {rate:>10}  {left:>8}  {word:>8}"
    return f"{name:>6}  {state}  {done:<{_TABLE_BAR + 8}}  {numbers}  {notes}".rstrip()


def _where(rank: RankState) -> str:
    if rank.state != "running":
        return ""
    attempt = rank.attempt
    host, pid = (attempt.host, attempt.pid) if attempt else ("", None)
    if rank.holder is not None:
        host, pid = str(rank.holder.get("host")), rank.holder.get("pid")
    job = f", Slurm job {attempt.slurm_job}" if attempt and attempt.slurm_job else ""
    return f"pid {pid} on {host}{job}"
