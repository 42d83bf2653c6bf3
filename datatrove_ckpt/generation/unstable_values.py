"""Finds variables of a rollout that have another value at each start, before anything is paid for.

The values that a rollout names are part of the run's identity. If one comes from the clock, from chance or from the
process, no later start can continue the run, which would otherwise show after the first crash only.

A good run must never be refused, so a value is followed only through what passes it on: assignments, f-strings,
operators, displays, a few built-in functions, methods of such a value, and what functions of the same file return.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import inspect
import linecache
import os
import random
import re
import secrets
import sys
import tempfile
import textwrap
import time
import types
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from datatrove_ckpt.generation.syntax import parse_module

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}>")
_ALWAYS = {
    *(time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns),
    *(os.getpid, os.getppid, os.urandom, uuid.uuid1, uuid.uuid4, id),
    *(tempfile.mkdtemp, tempfile.mkstemp, tempfile.mktemp, random.SystemRandom),
    *(secrets.token_bytes, secrets.token_hex, secrets.token_urlsafe, secrets.choice, secrets.randbelow),
}
_OF_NOW: dict[Any, int] = {time.ctime: 0, time.asctime: 0, time.localtime: 0, time.gmtime: 0, time.strftime: 1}
"""Functions that take the time now if they have no more than this many arguments."""
_NOW_METHODS = {"now", "utcnow", "today"}
_PASSES = {str, int, float, round, repr, format, abs, list, tuple, dict}
_IMPORTS = {"__import__", "import_module"}
_PURE = {textwrap.dedent, inspect.cleandoc}
_AS_TEXT = {str, repr, format}
_ORDERED = {list, tuple}
_PARTS = (ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.List, ast.Tuple, ast.Dict, ast.Set)
_MAX_DEPTH = 20
_KNOWN = (
    *(types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
)


class Variable(NamedTuple):
    """A variable that a function uses.

    Attributes:
        is_global: of its module; else of the function around it.
        is_default: neither, but a default argument of the function.
    """

    function: Any  # mypy takes a FunctionType here for a method
    name: str
    is_global: bool
    is_default: bool = False


def unstable_values(fields: Mapping[str, Any], variables: Mapping[str, Variable]) -> Iterator[str]:
    """What differs at each start, as sentences.

    Args:
        fields: the description of the code.
        variables: those that the description holds, by field.
    """
    for field, variable in variables.items():
        function = variable.function
        code = function.__code__
        around = "" if variable.is_global else function.__qualname__
        if variable.is_default:
            around += ".<locals>"
        source = Source.of(code.co_filename, function.__globals__, variable.name, around)
        value, owner = fields.get(field), function if variable.is_default else None
        cause = source.cause_of_default(value, owner) or ("" if owner else source.cause(value))
        if cause:
            yield (
                f"The function {function.__qualname__} ({code.co_filename}, line {code.co_firstlineno}) uses "
                f"{variable.name}, which {cause}"
            )


class Source:
    """What a variable's value is made from.

    Args:
        tree: the module.
        scopes: the functions around the function that uses it, and the module.
        namespace: the module's globals.
    """

    def __init__(self, name: str, tree: ast.Module, scopes: list[ast.AST], namespace: Mapping[str, Any]) -> None:
        self._name = name
        self._tree = tree
        self._scopes = scopes
        self._namespace = namespace
        self._seeded = any(isinstance(node, ast.Call) and _last_name(node.func) == "seed" for node in ast.walk(tree))

    @classmethod
    def of(cls, file: str, namespace: Mapping[str, Any], name: str, around: str = "") -> Source:
        """Of a variable of a file.

        Args:
            namespace: the module's globals.
            around: of a variable of a function, the qualified name of the function inside it that uses it.
        """
        tree = parse_module("".join(linecache.getlines(file, dict(namespace)))).tree
        names = set(around.split(".")[:-1])
        enclosing: list[ast.AST] = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names
        ]
        return cls(name, tree, [*enclosing, tree], namespace)

    def is_literal(self) -> bool:
        """The value is written in the file, so it is the same in each process and on each machine."""
        return self._is_literal(self._assigned(self._name), 0)

    def _is_literal(self, node: ast.AST | None, depth: int) -> bool:
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return depth < _MAX_DEPTH and self._is_literal(self._assigned(node.id), depth + 1)
        parts: list[ast.AST] = []
        if isinstance(node, _PARTS):
            parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        elif isinstance(node, ast.Call):  # "...".strip(), dedent("...")
            is_pure = self._resolved(node.func) in _PURE
            parts = [*node.args, *([] if is_pure else [getattr(node.func, "value", node.func)])]
            parts += [keyword.value for keyword in node.keywords]
        return bool(parts) and all(self._is_literal(part, depth + 1) for part in parts)

    def cause(self, value: object) -> str:
        """Why the value differs at each start, as the end of a sentence; "" if it may not."""
        if source := self._of_name(self._name, 0):
            return f"comes from {source}"
        assigned = self._assigned(self._name)
        if assigned is not None and self._is_text(assigned) and _ADDRESS.search(str(value)):
            return "holds the address of an object"
        return ""

    def cause_of_default(self, value: object, owner: types.FunctionType | None) -> str:
        """As ``cause``, of an argument that has its default value.

        Args:
            owner: the function that has the argument. None: one around it, whose arguments may have been given.
        """
        for scope in self._scopes:
            if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            function = owner if owner is not None else self._namespace.get(scope.name)
            node = _arguments(scope).get(self._name)
            if node is None or not isinstance(function, types.FunctionType) or function.__name__ != scope.name:
                continue
            default = _default(function, self._name)
            if type(default) in (str, int, float, list, dict) and default == value:  # else another one was given
                others = [other for other in self._scopes if other is not scope]
                if source := Source(self._name, self._tree, others, self._namespace)._of(node, 0):
                    return f"comes from {source}"
        return ""

    def _is_text(self, node: ast.AST) -> bool:
        return isinstance(node, ast.JoinedStr | ast.BinOp) or (
            isinstance(node, ast.Call) and self._resolved(node.func) in _AS_TEXT
        )

    def _of_name(self, name: str, depth: int) -> str:
        value = self._assigned(name)
        return self._of(value, depth + 1) if value is not None and depth < _MAX_DEPTH else ""

    def _assigned(self, name: str) -> ast.expr | None:
        """What is assigned last."""
        for scope in self._scopes:
            found = None
            for node in _own_nodes(scope):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                is_assignment = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                if is_assignment and any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    found = node.value  # type: ignore[attr-defined]
            if found is not None:
                return found  # type: ignore[no-any-return]
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and name in _arguments(scope):
                return None
        return None

    def _of(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Name):
            return self._of_name(node.id, depth)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        parts: list[ast.AST] = []
        if isinstance(node, _PARTS):
            parts = list(ast.iter_child_nodes(node))
        elif isinstance(node, ast.Attribute | ast.Subscript):
            parts = [node.value]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        return self._first(parts, depth)

    def _first(self, nodes: list[Any], depth: int) -> str:
        return next(filter(None, (self._of(node, depth) for node in nodes)), "")

    def _of_call(self, node: ast.Call, depth: int) -> str:
        called = self._resolved(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        is_join = isinstance(node.func, ast.Attribute) and node.func.attr == "join"
        if (is_join or called in _ORDERED) and self._is_set(arguments[0] if arguments else node, depth):
            return "the order of a set" if os.environ.get("PYTHONHASHSEED", "random") == "random" else ""
        if called is not None and self._differs(called, len(arguments)):
            return f"{ast.unparse(node.func)}()"
        if called in _PASSES or is_join or (isinstance(node.func, ast.Attribute) and node.func.attr == "format"):
            return self._first(arguments, depth)
        if isinstance(called, types.FunctionType) and isinstance(node.func, ast.Name) and depth < _MAX_DEPTH:
            return self._first(self._returned(node.func.id), depth + 1)
        return self._of(node.func.value, depth) if isinstance(node.func, ast.Attribute) else ""

    def _returned(self, name: str) -> list[ast.AST]:
        """What a function of the same file returns."""
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return [one.value for one in _own_nodes(node) if isinstance(one, ast.Return) and one.value is not None]
        return []

    def _is_set(self, node: ast.AST, depth: int) -> bool:
        if isinstance(node, ast.Name) and depth < _MAX_DEPTH:
            assigned = self._assigned(node.id)
            return assigned is not None and self._is_set(assigned, depth + 1)
        if isinstance(node, ast.Call):
            return self._resolved(node.func) in (set, frozenset)
        return isinstance(node, ast.SetComp) or (
            isinstance(node, ast.Set) and any(not isinstance(_constant(one), int | type(None)) for one in node.elts)
        )

    def _resolved(self, node: ast.AST) -> Any:
        """The function, class or module that a dotted name stands for; None if that cannot be known."""
        found = None
        if isinstance(node, ast.Attribute):
            owner = self._resolved(node.value)
            # Looking at the attributes of other objects may run code.
            found = getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType | type) else None
        elif isinstance(node, ast.Name):
            known = sys.modules.get(node.id)  # a function may have imported it
            found = self._namespace.get(node.id, vars(builtins).get(node.id, known))
        elif isinstance(node, ast.Call) and _last_name(node.func) in _IMPORTS and len(node.args) == 1:
            found = sys.modules.get(str(_constant(node.args[0])))
        return found if isinstance(found, _KNOWN) else None

    def _differs(self, called: Any, arguments: int) -> bool:
        owner = getattr(called, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, datetime.date):
            return called.__name__ in _NOW_METHODS
        if called in _OF_NOW:
            return arguments <= _OF_NOW[called]
        if type(owner) is random.Random or type(owner).__module__.startswith("numpy.random"):
            is_hidden = owner is getattr(random, "_inst", None) or type(owner).__name__ == "RandomState"
            return is_hidden and not self._seeded
        if called is random.Random or getattr(called, "__name__", "") == "default_rng":
            return arguments == 0
        return called in _ALWAYS


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None]:
    """The arguments by name, with their default values; None where there is none."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    return {argument.arg: default for argument, default in zip([*positional, *given.kwonlyargs], defaults, strict=True)}


def _default(function: types.FunctionType, name: str) -> object:
    code = function.__code__
    names, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    return values.get(name)


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else ""


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module or function, without those of functions and classes inside it, in the order of the file."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own_nodes(child)
