"""Decides when the files of a published chunk are in place: immediately, or later.

On a disk and on S3 a published file is in place. On the Hugging Face hub a later commit names the
uploaded files of many chunks. A chunk's journal and staged files stay until the hub's commit, which
its commit line follows.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingChunk:
    """A chunk whose files are written, and not in place yet.

    Attributes:
        done: callback for success: the files are in place. Any thread may call it.
        failed: callback for the error that stopped the placement. Any thread may call it.
    """

    done: Callable[[], None]
    failed: Callable[[BaseException], None]


class Placement:
    """Puts the files of published chunks in place.

    The base class is for files that are in place already.
    """

    def wait(self, chunk_index: int, waiting: WaitingChunk) -> None:
        """Takes a chunk that was written. Called in the publisher's thread."""
        waiting.done()

    def flush(self) -> None:
        """Stops waiting for more chunks, because none come. Does not block."""

    def stop(self) -> None:
        """Stops putting files in place."""


class PublicationStopped(BaseException):
    """Ends an abandoned publication. The next attempt publishes the chunk again."""
