"""What the user's code is: the source that a rollout reaches, and the values that its source does not show.

    a name               is looked up in its own module, and through its imports; never anywhere else
    a function           joins with its text, and with all that the text names
    a class              joins whole, with its bases; so does a module that is used as a value
    a variable           counts by its value if that is plain (a prompt, a dict, a path): only the parts that are used
    another variable     counts by its source; functions and objects of the user in its value join
    what differs at each start or on each machine (time, chance, a pid) counts by its source, and is named

This is repeated until nothing new is found. Modules are found and parsed, never imported. Nothing is asked of installed
packages. What the rollout itself changes (a cache, a counter) is its state, and counts by its source at most.

Fields are named without modules, so that a helper may move to another module. Of two things of one name, the second has
a number. This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_modules import (
    MAIN,
    PIPELINE,
    TEXT_FILES,
    Binding,
    Definition,
    Function,
    Import,
    Module,
    Project,
    absolute,
    bound_names,
    dotted,
    fingerprint,
    is_importable,
)
from datatrove_ckpt.generation.code_values import (
    LEFT,
    LeftOut,
    Path,
    Plain,
    attributes,
    cells,
    digest,
    folder_of,
    key,
    loaded_names,
    type_name,
    without,
    wrapped,
    write_code,
)

_DESCRIBING = {
    *("__doc__", "getdoc", "get_type_hints", "__annotations__", "get_annotations", "signature", "getsource"),
    *("getfullargspec", "model_json_schema", "TypeAdapter", "create_model"),
}
_MAX_FILE = 2**20
_PLAIN = (str, int, float, dict, list, set, tuple)
_MISSING = object()
USED = "uses."
"""Beginning of the fields about what a rollout uses."""


def is_bytecode(value: object) -> bool:
    """The value is a hash that was made without source."""
    return isinstance(value, str) and re.fullmatch(r"bytecode \S+ [0-9a-f]{32}", value) is not None


class Description(NamedTuple):
    """What the user's code is.

    Attributes:
        fields: plain values, by name.
        notes: what each field is about.
        own: those fields that describe what a pickle holds by value.
        counts: how many things of one name are among them.
        edges: what that uses of modules that can be imported.
        state, documented: what it says about all the rest.
        left: what is not compared, and why.
    """

    fields: dict[str, object]
    notes: dict[str, str]
    own: dict[str, object]
    counts: dict[str, int]
    edges: list[tuple[object, ...]]
    state: frozenset[tuple[str, ...]]
    documented: bool
    left: list[str]


class _Step(NamedTuple):
    """How a name is used: what is taken of it, whether that is called, when, and what becomes of it."""

    path: tuple[str, ...] = ()
    called: bool = False
    runs: bool = False
    changed: bool = False
    in_place: bool = False
    writes: bool = False


class _Found:
    """Something that was reached: a definition, a variable, or a function that is a value."""

    def __init__(self, label: str, where: str, own: bool) -> None:
        self.label, self.where, self.own = label, where, own
        self.texts: list[str] = []
        self.bytecode: list[str] = []
        self.values: dict[str, tuple[object, list[str]]] = {}
        self.files: dict[tuple[str, str], None] = {}
        self.is_code = self.root = self.runs = self.writes = self.no_files = False
        self.paths: dict[tuple[str, ...], None] = {}


class Walk:
    """One walk through the code. See the module.

    Args:
        project: what walks before this one have found, too.
        state: what is known to change while the rollout runs.
        documented: docstrings and hints count.
        before: the fields that are known already, of what came by value.
    """

    def __init__(
        self, project: Project, state: frozenset[tuple[str, ...]], documented: bool, before: Description | None
    ) -> None:
        self._user, self._known_state, self.documented = project, state, documented
        self.state: set[tuple[str, ...]] = set()
        self.saw_describing = False
        self._before = before
        self._found: dict[object, _Found] = {}
        self._inside: set[tuple[str, str]] = set()
        self._attributes: set[tuple[str, str, str, Path]] = set()
        self._running: set[str] = set()
        self._waiting: tuple[collections.deque[Callable[[], None]], ...] = (collections.deque(), collections.deque())
        self._edges: dict[tuple[object, ...], None] = {}
        self._words: dict[tuple[str, str], None] = {}
        self._changing: dict[type, LeftOut] = {}

    # from name to name -----------------------------------------------------------------------------------------------

    def _use(self, origin: _Found, module: Module, node: ast.AST, runs: bool, cells: Mapping[str, object]) -> None:
        """Follows what a part of a module names."""
        uses = module.source.uses(node)
        decorators = [module.source.uses(one) for one in getattr(node, "decorator_list", [])]
        self.saw_describing |= not _DESCRIBING.isdisjoint(uses.words)
        self._words |= dict.fromkeys((word, module.folder) for word in uses.texts)
        origin.writes |= uses.writes
        origin.files |= dict.fromkeys((name, module.folder) for name in uses.files)
        if runs:
            self._attributes |= uses.attributes
            self._running |= uses.words.difference(*(one.words for one in decorators))
            self.state |= {(module.name, name, "rebound") for name in uses.rebound}
        built = {chain for one in decorators for chain in one.chains}
        for chain in uses.chains:
            place = uses.changed.get(chain)
            step = _Step(
                chain.path, chain.called, runs and chain not in built, place is not None, bool(place), uses.writes
            )
            if chain.root in cells:  # a module that the enclosing function has imported
                name = (
                    getattr(cells[chain.root], "__name__", "")
                    if isinstance(cells[chain.root], types.ModuleType)
                    else ""
                )
                if (found := self._user.module(name, late=False) if name else None) is not None:
                    self._in_module(origin, found, step, late=False)
            elif chain.imported is not None:
                self._import(origin, module, chain.root, chain.imported, step)
            else:
                self._name(origin, module, chain.root, step)
        if uses.computes_import:
            self._user.left[f"the module that {origin.where} imports by a computed name"] = None

    def _name(self, origin: _Found, module: Module, name: str, step: _Step) -> None:
        bindings, place = self._user.bindings(module, name), (module.file, name)
        if place in self._inside:  # modules that take it from each other
            return
        self._inside.add(place)
        for bound in bindings:
            for test in bound.tests:
                origin.texts.append(module.source.text(test, self.documented))
                self._use(origin, module, test, False, {})
            if bound.imported is not None:
                self._import(origin, module, name, bound.imported, step)
        if any(bound.imported is None for bound in bindings):
            self._reach(origin, module, name, step)
        elif not bindings and (star := self._user.star(module, name, not module.live)) is not None:
            self._go(origin, star, name, step)
        elif not bindings and name in module.values and (name == "__doc__" or not name.startswith("__")):
            self._reach(origin, module, name, step)
        elif name == "globals":
            self._go(origin, module, None, _Step())
        self._inside.discard(place)

    def _import(self, origin: _Found, module: Module, spelled: str, bound: Import, step: _Step) -> None:
        base, late = absolute(module, bound), bound.late or not module.live
        found = self._user.module(base, late)
        if found is None:
            origin.texts.append(f"{spelled}={base}.{bound.name or ''}")
        elif bound.name is None:
            self._in_module(origin, found, step, late)
        elif (found.file, bound.name) not in self._inside and self._user.binds(found, bound.name, late):
            origin.texts += [f"{spelled}={bound.name}"] if spelled != bound.name else []
            self._go(origin, found, bound.name, step)
        elif (below := self._user.module(f"{base}.{bound.name}", late)) is not None:
            self._in_module(origin, below, step, late)
        elif not bound.name.startswith("__"):
            self._go(origin, found, None, _Step())

    def _in_module(self, origin: _Found, module: Module, step: _Step, late: bool) -> None:
        first, rest = (step.path[0] if step.path else ""), step._replace(path=step.path[1:])
        if first and self._user.binds(module, first, late):
            self._go(origin, module, first, rest)
        elif first and (below := self._user.module(f"{module.name}.{first}", late)) is not None:
            self._in_module(origin, below, rest, late)
        elif not first.startswith("__"):
            self._go(origin, module, None, _Step())

    def _go(self, origin: _Found, module: Module, name: str | None, step: _Step, label: str | None = None) -> None:
        """Into a module. What a pickle holds by value notes what it uses of modules that are imported."""
        if origin.own and not module.travels:
            edge = (module.name, name, *step, not module.live, label)
            self._edges[edge] = None
            self._waiting[1].append(lambda: self._enter(module, name, step, label))
        else:
            self._enter(module, name, step, label, origin)

    def _enter(
        self, module: Module, name: str | None, step: _Step, label: str | None = None, origin: _Found | None = None
    ) -> None:
        origin = origin or _Found("", module.name, own=False)
        if name is None:
            for each in module.source.bindings:
                is_own = any(bound.imported is None for bound in self._user.bindings(module, each))
                if is_own and (each == "__getattr__" or not each.startswith("__")):
                    self._reach(origin, module, each, step)
        elif label is not None:
            self._reach(origin, module, name, step, label)
        else:
            self._name(origin, module, name, step)

    def _reach(self, origin: _Found, module: Module, name: str, step: _Step, label: str | None = None) -> None:
        key_, path = (module.name, name, module.live), step.path[:-1] if step.called else step.path
        if self._before is not None and module.travels:
            return
        found = self._found.get(key_)
        if found is None:
            found = self._found[key_] = _Found(name, _where(module, name), module.travels)
        before = (found.label, len(found.paths), found.runs, found.no_files)
        if step.changed and step.runs:
            self.state.add((module.name, name, "changed" if step.in_place or path else "rebound", *path))
        found.label, found.root = (label, True) if label is not None else (found.label, found.root)
        found.paths[path] = None
        found.runs |= step.runs
        found.no_files |= step.writes
        if (found.label, len(found.paths), found.runs, found.no_files) != before:
            self._waiting[0 if found.own else 1].append(lambda: self._visit(found, module, name))

    # what is there ---------------------------------------------------------------------------------------------------

    def _visit(self, found: _Found, module: Module, name: str) -> None:
        found.texts, found.values, found.files = [], {}, {}
        statements = [one for one in self._user.bindings(module, name) if one.imported is None]
        statements += [one for one in module.source.changes.get(name, []) if one not in statements]
        value = module.values.get(name, _MISSING)
        if name == "__doc__":  # as written, since Python 3.13 changes its indentation
            value = ast.get_docstring(module.source.tree)
        if any(isinstance(one.statement, Definition) and one.statement.name == name for one in statements):
            found.is_code = True
            for one in statements:
                self._take(found, module, one, found.runs and getattr(one.statement, "name", "") == name)
            if value is not _MISSING:
                self._look_at_definition(found, module, name, value)
            return
        rebound = (module.name, name, "rebound") in self._known_state
        state = [one[3:] for one in self._known_state if one[:3] == (module.name, name, "changed")]
        paths = [one for one in _shortest(found.paths) if one not in state]
        if rebound:
            return
        plain, fields, is_state = Plain(self._user.owns, self._left_out, module.folder), dict[str, Any](), () in state
        for path in paths if value is not _MISSING else ():
            part, rest = _follow(value, path)
            text = "".join(one if one.startswith("[") else f".{one}" for one in rest)
            part = without(part, {one[len(path) :] for one in state if one[: len(path)] == path})
            is_state |= part is LEFT
            fields[text] = plain.of(part), plain.take_form()
        self._name_left(found.where, plain)
        is_shown = self._reach_all(found, plain) and not plain.is_opaque and value is not _MISSING
        if plain.is_pacing:
            return
        cause = (
            self._user.cause_of(module, name, frozenset()) or _order_of_set(module, statements, value) or plain.cause
        )
        if is_shown and not cause and not is_state:
            found.values = fields
            texts = re.findall(r'"([^"]+)"', json.dumps([one for one, _ in fields.values()]))
            files = [one for one in texts if one.endswith(TEXT_FILES) and not found.no_files]
            found.files |= dict.fromkeys((one, module.folder) for one in files)
            return
        for one in statements:
            self._take(found, module, one, runs=False)
        if cause and value is not _MISSING:
            self._user.left[f"the value of {found.where} ({cause})"] = None

    def _take(self, found: _Found, module: Module, bound: Binding, runs: bool) -> None:
        node = bound.statement
        described = self.documented or self._is_described(module, node)
        found.texts.append(module.source.text(node, described))
        for test in bound.tests:
            found.texts.append(module.source.text(test, described))
            self._use(found, module, test, False, {})
        self._use(found, module, node, runs, {})

    def _is_described(self, module: Module, node: ast.AST) -> bool:
        """A library may read docstring and hints of what it decorates, or of a class that inherits from it."""
        for one in [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]:
            root, *path = dotted(one) or [""]
            imports = [absolute(module, each.imported) for each in self._user.bindings(module, root) if each.imported]
            ours = {*sys.stdlib_module_names, *PIPELINE}
            foreign = [base for base in imports if base.partition(".")[0] not in ours]
            if path[-1:] == ["register"] or any(self._user.module(base, not module.live) is None for base in foreign):
                return True
        return False

    def _look_at_definition(self, found: _Found, module: Module, name: str, value: Any) -> None:
        """What the source of a definition does not show: wrappers, values that were computed, what was set later."""
        definitions = [
            one.statement for one in self._user.bindings(module, name) if isinstance(one.statement, Definition)
        ]
        spans = [range((one.decorator_list or [one])[0].lineno, (one.end_lineno or 0) + 1) for one in definitions]  # type: ignore[list-item]

        def is_written(code: Any) -> bool:  # a class of Python 3.14 has a function that makes its hints
            return (
                code.co_name != "__annotate__"
                and code.co_filename == module.file
                and any(code.co_firstlineno in span for span in spans)
            )

        plain = Plain(self._user.owns, self._left_out, module.folder)
        for each, part in sorted(vars(value).items()) if isinstance(value, type) else [("", value)]:
            inner = getattr(part, "fget", None) or getattr(part, "__func__", part)
            if isinstance(inner, types.FunctionType) and is_written(inner.__code__):
                if module.was_edited and module.source.find(inner.__code__, True) is None:
                    found.bytecode.append(write_code(inner.__code__))  # the source was edited after it was imported
            elif isinstance(part, str | int | float | bytes):
                if not each.startswith("_") and each not in self._left_out(value):
                    self._add(found, f".{each}", part, file=module.file)
            elif not each.startswith("__"):
                plain.of(inner)
        self._reach_all(found, plain)

    def _reach_value(self, origin: _Found, thing: Any) -> bool:
        """Follows a function, class or module of the user. False: its source is that of a value."""
        if isinstance(thing, types.ModuleType):
            if (module := self._user.module(thing.__name__, late=False)) is not None:
                self._go(origin, module, None, _Step())
        elif isinstance(thing, types.FunctionType):
            self._function(origin, thing)
        else:
            return self._class(origin, thing)
        return True

    def _class(self, origin: _Found, cls: type) -> bool:
        methods = [one for one in vars(cls).values() if self._user.owns(one) and isinstance(one, types.FunctionType)]
        module = self._user.module(cls.__module__, late=False) or (self._user.space(methods[0]) if methods else None)
        if module is None:
            return False
        top = cls.__qualname__.partition(".")[0]
        if any(isinstance(one.statement, ast.ClassDef) for one in self._user.bindings(module, top)):
            self._go(origin, module, top, _Step(runs=True))
            return True
        nodes = [node for node, _ in module.source.classes(cls.__name__)]
        if nodes and cls not in self._found:
            found = self._found[cls] = _Found(cls.__name__, _where(module, cls.__qualname__), origin.own)
            found.is_code = True
            for node in nodes:
                self._take(found, module, Binding(node, ()), runs=True)
        return bool(nodes)

    def _function(self, origin: _Found, function: types.FunctionType, label: str | None = None) -> None:
        module = self._user.space(function)
        code, top = function.__code__, function.__qualname__.partition(".")[0]
        node = module.source.find(code, module.was_edited)
        within = [one.statement for one in self._user.bindings(module, top) if isinstance(one.statement, Definition)]
        line = getattr(node, "lineno", 0)
        is_top = any(node is one or one.lineno <= line <= (one.end_lineno or 0) for one in within)
        if "<locals>" not in function.__qualname__ and is_top and node is not None:
            self._go(origin, module, top, _Step(runs=True), label)
            return
        # dill makes a copy of a function. Two of one factory have the same code, and other things around it.
        place = (fingerprint(function), *(id(one) for _, one in cells(function) if isinstance(one, list | dict | set)))
        if place in self._found:
            return
        own = module.travels or (origin.own and not is_importable(function))
        found = self._found[place] = _Found(label or function.__name__, _where(module, function.__qualname__), own)
        found.root, found.is_code, found.runs = label is not None, True, True
        if not (self._before is not None and own):
            self._waiting[0 if own else 1].append(lambda: self._visit_function(found, module, function, node))

    def _visit_function(
        self, found: _Found, module: Module, function: types.FunctionType, node: ast.AST | None
    ) -> None:
        closed = dict(cells(function))
        changed = dict[str, set[Path]]()
        if node is None:
            found.bytecode.append(write_code(function.__code__))
            for name in sorted(loaded_names(function)):
                if name in module.values:
                    self._reach(found, module, name, _Step(runs=True))
        else:
            is_documented = self.documented or self._is_described(module, node)
            found.texts.append(module.source.text(node, is_documented))
            uses = module.source.uses(node)
            if not is_documented:  # hints are a use before Python 3.14, and none since
                named = {"__class__", *uses.rebound, *(chain.root for chain in uses.chains)}
                closed = {name: value for name, value in closed.items() if name in named}
            changed = {name: {()} for name in uses.rebound}
            for chain in uses.changed:
                keys = itertools.takewhile(lambda one: one.startswith("["), chain.path)
                changed.setdefault(chain.root, set()).add(tuple(keys))
            self._use(found, module, node, True, closed)
        around = set(function.__qualname__.split(".")[:-1])
        for name, value in closed.items():
            cause = self._cause_around(module, around, name)
            self._add(found, f".{name}", value, changed.get(name, ()), cause, module.file)

    def _add(
        self, found: _Found, name: str, value: object, changed: Collection[Path] = (), cause: str = "", file: str = ""
    ) -> None:
        """A value that belongs to something: of an enclosing function, an argument, an attribute.

        Args:
            changed: what of it the rollout changes itself.
        """
        plain = Plain(self._user.owns, self._left_out, folder_of(file))
        value = without(value, changed, plain.left)
        written = plain.of(value)
        self._name_left(f"{found.where}{name}", plain)
        if value is LEFT:
            return
        self._reach_all(found, plain)
        if cause := cause or plain.cause:
            self._user.left[f"{found.where}{name} ({cause})"] = None
        elif not plain.is_pacing:
            found.values[name] = written, plain.take_form()

    def _name_left(self, where: str, plain: Plain) -> None:
        """What the rollout changes: what it was at first shows in no source."""
        if any(one for one in plain.left if isinstance(one, _PLAIN)):
            self._user.left[f"{where} (the rollout changes it)"] = None

    def _reach_all(self, found: _Found, plain: Plain) -> bool:
        """Follows the user's functions and classes in values. False: the source of one is that of the value."""
        return False not in [self._reach_value(found, one) for one in plain.code]

    def root(self, label: str, thing: object, changed: Mapping[str, Collection[Path]]) -> None:
        """Begins at a function, object, class, or dict of values.

        Args:
            changed: names of arguments that the rollout changes itself, each with what of it.
        """
        origin = self._found["root", label] = _Found(label, label, own=True)
        origin.root = True
        while isinstance(thing, functools.partial | dict):
            values: dict[Any, Any] = (
                thing if isinstance(thing, dict) else {**dict(enumerate(thing.args)), **thing.keywords}
            )
            for name, value in values.items():
                self._add(origin, f".{name}", value, changed.get(name, ()))
            thing = None if isinstance(thing, dict) else thing.func
        if thing is not None:
            self._root(origin, label, thing)

    def _root(self, origin: _Found, label: str, thing: object) -> None:
        inner = thing
        while (below := wrapped(inner)) is not None:
            inner = below
        cls = thing if isinstance(thing, type) else type(thing)
        if isinstance(thing, types.MethodType):
            origin.values[f".{thing.__name__}"] = thing.__name__, []
            self._root(origin, label, thing.__self__)
        elif isinstance(inner, types.FunctionType):
            origin.values[""] = inner.__name__, []
            self._count_as_users(inner)
            if self._user.owns(inner):
                self._function(origin, inner, label)
            if inner is not thing:
                self._add(origin, ".wrapped", thing)
        else:
            self._count_as_users(cls)
            origin.values[""] = cls.__qualname__ if self._user.owns(cls) else type_name(cls), []
            if self._user.owns(cls):
                self._reach_value(origin, cls)
            left_out = self._left_out(cls)
            unstable = {name: None for name, paths in left_out.items() if paths is None}
            for name, value in sorted(attributes(thing, unstable).items()) if cls is not thing else ():
                self._add(origin, f".{name}", value, left_out.get(name) or ())

    def _count_as_users(self, thing: object) -> None:
        """The package of a root is the user's, even if it is installed."""
        package = str(thing.__module__).partition(".")[0]
        if not self._user.owns(thing) and package not in {*PIPELINE, *sys.stdlib_module_names}:
            self._user.packages.add(package)

    # what differs at each start --------------------------------------------------------------------------------------

    def _left_out(self, cls: type) -> LeftOut:
        """The attributes that change while the rollout runs, or that its class computes anew at each start."""
        if cls not in self._changing:
            names = ["", *(each.__name__ for each in cls.__mro__)]
            found = dict[str, set[Path] | None]()
            for _, _, name, *path in (one for one in self._known_state if not one[0] and one[1] in names):
                found[name] = {*(found.get(name) or ()), tuple(path)}
            for each in cls.__mro__ if self._user.owns(cls) else ():
                found |= dict.fromkeys(self._user.unstable_attributes(each))
            self._changing[cls] = found
        return self._changing[cls]

    def _cause_around(self, module: Module, around: set[str], name: str) -> str:
        """Why a variable of an enclosing function differs."""
        outer = [one for pairs in module.source.definitions.values() for one, _ in pairs]
        for node in (one for one in outer if isinstance(one, Function) and getattr(one, "name", "") in around):
            kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign)
            parts: list[ast.AST] = [
                one for one in ast.walk(node) if isinstance(one, kinds) and name in bound_names(one)[0]
            ]
            given = (
                [node.args] if any(one.arg == name for one in ast.walk(node.args) if isinstance(one, ast.arg)) else []
            )
            for cause in (self._user.cause_in(module, one, frozenset()) for one in [*parts, *given]):
                if cause:
                    return cause
        return ""

    # the end ---------------------------------------------------------------------------------------------------------

    def run(self, edges: Iterable[tuple[Any, ...]] = ()) -> None:
        """Follows everything that waits."""
        for module_name, name, *step, late, label in edges:
            if (module := self._user.module(module_name, late)) is not None:
                self._waiting[1].append(functools.partial(self._enter, module, name, _Step(*step), label))
        while any(self._waiting):
            (self._waiting[0] or self._waiting[1]).popleft()()
        # A method that only statements of a module call fills a table before the rollout runs.
        called = [one for one in self._attributes if one[1] in self._running or one[1].startswith("__") or not one[1]]
        self.state |= {("", owner, name, *path) for owner, _, name, path in called}

    def result(self) -> Description:
        fields, notes = (dict(self._before.own), dict(self._before.notes)) if self._before else ({}, {})
        own_counts = dict[str, int](self._before.counts if self._before else {})
        own, counts = dict(fields), collections.Counter(own_counts)
        for place, found in sorted(self._found.items(), key=lambda one: (not one[1].own, not one[1].root)):
            is_twice = isinstance(place, tuple) and place[-1] is False and (*place[:-1], True) in self._found
            if is_twice or not (found.texts or found.values or found.bytecode):
                continue
            counts[found.label] += 1
            number = f" ({counts[found.label]})" if counts[found.label] > 1 else ""
            base = found.label if found.root else f"{USED}{found.label}{number}"
            own_counts = own_counts | {found.label: counts[found.label]} if found.own else own_counts
            made: dict[str, object] = {}
            if found.bytecode:
                made[f"{base} code"] = f"bytecode {sys.implementation.cache_tag} {digest(*found.bytecode)}"
            elif found.texts:
                made[f"{base} code"] = f"source {digest(*found.texts)}"
            for name, (value, form) in found.values.items():
                made[f"{base}{name}"] = value
                if form:
                    made[f"{base}{name} form"] = digest(*form)
            about = f"code of the function {found.where}" if found.is_code else found.where
            notes |= dict.fromkeys(made, about)
            fields |= made
            own |= made if found.own else {}
        for found in self._found.values():
            for name, folder in () if found.writes else found.files:
                if (path := self._text_file(name, folder)) and f"{USED}file {name}" not in fields:
                    fields[f"{USED}file {name}"] = f"text {digest(path)}"
                    own |= {f"{USED}file {name}": fields[f"{USED}file {name}"]} if found.own else {}
        state = frozenset(self.state | self._known_state)
        return Description(fields, notes, own, own_counts, [*self._edges], state, self.documented, [*self._user.left])

    def _text_file(self, name: str, folder: str) -> str | None:
        """The content of a file of the project."""
        near = [folder, os.path.dirname(folder), os.getcwd()]  # noqa: PTH120, PTH109
        near += [os.path.join(folder, word) for word, one in self._words if one == folder]  # noqa: PTH118
        for place in near:
            path = os.path.join(place, name)  # noqa: PTH118
            if os.path.isfile(path) and os.path.getsize(path) < _MAX_FILE:  # noqa: PTH113, PTH202
                with open(path, "rb") as file:  # noqa: PTH123
                    return file.read().decode("latin-1")
        return None


def describe(things: Mapping[str, object], before: Description | None = None) -> Description:
    """Describes what begins at these functions and objects, by their field.

    Args:
        before: of a pickle: what came by value is described as it says.
    """
    collects = gc.isenabled()
    gc.disable()  # it would look at hundreds of thousands of nodes again and again
    try:
        return _describe(things, before)
    finally:
        if collects:
            gc.enable()


def _describe(things: Mapping[str, object], before: Description | None) -> Description:
    project, changed = Project(), arguments_changed(things.get("rollout_fn"))
    state, documented = (before.state, before.documented) if before else (frozenset[tuple[str, ...]](), False)
    while True:
        walk = Walk(project, state, documented, before)
        if before is None:
            for label, thing in things.items():
                walk.root(label, thing, changed)
        walk.run(before.edges if before is not None else ())
        grown = (state | walk.state, documented or walk.saw_describing)
        if grown == (state, documented):
            return walk.result()
        state, documented = grown


def arguments_changed(function: object) -> dict[str, set[Path]]:
    """The arguments of a function or of an object's call of which it changes what they stand for, with what of it."""
    while isinstance(function, functools.partial) or wrapped(function) is not None:
        function = function.func if isinstance(function, functools.partial) else wrapped(function)
    call = getattr(function, "__func__", function)
    call = call if isinstance(call, types.FunctionType) else vars(type(function)).get("__call__")
    if not isinstance(call, types.FunctionType):
        return {}
    module = Module(str(call.__module__), call.__code__.co_filename, call.__globals__)
    node = module.source.find(call.__code__, module.was_edited)
    return module.source.uses(node).arguments if node is not None else {}


def _follow(value: object, path: tuple[str, ...]) -> tuple[object, tuple[str, ...]]:
    """The part of plain data that a path leads to, and the steps that were gone."""
    for index, step in enumerate(path):
        if isinstance(value, Mapping) and step.startswith("["):
            found = [part for name, part in value.items() if key(name) == step]
        elif isinstance(value, list | tuple) and step.startswith("["):
            found = [part for number, part in enumerate(value) if key(number) == step]
        else:
            known = getattr(value, "__dict__", {}) if not isinstance(value, type | types.ModuleType) else {}
            found = [known[step]] if step in known else []
        if not found:
            return value, path[:index]
        value = found[0]
    return value, path


def _shortest(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without those that begin with another."""
    found: list[tuple[str, ...]] = []
    for path in sorted(paths):
        if not any(path[: len(one)] == one for one in found):
            found.append(path)
    return found


def _order_of_set(module: Module, statements: list[Binding], value: object) -> str:
    if isinstance(value, str | list | tuple):
        for bound in statements:
            uses = module.source.uses(bound.statement)
            roots = {chain.root for chain in uses.chains}
            sets = [one for one in roots if isinstance(module.values.get(one), set | frozenset)]
            if "sorted" not in roots and (sets or uses.shows_set or roots & {"set", "frozenset"}):
                return "the order of a set"
    return ""


def _where(module: Module, name: str) -> str:
    return name if module.name in (*MAIN, "builtins", "None") else f"{module.name}.{name}"
