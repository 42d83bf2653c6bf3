"""Annotations of constructors: which arguments a class takes, which values each may have, and these as words."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Parameter:
    """An argument of a constructor. ``default`` is ``REQUIRED`` if it has none."""

    hint: Any
    default: Any


REQUIRED = inspect.Parameter.empty
ANYTHING = Parameter(Any, REQUIRED)
"""What is known of an argument that goes into ``**kwargs``."""


def parameters_of(cls: Any) -> tuple[dict[str, Parameter], bool]:
    """The constructor's arguments; and whether there may be others (**kwargs)."""
    try:
        hints = typing.get_type_hints(cls.__init__)
    except NameError:  # an annotation that exists only for type checkers: the constructor checks it
        hints = {}
    made = {one.name: one.default_factory for one in _fields(cls) if one.default_factory is not dataclasses.MISSING}
    arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [argument for argument in arguments if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)]
    parameters = {}
    for one in named:
        default = made[one.name]() if one.name in made else one.default
        parameters[one.name] = Parameter(_hint(hints.get(one.name, Any), default), default)
    return parameters, any(argument.kind is argument.VAR_KEYWORD for argument in arguments)


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def _hint(hint: Any, default: Any) -> Any:
    """Corrects datatrove's annotations: ``adapter: Callable = None``, ``save_media_bytes=False``, ``tuple[str]`` for a
    tuple of any length."""
    if hint is Any:
        return bool if isinstance(default, bool) else Any
    kinds = alternatives(hint)
    for index, kind in enumerate(kinds):
        if typing.get_origin(kind) is tuple and len(typing.get_args(kind)) == 1:
            kinds[index] = types.GenericAlias(tuple, (*typing.get_args(kind), ...))
    return typing.Union[tuple([*kinds, None] if default is None else kinds)]  # noqa: UP007 (made at run time)


def alternatives(hint: Any) -> list[Any]:
    """The parts of a union, and of unions in it; an annotation that is none, as the only part."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in alternatives(part)]
    return [hint]


def origin(kind: Any) -> Any:
    """``list`` for ``list[int]``, ``list`` for ``list``."""
    return typing.get_origin(kind) or kind


def is_class(kind: Any) -> bool:
    """Whether its values are objects that a file describes with class_path, or null."""
    return kind is type(None) or (inspect.isclass(kind) and kind.__module__ not in ("builtins", "typing"))


def is_callable(kind: Any) -> bool:
    """Whether its values are functions, which a file names by import path."""
    kind = origin(kind)
    return kind is Callable or (getattr(kind, "_is_protocol", False) and "__call__" in vars(kind))


def fits(cls: type, kinds: list[Any]) -> bool:
    """Whether an object of the class is one of these kinds."""
    origins = [Callable if is_callable(kind) else origin(kind) for kind in kinds]
    return Any in kinds or any(inspect.isclass(one) and issubclass(cls, one) for one in origins)


def in_words(kinds: list[Any]) -> str:
    """The allowed alternatives: "an int or null", "one of gzip, zstd, null"."""
    choices = choices_of(kinds)
    if str in kinds:  # a user who can give a string gives no DataFolder or file system object
        kinds = [k for k in kinds if k is type(None) or not any(map(is_class, (k, *typing.get_args(k))))]
    words = [f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]] if choices else []
    words += [_word(kind) for kind in kinds if not (choices and (kind is type(None) or origin(kind) is Literal))]
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]


def choices_of(kinds: list[Any]) -> list[str]:
    """The values that a Literal among the kinds allows."""
    choices = [str(choice) for kind in kinds if origin(kind) is Literal for choice in typing.get_args(kind)]
    return [*choices, "null"] if choices and type(None) in kinds else choices


def _word(kind: Any) -> str:
    if is_callable(kind):
        return "an import path such as my_module.my_function"
    name = getattr(origin(kind), "__name__", str(kind))
    inner = " and ".join(getattr(item, "__name__", "") for item in typing.get_args(kind) if item is not ...)
    if name in ("list", "tuple"):
        return f"a list of {inner}" if inner not in ("", "Union") else "a list"
    words = {"int": "an int", "NoneType": "null", "dict": "a mapping", "bool": "true or false"}
    return words.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
