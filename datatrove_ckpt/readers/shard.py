"""What a rank has read, as its checkpoint keeps it in ``shard.json``: files, readers, steps, skipped lines.

A finished rank is never run again, so its input may not change. Of each file the record keeps name, size and a sample:
a hash of the first and last 64 kB of a local file, the ETag (or the like) of a remote one. Names and sizes are those
that the reader saw; samples are taken when it has finished. The time of the last change is kept for a warning only: a
copy on another node has another.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from datatrove_ckpt.checkpoint.lines import SHARD_VERSION, read_shard
from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.readers.step_records import StepRecord


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

    ``pipeline``: the steps before the runner, as the executor has them; None if nobody has told the runner.
    """

    readers: list[ReaderRecord] = field(default_factory=list)
    skipped: SkippedLines = field(default_factory=SkippedLines)
    pipeline: list[StepRecord] | None = None

    def to_json(self) -> dict[str, Any]:
        readers = [asdict(reader) | {"files": list(map(list, reader.files))} for reader in self.readers]
        content: dict[str, Any] = {"skipped": list(self.skipped), "readers": readers}
        if self.pipeline is not None:
            content["pipeline"] = list(map(asdict, self.pipeline))
        return content

    @classmethod
    def read(cls, path: Path) -> ShardRecord | None:
        """None if it tells nothing: an earlier release made the checkpoint, the rank has not read all of its input, or
        neither files nor steps are known.

        Raises:
            CheckpointCorrupt: it cannot be read.
        """
        try:
            content = read_shard(path)
            if "readers" not in content or content.get("version") != SHARD_VERSION:
                return None
            record = cls(skipped=SkippedLines.from_json(content["skipped"]))
            for reader in content["readers"]:
                files = list(itertools.starmap(FileRecord, reader["files"]))
                record.readers.append(ReaderRecord(**(reader | {"files": files})))
            if "pipeline" in content:
                record.pipeline = [StepRecord(**step) for step in content["pipeline"]]
            return record
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                path,
                f" cannot be read ({error!r}). Restore it from a copy, or remove it: then nobody notices if the "
                "input of this finished rank changes.",
            ) from error
