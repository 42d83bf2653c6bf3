"""Finds the user's code: the source that a rollout reaches by name, and values that are not in it.

    a name               is looked up in its own module, and through its imports; never anywhere
                         else
    a function, a class  joins with its text, the statements that change it, and all that the text
                         names
    a module             joins whole if it is used as a value
    a variable           counts by its value if that is plain (a prompt, a dict, a path): only the
                         parts that are used
    another variable     counts by its source; functions and objects of the user in its value join
    what differs at each start or on each machine (time, chance, a pid) counts by its source, and is
    named

Installed packages do not count. What the rollout changes (a cache, a counter) counts as this
process first saw it. Fields are named without modules, so that a helper may move; equal names are
numbered.
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import os
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_modules import (
    MAIN,
    PIPELINE,
    Module,
    Project,
    fingerprint,
    is_importable,
)
from datatrove_ckpt.generation.code_text import digest, loaded_names, write_code
from datatrove_ckpt.generation.code_uses import Definition, Function, Name
from datatrove_ckpt.generation.code_values import (
    Path,
    Plain,
    attributes,
    cells,
    is_pacing,
    type_name,
    wrapped,
)

_DESCRIBING = re.compile(
    "__doc__|getdoc|get_type_hints|(__|get_)annotations(__)?|signature|getsource|getfullargspec|model_json_schema|"
    "TypeAdapter|create_model"
)
_TEXT_FILE = re.compile(r".*\.(txt|md|json|ya?ml|toml|j2|jinja2?|prompt|tmpl)")
_WRITES = re.compile("write(_text|_bytes|lines)?|dump")
_MAX_FILE = 2**20
_DEEPEST = 20_000
_MISSING = object()
_one_at_a_time = threading.RLock()
USED = "uses."
"""Beginning of the fields about what a rollout uses."""


def is_bytecode(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"bytecode \S+ [0-9a-f]{32}", value) is not None


class Description(NamedTuple):
    """Describes the user's code.

    Attributes:
        notes: what each field is about.
        own: the fields that describe what a pickle holds by value.
        counts: how many things of one name are in ``own``.
        edges: what ``own`` uses of modules that can be imported.
        state: the names of what the code changes.
        documented: docstrings and hints count.
        left: what is not compared, and why.
    """

    fields: dict[str, object]
    notes: dict[str, str]
    own: dict[str, object]
    counts: dict[str, int]
    edges: list[tuple[Any, ...]]
    state: frozenset[str]
    documented: bool
    left: list[str]


class _Found:
    def __init__(self, label: str, where: str, own: bool) -> None:
        self.label = label
        self.where = where
        self.own = own
        self.root = self.is_code = False
        self.paths: set[Path] = set()
        self.clear()

    def clear(self) -> None:
        self.texts: list[str] = []
        self.bytecode: list[str] = []
        self.values: dict[str, object] = {}
        self.words: dict[str, str] = {}


class Walk:
    """One walk through the code. See the module.

    Args:
        state: names of what is known to change while the rollout runs.
        documented: docstrings and hints count.
        before: describes what came by value.
    """

    def __init__(self, state: frozenset[str], documented: bool, before: Description | None) -> None:
        self._project = Project(state, documented)
        self._before = before
        self._state = set(state)
        self._documented = documented
        self._found: dict[object, _Found] = {}
        self._waiting: list[tuple[Any, ...]] = []
        self._edges: dict[tuple[Any, ...], None] = {}

    # from name to name ---------------------------------------------------------------------------

    def _take(
        self, found: _Found, module: Module, node: ast.AST, runs: bool, closed: Iterable[str] = ()
    ) -> list[Name]:
        """Adds a part of a module, and follows its names.

        Returns what it uses of enclosing functions.
        """
        uses = module.source.uses(node)
        found.texts.append(module.source.text(node))
        found.words |= dict.fromkeys(
            [*uses.texts, *filter(_WRITES.fullmatch, sorted(uses.words))], module.folder
        )
        self._documented |= any(map(_DESCRIBING.fullmatch, uses.words))
        if not uses.words.isdisjoint({"import_module", "__import__"}) and not uses.texts:
            self._project.left[f"the module that {found.where} imports by a computed name"] = None
        if runs:
            self._state |= uses.changed
        for name in uses.names:
            if name.root not in closed:
                self._follow(found, module, name)
        return [name for name in uses.names if name.root in closed]

    def _take_all(self, found: _Found, module: Module, name: str) -> None:
        for one in module.source.statements(name):
            for node in (one.statement, *one.tests):
                self._take(found, module, node, getattr(node, "name", "") == name)

    def _follow(self, found: _Found, module: Module, name: Name) -> None:
        root = name.root
        if root == "globals" and root not in module.source.bindings:
            self._go(found, module, ())
        for bound in module.source.imports(root):
            for test in bound.tests:
                self._take(found, module, test, False)
            if bound.imported.name not in (None, root):
                found.texts.append(f"{root}={bound.imported.name}")
        for target, steps in self._project.targets(module, name):
            if target is None:
                found.texts.append(f"{root}={'.'.join(steps[: len(steps) - len(name.path)])}")
            else:
                self._go(found, target, steps)

    def _go(self, found: _Found, module: Module, steps: Path, label: str = "") -> None:
        """Follows steps into a module.

        What a pickle holds by value notes what it uses of imported modules.
        """
        if found.own and not module.travels:
            self._edges[module.name, steps, label] = None
        elif steps:
            self._reach(module, steps, label)
        else:
            for name in module.source.bindings:
                if not module.source.imports(name) and (
                    name == "__getattr__" or not name.startswith("__")
                ):
                    self._reach(module, (name,))

    def _reach(self, module: Module, steps: Path, label: str = "") -> None:
        if self._before is not None and module.travels:
            return
        name, *path = steps
        place = (module.file, name)
        if place not in self._found:
            self._found[place] = _Found(name, _where(module, name), module.travels)
        found = self._found[place]
        if label:
            found.label = label
            found.root = True
        if tuple(path) not in found.paths:
            found.paths.add(tuple(path))
            self._waiting.append((self._visit, found, module, name))

    # what is there -------------------------------------------------------------------------------

    def _visit(self, found: _Found, module: Module, name: str) -> None:
        found.clear()
        value = module.values.get(name, _MISSING)
        found.is_code = any(
            getattr(one.statement, "name", "") == name for one in module.source.statements(name)
        )
        if found.is_code or value is _MISSING:
            self._take_all(found, module, name)
        if found.is_code:
            self._look_inside(found, module, name, value)
        elif value is not _MISSING and not is_pacing(value):
            cause = self._project.cause_of(module, name)
            plain = self._add(
                found, module.values, name, value, module.folder, found.paths, cause, prefix=""
            )
            if plain.is_opaque or cause or plain.cause:
                found.values = {}
                self._take_all(found, module, name)
            found.words |= dict.fromkeys(re.findall(r"[^'\"/]+", str(found.values)), module.folder)

    def _look_inside(self, found: _Found, module: Module, top: str, value: Any) -> None:
        """Adds what the source of a definition does not show: wrappers, computed values, what was
        set later.
        """
        parts = {"": value}
        if isinstance(value, type):
            parts = dict(sorted(vars(value).items()))
        for name, part in parts.items():
            inner = getattr(part, "fget", None) or getattr(part, "__func__", part)
            code = getattr(inner, "__code__", None)
            if code is not None and code.co_qualname == f"{top}.{name}".rstrip("."):
                self._look_at_function(found, module, inner)
            elif isinstance(part, str | int | float | bytes):
                if not name.startswith("_") and name not in self._project.unstable_of(value):
                    self._add(found, value, name, part, module.folder)
            elif not name.startswith("__"):
                self._reach_all(found, Plain(self._project, module.folder).look(value, name, inner))

    def _look_at_function(self, found: _Found, module: Module, function: Any) -> None:
        """Adds what a definition computed when it ran: its defaults, and which definition of its
        name counts.
        """
        node: Any = next(iter(module.find(function.__code__)), None)
        if node is None and module.was_edited:
            # The source was edited after it was imported.
            found.bytecode.append(write_code(function.__code__))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        same = [one.statement for one in module.source.statements(node.name)]
        if node in same[:-1]:
            found.values[f" {same.index(node)}"] = node.name
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)][
            -len(node.args.defaults) :
        ]
        defaults: list[tuple[str, ast.expr, Any]] = [
            *zip(names, node.args.defaults, function.__defaults__ or (), strict=False)
        ]
        by_name = function.__kwdefaults__ or {}
        for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None and one.arg in by_name:
                defaults.append((one.arg, default, by_name[one.arg]))
        for name, written, value in defaults:
            if not isinstance(written, ast.Constant) and isinstance(
                value, str | int | float | bytes
            ):
                cause = self._project.cause_in(module, written)
                self._add(found, function, name, value, module.folder, cause=cause)

    def _reach_all(self, origin: _Found, plain: Plain) -> None:
        for thing in plain.code:
            if isinstance(thing, types.FunctionType | type):
                plain.is_opaque |= not self._code(origin, thing)
            elif isinstance(thing, types.ModuleType):
                module = self._project.module_of(thing)
                if module is not None:
                    self._go(origin, module, ())

    def _code(self, origin: _Found, thing: Any, label: str = "") -> bool:
        """Follows a function or class. Returns False if its source is part of a value's."""
        module, nodes = self._project.source_of(thing)
        if module is None:
            return False
        top = thing.__qualname__.partition(".")[0]
        around = [
            one.statement
            for one in module.source.statements(top)
            if isinstance(one.statement, Definition)
        ]
        spans = [range(one.lineno, (one.end_lineno or 0) + 1) for one in around]
        if "<locals>" not in thing.__qualname__ and any(
            node.lineno in span for span in spans for node in nodes
        ):
            self._go(origin, module, (top,), label)
            return True
        place: Any = thing
        own = origin.own
        if isinstance(thing, types.FunctionType):
            # dill copies functions. Two functions of one factory have the same code, and other
            # cells.
            around_it = [id(one) for _, one in cells(thing) if isinstance(one, list | dict | set)]
            place = (fingerprint(thing), *around_it)
            own = module.travels or (own and not is_importable(thing))
        elif not nodes:
            return False
        if place not in self._found:
            found = self._found[place] = _Found(
                label or thing.__name__, _where(module, thing.__qualname__), own
            )
            found.root = bool(label)
            found.is_code = True
            if self._before is None or not own:
                self._waiting.append((self._visit_code, found, module, thing, nodes))
        return True

    def _visit_code(self, found: _Found, module: Module, thing: Any, nodes: list[Any]) -> None:
        closed = dict(cells(thing))
        used: list[Name] = []
        for node in nodes:
            used += self._take(found, module, node, True, closed)
        if not nodes:
            found.bytecode.append(write_code(thing.__code__))
            used += map(Name, closed)
            for name in sorted(loaded_names(thing.__code__) & module.values.keys()):
                self._reach(module, (name,))
        around = [
            one for name in thing.__qualname__.split(".")[:-1] for one in module.source.named(name)
        ]
        causes = self._project.unstable_names(
            module, [one for one in around if isinstance(one, Function)]
        )
        for name in dict.fromkeys(use.root for use in used):
            paths = {use.path for use in used if use.root == name}
            self._add(found, thing, name, closed[name], module.folder, paths, causes.get(name, ""))

    def _add(
        self,
        found: _Found,
        owner: object,
        name: str,
        value: object,
        folder: str = "",
        paths: Iterable[Path] = ((),),
        cause: str = "",
        prefix: str = ".{}",
    ) -> Plain:
        plain = Plain(self._project, folder).look(owner, name, value, paths)
        self._reach_all(found, plain)
        cause = cause or plain.cause
        if cause:
            self._project.left[f"{found.where}{prefix.format(name)} ({cause})"] = None
        elif not is_pacing(value):
            found.values |= {
                prefix.format(name) + field: part for field, part in plain.parts.items()
            }
        return plain

    # where it begins -----------------------------------------------------------------------------

    def root(self, label: str, thing: object) -> None:
        origin = self._found["root", label] = _Found(label, label, own=True)
        origin.root = True
        while isinstance(thing, functools.partial | types.MethodType):
            if isinstance(thing, types.MethodType):
                origin.values[f".{thing.__name__}"] = thing.__name__
                thing = thing.__self__
            else:
                arguments: dict[Any, object] = {**dict(enumerate(thing.args)), **thing.keywords}
                for name, value in arguments.items():
                    self._add(origin, thing, str(name), value)
                thing = thing.func
        inner = thing
        while wrapped(inner) is not None:
            inner = wrapped(inner)
        subject: Any = type(thing)
        values: dict[Any, Any] = attributes(thing)
        if isinstance(thing, dict):
            values = thing
        elif thing is not None:
            if isinstance(thing, type):
                subject = thing
                values = {}
            if isinstance(inner, types.FunctionType):
                subject = inner
                values = {"wrapped": thing}
            if thing is inner is subject:
                values = {}
            package = str(subject.__module__).partition(".")[0]
            if not self._project.owns(subject) and package not in {
                *PIPELINE,
                *sys.stdlib_module_names,
            }:
                self._project.packages.add(package)  # even if it is installed
            origin.values[""] = subject.__name__
            if self._project.owns(subject):
                self._code(origin, subject, label)
            elif isinstance(subject, type):
                origin.values[""] = type_name(subject)
        for name in sorted(values.keys() - self._project.unstable_of(type(thing)), key=str):
            self._add(origin, thing, str(name), values[name])

    # the end -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._waiting:
            visit, *arguments = self._waiting.pop(0)
            visit(*arguments)

    def describe(self, things: Mapping[str, object]) -> Description:
        before = self._before or Description({}, {}, {}, {}, [], self._project.changed, False, [])
        fields = dict(before.own)
        notes = dict(before.notes)
        counts = collections.Counter(before.counts)
        if self._before is None:
            for label, thing in things.items():
                self.root(label, thing)
        self._run()
        own = fields | self._fields([*self._found.values()], notes, counts)
        edges = before.edges or [*self._edges]
        own_counts = dict(counts)
        known = len(self._found)
        for name, steps, label in edges:
            module = self._project.module(name)
            if module is not None:
                self._go(_Found("", "", own=False), module, steps, label)
        self._run()
        others = [*self._found.values()][known:]
        fields = own | self._fields(others, notes, counts)
        left = [*self._project.left]
        return Description(
            fields, notes, own, own_counts, edges, frozenset(self._state), self._documented, left
        )

    def _fields(
        self, things: list[_Found], notes: dict[str, str], counts: collections.Counter[str]
    ) -> dict[str, object]:
        fields: dict[str, object] = {}
        for found in sorted(things, key=lambda one: not one.root):
            made: dict[str, object] = {}
            if found.texts or found.values or found.bytecode:
                counts[found.label] += 1
                base = f"{USED}{found.label}"
                if found.root:
                    base = found.label
                elif counts[found.label] > 1:
                    base += f" ({counts[found.label]})"
                if found.bytecode:
                    made[f"{base} code"] = (
                        f"bytecode {sys.implementation.cache_tag} {digest(*found.bytecode)}"
                    )
                elif found.texts:
                    made[f"{base} code"] = f"source {digest(*found.texts)}"
                made |= {f"{base}{name}": value for name, value in found.values.items()}
                writes = any(map(_WRITES.fullmatch, found.words))
                for name, folder in found.words.items():
                    if _TEXT_FILE.fullmatch(name) and not writes:
                        made |= self._text_file(name, folder)
            fields |= made
            note = found.where
            if found.is_code:
                note = f"code of the function {found.where}"
            notes |= dict.fromkeys(made, note)
        return fields

    def _text_file(self, name: str, folder: str) -> dict[str, object]:
        words = [word for found in self._found.values() for word in found.words]
        for word in ("", "..", os.getcwd(), *words):  # noqa: PTH109
            path = os.path.join(folder, word, name)  # noqa: PTH118
            if os.path.isfile(path) and os.path.getsize(path) < _MAX_FILE:  # noqa: PTH113, PTH202
                with open(path, "rb") as file:  # noqa: PTH123
                    return {f"{USED}file {name}": f"text {digest(file.read().decode('latin-1'))}"}
        return {}


def describe(things: Mapping[str, object], before: Description | None = None) -> Description:
    """Describes functions and objects, by their field.

    ``before``: describes what a pickle brought by value.
    """
    known = (frozenset[str](), False)
    if before is not None:
        known = (before.state, before.documented)
    with _one_at_a_time, _deep():
        while True:
            found = Walk(*known, before).describe(things)
            if (found.state, found.documented) == known:
                return found
            known = (found.state, found.documented)


@contextmanager
def _deep() -> Iterator[None]:
    collects = gc.isenabled()
    limit = sys.getrecursionlimit()
    gc.disable()  # it would scan hundreds of thousands of nodes again and again
    sys.setrecursionlimit(max(limit, _DEEPEST))  # hundreds of elifs are a tree as deep
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        if collects:
            gc.enable()


def _where(module: Module, name: str) -> str:
    if module.name in (*MAIN, "builtins", "None"):
        return name
    return f"{module.name}.{name}"
