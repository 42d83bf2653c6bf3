"""Parses source code, and writes trees and code objects as text that is equal on all Pythons.

``ast`` in CPython 3.11 counts its recursion in a variable of the whole interpreter, so two threads
that parse at once fail with ``SystemError``. So all parsing happens here, behind one lock, and is
retried, because other code (loguru) may parse, too.

The modules ``code_*`` import only the standard library: a test runs them on every Python.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STRINGS = {"JoinedStr", "TemplateStr"}  # the second is new in Python 3.14
# The context follows from the parent node; the kind tells u"" from "".
_IGNORED_FIELDS = {"ctx", "kind", "type_comment"}
_ATTEMPTS = 20
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """``ast.parse`` for several threads."""
    return _alone(lambda: ast.parse(source))


def compile_tree(tree: ast.Module) -> types.CodeType:
    code: types.CodeType = _alone(lambda: compile(tree, "<source>", "exec", dont_inherit=True))
    return code


def _alone(work: Callable[[], _Result]) -> _Result:
    with _lock, warnings.catch_warnings():
        # As an error, a warning about an escape would hide the source.
        warnings.simplefilter("ignore")
        for _ in range(_ATTEMPTS - 1):
            try:
                return work()
            except SystemError:  # a thread that does not take the lock
                continue
        return work()


# trees as text -----------------------------------------------------------------------------------


def write_tree(node: object) -> str:
    """Returns a syntax tree as ASCII text: equal for equal trees, on any Python version."""
    if isinstance(node, list):
        # {**x} has a key that is absent, {None: x} has the constant None.
        parts = [
            "_" if part is None else write_tree(part)
            for part in node
            if not isinstance(part, ast.Pass)
        ]
        return f"[{','.join(parts)}]"
    if not isinstance(node, ast.AST):
        return _written_value(node)
    # Empty fields are left out: newer versions have more of them.
    fields: dict[str, Any] = {
        name: part for name, part in ast.iter_fields(node) if name not in _IGNORED_FIELDS
    }
    fields = {name: part for name, part in fields.items() if part is not None and part != []}
    if isinstance(node, ast.Constant):
        return _written_value(node.value)
    if type(node).__name__ in _STRINGS:
        values = _merged(fields.get("values", []))
        fields["values"] = values
        if isinstance(node, ast.JoinedStr) and all(
            isinstance(part, ast.Constant) for part in values
        ):
            return _written_value("".join(_text(part) for part in values))  # f"text" is "text"
    elif isinstance(node, ast.FormattedValue) and not _merged(
        getattr(node.format_spec, "values", [])
    ):
        fields.pop("format_spec", None)  # f"{x:}" is f"{x}"
    written = [f" {name}={write_tree(part)}" for name, part in fields.items()]
    return f"({type(node).__name__}{''.join(written)})"


def strip(node: ast.AST) -> None:
    """Removes the docstring and the hints of a node, except hints of the fields of classes."""
    if isinstance(node, ast.arg):
        node.annotation = None
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.returns = None
        if hasattr(node, "type_params"):
            node.type_params = []
    if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
        node.body[0] = ast.Pass(lineno=1, col_offset=0)
    if isinstance(getattr(node, "body", None), list) and not isinstance(node, ast.ClassDef):
        for name in ("body", "orelse", "finalbody"):
            setattr(node, name, list(map(unhinted, getattr(node, name, []))))


def unhinted(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.AnnAssign):
        return statement
    bare: ast.stmt = ast.Pass()
    if statement.value:
        bare = ast.Assign([statement.target], statement.value)
    return ast.copy_location(bare, statement)


def _written_value(value: object) -> str:
    """Writes a constant, or an identifier.

    ``repr`` of a string depends on the version, and of a set on chance.
    """
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
    """Joins neighbouring texts of an f-string, which some versions split at ``{{`` and line
    breaks.
    """
    merged: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(_text(merged[-1]) + _text(value))
        elif not isinstance(value, ast.Constant) or value.value:
            merged.append(value)
    return merged


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return ""


# code objects as text ----------------------------------------------------------------------------


def write_code(code: types.CodeType) -> str:
    """Bytecode, names and constants as ASCII text, the same in every process of one Python
    version.
    """
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"code({_written_value((code.co_code, code.co_exceptiontable, *names, code.co_consts))})"


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def loaded_names(code: types.CodeType) -> set[str]:
    kinds = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    steps = [step for inner in nested_codes(code) for step in dis.get_instructions(inner)]
    return {step.argval for step in steps if step.opname.startswith(kinds)}


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:32]
