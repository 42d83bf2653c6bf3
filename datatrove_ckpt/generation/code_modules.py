"""The user's modules: their files, the statements that bind or change names, unstable values.

Modules are found and parsed, never imported, and nothing is run. The cells of a notebook are one
module.
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

from datatrove_ckpt.generation.code_text import (
    compile_tree,
    digest,
    nested_codes,
    parse,
    unhinted,
    write_code,
    write_tree,
)
from datatrove_ckpt.generation.code_uses import (
    Definition,
    Import,
    Name,
    Uses,
    bound_names,
    dotted,
    imported,
)
from datatrove_ckpt.generation.code_values import MACHINE, UNSTABLE, Path, cells, wrapped

_STARTED = time.time()
_late: set[str] = set()
"""Files of modules that were not loaded when this process looked first."""
PIPELINE = {"datatrove", "datatrove_ckpt"}  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_CELL = re.compile(r"<(i?python-input)-.*>|.*[\\/]ipykernel_\d+[\\/].*")
_CHANGERS = {"setattr", "delattr", "shuffle"}
_BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With)


class Binding(NamedTuple):
    """A statement that binds or changes a module's name; ``tests`` are the conditions around it."""

    statement: ast.stmt
    tests: tuple[ast.expr, ...] = ()
    imported: Any = None  # an Import


class CodeSource:
    """A parsed file, or the cells of a notebook.

    Attributes:
        bindings: of its names, in order.
        changes: statements that change what a name stands for: ``D[k] = v``, ``D.update()``,
            ``@render.register``.
    """

    def __init__(self, texts: tuple[tuple[str, str], ...], documented: bool) -> None:
        self._texts = dict(texts)
        self._documented = documented
        self._trees: dict[str, ast.Module] = {}
        self.bindings: dict[str, list[Binding]] = {}
        self.changes: dict[str, list[Binding]] = {}
        self._uses: dict[ast.AST, Uses] = {}
        self._text: dict[ast.AST, str] = {}
        for file, text in texts:
            try:
                self._trees[file] = parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            self._collect(self._trees[file].body, ())

    def statements(self, name: str) -> list[Binding]:
        """Returns the statements that bind a name, except imports, and those that change its
        value.
        """
        found = [*self.bindings.get(name, []), *self.changes.get(name, [])]
        return list(dict.fromkeys(one for one in found if one.imported is None))

    def imports(self, name: str) -> list[Binding]:
        return [one for one in self.bindings.get(name, []) if one.imported is not None]

    def _collect(self, body: list[ast.stmt], tests: tuple[ast.expr, ...]) -> None:
        for node in map(unhinted, body):
            bound = Binding(node, tests)
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, found in imported(node):
                    self._add(self.bindings, [name], bound._replace(imported=found))
            elif isinstance(node, _BLOCKS):
                inside = [
                    child
                    for child in ast.iter_child_nodes(node)
                    if isinstance(child, ast.expr | ast.withitem)
                ]
                conditions = [child for child in inside if isinstance(child, ast.expr)]
                for part in (node, *getattr(node, "handlers", [])):
                    for name in ("body", "orelse", "finalbody"):
                        self._collect(getattr(part, name, []), (*tests, *conditions))
                self._add(self.bindings, bound_names(inside), bound)
            elif isinstance(node, Definition):
                decorators = [dotted(one) for one in node.decorator_list]
                self._add(self.changes, [one[0] for one in decorators if len(one) > 1], bound)
                if ["overload"] not in [one[-1:] for one in decorators]:
                    if not tests:  # it replaces the one before
                        self.bindings.pop(node.name, None)
                    self._add(self.bindings, [node.name], bound)
            else:
                self._add(self.bindings, bound_names([node]), bound)
                self._add(self.changes, _stored(node), bound)

    def _add(self, table: dict[str, list[Binding]], names: Any, bound: Binding) -> None:
        for name in names:
            if bound not in table.setdefault(name, []):
                table[name].append(bound)

    def uses(self, node: ast.AST) -> Uses:
        if node not in self._uses:
            self._uses[node] = Uses(node, self._documented or self._is_for_library(node))
        return self._uses[node]

    def text(self, node: ast.AST) -> str:
        """Returns the text of a part of the file. Call ``uses`` first."""
        if node not in self._text:
            self._text[node] = write_tree(node)
        return self._text[node]

    def _is_for_library(self, node: ast.AST) -> bool:
        """Returns whether an installed package, which may read docstrings, decorates or subclasses
        a definition.
        """
        around = [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]
        bound = [one.imported for part in around for one in self.imports("".join(dotted(part)[:1]))]
        packages = {one.module.partition(".")[0] for one in bound if not one.level}
        return any(_PACKAGES.search(_file(package) or "") for package in packages - PIPELINE)

    @functools.cache  # noqa: B019 (source_of keeps it, too)
    def _definitions(self, lambdas: bool) -> dict[str, list[tuple[str, int, ast.AST]]]:
        """Returns nodes of functions and classes, or of lambdas too, by name."""
        found: dict[str, list[tuple[str, int, ast.AST]]] = {}
        for file, tree in self._trees.items():
            waiting: list[ast.AST] = [tree]
            for node in waiting:
                inside = ast.iter_child_nodes(node)
                waiting += [child for child in inside if lambdas or not isinstance(child, ast.expr)]
                if isinstance(node, Definition | ast.Lambda):
                    first = (getattr(node, "decorator_list", None) or [node])[0]
                    found.setdefault(getattr(node, "name", "<lambda>"), []).append(
                        (file, first.lineno, node)
                    )
        return found

    @functools.cache  # noqa: B019 (source_of keeps it, too)
    def _codes(self, file: str) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for code in nested_codes(compile_tree(parse(self._texts[file]))):
            found.setdefault((code.co_name, write_code(code)), []).append(code.co_firstlineno)
        return found

    def named(self, name: str) -> list[ast.AST]:
        return [node for _, _, node in self._definitions(False).get(name, [])]

    def find(self, code: types.CodeType, edited: bool) -> list[ast.AST]:
        """Finds the function of a code object: by its line, or, if the file was edited, by its
        bytecode.
        """
        file = code.co_filename
        line = code.co_firstlineno
        if file not in self._texts:
            file = next(iter(self._texts))
        if edited:
            lines = self._codes(file).get((code.co_name, write_code(code)), [])
            line = min(lines, key=lambda one: abs(one - line), default=-1)
        known = self._definitions(code.co_name == "<lambda>").get(code.co_name, [])
        return [node for where, first, node in known if (where, first) == (file, line)]


def _stored(node: ast.stmt) -> Iterator[str]:
    """Yields what a statement stores into, calls a method of, or gives to a function that changes
    it.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            yield from dotted(part.value)[:1]
            if not _CHANGERS.isdisjoint(dotted(part.value)):
                yield from [one.id for one in part.value.args if isinstance(one, ast.Name)]
        elif isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            yield from dotted(part)[:1]


source_of = functools.lru_cache(maxsize=512)(CodeSource)


class Module:
    """A file of the user, or the cells of a notebook.

    Args:
        namespace: its globals; empty: other processes may not have loaded it.
    """

    def __init__(
        self, name: str, file: str, namespace: Mapping[str, Any], documented: bool
    ) -> None:
        self.name = name
        self.file = file
        self.folder = ""
        if not file.startswith("<"):
            self.folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120
        self.folders: list[str] = []
        self.values = namespace
        linecache.checkcache(file)
        files = [file]
        if _CELL.match(file):
            files = [*filter(_CELL.match, linecache.cache)]
        loader = {"__loader__": self.values.get("__loader__"), "__name__": name}
        texts = tuple((one, "".join(linecache.getlines(one, loader))) for one in files)
        self.source: CodeSource = source_of(texts, documented)
        loaded = vars(sys.modules.get(name, types.ModuleType(name)))
        self.travels = name in MAIN or (bool(namespace) and loaded is not namespace)
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

    def find(self, code: types.CodeType) -> list[ast.AST]:
        return self.source.find(code, self.was_edited)


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def is_of_user(file: str | None, module: str | None) -> bool:
    """Returns whether a file is not of an installed package, the standard library or this
    package.
    """
    if file is None or str(module).partition(".")[0] in PIPELINE:
        return False
    return bool(_CELL.match(file)) or not (
        file.startswith(("<", _STANDARD_LIBRARY)) or _PACKAGES.search(file)
    )


class Project:
    """The user's modules. Filled on the way.

    Attributes:
        changed: names of what the rollout changes.
        packages: that are the user's although they are installed.
        left: what is not compared, and why.
    """

    def __init__(self, changed: frozenset[str], documented: bool) -> None:
        self.changed = changed
        self._documented = documented
        self.packages: set[str] = set()
        self.left: dict[str, None] = {}
        self._modules: dict[str, Module | None] = {}
        self._spaces: dict[tuple[int, str], Module] = {}
        self._causes: dict[Any, str] = {}
        self._unstable: dict[type, dict[str, str]] = {}

    def owns(self, thing: Any) -> bool:
        if not isinstance(thing, types.FunctionType | types.ModuleType | type):
            return False
        if isinstance(thing, types.FunctionType):
            name = str(thing.__module__)
            file: str | None = thing.__code__.co_filename
            # By exec.
            if file == "<string>" and (
                name in ("None", "builtins", *MAIN) or self.module(name) is not None
            ):
                return True
        else:
            name = thing.__name__
            if isinstance(thing, type):
                name = str(thing.__module__)
            file = _file(name)
            # Loaded by its path.
            if isinstance(thing, types.ModuleType) and sys.modules.get(name) is not thing:
                file = getattr(thing, "__file__", None)
            if file is None and name in MAIN:  # a notebook
                return True
            if isinstance(thing, type) and name not in sys.modules:  # of a pickle
                return any(
                    map(
                        self.owns,
                        [
                            one
                            for one in vars(thing).values()
                            if isinstance(one, types.FunctionType)
                        ],
                    )
                )
        return self._is_users_file(file, name)

    def _is_users_file(self, file: str | None, module: str) -> bool:
        return is_of_user(file, module) or (
            file is not None and module.partition(".")[0] in self.packages
        )

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            loaded = sys.modules.get(name)
            file = _file(name)
            folders = [*getattr(loaded, "__path__", [])]
            if loaded is None:
                spec = None
                above = name.rpartition(".")[0]
                parent = self.module(above) if above else None
                if parent is not None:
                    spec = PathFinder.find_spec(name, parent.folders)
                elif not above:
                    spec = PathFinder.find_spec(name)
                file = getattr(spec, "origin", None)
                folders = [*(getattr(spec, "submodule_search_locations", None) or [])]
            place = file
            if folders and file is None:
                place = os.path.join(folders[0], "")  # noqa: PTH118
            self._modules[name] = None
            if place and self._is_users_file(place, name) and not place.endswith((".so", ".pyd")):
                if loaded is None:
                    _late.add(place)
                values: Mapping[str, Any] = getattr(loaded, "__dict__", {})
                if place in _late:
                    values = {}
                found = self._modules[name] = Module(name, place, values, self._documented)
                found.folders = folders
        return self._modules[name]

    def module_of(self, value: types.ModuleType) -> Module | None:
        """Does the same for a module that is a value: a module loaded by its path is not what its
        name imports.
        """
        if sys.modules.get(value.__name__) is value:
            return self.module(value.__name__)
        return self._made(value.__name__, str(value.__file__), vars(value))

    def space(self, function: types.FunctionType) -> Module:
        space = function.__globals__
        file = function.__code__.co_filename
        name = str(space.get("__name__", function.__module__))
        if getattr(sys.modules.get(name), "__dict__", None) is space:
            found = self.module(name)
            if found is not None and os.path.abspath(found.file) == os.path.abspath(file):  # noqa: PTH100
                return found
        return self._made(name, file, space)

    def _made(self, name: str, file: str, values: dict[str, Any]) -> Module:
        place = (id(values), _CELL.sub("", file))
        if place not in self._spaces:
            self._spaces[place] = Module(name, file, values, self._documented)
        return self._spaces[place]

    def source_of(self, thing: Any) -> tuple[Module | None, list[Any]]:
        if isinstance(thing, types.FunctionType):
            space = self.space(thing)
            return space, space.find(thing.__code__)
        methods = [
            one
            for one in vars(thing).values()
            if isinstance(one, types.FunctionType) and self.owns(one)
        ]
        module = self.module(thing.__module__)
        if module is None and methods:
            module = self.space(methods[0])
        if module is None:
            return None, []
        return module, [
            one for one in module.source.named(thing.__name__) if isinstance(one, ast.ClassDef)
        ]

    # where a name leads --------------------------------------------------------------------------

    def binds(self, module: Module, name: str) -> bool:
        value = module.values.get(name)
        return name in module.source.bindings or (
            name in module.values and not isinstance(value, types.ModuleType)
        )

    def targets(
        self, module: Module, use: Name, seen: frozenset[Any] = frozenset()
    ) -> Iterator[tuple[Module | None, Path]]:
        """Yields where a name leads, through all imports: the user's module and the steps in it;
        for other modules None and the full path.
        """
        place = (module.file, use)
        root = use.root
        if place in seen:  # modules that take it from each other
            return
        seen |= {place}
        bound = {one.imported: None for one in module.source.bindings.get(root, [])}
        if use.imported is not None:
            bound = {use.imported: None}
        for one in bound:
            if one is None:
                yield module, (root, *use.path)
            else:
                yield from self._imported(module, one, use.path, seen)
        if not bound:
            for star in reversed(module.source.imports("*")):
                found = self.module(absolute(module, star.imported))
                if found is not None and root in found.values.get("__all__", [root]):
                    leads = [*self.targets(found, use, seen)]
                    yield from leads
                    if leads:
                        return
            if root in module.values and (root == "__doc__" or not root.startswith("__")):
                yield module, (root, *use.path)

    def _imported(
        self, module: Module, bound: Import, path: Path, seen: frozenset[Any]
    ) -> Iterator[tuple[Module | None, Path]]:
        base = absolute(module, bound)
        found = self.module(base)
        steps = path
        if bound.name is not None:
            steps = (bound.name, *path)
        if found is None:
            yield None, (*base.split("."), *steps)
            return
        while steps and (found is module or not self.binds(found, steps[0])):
            below = self.module(f"{found.name}.{steps[0]}")
            if below is None:
                break
            found = below
            steps = steps[1:]
        leads: list[tuple[Module | None, Path]] = []
        if steps:
            leads += self.targets(found, Name(steps[0], steps[1:]), seen)
        if leads or (steps and steps[0].startswith("__")):
            yield from leads
        else:
            yield found, ()

    # what differs at each start ------------------------------------------------------------------

    def unstable_names(self, module: Module, nodes: list[ast.AST]) -> dict[str, str]:
        """Returns the names that definitions bind to another value at each start, with the
        cause.
        """
        found: dict[str, str] = {}
        kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign)
        suspects = [one for one in nodes if self.cause_in(module, one)]
        for node in [part for one in suspects for part in ast.walk(one) if isinstance(part, kinds)]:
            cause = self.cause_in(module, node)
            for part in ast.walk(node):
                if (
                    cause
                    and isinstance(part, ast.Name | ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                ):
                    found[dotted(part)[-1]] = cause
        return found

    def unstable_of(self, cls: type) -> dict[str, str]:
        if cls not in self._unstable:
            self._unstable[cls] = {}
            for each in filter(self.owns, cls.__mro__):
                module = self.module(each.__module__)
                if module is not None:
                    self._unstable[cls] |= self.unstable_names(
                        module, module.source.named(each.__name__)
                    )
            self.left |= {
                f"{cls.__qualname__}.{name} ({cause})": None
                for name, cause in self._unstable[cls].items()
            }
        return self._unstable[cls]

    def cause_of(self, module: Module, name: str) -> str:
        place = (module.file, name)
        if place not in self._causes:
            self._causes[place] = ""  # where it leads back here
            for one in module.source.statements(name):
                words = module.source.uses(one.statement).words
                cause = self.cause_in(module, one.statement)
                if (
                    "set" in words
                    and "sorted" not in words
                    and isinstance(module.values.get(name), str | list | tuple)
                ):
                    cause = "the order of a set"
                self._causes[place] = self._causes[place] or cause
        return self._causes[place]

    def cause_in(self, module: Module, node: ast.AST) -> str:
        uses = module.source.uses(node)
        if not uses.words.isdisjoint({"environ", "getenv"}):
            for word in filter(MACHINE.fullmatch, sorted(uses.texts)):
                return word
        for use in uses.names:
            cause = ""
            if UNSTABLE.fullmatch(use.root) and not self.binds(module, use.root):
                cause = f"{use.root}()"
            for found, steps in self.targets(module, use):
                if found is not None and steps:
                    cause = cause or self.cause_of(found, steps[0])
                elif found is None:
                    names = [".".join(steps[:size]) for size in range(1, len(steps) + 1)]
                    if any(map(UNSTABLE.fullmatch, names)):
                        cause = f"{names[-1]}()"
            if cause:
                return cause
        return ""


def absolute(module: Module, bound: Import) -> str:
    if not bound.level:
        return bound.module
    package = module.package.split(".")
    return ".".join([*package[: len(package) - bound.level + 1], bound.module]).rstrip(".")


def fingerprint(thing: Any) -> str:
    """Identifies the function or object that was described, by the code that a pickle holds, and
    constants.
    """
    if isinstance(thing, functools.partial):
        return digest(
            "partial",
            *map(fingerprint, [thing.func, *thing.args, *thing.keywords, *thing.keywords.values()]),
        )
    if isinstance(thing, types.MethodType):
        return digest(fingerprint(thing.__self__), thing.__name__)
    if isinstance(thing, types.FunctionType):
        if is_importable(thing):
            return f"{thing.__module__}.{thing.__qualname__}"
        # Which may hold the function itself.
        around = (getattr(one, "__code__", one) for _, one in cells(thing))
        return digest(write_code(thing.__code__), *map(fingerprint, around))
    if isinstance(thing, types.CodeType):
        return write_code(thing)
    if isinstance(thing, str | int | float | bytes | None):
        return repr(thing)
    return type(thing).__qualname__


def is_importable(function: types.FunctionType) -> bool:
    """Whether an import gives the function, so that a pickle holds only its name."""
    found: Any = sys.modules.get(function.__module__)
    if function.__module__ in MAIN:
        return False
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    while found is not None and found is not function:
        found = wrapped(found)
    return found is function
