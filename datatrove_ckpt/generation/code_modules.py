"""The user's modules: where they are, what binds their names, and what gives another value at each start.

Modules are found and parsed, never imported. This module imports only the standard library: a test runs it alone on
every Python that it finds.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
import time
import types
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import Any

from datatrove_ckpt.generation.code_source import Binding, Definition, Import, Source, dotted, source_of
from datatrove_ckpt.generation.code_values import cells, digest, folder_of, is_of_machine, is_unstable, wrapped
from datatrove_ckpt.generation.syntax import write_code

_STARTED = time.time()
PIPELINE = {"datatrove", "datatrove_ckpt"}  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")


def is_of_user(file: str | None, module: str | None) -> bool:
    """Whether a file is the user's own, and none of an installed package, of the standard library or of this package.

    Text that is compiled without a file ("<string>": methods that ``dataclass`` makes) is nobody's.
    """
    if file is None or file.startswith("<") or str(module).partition(".")[0] in PIPELINE:
        return False
    is_standard = file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.search(file)
    return not is_standard and not _PACKAGES.search(file)


class Module:
    """A file of the user, and what this process has of it.

    Args:
        namespace: its globals; None: they are not looked at, because other processes may not have loaded it.
    """

    def __init__(self, name: str, file: str, namespace: Mapping[str, Any] | None) -> None:
        self.name, self.file, self.live = name, file, namespace is not None
        self.folder, self.folders = folder_of(file), list[str]()
        self.values = {} if namespace is None else namespace
        linecache.checkcache(file)
        loader = {"__loader__": self.values.get("__loader__"), "__name__": name}
        self.source: Source = source_of("".join(linecache.getlines(file, loader)))
        loaded = vars(sys.modules.get(name, types.ModuleType(name)))
        self.travels = name in MAIN or (namespace is not None and loaded is not namespace)
        self.package = self.values.get("__package__") or (
            name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]  # noqa: PTH119
        )

    @functools.cached_property
    def was_edited(self) -> bool:
        """Since this process started."""
        try:
            return os.stat(self.file).st_mtime > _STARTED  # noqa: PTH116 (co_filename is text)
        except OSError:  # an archive, or a cell of a notebook
            return False


class Project:
    """What is the user's. Filled on the way.

    Attributes:
        packages: that are the user's although they are installed.
        left: what is not compared, and why.
    """

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.left: dict[str, None] = {}
        self._modules: dict[tuple[str, bool], Module | None] = {}
        self._spaces: dict[tuple[int, str], Module] = {}
        self._causes: dict[object, str] = {}
        self._unstable: dict[type, set[str]] = {}
        self._inside: set[tuple[str, str]] = set()

    def _is_users_file(self, file: str | None, module: str | None) -> bool:
        is_cell = str(file).startswith("<ipython-input")
        return is_cell or is_of_user(file, module) or (str(module).partition(".")[0] in self.packages and bool(file))

    def owns(self, thing: object) -> bool:
        """Whether a function, class or module is of the user."""
        if isinstance(thing, types.FunctionType):
            is_made = thing.__module__ in (None, "builtins", *MAIN)  # by exec
            file = thing.__code__.co_filename
            return (is_made and file == "<string>") or self._is_users_file(file, thing.__module__)
        name = str(thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", ""))
        if not isinstance(thing, type | types.ModuleType) or name.partition(".")[0] in PIPELINE:
            return False
        module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(name)
        if module is None:  # of a pickle
            return any(self.owns(one) for one in vars(thing).values() if isinstance(one, types.FunctionType))
        place = getattr(module, "__file__", None)
        return self._is_users_file(place, name) or (place is None and name in MAIN)

    def module(self, name: str, late: bool) -> Module | None:
        """A module of the user; None: it is another one, or is missing."""
        if (name, late) not in self._modules:
            loaded = sys.modules.get(name)
            file, folders = _file_of(loaded), [*getattr(loaded, "__path__", [])]
            if loaded is None:
                parent = self.module(name.rpartition(".")[0], late) if "." in name else None
                spec = None
                if "." not in name or parent is not None:
                    spec = PathFinder.find_spec(name, parent.folders if parent is not None else None)
                file = getattr(spec, "origin", None)
                folders = [*(getattr(spec, "submodule_search_locations", None) or [])]
            place = file or (os.path.join(folders[0], "") if folders else None)  # noqa: PTH118
            found = Module(name, place, None if late or loaded is None else vars(loaded)) if place else None
            is_ours = self._is_users_file(place, name) and not str(place).endswith((".so", ".pyd"))
            self._modules[name, late] = found if is_ours else None
            if found is not None:
                found.folders = folders
        return self._modules[name, late]

    def space(self, function: types.FunctionType) -> Module:
        """Where a function looks its names up."""
        space, file = function.__globals__, function.__code__.co_filename
        name = str(space.get("__name__", function.__module__))
        found = self.module(name, late=False) if getattr(sys.modules.get(name), "__dict__", None) is space else None
        if found is not None and os.path.abspath(found.file) == os.path.abspath(file):  # noqa: PTH100
            return found
        if (id(space), file) not in self._spaces:
            self._spaces[id(space), file] = Module(name, file, space)
        return self._spaces[id(space), file]

    def bindings(self, module: Module, name: str) -> list[Binding]:
        """What binds a name, without what is replaced for sure."""
        kept: list[Binding] = []
        for bound in reversed(module.source.bindings.get(name, [])):
            kept.insert(0, bound)
            is_new = bound.imported is not None or isinstance(bound.statement, Definition)
            again = [dotted(one)[:1] for one in getattr(bound.statement, "decorator_list", [])]
            if is_new and not bound.optional and [name] not in again:
                break
        return kept

    def binds(self, module: Module, name: str, late: bool) -> bool:
        value = module.values.get(name)
        is_live = name in module.values and not isinstance(value, types.ModuleType)
        return name in module.source.bindings or is_live or self.star(module, name, late) is not None

    def star(self, module: Module, name: str, late: bool) -> Module | None:
        """The module from which ``from module import *`` takes a name."""
        place = (module.file, f"*{name}")
        if name.startswith("__") or place in self._inside:
            return None
        self._inside.add(place)
        found = [self.module(absolute(module, star), late) for star in reversed(module.source.stars)]
        listed = [one for one in found if one is not None and name in one.values.get("__all__", [name])]
        giving = next((one for one in listed if self.binds(one, name, late)), None)
        self._inside.discard(place)
        return giving

    def unstable_attributes(self, cls: type) -> set[str]:
        """The attributes that a class computes anew at each start."""
        known = self._unstable
        if cls not in known:
            known[cls] = set()
            module = self.module(cls.__module__, late=False) if self.owns(cls) else None
            for _, assigned in module.source.classes(cls.__name__) if module is not None else ():
                for statement, names in assigned:
                    if cause := self.cause_in(module, statement, frozenset()):  # type: ignore[arg-type]
                        known[cls] |= names
                        self.left |= {f"{cls.__qualname__}.{one} ({cause})": None for one in sorted(names)}
        return known[cls]

    def cause_of(self, module: Module, name: str, seen: frozenset[object]) -> str:
        place = (module.file, name, module.live)
        if place in self._causes or place in seen:
            return self._causes.get(place, "")
        source = module.source
        statements = [*self.bindings(module, name), *source.changes.get(name, []), *source.given.get(name, [])]
        found = (self.cause_in(module, one.statement, seen | {place}) for one in statements if one.imported is None)
        self._causes[place] = next(filter(None, found), "")
        return self._causes[place]

    def cause_in(self, module: Module, node: ast.AST, seen: frozenset[object]) -> str:
        uses = module.source.uses(node)
        if not uses.words.isdisjoint({"environ", "getenv"}):
            for word in sorted(uses.texts):
                if is_of_machine(word):
                    return word
            ends = [(chain.root, *chain.path)[-2:] for chain in uses.chains]
            if any(end[-1] == "environ" or end == ("environ", "copy") for end in ends):
                return "the environment"
        for chain in uses.chains:
            bound = chain.imported
            if bound is None:
                bindings = self.bindings(module, chain.root)
                imports = [one.imported for one in bindings if one.imported is not None]
                if not imports:
                    cause = self.cause_of(module, chain.root, seen) if bindings else ""
                    if cause or (not bindings and is_unstable(chain.root) and chain.root not in module.values):
                        return cause or f"{chain.root}()"
                    continue
                bound = imports[-1]
            base, steps = absolute(module, bound), [*([bound.name] if bound.name else []), *chain.path]
            found = self.module(base, bound.late or not module.live)
            while found is not None and steps and not self.binds(found, steps[0], not found.live):
                found, steps = self.module(f"{found.name}.{steps[0]}", not found.live), steps[1:]
            if found is not None:
                if steps and (cause := self.cause_of(found, steps[0], seen)):
                    return cause
            elif any(is_unstable(".".join([base, *steps[:size]])) for size in range(len(steps) + 1)):
                return f"{'.'.join([base, *steps])}()"
        return ""


def absolute(module: Module, bound: Import) -> str:
    """The module that an import names."""
    if not bound.level:
        return bound.module
    package = module.package.split(".")
    return ".".join([*package[: len(package) - bound.level + 1], *([bound.module] if bound.module else [])])


def _file_of(module: types.ModuleType | None) -> str | None:
    """Where its functions come from: dill may have put another file's name there."""
    file: str | None = getattr(module, "__file__", None)
    parts = [*vars(module).values()] if module is not None else []
    parts += [part for one in parts if isinstance(one, type) for part in vars(one).values()]
    codes = [one.__code__ for one in parts if isinstance(one, types.FunctionType)]
    name = os.path.basename(str(file))  # noqa: PTH119
    return next((code.co_filename for code in codes if os.path.basename(code.co_filename) == name), file)  # noqa: PTH119


def fingerprint(thing: object) -> str:
    """Tells whether a pickle holds the function or object that was described: by code that it holds, and constants."""
    if isinstance(thing, functools.partial):
        return digest(
            "partial", *map(fingerprint, [thing.func, *thing.args, *thing.keywords, *thing.keywords.values()])
        )
    if isinstance(thing, types.MethodType):
        return digest(fingerprint(thing.__self__), thing.__name__)
    if isinstance(thing, types.FunctionType):
        if is_importable(thing):
            return f"{thing.__module__}.{thing.__qualname__}"
        around = (getattr(one, "__code__", one) for _, one in cells(thing))  # which may hold the function itself
        return digest(write_code(thing.__code__), *map(fingerprint, around))
    if isinstance(thing, types.CodeType):
        return write_code(thing)
    if isinstance(thing, str | int | float | bytes | None):
        return repr(thing)
    return type(thing).__qualname__


def is_away(thing: object) -> bool:
    """Whether a pickle brought a function by value into a program that has not loaded its file."""
    if isinstance(thing, functools.partial | dict | list | tuple):
        parts = [thing.func, *thing.args, thing.keywords] if isinstance(thing, functools.partial) else thing
        return any(map(is_away, parts.values() if isinstance(parts, dict) else parts))
    thing = getattr(thing, "__func__", thing)
    if not isinstance(thing, types.FunctionType):
        cls = thing if isinstance(thing, type) else type(thing)
        return any(is_away(one) for one in vars(cls).values() if isinstance(one, types.FunctionType))
    loaded = sys.modules.get(str(thing.__globals__.get("__name__")))
    file = thing.__code__.co_filename
    is_here = loaded is not None and vars(loaded) is thing.__globals__ and getattr(loaded, "__file__", file) == file
    return not is_here and not is_importable(thing)


def is_of_pipeline(thing: object) -> bool:
    """Whether a function or class is datatrove's or ours."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] in PIPELINE


def is_importable(function: types.FunctionType) -> bool:
    """Whether an import gives the function. Then a pickle holds its name alone, and it is what is imported now."""
    found: object = None if function.__module__ in MAIN else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    while found is not None and found is not function:
        found = wrapped(found)
    return found is function
