"""The user's modules: where they are, what binds their names and uses them, and what differs at each start.

Modules are found and parsed, never imported, and nothing is run. The cells of a notebook are one module.

This module imports only the standard library: a test runs it alone on every Python that it finds.
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
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_text import compile_tree, digest, nested_codes, parse, write_code, write_tree
from datatrove_ckpt.generation.code_uses import (
    Definition,
    Import,
    Uses,
    bound_names,
    dotted,
    imported,
)
from datatrove_ckpt.generation.code_values import cells, folder_of, is_of_machine, is_unstable, wrapped

_STARTED = time.time()
PIPELINE = {"datatrove", "datatrove_ckpt"}  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_CELL = re.compile(r"<(i?python-input)-.*>|.*[\\/]ipykernel_\d+[\\/].*")
_BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With)


class Binding(NamedTuple):
    """What binds a name of a module. ``tests``: the conditions around it."""

    statement: ast.stmt
    tests: tuple[ast.expr, ...] = ()
    imported: Import | None = None


class Source:
    """A parsed file. It is empty if this Python cannot parse it.

    Attributes:
        bindings: of its names, in order.
        changes: statements that change what a name stands for: ``D[k] = v``, ``D.update()``, ``@render.register``.
        given: statements that call something with what a name stands for: ``random.shuffle(NAMES)``.
        stars: modules of which it imports all names.
    """

    def __init__(self, text: str) -> None:
        try:
            self.tree = parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.tree = ast.Module([], [])
        self.bindings: dict[str, list[Binding]] = {}
        self.changes: dict[str, list[Binding]] = {}
        self.given: dict[str, list[Binding]] = {}
        self.stars: list[Import] = []
        self._uses: dict[tuple[int, bool], Uses] = {}
        self._texts: dict[tuple[int, bool], str] = {}
        self._collect(self.tree.body, ())

    def _collect(self, body: list[ast.stmt], tests: tuple[ast.expr, ...]) -> None:
        for node in body:
            bound = Binding(node, tests)
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, found in imported(node, late=False):
                    if name == "*":
                        self.stars.append(found)
                    else:
                        self._add(self.bindings, [name], Binding(node, tests, found))
            elif isinstance(node, _BLOCKS):
                conditions = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
                for block in _blocks(node):
                    self._collect(block, (*tests, *conditions))
                for item in getattr(node, "items", []):
                    self._add(self.bindings, bound_names([item]), bound)
            elif isinstance(node, Definition):
                decorators = [dotted(one) for one in node.decorator_list]
                if ["overload"] not in [one[-1:] for one in decorators]:
                    self._add(self.bindings, [node.name], bound)
                self._add(self.changes, [one[0] for one in decorators if len(one) > 1], bound)
            else:
                self._add(self.bindings, bound_names([node]), bound)
                self._add(self.changes, {root for root, _ in self.uses(node, False).changed}, bound)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    self._note_call(node.value, bound)

    def _note_call(self, call: ast.Call, bound: Binding) -> None:
        called = dotted(call.func)
        given = [one.id for one in call.args if isinstance(one, ast.Name)]
        self._add(self.given, given, bound)
        if called[-1:] in (["setattr"], ["delattr"]):
            self._add(self.changes, given, bound)
        elif called:
            self._add(self.changes, called[:1], bound)

    def _add(self, table: dict[str, list[Binding]], names: Any, bound: Binding) -> None:
        for name in names:
            if bound not in table.setdefault(name, []):
                table[name].append(bound)

    def uses(self, node: ast.AST, documented: bool) -> Uses:
        place = (id(node), documented)
        if place not in self._uses:
            self._uses[place] = Uses(node, documented)
        return self._uses[place]

    def text(self, node: ast.AST, documented: bool) -> str:
        place = (id(node), documented)
        if place not in self._texts:
            self._texts[place] = write_tree(node, documented)
        return self._texts[place]

    @functools.cached_property
    def definitions(self) -> dict[tuple[str, int], list[tuple[ast.AST, ast.AST]]]:
        """Functions and classes by name and first line, each with the statement around it."""
        found: dict[tuple[str, int], list[tuple[ast.AST, ast.AST]]] = {}
        waiting: list[tuple[ast.AST, ast.AST]] = [(self.tree, self.tree)]
        while waiting:
            node, statement = waiting.pop()
            if isinstance(node, Definition | ast.Lambda):
                first = (getattr(node, "decorator_list", None) or [node])[0]
                found.setdefault((getattr(node, "name", "<lambda>"), first.lineno), []).append((node, statement))
            inner = node if isinstance(node, ast.stmt) else statement
            waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
        return found

    def named(self, name: str) -> list[ast.AST]:
        """Functions and classes of this name, also nested ones."""
        return [node for (known, _), pairs in self.definitions.items() if known == name for node, _ in pairs]

    @functools.cached_property
    def codes(self) -> dict[tuple[str, str], list[int]]:
        """The lines of functions, by their name and by what this Python compiles from them."""
        found: dict[tuple[str, str], list[int]] = {}
        for code in nested_codes(compile_tree(self.tree)):
            found.setdefault((code.co_name, write_code(code)), []).append(code.co_firstlineno)
        return found

    def find(self, code: types.CodeType, edited: bool) -> ast.AST | None:
        """The function of which this is the code: by its line, or, if the file was edited, by its bytecode."""
        line = code.co_firstlineno
        if edited:
            lines = self.codes.get((code.co_name, write_code(code)), [])
            line = min(lines, key=lambda one: abs(one - line), default=-1)
        found = self.definitions.get((code.co_name, line), [])
        if len(found) > 1:  # lambdas that begin in one line: the statement around them
            return found[0][1]
        return found[0][0] if found else None


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    parts = [node, *(one for one in ast.iter_child_nodes(node) if isinstance(one, ast.ExceptHandler))]
    for part in parts:
        for name in ("body", "orelse", "finalbody"):
            yield getattr(part, name, [])


source_of = functools.lru_cache(maxsize=512)(Source)
"""The parsed file with this text."""


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

    def documented(self, node: ast.AST) -> bool:
        """Whether docstring and hints count, because a library may read them of what it decorates."""
        for one in [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]:
            root, *path = dotted(one) or [""]
            if path[-1:] == ["register"]:
                return True
            for bound in self.source.bindings.get(root, []):
                if bound.imported is not None and not is_known(absolute(self, bound.imported).partition(".")[0]):
                    return True
        return False


def is_known(package: str) -> bool:
    if package in sys.stdlib_module_names or package in PIPELINE:
        return True
    spec = getattr(sys.modules.get(package), "__file__", None)
    return is_of_user(spec, package)


def is_of_user(file: str | None, module: str | None) -> bool:
    """Whether a file is the user's own, and not of an installed package, the standard library or this package.

    Text that is compiled without a file ("<string>": methods that ``dataclass`` makes) belongs to no package.
    """
    if file is None or str(module).partition(".")[0] in PIPELINE:
        return False
    if _CELL.match(file):
        return True
    return not file.startswith(("<", _STANDARD_LIBRARY)) and not _PACKAGES.search(file)


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
        self._causes: dict[Any, str] = {}

    def _is_users_file(self, file: str | None, module: str | None) -> bool:
        return is_of_user(file, module) or (str(module).partition(".")[0] in self.packages and bool(file))

    def owns(self, thing: Any) -> bool:
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
            file, folders = getattr(loaded, "__file__", None), [*getattr(loaded, "__path__", [])]
            if loaded is None:
                file, folders = self._find(name, late)
            place = file or (os.path.join(folders[0], "") if folders else None)  # noqa: PTH118
            is_ours = self._is_users_file(place, name) and not str(place).endswith((".so", ".pyd"))
            found = None
            if place and is_ours:
                found = Module(name, place, None if late or loaded is None else vars(loaded))
                found.folders = folders
            self._modules[name, late] = found
        return self._modules[name, late]

    def _find(self, name: str, late: bool) -> tuple[str | None, list[str]]:
        """File and folders of a module that is not loaded."""
        parent = self.module(name.rpartition(".")[0], late) if "." in name else None
        if "." in name and parent is None:
            return None, []
        spec = PathFinder.find_spec(name, parent.folders if parent is not None else None)
        return getattr(spec, "origin", None), [*(getattr(spec, "submodule_search_locations", None) or [])]

    def space(self, function: types.FunctionType) -> Module:
        """Where a function looks its names up."""
        space, file = function.__globals__, function.__code__.co_filename
        name = str(space.get("__name__", function.__module__))
        found = self.module(name, late=False) if getattr(sys.modules.get(name), "__dict__", None) is space else None
        if found is not None and os.path.abspath(found.file) == os.path.abspath(file):  # noqa: PTH100
            return found
        return self._space(name, file, space)

    def _space(self, name: str, file: str, space: Mapping[str, Any]) -> Module:
        if (id(space), file) not in self._spaces:
            self._spaces[id(space), file] = Module(name, file, space)
        return self._spaces[id(space), file]

    def home(self, module: Module, name: str) -> Module:
        """The cell of a notebook that binds a name; a module of another kind itself."""
        if not _CELL.match(module.file):
            return module
        value = wrapped(module.values.get(name)) or module.values.get(name)
        methods = [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, types.FunctionType)]
        for one in [value, *methods]:
            if isinstance(one, types.FunctionType) and _CELL.match(one.__code__.co_filename):
                return self._space(module.name, one.__code__.co_filename, module.values)
        for file in reversed([*linecache.cache]):
            cell = self._space(module.name, file, module.values) if _CELL.match(file) else module
            if name in cell.source.bindings:
                return cell
        return module

    def binds(self, module: Module, name: str) -> bool:
        value = module.values.get(name)
        is_live = name in module.values and not isinstance(value, types.ModuleType)
        return name in module.source.bindings or is_live or self.star(module, name) is not None

    def star(self, module: Module, name: str, inside: tuple[str, ...] = ()) -> Module | None:
        """The module from which ``from module import *`` takes a name."""
        if name.startswith("__") or module.file in inside:
            return None
        for star in reversed(module.source.stars):
            found = self.module(absolute(module, star), not module.live)
            if found is None or name not in found.values.get("__all__", [name]):
                continue
            if name in found.source.bindings or self.star(found, name, (*inside, module.file)) is not None:
                return found
        return None

    def resolve(self, module: Module, bound: Import, path: tuple[str, ...]) -> tuple[Module | None, tuple[str, ...]]:
        """The module of the user to which an import and the steps after it lead, and the steps that are left."""
        base, late = absolute(module, bound), bound.late or not module.live
        found = self.module(base, late)
        steps = path if bound.name is None else (bound.name, *path)
        if found is None:
            return None, (*base.split("."), *steps)
        while steps and (found is module or not self.binds(found, steps[0])):
            below = self.module(f"{found.name}.{steps[0]}", late)
            if below is None:
                break
            found, steps = below, steps[1:]
        return found, steps

    # what differs at each start --------------------------------------------------------------------------------------

    def unstable_names(self, module: Module, nodes: list[ast.AST]) -> dict[str, str]:
        """The names and attributes to which functions or classes assign another value at each start, with the cause."""
        found: dict[str, str] = {}
        kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign)
        for node in [part for one in nodes for part in ast.walk(one) if isinstance(part, kinds)]:
            if cause := self.cause_in(module, node, frozenset()):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for one in [part for target in targets for part in ast.walk(target)]:
                    if isinstance(one, ast.Name | ast.Attribute):
                        found[one.id if isinstance(one, ast.Name) else one.attr] = cause
        return found

    def cause_of(self, module: Module, name: str, seen: frozenset[Any]) -> str:
        """Why what a name stands for differs."""
        module = self.home(module, name)
        place, source = (module.file, name), module.source
        if place not in self._causes and place not in seen:
            tables = [source.bindings, source.changes, source.given]
            statements = [one for table in tables for one in table.get(name, []) if one.imported is None]
            causes = (self.cause_in(module, one.statement, seen | {place}) for one in statements)
            self._causes[place] = next(filter(None, causes), "")
        return self._causes.get(place, "")

    def cause_in(self, module: Module, node: ast.AST, seen: frozenset[Any]) -> str:
        uses = module.source.uses(node, False)
        if not uses.words.isdisjoint({"environ", "getenv"}):
            for word in sorted(uses.texts):
                if is_of_machine(word):
                    return word
        for use in uses.names:
            bindings = self.home(module, use.root).source.bindings.get(use.root, [])
            imports = [one.imported for one in bindings if one.imported is not None]
            bound = use.imported or (imports[-1] if imports else None)
            cause = ""
            if bound is not None:
                found, steps = self.resolve(module, bound, use.path)
                if found is None:
                    names = [".".join(steps[: size + 1]) for size in range(len(steps))]
                    cause = f"{names[-1]}()" if any(map(is_unstable, names)) else ""
                    if names[-1] in ("os.environ", "os.environ.copy"):
                        cause = "the environment"
                elif steps:
                    cause = self.cause_of(found, steps[0], seen)
            elif bindings:
                cause = self.cause_of(module, use.root, seen)
            elif is_unstable(use.root) and use.root not in module.values:
                cause = f"{use.root}()"
            if cause:
                return cause
        return ""


def absolute(module: Module, bound: Import) -> str:
    """The module that an import names."""
    if not bound.level:
        return bound.module
    package = module.package.split(".")
    return ".".join([*package[: len(package) - bound.level + 1], *([bound.module] if bound.module else [])])


def fingerprint(thing: Any) -> str:
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


def is_importable(function: types.FunctionType) -> bool:
    """Whether an import gives the function. Then a pickle holds its name alone, and it is what is imported now."""
    found: Any = None if function.__module__ in MAIN else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    while found is not None and found is not function:
        found = wrapped(found)
    return found is function
