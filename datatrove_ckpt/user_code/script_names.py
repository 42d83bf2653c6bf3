"""Collects the names that a script's function needs, for a pickle that another program loads.

dill pickles a function of ``__main__`` by value, but not the module's other functions and
constants. So a step also carries what its functions name.

    the program that unpickles           what happens
    imports the script (multiprocess)    nothing: the names are there, or are not
                                         (``nothing_carried``)
    cannot import it (a notebook)        ``__main__`` gets the names
    is another program                   ``__main__`` gets the names; it has begun and no longer
                                         needs its own

Ray's pickles bring the names themselves. Secrets stay behind, because others may read a pickle's
file. A value is pickled to nowhere: this finds the functions in it, whose names count, and secrets,
by ``is_surely_secret`` and environment variables like HF_TOKEN.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from datatrove_ckpt.common import redaction
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code.description import cells
from datatrove_ckpt.user_code.statements import loaded_names

_collecting = threading.local()


class ScriptNames(NamedTuple):
    """Part of a pickle.

    Attributes:
        left: why names stay behind, by name.
    """

    file: str | None
    values: dict[str, object]
    left: dict[str, str]


def collect(*things: object) -> ScriptNames | None:
    """Returns the names of the script that the functions in these objects use, directly or not;
    None if there are none, or the pickle is probably not for a file.

    Raises:
        ConfigError: a pickle of the objects would hold a secret.
    """
    ray = sys.modules.get("ray")
    is_by_ray = ray is not None and ray.is_initialized()
    if is_by_ray or getattr(_collecting, "on", False):
        return None
    main = sys.modules["__main__"]
    found = ScriptNames(getattr(main, "__file__", None), {}, {})
    with _not_collecting():
        look = _PickleScan("")
        with suppress(Exception):  # the pickle itself says why it cannot be made
            look.pickle(things)
        if look.found:
            raise ConfigError(
                "rollout, shared_context or config: what is pickled with the job holds what looks "
                f"like a secret: {', '.join(look.found)}. It would be in a file that others may "
                "read, so nothing was written. Leave it out, and let the rollout read it where the "
                "task runs, from an environment variable, for example."
            )
        waiting = sorted(look.names)
        for name in waiting:
            value = vars(main)[name]
            look = _PickleScan(name)
            if reason := _stays(look, value):
                found.left[name] = reason
            else:
                found.values[name] = value
                waiting += sorted(look.names - {*waiting})
    if waiting:
        return found
    return None


def _stays(look: _PickleScan, value: object) -> str:
    if isinstance(value, types.ModuleType):
        return ""
    try:
        look.pickle(value)
    except Exception as error:  # whatever the value's own __reduce__ raises
        return f"it cannot be pickled ({type(error).__name__}: {error})"
    if look.found:
        return f"it holds what looks like a secret ({', '.join(look.found)})"
    return ""


def restore(names: ScriptNames) -> None:
    main = sys.modules["__main__"]
    if names.file is None or getattr(main, "__file__", None) != names.file:
        vars(main).update(names.values)


@contextmanager
def nothing_carried() -> Iterator[None]:
    """Wraps a pickle for processes that import the script, which may name large tables.

    The cells of a notebook have no file that a process could import, so their names are carried.
    """
    with _not_collecting(hasattr(sys.modules["__main__"], "__file__")):
        yield


@contextmanager
def _not_collecting(stops: bool = True) -> Iterator[None]:
    before = getattr(_collecting, "on", False)
    _collecting.on = before or stops
    try:
        yield
    finally:
        _collecting.on = before


def warn_left_out(names: ScriptNames) -> None:
    for name, reason in names.left.items():
        logger.warning(
            f"The script's {name} is not pickled with the job, because {reason}. If the rollout "
            "needs it, let it read it where the task runs (from an environment variable, for "
            "example), or move it to a module."
        )


class _PickleScan:
    """Looks at each object that a pickle writes: for secrets, by the place where another object
    holds it, and for the script's names that functions use.
    """

    def __init__(self, name: str) -> None:
        self.found: dict[str, None] = {}
        self.names: set[str] = set()
        self._name = name
        self._objects: dict[int, object] = {}  # kept, so that no other object gets the id of one
        self._places: dict[int, str] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._variables = redaction.environment_secrets(redaction.is_surely_secret)

    def pickle(self, value: object) -> None:
        """Raises:
        Exception: it cannot be pickled; whatever a ``__reduce__`` raises.
        """
        import dill  # type: ignore[import-untyped]

        self._check("", {self._name: value})
        with Path(os.devnull).open("wb") as nowhere:
            pickler = dill.Pickler(nowhere)
            pickler.persistent_id = self._look  # called with each object that is written
            pickler.dump(value)

    def _look(self, thing: Any) -> None:
        # The code of a function that is not written by its name; functions may share it.
        if function := self._functions.get(id(thing)):
            self._check(function.__qualname__, _variables(function))
        if id(thing) in self._objects:
            return
        self._objects[id(thing)] = thing
        place = self._places.get(id(thing), self._name)
        if isinstance(thing, str | bytes | bytearray):
            self._check_text(place, thing)
        elif isinstance(thing, dict):
            if thing.get("__name__") not in sys.modules:
                self._check(place, thing)
        elif isinstance(thing, types.FunctionType):
            self._functions[id(thing.__code__)] = thing
            script = vars(sys.modules["__main__"])
            if thing.__globals__ is script:
                used = loaded_names(thing.__code__) & script.keys()
                self.names |= {name for name in used if not name.startswith("__")}
        elif isinstance(thing, functools.partial):
            names = getattr(getattr(thing.func, "__code__", None), "co_varnames", ())
            given = dict(zip(names, thing.args, strict=False))
            self._check("functools.partial", given | thing.keywords)
        elif isinstance(thing, redaction.Veil):
            self._places[id(thing.value)] = thing.name
        elif isinstance(thing, tuple) and hasattr(thing, "_asdict"):
            self._check(type(thing).__qualname__, thing._asdict())
        elif hasattr(thing, "__dict__"):
            self._places[id(vars(thing))] = type(thing).__qualname__

    def _check(self, owner: str, values: dict[Any, object]) -> None:
        for name, value in values.items():
            parts = [value]
            if isinstance(value, list | tuple | set | frozenset):
                parts += value
            place = f"{owner}.{name}".lstrip(".")
            for part in parts:
                self._places.setdefault(id(part), place)
                if redaction.is_surely_secret(str(name), part):
                    self.found[place] = None

    def _check_text(self, place: str, text: str | bytes | bytearray) -> None:
        if redaction.is_surely_secret("", text):
            self.found[place] = None
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        for name, value in self._variables.items():
            if value.encode() in text:
                self.found[f"the value of the environment variable {name}"] = None


def _variables(function: types.FunctionType) -> dict[str, object]:
    code = function.__code__
    names = reversed(code.co_varnames[: code.co_argcount])
    defaults = zip(names, reversed(function.__defaults__ or ()), strict=False)
    return {**dict(defaults), **(function.__kwdefaults__ or {}), **dict(cells(function))}
