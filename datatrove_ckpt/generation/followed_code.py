"""Follows a rollout into the user's other modules: functions and classes that it calls there, and texts that it uses.

    followed                                            not followed
    functions and methods of the user's modules         installed packages, the standard library, this package
    constants that are literals (a prompt, a number)    values that are computed: they may differ by machine
    through each other, and through ``module.name``     what is looked up by a text, or imported inside a function

What cannot be followed is left out, never guessed: a good run must not be refused.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from datatrove_ckpt.checkpoint.identity import FOLLOWED
from datatrove_ckpt.generation.code_hash import global_names, is_of_user, loaded_names
from datatrove_ckpt.generation.syntax import nested_codes
from datatrove_ckpt.generation.unstable_values import Source


class Followed(NamedTuple):
    """Code or a constant that was reached.

    Attributes:
        field: its name in the identity.
        value: a function, or a plain value.
    """

    field: str
    value: Any


def follow(functions: Iterable[types.FunctionType]) -> Iterator[Followed]:
    """What these functions use of the user's modules, without the functions themselves and their own constants."""
    waiting = list(functions)
    first = {function.__code__ for function in waiting}
    seen = set(first)
    named: set[str] = set()
    while waiting:
        function = waiting.pop(0)
        is_first = function.__code__ in first
        found = [] if is_first else [Followed(f"{_module(function)}.{function.__qualname__}", function)]
        for value in _values(function):
            for used in _functions(value):
                if used.__code__ not in seen:
                    seen.add(used.__code__)
                    waiting.append(used)
        found += _constants(function, is_first)
        for field, value in found:
            if field not in named:
                named.add(field)
                yield Followed(f"{FOLLOWED}{field}", value)


def _values(function: types.FunctionType) -> Iterator[Any]:
    """What a function names, and holds from the functions around it."""
    for name in sorted(loaded_names(function)):
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType):
            yield from (one for _, one in _attributes(function, value))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _attributes(function: types.FunctionType, module: types.ModuleType) -> list[tuple[str, Any]]:
    """``module.name`` in the function's code, if it is a module of the user."""
    if not is_of_user(getattr(module, "__file__", None), module.__name__):
        return []
    names = {name for code in nested_codes(function.__code__) for name in code.co_names}
    return [(name, vars(module)[name]) for name in sorted(names & vars(module).keys())]


def _constants(function: types.FunctionType, is_first: bool) -> Iterator[Followed]:
    """Literals of modules whose constants the description of the rollout does not have."""
    if not is_first and "<" not in function.__code__.co_filename:
        for name in global_names(function):
            value = function.__globals__[name]
            if _is_literal(function.__code__.co_filename, function.__globals__, name, value):
                yield Followed(f"{_module(function)}.{name}", value)
    for name in sorted(loaded_names(function)):
        module = function.__globals__.get(name)
        if isinstance(module, types.ModuleType):
            for attribute, value in _attributes(function, module):
                if _is_literal(module.__file__ or "", vars(module), attribute, value):
                    yield Followed(f"{module.__name__}.{attribute}", value)


def _is_literal(file: str, namespace: dict[str, Any], name: str, value: Any) -> bool:
    return isinstance(value, str | int | float) and Source.of(file, namespace, name).is_literal()


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The user's functions that a value is or has."""
    if isinstance(value, types.FunctionType):
        if is_of_user(value.__code__.co_filename, value.__module__):
            yield value
    elif isinstance(value, type):
        module = sys.modules.get(value.__module__)
        if is_of_user(getattr(module, "__file__", None), value.__module__):
            for _, one in sorted(vars(value).items()):
                found = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                yield from _functions(found) if isinstance(found, types.FunctionType) else ()
            for base in value.__bases__:
                yield from _functions(base)
    elif not isinstance(value, types.ModuleType):
        yield from _functions(type(value))


def _module(function: types.FunctionType) -> str:
    return "__main__" if function.__module__ == "__mp_main__" else function.__module__
