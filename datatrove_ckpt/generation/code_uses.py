"""What a part of a file uses: names with their attributes and items, texts, and what it changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_text import compile_tree, loaded_names, nested_codes, strip
from datatrove_ckpt.generation.code_values import Path, key

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_CHANGING = re.compile(
    "(append|extend)(left)?|pop(item|left)?|add|update|insert|setdefault|remove|discard|clear|sort|reverse|move_to_end|"
    "__setitem__|subtract"
)
_BUILDERS = re.compile("__(init|new|post_init|setstate|init_subclass)__")
_SHORT = 200


class Import(NamedTuple):
    module: str
    name: str | None
    level: int


class Name(NamedTuple):
    """``root.a["b"]``: a global name, and what is taken of it.

    ``imported``: by an import inside the function.
    """

    root: str
    path: Path = ()
    imported: Import | None = None


class Uses:
    """What a part of a file uses.

    Args:
        documented: docstrings and hints count.

    Attributes:
        names: globals, and variables of enclosing functions.
        changed: names and attributes whose values it changes.
        words: names, attributes and short texts.
    """

    def __init__(self, node: ast.AST, documented: bool) -> None:
        self.names: dict[Name, None] = {}
        self.changed: set[str] = set()
        self.words: set[str] = set()
        self.texts: dict[str, None] = {}
        nodes = [node]
        for part in nodes:
            if not documented:
                strip(part)
            nodes += ast.iter_child_nodes(part)
        known = _globals(node, nodes)
        inside: set[ast.AST] = set()
        building: set[ast.AST] = set()
        late: dict[str, list[Import]] = {}
        for part in nodes:
            if isinstance(part, ast.Import | ast.ImportFrom):
                for name, bound in imported(part):
                    late.setdefault(name, []).append(bound)
        for part in nodes:
            if isinstance(part, Definition) and _BUILDERS.fullmatch(part.name):
                building |= {*ast.walk(part)}
            if isinstance(part, ast.Global | ast.Nonlocal):
                self.changed |= {*part.names}
            elif isinstance(part, ast.Call):
                called = part.func
                if (
                    isinstance(called, ast.Attribute)
                    and _CHANGING.fullmatch(called.attr)
                    and part not in building
                ):
                    self.changed |= {*dotted(called.value)}
            elif isinstance(part, ast.Name | ast.Attribute | ast.Subscript):
                self.words.add(str(getattr(part, "id", None) or getattr(part, "attr", "")))
                if (
                    not isinstance(part, ast.Name)
                    and not isinstance(part.ctx, ast.Load)
                    and part not in building
                ):
                    self.changed |= {*dotted(part)}
                if part not in inside:
                    root, path = _chain(part, inside)
                    if root in known:
                        self.names[Name(root, path)] = None
                    self.names |= {Name(root, path, bound): None for bound in late.get(root, [])}
            else:
                self._note_text(part)
        if not self.words.isdisjoint({"import_module", "__import__"}):
            self.names |= {Name("", (), Import(text, None, 0)): None for text in self.texts}

    def _note_text(self, node: ast.AST) -> None:
        value = getattr(node, "value", None)
        if (
            isinstance(node, ast.Constant)
            and isinstance(value, str)
            and len(value) < _SHORT
            and "\n" not in value
        ):
            self.words.add(value)
            self.texts[value] = None
        elif isinstance(node, ast.Set | ast.SetComp):
            self.words.add("set")


def _globals(node: ast.AST, nodes: list[ast.AST]) -> set[str]:
    loaded = {
        part.id for part in nodes if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    statement: Any = node
    if isinstance(node, ast.expr):
        statement = ast.copy_location(ast.Expr(node), node)
    try:
        code = compile_tree(ast.Module([statement], []))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # nonlocal, for example
        return loaded
    codes = [*nested_codes(code)]
    local = {
        name for one in codes for name in (*one.co_varnames, *one.co_cellvars, *one.co_freevars)
    }
    # A name is a local variable in one function, and none in another.
    if any(local & {*one.co_names} for one in codes):
        return loaded_names(code)
    return loaded - local


def _chain(node: ast.AST, inside: set[ast.AST]) -> tuple[str, Path]:
    """``("a", ("b", "['c']"))`` for ``a.b["c"]``."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            steps.insert(0, node.attr)
        elif isinstance(node.slice, ast.Constant):
            steps.insert(0, key(node.slice.value))
        else:
            steps = []
        node = node.value
        inside.add(node)
    return getattr(node, "id", ""), tuple(steps)


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {name for name, _ in imported(node)}
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            waiting += ast.iter_child_nodes(node)
    return names


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Import]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, Import(node.module or "", alias.name, node.level)
        else:
            top = alias.name.partition(".")[0]
            if alias.asname:
                yield alias.asname, Import(alias.name, None, 0)
            else:
                yield top, Import(top, None, 0)


def dotted(node: ast.AST) -> list[str]:
    """``["a", "b"]`` for ``a.b`` and for ``a.b(...)``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        return [node.id, *names]
    return names
