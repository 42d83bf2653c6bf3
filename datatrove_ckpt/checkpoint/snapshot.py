"""A checkpoint at one instant of the storage thread's order of effects, described so that it can be copied.

Nothing is copied here, and nothing waits but the asker: every file of a checkpoint only grows until it is removed, so
its size at the instant says which of its bytes belong to it, and they can be read later. Only rows of the request cache
are taken at once, those that were put since the last snapshot and whose document is not finished yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from datatrove_ckpt.checkpoint.request_cache import CachedRequest


@dataclass(slots=True)
class Snapshot:
    """What a copy must hold.

    ``run``: the content of ``run.json``. ``sizes``: of each other file, by name, how many of its bytes. ``unfinished``:
    the ordinals of documents that have answers and are not finished. ``answers``: those of them that were put after
    the one numbered ``since``; ``last_answer``: the number of the last one so far.
    """

    run: bytes
    sizes: dict[str, int]
    unfinished: frozenset[int]
    answers: list[CachedRequest]
    last_answer: int


class Source(Protocol):
    """What a mirror asks of a checkpoint. See ``CheckpointManager``."""

    def snapshot(self, since: int) -> Snapshot: ...
    def fail(self, error: BaseException) -> None: ...


class Mirror(Protocol):
    """Keeps a copy of a rank's checkpoint elsewhere while the rank is open."""

    def start(self, source: Source) -> None:
        """The rank is open."""

    def stop(self, completed: bool) -> None:
        """Nothing more will be written, the files are still there. Takes a bounded time. True: all is committed."""

    def fast_stop(self) -> None:
        """The rank was told to end: takes less time, or, called again, none. May be called in a signal handler."""


class NoMirror:
    """The checkpoint lives and dies with its disk."""

    def start(self, source: Source) -> None: ...

    def stop(self, completed: bool) -> None: ...

    def fast_stop(self) -> None: ...
