"""What a rank has read, as its checkpoint keeps it in ``shard.json``: files, readers, steps, skipped lines.

A finished rank is never run again, so its input may not change. Of each file the record keeps name, size and a sample:
a hash of the first and last 64 kB of a local file, the ETag (or the like) of a remote one. Names and sizes are those
that the reader saw; samples are taken when it has finished. The time of the last change is kept for a warning only: a
copy on another node has another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.readers.steps import StepRecord

_VERSION = 1


class Skipped(Enum):
    """Why a line or row became no document. A format yields it in place of the document."""

    DAMAGED = "damaged"
    WITHOUT_TEXT = "without_text"


class SkippedLines(NamedTuple):
    """How many lines or rows of the input became no document, up to a position. Blank lines are not counted.

    ``damaged``: not a JSON object. ``without_text``: no text under ``text_key``, or none from the adapter.
    ``at_least``: there may be more, because a release that did not count them saved an earlier position.
    """

    damaged: int = 0
    without_text: int = 0
    at_least: bool = False

    def plus(self, reason: Skipped) -> SkippedLines:
        """One more."""
        return self._replace(**{reason.value: getattr(self, reason.value) + 1})

    def to_json(self) -> list[int]:
        """The arguments; without the last if it is False."""
        return list(self) if self.at_least else [self.damaged, self.without_text]

    def __add__(self, other: object) -> SkippedLines:
        if not isinstance(other, SkippedLines):
            return NotImplemented
        at_least = self.at_least or other.at_least
        return SkippedLines(self.damaged + other.damaged, self.without_text + other.without_text, at_least)

    def __str__(self) -> str:
        """A sentence for a closing line, with a space before it; empty if there are none."""
        parts = [f"{self.damaged} damaged line{'s' * (self.damaged != 1)}"] if self.damaged else []
        parts += [f"{self.without_text} row{'s' * (self.without_text != 1)} without text"] if self.without_text else []
        return f" Skipped: {'at least ' * self.at_least}{' and '.join(parts)}." if parts else ""


class FileRecord(NamedTuple):
    """One file. ``sample`` is empty if the file system tells nothing. ``modified``: seconds since 1970, or 0."""

    name: str
    size: int
    sample: str
    modified: float


@dataclass
class ReaderRecord:
    """What one reader has read. ``limited``: it stopped at its ``limit``, so files after these do not matter."""

    options: dict[str, Any] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)
    limited: bool = False


@dataclass
class ShardRecord:
    """The content of ``shard.json``: what a rank has read, and how many lines or rows of it were no documents.

    ``steps``: those before the runner; None if an earlier release made the record, or if not all of them are known.
    """

    readers: list[ReaderRecord] = field(default_factory=list)
    skipped: SkippedLines = field(default_factory=SkippedLines)
    steps: list[StepRecord] | None = None

    def to_json(self) -> dict[str, Any]:
        readers = [{**asdict(reader), "files": [list(file) for file in reader.files]} for reader in self.readers]
        steps = {} if self.steps is None else {"steps": [asdict(step) for step in self.steps]}
        return {"version": _VERSION, "skipped": self.skipped.to_json(), "readers": readers} | steps

    @classmethod
    def read(cls, path: Path) -> ShardRecord | None:
        """None if it tells nothing of files: an earlier release made the checkpoint, the rank has not read all of its
        input, or the input is no files.

        Raises:
            CheckpointCorrupt: it cannot be read.
        """
        try:
            content = orjson.loads(path.read_bytes())
            return cls._from_json(content) if content.get("version") == _VERSION else None
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                f"{path} cannot be read ({error!r}). Restore it from a copy, or remove it: then nobody notices if the "
                "input of this finished rank changes."
            ) from error

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> ShardRecord:
        readers = [
            ReaderRecord(**{**reader, "files": [FileRecord(*file) for file in reader["files"]]})
            for reader in content["readers"]
        ]
        steps = [StepRecord(**step) for step in content["steps"]] if "steps" in content else None
        return cls(readers, SkippedLines(*content["skipped"]), steps)
