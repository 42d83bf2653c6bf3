"""What the user's code is: the source that a rollout reaches by name, and the values that its source does not show.

    a name               is looked up in its own module, and through its imports; never anywhere else
    a function, a class  joins with its text, the statements that change it, and all that the text names
    a module             joins whole if it is used as a value
    a variable           counts by its value if that is plain (a prompt, a dict, a path): only the parts that are used
    another variable     counts by its source; functions and objects of the user in its value join
    what differs at each start or on each machine (time, chance, a pid) counts by its source, and is named

Modules are found and parsed, never imported. Installed packages do not count. What the rollout itself changes (a cache,
a counter) is its state, and counts by its source at most.

Fields are named without modules, so that a helper may move to another module. Of two things of one name, the second has
a number. This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_modules import (
    MAIN,
    PIPELINE,
    Binding,
    Module,
    Project,
    fingerprint,
    is_importable,
)
from datatrove_ckpt.generation.code_text import digest, loaded_names, write_code
from datatrove_ckpt.generation.code_uses import TEXT_FILES, Definition, Function, Import, Use
from datatrove_ckpt.generation.code_values import (
    LEFT,
    LeftOut,
    Path,
    Plain,
    attributes,
    cells,
    folder_of,
    follow,
    type_name,
    without,
    wrapped,
)

_DESCRIBING = {
    *("__doc__", "getdoc", "get_type_hints", "__annotations__", "get_annotations", "signature", "getsource"),
    *("getfullargspec", "model_json_schema", "TypeAdapter", "create_model"),
}
_MAX_FILE = 2**20
_Def = ast.FunctionDef | ast.AsyncFunctionDef
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
    edges: list[tuple[Any, ...]]
    state: frozenset[tuple[str, ...]]
    documented: bool
    left: list[str]


class _Found:
    """Something that was reached: a definition, a variable, or a function that is a value."""

    def __init__(self, label: str, where: str, own: bool) -> None:
        self.label, self.where, self.own = label, where, own
        self.texts: list[str] = []
        self.bytecode: list[str] = []
        self.values: dict[str, tuple[object, list[str]]] = {}
        self.files: dict[tuple[str, str], None] = {}
        self.is_code = self.root = self.writes = False
        self.paths: dict[Path, None] = {}


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
        self._user, self._known_state, self._documented, self._before = project, state, documented, before
        self.state: set[tuple[str, ...]] = set()
        self.describes = documented
        self._found: dict[object, _Found] = {}
        self._inside: set[tuple[str, str]] = set()
        self._running: set[str] = set()
        self._attributes: set[tuple[str, str, str, Path]] = set()
        self._waiting: tuple[collections.deque[Callable[[], None]], ...] = (collections.deque(), collections.deque())
        self._edges: dict[tuple[Any, ...], None] = {}
        self._folders: dict[tuple[str, str], None] = {}
        self._changing: dict[type, LeftOut] = {}

    # from name to name -----------------------------------------------------------------------------------------------

    def _take(self, found: _Found, module: Module, bound: Binding, runs: bool) -> None:
        """A statement joins, with the conditions around it."""
        for node in (bound.statement, *bound.tests):
            self._take_node(found, module, node, runs, {})

    def _take_node(
        self, found: _Found, module: Module, node: ast.AST, runs: bool, closed: Mapping[str, object]
    ) -> list[Use]:
        """Joins a part of a module, and follows what it names. Returns what it uses of enclosing functions."""
        documented = self._documented or module.documented(node)
        found.texts.append(module.source.text(node, documented))
        uses = module.source.uses(node, documented)
        self.describes |= not _DESCRIBING.isdisjoint(uses.words)
        self._folders |= dict.fromkeys((text, module.folder) for text in uses.texts)
        found.writes |= uses.writes
        found.files |= {(text, module.folder): None for text in uses.texts if text.endswith(TEXT_FILES)}
        if runs:
            self._attributes |= uses.attributes
            self._running |= uses.words
            self.state |= {(module.name, name, "=") for name in uses.rebound}
        if uses.computes_import:
            self._user.left[f"the module that {found.where} imports by a computed name"] = None
        for use in uses.names:
            use = use if runs else use._replace(changed=None)
            if use.imported is not None:
                self._import(found, module, use.imported, use)
            elif use.root in closed:
                self._module_around(found, closed[use.root])
            else:
                self._name(found, module, use)
        return [use for use in uses.names if use.root in closed]

    def _module_around(self, found: _Found, value: object) -> None:
        """A module that the enclosing function has imported."""
        if (
            isinstance(value, types.ModuleType)
            and (module := self._user.module(value.__name__, late=False)) is not None
        ):
            self._go(found, module, None)

    def _name(self, found: _Found, module: Module, use: Use) -> None:
        name = use.root
        module = self._user.home(module, name)
        if (module.file, name) in self._inside:  # modules that take it from each other
            return
        self._inside.add((module.file, name))
        bindings = module.source.bindings.get(name, [])
        for bound in bindings:
            if bound.imported is not None:
                self._import(found, module, bound.imported, use)
                for test in bound.tests:
                    self._take_node(found, module, test, False, {})
        is_given = not bindings and name in module.values and (name == "__doc__" or not name.startswith("__"))
        star = self._user.star(module, name)
        if is_given or any(bound.imported is None for bound in bindings):
            self._reach(found, module, use)
        elif not bindings and star is not None:
            self._go(found, star, use)
        elif name == "globals":
            self._go(found, module, None)
        self._inside.discard((module.file, name))

    def _import(self, found: _Found, module: Module, bound: Import, use: Use) -> None:
        target, steps = self._user.resolve(module, bound, use.path)
        if target is None:
            found.texts.append(f"{use.root}={'.'.join(steps[: len(steps) - len(use.path)])}")
        elif not steps:
            self._go(found, target, None)
        elif self._user.binds(target, steps[0]):
            if bound.name not in (None, use.root):
                found.texts.append(f"{use.root}={bound.name}")
            changed = use.changed
            if changed is not None:
                changed = changed[len(use.path) - len(steps) + 1 :]
            self._go(found, target, Use(steps[0], steps[1:], use.called and len(steps) > 1, changed))
        elif not steps[0].startswith("__"):
            self._go(found, target, None)

    def _go(self, found: _Found, module: Module, use: Use | None, label: str | None = None) -> None:
        """Into a module. What a pickle holds by value notes what it uses of modules that are imported."""
        if found.own and not module.travels:
            self._edges[module.name, use, not module.live, label] = None
            self._waiting[1].append(lambda: self._enter(module, use, label, None))
        else:
            self._enter(module, use, label, found)

    def _enter(self, module: Module, use: Use | None, label: str | None, origin: _Found | None) -> None:
        found = origin or _Found("", module.name, own=False)
        if use is None:
            for name in module.source.bindings:
                is_own = any(bound.imported is None for bound in module.source.bindings[name])
                if is_own and (name == "__getattr__" or not name.startswith("__")):
                    self._reach(found, module, Use(name, ()))
        elif label is not None:
            self._reach(found, module, use, label)
        else:
            self._name(found, module, use)

    def _reach(self, origin: _Found, module: Module, use: Use, label: str | None = None) -> None:
        if self._before is not None and module.travels:
            return
        place = (module.file, use.root, module.live)
        if place not in self._found:
            self._found[place] = _Found(use.root, _where(module, use.root), module.travels)
        found = self._found[place]
        before = (len(found.paths), found.root)
        if label is not None:
            found.label, found.root = label, True
        if use.changed is not None:
            self.state.add((module.name, use.root, *use.changed))
        found.paths[use.path[:-1] if use.called else use.path] = None
        if (len(found.paths), found.root) != before:
            self._waiting[0 if found.own else 1].append(lambda: self._visit(found, module, use.root))

    # what is there ---------------------------------------------------------------------------------------------------

    def _visit(self, found: _Found, module: Module, name: str) -> None:
        found.texts, found.values, found.files = [], {}, {}
        source = module.source
        statements = [one for one in source.bindings.get(name, []) if one.imported is None]
        statements += [one for one in source.changes.get(name, []) if one not in statements]
        value = module.values.get(name, _MISSING)
        if name == "__doc__":  # as written, since Python 3.13 changes its indentation
            value = ast.get_docstring(source.tree)
        if any(isinstance(one.statement, Definition) and one.statement.name == name for one in statements):
            found.is_code = True
            for one in statements:
                self._take(found, module, one, runs=getattr(one.statement, "name", "") == name)
            if value is not _MISSING:
                self._look_at_definition(found, module, name, value)
            return
        state = {one[2:] for one in self._known_state if one[:2] == (module.name, name)}
        if ("=",) in state:
            return
        plain, fields = Plain(self._user.owns, self._left_out, module.folder), dict[str, Any]()
        is_state = () in state
        for path in _shortest(set(found.paths) - (state - {()})) if value is not _MISSING else []:
            part, done = follow(value, path)
            if not is_state:
                part = without(part, {one[len(done) :] for one in state if one[: len(done)] == done})
                is_state = part is LEFT
            fields[_field_of(done)] = plain.of(part), plain.take_form()
        self._name_left(found.where, plain)
        is_shown = self._reach_all(found, plain) and not plain.is_opaque and value is not _MISSING
        if plain.is_pacing:
            return
        cause = (
            self._user.cause_of(module, name, frozenset()) or plain.cause or _order_of_set(module, statements, value)
        )
        if is_shown and not cause and not is_state:
            found.values = fields
            texts = re.findall(r'"([^"]+)"', json.dumps([one for one, _ in fields.values()]))
            found.files |= {(one, module.folder): None for one in texts if one.endswith(TEXT_FILES)}
            if not plain.left:
                return
        for one in statements:
            self._take(found, module, one, runs=False)
        if cause and value is not _MISSING:
            self._user.left[f"the value of {found.where} ({cause})"] = None

    def _look_at_definition(self, found: _Found, module: Module, top: str, value: Any) -> None:
        """What the source of a definition does not show: wrappers, values that were computed, what was set later."""
        plain = Plain(self._user.owns, self._left_out, module.folder)
        for name, part in sorted(vars(value).items()) if isinstance(value, type) else [("", value)]:
            inner = getattr(part, "fget", None) or getattr(part, "__func__", part)
            code = getattr(inner, "__code__", None)
            if code is not None and code.co_qualname == (f"{top}.{name}" if name else top):
                node = module.source.find(code, module.was_edited)
                if node is None and module.was_edited:
                    found.bytecode.append(write_code(code))  # the source was edited after it was imported
                if isinstance(node, _Def):
                    self._add_computed(found, module, inner, node)
            elif isinstance(part, str | int | float | bytes):
                if not name.startswith("_") and name not in self._left_out(value):
                    self._add(found, f".{name}", part, file=module.file)
            elif not name.startswith("__"):
                plain.of(inner)
        plain.code = [one for one in plain.code if one is not value or not isinstance(value, type)]
        self._reach_all(found, plain)

    def _add_computed(self, found: _Found, module: Module, function: Any, node: _Def) -> None:
        """What a definition computed when it was executed: its defaults, and which of several of its name it is."""
        same = [one.statement for one in module.source.bindings.get(node.name, [])]
        if node in same[:-1]:
            found.values[f" {same.index(node)}"] = node.name, list[str]()
        arguments = [*node.args.posonlyargs, *node.args.args]
        named = arguments[len(arguments) - len(node.args.defaults) :]
        defaults = function.__defaults__ or ()
        for argument, written, value in zip(named, node.args.defaults, defaults, strict=False):
            if not isinstance(written, ast.Constant) and isinstance(value, str | int | float | bytes):
                cause = self._user.cause_in(module, written, frozenset())
                self._add(found, f".{argument.arg}", value, cause=cause, file=module.file)

    def _reach_all(self, found: _Found, plain: Plain) -> bool:
        """Follows the user's functions and classes in values. False: the source of one is that of the value."""
        return False not in [self._reach_value(found, one) for one in plain.code]

    def _reach_value(self, origin: _Found, thing: Any) -> bool:
        """Follows a function, class or module of the user. False: its source is that of a value."""
        if isinstance(thing, types.ModuleType):
            self._module_around(origin, thing)
        elif isinstance(thing, types.FunctionType):
            self._function(origin, thing)
        else:
            return self._class(origin, thing)
        return True

    def _class(self, origin: _Found, cls: type) -> bool:
        methods = [one for one in vars(cls).values() if isinstance(one, types.FunctionType) and self._user.owns(one)]
        module = self._user.module(cls.__module__, late=False) or (self._user.space(methods[0]) if methods else None)
        if module is None:
            return False
        top = cls.__qualname__.partition(".")[0]
        module = self._user.home(module, top)
        if any(isinstance(one.statement, ast.ClassDef) for one in module.source.bindings.get(top, [])):
            self._go(origin, module, Use(top, ()))
            return True
        nodes = [one for one in module.source.named(cls.__name__) if isinstance(one, ast.ClassDef)]
        if nodes and cls not in self._found:
            found = self._found[cls] = _Found(cls.__name__, _where(module, cls.__qualname__), origin.own)
            found.is_code = True
            for node in nodes:
                self._take(found, module, Binding(node), runs=True)
        return bool(nodes)

    def _function(self, origin: _Found, function: types.FunctionType, label: str | None = None) -> None:
        module = self._user.space(function)
        top = function.__qualname__.partition(".")[0]
        node = module.source.find(function.__code__, module.was_edited)
        line = getattr(node, "lineno", 0)
        within = [one.statement for one in module.source.bindings.get(top, []) if isinstance(one.statement, Definition)]
        is_top = any(one.lineno <= line <= (one.end_lineno or 0) for one in within)
        if "<locals>" not in function.__qualname__ and is_top:
            self._go(origin, module, Use(top, ()), label)
            return
        # dill makes a copy of a function. Two of one factory have the same code, and other things around it.
        place = (fingerprint(function), *(id(one) for _, one in cells(function) if isinstance(one, list | dict | set)))
        if place in self._found:
            return
        own = module.travels or (origin.own and not is_importable(function))
        found = self._found[place] = _Found(label or function.__name__, _where(module, function.__qualname__), own)
        found.root, found.is_code = label is not None, True
        if self._before is None or not own:
            self._waiting[0 if own else 1].append(lambda: self._visit_function(found, module, function, node))

    def _visit_function(
        self, found: _Found, module: Module, function: types.FunctionType, node: ast.AST | None
    ) -> None:
        closed = dict(cells(function))
        if node is None:
            found.bytecode.append(write_code(function.__code__))
            for name in sorted(loaded_names(function)):
                if name in module.values:
                    self._reach(found, module, Use(name, ()))
            used = [Use(name, ()) for name in closed]
        else:
            used = self._take_node(found, module, node, True, closed)
            used += [Use(name, ()) for name in closed if name == "__class__"]
        around = [one for name in function.__qualname__.split(".")[:-1] for one in module.source.named(name)]
        causes = self._user.unstable_names(module, [one for one in around if isinstance(one, Function)])
        rebound = module.source.uses(node, False).rebound if node is not None else set()
        for name in dict.fromkeys(use.root for use in used if use.root not in rebound):
            changed = {use.changed for use in used if use.root == name and use.changed is not None}
            for path in _shortest([use.path[: len(use.path) - use.called] for use in used if use.root == name]):
                part, done = follow(closed[name], path)
                rest = {one[len(done) :] for one in changed if one[: len(done)] == done}
                self._add(found, f".{name}{_field_of(done)}", part, rest, causes.get(name, ""), module.file)

    def _add(
        self, found: _Found, name: str, value: object, changed: Iterable[Path] = (), cause: str = "", file: str = ""
    ) -> None:
        """A value that belongs to something: of an enclosing function, an argument, an attribute.

        Args:
            changed: what of it the rollout changes itself.
        """
        plain = Plain(self._user.owns, self._left_out, folder_of(file))
        value = without(value, [*changed], plain.left)
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
        if any(one for one in plain.left if isinstance(one, str | int | float | dict | list | set | tuple)):
            self._user.left[f"{where} (the rollout changes it)"] = None

    # where it begins -------------------------------------------------------------------------------------------------

    def root(self, label: str, thing: object, changed: Mapping[str, Iterable[Path]]) -> None:
        """Begins at a function, object, class, or dict of values.

        Args:
            changed: names of arguments that the rollout changes itself, each with what of it.
        """
        origin = self._found["root", label] = _Found(label, label, own=True)
        origin.root = True
        while isinstance(thing, functools.partial | dict):
            values: Mapping[Any, Any] = (
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
            cls = thing if isinstance(thing, type) else type(thing)
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

    def _left_out(self, cls: type) -> LeftOut:
        """The attributes that change while the rollout runs, or that its class computes anew at each start."""
        if cls not in self._changing:
            names = ["", *(each.__name__ for each in cls.__mro__)]
            found = dict[str, set[Path] | None]()
            for _, _, name, *path in [one for one in self._known_state if not one[0] and one[1] in names]:
                found[name] = {*(found.get(name) or ()), tuple(path)}
            for each in cls.__mro__:
                module = self._user.module(each.__module__, late=False) if self._user.owns(each) else None
                nodes = module.source.named(each.__name__) if module is not None else []
                for name, cause in self._user.unstable_names(module, nodes).items() if module is not None else []:
                    found[name] = None
                    self._user.left[f"{each.__qualname__}.{name} ({cause})"] = None
            self._changing[cls] = found
        return self._changing[cls]

    # the end ---------------------------------------------------------------------------------------------------------

    def run(self, edges: Iterable[tuple[Any, ...]]) -> None:
        """Follows everything that waits."""
        for name, use, late, label in edges:
            if (module := self._user.module(name, late)) is not None:
                target = Use(*use) if use is not None else None
                self._waiting[1].append(functools.partial(self._enter, module, target, label, None))
        while any(self._waiting):
            (self._waiting[0] or self._waiting[1]).popleft()()
        # A method that only statements of a module call fills a table before the rollout runs.
        called = [one for one in self._attributes if one[1] in self._running or one[1].startswith("__") or not one[1]]
        self.state |= {("", owner, name, *path) for owner, _, name, path in called}

    def result(self) -> Description:
        fields, notes, own_counts = dict[str, object](), dict[str, str](), dict[str, int]()
        if self._before is not None:
            fields, notes, own_counts = dict(self._before.own), dict(self._before.notes), dict(self._before.counts)
        own, counts = dict(fields), collections.Counter(own_counts)
        for place, found in sorted(self._found.items(), key=lambda one: (not one[1].own, not one[1].root)):
            is_twice = isinstance(place, tuple) and place[-1] is False and (*place[:-1], True) in self._found
            made = {} if is_twice else self._fields_of(found, counts)
            fields |= made
            notes |= dict.fromkeys(made, f"code of the function {found.where}" if found.is_code else found.where)
            if found.own:
                own |= made
                own_counts = dict(counts)
            for name, folder in () if found.writes else found.files:
                field, text = f"{USED}file {name}", self._text_file(name, folder)
                if text is not None and field not in fields:
                    fields[field] = f"text {digest(text)}"
                    own |= {field: fields[field]} if found.own else {}
        state = frozenset(self.state | self._known_state)
        return Description(fields, notes, own, own_counts, [*self._edges], state, self._documented, [*self._user.left])

    def _fields_of(self, found: _Found, counts: collections.Counter[str]) -> dict[str, object]:
        if not (found.texts or found.values or found.bytecode):
            return {}
        counts[found.label] += 1
        number = f" ({counts[found.label]})" if counts[found.label] > 1 else ""
        base = found.label if found.root else f"{USED}{found.label}{number}"
        made: dict[str, object] = {}
        if found.bytecode:
            made[f"{base} code"] = f"bytecode {sys.implementation.cache_tag} {digest(*found.bytecode)}"
        elif found.texts:
            made[f"{base} code"] = f"source {digest(*found.texts)}"
        for name, (value, form) in found.values.items():
            made[f"{base}{name}"] = value
            if form:
                made[f"{base}{name} form"] = digest(*form)
        return made

    def _text_file(self, name: str, folder: str) -> str | None:
        """The content of a file of the project."""
        near = [folder, os.path.dirname(folder), os.getcwd()]  # noqa: PTH120, PTH109
        near += [os.path.join(folder, word) for word, one in self._folders if one == folder]  # noqa: PTH118
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
    project, changed = Project(), _arguments_changed(things.get("rollout_fn"))
    state, documented = (before.state, before.documented) if before else (frozenset[tuple[str, ...]](), False)
    while True:
        walk = Walk(project, state, documented, before)
        if before is None:
            for label, thing in things.items():
                walk.root(label, thing, changed)
        walk.run(before.edges if before is not None else ())
        grown = (state | walk.state, walk.describes)
        if grown == (state, documented):
            return walk.result()
        state, documented = grown


def _arguments_changed(function: object) -> dict[str, set[Path]]:
    """The arguments of a function or of an object's call of which it changes what they stand for, with what of it."""
    while isinstance(function, functools.partial) or wrapped(function) is not None:
        function = function.func if isinstance(function, functools.partial) else wrapped(function)
    call = getattr(function, "__func__", function)
    call = call if isinstance(call, types.FunctionType) else vars(type(function)).get("__call__")
    found: dict[str, set[Path]] = {}
    if isinstance(call, types.FunctionType):
        module = Project().space(call)
        node = module.source.find(call.__code__, module.was_edited)
        for name, path in module.source.uses(node, False).arguments if node is not None else ():
            found.setdefault(name, set()).add(path)
    return found


def _field_of(path: Path) -> str:
    """The steps of a path as the end of a field's name, in which a key shows whether its value is a secret."""
    return "".join("." + step.strip("[]'\"") for step in path)


def _shortest(paths: Iterable[Path]) -> list[Path]:
    """Without those that begin with another."""
    found: list[Path] = []
    for path in sorted(paths):
        if not any(path[: len(one)] == one for one in found):
            found.append(path)
    return found


def _order_of_set(module: Module, statements: list[Binding], value: object) -> str:
    for bound in statements if isinstance(value, str | list | tuple) else ():
        uses = module.source.uses(bound.statement, False)
        roots = {use.root for use in uses.names}
        sets = [one for one in roots if isinstance(module.values.get(one), set | frozenset)]
        if "sorted" not in roots and (sets or uses.shows_set or roots & {"set", "frozenset"}):
            return "the order of a set"
    return ""


def _where(module: Module, name: str) -> str:
    return name if module.name in (*MAIN, "builtins", "None") else f"{module.name}.{name}"
