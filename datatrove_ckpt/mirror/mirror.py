"""RemoteMirror: copies a rank's checkpoint to a remote while the rank works, one version after the other.

A version is the checkpoint at one instant of the storage thread's order of effects (``checkpoint/rank_files.py``). Each
upload sends only what is new: files only grow, so their new bytes become a new object, and so do new answers of
unfinished documents. Then it writes the manifest, which completes the version, and removes what the last three versions
do not need. A kill in between leaves the version before intact, and objects that nobody needs. The next process removes
those.

All of this happens in a thread of its own. A remote that fails or hangs costs warnings, but no answer and no time. Only
a rank's first output waits for a mark: a rank without it has published nothing, so output that it finds is another
job's.

Two processes may mirror one rank: a lost node that comes back, and its replacement. Each first takes ownership of the
mirror, and a process that finds a newer owner stops with ``Fenced``. It looks at each upload, and before it publishes a
chunk, which costs a listing. If the mirror does not answer, it publishes all the same: nobody can take the rank over
there meanwhile.
"""

from __future__ import annotations

import datetime
import io
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loguru import logger

from datatrove_ckpt import retrying
from datatrove_ckpt.checkpoint.identity import parse_run
from datatrove_ckpt.checkpoint.interval import MIRROR_TUNING, Interval, Seconds
from datatrove_ckpt.checkpoint.layout import JOB, RUN
from datatrove_ckpt.checkpoint.placement import Stopping
from datatrove_ckpt.checkpoint.rank_files import Snapshot, Source
from datatrove_ckpt.errors import ConfigError, Fenced, StorageFailed, TooManyOpenFiles
from datatrove_ckpt.mirror.manifests import (
    MAX_OBJECT_BYTES,
    Damaged,
    Manifest,
    Ownership,
    Part,
    RunJson,
    Version,
    Versions,
    encode_answers,
)
from datatrove_ckpt.mirror.object_store import ObjectStore, needs_bucket
from datatrove_ckpt.process import job_launch
from datatrove_ckpt.process.shutdown import Shutdown, get_within
from datatrove_ckpt.retrying import failure_line

KEPT_VERSIONS = 3
# When a file has this many parts, its small last ones are uploaded again as one: a restore should not take a thousand
# requests.
_MAX_PARTS = 64
_SMALL_PART_BYTES = 8 * 2**20


class Uploads:
    """The parts that are uploaded, and the versions made of them.

    For each version: ``start_version``, then ``add`` and ``add_answers`` with what is new, then ``publish``. Parts that
    were added and not published stay, and the next version uses them. Objects of earlier owners are not used again:
    they may be damaged, and a process starts with little to upload.
    """

    def __init__(self, versions: Versions) -> None:
        self.last_answer = 0
        """Number of the last answer that is uploaded."""
        self.owns_mirror = False
        """Whether this process has taken ownership of the mirror."""
        self._versions = versions
        self._run: RunJson = {}
        self._files: dict[str, list[Part]] = {}
        self._generations: dict[str, int] = {}
        """Of files that may be replaced, by name: the one whose bytes are uploaded, if this process did that."""
        self._answers: list[tuple[Part, frozenset[int]]] = []
        self._object_count = 0
        self._published: Manifest | None = None
        self._kept: dict[Version, set[str]] = {}
        """The versions on the mirror, with the names of their objects."""
        self._garbage: set[tuple[str, str]] = set()
        """Folder and name of objects that are removed once no kept version needs them."""
        self._ownership: Ownership | None = None
        self._number_floor: int | None = None
        """The numbers of this owner's versions are larger."""

    # objects ---------------------------------------------------------------------------------------------------

    def uploaded_bytes(self, name: str) -> int:
        """How many bytes of the file are uploaded."""
        return sum(part.size for part in self._files.get(name, ()))

    def forget_replaced(self, snapshot: Snapshot) -> None:
        """Forgets the parts of files that were replaced, so that they are uploaded again as a whole."""
        for name, generation in snapshot.generations.items():
            if self._generations.get(name) != generation:  # an earlier attempt may have replaced what it had uploaded
                self._files.pop(name, None)
                self._generations[name] = generation

    def compact(self) -> None:
        """Forgets small parts where there are many of them, so that they are uploaded again as one."""
        for parts in self._files.values():
            if len(parts) >= _MAX_PARTS:
                while parts and parts[-1].size < _SMALL_PART_BYTES:
                    parts.pop()
        if len(self._answers) >= _MAX_PARTS:
            self._answers.clear()
            self.last_answer = 0

    def start_version(self, run: RunJson, snapshot: Snapshot) -> None:
        """Drops the parts that the snapshot no longer needs. The first call takes ownership of the mirror.

        Raises:
            ConfigError: the bucket or folder does not exist.
        """
        self._run = run
        if not self.owns_mirror:
            self._take_ownership()
            self.owns_mirror = True
        for name in self._files.keys() - snapshot.sizes.keys():
            del self._files[name]
        self._answers = [(part, of) for part, of in self._answers if of & snapshot.unfinished]

    def _take_ownership(self) -> None:
        """Retries reuse the number, so they never outrank a newer owner."""
        ownerships, versions = self._versions.listing()
        if self._ownership is None:
            self._ownership = Ownership(1 + max((other.number for other in ownerships), default=0), self._nonce)
        with needs_bucket(self._versions.url):
            self._versions.write_ownership(self._ownership, self._run["owner"])
        only_first = all(version.number == 1 for version in versions)
        if only_first and self._versions.newest(versions, self._versions.read_manifest, []) is None:
            # An empty first version, so that objects without any version always mean damage, and never a first upload
            # that was killed. That of a process that was killed may be torn.
            self._versions.write_manifest(Version(1, self._nonce), Manifest(self._run, {}, [], False), _now())

    def add(self, name: str, data: bytes) -> None:
        """Uploads the file's next bytes."""
        self._files.setdefault(name, []).append(self._put_part(data))

    def add_answers(self, snapshot: Snapshot) -> None:
        """Uploads the snapshot's answers. If that fails halfway, all of them are uploaded again next time."""
        self._answers += [(self._put_part(data), ordinals) for data, ordinals in encode_answers(snapshot.answers)]
        self.last_answer = snapshot.last_answer

    def _put_part(self, data: bytes) -> Part:
        name = f"{self._nonce}-{self._object_count:06d}"
        self._object_count += 1
        self._garbage |= {("objects", name), ("copies", name)}
        return self._versions.put_object(name, data)

    @property
    def _nonce(self) -> str:
        return str(self._run["owner"]["nonce"])

    # versions --------------------------------------------------------------------------------------------------

    def publish(self, finished: bool) -> bool:
        """Makes a version of the uploaded parts, unless nothing has changed, and removes what is no longer needed.

        Returns whether there is a new version.

        Raises:
            Fenced: another process has taken ownership of the mirror.
        """
        files = {name: list(parts) for name, parts in self._files.items()}
        manifest = Manifest(self._run, files, [part for part, _ in self._answers], finished)
        ownerships, versions = self.list_as_owner()  # also if nothing has changed: a fenced process must stop
        if manifest == self._published:
            return False
        if self._published is None:
            # What earlier owners left. Those that still run stop when they see our ownership.
            for version in versions:
                with suppress(Damaged):
                    self._kept[version] = self._versions.read_manifest(version).object_names()
            self._garbage |= self._versions.list_objects()
        new = self._next_version(versions)
        self._versions.write_manifest(new, manifest, _now())
        self._published = manifest
        self._kept[new] = manifest.object_names()
        try:
            # Only what was listed before is removed. If nobody else has taken ownership until now, all of it is older
            # than the next owner, even if this process pauses for long between here and the removals.
            self.list_as_owner()
            self._collect_garbage([version for version in versions if version < new], ownerships)
        except OSError as error:
            logger.warning(
                f"Could not remove old versions at {self._versions.url}: {failure_line(error)}. They use storage and "
                "do no harm. The next upload tries again."
            )
        return True

    def _next_version(self, versions: list[Version]) -> Version:
        """This owner's first number skips as many numbers as there were owners, its later ones skip none.

        An earlier owner that listed the mirror before we took ownership may still write one version. Ours must be
        newer. It is: if that version is the earlier owner's first one, it skips fewer numbers.
        """
        if self._number_floor is None:
            assert self._ownership is not None
            highest = max((version.number for version in versions), default=0)
            self._number_floor = highest + self._ownership.number
        own = [version.number for version in {*versions, *self._kept} if version.nonce == self._nonce]  # lists lag
        return Version(1 + max([self._number_floor, *own]), self._nonce)

    def list_as_owner(self) -> tuple[list[Ownership], list[Version]]:
        """Lists ownerships and versions.

        Raises:
            Fenced: another process has taken ownership.
        """
        ownerships, versions = self._versions.listing()
        if ownerships and self._ownership is not None and ownerships[-1] > self._ownership:
            other = self._versions.owner_text(ownerships[-1])
            raise Fenced(
                f"Another process has taken this rank over: {other} owns the mirror {self._versions.url} now. This one "
                "writes nothing more; what it saved is kept."
            )
        return ownerships, versions

    def _collect_garbage(self, versions: list[Version], ownerships: list[Ownership]) -> None:
        """Removes old versions first, then the objects that no kept version needs.

        In this order a kill in between leaves superfluous objects, and never a version without its objects.
        """
        keep = sorted(self._kept)[-KEPT_VERSIONS:]
        for version in sorted({*versions, *self._kept} - set(keep)):
            self._versions.remove(version.file)
        for ownership in ownerships[:-1]:
            self._versions.remove(ownership.file)
        self._kept = {version: self._kept[version] for version in keep}
        needed = set().union(*self._kept.values())
        for found in sorted(self._garbage):
            if found[1] not in needed:
                self._versions.remove("/".join(found))
                self._garbage.discard(found)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# How long a publication waits for a mirror to say whose it is, and how long that counts.
_LOOK_SECONDS = 60.0
_SEEN_SECONDS = 1.0
_POLL_SECONDS = 0.1
# How long ``stop`` waits for the last upload.
STOP_SECONDS = 15.0
# The same once the rank was asked to stop: a preempted job has half a minute for everything.
DRAIN_SECONDS = 5.0
# A snapshot is taken again each time a chunk was committed before its journal was opened, which takes microseconds.
_SNAPSHOT_ATTEMPTS = 20
# Up to this size, new bytes are read at once, so that their journal need not stay open.
_READ_AT_ONCE_BYTES = 2**20
# The shortest wait between two uploads: one that finds nothing new still asks the storage thread for a snapshot.
_MIN_WAIT_SECONDS = 0.01


@dataclass(eq=False, repr=False)
class RemoteMirror:
    """A ``Mirror`` of one rank.

    Args:
        url: URL of the rank's folder on the remote.
        folder: the rank's local folder.
        seconds: the shortest time from the end of one upload to the start of the next. "auto" measures the uploads and
            chooses a time between 5 and 600 seconds, so that uploading takes up to 5 % of the time.
        shutdown: of the rank; by default of nobody.
        job: the ``job.json`` that the mirror lacks. It goes up first.
    """

    url: str
    folder: Path
    seconds: Seconds
    shutdown: Shutdown = field(default_factory=Shutdown)
    job: bytes | None = None

    def __post_init__(self) -> None:
        self._interval = Interval(self.seconds, MIRROR_TUNING)
        self._stopping = False
        # ``SimpleQueue.put`` may be called in a signal handler; ``Event.set`` may not, because it takes a lock. True:
        # an upload is due; False: a look.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._looks: deque[threading.Event] = deque()
        """Set once it is known that this process owns the mirror."""
        self._seen = -math.inf
        self._answers, self._waived_until = True, -math.inf
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._completed = False
        self._given_up = False
        work = copy_context().run  # its lines are in the rank's log
        self._thread = threading.Thread(target=work, args=(self._run,), name="datatrove-ckpt mirror", daemon=True)
        self._uploads: Uploads | None = None
        self._failures = 0
        self._failure = "no answer"

    def start(self, source: Source) -> None:
        """Starts the thread, which takes its snapshots from ``source``."""
        self._source = source
        self.shutdown.call(self._hurry)
        self._thread.start()

    @property
    def _is_owned(self) -> bool:
        """Then there is a version of the rank, too."""
        return self._uploads is not None and self._uploads.owns_mirror

    def check(self, first: bool, stopping: threading.Event) -> None:
        """See ``Mirror``."""
        if first and not self._is_owned:
            if not self._wait_for_look(retrying.STORAGE.patience, stopping):
                raise self._without_version()
            return
        if time.monotonic() < max(self._seen + _SEEN_SECONDS, self._waived_until) or not self._is_owned:
            return
        if not self._wait_for_look(_LOOK_SECONDS, stopping):
            if self._answers:
                logger.warning(
                    f"The mirror {self.url} does not say whether another process has taken this rank over. Its output "
                    f"waits {_LOOK_SECONDS:g} s of two minutes for an answer, and is published then all the same."
                )
            self._answers = False
            self._waived_until = time.monotonic() + _LOOK_SECONDS

    def _without_version(self) -> StorageFailed:
        return StorageFailed(
            f"Nothing could be uploaded to the mirror {self.url} ({self._failure}). The rank's first output waits for "
            "that: if this node were lost, nothing would tell it from another job's. Every answer is saved on this "
            "node. Correct that (network, credentials, room), or remove the setting checkpoints_remote_dir, and run "
            "the same command again."
        )

    def _wait_for_look(self, seconds: float, stopping: threading.Event) -> bool:
        """Whether the mirror's thread has looked within that time, and this process owns the mirror."""
        look = threading.Event()
        self._looks.append(look)
        self._wake.put(False)
        for _ in range(math.ceil(seconds / _POLL_SECONDS)):  # by no clock, which runs on while the process is stopped
            if look.wait(_POLL_SECONDS):
                return True
            if stopping.is_set() or not self._thread.is_alive():  # it has failed the rank
                raise Stopping
        return False

    def _hurry(self) -> None:
        """Uploads at once when the rank starts to drain, so that little is left for ``stop``. For signal handlers."""
        if self.shutdown.is_stopping and not self.shutdown.aborted:
            self._wake.put(True)

    def stop(self, completed: bool) -> None:
        """Uploads once more. Returns after ``STOP_SECONDS`` at the latest, and at once after a fast stop."""
        self._completed = completed
        self._stopping = True
        self._wake.put(True)
        if not self.shutdown.join(self._ended, STOP_SECONDS, DRAIN_SECONDS) and not self.shutdown.is_fast:
            limit = DRAIN_SECONDS if self.shutdown.is_requested else STOP_SECONDS
            logger.warning(
                f"The last upload to the mirror {self.url} did not end within {limit:g} s. The mirror keeps the "
                "version before it; the local checkpoint is complete."
            )
        self._given_up = True

    # the mirror thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._pause(self._try_upload())
            self._try_upload()
        except BaseException as error:  # must reach the event loop: above all, that another process took over
            self._source.fail(error)
        finally:
            self._ended.put(True)

    def _pause(self, intervals: int) -> None:
        """Until the next upload is due, or hurried. A publication that waits for the first version hurries it, too."""
        began = time.monotonic()
        while True:
            self._look()
            interval = self._interval.seconds
            if self._looks and not self._is_owned:
                interval = min(interval, 1.0)
            left = began + max(intervals * interval, _MIN_WAIT_SECONDS) - time.monotonic()
            if left <= 0:
                return
            with suppress(queue.Empty):
                if get_within(self._wake, min(left, _SEEN_SECONDS) if self._looks else left):
                    return

    def _look(self) -> None:
        """Looks whose mirror this is, if a publication waits for that.

        Raises:
            Fenced: it is another process's.
        """
        number, now, uploads = len(self._looks), time.monotonic(), self._uploads
        if number and uploads is not None and uploads.owns_mirror:
            try:
                uploads.list_as_owner()
            except (OSError, ConfigError) as error:  # the next upload says so
                self._failure = failure_line(error)
                if isinstance(error, OSError) and retrying.STORAGE.passes(error):
                    return
            self._seen, self._answers = now, True
            for _ in range(number):
                self._looks.popleft().set()

    def _try_upload(self) -> int:
        """Returns how many intervals to wait before the next upload."""
        try:
            self._upload()
        except _Interrupted:
            pass
        except (OSError, EOFError, ConfigError, StorageFailed, TooManyOpenFiles) as error:
            if isinstance(error, ConfigError) and not (self._uploads and self._uploads.owns_mirror):
                raise
            self._failure = failure_line(error)
            if job_launch.LAUNCH in os.environ and retrying.http_status(error) in (401, 403):
                raise StorageFailed(
                    f"{self.url} refuses this job's token ({retrying.library_line(error)}), and the job's disk goes "
                    "with it: going on would pay for answers that are lost. Log in (hf auth login) where the run was "
                    "started, and run the same command again."
                ) from error
            is_final = isinstance(error, OSError) and not retrying.STORAGE.passes(error)
            if is_final and self._looks and not self._is_owned:
                raise self._without_version() from error
            if not self._given_up:
                self._failures += 1
                after = "." if self._stopping else ". The run continues and tries again later."
                logger.warning(
                    f"Could not mirror the checkpoint to {self.url}: {self._failure}. What is newer than the "
                    f"last version is saved on this node only{after}"
                )
            return int(retrying.MIRROR.wait(self._failures))
        if self._failures:
            logger.info(f"The checkpoint is mirrored to {self.url} again.")
        self._failures = 0
        return 1

    def _upload(self) -> None:
        if self._uploads is None:
            self._uploads = Uploads(Versions(self.url))
        uploads, last, start = self._uploads, self._stopping, time.monotonic()
        with ExitStack() as stack:
            self._raise_if_interrupted(last)
            snapshot, grown = self._take_snapshot(uploads, stack)
            # Again, because taking ownership after ``stop`` has given up would fence the rank's next process.
            self._raise_if_interrupted(last)
            self._put_job()
            uploads.start_version(parse_run(self.folder / RUN, snapshot.run), snapshot)
            for name, file in grown.items():
                for data in _blocks(file, snapshot.sizes[name] - uploads.uploaded_bytes(name)):
                    self._raise_if_interrupted(last)
                    self._look()
                    uploads.add(name, data)
        self._raise_if_interrupted(last)
        uploads.add_answers(snapshot)
        self._raise_if_interrupted(last)
        if uploads.publish(last and self._completed):
            self._interval.took(time.monotonic() - start)

    def _put_job(self) -> None:
        if self.job is not None:
            url = self.url.rpartition("/")[0]
            with needs_bucket(url):
                ObjectStore(url).put(JOB, self.job)
            self.job = None

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
        file = stack.enter_context((self.folder / name).open("rb"))
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
