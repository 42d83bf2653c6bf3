"""What a part of a file uses: its names with what is taken of them, its texts, and what it changes.

Scopes are respected: arguments, local variables and those of comprehensions are not globals of the same name.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_text import bare
from datatrove_ckpt.generation.code_values import Path, key

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BUILDERS = {"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__"}
_CHANGING = {
    *("append", "add", "update", "extend", "insert", "setdefault", "pop", "popitem", "popleft", "remove", "discard"),
    *("clear", "appendleft", "extendleft", "sort", "reverse", "move_to_end", "__setitem__", "subtract"),
}
_WRITES = {"write_text", "write_bytes", "write", "writelines", "dump"}
TEXT_FILES = (".txt", ".md", ".json", ".yaml", ".yml", ".toml", ".j2", ".jinja", ".jinja2", ".prompt", ".tmpl")
_SHORT = 200


class Import(NamedTuple):
    """What an import binds: a module, or a name of one. ``late``: inside a function."""

    module: str
    name: str | None
    level: int
    late: bool


class Use(NamedTuple):
    """``root.a["b"]``: a name that is no local variable, and what is taken of it.

    Attributes:
        called: the last step is a method.
        changed: how much of the path leads to what is changed; None: nothing is.
        imported: what an import inside the function binds to the name.
    """

    root: str
    path: Path
    called: bool = False
    changed: Path | None = None
    imported: Import | None = None


class _Scope(NamedTuple):
    """Names that a function or class binds. ``owner``: of a method: its class, its own name, and its first argument."""

    names: dict[str, Import | None]
    is_class: bool
    owner: tuple[str, str, str]


class Uses:
    """What a part of a file uses.

    Attributes:
        names: that are not local, in the order of the source.
        changed: those that it changes, with the path of what changes.
        rebound: names that it declares as those of another scope.
        arguments: local names of which it changes what they stand for, with such a path.
        attributes: that it changes: the class whose method does so, that method, the name, and such a path.
        words: all names, attributes and texts. texts: the short ones.
        writes: it may write files. shows_set: it has a set.
        computes_import: it imports a module whose name it computes.
    """

    def __init__(self, node: ast.AST, documented: bool) -> None:
        self.names: dict[Use, None] = {}
        self.changed: set[tuple[str, Path]] = set()
        self.rebound: set[str] = set()
        self.arguments: set[tuple[str, Path]] = set()
        self.attributes: set[tuple[str, str, str, Path]] = set()
        self.words: set[str] = set()
        self.texts: dict[str, None] = {}
        self.writes = self.computes_import = self.shows_set = False
        self._documented = documented
        self._waiting: list[tuple[ast.AST, tuple[_Scope, ...]]] = [(node, ())]
        while self._waiting:
            one, scopes = self._waiting.pop()
            self._visit(one if documented else bare(one), scopes)

    def _push(self, nodes: Iterable[Any], scopes: tuple[_Scope, ...]) -> None:
        self._waiting += [(node, scopes) for node in reversed([*nodes]) if node is not None]

    def _visit(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> None:
        owner = scopes[-1].owner if scopes else ("", "", "")
        if isinstance(node, Function):
            self._function(node, scopes, owner)
        elif isinstance(node, ast.ClassDef):
            self._push(node.body, (*scopes, _Scope(bound_names(node.body), True, (node.name, "", ""))))
            self._push([*node.decorator_list, *node.bases, *node.keywords], scopes)
        elif isinstance(node, _COMPREHENSIONS):
            self.shows_set |= isinstance(node, ast.SetComp)
            names = bound_names([part.target for part in node.generators])
            begin, *rest = node.generators
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            self._push([begin.target, *begin.ifs, *rest, *elements], (*scopes, _Scope(names, False, owner)))
            self._push([begin.iter], scopes)
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            self._chain(node, None, scopes, owner)
        elif isinstance(node, ast.Call):
            self._push([*node.args, *node.keywords], scopes)
            self._note_call(node)
            self._chain(node.func, node, scopes, owner)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            self._note_text(node)
            self.shows_set |= isinstance(node, ast.Set)
            if isinstance(node, ast.Global) or (isinstance(node, ast.Nonlocal) and len(scopes) == 1):
                self.rebound |= set(node.names)
            self._push(ast.iter_child_nodes(node), scopes)

    def _function(self, node: Function, scopes: tuple[_Scope, ...], owner: tuple[str, str, str]) -> None:
        body = node.body if isinstance(node.body, list) else [node.body]
        arguments = [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]
        if scopes and scopes[-1].is_class:
            first = [*node.args.posonlyargs, *node.args.args][:1]
            owner = (owner[0], getattr(node, "name", ""), first[0].arg if first else "")
        names = bound_names(body) | dict.fromkeys(one.arg for one in arguments)
        names |= dict.fromkeys(one.name for one in getattr(node, "type_params", []))
        outer = tuple(one for one in scopes if not one.is_class)
        self._push(body, (*outer, _Scope(names, False, owner)))
        hints = [one.annotation for one in arguments] if self._documented else []
        decorators = getattr(node, "decorator_list", [])
        self._push(
            [*node.args.defaults, *node.args.kw_defaults, *decorators, *hints, getattr(node, "returns", None)], scopes
        )

    def _note_text(self, node: ast.AST) -> None:
        parts = [node]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):  # HERE / "prompts" / "a.txt"
            parts = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
        texts = [one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        short = [one for one in texts if len(one) < _SHORT and "\n" not in one]
        self.words |= set(short)
        self.texts |= dict.fromkeys(short)

    def _note_call(self, call: ast.Call) -> None:
        name = dotted(call.func)[-1:]
        texts = [getattr(one, "value", None) for one in [*call.args, *(one.value for one in call.keywords)]]
        self.writes |= name == ["open"] and any(re.fullmatch("[wax][bt+]*", str(one)) for one in texts)
        if name in (["import_module"], ["__import__"]):
            text = texts[0] if texts and isinstance(texts[0], str) else ""
            self.computes_import |= not text
            if text:
                bound = Import(text.lstrip("."), None, len(text) - len(text.lstrip(".")), True)
                self.names[Use(name[0], (), imported=bound)] = None

    def _chain(
        self, node: ast.AST, call: ast.Call | None, scopes: tuple[_Scope, ...], owner: tuple[str, str, str]
    ) -> None:
        steps: list[Any] = []
        inner = node
        while isinstance(inner, ast.Attribute | ast.Subscript):
            steps.insert(0, inner)
            inner = inner.value
        self._push([one.slice for one in steps if isinstance(one, ast.Subscript)], scopes)
        names = [one.attr for one in steps if isinstance(one, ast.Attribute)]
        self.words |= set(names)
        self.writes |= not _WRITES.isdisjoint(names)
        stores = any(
            not isinstance(getattr(one, "ctx", None), ast.Load) for one in [inner, *steps] if hasattr(one, "ctx")
        )
        method = ""
        if call is not None and steps and isinstance(steps[-1], ast.Attribute):
            method = steps.pop().attr
        changes = (stores and bool(steps)) or method in _CHANGING
        path = tuple(map(_step, itertools.takewhile(_is_constant, steps)))
        called = bool(method) and len(path) == len(steps)
        if changes:
            self._note_attribute(inner, steps, owner)
        if not isinstance(inner, ast.Name):
            self._push([inner], scopes)
            return
        scope = next((one.names for one in reversed(scopes) if inner.id in one.names), {})
        bound = scope.get(inner.id)
        if inner.id in scope and bound is None:
            if changes:
                self.arguments.add((inner.id, path))
        elif steps or not stores:
            self.words.add(inner.id)
            whole = (*path, method) if called else path
            self.names[Use(inner.id, whole, called, path if changes else None, bound)] = None
            if changes:
                self.changed.add((inner.id, path))

    def _note_attribute(self, inner: ast.AST, steps: list[Any], owner: tuple[str, str, str]) -> None:
        index = max((number for number, one in enumerate(steps) if isinstance(one, ast.Attribute)), default=-1)
        if index >= 0 and owner[1] not in _BUILDERS:
            is_own = isinstance(inner, ast.Name) and inner.id == owner[2]
            path = tuple(map(_step, itertools.takewhile(_is_constant, steps[index + 1 :])))
            self.attributes.add((owner[0] if is_own else "", owner[1], steps[index].attr, path))


def _is_constant(step: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(step, ast.Attribute) or isinstance(step.slice, ast.Constant)


def _step(step: Any) -> str:
    return step.attr if isinstance(step, ast.Attribute) else key(step.slice.value)


def bound_names(body: Iterable[ast.AST]) -> dict[str, Import | None]:
    """The names that statements bind in their own scope; of imports, with what they bind."""
    names: dict[str, Import | None] = {}
    outer: set[str] = set()
    waiting: list[ast.AST] = [*body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            names[node.name] = None
        elif isinstance(node, _COMPREHENSIONS):  # of which only := binds here
            names |= {one.target.id: None for one in ast.walk(node) if isinstance(one, ast.NamedExpr)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= imported(node, late=True)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer |= set(node.names)
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names[node.id] = None
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping):
                names[getattr(node, "name", None) or getattr(node, "rest", None) or ""] = None
            waiting += ast.iter_child_nodes(node)
    return {name: bound for name, bound in names.items() if name not in outer}


def imported(node: ast.Import | ast.ImportFrom, late: bool) -> Iterator[tuple[str, Import]]:
    """The names that an import binds."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, Import(node.module or "", alias.name, node.level, late)
        else:
            full = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or full, Import(full, None, 0, late)


def dotted(node: ast.AST) -> list[str]:
    """``["a", "b"]`` for ``a.b`` and for ``a.b(...)``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    return [node.id, *names] if isinstance(node, ast.Name) else names
