"""What a function of the script needs of its module, for a pickle that another program loads.

dill pickles a function of ``__main__`` by value, but not the module's other functions and constants. In the task, the
function sees the globals of the program that loads the pickle (``launch_pickled_pipeline``), so a rollout that calls a
helper of its script would fail with ``NameError``. So a step also carries what its functions name, which the walk
through the code has found (``code_walk.py``).

    the program that unpickles           what happens
    imports the script (multiprocess)    nothing: the names are there, or are not (``nothing_carried``)
    is another one                       ``__main__`` gets the names; it has begun and needs its own no more

Ray's pickles bring the names themselves. What is or holds a secret stays behind, since others may read a pickle's file.
A pickle is made once without keeping it, and looked at on the way. So what is found is what would be written,
wherever it sits: attributes of classes and objects, default arguments, closures, arguments of a partial, nested dicts.

    a value                                           is a secret
    with the form of a key (sk-..., hf_..., AKIA...)  always
    of an environment variable like HF_TOKEN          always
    a URL with a password, or with http and a user    always
    with a name like password, api_key, client_secret if it is no placeholder and no name of a variable
    with another name like key or token               if it looks like chance: "text_key" and "eos_token" are carried
"""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from datatrove_ckpt.generation.code_values import cells
from datatrove_ckpt.generation.run_identity import CodeIdentity
from datatrove_ckpt.redaction import environment_secrets, is_surely_secret

_collecting = threading.local()


class ScriptNames(NamedTuple):
    """Part of a pickle.

    Attributes:
        file: of the script.
        values: by name.
        left: names that stay behind, each with the reason.
    """

    file: str | None
    values: dict[str, Any]
    left: dict[str, str]


def collect(used: Iterable[str]) -> ScriptNames | None:
    """What stands in the script under the names that functions use.

    None if no name is used, or if a value is being looked at that holds the step itself.
    """
    main = sys.modules["__main__"]
    if not carries():
        return None
    found = ScriptNames(getattr(main, "__file__", None), {}, {})
    with nothing_carried():
        for name in sorted(name for name in used if name in vars(main) and not name.startswith("__")):
            if reason := _stays(name, value := vars(main)[name]):
                found.left[name] = reason
            else:
                found.values[name] = value
    return found if found.values or found.left else None


def restore(names: ScriptNames) -> None:
    """Gives the script's names to functions that were unpickled here."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == names.file:
        return
    vars(main).update(names.values)
    for name, reason in names.left.items():
        if name not in vars(main):
            logger.warning(
                f"The script's {name} is not in the pickled job, because {reason}. A rollout that needs it fails with "
                "NameError: let the rollout read it (from an environment variable, for example), or a module that it "
                "imports."
            )


def say_missing(modules: Iterable[str]) -> None:
    """Logs which of these modules only this script finds: Python puts a script's folder on its path."""
    paths = [Path(entry).resolve() for entry in sys.path]
    for name in sorted({name.partition(".")[0] for name in modules}):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        places = [*(getattr(spec, "submodule_search_locations", None) or [])]
        if not places and getattr(spec, "has_location", False):  # else it is built in
            places = [getattr(spec, "origin", None) or ""]
        if not places:
            continue
        folder = Path(places[0]).resolve().parent
        if paths and folder == paths[0] and folder not in paths[1:]:
            logger.warning(
                f"The rollout uses the module {name} of {folder}, which is on the path of this script alone. The tasks "
                f"find it if they have it, too: `export PYTHONPATH={folder}` before you submit, or install the module."
            )


@contextmanager
def nothing_carried() -> Iterator[None]:
    """Around a pickle for processes that import the script, which may name large tables."""
    before = getattr(_collecting, "on", False)
    _collecting.on = True
    try:
        yield
    finally:
        _collecting.on = before


def carries() -> bool:
    """Whether a pickle that is made now is, as far as we know, one for a file."""
    ray = sys.modules.get("ray")
    by_ray = ray is not None and bool(ray.is_initialized())
    return not getattr(_collecting, "on", False) and not by_ray


def say_left(names: ScriptNames) -> None:
    """Logs what stays behind, where the job is made."""
    for name, reason in names.left.items():
        logger.warning(
            f"The script's {name} is not pickled with the job, because {reason}. If the rollout needs it, let it "
            "read it where the task runs (from an environment variable, for example), or move it to a module."
        )


def _stays(name: str, value: object) -> str:
    """Why a value is not pickled; "" if it is."""
    if isinstance(value, types.ModuleType):
        return ""
    try:
        found = secrets_in(name, value)
    except Exception as error:  # whatever the value's own __reduce__ raises
        return f"it cannot be pickled ({type(error).__name__}: {error})"
    if not found:
        return ""
    return "it looks like a secret" if found == [name] else f"it holds what looks like a secret ({', '.join(found)})"


# secrets in a pickle --------------------------------------------------------------------------------------------------


def secrets_in(name: str, value: object) -> list[str]:
    """What is a secret in what a pickle of this value holds by value: names of attributes, keys and arguments.

    Raises:
        Exception: it cannot be pickled; whatever a ``__reduce__`` raises.
    """
    if _holds(name, value):
        return [name]
    import dill  # type: ignore[import-untyped]

    look = _Look()
    pickled = io.BytesIO()
    pickler = dill.Pickler(pickled)
    pickler.persistent_id = look  # called with each object that is written
    pickler.dump(value)
    if found := look.names():
        return list(dict.fromkeys(found))
    if look.has_key:
        return [f"a text in {name}"]
    variables = environment_secrets(is_surely_secret).items()
    data = pickled.getvalue()
    return [f"the value of the environment variable {name}" for name, value in variables if value.encode() in data]


class _Look:
    """Sees each object that a pickle writes. ``has_key``: a text has the form of a key."""

    def __init__(self) -> None:
        self.has_key = False
        self._objects: dict[int, object] = {}  # kept, so that no other object gets the id of one
        self._functions: list[types.FunctionType] = []
        self._codes: set[int] = set()
        self._names: list[str] = []

    def __call__(self, thing: object) -> None:
        if id(thing) in self._objects:
            return
        self._objects[id(thing)] = thing
        if isinstance(thing, str | bytes | bytearray):
            self.has_key |= is_surely_secret("", thing)
        elif isinstance(thing, dict):
            if not _is_of_module(thing):
                self._look_at(thing.items())
        elif isinstance(thing, types.FunctionType):
            self._functions.append(thing)
        elif isinstance(thing, types.CodeType):
            self._codes.add(id(thing))
        elif isinstance(thing, CodeIdentity):  # hashes, under the names of what they stand for
            self._objects |= {id(made): made for made in thing.made or ()}
        elif isinstance(thing, functools.partial):
            code = getattr(thing.func, "__code__", None)
            names = code.co_varnames if isinstance(code, types.CodeType) else ()
            self._look_at([*zip(names, thing.args, strict=False), *thing.keywords.items()])
        elif isinstance(thing, tuple) and isinstance(fields := getattr(thing, "_fields", None), tuple):
            self._look_at(zip(fields, thing, strict=False))

    def names(self) -> list[str]:
        """Under which secrets are written."""
        for function in self._functions:
            if id(function.__code__) in self._codes:  # else its name alone is written
                self._look_at(_variables(function))
        return self._names

    def _look_at(self, values: Iterable[tuple[object, object]]) -> None:
        self._names += [name for name, value in values if isinstance(name, str) and _holds(name, value)]


def _holds(name: str, value: object) -> bool:
    """Whether a value is a secret, or a collection of texts that would be one under this name."""
    if isinstance(value, dict):  # what has the form of a key is found inside it
        parts = [part for part in value.values() if isinstance(part, str | bytes)]
        return any(is_surely_secret(name, part) and not is_surely_secret("", part) for part in parts)
    if isinstance(value, list | tuple | set | frozenset):
        return any(isinstance(part, str | bytes) and is_surely_secret(name, part) for part in value)
    return is_surely_secret(name, value)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    yield from cells(function)


def _is_of_module(thing: dict[object, object]) -> bool:
    name = thing.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and vars(module) is thing
