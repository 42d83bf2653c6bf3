"""Looks at what a rollout was given: values of partials, closures and attributes, and the functions
and classes of the user in them.
"""

from __future__ import annotations

import argparse
import collections
import functools
import linecache
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_statements import CELL, digest, write_constant

PIPELINE = ("datatrove", "datatrove_ckpt")  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PACING = re.compile(r"(_?asyncio|concurrent|logging|loguru|_?queue|_?threading|_thread|weakref)\b")
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_BASES = (str, bytes, int, float)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_MAX_OBJECTS = 5000
_MAX_EXACT = 2**53
_DEEPEST = 100
"""Containers in each other."""


class Root(NamedTuple):
    """A function, class or module of the user that the rollout was given.

    Attributes:
        label: its field, and the beginning of the fields of its variables.
        name: the qualified name; empty for a module.
    """

    label: str
    file: str
    name: str
    thing: Any


class Given(NamedTuple):
    """What things were given.

    Attributes:
        fields: values, by the path to them.
        roots: the user's code in them.
        variables: that functions close over, by the name of the function; of these only the parts
            count that it names, if it takes no more.
    """

    fields: dict[str, object]
    roots: list[Root]
    variables: dict[str, str]


def look_at(things: Mapping[str, object]) -> Given:
    given = Given({}, [], {})
    waiting: list[tuple[str, Any, Any]] = [(label, one, None) for label, one in things.items()]
    seen: dict[int, object] = {}
    for label, thing, owner in waiting:
        if id(thing) in seen or len(seen) > _MAX_OBJECTS or _PACING.match(type(thing).__module__):
            continue
        root = _root(label, thing)
        if root is not None:
            given.roots.append(root)
        if isinstance(owner, types.FunctionType) and isinstance(thing, dict | argparse.Namespace):
            given.variables[label] = owner.__code__.co_name
        elif "." in label or not isinstance(thing, dict):
            with suppress(TypeError):
                given.fields[label] = plain(thing)
                continue
        seen[id(thing)] = thing  # kept, so that no other object gets the id of one
        parts: Mapping[Any, object] = {}
        with suppress(Exception):  # the user's objects may do anything
            parts = _parts(thing, root is not None or "." not in label)
        is_ready_made = root is None and "." not in label and not isinstance(thing, dict)
        if is_ready_made and not isinstance(thing, functools.partial | types.MethodType):
            given.fields[label] = type_name(type(thing))
        elif not parts and root is None and not isinstance(thing, dict):
            given.fields[label] = written(thing)
        waiting += [(f"{label}.{name}".rstrip("."), part, thing) for name, part in parts.items()]
    return given


@functools.cache
def is_of_user(file: str) -> bool:
    """Returns whether a file is not of an installed package, the standard library or this
    package.
    """
    if CELL.match(file):
        return True
    pipeline = (getattr(sys.modules.get(name), "__file__", None) for name in PIPELINE)
    folders = [os.path.dirname(one) + os.sep for one in pipeline if one]  # noqa: PTH120
    return not (
        file.startswith(("<", _STANDARD_LIBRARY, *folders)) or _PACKAGES.search(file) is not None
    )


def _root(label: str, thing: Any) -> Root | None:
    name = ""
    if isinstance(thing, types.FunctionType):
        name = thing.__code__.co_qualname
        file: str | None = thing.__code__.co_filename
    elif isinstance(thing, types.ModuleType):
        file = getattr(thing, "__file__", None)
    else:
        if not isinstance(thing, type):
            thing = type(thing)
        name = thing.__qualname__
        file = getattr(sys.modules.get(thing.__module__), "__file__", None)
        if file is None or not is_of_user(file):  # a class of a notebook, or of a pickle
            codes = [getattr(one, "__code__", None) for one in vars(thing).values()]
            files = [code.co_filename for code in codes if code is not None]
            file = next(filter(is_of_user, files), file or next(iter(files), None))
    if file is None:
        return None
    if not file.startswith("<"):
        file = os.path.abspath(file)  # noqa: PTH100
    # The package of a rollout is the user's even if it is installed.
    is_rollout = "." not in label and not hasattr(thing, "__wrapped__")
    is_installed = is_rollout and _PACKAGES.search(file) is not None
    if is_of_user(file) or is_installed or file == "<string>":
        return Root(label, file, name, thing)
    return None


# values ------------------------------------------------------------------------------------------


def plain(value: Any, depth: int = _DEEPEST) -> object:
    """Returns a value of plain types as JSON that is equal in every process.

    Raises:
        TypeError: the value is not of plain types, or is deeper than ``depth``.
    """
    kind = type(value)
    if not depth:
        raise TypeError(kind)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()  # of half of a pair
    if isinstance(value, PurePath):
        return f"path {value}"
    if value is None or kind is bool or (kind is int and abs(value) < _MAX_EXACT):
        return value
    if kind is float and math.isfinite(value) and not value.is_integer():
        return value
    if kind in (int, float, complex, range, slice, type(...)):
        return f"{kind.__name__} {value!r}"
    if kind is dict:
        names = [name if type(name) is str else f"{type(name).__name__} {name}" for name in value]
        content = {
            name: plain(one, depth - 1) for name, one in zip(names, value.values(), strict=True)
        }
        if names != sorted(names):
            content["(order)"] = ", ".join(names)
        return content
    if kind not in _CONTAINERS:
        raise TypeError(kind)
    items = [plain(one, depth - 1) for one in value]
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    if kind is list:
        return items
    return {f"({kind.__name__})": items}


def written(value: Any) -> object:
    """Returns a value as JSON: its content if that is known, or its type."""
    name = type_name(type(value))
    with suppress(TypeError):
        return plain(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    with suppress(AttributeError):
        return f"{value.__module__}.{value.__qualname__}"
    with suppress(TypeError, ValueError, BufferError):
        view = memoryview(value)  # an array, for example
        if "O" not in view.format:
            return f"{name} {view.format} {view.shape} {digest(view.tobytes().hex())}"
    if isinstance(value, _BASES) or name.partition(".")[0] in sys.stdlib_module_names:
        return f"{name} {re.split(' at 0x', repr(value))[0]}"
    return f"<{name}>"


def _parts(thing: Any, is_users: bool) -> Mapping[Any, object]:
    """Returns what an object is made of, by name."""
    if isinstance(thing, functools.partial):
        return {"": thing.func, **dict(enumerate(thing.args)), **thing.keywords}
    if isinstance(thing, types.MethodType | types.BuiltinMethodType):
        if isinstance(thing.__self__, types.ModuleType | None):
            return {}
        return {"(method)": thing.__name__, "": thing.__self__}
    if isinstance(thing, types.FunctionType):
        return {**dict(cells(thing)), **vars(thing)}
    parts: dict[Any, object] = {}
    if isinstance(thing, type | types.ModuleType):
        return parts
    if isinstance(thing, Mapping):
        parts |= {str(name): part for name, part in thing.items()}
    elif isinstance(thing, _CONTAINERS):
        content: Iterable[object] = thing
        if isinstance(thing, set | frozenset):
            content = sorted(thing, key=repr)
        parts |= dict(enumerate(content))
    elif is_users and isinstance(thing, _BASES):
        base: Any = next(base for base in _BASES if isinstance(thing, base))
        parts["()"] = base(thing)
    if is_users or isinstance(thing, _NAMESPACES) or hasattr(thing, "__wrapped__"):
        state = object.__getstate__(thing)
        for one in state if isinstance(state, tuple) else (state,):
            parts |= one or {}
    return parts


def cells(function: types.FunctionType) -> list[tuple[str, object]]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            found.append((name, cell.cell_contents))
    return found


def type_name(cls: type) -> str:
    """Module and name, without private modules such as ``pathlib._local`` of Python 3.13."""
    module = str(cls.__module__)
    if module.partition(".")[0] in sys.stdlib_module_names:
        module = re.sub(r"\._.*", "", module)
    name = f"{module}.{cls.__qualname__}"
    # Optional[int] and int | None: two types before Python 3.14, one type since.
    if name in ("typing._UnionGenericAlias", "types.UnionType"):
        return "typing.Union"
    return name


# what a pickle holds -----------------------------------------------------------------------------


def fingerprint(thing: Any) -> str:
    """Identifies the function or object that was described, by the code that a pickle holds, and
    constants.
    """
    if isinstance(thing, functools.partial):
        given = [thing.func, *thing.args, *thing.keywords, *thing.keywords.values()]
        return digest("partial", *map(fingerprint, given))
    if isinstance(thing, types.MethodType):
        return digest(fingerprint(thing.__self__), thing.__name__)
    if isinstance(thing, types.FunctionType):
        if is_importable(thing):
            return f"{thing.__module__}.{thing.__qualname__}"
        # Which may hold the function itself.
        around = (getattr(one, "__code__", one) for _, one in cells(thing))
        return digest(write_constant(thing.__code__), *map(fingerprint, around))
    if isinstance(thing, types.CodeType | str | int | float | bytes | None):
        return write_constant(thing)
    return type(thing).__qualname__


def is_importable(function: types.FunctionType) -> bool:
    """Whether an import gives the function, so that a pickle holds only its name."""
    found: Any = sys.modules.get(function.__module__)
    if function.__module__ in MAIN:
        return False
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    while found is not None and found is not function:
        found = getattr(found, "__wrapped__", None)
    return found is function
