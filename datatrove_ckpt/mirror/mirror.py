"""RemoteMirror: copies a rank's checkpoint to a remote while the rank works, one version after the other.

A version is the checkpoint at one instant of the storage thread's order of effects (``checkpoint/snapshot.py``). Each
upload sends only what is new: files only grow, so their new bytes become a new object, and so do new answers of
unfinished documents. Then it writes the manifest, which completes the version, and removes what the last three versions
do not need. A kill in between leaves the version before intact, and objects that nobody needs. The next process removes
those.

All of this happens in a thread of its own. A remote that fails or hangs costs warnings, but no answer and no time.

Two processes may mirror one rank: a lost node that comes back, and its replacement. Each first takes ownership of the
mirror, and a process that finds a newer owner stops with ``Fenced``. It finds out at its next upload, so both may work
for up to ``seconds``. Whichever output files they publish meanwhile are complete files of the same chunks.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from loguru import logger

from datatrove_ckpt import retrying
from datatrove_ckpt.checkpoint.identity import parse_run
from datatrove_ckpt.checkpoint.interval import MIRROR_TUNING, Seconds, make_interval
from datatrove_ckpt.checkpoint.layout import RUN
from datatrove_ckpt.checkpoint.snapshot import Snapshot, Source
from datatrove_ckpt.errors import ConfigError, StorageFailed, TooManyOpenFiles
from datatrove_ckpt.mirror.manifests import MAX_OBJECT_BYTES, Versions
from datatrove_ckpt.mirror.object_store import ObjectStore, needs_bucket
from datatrove_ckpt.mirror.uploads import Uploads
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.timed_queue import get_within
from datatrove_ckpt.retrying import failure_text

# How long ``stop`` waits for the last upload.
STOP_SECONDS = 15.0
# The same once the rank was asked to stop: a preempted job has half a minute for everything.
DRAIN_SECONDS = 5.0
# A snapshot is taken again each time a chunk was committed before its journal was opened, which takes microseconds.
_SNAPSHOT_ATTEMPTS = 20
# Up to this size, new bytes are read at once, so that their journal need not stay open.
_READ_AT_ONCE_BYTES = 2**20
# While the remote fails, the wait between two attempts grows up to this many intervals.
# The shortest wait between two uploads: one that finds nothing new still asks the storage thread for a snapshot.
_MIN_WAIT_SECONDS = 0.01


class RemoteMirror:
    """A ``Mirror`` of one rank.

    Args:
        url: URL of the rank's folder on the remote.
        folder: the rank's local folder.
        seconds: the shortest time from the end of one upload to the start of the next. "auto" measures the uploads and
            chooses a time between 5 and 600 seconds, so that uploading takes up to 5 % of the time.
        shutdown: of the rank; None: of nobody.
        shared: what the ranks' common folder lacks, by name. It goes up first.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        seconds: Seconds,
        shutdown: Shutdown | None = None,
        shared: Mapping[str, bytes] | None = None,
    ) -> None:
        self._url = url
        self._folder = folder
        self._shared = dict(shared or {})
        self._interval = make_interval(seconds, MIRROR_TUNING)
        self._stopping = False
        self._shutdown = shutdown or Shutdown()
        # ``SimpleQueue.put`` may be called in a signal handler; ``Event.set`` may not, because it takes a lock.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._completed = False
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt mirror", daemon=True)
        self._uploads: Uploads | None = None
        self._failures = 0

    def start(self, source: Source) -> None:
        """Starts the thread, which takes its snapshots from ``source``."""
        self._source = source
        self._shutdown.call(self._hurry)
        self._thread.start()

    def _hurry(self) -> None:
        """Uploads at once when the rank starts to drain, so that little is left for ``stop``. For signal handlers."""
        if self._shutdown.is_requested and not self._shutdown.aborted:
            self._wake.put(None)

    def stop(self, completed: bool) -> None:
        """Uploads once more. Returns after ``STOP_SECONDS`` at the latest, and at once after a fast stop."""
        self._completed = completed
        self._stopping = True
        self._wake.put(None)
        if not self._shutdown.join(self._ended, STOP_SECONDS, DRAIN_SECONDS) and not self._shutdown.is_fast:
            limit = DRAIN_SECONDS if self._shutdown.is_requested else STOP_SECONDS
            logger.warning(
                f"The last upload to the mirror {self._url} did not end within {limit:g} s. The mirror keeps the "
                "version before it; the local checkpoint is complete."
            )
        self._given_up = True

    # the mirror thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait = max(self._try_upload() * self._interval.seconds, _MIN_WAIT_SECONDS)
                with suppress(queue.Empty):
                    get_within(self._wake, wait)
            self._try_upload()
        except BaseException as error:  # must reach the event loop: above all, that another process took over
            self._source.fail(error)
        finally:
            self._ended.put(True)

    def _try_upload(self) -> int:
        """Returns how many intervals to wait before the next upload."""
        try:
            self._upload()
        except _Interrupted:
            pass
        except (OSError, EOFError, ConfigError, StorageFailed, TooManyOpenFiles) as error:
            if isinstance(error, ConfigError) and not (self._uploads and self._uploads.owns_mirror):
                raise
            if not self._given_up:
                self._failures += 1
                after = "." if self._stopping else ". The run continues and tries again later."
                logger.warning(
                    f"Could not mirror the checkpoint to {self._url}: {failure_text(error)}. What is newer than the "
                    f"last version is saved on this node only{after}"
                )
            return int(retrying.MIRROR.wait(self._failures))
        if self._failures:
            logger.info(f"The checkpoint is mirrored to {self._url} again.")
        self._failures = 0
        return 1

    def _upload(self) -> None:
        if self._uploads is None:
            self._uploads = Uploads(Versions(self._url))
        uploads, last, start = self._uploads, self._stopping, time.monotonic()
        with ExitStack() as stack:
            self._raise_if_interrupted(last)
            snapshot, grown = self._take_snapshot(uploads, stack)
            # Again, because taking ownership after ``stop`` has given up would fence the rank's next process.
            self._raise_if_interrupted(last)
            self._put_shared()
            uploads.start_version(parse_run(self._folder / RUN, snapshot.run), snapshot)
            for name, file in grown.items():
                for data in _blocks(file, snapshot.sizes[name] - uploads.uploaded_bytes(name)):
                    self._raise_if_interrupted(last)
                    uploads.add(name, data)
        self._raise_if_interrupted(last)
        uploads.add_answers(snapshot)
        self._raise_if_interrupted(last)
        if uploads.publish(last and self._completed):
            self._interval.took(time.monotonic() - start)

    def _put_shared(self) -> None:
        while self._shared:
            name, data = next(iter(self._shared.items()))
            url = self._url.rpartition("/")[0]
            with needs_bucket(url):
                ObjectStore(url).put(name, data)
            del self._shared[name]

    def _raise_if_interrupted(self, last: bool) -> None:
        """When the rank stops, an upload under way gives way to the ``last`` one."""
        if self._given_up or (self._stopping and not last):
            raise _Interrupted

    def _take_snapshot(self, uploads: Uploads, stack: ExitStack) -> tuple[Snapshot, dict[str, IO[bytes]]]:
        """A snapshot, and the files that have grown since the last one, each opened at its first new byte.

        A commit between the snapshot and the opening removes a journal, and the history may be replaced. Then there is
        a newer state, and we take that one. Once a journal is open, it can be read to its end even if it is removed.
        """
        uploads.compact()
        for attempts_left in reversed(range(_SNAPSHOT_ATTEMPTS)):
            snapshot = self._source.snapshot(uploads.last_answer)
            uploads.forget_replaced(snapshot)
            grown = {name: size for name, size in snapshot.sizes.items() if uploads.uploaded_bytes(name) < size}
            try:
                return snapshot, {
                    name: self._open_at(name, uploads.uploaded_bytes(name), size, snapshot.is_current, stack)
                    for name, size in grown.items()
                }
            except FileNotFoundError:
                stack.close()
                if not attempts_left:
                    raise
        raise AssertionError

    def _open_at(
        self, name: str, start: int, size: int, is_current: Callable[[str], bool], stack: ExitStack
    ) -> IO[bytes]:
        file = stack.enter_context((self._folder / name).open("rb"))
        if not is_current(name):
            raise FileNotFoundError(f"{name} was replaced")
        file.seek(start)
        if size - start > _READ_AT_ONCE_BYTES:
            return file  # closed with the stack
        data = file.read(size - start)
        file.close()
        return io.BytesIO(data)


class _Interrupted(Exception):
    """Nobody waits for this upload any more."""


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The next ``size`` bytes of the file, in blocks of at most one object."""
    while size:
        data = file.read(min(size, MAX_OBJECT_BYTES))
        if not data:
            raise EOFError(f"a file of the checkpoint is {size} bytes shorter than it was")
        size -= len(data)
        yield data
