"""What makes two runs the same run: a flat dict of plain values, whose names appear in ``CheckpointMismatch``.

Settings that cannot change an answer (concurrency, timeouts, parallelism, log folders) are left out, so they may
change freely. Of a rollout function we take its code (comments and layout do not count), the values it closes over,
the plain values among the module's globals it names (a PROMPT constant, say), and the functions of its own module it
calls. Where a name says that a value is a secret, a hash of it is taken. That is the limit: what it imports from other
modules, or reads from files, is not seen. Lists and dicts are taken as they were when the step was made: a rollout may
use one as a cache.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import orjson
import xxhash
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.config import InferenceConfig

_SECRET = re.compile(r"(?i)(^|[._ ])(\w*_)?(api_?key|key|token|secret|password|passwd|credentials?)$")
# Of the server's own flags, those that change what it answers.
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


def code_identity(rollout_fn: Any, shared_context: Any) -> dict[str, Any]:
    """The part of the identity that comes from the user's code, as it is now."""
    return _hide_secrets({**dict(describe("rollout_fn", rollout_fn)), **dict(_describe_context(shared_context))})


def run_identity(
    code: dict[str, Any],
    code_when_made: dict[str, Any],
    config: InferenceConfig,
    writer: DiskWriter,
    records_per_chunk: int,
    metadata_key: str,
    world_size: int,
) -> dict[str, Any]:
    """The identity of a run, as plain JSON values.

    ``code`` and ``code_when_made``: ``code_identity`` now, and when the step was made.
    """
    # Code and constants as they are now: a worker unpickles the step, and may import a newer module with it.
    changing = {name: value for name, value in code_when_made.items() if isinstance(value, list | dict)}
    # An object's attributes are its settings when the step is made, and its state later.
    of_object = [name for name in code_when_made if name.startswith("rollout_fn.") and _is_object(code_when_made)]
    changing |= {name: code_when_made[name] for name in of_object if not name.endswith(" code")}
    if _is_object(code_when_made):
        code = {name: value for name, value in code.items() if name in code_when_made}
    return {
        "model": config.model_name_or_path,
        "canned_answers": config.server_type == "dummy",
        "use_chat": config.use_chat,
        "default_generation_params": _value(config.default_generation_params),
        "model_kwargs": _answering_flags(config.model_kwargs or {}),
        "rollouts_per_document": config.rollouts_per_document,
        **code,
        **changing,
        "metadata_key": metadata_key,
        "records_per_chunk": records_per_chunk,
        "tasks": world_size,
        "output_writer": type(writer).__name__,
        "output_folder": writer.output_folder.resolve_paths(""),
        "output_filename": writer.output_filename.template,
    }


def _answering_flags(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in model_kwargs.items()}
    return {name: _value(value) for name, value in sorted(named.items()) if name in _ANSWERING_FLAGS}


def _describe_context(context: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(context, dict):
        for name, value in context.items():
            yield f"shared_context.{name}", _value(value)
    elif inspect.isroutine(context) or isinstance(context, functools.partial):
        yield from describe("shared_context", context)
    elif context is not None:
        yield "shared_context", type(context).__qualname__


def describe(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What can be told of a callable: pairs of a dotted name and a plain value."""
    if isinstance(thing, functools.partial):
        yield from describe(name, thing.func)
        for index, value in enumerate(thing.args):
            yield f"{name}.{index}", _value(value)
        for key, value in thing.keywords.items():
            yield f"{name}.{key}", _value(value)
    elif isinstance(thing, types.MethodType):
        yield from describe(name, thing.__self__)
        yield from describe(f"{name}.{thing.__name__}", thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _describe_function(name, thing, set())
    else:
        yield from _describe_object(name, thing)


def _is_object(code: dict[str, Any]) -> bool:
    """The rollout is an object of a class with ``__call__``, not a function."""
    return "rollout_fn code" not in code


def _hide_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """The identity is kept in run.json and executor.json, where secrets have no place."""
    return {name: _hashed(value) if _SECRET.search(name) else value for name, value in fields.items()}


def _hashed(value: Any) -> str:
    return f"hash {xxhash.xxh3_128_hexdigest(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))}"


def _describe_object(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    cls = type(thing)
    yield name, f"{cls.__module__}.{cls.__qualname__}"
    for key, value in sorted(getattr(thing, "__dict__", {}).items()):
        yield f"{name}.{key}", _value(value)
    call = cls.__dict__.get("__call__")
    # Our own rollouts are described by their settings: a new release must not end everybody's runs.
    if isinstance(call, types.FunctionType) and cls.__module__.partition(".")[0] != __package__:
        yield from _describe_function(f"{name}.__call__", call, set())


def _describe_function(name: str, function: types.FunctionType, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    seen.add(function.__code__)
    if not seen - {function.__code__}:
        yield name, function.__qualname__
    yield f"{name} code", _code_hash(function)
    for key, value in _defaults(function):
        yield f"{name}.{key}", _value(value)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    values = [(key, _cell(cell)) for key, cell in cells]
    values += [(key, function.__globals__[key]) for key in _constants(function)]
    for key, value in values:
        if isinstance(value, types.FunctionType):
            if value.__module__ == function.__module__ and value.__code__ not in seen:
                yield from _describe_function(f"{name}.{key}", value, seen)
        elif _is_plain(value):
            yield f"{name}.{key}", _value(value)


def _cell(cell: types.CellType) -> Any:
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


def _constants(function: types.FunctionType) -> list[str]:
    """The module's globals that the function names, but those that some function assigns: caches, counters."""
    own = {name for code in _codes(function.__code__) for name in code.co_names}
    module = [value for value in function.__globals__.values() if isinstance(value, types.FunctionType)]
    assigned = {
        instruction.argval
        for other in (function, *module)
        if other.__module__ == function.__module__
        for code in _codes(other.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_GLOBAL"
    }
    return sorted(name for name in own - assigned if name in function.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code_hash(function: types.FunctionType) -> str:
    """xxh64 of the function's source without comments and layout, or of its bytecode where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        return str(xxhash.xxh3_64_hexdigest(ast.unparse(tree).encode()))
    except (OSError, TypeError, SyntaxError):
        return _bytecode_hash(function.__code__)


def _bytecode_hash(code: types.CodeType) -> str:
    parts = [code.co_code, repr(code.co_names).encode(), repr(code.co_varnames).encode()]
    for constant in code.co_consts:
        nested = isinstance(constant, types.CodeType)
        parts.append((_bytecode_hash(constant) if nested else repr(constant)).encode())
    return str(xxhash.xxh3_64_hexdigest(b"\0".join(parts)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, types.ModuleType | type) or callable(value):
        return False
    try:
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return False
    return True


def _value(value: Any) -> Any:
    """A value as it can be kept and compared: itself where JSON can say it, else what its type and code say."""
    if _is_plain(value):
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} {_code_hash(value)}"
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
