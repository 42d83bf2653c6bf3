"""Describes the user's code and values by dotted names and plain values, for ``run_identity.py``.

A function that was pickled is described as it was when the job was made, as long as its bytecode is still the same. A
pickle holds a function of the script, a nested function or a lambda by value: its source would have to be read from a
file that may have been edited, moved or deleted since. Of an imported function it holds the name alone, so such a
function is described as this process has imported it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import orjson

from datatrove_ckpt.checkpoint.identity import fields_without_secrets
from datatrove_ckpt.generation import code_hash
from datatrove_ckpt.generation.followed_code import follow
from datatrove_ckpt.generation.syntax import write_code
from datatrove_ckpt.generation.unstable_values import Variable

_MAX_WRAPPERS = 20


class Hashes(Protocol):
    """The module ``code_hash`` or ``code_hash_0_1``: how functions and types are described."""

    def code_hash(self, function: types.FunctionType) -> str: ...
    def function_value(self, function: types.FunctionType) -> str: ...
    def type_name(self, cls: type) -> str: ...
    def closure_names(self, function: types.FunctionType) -> list[str]: ...
    def global_names(self, function: types.FunctionType) -> list[str]: ...


class CodeDescriber:
    """Describes a rollout and its shared context, once.

    Args:
        hashes: how functions and types are described.
        made: the description when the job was made; empty if it is made now.
        made_bytecode: the digests of the functions when the job was made, by field. One that is missing (of a job that
            an earlier version made) is taken to be the same.

    Attributes:
        bytecode: the digests of the functions, by field.
        variables: where plain values come from, by field.
    """

    def __init__(self, hashes: Hashes, made: Mapping[str, Any], made_bytecode: Mapping[str, str]) -> None:
        self._hashes = hashes
        self._made = made
        self._made_bytecode = made_bytecode
        self.bytecode: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self._functions: list[types.FunctionType] = []

    def code(self, rollout_fn: Any, shared_context: Any) -> dict[str, Any]:
        # The identity is written to run.json and executor.json, where secrets must not be.
        return fields_without_secrets(dict([*self._callable("rollout_fn", rollout_fn), *self._context(shared_context)]))

    def followed(self) -> dict[str, Any]:
        """What the code that ``code`` has described uses of other modules."""
        fields = {}
        for name, value in follow(self._functions):
            if not isinstance(value, types.FunctionType):
                fields[name] = value
            # Without its source, code would have another hash on another Python.
            elif not code_hash.is_bytecode(found := self._hash(f"{name} code", value, self._hashes.code_hash)):
                fields[f"{name} code"] = found
        return fields_without_secrets(fields)

    def _hash(self, field: str, function: types.FunctionType, describe: Callable[[types.FunctionType], str]) -> str:
        """The function's hash as ``field`` has it.

        What came here by value has the hash that it had when the job was made: its file may have changed since.
        """
        self._functions.append(function)
        bytecode = self.bytecode[field] = _digest(function)
        known = self._made.get(field)
        is_the_same = isinstance(known, str) and self._made_bytecode.get(field, bytecode) == bytecode
        if is_the_same and not _is_imported(function):
            return str(known)
        value = describe(function)
        return str(known) if is_the_same and code_hash.is_bytecode(value) else value

    def _context(self, context: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(context, dict):
            for name, value in context.items():
                yield f"shared_context.{name}", self._value(f"shared_context.{name}", value)
        elif inspect.isroutine(context) or isinstance(context, functools.partial):
            yield from self._callable("shared_context", context)
        elif context is not None:
            yield "shared_context", type(context).__qualname__

    def _callable(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, functools.partial):
            yield from self._callable(name, thing.func)
            for index, value in enumerate(thing.args):
                yield f"{name}.{index}", self._value(f"{name}.{index}", value)
            for key, value in thing.keywords.items():
                yield f"{name}.{key}", self._value(f"{name}.{key}", value)
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
            yield f"{name}.{key}", self._value(f"{name}.{key}", value)
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
        yield f"{name} code", self._hash(f"{name} code", function, self._hashes.code_hash)
        for key, value in _defaults(function):
            self.variables[f"{name}.{key}"] = Variable(function, key, is_global=False, is_default=True)
            yield f"{name}.{key}", self._value(f"{name}.{key}", value)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        closure = [(key, _content(cells[key])) for key in self._hashes.closure_names(function) if key in cells]
        of_module = [(key, function.__globals__[key]) for key in self._hashes.global_names(function)]
        for number, (key, value) in enumerate([*closure, *of_module]):
            if isinstance(value, types.FunctionType):
                if value.__module__ == function.__module__ and value.__code__ not in seen:
                    yield from self._function(f"{name}.{key}", value, seen)
            elif _is_json(value):
                self.variables[f"{name}.{key}"] = Variable(function, key, number >= len(closure))
                yield f"{name}.{key}", _json(value)

    def _value(self, field: str, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._hash(field, value, self._hashes.function_value)
        return plain_value(value, self._hashes)


def plain_value(value: Any, hashes: Hashes) -> Any:
    """A value that can be kept and compared: itself if JSON can express it, else its code or its type."""
    if _is_json(value):
        return _json(value)
    if isinstance(value, types.FunctionType):
        return hashes.function_value(value)
    return f"<{hashes.type_name(type(value))}>"


def _digest(function: types.FunctionType) -> str:
    """Of the bytecode, which names its Python version. A pickle by value keeps it as it is."""
    code = f"{sys.implementation.cache_tag} {write_code(function.__code__)}"
    return hashlib.sha256(code.encode("ascii")).hexdigest()[:32]


def _is_imported(function: types.FunctionType) -> bool:
    """Whether an import gives the function. Then a pickle holds its name alone, and it is what is imported now."""
    if function.__module__ in ("__main__", "__mp_main__"):
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    for _ in range(_MAX_WRAPPERS):
        if found is None or found is function:
            break
        found = getattr(found, "__wrapped__", None)
    return found is function


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
