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

import dis
import functools
import hashlib
import linecache
import os
import re
import sys
import time
import types
from collections.abc import Iterable

from datatrove_ckpt.generation.syntax import (
    Function,
    ParsedModule,
    Place,
    nested_codes,
    parse_module,
    write_code,
    write_tree,
)

_STARTED = time.time()
_PIPELINE = {"datatrove", "datatrove_ckpt"}  # which may run from a checkout
# Names that the compiler adds to a class with annotations. Which ones depends on the Python version.
_COMPILER_NAMES = {"__annotations__", "__annotate__", "__annotate_func__", "__conditional_annotations__"}
# Functions that see variables which the code does not name.
_READ_ALL_VARIABLES = {"locals", "vars", "eval", "exec"}
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")


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
    return f"bytecode {sys.implementation.cache_tag} {_digest(write_code(each.__code__) for each in functions)}"


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
    codes = list(nested_codes(function.__code__))
    if any(_READ_ALL_VARIABLES & _targets(code, "LOAD_GLOBAL") for code in codes):
        return list(function.__code__.co_freevars)
    used = set().union(*(_targets(code, "DEREF") for code in codes))
    return [name for name in function.__code__.co_freevars if name in used]


def global_names(function: types.FunctionType) -> list[str]:
    """The globals that the code names, except those that a function of the same module assigns: caches, counters."""
    # Functions read a global of such a name with LOAD_GLOBAL, and the body of a class its own with LOAD_NAME.
    read = set().union(*(_targets(code, "LOAD_GLOBAL") for code in nested_codes(function.__code__)))
    return [name for name in all_global_names(function) if name not in _COMPILER_NAMES or name in read]


def all_global_names(function: types.FunctionType) -> list[str]:
    """The same with the names that the compiler adds.

    Apart from those, ``co_names`` is the same on all Python versions. It also holds the names of unreachable code.
    """
    named = {name for code in nested_codes(function.__code__) for name in code.co_names}
    module = [value for value in function.__globals__.values() if isinstance(value, types.FunctionType)]
    assigned: set[str] = set().union(
        *(
            _targets(code, "STORE_GLOBAL")
            for other in (function, *module)
            if other.__module__ == function.__module__
            for code in nested_codes(other.__code__)
        )
    )
    return sorted(name for name in named - assigned if name in function.__globals__)


def loaded_names(function: types.FunctionType) -> set[str]:
    """The globals, and names of built-in functions, that the code reads."""
    codes = list(nested_codes(function.__code__))
    return set().union(*(_targets(code, "LOAD_GLOBAL") | _targets(code, "LOAD_NAME") for code in codes))


@functools.lru_cache(maxsize=10_000)
def _targets(code: types.CodeType, operation: str) -> frozenset[str]:
    """The names that instructions of this kind take. Cached: each helper of a rollout looks at its whole module."""
    instructions = dis.get_instructions(code)
    return frozenset(instruction.argval for instruction in instructions if operation in instruction.opname)


def is_of_user(file: str | None, module: str | None) -> bool:
    """Whether a file is the user's own, and none of an installed package, of the standard library or of this package.

    Text that is compiled without a file ("<string>": methods that ``dataclass`` makes) is nobody's.
    """
    if file is None or file.startswith("<") or str(module).partition(".")[0] in _PIPELINE:
        return False
    return not _is_standard_file(file) and not _PACKAGES.search(file)


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
    parsed. The file may have been edited since the function was imported or pickled, so the source is that of the
    function in the file which compiles to the same code, wherever it is now.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    module = parse_module("".join(linecache.getlines(code.co_filename, function.__globals__)))
    place = _place(code, module)
    found = [pair for pair in module.nodes.get(place, []) if _takes_arguments_of(pair[0], code)] if place else []
    # Lambdas that begin in one line cannot be told apart. The statement around them says what each of them is for.
    nodes = [node for node, _ in found] if len(found) == 1 else dict.fromkeys(statement for _, statement in found)
    return "".join(map(write_tree, nodes))


def _place(code: types.CodeType, module: ParsedModule) -> Place | None:
    """Where the function is in its file today; None if it is no longer there."""
    own, text = Place(code.co_name, code.co_firstlineno), write_code(code)
    same = [place for place, codes in module.codes.items() if place.name == own.name and text in codes]
    if same:
        return min(same, key=lambda place: abs(place.line - own.line))
    # What changes code when it is imported (pytest rewrites assertions) leaves the lines as they are.
    return own if own in module.nodes and not _was_edited(code.co_filename) else None


def _was_edited(file: str) -> bool:
    """Since this process started."""
    try:
        return os.stat(file).st_mtime > _STARTED  # noqa: PTH116 (co_filename is text)
    except OSError:  # an archive, or a cell of a notebook
        return False


def _takes_arguments_of(node: Function, code: types.CodeType) -> bool:
    """False: the file was edited, and another function is now at this line."""
    counts = [len(node.args.posonlyargs), len(node.args.posonlyargs + node.args.args), len(node.args.kwonlyargs)]
    return counts == [code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount]
