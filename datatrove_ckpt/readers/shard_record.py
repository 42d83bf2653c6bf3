"""Records the input of a rank in ``shard.json``: files, readers, steps, skipped lines.

A finished rank is never run again, so its input may not change. The record keeps each file's name,
size and a sample: a hash of the first and last 64 kB of a local file, the ETag (or the like) of a
remote file. The modification time, which differs in a copy, is for a warning only.

The steps before a runner are described, so that a finished rank notices other steps. A false alarm
would refuse a good run, so the description has only a step's package and class, and plain settings
of stateless steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.checkpoint import checksummed_lines
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import SkippedLines
from datatrove_ckpt.common.redaction import secrets_among
from datatrove_ckpt.errors import CheckpointCorrupt

STATELESS_PACKAGES = (
    "datatrove.pipeline.filters.",
    "datatrove.pipeline.formatters.",
    "datatrove.pipeline.extractors.",
)
"""Packages whose steps process one document at a time."""


@dataclass
class StepRecord:
    """One step. Its name is package and class, "reader", the name of a function, or "documents" for
    a list of documents.
    """

    name: str
    settings: JsonObject = field(default_factory=dict)


def describe_pipeline(
    steps: Sequence[object], code_of: Callable[[object], dict[str, str]]
) -> list[StepRecord]:
    """Describes the steps before a runner, as the executor has them.

    A function's package is omitted, because it changes in an imported script.

    Args:
        code_of: returns hashes of the code of a user's function or class, by name.
    """
    return [_describe_listed(step, code_of) for step in steps]


def _describe_listed(step: object, code_of: Callable[[object], dict[str, str]]) -> StepRecord:
    while isinstance(step, functools.partial):
        step = step.func
    if not isinstance(step, PipelineStep) and not callable(step):
        return StepRecord("documents")
    described = step if callable(step) and hasattr(step, "__qualname__") else type(step)
    code = code_of(described)
    if isinstance(step, BaseDiskReader):
        return StepRecord("reader", code)
    if not isinstance(step, PipelineStep):
        return StepRecord(described.__qualname__.rpartition("<locals>.")[2], code)
    cls = type(step)
    # Only the package, because a module may move between releases.
    package = cls.__module__.partition(".")[0]
    settings = {}
    if cls.__module__.startswith(STATELESS_PACKAGES):
        step_settings = {
            name: value
            for name, value in vars(step).items()
            if name not in ("name", "type", "stats")
        }
        settings = plain_settings(step_settings)
    return StepRecord(f"{package}.{cls.__qualname__}", settings | code)


def plain_settings(values: Mapping[str, object]) -> JsonObject:
    """Returns the values that JSON can express, without secrets. Hashes replace long values."""
    settings = {}
    for name, value in values.items():
        if name.startswith("_") or any(True for _ in secrets_among(name, value)):
            continue
        try:
            data = orjson.dumps(
                value, option=orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_SORT_KEYS
            )
        except orjson.JSONEncodeError:
            continue
        if len(data) <= 200:
            settings[name] = orjson.loads(data)
        else:
            settings[name] = f"<{len(data)} bytes, hash {xxh3_64_hexdigest(data)}>"
    return settings


def differences(recorded: Sequence[StepRecord], current: Sequence[StepRecord]) -> list[str]:
    """Settings that only one side has are not compared."""
    if [step.name for step in recorded] != [step.name for step in current]:
        return [f"then: {_names(recorded)}", f"now: {_names(current)}"]
    return [
        f"{old.name}, {key}: {value!r} -> {new.settings[key]!r}"
        for old, new in zip(recorded, current, strict=True)
        for key, value in old.settings.items()
        if key in new.settings and new.settings[key] != value
    ]


def _names(steps: Sequence[StepRecord]) -> str:
    return " -> ".join(step.name for step in steps) or "none"


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
    pipeline: Sequence[StepRecord] | None = None

    def to_json(self) -> JsonObject:
        readers = [
            asdict(reader) | {"files": list(map(list, reader.files))} for reader in self.readers
        ]
        fields = {"skipped": self.skipped.numbers(), "readers": readers}
        if self.pipeline is not None:
            fields["pipeline"] = list(map(asdict, self.pipeline))
        return fields

    @classmethod
    def read(cls, path: Path) -> ShardRecord | None:
        """Returns None if an earlier release wrote it, or the rank has not read all of its input.

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
