"""How release 0.1.0 hashed code: for its checkpoints only, which go on as long as Python stays the same.

Nothing here may change: a checkpoint of 0.1.0 is continued if these functions give what its ``run.json`` holds. The
hashes differ between Python versions, which is why ``code_hash`` took their place.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

import xxhash

from datatrove_ckpt.generation.code_hash import all_global_names as global_names
from datatrove_ckpt.generation.syntax import parse

__all__ = ["closure_names", "code_hash", "function_value", "global_names", "type_name"]


def code_hash(function: types.FunctionType) -> str:
    """xxh64 of the unparsed source, or of the bytecode where there is no source."""
    try:
        tree = parse(textwrap.dedent(inspect.getsource(function)))
        return str(xxhash.xxh3_64_hexdigest(ast.unparse(tree).encode()))
    except (OSError, TypeError, SyntaxError):
        return _bytecode_hash(function.__code__)
    except Exception:  # 0.1.0 raised this error when the step was made, so it left no checkpoint of this function
        return "none"


def _bytecode_hash(code: types.CodeType) -> str:
    parts = [code.co_code, repr(code.co_names).encode(), repr(code.co_varnames).encode()]
    for constant in code.co_consts:
        nested = isinstance(constant, types.CodeType)
        parts.append((_bytecode_hash(constant) if nested else repr(constant)).encode())
    return str(xxhash.xxh3_64_hexdigest(b"\0".join(parts)))


def function_value(function: types.FunctionType) -> str:
    return f"{function.__qualname__} {code_hash(function)}"


def type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def closure_names(function: types.FunctionType) -> list[str]:
    return list(function.__code__.co_freevars)
