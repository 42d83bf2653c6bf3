"""Describes the steps before a runner, so that a finished rank notices other steps.

A false alarm would refuse a good run, so the description has only a step's package and class, and
plain settings of stateless steps.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import secrets_among

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
    described: Callable[..., object] = (
        step if callable(step) and hasattr(step, "__qualname__") else type(step)
    )
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
    settings: JsonObject = {}
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
    """Lists the differences, step by step. Settings that only one side has are not compared."""
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
