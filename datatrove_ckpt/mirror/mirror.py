"""RemoteMirror copies a rank's checkpoint to a remote while the rank works, version by version.

A version is the checkpoint at one instant of the storage thread. The mirror has
its own thread, so a remote that fails or hangs costs only warnings. Only a rank's first output
waits for the mirror, on each node that takes the rank over: a rank without a version has published
nothing, so output that it finds is another job's.

Two processes may mirror one rank: a lost node that comes back, and its replacement. Each takes
ownership of the mirror first, and stops with ``Fenced`` if an upload, or the listing before a
publication, shows a newer owner. If the mirror does not answer, it publishes: no other process can
take the rank over meanwhile.
"""

import io
import math
import os
import queue
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loguru import logger

from datatrove_ckpt.checkpoint import identity, layout
from datatrove_ckpt.checkpoint.checksummed_lines import content_of
from datatrove_ckpt.checkpoint.interval import MIRROR_TUNING, Interval
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, Snapshot
from datatrove_ckpt.checkpoint.publish_intents import PublicationStopped
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.setting_types import IntervalSeconds
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.errors import ConfigError, StorageFailed, TooManyOpenFiles
from datatrove_ckpt.mirror.manifests import MAX_OBJECT_BYTES, VersionStore, VersionWriter
from datatrove_ckpt.process import job_launch
from datatrove_ckpt.process.shutdown import Shutdown, get_within

_OWNER_WAIT_SECONDS = 60.0
_OWNER_VALID_SECONDS = 1.0
_POLL_SECONDS = 0.1
STOP_SECONDS = 15.0
# The limit once a stop is requested: a preempted job has half a minute for everything.
DRAIN_SECONDS = 5.0
# The shortest wait between two uploads: each needs a snapshot of the storage thread.
_MIN_WAIT_SECONDS = 0.01


@dataclass(eq=False, repr=False)
class RemoteMirror:
    """A ``Mirror`` of one rank.

    Args:
        seconds: the shortest time from the end of one upload to the start of the next. "auto"
            measures the uploads, so that uploading takes up to 5 % of the time.
        job: content of ``job.json`` if the mirror lacks it. It is uploaded first.
    """

    url: str
    folder: Path
    seconds: IntervalSeconds
    shutdown: Shutdown
    job: bytes | None

    def __post_init__(self) -> None:
        self._interval = Interval(self.seconds, MIRROR_TUNING)
        self._stopping = False
        # Unlike ``Event.set``, ``SimpleQueue.put`` takes no lock: signal handlers call it. True: an
        # upload is due; False: a check of the owner.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._owner_checks: deque[threading.Event] = deque()
        """Events that are set once a check shows that this process owns the mirror."""
        self._saves: deque[threading.Event] = deque()
        """Events that are set once an upload that began later is complete."""
        self._owned_until = -math.inf  # until then, no publication waits for a check
        self._answers = True
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._completed = False
        self._given_up = False
        self._reading = threading.Lock()  # from the rank's files, which close after ``stop``
        self._uploads = VersionWriter(VersionStore(self.url))
        self._recorded: set[str] = set()
        self._failures = 0
        self._failure = "no answer"

    def start(self, source: OpenCheckpoint) -> None:
        self._source = source
        self.shutdown.call(self._request_upload)
        self._thread = context_thread(self._run, "datatrove-ckpt mirror")

    @property
    def _is_owned(self) -> bool:
        return self._uploads.owns_mirror

    def check(self, first: bool, stopping: threading.Event) -> None:
        if not self._is_owned:
            earlier = identity.read_run(self.folder / layout.RUN)["owner"]["earlier"]
            # Another node that had the rank must see a new owner before new output.
            had_another = any(number is not None for number in earlier.values())
            if (first or had_another) and not self._wait_for(
                self._owner_checks, retrying.STORAGE.patience, stopping
            ):
                raise self._without_version()
            return
        if time.monotonic() < self._owned_until:
            return
        if not self._wait_for(self._owner_checks, _OWNER_WAIT_SECONDS, stopping):
            if self._answers:
                logger.warning(
                    f"The mirror {self.url} does not show who owns this task. Its output is "
                    f"published after {_OWNER_WAIT_SECONDS:g} s."
                )
            self._answers = False
            self._owned_until = time.monotonic() + _OWNER_WAIT_SECONDS

    def _without_version(self) -> StorageFailed:
        return StorageFailed(
            f"Nothing could be uploaded to the mirror {self.url} ({self._failure}). Output and "
            "provider batches wait for that. Correct that (network, credentials, disk space), or "
            "remove checkpoints_remote_dir, and run again."
        )

    def _wait_for(
        self, requests: deque[threading.Event], seconds: float, stopping: threading.Event
    ) -> bool:
        answer = threading.Event()
        requests.append(answer)
        self._wake.put(requests is self._saves)
        # Counted without a clock, because clocks run while the process is stopped.
        for _ in range(math.ceil(seconds / _POLL_SECONDS)):
            if answer.wait(_POLL_SECONDS):
                return True
            if stopping.is_set() or not self._thread.is_alive():  # it has failed the rank
                raise PublicationStopped
        return False

    def save(self, stopping: threading.Event) -> None:
        if not self._wait_for(self._saves, retrying.STORAGE.patience, stopping):
            raise self._without_version()

    def _request_upload(self) -> None:
        """Starts an upload when the rank starts to drain. Signal handlers call this."""
        if self.shutdown.is_stopping and not self.shutdown.aborted:
            self._wake.put(True)

    def stop(self, completed: bool) -> None:
        """Uploads once more. Waits at most ``STOP_SECONDS``; not at all after a fast stop."""
        self._completed = completed
        self._stopping = True
        self._wake.put(True)
        if (
            not self.shutdown.join(self._ended, STOP_SECONDS, DRAIN_SECONDS)
            and not self.shutdown.is_fast
        ):
            limit = STOP_SECONDS
            if self.shutdown.is_requested:
                limit = DRAIN_SECONDS
            logger.warning(
                f"The last upload to the mirror {self.url} did not end within {limit:g} s."
            )
        self._given_up = True
        with self._reading:
            pass  # no read begins any more

    # the mirror thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._pause(self._try_upload())
            self._try_upload()
        except BaseException as error:
            # The event loop must receive the error, above all ``Fenced``.
            self._source.fail(error)
        finally:
            self._ended.put(True)

    def _pause(self, intervals: int) -> None:
        began = time.monotonic()
        while True:
            self._check_owner()
            interval = self._interval.seconds
            if self._owner_checks and not self._is_owned:
                interval = min(interval, 1.0)
            remaining = began + max(intervals * interval, _MIN_WAIT_SECONDS) - time.monotonic()
            if remaining <= 0:
                return
            if self._owner_checks:
                remaining = min(remaining, _OWNER_VALID_SECONDS)
            with suppress(queue.Empty):
                if get_within(self._wake, remaining):
                    return

    def _check_owner(self) -> None:
        number = len(self._owner_checks)
        now = time.monotonic()
        if number and self._is_owned:
            try:
                self._uploads.list_as_owner()
            except (OSError, ConfigError) as error:  # the next upload reports it
                self._failure = retrying.failure_line(error)
                if isinstance(error, OSError) and retrying.STORAGE.is_transient(error):
                    return
            self._owned_until = now + _OWNER_VALID_SECONDS
            self._answers = True
            _answer(self._owner_checks, number)

    def _try_upload(self) -> int:
        try:
            self._upload()
        except _Interrupted:
            pass
        except (OSError, EOFError, ConfigError, StorageFailed, TooManyOpenFiles) as error:
            if isinstance(error, ConfigError) and not self._is_owned:
                raise
            self._failure = retrying.failure_line(error)
            if job_launch.LAUNCH in os.environ and retrying.http_status(error) in (401, 403):
                raise StorageFailed(
                    f"{self.url} refuses this job's token ({retrying.library_line(error)}). Log "
                    "in (hf auth login) where the run was started, and run again."
                ) from error
            is_final = isinstance(error, OSError) and not retrying.STORAGE.is_transient(error)
            if is_final and self._owner_checks and not self._is_owned:
                raise self._without_version() from error
            if not self._given_up:
                self._failures += 1
                warning = (
                    f"Could not mirror the checkpoint to {self.url}: {self._failure}. Newer work "
                    "is on this node only."
                )
                if not self._stopping:
                    warning += " The run tries again later."
                logger.warning(warning)
            return int(retrying.MIRROR.wait(self._failures))
        if self._failures:
            logger.info(f"The checkpoint is mirrored to {self.url} again.")
        self._failures = 0
        return 1

    def _upload(self) -> None:
        uploads = self._uploads
        last = self._stopping
        start = time.monotonic()
        saves = len(self._saves)
        with ExitStack() as stack:
            with self._reading:
                self._raise_if_interrupted(last)
                snapshot, grown = self._take_snapshot(uploads, stack)
            # Taking ownership after ``stop`` has given up would fence the rank's next process.
            self._raise_if_interrupted(last)
            url = self.url.rpartition("/")[0]
            try:
                if self.job is not None:
                    ObjectStore(url).put(layout.JOB, self.job)
                    self.job = None
                self._upload_recorded(ObjectStore(url))
                run = identity.parse_run(self.folder / layout.RUN, snapshot.run)
                uploads.start_version(run, snapshot)
            except FileNotFoundError as error:  # a mistake, not an outage
                raise ConfigError(
                    f"checkpoints_remote_dir: nothing can be written to {url}: {error}. Make the "
                    "bucket or folder, or correct the setting."
                ) from error
            for name, file in grown.items():
                while (remaining := snapshot.sizes[name] - uploads.uploaded_bytes(name)) > 0:
                    data = file.read(min(remaining, MAX_OBJECT_BYTES))
                    if not data:
                        raise EOFError(f"{name} is {remaining} bytes shorter than it was")
                    self._raise_if_interrupted(last)
                    self._check_owner()
                    uploads.add(name, data)
        self._raise_if_interrupted(last)
        uploads.add_answers(snapshot)
        self._raise_if_interrupted(last)
        if uploads.publish(last and self._completed):
            self._interval.took(time.monotonic() - start)
        _answer(self._saves, saves)

    def _upload_recorded(self, store: ObjectStore) -> None:
        folder = layout.checkpoints_of(self.folder) / layout.RECORDED
        current = {path.name for path in folder.glob("*.json")}
        if current == self._recorded:
            return
        mirrored = store.names(layout.RECORDED).keys()
        for name in sorted(current - mirrored):
            if (data := content_of(folder / name)) is not None:
                store.put(f"{layout.RECORDED}/{name}", data)
        for name in sorted(self._recorded - current):
            store.delete(f"{layout.RECORDED}/{name}")
        self._recorded = current

    def _raise_if_interrupted(self, last: bool) -> None:
        if self._given_up or (self._stopping and not last):
            raise _Interrupted

    def _take_snapshot(
        self, uploads: VersionWriter, stack: ExitStack
    ) -> tuple[Snapshot, dict[str, IO[bytes]]]:
        """Returns a snapshot, and the files that have grown since the last snapshot, each opened at
        its first new byte.

        If a commit removes a journal before it is opened, a newer snapshot is taken.
        """
        uploads.compact()
        for attempts_left in reversed(range(20)):  # the opening of files takes microseconds
            snapshot = self._source.snapshot(uploads.last_answer)
            grown: dict[str, IO[bytes]] = {}
            try:
                for name, size in snapshot.sizes.items():
                    start = uploads.uploaded_bytes(name)
                    if start < size:
                        grown[name] = self._open_at(name, start, size, stack)
                return snapshot, grown
            except FileNotFoundError:
                stack.close()
                if not attempts_left:
                    raise
        raise AssertionError

    def _open_at(self, name: str, start: int, size: int, stack: ExitStack) -> IO[bytes]:
        file = stack.enter_context((self.folder / name).open("rb"))
        file.seek(start)
        if size - start > 2**20:
            return file
        data = file.read(size - start)
        file.close()
        return io.BytesIO(data)


def _answer(requests: deque[threading.Event], number: int) -> None:
    for _ in range(number):
        requests.popleft().set()


class _Interrupted(Exception):
    """The upload is interrupted, because the rank stops."""
