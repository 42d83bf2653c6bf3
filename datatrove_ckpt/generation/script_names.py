"""Collects the names that a script's function needs, for a pickle that another program loads.

dill pickles a function of ``__main__`` by value, but not the module's other functions and
constants. So a step also carries what its functions name.

    the program that unpickles           what happens
    imports the script (multiprocess)    nothing: the names are there, or are not
                                         (``nothing_carried``)
    is another program                   ``__main__`` gets the names; it has begun and no longer
                                         needs its own

Ray's pickles bring the names themselves. Secrets stay behind, because others may read a pickle's
file. To find secrets, a value is pickled to nowhere, and each object is checked with
``is_surely_secret`` and against environment variables like HF_TOKEN.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from datatrove_ckpt.common.redaction import Veil, environment_secrets, is_surely_secret
from datatrove_ckpt.generation.code_description import cells
from datatrove_ckpt.generation.code_statements import loaded_names
from datatrove_ckpt.process.own_modules import is_installed, own_modules, places_of

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
    """Returns the names of the script that these functions and objects use, directly or not; None
    if there are none.
    """
    main = sys.modules["__main__"]
    found = ScriptNames(getattr(main, "__file__", None), {}, {})
    waiting = list(things)
    seen = dict[int, object]()
    with nothing_carried():
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing  # kept, so that no other object gets its id
            waiting += _parts(thing)
            for name in _names(thing, main):
                if name not in found.values and name not in found.left:
                    value = vars(main)[name]
                    if reason := _stays(name, value):
                        found.left[name] = reason
                    else:
                        found.values[name] = value
                        waiting.append(value)
    if found.values or found.left:
        return found
    return None


def restore(names: ScriptNames) -> None:
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == names.file:
        return
    vars(main).update(names.values)
    for name, reason in names.left.items():
        if name not in vars(main):
            logger.warning(
                f"The script's {name} is not in the pickled job, because {reason}. A rollout that "
                "needs it fails with NameError: let the rollout read it (from an environment "
                "variable, for example), or a module that it imports."
            )


def say_missing(*things: object, sent: bool) -> None:
    """Logs which modules of the job only this script finds.

    ``sent``: ``own_modules`` go along with the tasks.
    """
    along = set()
    if sent:
        along = {*own_modules(), "datatrove", "datatrove_ckpt"}
    paths = [Path(entry).resolve() for entry in sys.path]
    modules = {
        thing.__name__ if isinstance(thing, types.ModuleType) else _module_of(thing)
        for thing in things
    }
    tops = {name.partition(".")[0] for name in modules} - {"__main__"}
    for name in sorted(tops - along):
        if not (places := places_of(name)):
            continue
        folder = places[0].resolve().parent
        if sent and not is_installed(places[0]):
            logger.warning(
                f"The rollout uses the module {name} of {folder}, and jobs lack it unless "
                "`dependencies` installs it: what lies in the working folder or beside the script "
                "goes along."
            )
        elif not sent and paths and folder == paths[0] and folder not in paths[1:]:
            logger.warning(
                f"The rollout uses the module {name} of {folder}, which is on the path of this "
                "script alone. The tasks find it if they have it, too: `export "
                f"PYTHONPATH={folder}` before you submit, or install the module."
            )


def _module_of(thing: object) -> str:
    if isinstance(thing, functools.partial):
        return _module_of(thing.func)
    if isinstance(thing, type | types.FunctionType):
        owner = thing
    else:
        owner = type(thing)
    return str(owner.__module__)


@contextmanager
def nothing_carried() -> Iterator[None]:
    """Wraps a pickle for processes that import the script, which may name large tables."""
    before = getattr(_collecting, "on", False)
    _collecting.on = True
    try:
        yield
    finally:
        _collecting.on = before


def carries() -> bool:
    """Returns whether a pickle that is made now is probably for a file."""
    ray = sys.modules.get("ray")
    by_ray = ray is not None and bool(ray.is_initialized())
    return not getattr(_collecting, "on", False) and not by_ray


def say_left(names: ScriptNames) -> None:
    for name, reason in names.left.items():
        logger.warning(
            f"The script's {name} is not pickled with the job, because {reason}. If the rollout "
            "needs it, let it read it where the task runs (from an environment variable, for "
            "example), or move it to a module."
        )


def _parts(thing: object) -> Iterator[object]:
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from (value for _, value in cells(thing))
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        yield getattr(thing, "__wrapped__", None)
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple):
        yield from thing
    elif isinstance(thing, type):
        if thing.__module__ == "__main__":
            yield from thing.__bases__
            for value in vars(thing).values():
                yield from (value.fget, value.fset) if isinstance(value, property) else (value,)
    elif isinstance(thing, staticmethod | classmethod):
        yield thing.__func__
    elif type(thing).__module__ == "__main__":
        yield from (
            (type(thing), *vars(thing).values()) if hasattr(thing, "__dict__") else (type(thing),)
        )


def _names(thing: object, main: types.ModuleType) -> Iterator[str]:
    if isinstance(thing, types.FunctionType) and thing.__globals__ is vars(main):
        for name in sorted(loaded_names(thing.__code__)):
            if name in vars(main) and not (name.startswith("__") and name.endswith("__")):
                yield name


def _stays(name: str, value: object) -> str:
    if isinstance(value, types.ModuleType):
        return ""
    try:
        places = secrets_in(name, value)
    except Exception as error:  # whatever the value's own __reduce__ raises
        return f"it cannot be pickled ({type(error).__name__}: {error})"
    if not places:
        return ""
    if places == [name]:
        return "it looks like a secret"
    return f"it holds what looks like a secret ({', '.join(places)})"


# secrets in a pickle -----------------------------------------------------------------------------


def secrets_in(name: str, value: object) -> list[str]:
    """Returns the places of secrets in a pickle of this value, as words for a message.

    Raises:
        Exception: it cannot be pickled; whatever a ``__reduce__`` raises.
    """
    import dill  # type: ignore[import-untyped]

    look = _Look(name)
    look.check(name, name, value)
    with Path(os.devnull).open("wb") as nowhere:
        pickler = dill.Pickler(nowhere)
        pickler.persistent_id = look  # called with each object that is written
        pickler.dump(value)
    return look.found


class _Look:
    """Checks each object that is written, by the place where another one holds it."""

    def __init__(self, name: str) -> None:
        self.found: list[str] = []
        self._name = name
        self._objects: dict[int, object] = {}  # kept, so that no other object gets the id of one
        self._places: dict[int, str] = {}
        self._classes: list[type] = []
        self._functions: dict[int, types.FunctionType] = {}
        self._variables = environment_secrets(is_surely_secret)

    def __call__(self, thing: Any) -> None:
        if id(thing) in self._objects:
            return
        self._objects[id(thing)] = thing
        place = self._places.get(id(thing), self._name)
        if isinstance(thing, str | bytes | bytearray):
            self._check_text(place, thing)
        elif isinstance(thing, dict):
            for cls in self._classes:  # dill writes a copy of its dict
                if "__module__" in thing and all(
                    vars(cls).get(key) is one for key, one in thing.items()
                ):
                    place = cls.__qualname__
            if thing.get("__name__") not in sys.modules:
                self._check_all(place, thing)
        elif isinstance(thing, types.FunctionType):
            self._functions[id(thing.__code__)] = thing
        elif isinstance(thing, types.CodeType):  # of a function that is not written by its name
            if function := self._functions.get(id(thing)):
                for name, value in _variables(function):
                    self.check(f"{function.__qualname__}({name}=)", name, value)
        elif isinstance(thing, functools.partial):
            names = getattr(getattr(thing.func, "__code__", None), "co_varnames", ())
            given = dict(zip(names, thing.args, strict=False))
            self._check_all("functools.partial", given | thing.keywords)
        elif isinstance(thing, Veil):
            self._places[id(thing.value)] = thing.name
        elif isinstance(thing, tuple) and hasattr(thing, "_asdict"):
            self._check_all(type(thing).__qualname__, thing._asdict())
        elif isinstance(thing, type):
            self._classes.append(thing)
        elif hasattr(thing, "__dict__"):
            self._places[id(vars(thing))] = type(thing).__qualname__

    def check(self, place: str, name: str, value: object) -> None:
        parts = [value]
        if isinstance(value, list | tuple | set | frozenset):
            parts += value
        for part in parts:
            self._places.setdefault(id(part), place)
            if is_surely_secret(name, part):
                self._find(place)

    def _check_all(self, owner: str, values: Mapping[Any, object]) -> None:
        for name, value in values.items():
            if isinstance(name, str):
                self.check(f"{owner}.{name}".lstrip("."), name, value)

    def _check_text(self, place: str, text: str | bytes | bytearray) -> None:
        if is_surely_secret("", text):
            self._find(place)
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        for name, value in self._variables.items():
            if value.encode() in text:
                self._find(f"the value of the environment variable {name}")

    def _find(self, place: str) -> None:
        if place not in self.found:
            self.found.append(place)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    yield from cells(function)
