"""``datatrove-ckpt status``: the state of a whole run, once or again and again. Imports no datatrove.

Exit codes: 0 all is well; 1 something is damaged; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator

from datatrove_ckpt.cli.printing import takes_unicode, write_out
from datatrove_ckpt.cli.status_text import (
    Style,
    age,
    describe,
    describe_totals,
    describe_trouble,
    table,
)
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.formatting import duration, figure, percent
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from datatrove_ckpt.maintenance.state_json import dump, to_json
from datatrove_ckpt.maintenance.where import Place


def status(arguments: argparse.Namespace) -> int:
    """Prints the state of the run. Returns the exit code."""
    with place_of(arguments, wanted_files) as place:
        if arguments.watch:
            return int(watch(place, arguments.interval, as_json=arguments.json).is_damaged)
        state = read_run_state(place)
    if arguments.json:
        write_out(dump(to_json(state)).decode() + "\n")
    else:
        write_out("\n".join(_lines(state, arguments.all, Style(takes_unicode()))) + "\n")
    return int(state.is_damaged)


def _lines(state: RunState, everything: bool, style: Style) -> Iterator[str]:
    yield from describe(state, style)
    if everything:
        yield ""
        yield from table([*state.ranks, *state.retries], state.read_at, style)


# watch ----------------------------------------------------------------------------------------------------------------

# ``status --watch``: looks at the run again and again, and shows what it sees in place.
#
# A frame is one write: the cursor goes home, each line overwrites the one before and clears its rest. Nothing is
# cleared first, so nothing flickers, and terminals that know synchronized updates show a frame at once. What was on
# the terminal is scrolled up first, and the last numbers stay: so there is nothing to restore, however the command
# ends.
#
# Without a terminal, there is a line for each look; with ``--json`` a JSON object.


# Reading takes at most a third of the time, however long it takes: a run on the same disk must not notice it.
_REST = 2.0
_BEGIN, _END = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"


def watch(place: Place, interval: float, as_json: bool = False) -> RunState:
    """Shows the run until it is finished, or the user has seen enough. Returns its last state.

    Args:
        interval: seconds between two looks.
    """
    draws = sys.stdout.isatty() and not as_json
    if draws:
        write_out("\n" * shutil.get_terminal_size().lines)
    state, problem = read_run_state(place), ""
    try:
        while True:
            shown = _screen(state, problem) if draws else f"{_line(state, as_json)}\n"
            if not write_out(shown, raw=draws) or state.is_finished:
                break
            time.sleep(max(interval, _REST * state.seconds_to_read))
            try:
                place.refresh()
                state, problem = read_run_state(place), ""
            except StorageFailed as error:  # a disk or a network that comes back
                if not draws:
                    raise
                problem = str(error)
    except KeyboardInterrupt:
        pass
    if draws:
        write_out("\x1b[H\x1b[J", raw=True)
        write_out("\n".join(describe_totals(state, Style(takes_unicode()))) + "\n")
    return state


def _screen(state: RunState, problem: str) -> str:
    size = shutil.get_terminal_size()
    style = Style(takes_unicode(), color="NO_COLOR" not in os.environ)
    lines = frame(state, max(20, size.columns), max(4, size.lines), style, problem)
    return _BEGIN + "\n".join(f"{line}\x1b[K" for line in lines) + _END


def _line(state: RunState, as_json: bool) -> str:
    return dump(to_json(state), indent=False).decode() if as_json else _one_line(state)


def _one_line(state: RunState) -> str:
    totals = state.totals
    states = ", ".join(f"{count} {name}" for name, count in sorted(totals.states.items()))
    share = totals.position.share
    parts = ["" if share is None else f"{percent(share)}, ", f"{totals.documents:,} documents, "]
    parts += [f"{figure(totals.rates.documents)}/s, "] if totals.states["running"] else []
    parts += [f"{duration(totals.time_left)} left, "] if totals.time_left is not None else []
    troubled = len(state.troubled)
    parts += [f"{states}, {troubled} in trouble, {age(state)}"]
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(state.read_at)) + "".join(parts)


# frames --------------------------------------------------------------------------------------------------------------


def frame(state: RunState, width: int, height: int, style: Style, problem: str = "") -> list[str]:
    """The lines of one frame: the sums, then as many ranks as there is room for, those that need attention first."""
    lines = list(describe_totals(state, style))
    foot = [f"read at {time.strftime('%H:%M:%S', time.localtime(state.read_at))}; Ctrl-C ends the watch, not the run"]
    if problem:
        foot.insert(0, style.paint(f"could not be read again: {problem}", "1;31"))
    room = height - len(lines) - len(foot) - 3
    ranks = _ordered(state)
    shown = ranks if len(ranks) <= room else ranks[: max(0, room - 1)]
    lines += ["", *table(shown, state.read_at, style)] if room > 0 else []
    if len(shown) < len(ranks) and room > 0:
        lines.append(f"{'...':>6}  {len(ranks) - len(shown):,} more; --all without --watch prints them")
    if (state.troubled or state.refusal) and (left := room - len(shown) - 1) > 1:  # the table has cut their reasons
        lines += ["", *describe_trouble(state, style)][:left]
    lines += [""] * max(0, height - len(lines) - len(foot))
    return [cut(line, width) for line in [*lines[: max(0, height - len(foot))], *foot][:height]]


def _ordered(state: RunState) -> list[RankState]:
    """Those in trouble first, then those that run, then the others. But a few ranks stay in their order."""
    every = [*state.ranks, *state.retries]
    if len(every) <= 16:
        return every
    troubled = state.troubled
    others = [rank for rank in every if rank.trouble is None]
    return [*troubled, *sorted(others, key=lambda rank: (rank.state != "running", rank.root, rank.rank))]


def cut(line: str, width: int) -> str:
    """The line's first ``width`` characters; escape sequences have no width."""
    if len(line) <= width:
        return line
    found, seen, escape = [], 0, False
    for character in line:
        if character == "\x1b":
            escape = True
        elif not escape:
            seen += 1
        if escape or seen <= width:
            found.append(character)
        if escape and character.isalpha():
            escape = False
    return "".join(found)
