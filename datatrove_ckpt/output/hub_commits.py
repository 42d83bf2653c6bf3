"""Commits a rank's uploaded files to the hub: few commits for many files, in a thread of its own.

Uploaded files wait until the first file has waited for ``hub_commit_seconds`` or a part of it, or
there are 100 files, or the rank has no more. While more files may come, they then wait for the
rank's turn (``hub_pace``).

    a kill before the commit       the next attempt writes the chunk again, and does not send
                                   content that the hub has
    a kill after the commit        the next attempt finds equal files there, and makes no commit
    the commit's answer gets lost  the files are looked up before they are sent again

The hub may lag behind its newest commit, so commits may be repeated harmlessly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.checkpoint.placement import Placement, Stopping, WaitingChunk
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import duration, plural, ranges
from datatrove_ckpt.common.retrying import Attempts
from datatrove_ckpt.output.hub_pace import CommitPace, commit_title
from datatrove_ckpt.output.hub_uploads import (
    GENERATION_GOES_ON,
    HubUploads,
    UploadedFile,
    hub_failure,
)
from datatrove_ckpt.output.names import plain
from datatrove_ckpt.output.stoppable import given_up

MOST_FILES = 100
"""Files in a commit. The hub advises fewer than 100 or so."""

MOST_BYTES = 32 * 2**20
"""Bytes of small files that travel inside a commit."""


@dataclass
class _Chunk:
    index: int
    left: int
    waiting: WaitingChunk
    forget: Callable[[], None]


class HubCommits(Placement):
    """Commits what a rank has uploaded. ``pace``: when the rank may commit."""

    def __init__(self, uploads: HubUploads, pace: CommitPace, rank: int) -> None:
        self.confirmed: dict[str, int] = {}
        """Results of ``HubUploads.commit`` for files whose commit is confirmed, by name."""
        self._uploads = uploads
        self._pace = pace
        self._seconds = pace.seconds_of_next()
        self._rank = rank
        self._calls = uploads.calls
        self._uploaded: dict[int, tuple[list[UploadedFile], Callable[[], None]]] = {}
        self._queue: list[tuple[UploadedFile, _Chunk]] = []
        """What waits for a commit, oldest first."""
        self._waiting_since = 0.0
        self._change = threading.Condition()
        self._hurried = False
        self._thread: threading.Thread | None = None

    # publisher's thread --------------------------------------------------------------------------

    def uploaded(
        self, chunk_index: int, files: list[UploadedFile], forget: Callable[[], None]
    ) -> None:
        """Takes the files of a chunk, before ``wait`` is called for it."""
        self._uploaded[chunk_index] = files, forget

    def wait(self, chunk_index: int, waiting: WaitingChunk) -> None:
        files, forget = self._uploaded.pop(chunk_index)
        if not files:
            forget()
            waiting.done()
            return
        chunk = _Chunk(chunk_index, len(files), waiting, forget)
        with self._change:
            if not self._queue:
                self._waiting_since = time.monotonic()
            self._queue += [(file, chunk) for file in files]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="datatrove-ckpt hub", daemon=True
                )
                self._thread.start()
            self._change.notify_all()

    # any thread ----------------------------------------------------------------------------------

    def hurry(self) -> None:
        with self._change:
            self._hurried = True
            self._change.notify_all()

    def stop(self) -> None:
        """Ends the waits. A commit under way may still happen; the next attempt finds it."""
        with self._change:
            self._change.notify_all()

    # own thread ----------------------------------------------------------------------------------

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
        """Waits until a commit is due. Returns its files, or none once the rank stops."""
        with self._change:
            while not self._calls.stopped:
                due = None
                if self._queue:
                    due = self._waiting_since + self._seconds - time.monotonic()
                is_full = (
                    len(self._queue) >= MOST_FILES
                    or sum(f.bytes_in_commit for f, _ in self._queue) >= MOST_BYTES
                )
                if due is not None and (due <= 0 or self._hurried or is_full):
                    return self._first_files()
                self._change.wait(due)
            return []

    def _first_files(self) -> list[tuple[UploadedFile, _Chunk]]:
        size = 0
        batch: list[tuple[UploadedFile, _Chunk]] = []
        for file, chunk in self._queue[:MOST_FILES]:
            size += file.bytes_in_commit
            if batch and size > MOST_BYTES:
                break
            batch.append((file, chunk))
        return batch

    def _commit(self, batch: list[tuple[UploadedFile, _Chunk]], attempts: Attempts) -> None:
        files = [file for file, _ in batch]
        self._uploads.lease.check()
        chunks = ranges({chunk.index for _, chunk in batch})
        title = commit_title(plural(len(files), "file"), self._rank, chunks)
        try:
            history = self._uploads.history()
            ends = self._hurried
            seconds = self._pace.seconds_until_turn(history, ends)
            if seconds:
                self._wait_for_turn(len(history.of_last_hour), seconds, ends)
                return
            seen = self._uploads.commit(files, title, history.head)
        except OSError as error:
            folder = self._uploads.folder
            what = f"{folder.url}: {plural(len(self._queue), 'file')} wait for a commit"
            try:
                self._calls.sleep(attempts.failed(what, error))
            except OSError:
                raise given_up(what, error, hub_failure, folder.advice) from error
            return  # the commit may have happened: the next attempt looks
        attempts.succeeded()
        self._seconds = self._pace.seconds_of_next()
        with self._change:
            del self._queue[: len(batch)]
            self._waiting_since = time.monotonic()
        for file, chunk in batch:
            self.confirmed[plain(file.name)] = seen
            chunk.left -= 1
            if not chunk.left:
                chunk.forget()
                chunk.waiting.done()

    def _wait_for_turn(self, made: int, seconds: float, ends: bool) -> None:
        meanwhile = "generation goes on"
        if ends:
            meanwhile = "the task has nothing else left to do"
        logger.info(
            f"{self._uploads.folder.url}: {plural(len(self._queue), 'file')} wait for a commit: "
            f"{made} were made within an hour, and hub_commits_per_hour is {self._pace.per_hour}. "
            f"Next look in {duration(seconds)}; {meanwhile}."
        )
        with self._change:
            self._change.wait_for(lambda: self._calls.stopped or self._hurried != ends, seconds)
