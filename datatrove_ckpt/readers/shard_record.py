"""Records the input of a rank in ``shard.json``: files, readers, steps, skipped lines.

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
    """The input of one reader.

    If the reader stopped at its ``limit`` (``limited``), files after these do not matter.
    """

    options: JsonObject = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)
    limited: bool = False


@dataclass
class ShardRecord:
    """The content of ``shard.json``. ``pipeline`` has the executor's steps, if they are known."""

    readers: list[ReaderRecord] = field(default_factory=list)
    skipped: SkippedLines = SkippedLines()
    pipeline: list[StepRecord] | None = None

    def to_json(self) -> JsonObject:
        readers = [
            asdict(reader) | {"files": list(map(list, reader.files))} for reader in self.readers
        ]
        fields: JsonObject = {"skipped": self.skipped.numbers(), "readers": readers}
        if self.pipeline is not None:
            fields["pipeline"] = list(map(asdict, self.pipeline))
        return fields

    @classmethod
    def read(cls, path: Path) -> ShardRecord | None:
        """Reads the record. Returns None if an earlier release wrote it, or the rank has not read
        all of its input.

        Raises:
            CheckpointCorrupt: the file cannot be read.
        """
        try:
            fields = checksummed_lines.read_shard(path)
            if "readers" not in fields or fields.get("version") != checksummed_lines.SHARD_VERSION:
                return None
            record = cls(skipped=SkippedLines.of_numbers(fields["skipped"]))
            for reader in fields["readers"]:
                files = list(itertools.starmap(FileRecord, reader["files"]))
                record.readers.append(ReaderRecord(**(reader | {"files": files})))
            if "pipeline" in fields:
                record.pipeline = [StepRecord(**step) for step in fields["pipeline"]]
            return record
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                path,
                f" cannot be read ({error!r}). {checksummed_lines.WITHOUT_SHARD}",
            ) from error
