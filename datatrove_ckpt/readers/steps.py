"""Describes the steps before a runner, so that a finished rank can tell that it read its input through other steps.

A false alarm would refuse a good run, so only what cannot change by itself is described. A step is named by its package
and class. Settings are kept of steps that hold no state, and only plain values. A reader is named by what it is,
because its options and files are recorded elsewhere.

A rank sees the steps only through their generators, which plain functions do not always leave. The executor has the
list itself: ``describe_pipeline`` is for that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.redaction import secrets_among

STATELESS_PACKAGES = ("datatrove.pipeline.filters.", "datatrove.pipeline.formatters.", "datatrove.pipeline.extractors.")
"""Packages of datatrove whose steps look at one document at a time."""

_UNKNOWN = "?"
_DOCUMENTS = "documents"
_NO_SETTINGS = {"name", "type", "stats"}
_SHOWN_CHARACTERS = 200


@dataclass
class StepRecord:
    """One step: package and class, or package and function; "reader"; or "?" for what has no name to compare.

    In the executor's list, a function has its name alone, and a list of documents is "documents".
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def describe_step(step: object) -> StepRecord:
    """For an element of a pipeline."""
    if isinstance(step, BaseDiskReader):
        return StepRecord("reader")
    if isinstance(step, PipelineStep):
        cls = type(step)
        has_settings = cls.__module__.startswith(STATELESS_PACKAGES)
        settings = {name: value for name, value in getattr(step, "__dict__", {}).items() if name not in _NO_SETTINGS}
        return StepRecord(_name(cls.__module__, cls.__qualname__), plain_settings(settings) if has_settings else {})
    if inspect.isgeneratorfunction(step) and inspect.isfunction(step):
        return StepRecord(_name(step.__module__, step.__qualname__))
    return StepRecord(_UNKNOWN)


def describe_generator(step: object, module: str, qualname: str) -> StepRecord:
    """For a generator that a step made: of ``step``, or of a function if that is None."""
    return StepRecord(_name(module, qualname)) if step is None else describe_step(step)


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
    name = getattr(step, "__qualname__", None)
    name = (name if isinstance(name, str) else type(step).__qualname__).rpartition("<locals>.")[2]
    record = describe_step(step) if isinstance(step, PipelineStep) else StepRecord(name)
    code = code_of(step if hasattr(step, "__qualname__") else type(step))
    return StepRecord(record.name, {**record.settings, **code})


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
    """What differs, step by step; empty if nothing does. Settings that only one of both names are not compared.

    A step without a name may be a function that returns the documents as they are, and so leaves no trace: "?" stands
    for any number of steps.
    """
    if not _alike([step.name for step in then], [step.name for step in now]):
        return [f"then: {_names(then)}", f"now: {_names(now)}"]
    return [
        f"{old.name}, {key}: {value!r} -> {new.settings[key]!r}"
        for old, new in _pairs(then, now)
        for key, value in old.settings.items()
        if key in new.settings and new.settings[key] != value
    ]


def _alike(then: Sequence[str], now: Sequence[str]) -> bool:
    if _UNKNOWN in then[:1]:
        return any(_alike(then[1:], now[start:]) for start in range(len(now) + 1))
    if _UNKNOWN in now[:1]:
        return any(_alike(then[start:], now[1:]) for start in range(len(then) + 1))
    if not then or not now:
        return not then and not now
    return then[0] == now[0] and _alike(then[1:], now[1:])


def _pairs(then: Sequence[StepRecord], now: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Records of the same step; without those of which nobody knows which is which."""
    for name in {step.name for step in then}:
        old, new = ([step for step in steps if step.name == name] for steps in (then, now))
        if len(old) == len(new):
            yield from zip(old, new, strict=True)


def _names(steps: Sequence[StepRecord]) -> str:
    return " -> ".join(step.name for step in steps) or "none"


def _name(module: str, qualname: str) -> str:
    # The package alone: a module may move from one release to the next.
    return f"{module.partition('.')[0]}.{qualname}"
