"""RemoteMirror: copies a rank's checkpoint to a remote while the rank works, one generation after the other.

A generation is the checkpoint at one instant of the storage thread's order of effects (``checkpoint/snapshot.py``).
Only what was not copied before travels: files only grow, so what they grew by becomes a new object, and answers of
unfinished documents that came since. Then the manifest is written, which makes the generation; then what no generation
of the last three needs is removed. A kill in between leaves the generation before as it was, and objects nobody needs,
which the next life removes.

All of this happens in a thread of its own. A remote that fails or hangs costs warnings, never an answer and never time.

Two processes that mirror one rank (a lost node that comes back, and its replacement) find each other here: the first
thing that each does is to claim the mirror, and whoever finds a newer claim stops with ``Fenced``. It finds out when
it next mirrors, so both may work for up to ``seconds``; what either publishes meanwhile are whole files of the same
chunks.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import orjson
from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.checkpoint.interval import MIRROR_TUNING, Seconds, make_interval
from datatrove_ckpt.checkpoint.snapshot import Snapshot, Source
from datatrove_ckpt.errors import ConfigError, StorageFailed
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.mirror.manifests import MAX_OBJECT, Versions
from datatrove_ckpt.mirror.uploads import Uploads
from datatrove_ckpt.remote_errors import io_errors

# The last mirror of a life takes no longer than this.
LAST_SECONDS = 15.0
# Nor than this once the rank was told to end: a preempted job has half a minute for everything.
HASTENED_SECONDS = 5.0
# Each time a chunk is committed between a snapshot and the look at its journal, which takes microseconds.
_SNAPSHOTS = 20
# What grew by less is read at once, so that its journal need not stay open.
_READ_AT_ONCE = 2**20
# A failing remote is left in peace for up to so many times ``seconds``.
_MAX_BACKOFF = 16
# A pass that finds nothing new costs a question to the storage thread; this many seconds lie between two at least.
_LEAST_SECONDS = 0.01


class RemoteMirror:
    """A ``Mirror`` of one rank.

    Args:
        url: of the rank's folder on the remote.
        folder: the rank's local folder.
        seconds: from the end of one mirroring to the start of the next, at least. "auto": so many that mirroring takes
            up to 5 % of the time, between 5 and 600.
    """

    def __init__(self, url: str, folder: Path, seconds: Seconds) -> None:
        self._url = url
        self._folder = folder
        self._interval = make_interval(seconds, MIRROR_TUNING)
        self._stopping = False
        self._hastened = 0
        # Queues that a signal handler may put into, which it must not do with what takes a lock.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._completed = False
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt mirror", daemon=True)
        self._uploads: Uploads | None = None
        self._failures = 0

    def start(self, source: Source) -> None:
        self._source = source
        self._thread.start()

    def stop(self, completed: bool) -> None:
        """Mirrors once more, for at most ``LAST_SECONDS``."""
        self._completed = completed
        self._stopping = True
        self._wake.put(None)
        limit = HASTENED_SECONDS if self._hastened else LAST_SECONDS
        try:
            self._ended.get(timeout=limit)
        except queue.Empty:
            logger.warning(
                f"The last mirror to {self._url} did not end within {limit:g} s: its last generation holds. The local "
                "checkpoint is complete."
            )
        self._given_up = True

    def fast_stop(self) -> None:
        """Mirrors now, while the rank drains, so that little is left for the last time. Called again: no last time."""
        self._hastened += 1
        self._wake.put(None)
        if self._hastened > 1:
            self._ended.put(None)

    # the thread's side -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait = max(self._attempt() * self._interval.seconds, _LEAST_SECONDS)
                with suppress(queue.Empty):
                    self._wake.get(timeout=wait)
            self._attempt()
        except BaseException as error:  # that another process took over, above all, must reach the event loop
            self._source.fail(error)
        finally:
            self._ended.put(None)

    def _attempt(self) -> int:
        """Returns how many times ``seconds`` to wait before the next one."""
        try:
            self._mirror()
        except _Interrupted:
            pass
        except io_errors(ConfigError, StorageFailed) as error:
            if isinstance(error, ConfigError) and not (self._uploads and self._uploads.begun):
                raise
            if not self._given_up:
                self._failures += 1
                after = "." if self._stopping else "; the run goes on, and tries again later."
                logger.warning(
                    f"Could not mirror the checkpoint to {self._url}: {error_text(error)}. What came since "
                    f"the last generation lives on this node only{after}"
                )
            return int(backoff_seconds(self._failures, 1, _MAX_BACKOFF))
        if self._failures:
            logger.info(f"The checkpoint is mirrored to {self._url} again.")
        self._failures = 0
        return 1

    def _mirror(self) -> None:
        if self._uploads is None:
            self._uploads = Uploads(Versions(self._url))
        uploads, last, start = self._uploads, self._stopping, time.monotonic()
        with ExitStack() as stack:
            self._go_on(last)
            snapshot, grown = self._snapshot(uploads, stack)
            self._go_on(last)  # a claim that is placed late would stop the next life
            uploads.begin(orjson.loads(snapshot.run), snapshot)
            for name, file in grown.items():
                for data in _blocks(file, snapshot.sizes[name] - uploads.size(name)):
                    self._go_on(last)
                    uploads.add(name, data)
        self._go_on(last)
        uploads.add_answers(snapshot)
        self._go_on(last)
        if uploads.publish(last and self._completed):
            self._interval.took(time.monotonic() - start)

    def _go_on(self, last: bool) -> None:
        """A mirroring that is under way when the rank ends makes way for the last one."""
        if self._given_up or (self._stopping and not last):
            raise _Interrupted

    def _snapshot(self, uploads: Uploads, stack: ExitStack) -> tuple[Snapshot, dict[str, IO[bytes]]]:
        """A snapshot, and the files that have grown since the last one, each open where its new bytes start.

        A chunk that is committed between the two takes its journal with it; then there is a newer state to take. An
        open journal can be read to its end whatever happens to its name.
        """
        uploads.make_room()
        for attempts_left in reversed(range(_SNAPSHOTS)):
            snapshot = self._source.snapshot(uploads.last_answer)
            grown = [name for name, size in snapshot.sizes.items() if uploads.size(name) < size]
            try:
                return snapshot, {
                    name: self._open(name, uploads.size(name), snapshot.sizes[name], stack) for name in grown
                }
            except FileNotFoundError:
                stack.close()
                if not attempts_left:
                    raise
        raise AssertionError

    def _open(self, name: str, start: int, size: int, stack: ExitStack) -> IO[bytes]:
        file = stack.enter_context((self._folder / name).open("rb"))
        file.seek(start)
        if size - start > _READ_AT_ONCE:
            return file  # closed with the stack
        data = file.read(size - start)
        file.close()
        return io.BytesIO(data)


class _Interrupted(Exception):
    """Nobody waits for this mirroring any more."""


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The next ``size`` bytes of the file, as many objects as it takes."""
    while size:
        data = file.read(min(size, MAX_OBJECT))
        if not data:
            raise EOFError(f"a file of the checkpoint is {size} bytes shorter than it was")
        size -= len(data)
        yield data
