"""Snapshot: a description of the checkpoint at one instant of the storage thread, from which a copy can be made.

Nothing is copied here, and only the caller waits. A file of a checkpoint only grows until it is removed, so its size at
the instant says which of its bytes belong to the snapshot, and they can be read later. The history is replaced by a
shorter one now and then; a count of that tells it (not the inode, which may be used again). Only rows of the request
cache are read at once: those put since the last snapshot whose document is not finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from datatrove_ckpt.checkpoint.request_cache import CachedRequest


@dataclass(slots=True)
class Snapshot:
    """What a copy must hold.

    Attributes:
        run: the content of ``run.json``.
        sizes: how many bytes of each other file belong to the snapshot, by file name.
        generations: of files that may have been replaced since the last snapshot: how often that was done.
        is_current: whether the file of this name has not been replaced since. It is asked once the file is open.
        unfinished: ordinals of the documents that have answers and are not finished.
        answers: answers of these documents that were put after the answer numbered ``since``.
        last_answer: number of the last answer so far.
    """

    run: bytes
    sizes: dict[str, int]
    unfinished: frozenset[int]
    answers: list[CachedRequest]
    last_answer: int
    generations: dict[str, int] = field(default_factory=dict)
    is_current: Callable[[str], bool] = lambda name: True


class Source(Protocol):
    """What a mirror needs of a checkpoint. Called in the mirror's thread. See ``OpenCheckpoint``."""

    def snapshot(self, since: int) -> Snapshot: ...
    def fail(self, error: BaseException) -> None: ...


class Mirror(Protocol):
    """Keeps a copy of a rank's checkpoint elsewhere while the rank is open."""

    def start(self, source: Source) -> None:
        """Called once the rank is open."""

    def check(self, first: Callable[[], None] | None, stopping: threading.Event) -> None:
        """Called before output is published, in any thread: returns once it may be.

        Args:
            first: given if nothing is committed yet: then output may appear only once the copy says that the rank
                publishes. Called before that, as soon as the rank is known to be this process's.
            stopping: set: nobody waits any more.

        Raises:
            Fenced: another process has taken the rank over.
            StorageFailed: no copy can be made.
            Stopping: the rank ends.
        """

    def stop(self, completed: bool) -> None:
        """Called when nothing more will be written and the files still exist. Takes a bounded time.

        Args:
            completed: every document of the input is committed.
        """
