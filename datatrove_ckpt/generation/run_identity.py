"""What makes two runs the same run: a flat dict of plain values, whose names appear in ``CheckpointMismatch``.

Settings that cannot change an answer (concurrency, timeouts, parallelism, log folders) are left out, so they may
change freely. A rollout function is described by its code (see ``code_hash.py``), the variables of enclosing functions,
its default arguments, the plain values among the globals of its module that it names (a PROMPT constant, for example),
and the functions of its own module that it calls. Of a secret (see ``redaction.py``) the hash is kept.

Limits: what the rollout imports from other modules or reads from files is not seen. Of a value that JSON cannot express
(a set, a path, an object) only the type is seen. Lists and dicts are taken as they were when the step was made, because
a rollout may use one as a cache.

The description is the same on every supported Python version. That of release 0.1.0 was not. It is made as well, so
that a checkpoint of 0.1.0 continues on the Python version that it was made with.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.identity import RunIdentity, fields_without_secrets
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.generation import code_hash, code_hash_0_1

# The flags of a server that change its answers.
_ANSWERING_FLAGS = {
    "chat-template",
    "dtype",
    "generation-config",
    "hf-overrides",
    "lora-modules",
    "override-generation-config",
    "quantization",
    "reasoning-parser",
    "revision",
    "rope-scaling",
    "seed",
    "server-script",
    "tokenizer",
    "tool-call-parser",
}
_VERSION = 2
"""Version of the description, in ``run.json``. Release 0.1.0 wrote none."""
_BYTECODE_NOTE = "without its source, code is compared by its bytecode, which differs between Python versions"
_0_1_NOTE = (
    "release 0.1.0 hashed code in a way that differs between Python versions; if only Python has changed, continue the "
    "run once with the Python version that made the checkpoint, or set accept_changes=True"
)


@dataclass(frozen=True)
class CodeIdentity:
    """What the user's code adds to a run's identity.

    A step keeps one that was made when the step was made, and is pickled with it.
    """

    fields: dict[str, Any]
    fields_0_1: dict[str, Any]
    """The same code as release 0.1.0 described it."""


def code_identity(rollout_fn: Any, shared_context: Any) -> CodeIdentity:
    """Describes the user's code as it is now."""
    return CodeIdentity(
        fields=_NOW.code(rollout_fn, shared_context),
        fields_0_1=_AS_0_1_0.code(rollout_fn, shared_context),
    )


def run_identity(
    code: CodeIdentity,
    code_when_made: CodeIdentity | dict[str, Any],
    config: InferenceConfig,
    writer: DiskWriter,
    records_per_chunk: int,
    metadata_key: str,
    world_size: int,
    how_to_accept: str,
) -> RunIdentity:
    """The identity of a run, as plain JSON values.

    Args:
        code: ``code_identity`` now.
        code_when_made: ``code_identity`` when the step was made; a dict in a step that was pickled by 0.1.0.
    """
    made = _from_0_1(code_when_made, code) if isinstance(code_when_made, dict) else code_when_made
    output = {
        "metadata_key": metadata_key,
        "records_per_chunk": records_per_chunk,
        "tasks": world_size,
        "output_writer": type(writer).__name__,
        "output_folder": writer.output_folder.resolve_paths(""),
        "output_filename": writer.output_filename.template,
    }
    fields = {
        "identity_version": _VERSION,
        **_NOW.config(config),
        **_code_fields(code.fields, made.fields),
        **output,
    }
    fields_0_1 = {
        **_AS_0_1_0.config(config),
        **_code_fields(code.fields_0_1, made.fields_0_1),
        **output,
    }
    functions, functions_0_1 = _function_notes(fields), _function_notes(fields_0_1)
    bytecode = {name: _BYTECODE_NOTE for name, value in fields.items() if code_hash.is_bytecode(value)}
    hashes_0_1 = {name: _0_1_NOTE for name, value in fields_0_1.items() if value != fields.get(name)}
    earlier = RunIdentity(fields_0_1, _joined(functions_0_1, hashes_0_1))
    return RunIdentity(fields, _joined(functions, bytecode), earlier, how_to_accept)


def _function_notes(fields: dict[str, Any]) -> dict[str, str]:
    """Which function each hash of code describes."""
    notes = {}
    for name in fields:
        place, is_code = name.removesuffix(" code"), name.endswith(" code")
        owner, _, last = place.rpartition(".")
        if is_code:
            known = fields.get(place) or (f"{fields[owner]}.{last}" if last == "__call__" else last)
            notes[name] = f"code of the function {known}"
    return notes


def _joined(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    return {name: "; ".join(filter(None, [first.get(name), second.get(name)])) for name in {**first, **second}}


_NAMES = ("rollout_fn", "shared_context")


def _code_fields(now: dict[str, Any], when_made: dict[str, Any]) -> dict[str, Any]:
    """Code and constants as they are now: a worker unpickles the step, and may import a newer module with it.

    Lists, dicts, and the attributes of an object are settings when the step is made, and state later. If no code has
    changed, what is missing now was lost on the way to a worker: a function of the script is pickled by value, without
    the name and module that ``functools.wraps`` gave it.
    """
    kept = {name: value for name, value in when_made.items() if isinstance(value, list | dict)}
    if _is_object(when_made):
        attributes = [name for name in when_made if name.startswith("rollout_fn.") and not name.endswith(" code")]
        kept |= {name: when_made[name] for name in attributes}
        now = {name: value for name, value in now.items() if name in when_made}
    if all(now.get(name, value) == value for name, value in when_made.items() if name.endswith(" code")):
        kept |= {name: when_made[name] for name in when_made if name not in now or name in _NAMES}
    return {**now, **kept}


def _from_0_1(when_made: dict[str, Any], now: CodeIdentity) -> CodeIdentity:
    """A step that 0.1.0 pickled has its description of the code. What has not changed since has today's form, too."""
    when_made = fields_without_secrets(when_made)
    fields = {
        name: now.fields[name] if value == now.fields_0_1.get(name) else value
        for name, value in when_made.items()
        if name in now.fields
    }
    return CodeIdentity(fields, when_made)


def _is_object(code: dict[str, Any]) -> bool:
    """The rollout is an object of a class with ``__call__``, not a function."""
    return "rollout_fn code" not in code


def _json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def _is_json(value: Any) -> bool:
    if isinstance(value, types.ModuleType | type) or callable(value):
        return False
    try:
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return False
    return True


class _Hashes(Protocol):
    """The module ``code_hash`` or ``code_hash_0_1``: how functions and types are described."""

    def code_hash(self, function: types.FunctionType) -> str: ...
    def function_value(self, function: types.FunctionType) -> str: ...
    def type_name(self, cls: type) -> str: ...
    def closure_names(self, function: types.FunctionType) -> list[str]: ...
    def global_names(self, function: types.FunctionType) -> list[str]: ...


class _Describer:
    """Describes user code and settings by dotted names and plain values."""

    def __init__(self, hashes: _Hashes) -> None:
        self._hashes = hashes

    def config(self, config: InferenceConfig) -> dict[str, Any]:
        flags = {name.replace("_", "-"): value for name, value in (config.model_kwargs or {}).items()}
        return {
            "model": config.model_name_or_path,
            "canned_answers": config.server_type == "dummy",
            "use_chat": config.use_chat,
            "default_generation_params": self._value(config.default_generation_params),
            "model_kwargs": {name: self._value(flags[name]) for name in sorted(_ANSWERING_FLAGS & set(flags))},
            "rollouts_per_document": config.rollouts_per_document,
        }

    def code(self, rollout_fn: Any, shared_context: Any) -> dict[str, Any]:
        # The identity is written to run.json and executor.json, where secrets must not be.
        return fields_without_secrets(dict([*self._callable("rollout_fn", rollout_fn), *self._context(shared_context)]))

    def _context(self, context: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(context, dict):
            for name, value in context.items():
                yield f"shared_context.{name}", self._value(value)
        elif inspect.isroutine(context) or isinstance(context, functools.partial):
            yield from self._callable("shared_context", context)
        elif context is not None:
            yield "shared_context", type(context).__qualname__

    def _callable(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, functools.partial):
            yield from self._callable(name, thing.func)
            for index, value in enumerate(thing.args):
                yield f"{name}.{index}", self._value(value)
            for key, value in thing.keywords.items():
                yield f"{name}.{key}", self._value(value)
        elif isinstance(thing, types.MethodType):
            yield from self._callable(name, thing.__self__)
            yield from self._callable(f"{name}.{thing.__name__}", thing.__func__)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(name, thing, set())
        else:
            yield from self._object(name, thing)

    def _object(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        cls = type(thing)
        yield name, self._hashes.type_name(cls)
        for key, value in sorted(getattr(thing, "__dict__", {}).items()):
            yield f"{name}.{key}", self._value(value)
        call = cls.__dict__.get("__call__")
        # The rollouts of this package are described by their settings: a new release must not end all runs.
        if isinstance(call, types.FunctionType) and _package(cls.__module__) != _package(__name__):
            yield from self._function(f"{name}.__call__", call, set())

    def _function(
        self, name: str, function: types.FunctionType, seen: set[types.CodeType]
    ) -> Iterator[tuple[str, Any]]:
        if not seen:
            yield name, function.__qualname__
        seen.add(function.__code__)
        yield f"{name} code", self._hashes.code_hash(function)
        for key, value in _defaults(function):
            yield f"{name}.{key}", self._value(value)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        values = [(key, _content(cells[key])) for key in self._hashes.closure_names(function) if key in cells]
        values += [(key, function.__globals__[key]) for key in self._hashes.global_names(function)]
        for key, value in values:
            if isinstance(value, types.FunctionType):
                if value.__module__ == function.__module__ and value.__code__ not in seen:
                    yield from self._function(f"{name}.{key}", value, seen)
            elif _is_json(value):
                yield f"{name}.{key}", _json(value)

    def _value(self, value: Any) -> Any:
        """A value that can be kept and compared: itself if JSON can express it, else its code or its type."""
        if _is_json(value):
            return _json(value)
        if isinstance(value, types.FunctionType):
            return self._hashes.function_value(value)
        return f"<{self._hashes.type_name(type(value))}>"


_NOW = _Describer(code_hash)
_AS_0_1_0 = _Describer(code_hash_0_1)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
