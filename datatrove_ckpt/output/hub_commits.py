"""Few commits for many files: the thread that commits what one rank has uploaded to the hub.

The hub allows 128 commits per hour and repository, to all ranks together. So files whose content is uploaded wait until
the first of them has waited ``hub_commit_seconds`` or a part of it, or there are 100 of them, or the rank has no more;
then for the rank's turn (``hub_pace``). Meanwhile more files come together, and the next commit carries them, too.

    a kill before the commit       the next attempt writes the chunk again, and does not send content that the hub has
    a kill after the commit        the next attempt finds the same files there, and makes no commit
    the commit's answer gets lost  the files are looked up before they are sent again

The hub may show a state before the commit that it has just made, so the same commit may be made twice. That is
harmless: it puts the same bytes to the same paths.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loguru import logger

from datatrove_ckpt import retrying
from datatrove_ckpt.checkpoint.placement import Placement, Stopping, WaitingChunk
from datatrove_ckpt.formatting import duration, number_range, plural
from datatrove_ckpt.output.hub_pace import CommitPace, commit_title
from datatrove_ckpt.output.hub_uploads import (
    GENERATION_GOES_ON,
    Confirmed,
    HubUploads,
    UploadedFile,
    given_up,
    hub_failure,
    may_have_happened,
)
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.retrying import Attempts

MOST_FILES = 100
"""Files in a commit. The hub advises fewer than 100 or so."""

MOST_BYTES = 32 * 2**20
"""Bytes of small files that travel inside a commit."""


@dataclass
class _Chunk:
    """A chunk with files that are not committed yet."""

    index: int
    left: set[str]
    waiting: WaitingChunk
    forget: Callable[[], None]


@dataclass
class _Queue:
    """Uploaded files that wait for a commit, oldest first."""

    files: list[tuple[UploadedFile, _Chunk]] = field(default_factory=list)
    oldest: float = 0.0

    def add(self, files: Sequence[UploadedFile], chunk: _Chunk) -> None:
        if not self.files:
            self.oldest = time.monotonic()
        self.files += [(file, chunk) for file in files]

    def first(self) -> list[tuple[UploadedFile, _Chunk]]:
        """What the next commit may carry."""
        size = 0
        batch: list[tuple[UploadedFile, _Chunk]] = []
        for file, chunk in self.files[:MOST_FILES]:
            size += file.bytes_in_commit
            if batch and size > MOST_BYTES:
                break
            batch.append((file, chunk))
        return batch

    @property
    def is_full(self) -> bool:
        return len(self.files) >= MOST_FILES or sum(file.bytes_in_commit for file, _ in self.files) >= MOST_BYTES

    def remove(self, names: set[str]) -> None:
        """Files that came later than those have waited for less than them: the time starts anew."""
        self.files = [(file, chunk) for file, chunk in self.files if file.name not in names]
        self.oldest = time.monotonic()


class HubCommits(Placement):
    """Commits what a rank has uploaded.

    Args:
        pace: when the rank may commit.
        rank: for the commits' messages.
        calls: their ``stop`` ends the thread.
    """

    is_later = True

    def __init__(self, uploads: HubUploads, pace: CommitPace, rank: int, calls: StoppableCalls) -> None:
        self.confirmed: dict[str, Confirmed] = {}
        """Files whose commit the hub has answered, by name."""
        self._uploads = uploads
        self._pace = pace
        self._seconds = pace.seconds_of_next()
        self._waited = 0
        self._rank = rank
        self._calls = calls
        self._uploaded: dict[int, tuple[list[UploadedFile], Callable[[], None]]] = {}
        self._queue = _Queue()
        self._change = threading.Condition()
        self._hurried = False
        self._thread: threading.Thread | None = None

    # publisher's thread ----------------------------------------------------------------------------------------------

    def uploaded(self, chunk_index: int, files: list[UploadedFile], forget: Callable[[], None]) -> None:
        """Takes the files of a chunk, before ``wait`` is called for it. ``forget`` removes the staged files."""
        self._uploaded[chunk_index] = files, forget

    def wait(self, chunk_index: int, waiting: WaitingChunk) -> None:
        files, forget = self._uploaded.pop(chunk_index)
        if not files:
            forget()
            waiting.done()
            return
        chunk = _Chunk(chunk_index, {file.name for file in files}, waiting, forget)
        with self._change:
            self._queue.add(files, chunk)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datatrove-ckpt hub", daemon=True)
                self._thread.start()
            self._change.notify_all()

    # any thread ------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        with self._change:
            self._hurried = True
            self._change.notify_all()

    def stop(self) -> None:
        """Ends the thread. A commit under way may still happen; the next attempt finds it."""
        self._calls.stop()
        with self._change:
            self._change.notify_all()

    # own thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        attempts = Attempts(retrying.HUB, hub_failure, GENERATION_GOES_ON)
        try:
            while batch := self._next_batch():
                self._commit(batch, attempts)
        except Stopping:
            return
        except BaseException as error:  # every failure here must reach the event loop
            batch[0][1].waiting.failed(error)

    def _next_batch(self) -> list[tuple[UploadedFile, _Chunk]]:
        """Waits until a commit is due. Returns nothing once the rank stops."""
        with self._change:
            while not self._calls.stopped:
                due = self._queue.oldest + self._seconds - time.monotonic() if self._queue.files else None
                if due is not None and (due <= 0 or self._hurried or self._queue.is_full):
                    return self._queue.first()
                self._change.wait(due)
            return []

    def _commit(self, batch: list[tuple[UploadedFile, _Chunk]], attempts: Attempts) -> None:
        files, chunks = [file for file, _ in batch], {chunk.index: chunk for _, chunk in batch}
        batch[0][1].waiting.check()
        title = commit_title(plural(len(files), "file"), self._rank, ", ".join(_ranges(sorted(chunks))))
        try:
            history, ends = self._uploads.history(), self._hurried
            if seconds := self._pace.seconds_until_turn(history, self._waited, ends):
                self._wait_for_turn(len(history.of_last_hour), seconds, ends)
                return
            confirmed = self._uploads.commit(files, title, history.head)
        except OSError as error:
            what = f"{self._uploads.folder.url}: {plural(len(self._queue.files), 'file')} wait for a commit"
            try:
                self._calls.sleep(attempts.failed(what, error))
            except OSError:
                raise given_up(what, error) from error
            if may_have_happened(error) and not self._calls.stopped:
                # The commit may have happened, although no answer said so. If only a repetition within the client was
                # answered, because of this very commit, the next attempt sees it.
                self._done(batch, self._uploads.committed(files), self._uploads.confirmed())
            return
        attempts.succeeded()
        self._seconds, self._waited = self._pace.seconds_of_next(), 0
        self._done(batch, {file.name for file in files}, confirmed)

    def _wait_for_turn(self, made: int, seconds: float, ends: bool) -> None:
        most = self._pace.most(ends)
        logger.info(
            f"{self._uploads.folder.url}: {plural(len(self._queue.files), 'file')} wait for a commit: {made} were made "
            f"within an hour, and hub_commits_per_hour is {self._pace.per_hour}"
            + (f", {self._pace.per_hour - most} of them for ranks that end" if most < self._pace.per_hour else "")
            + f". Next look in {duration(seconds)}; "
            + ("the rank has nothing else left to do." if ends else "generation goes on.")
        )
        self._waited += 1
        with self._change:
            self._change.wait_for(lambda: self._calls.stopped or self._hurried != ends, seconds)

    def _done(self, batch: list[tuple[UploadedFile, _Chunk]], names: set[str], confirmed: Confirmed) -> None:
        if not names:
            return
        with self._change:
            self._queue.remove(names)
        self.confirmed |= dict.fromkeys(names, confirmed)
        finished: dict[int, _Chunk] = {}
        for file, chunk in batch:
            if file.name in names:
                chunk.left.discard(file.name)
                if not chunk.left:
                    finished[chunk.index] = chunk
        for chunk in finished.values():
            chunk.forget()
            chunk.waiting.done()


def _ranges(numbers: list[int]) -> list[str]:
    """Sorted numbers as ranges: "3 to 7", "9"."""
    found: list[str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            found.append(number_range(numbers[start], numbers[end - 1] + 1))
            start = end
    return found
