"""What a rank has read, in its checkpoint's ``shard.json``: files, readers, steps, skipped lines.

A finished rank is never run again, so its input may not change. The record keeps each file's name,
size and a sample: a hash of the first and last 64 kB of a local file, the ETag (or the like) of a
remote file. The modification time, which differs in a copy, is for a warning only.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint import checksummed_lines
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import SkippedLines
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.readers.step_records import StepRecord


class FileRecord(NamedTuple):
    name: str
    size: int
    sample: str
    modified: float


@dataclass
class ReaderRecord:
    """What one reader has read.

    ``limited``: it stopped at its ``limit``, so files after these do not matter.
    """

    options: JsonObject = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)
    limited: bool = False


@dataclass
class ShardRecord:
    """The content of ``shard.json``.

    ``pipeline``: the steps before the runner, as the executor has them, if known.
    """

    readers: list[ReaderRecord] = field(default_factory=list)
    skipped: SkippedLines = SkippedLines()
    pipeline: list[StepRecord] | None = None

    def to_json(self) -> JsonObject:
        readers = [
            asdict(reader) | {"files": list(map(list, reader.files))} for reader in self.readers
        ]
        content: JsonObject = {"skipped": self.skipped.numbers(), "readers": readers}
        if self.pipeline is not None:
            content["pipeline"] = list(map(asdict, self.pipeline))
        return content

    @classmethod
    def read(cls, path: Path) -> ShardRecord | None:
        """Reads the record; None if an earlier release wrote it, or the rank has not read all of
        its input.

        Raises:
            CheckpointCorrupt: the file cannot be read.
        """
        try:
            content = checksummed_lines.read_shard(path)
            if (
                "readers" not in content
                or content.get("version") != checksummed_lines.SHARD_VERSION
            ):
                return None
            record = cls(skipped=SkippedLines.of_numbers(content["skipped"]))
            for reader in content["readers"]:
                files = list(itertools.starmap(FileRecord, reader["files"]))
                record.readers.append(ReaderRecord(**(reader | {"files": files})))
            if "pipeline" in content:
                record.pipeline = [StepRecord(**step) for step in content["pipeline"]]
            return record
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                path,
                f" cannot be read ({error!r}). {checksummed_lines.WITHOUT_SHARD}",
            ) from error
