"""Decides when the files of a published chunk are in place: at once, or later.

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
        done: to be called once they are in place, in any thread.
        failed: to be called with the error if they cannot be, in any thread.
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
        """Stops waiting for more chunks: none come. Returns at once."""

    def stop(self) -> None:
        """Puts nothing in place any more."""


class PublicationStopped(BaseException):
    """Ends an abandoned publication. The next attempt publishes the chunk again."""
