"""Source code as syntax trees, and trees and code objects as text that is equal on every Python version.

``ast`` in CPython 3.11 counts its recursion in a variable of the whole interpreter, so two threads that parse at once
fail with ``SystemError: AST constructor recursion depth mismatch``. All parsing of the package happens here, behind one
lock. Other code of the process may parse, too (loguru does, for tracebacks), so such an error is also tried again.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STRINGS = {"JoinedStr", "TemplateStr"}  # the second is new in Python 3.14
# The context follows from the parent node; the kind tells u"" from "".
_IGNORED_FIELDS = {"ctx", "kind", "type_comment"}
_ATTEMPTS = 20
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """``ast.parse`` for several threads.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse``.
    """
    return _alone(lambda: ast.parse(source))


def compile_tree(tree: ast.Module) -> types.CodeType:
    """The module's code, as an import in this process makes it."""
    code: types.CodeType = _alone(lambda: compile(tree, "<source>", "exec", dont_inherit=True))
    return code


def _alone(work: Callable[[], _Result]) -> _Result:
    with _lock, warnings.catch_warnings():
        # The import warned already. As an error, a warning about an escape would hide the source.
        warnings.simplefilter("ignore")
        for _ in range(_ATTEMPTS - 1):
            try:
                return work()
            except SystemError:  # a thread that does not take the lock
                continue
        return work()


# trees as text -------------------------------------------------------------------------------------------------------


def write_tree(tree: ast.AST, documented: bool = True) -> str:
    """A syntax tree as ASCII text: equal for equal trees, on any Python version.

    Args:
        documented: with docstrings and type hints. Without, only those of the fields of classes are left.
    """
    # A stack, not recursion: a chain of a few hundred operators or elifs is a tree as deep.
    written: list[str] = []
    waiting: list[ast.AST | str] = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            written.append(item)
        else:
            waiting += reversed(_written_parts(item if documented else bare(item)))
    return "".join(written)


class _Field(ast.AnnAssign):
    """A field of a class, whose hint counts."""


def bare(node: ast.AST) -> ast.AST:
    """The node, or a copy of it, without docstring and hints of its own."""
    if isinstance(node, ast.AnnAssign) and not isinstance(node, _Field):
        # Without a value, it only makes a name local, which an assignment does, too.
        return ast.Assign([node.target], node.value) if node.value else ast.Pass()
    if isinstance(node, ast.arg):
        return ast.arg(node.arg)
    if not isinstance(node, _Documented):
        return node
    fields = dict(ast.iter_fields(node))
    body = fields["body"][1:] if _docstring(node) is not None else fields["body"]
    if isinstance(node, ast.ClassDef):
        body = [_Field(**dict(ast.iter_fields(one))) if isinstance(one, ast.AnnAssign) else one for one in body]
    else:
        fields |= {"returns": None, "type_params": []}
        body = [one for one in body if not isinstance(one, ast.AnnAssign) or one.value]
    return type(node)(**{**fields, "body": body or [ast.Pass()]})


def _written_parts(node: ast.AST) -> list[ast.AST | str]:
    """A node as text and nodes. Empty fields are left out: newer versions have more of them."""
    if isinstance(node, ast.Constant):
        return [_written_value(node.value)]
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS}
    if type(node).__name__ in _STRINGS:
        fields["values"] = parts = _merged(fields["values"])
        if isinstance(node, ast.JoinedStr) and all(isinstance(part, ast.Constant) for part in parts):
            return [_written_value("".join(_text(part) for part in parts))]  # f"text" is "text"
    elif isinstance(node, ast.FormattedValue) and not _merged(getattr(node.format_spec, "values", [])):
        fields["format_spec"] = None  # f"{x:}" is f"{x}"
    written: list[ast.AST | str] = [f"({type(node).__name__}"]
    for name, value in fields.items():
        if isinstance(value, list) and value:
            written += [f" {name}=[", *(item for element in value for item in (_written_element(element), ",")), "]"]
        elif value is not None and value != []:
            written += [f" {name}=", _written_element(value)]
    return [*written, ")"]


def _written_element(value: ast.AST | str | int | None) -> ast.AST | str:
    if value is None:
        return "_"  # {**x} has a key that is absent, {None: x} has the constant None
    return value if isinstance(value, ast.AST) else _written_value(value)


def _written_value(value: object) -> str:
    """A constant of Python, or an identifier. ``repr`` of a string depends on the version, and of a set on chance."""
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # str() refuses more than 4300 digits
    if isinstance(value, tuple):
        return f"tuple({','.join(map(_written_value, value))})"
    if isinstance(value, frozenset):
        return f"set({','.join(sorted(map(_written_value, value)))})"
    if isinstance(value, types.CodeType):
        return write_code(value)
    return ascii(value)


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, with neighbouring texts as one: some versions split them at ``{{`` and line breaks."""
    merged: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(_text(merged[-1]) + _text(value))
        elif not isinstance(value, ast.Constant) or value.value:
            merged.append(value)
    return merged


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else ""


def _docstring(node: _Documented) -> str | None:
    """An f-string without fields is no docstring, though it is written as one."""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value.value
    return None


# code objects as text ------------------------------------------------------------------------------------------------


def write_code(code: types.CodeType) -> str:
    """Bytecode, names and constants as ASCII text, the same in every process of one Python version."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"code({_written_value((code.co_code, code.co_exceptiontable, *names, code.co_consts))})"


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def loaded_names(function: types.FunctionType) -> set[str]:
    """The globals, and names of built-in functions, that the code reads."""
    kinds = ("LOAD_GLOBAL", "LOAD_NAME")
    steps = [step for code in nested_codes(function.__code__) for step in dis.get_instructions(code)]
    return {step.argval for step in steps if step.opname.startswith(kinds)}


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:32]
