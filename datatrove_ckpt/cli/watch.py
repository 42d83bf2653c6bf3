"""``status --watch``: looks at the run again and again, and shows what it sees in place.

A frame is one write: the cursor goes home, each line overwrites the one before and clears its rest. Nothing is cleared
first, so nothing flickers, and terminals that know synchronized updates show a frame at once. It is drawn on the
alternate screen, so that what was on the terminal comes back at the end, with the last numbers below it.

Without a terminal, there is a line for each look; with ``--json`` a JSON object.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from types import FrameType
from typing import Any

from datatrove_ckpt.cli.printing import takes_unicode, write_out
from datatrove_ckpt.cli.status_text import Style, age, describe_totals, describe_trouble, figure, percent, table
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.formatting import duration
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from datatrove_ckpt.maintenance.state_json import dump, to_json
from datatrove_ckpt.maintenance.where import Place

# Reading takes at most a third of the time, however long it takes: a run on the same disk must not notice it.
_REST = 2.0
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"
_QUIT = b"qQ\x03\x04"


def watch(place: Place, interval: float, as_json: bool = False) -> RunState:
    """Shows the run until it is finished, or the user has seen enough. Returns its last state.

    Args:
        interval: seconds between two looks.
    """
    if as_json or not sys.stdout.isatty():
        return _print_lines(place, interval, as_json)
    with _Terminal() as terminal:
        state = _watch(place, interval, terminal)
    write_out("\n".join(describe_totals(state, Style(takes_unicode()))) + "\n")
    return state


def _watch(place: Place, interval: float, terminal: _Terminal) -> RunState:
    style = Style(takes_unicode(), color="NO_COLOR" not in os.environ)
    state, problem = read_run_state(place), ""
    while True:
        terminal.draw(frame(state, *terminal.size, style, problem))
        if state.is_finished:
            return state
        if terminal.wait(max(interval, _REST * state.seconds_to_read)):
            return state
        if terminal.resized:
            continue
        try:
            place.refresh()
            state, problem = read_run_state(place), ""
        except StorageFailed as error:  # a disk or a network that comes back
            problem = str(error)


def _print_lines(place: Place, interval: float, as_json: bool) -> RunState:
    try:
        while True:
            state = read_run_state(place)
            line = dump(to_json(state), indent=False).decode() if as_json else _one_line(state)
            if not write_out(f"{line}\n") or state.is_finished:
                return state
            time.sleep(max(interval, _REST * state.seconds_to_read))
            place.refresh()
    except KeyboardInterrupt:
        return state


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
    foot = [f"read at {time.strftime('%H:%M:%S', time.localtime(state.read_at))}; q ends the watch, not the run"]
    if problem:
        foot.insert(0, style.paint(f"could not be read again: {problem}", "1;31"))
    room = height - len(lines) - len(foot) - 3
    ranks = _ordered(state)
    shown = ranks if len(ranks) <= room else ranks[: max(0, room - 1)]
    lines += ["", *table(shown, state.read_at, style)] if room > 0 else []
    if len(shown) < len(ranks) and room > 0:
        lines.append(f"{'...':>6}  {len(ranks) - len(shown):,} more; --all without --watch prints them")
    if state.troubled and (left := room - len(shown) - 1) > 1:  # the table has cut their reasons
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


# terminal ------------------------------------------------------------------------------------------------------------


class _Terminal:
    """The alternate screen of a terminal, without cursor and echo, until the block ends in any way."""

    def __init__(self) -> None:
        self.resized = False
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._wake, self._woken = os.pipe()
        self._old: dict[int, Any] = {}
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        found = shutil.get_terminal_size()
        return max(20, found.columns), max(4, found.lines)

    def __enter__(self) -> _Terminal:
        for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTSTP):
            self._old[number] = signal.signal(number, self._note)
        self._enter()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._woken)
        with suppress(queue.Empty):
            while True:
                if (number := self._signals.get_nowait()) in (signal.SIGTERM, signal.SIGHUP):
                    os.kill(os.getpid(), number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)
        with suppress(OSError):
            os.write(self._woken, b"x")

    def _enter(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        write_out(_ENTER, raw=True)

    def _leave(self) -> None:
        write_out(_LEAVE, raw=True)
        if self._keys is not None and self._modes is not None:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)

    def draw(self, lines: list[str]) -> None:
        write_out(_BEGIN + "\r\n".join(f"{line}\x1b[K" for line in lines) + _END, raw=True)

    def wait(self, seconds: float) -> bool:
        """Waits for so long, or until there is something to do. Returns whether it is time to end."""
        self.resized = False
        deadline = time.monotonic() + seconds
        inputs = [self._wake] if self._keys is None else [self._wake, self._keys]
        while (left := deadline - time.monotonic()) > 0 and not self.resized:
            ready, _, _ = select.select(inputs, [], [], left)
            if self._wake in ready and self._take_signals():
                return True
            if self._keys in ready:
                pressed = os.read(self._keys or 0, 100)
                if not pressed or any(key in pressed for key in _QUIT):
                    return True
        return False

    def _take_signals(self) -> bool:
        os.read(self._wake, 100)
        ended = False
        with suppress(queue.Empty):
            while True:
                number = self._signals.get_nowait()
                if number == signal.SIGWINCH:
                    self.resized = True
                elif number == signal.SIGTSTP:
                    self._suspend()
                else:
                    ended = True
                    if number != signal.SIGINT:
                        self._signals.put(number)  # ends the process, once the terminal is as it was
                        return True
        return ended

    def _suspend(self) -> None:
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self.resized = True
