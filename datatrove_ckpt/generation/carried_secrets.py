"""Finds secrets in what a pickle is about to hold: an ``executor.pik`` is a file that others may read.

The pickle is made once without keeping it, and looked at on the way. So what is found is what would be written,
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
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from datatrove_ckpt.generation.run_identity import CodeIdentity
from datatrove_ckpt.redaction import Veil, environment_secrets, is_surely_secret


class _Sink:
    """The file of a pickle that nobody keeps. Notes which of some texts pass through."""

    def __init__(self, texts: Mapping[bytes, str]) -> None:
        self._texts = texts
        self._tail = b""
        self._longest = max(map(len, texts), default=0)
        self.found: dict[str, None] = {}

    def write(self, data: bytes) -> None:
        if not self._longest:
            return
        data = self._tail + bytes(data)
        self.found |= {name: None for text, name in self._texts.items() if text in data}
        self._tail = data[-self._longest :]


def secrets_in(name: str, value: Any) -> list[str]:
    """The places of secrets in what a pickle of this value holds by value, as words for a message.

    Raises:
        Exception: it cannot be pickled; whatever a ``__reduce__`` raises.
    """
    if _holds(name, value):
        return [name]
    import dill  # type: ignore[import-untyped]

    look = _Look(name)
    sink = _Sink({value.encode(): variable for variable, value in environment_secrets(is_surely_secret).items()})
    pickler = dill.Pickler(sink)
    pickler.persistent_id = look  # called with each object that is written
    pickler.dump(value)
    places = dict.fromkeys(look.places())
    if not places:
        places = {f"the value of the environment variable {variable}": None for variable in sink.found}
    return list(places)


class _Look:
    """Sees each object that a pickle writes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[int, Any] = {}  # kept, so that no other object gets the id of one
        self._owners: dict[int, str] = {}
        self._classes: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._codes: set[int] = set()
        self._places: list[str] = []
        self._unnamed = False

    def __call__(self, thing: Any) -> None:
        if id(thing) in self._objects:
            return
        self._objects[id(thing)] = thing
        if isinstance(thing, str | bytes | bytearray):
            self._unnamed |= is_surely_secret("", thing)
        elif isinstance(thing, dict):
            owner = self._owners.get(id(thing), self._name)
            if owner and not _is_of_module(thing):
                self._look_at(owner, thing)
        elif isinstance(thing, types.FunctionType):
            self._functions.append(thing)
        elif isinstance(thing, types.CodeType):
            self._codes.add(id(thing))
        elif isinstance(thing, type):
            self._classes.append(thing)
        elif isinstance(thing, CodeIdentity):  # hashes, under the names of what they stand for
            self._owners |= dict.fromkeys(map(id, thing.made or ()), "")
        else:
            self._of_object(thing)

    def places(self) -> Iterator[str]:
        """Where the secrets are. One that only its form shows has a place if no other is found."""
        found = list(self._places)
        for function in self._functions:
            if id(function.__code__) in self._codes:  # else its name alone is written
                found += [
                    f"{function.__qualname__}({name}=)" for name, value in _variables(function) if _holds(name, value)
                ]
        yield from found or ([f"a text in {self._name}"] if self._unnamed else [])

    def _of_object(self, thing: Any) -> None:
        if isinstance(thing, Veil):
            self._owners[id(thing.value)] = thing.name
        if isinstance(own := getattr(thing, "__dict__", None), dict):
            self._owners[id(own)] = type(thing).__qualname__
        if isinstance(thing, tuple) and isinstance(fields := getattr(thing, "_fields", None), tuple):
            self._look_at(type(thing).__qualname__, dict(zip(fields, thing, strict=False)))
        if isinstance(thing, functools.partial):
            code = getattr(thing.func, "__code__", None)
            names = code.co_varnames if isinstance(code, types.CodeType) else ()
            self._look_at("functools.partial", {**dict(zip(names, thing.args, strict=False)), **thing.keywords})

    def _look_at(self, owner: str, values: Mapping[Any, Any]) -> None:
        for name, value in values.items():
            if not isinstance(name, str):
                continue
            # Of a class, dill writes a copy of its dict.
            classes = (cls.__qualname__ for cls in self._classes if vars(cls).get(name) is value)
            place = f"{next(classes, owner)}.{name}"
            inside = [
                part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, dict)
            ]
            self._owners = dict.fromkeys(map(id, inside), place) | self._owners  # they come later
            if _holds(name, value):
                self._places.append(place)


def _holds(name: str, value: Any) -> bool:
    """Whether a value is a secret, or a collection of texts that would be one under this name."""
    if isinstance(value, dict):  # what has the form of a key is found inside it
        parts = [part for part in value.values() if isinstance(part, str | bytes)]
        return any(is_surely_secret(name, part) and not is_surely_secret("", part) for part in parts)
    if isinstance(value, list | tuple | set | frozenset):
        return any(isinstance(part, str | bytes) and is_surely_secret(name, part) for part in value)
    return is_surely_secret(name, value)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled
            continue


def _is_of_module(thing: dict[Any, Any]) -> bool:
    name = thing.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and vars(module) is thing
