"""What a rank has read, as its checkpoint keeps it in ``shard.json``: files, readers, steps, skipped lines.

A finished rank is never run again, so its input may not change. Of each file the record keeps name, size and a sample:
a hash of the first and last 64 kB of a local file, the ETag (or the like) of a remote one. Names and sizes are those
that the reader saw; samples are taken when it has finished. The time of the last change is kept for a warning only: a
copy on another node has another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.checkpoint.lines import SHARD_VERSION, read_shard
from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.redaction import secrets_among


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
        readers = [{**asdict(reader), "files": [list(file) for file in reader.files]} for reader in self.readers]
        steps = {} if self.pipeline is None else {"pipeline": [asdict(step) for step in self.pipeline]}
        return {"skipped": self.skipped.to_json(), "readers": readers} | steps

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
            readers = [
                ReaderRecord(**{**reader, "files": [FileRecord(*file) for file in reader["files"]]})
                for reader in content["readers"]
            ]
            pipeline = [StepRecord(**step) for step in content["pipeline"]] if "pipeline" in content else None
            return cls(readers, SkippedLines.from_json(content["skipped"]), pipeline)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                path,
                f" cannot be read ({error!r}). Restore it from a copy, or remove it: then nobody notices if the "
                "input of this finished rank changes.",
            ) from error


# Describes the steps before a runner, so that a finished rank can tell that it read its input through other steps.
#
# A false alarm would refuse a good run, so only what cannot change by itself is described. A step is named by its
# package and class. Settings are kept of steps that hold no state, and only plain values. A reader is named by what it
# is, because its options and files are recorded elsewhere.

STATELESS_PACKAGES = ("datatrove.pipeline.filters.", "datatrove.pipeline.formatters.", "datatrove.pipeline.extractors.")
"""Packages of datatrove whose steps look at one document at a time."""

_DOCUMENTS = "documents"
_NO_SETTINGS = {"name", "type", "stats"}
_SHOWN_CHARACTERS = 200


@dataclass
class StepRecord:
    """One step: package and class; "reader"; the name of a function; or "documents" for a list of documents."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def describe_pipeline(steps: Sequence[object], code_of: Callable[[object], dict[str, str]]) -> list[StepRecord]:
    """For the steps before a runner, as the executor has them. Each has a name, and the user's have their code.

    The package of a function is left out, because a script that is imported has another one, and so are the functions
    in which it is defined.

    Args:
        code_of: gives hashes of the code of a function or class, by name; none for those of packages.
    """
    return [_describe_listed(step, code_of) for step in steps]


def _describe_listed(step: object, code_of: Callable[[object], dict[str, str]]) -> StepRecord:
    while isinstance(step, functools.partial):
        step = step.func
    if not isinstance(step, PipelineStep) and not callable(step):
        return StepRecord(_DOCUMENTS)
    code = code_of(step if hasattr(step, "__qualname__") else type(step))
    if isinstance(step, BaseDiskReader):
        return StepRecord("reader", code)
    if isinstance(step, PipelineStep):
        cls = type(step)
        settings = {name: value for name, value in getattr(step, "__dict__", {}).items() if name not in _NO_SETTINGS}
        has_settings = cls.__module__.startswith(STATELESS_PACKAGES)
        # The package alone: a module may move from one release to the next.
        package = cls.__module__.partition(".")[0]
        return StepRecord(f"{package}.{cls.__qualname__}", (plain_settings(settings) if has_settings else {}) | code)
    name = getattr(step, "__qualname__", None)
    return StepRecord((name if isinstance(name, str) else type(step).__qualname__).rpartition("<locals>.")[2], code)


def plain_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The values that JSON can express, without secrets. A long value is replaced by its hash."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or any(True for _ in secrets_among(name, value)):
            continue
        try:
            data = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            continue
        short = len(data) <= _SHOWN_CHARACTERS
        found[name] = orjson.loads(data) if short else f"<{len(data)} bytes, hash {xxh3_64_hexdigest(data)}>"
    return found


def differences(then: Sequence[StepRecord], now: Sequence[StepRecord]) -> list[str]:
    """What differs, step by step; empty if nothing does. Settings that only one of both has are not compared."""
    if [step.name for step in then] != [step.name for step in now]:
        return [f"then: {_names(then)}", f"now: {_names(now)}"]
    return [
        f"{old.name}, {key}: {value!r} -> {new.settings[key]!r}"
        for old, new in zip(then, now, strict=True)
        for key, value in old.settings.items()
        if key in new.settings and new.settings[key] != value
    ]


def _names(steps: Sequence[StepRecord]) -> str:
    return " -> ".join(step.name for step in steps) or "none"
