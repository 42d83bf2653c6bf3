"""Source code as syntax trees, and trees and code objects as text that is equal on every Python version.

``ast`` in CPython 3.11 counts its recursion in a variable of the whole interpreter, so two threads that parse at once
fail with ``SystemError: AST constructor recursion depth mismatch``. All parsing of the package happens here, behind one
lock. Other code of the process may parse, too (loguru does, for tracebacks), so such an error is also tried again.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import dis
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")
_STRINGS = {"JoinedStr", "TemplateStr"}  # the second is new in Python 3.14
# The context follows from the parent node; the kind tells u"" from "".
_IGNORED_FIELDS = {"ctx", "kind", "type_comment"}
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
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


def write_tree(tree: ast.AST) -> str:
    """A syntax tree as ASCII text: equal for equal trees, on any Python version."""
    # A stack, not recursion: a chain of a few hundred operators or elifs is a tree as deep.
    written: list[str] = []
    waiting: list[object] = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, ast.AST):
            waiting += reversed(_written_parts(item))
        else:
            written.append(str(item))
    return "".join(written)


def _written_parts(node: ast.AST) -> list[object]:
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
    written: list[object] = [f"({type(node).__name__}"]
    for name, value in fields.items():
        if isinstance(value, list) and value:
            written += [f" {name}=[", *(item for element in value for item in (_written_element(element), ",")), "]"]
        elif value is not None and value != []:
            written += [f" {name}=", _written_element(value)]
    return [*written, ")"]


def _written_element(value: object) -> object:
    if value is None:
        return "_"  # {**x} has a key that is absent, {None: x} has the constant None
    return value if isinstance(value, ast.AST) else _written_value(value)


def _written_value(value: object) -> str:
    """A constant of Python, or an identifier. ``repr`` of a string depends on the version, and of a set on chance."""
    if isinstance(value, tuple):
        return f"tuple({','.join(map(_written_value, value))})"
    if isinstance(value, frozenset):
        return f"set({','.join(sorted(map(_written_value, value)))})"
    return write_code(value) if isinstance(value, types.CodeType) else ascii(value)


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


def compile_part(node: ast.AST) -> types.CodeType | None:
    """Code of a part of a module, whose nested codes say what is global in which function.

    None for a part without scopes of its own, and for one that is a part of a function.
    """
    if not any(isinstance(one, _SCOPES) for one in ast.walk(node)):
        return None
    statement = node if isinstance(node, ast.stmt) else ast.Expr(node)  # type: ignore[arg-type]
    try:
        return compile_tree(ast.Module([ast.fix_missing_locations(statement)], []))
    except (SyntaxError, TypeError):  # "return" or "nonlocal" outside of a function; arguments
        return None


def loaded_names(code: types.CodeType) -> set[str]:
    """The globals, and names of built-in functions, that the code reads."""
    return set().union(*map(_loaded, nested_codes(code)))


@functools.lru_cache(maxsize=10_000)
def _loaded(code: types.CodeType) -> frozenset[str]:
    kinds = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname.startswith(kinds))
