"""A hash of a function's code, and the names it uses, equal on Python 3.11, 3.12, 3.13 and 3.14.

The hash covers the syntax tree: node types, names and constants. Docstrings count, because a rollout may use its
docstring as a prompt; only the indentation that their lines share does not. Comments, layout, quotes and line numbers
do not count. The tree is written here, because neither ``ast.unparse`` nor ``ast.dump`` gives the same text on
every Python: 3.12 changed the quotes in f-strings, 3.13 leaves out empty fields, and ``repr`` of a string escapes the
characters that this Python's version of Unicode does not know.

A function without source (``python -c``, ``exec``, a file that is gone or was edited) has a hash of its bytecode. Every
Python version compiles to other bytecode, so that hash names the version.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import json
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STRINGS = {"JoinedStr", "TemplateStr"}  # the second is new in Python 3.14
# Names that the compiler adds to a class with annotations. Which ones depends on the Python version.
_COMPILER_NAMES = {"__annotations__", "__annotate__", "__annotate_func__", "__conditional_annotations__"}
# Functions that see variables which the code does not name.
_READ_ALL_VARIABLES = {"locals", "vars", "eval", "exec"}
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
# The context follows from the parent node; the kind tells u"" from "".
_IGNORED_FIELDS = {"ctx", "kind", "type_comment"}


def code_hash(function: types.FunctionType) -> str:
    """``source HASH``, or ``bytecode cpython-311 HASH`` where the source was not found.

    The wrappers that ``functools.wraps`` put around a function count, too, except those of installed packages: another
    release of a library is not another run.
    """
    innermost, *wrappers = reversed(_unwrapped(function))
    functions = [innermost, *(wrapper for wrapper in wrappers if not _is_installed(wrapper))]
    sources = [_source(each) for each in functions]
    if all(sources):
        return f"source {_digest(sources)}"
    return f"bytecode {sys.implementation.cache_tag} {_digest(_bytecode(each.__code__) for each in functions)}"


def is_bytecode(value: object) -> bool:
    """The value ends with a hash that was made without source."""
    return isinstance(value, str) and re.search(r"\bbytecode \S+ [0-9a-f]{32}$", value) is not None


def function_value(function: types.FunctionType) -> str:
    """A function that is a value, of an argument or attribute. Each Python version changes the standard library's."""
    if _is_standard(function):
        return f"<{function.__module__}.{function.__qualname__}>"
    return f"{function.__qualname__} {code_hash(function)}"


def type_name(cls: type) -> str:
    """The module and the name of a class.

    Without the private modules of the standard library, which come and go: 3.13 has ``pathlib._local.PosixPath``.
    """
    module = str(cls.__module__)
    root, *rest = module.split(".")
    if _is_standard_module(root):
        private = next((index for index, part in enumerate(rest) if part.startswith("_")), len(rest))
        module = ".".join([root, *rest[:private]])
    name = f"{module}.{cls.__qualname__}"
    # Optional[int] and int | None: two types before Python 3.14, one type since.
    return "typing.Union" if name in ("typing._UnionGenericAlias", "types.UnionType") else name


def closure_names(function: types.FunctionType) -> list[str]:
    """The variables of enclosing functions that the code reads or assigns.

    Before Python 3.14 ``co_freevars`` also names variables that only the annotation of a local variable mentions. They
    and the variables of unreachable code count where the function may read all its variables: ``locals()``.
    """
    codes = list(_nested_codes(function.__code__))
    if any(_READ_ALL_VARIABLES & _targets(code, "LOAD_GLOBAL") for code in codes):
        return list(function.__code__.co_freevars)
    used = set().union(*(_targets(code, "DEREF") for code in codes))
    return [name for name in function.__code__.co_freevars if name in used]


def global_names(function: types.FunctionType) -> list[str]:
    """The globals that the code names, except those that a function of the same module assigns: caches, counters."""
    # Functions read a global of such a name with LOAD_GLOBAL, and the body of a class its own with LOAD_NAME.
    read = set().union(*(_targets(code, "LOAD_GLOBAL") for code in _nested_codes(function.__code__)))
    return [name for name in all_global_names(function) if name not in _COMPILER_NAMES or name in read]


def all_global_names(function: types.FunctionType) -> list[str]:
    """The same with the names that the compiler adds.

    Apart from those, ``co_names`` is the same on all Python versions. It also holds the names of unreachable code.
    """
    named = {name for code in _nested_codes(function.__code__) for name in code.co_names}
    module = [value for value in function.__globals__.values() if isinstance(value, types.FunctionType)]
    assigned: set[str] = set().union(
        *(
            _targets(code, "STORE_GLOBAL")
            for other in (function, *module)
            if other.__module__ == function.__module__
            for code in _nested_codes(other.__code__)
        )
    )
    return sorted(name for name in named - assigned if name in function.__globals__)


@functools.lru_cache(maxsize=10_000)
def _targets(code: types.CodeType, operation: str) -> frozenset[str]:
    """The names that instructions of this kind take. Cached: each helper of a rollout looks at its whole module."""
    instructions = dis.get_instructions(code)
    return frozenset(instruction.argval for instruction in instructions if operation in instruction.opname)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("ascii")).hexdigest()[:32]


def _unwrapped(function: types.FunctionType) -> list[types.FunctionType]:
    """The function and the functions that it wraps, outermost first."""
    functions = [function]
    while isinstance(inner := getattr(functions[-1], "__wrapped__", None), types.FunctionType):
        if inner in functions:
            break
        functions.append(inner)
    return functions


def _is_standard(function: types.FunctionType) -> bool:
    """By the file, since a user's module may be named like one of the standard library."""
    return _is_standard_file(function.__code__.co_filename)


def _is_standard_module(name: str) -> bool:
    """A module without a file is built in: a module of the user has no name of the standard library without a file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.stdlib_module_names and (file is None or _is_standard_file(file))


def _is_standard_file(file: str) -> bool:
    return file.startswith("<frozen ") or (file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.search(file))


def _is_installed(function: types.FunctionType) -> bool:
    return _is_standard(function) or _PACKAGES.search(function.__code__.co_filename) is not None


# the source ----------------------------------------------------------------------------------------------------------


def _source(function: types.FunctionType) -> str:
    """The function's syntax tree as text, "" where its source was not found.

    ``inspect.getsource`` gives the lines of a lambda, often half a call that cannot be parsed. So the whole file is
    parsed, and the function looked up by its line.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = [
        (node, statement)
        for node, statement in _functions("".join(lines)).get((code.co_name, code.co_firstlineno), [])
        if _takes_arguments_of(node, code)
    ]
    # Lambdas that begin in one line cannot be told apart. The statement around them says what each of them is for.
    nodes = [node for node, _ in found] if len(found) == 1 else dict.fromkeys(statement for _, statement in found)
    return "".join(map(write_tree, nodes))


@functools.lru_cache(maxsize=8)
def _functions(source: str) -> dict[tuple[str, int], list[tuple[_Function, ast.AST]]]:
    """A module's functions, each with the statement around it, by the name and first line that its code object has."""
    try:
        with warnings.catch_warnings():
            # The import warned already. As an error, a warning about an escape would hide the source.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[tuple[str, int], list[tuple[_Function, ast.AST]]] = {}
    waiting: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while waiting:
        node, statement = waiting.pop()
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append((node, statement))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.decorator_list[0] if node.decorator_list else node
            found.setdefault((node.name, first.lineno), []).append((node, statement))
        inner = node if isinstance(node, ast.stmt) else statement
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def _takes_arguments_of(node: _Function, code: types.CodeType) -> bool:
    """False: the file was edited, and another function is now at this line."""
    counts = [len(node.args.posonlyargs), len(node.args.posonlyargs + node.args.args), len(node.args.kwonlyargs)]
    return counts == [code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount]


def write_tree(tree: ast.AST) -> str:
    """A syntax tree as ASCII text: equal for equal trees, on any Python version."""
    # A stack, not recursion: a chain of a few hundred operators or elifs is a tree as deep.
    written: list[str] = []
    waiting: list[ast.AST | str] = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            written.append(item)
        else:
            waiting += reversed(_written_parts(item))
    return "".join(written)


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
    elif isinstance(node, _Documented):
        fields |= _split_docstring(node)
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
    if isinstance(value, str):
        # json.dumps alone would write one character beyond U+FFFF as the two surrogates that a string may hold, too.
        return json.dumps(value, ensure_ascii=False).encode("ascii", "backslashreplace").decode("ascii")
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # str() refuses more than 4300 digits
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return f"complex {value.real.hex()} {value.imag.hex()}"
    if isinstance(value, tuple):
        return f"tuple({','.join(map(_written_value, value))})"
    if isinstance(value, frozenset):
        return f"set({','.join(sorted(map(_written_value, value)))})"
    if isinstance(value, types.CodeType):
        return _bytecode(value)
    return ascii(value)  # None, True, False, ..., and slices of those above


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


def _split_docstring(node: _Documented) -> dict[str, str | list[ast.stmt]]:
    """The docstring and the rest of the body. An f-string without fields is no docstring, though it is written as one.

    A function that is moved into a class is the same one, so the indentation that the lines share is removed. Here,
    since ``inspect.cleandoc`` and ``textwrap.dedent`` depend on the Python version. Other space counts: before Python
    3.13 all of it is in ``__doc__``.
    """
    first, *rest = node.body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return {"docstring": _without_common_indent(first.value.value), "body": rest}
    return {"body": node.body}


def _without_common_indent(docstring: str) -> str:
    first, *rest = docstring.split("\n")
    texts = [line for line in rest if line.strip(" \t")] or rest
    indents = [line[: len(line) - len(line.lstrip(" \t"))] for line in texts]
    common = min(indents, key=len, default="")
    while not all(indent.startswith(common) for indent in indents):  # tabs and spaces
        common = common[:-1]
    # A line that is shorter than the indentation is empty.
    return "\n".join([first, *(line[len(common) :] for line in rest)])


# the bytecode --------------------------------------------------------------------------------------------------------


def _bytecode(code: types.CodeType) -> str:
    """Bytecode, names and constants as ASCII text, the same in every process of one Python version."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"code({_written_value((code.co_code, code.co_exceptiontable, *names, code.co_consts))})"


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_codes(constant)
