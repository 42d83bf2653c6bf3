"""Shows the progress of a command's ranks: a bar on a terminal, elsewhere log lines.

    ranks in this process      report here, and each report draws
    ranks in our workers       report over their pipe; the parent calls ``tick``
    elsewhere                  a rank has a screen of its own

Each rank reports a ``RankProgress`` about once a second. The work of an attempt begins at 0, so
only its growth counts.
"""

import contextvars
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Self, TextIO

from loguru import logger

from datatrove_ckpt.common.counts import InputPosition, Processed
from datatrove_ckpt.common.formatting import duration, filled_cells, percent, plural, time_left
from datatrove_ckpt.process.parent_watch import end_managers

WAITING = "waiting for the server"
READING = "reading the input"
_TIME_LEFT_SECONDS = 600.0
_SAMPLE_SECONDS = 1.0
_CELLS = 10
NO_WORK = Processed()


class RankProgress(NamedTuple):
    """The progress of one rank.

    Attributes:
        attempt: another number for each start.
        work: requests and tokens that this attempt has processed, with requests that failed.
        state: state instead of usual work, such as "waiting for the server", for ``seconds``.
    """

    attempt: int
    documents: int
    work: Processed = NO_WORK
    position: InputPosition = InputPosition()
    state: str = ""
    seconds: float = 0.0
    is_outage: bool = False
    in_flight: int = 0

    @property
    def has_begun(self) -> bool:
        return self.position.unit is not None or self.work.documents > 0


class RunProgress:
    """The progress of all ranks of one command. Complete ranks are only sums."""

    def __init__(
        self,
        ranks: int = 1,
        complete: int = 0,
        documents: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks = ranks
        self.documents = documents
        self.work = NO_WORK
        """What this command has processed."""
        self._clock = clock
        self._complete = complete
        self._at_work: dict[int, RankProgress] = {}
        self._done: set[int] = set()
        self._with_input = ranks  # the ranks from this number on have no input
        self._elsewhere = complete  # complete ranks that never reported, and have an input
        self._ended = 0  # the other complete ranks
        self._ended_size = 0
        self._samples = deque([(clock(), NO_WORK)])
        self._newest_at = clock()  # when something was finished or answered

    def update(self, rank: int, progress: RankProgress) -> None:
        if rank in self._done:
            return
        last = self._at_work.get(rank, RankProgress(progress.attempt, 0))
        self._at_work[rank] = progress
        self.documents += progress.documents - last.documents
        tasks = progress.position.tasks
        if tasks is not None:
            self._with_input = min(self._with_input, tasks)
        grown = progress.work
        if last.attempt == progress.attempt:
            grown -= last.work
        self.work += grown
        if grown != NO_WORK:
            self._newest_at = self._clock()

    def complete(self, rank: int, documents: int = 0) -> None:
        """Marks a rank as complete. ``documents``: of a rank in another process."""
        if rank in self._done:
            return
        self._done.add(rank)
        last = self._at_work.pop(rank, None)
        if last is None:
            self._elsewhere += rank < self._with_input
            self.documents += documents
        elif rank < self._with_input:
            self._ended += 1
            self._ended_size += last.position.total or 0

    def is_complete(self, rank: int) -> bool:
        return rank in self._done

    def sample(self) -> None:
        now = self._clock()
        # An outage is no time at work.
        if self.work == NO_WORK or len(self._outages) == len(self._at_work) > 0:
            self._samples.clear()
        elif now - self._samples[-1][0] < _SAMPLE_SECONDS:
            return
        self._samples.append((now, self.work))
        while self._samples[0][0] < now - _TIME_LEFT_SECONDS and len(self._samples) > 2:
            self._samples.popleft()

    def rates(self, seconds: float = 60.0) -> Processed:
        now = self._clock()
        at, work = next(
            (sample for sample in self._samples if sample[0] >= now - seconds), self._samples[-1]
        )
        return (self.work - work) * (1 / max(now - at, 1e-9))

    @property
    def share(self) -> float | None:
        """Share of the whole input, from 0 to 1. None if a rank does not know its own share.

        A rank that has not begun counts as large as the average of the others.
        """
        reading = self._reading
        complete = min(self._elsewhere, self._with_input)
        number = self._ended + len(reading)
        done = total = self._ended_size
        for progress in reading:
            if progress.position.share is None:
                return None
            done += progress.position.done
            total += progress.position.total or 0
        if not total:
            return complete / self.ranks or None
        mean = total / number
        return min(1.0, (done / mean + complete) / max(self._with_input, complete + number))

    @property
    def _reading(self) -> list[RankProgress]:
        return [
            progress
            for rank, progress in self._at_work.items()
            if rank < self._with_input and progress.has_begun
        ]

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the rate of the last ten minutes.

        None if unknown, in an outage, and once no request has been answered for longer than that.
        """
        share = self.share
        if not share or self._outages:
            return None
        remaining = self.documents * (1.0 - share) / share
        pace = self.rates(_TIME_LEFT_SECONDS).documents
        return time_left(remaining, pace, self._clock() - self._newest_at)

    @property
    def _outages(self) -> list[RankProgress]:
        return [progress for progress in self._at_work.values() if progress.is_outage]

    @property
    def state(self) -> str:
        if not (self._at_work or self._ended):
            return "starting"
        progress = max(self._outages, key=lambda progress: progress.seconds, default=None)
        if progress is None:
            at_work = self._at_work.values()
            if len({progress.state for progress in at_work}) != 1:
                return ""
            progress = min(at_work, key=lambda progress: progress.seconds)
            # Short tasks that have just begun.
            if progress.state in (WAITING, READING) and self.rates().documents:
                return ""
        if not progress.seconds:
            return progress.state
        return f"{progress.state} for {duration(progress.seconds)}"

    @property
    def head(self) -> str:
        share = self.share
        if share is None:
            return ""
        if self._ended + len(self._reading) + self._elsewhere < self._with_input:
            return f"~{percent(share)}"
        return percent(share)

    def parts(self) -> list[str]:
        """Returns texts, the most important first: a narrow terminal drops the last."""
        rates = self.rates()
        seconds = self.seconds_left
        parts = [plural(self.documents, "doc")]
        in_flight = sum(progress.in_flight for progress in self._at_work.values())
        if in_flight and not self.work.documents:
            parts.append(f"{plural(in_flight, 'request')} in flight")
        if self.state:
            parts.append(self.state)
        parts.append(f"{rates.documents:.1f} doc/s")
        if seconds is not None:
            parts.append(f"{duration(seconds)} left")
        if self.ranks > 1:
            parts.append(f"{self._complete + len(self._done)}/{self.ranks} tasks")
        return [*parts, f"{rates.completion_tokens:.0f} tok/s", f"{rates.requests:.1f} req/s"]

    def line(self) -> str:
        parts = self.parts()
        if self.head:
            parts.insert(0, f"{self.head} of the input")
        return ", ".join(parts)


def bar(progress: RunProgress, columns: int) -> str:
    parts = progress.parts()
    head = progress.head
    if head:
        head = f"{head} |{filled_cells(progress.share or 0.0, _CELLS)}| "
    while len(parts) > 1 and len(f"{head}{', '.join(parts)}") >= columns:
        parts.pop()
    return f"{head}{', '.join(parts)}"[: columns - 1]


_CLEAR = "\r\x1b[K"


def has_terminal() -> bool:
    try:
        return (
            sys.stderr.isatty()
            and sys.stderr.fileno() >= 0
            and os.environ.get("TERM", "dumb") != "dumb"
        )
    except (AttributeError, OSError, ValueError):  # no stream, a closed one, or one without a file
        return False


class BarTerminal:
    """Draws a bar on a terminal's last line, below everything that is printed in a ``with`` block.

    The cursor stays at the first column of the bar. A printed line clears the bar in the same
    write:

        this process      its streams are replaced: each whole line clears the bar and draws it
                          again below
        its workers       their streams only clear it; this process draws it again a moment later
        the terminal      writes ^C over the first two columns of the bar
        others            overwrite the bar; the next drawing clears the rest

    So no process waits for another, and a kill leaves nothing to restore.

    Args:
        text: makes the bar from the number of columns. None: another process draws it.
    """

    def __init__(self, text: Callable[[int], str] | None = None) -> None:
        self._text = text
        self._fd = sys.stderr.fileno()
        self._lock = threading.RLock()
        self._bar = ""
        self._is_partial = False  # no line break before the cursor
        self._replaced: dict[str, LinesAboveBar] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            is_same = False
            with suppress(AttributeError, OSError, ValueError):  # it is closed, or has no file
                device = os.fstat(stream.fileno()).st_rdev
                is_same = stream.isatty() and device == os.fstat(self._fd).st_rdev
            if is_same:
                self._replaced[name] = above = LinesAboveBar(stream, self)
                setattr(sys, name, above)
                _move_logging(stream, above)
        _opened.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.remove()
            self._is_open = False
            self._bar = ""
        for name, above in self._replaced.items():
            above.flush()
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
            _move_logging(above, above.stream)
        self._replaced.clear()
        _opened.remove(self)

    def draw(self) -> None:
        with self._lock:
            if self._text is None or not self._is_open or self._is_partial:
                return
            columns = 0
            with suppress(OSError):
                columns = os.get_terminal_size(self._fd).columns
            self._bar = self._text(columns or 80)
            self._put(f"{_CLEAR}{self._bar}\r")

    def print(self, text: str) -> None:
        with self._lock:
            output = text
            if (self._bar or self._text is None) and not self._is_partial:
                output = f"{_CLEAR}{output}"
            self._is_partial = not text.endswith("\n")
            if self._bar and not self._is_partial:
                output = f"{output}{self._bar}\r"
            _write_all(self._fd, output)

    def _put(self, text: str) -> None:
        with suppress(OSError):  # the terminal is gone
            _write_all(self._fd, text)

    def remove(self) -> None:
        """Clears the bar. Waits for no lock, so that the process can end."""
        if self._bar and not self._is_partial:
            self._put(_CLEAR)

    def forget(self) -> None:
        """Leaves the bar to the parent of a fork, whose threads may hold the lock."""
        self._lock = threading.RLock()
        self._text = None
        self._bar = ""


@dataclass(eq=False)
class LinesAboveBar:
    stream: TextIO
    _terminal: BarTerminal
    _pending: str = ""

    def write(self, text: str) -> int:
        """Prints whole lines; the rest waits for ``flush``."""
        if not self._terminal._is_open:
            return self.stream.write(text)
        lines, line_break, self._pending = (self._pending + text).rpartition("\n")
        if line_break:
            self._terminal.print(f"{lines}\n")
        return len(text)

    def flush(self) -> None:
        pending = self._pending
        self._pending = ""
        if pending:
            self._terminal.print(pending)
        self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


_opened: list[BarTerminal] = []


def leave_terminal() -> None:
    for terminal in _opened:
        terminal.remove()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def exit_now(code: int) -> NoReturn:
    try:
        end_managers()
        leave_terminal()
    finally:
        os._exit(code)


def _after_fork() -> None:
    for terminal in _opened:
        terminal.forget()


os.register_at_fork(after_in_child=_after_fork)


def _move_logging(old: object, new: object) -> None:
    """Moves loguru's handlers of a stream to another stream, so that log lines appear above the
    bar.

    Added again, they would lose their settings.
    """
    for handler in getattr(getattr(logger, "_core", None), "handlers", {}).values():
        sink: Any = getattr(handler, "_sink", None)
        if getattr(sink, "_stream", None) is old:
            sink._stream = new


def _write_all(fd: int, text: str) -> None:
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [fd], [])


TICK_SECONDS = 0.5
"""Between two drawings of a bar."""


class NotebookBar:
    """The bar of tqdm in a notebook. Raises ImportError: ``ipywidgets`` is not installed."""

    def __init__(self, progress: RunProgress) -> None:
        import_module("ipywidgets")  # without it, tqdm prints an error of its own
        from tqdm.notebook import tqdm

        self._progress = progress
        self._bar = tqdm(total=1.0, bar_format="{desc}{bar}{postfix}")

    def draw(self) -> None:
        self._bar.n = self._progress.share or 0.0
        self._bar.set_description_str(self._progress.head, refresh=False)
        self._bar.set_postfix_str(", ".join(self._progress.parts()))

    def __exit__(self, *error: object) -> None:
        self.draw()
        self._bar.close()


Report = Callable[[int, RankProgress], object]

_report: Report | None = None


@dataclass(eq=False)
class Screen:
    """Shows progress while the ranks of a command run in a ``with`` block.

    Without a terminal or notebook, or outside of the block, it logs lines: the first after 10
    seconds, then one each ``interval``.
    """

    progress: RunProgress
    interval: float
    clock: Callable[[], float] = time.monotonic
    log: Callable[[str], object] = logger.info

    def __post_init__(self) -> None:
        self._next = self.clock() + min(10.0, self.interval)
        self._terminal: BarTerminal | NotebookBar | None = None
        # A rank that reports must not log the line as its own.
        self._context = contextvars.copy_context()

    @property
    def has_bar(self) -> bool:
        return self._terminal is not None

    def __enter__(self) -> Self:
        global _report
        from multiprocess import parent_process  # it takes long to import

        self._outer = _report
        _report = self.update
        if has_terminal() and parent_process() is None:
            self._terminal = BarTerminal(lambda columns: bar(self.progress, columns)).__enter__()
        elif "ipykernel" in sys.modules and parent_process() is None:
            with suppress(ImportError):
                self._terminal = NotebookBar(self.progress)
        if self._terminal is not None:
            self._terminal.draw()
            self._next = 0.0
        return self

    def __exit__(self, *error: object) -> None:
        global _report
        _report = self._outer
        if self._terminal is not None:
            self._terminal.__exit__(*error)
            self._terminal = None

    def update(self, rank: int, progress: RankProgress) -> None:
        self.progress.update(rank, progress)
        self.tick()

    def complete(self, rank: int) -> None:
        self.progress.complete(rank)
        if self._terminal is not None:
            self._next = 0.0
        self.tick()

    def tick(self) -> None:
        """Draws or logs if it is time. Call it about every ``TICK_SECONDS``."""
        self.progress.sample()
        now = self.clock()
        if now < self._next:
            return
        if self._terminal is None:
            self._next = now + self.interval
            self._context.run(self.log, self.progress.line())
        else:
            self._next = now + TICK_SECONDS / 2
            self._terminal.draw()


def reporter() -> Report | None:
    return _report


@contextmanager
def reporting_to(report: Report, below: bool) -> Iterator[None]:
    global _report
    before = _report
    _report = report
    try:
        with BarTerminal() if below and has_terminal() else nullcontext():
            yield
    finally:
        _report = before
