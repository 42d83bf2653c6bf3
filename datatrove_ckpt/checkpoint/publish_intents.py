"""Records intents: hashes of files that a rank is about to publish, before any file appears.

A rank replaces an existing file only if an intent names its content: an earlier attempt published
it, perhaps with another zlib. Other content belongs to another job, and stays.

Without this file (an earlier release, a mirror, or commits that ``repair`` rebuilt) a rank may have
published any content. Then ``ChunkOutput.prepare`` once accepts all files under the rank's names.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import checksummed_lines, files
from datatrove_ckpt.checkpoint.layout import PUBLISHING

_ADVICE = "Check that no other run writes to the output, then remove this file."


class PublishIntents:
    """The hashes that a rank may have published, by file name. Each write of a chunk adds a line.

    Raises:
        CheckpointCorrupt: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PUBLISHING
        self.is_kept = self.path.exists()
        self._hashes: defaultdict[str, set[str]] = defaultdict(set)
        self._whole = 0
        for line in checksummed_lines.read_lines(self.path, _ADVICE):
            self._note(orjson.loads(line.body))
            self._whole = line.offset + line.length

    @cached_property
    def _file(self) -> files.AppendFile:
        return files.AppendFile(self.path, self._whole)

    @property
    def names(self) -> set[str]:
        return set(self._hashes)

    def hashes(self, name: str) -> set[str]:
        return self._hashes.get(name, set())

    def add(self, hashes: Mapping[str, str]) -> None:
        self._file.append(checksummed_lines.add_checksum(orjson.dumps(hashes)))
        self._file.sync()
        self._note(hashes)
        self.is_kept = True

    def _note(self, hashes: Mapping[str, str]) -> None:
        for name, digest in hashes.items():
            self._hashes[name].add(digest)


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
