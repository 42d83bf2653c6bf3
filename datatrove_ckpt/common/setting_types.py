"""The declarations of settings: their types, choices and bounds, and their meanings in the
docstrings of their classes.

The checks of Python and YAML use it, ``--help``, and docs/settings.md.
"""

import functools
import inspect
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, SupportsFloat

from datatrove_ckpt.common.formatting import cut, did_you_mean
from datatrove_ckpt.common.redaction import HIDDEN, masked, may_name_secret
from datatrove_ckpt.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The numbers that a setting takes. Messages write ``rule``."""

    rule: str
    minimum: float
    maximum: float = math.inf

    def __contains__(self, value: SupportsFloat) -> bool:
        return self.minimum <= float(value) <= self.maximum


Positive = Annotated[float, Range("> 0", math.ulp(0))]
NotNegative = Annotated[float, Range(">= 0", 0)]
Count = Annotated[int, Range(">= 1", 1)]
Share = Annotated[float, Range("from 0 to 1", 0, 1)]
CountFromZero = Annotated[int, Range(">= 0", 0)]
Port = Annotated[int, Range("from 1 to 65535", 1, 65535)]
CountOrAll = Count | Literal[-1]
Price = Annotated[float, Range(">= 0", 0, math.nextafter(math.inf, 0))]
IntervalSeconds = Price | Literal["auto"]


@functools.cache
def parameters_of(cls: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Returns the parameters of a constructor, and whether it also takes any others.

    A constructor of this package hands its ``**options`` on to the next class, but for those that
    its class has ``omitted``.
    """
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        try:
            hints = typing.get_type_hints(base.__init__, include_extras=True)
        except NameError:  # an annotation only for type checkers: the constructor checks it
            hints = {}
        arguments = list(inspect.signature(base.__init__).parameters.values())[1:]
        for argument in arguments:
            is_omitted = argument.name in getattr(cls, "omitted", ())
            if not is_omitted and argument.kind not in (
                argument.VAR_POSITIONAL,
                argument.VAR_KEYWORD,
            ):
                hint = _hint(argument.name, hints.get(argument.name, Any), argument.default)
                parameters.setdefault(argument.name, argument.replace(annotation=hint))
        if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments):
            return parameters, False
        if not base.__module__.startswith("datatrove_ckpt."):
            break
    return parameters, True


def argument_hint(cls: type, name: str) -> object:
    parameters, _ = parameters_of(cls)
    if name in parameters:
        return parameters[name].annotation
    return Any


def _hint(name: str, hint: Any, default: object) -> object:
    """Corrects datatrove's annotations, as ``adapter: Callable = None``."""
    if hint is Any:
        if isinstance(default, bool):
            return bool
        return Any
    if default is None or name == "text_key":
        return hint | None
    return hint


def alternatives(hint: object) -> list[object]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in alternatives(part)]
    return [hint]


_ENTRY = re.compile(r"^ {8}(\w+(?:, \w+)*)(?: \((\w+)\))?: (.*(?:\n {12}.*)*)", re.MULTILINE)


def docstring(described: Callable[..., object]) -> str:
    """Returns a docstring as written, also where Python runs without docstrings (``-OO``)."""
    if sys.flags.optimize < 2:
        return described.__doc__ or ""
    return inspect.getsource(described).split('"""')[1]


def meanings(cls: type) -> dict[str, tuple[str, str]]:
    """Returns the meanings of a class's settings from its docstring: what another value does to
    a run that has begun ("identity", "request", "free" or ""), and what the setting means.
    """
    entries = _ENTRY.findall(docstring(cls).partition("Raises:")[0])
    return {
        name: (effect, " ".join(text.split()).replace("``", "`"))
        for names, effect, text in entries
        for name in names.split(", ")
    }


def check(cls: type, values: Mapping[str, object]) -> None:
    for name, parameter in parameters_of(cls)[0].items():
        if name in values:
            check_value(name, parameter.annotation, values[name])


def refuse(names: Iterable[str], instead: Mapping[str, str]) -> None:
    """Refuses arguments that an earlier release or another library has.

    Raises:
        ConfigError: the first argument. TypeError, if ``instead`` does not have it.
    """
    for name in names:
        if name not in instead:
            raise TypeError(f"unexpected argument {name!r}")
        raise ConfigError(f"not an argument here. Write {instead[name]}.", setting=name)


def one_of(choices: Iterable[str]) -> object:
    return Literal[tuple(choices)]


def check_value(name: str, hint: object, value: object) -> None:
    if takes(hint, value):
        return
    kinds = alternatives(hint)
    text = show(value)
    if may_name_secret(name):
        text = HIDDEN
    elif isinstance(value, str | list | tuple | dict):
        text = show(masked(name, value))
    advice = did_you_mean(value, _choices(kinds)) or "."
    if isinstance(value, str) and value.startswith('{"'):
        try:
            json.loads(value)
        except ValueError as error:
            advice = f": {error}."
    elif isinstance(value, str) and any(origin(kind) is list for kind in kinds):
        advice = f"; write [{value}]."
    elif isinstance(value, dict) and list(value.values()) == [None] and str in kinds:
        advice = f"; write '{{{next(iter(value))}}}', in quotes."  # YAML's {text}
    raise ConfigError(f"{text} is not {describe_types(hint)}{advice}", setting=name)


_LIST = ((list, tuple), "a list such as [a, b]")
_PLAIN: Mapping[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str, os.PathLike), "a text"),
    list: _LIST,
    tuple: _LIST,
    Sequence: _LIST,
    dict: ((Mapping,), "a mapping such as {name: value}"),
}
"""The types of values, and what they are called."""
_DATA = (bool, int, float, str, list, dict, type(None))


def takes(hint: object, value: object) -> bool:
    return any(_takes(kind, value) for kind in alternatives(hint))


def _takes(kind: Any, value: object) -> bool:
    """Whether a value is of a kind. Objects that are no plain data are left to the constructor."""
    outer = origin(kind)
    if typing.get_origin(kind) is Annotated:
        return _takes(outer, value) and value in kind.__metadata__[0]
    if outer is Literal:
        choices = typing.get_args(kind)
        return any(choice == value and type(choice) is type(value) for choice in choices)
    if kind == list[str] and isinstance(value, list | tuple):
        return all(isinstance(item, str) for item in value)
    if outer in _PLAIN:
        return isinstance(value, _PLAIN[outer][0]) and (
            outer is bool or not isinstance(value, bool)
        )
    if outer is Any or not inspect.isclass(outer) or not isinstance(value, _DATA):
        return True
    return not getattr(outer, "_is_protocol", False) and isinstance(value, outer)


def takes_class(hint: object, cls: type) -> bool:
    kinds = alternatives(hint)
    classes = [Callable if is_callable(kind) else origin(kind) for kind in kinds]
    return Any in kinds or any(inspect.isclass(base) and issubclass(cls, base) for base in classes)


def dataclass_of(hint: object) -> type | None:
    for kind in alternatives(hint):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


def value_hint(hint: object, mapping: Mapping[str, object]) -> object:
    """Returns the annotation of a mapping's values, such as models by their names.

    None: there is none, or the mapping has fields of a dataclass.
    """
    cls = dataclass_of(hint)
    if cls is not None:
        has_mappings = mapping and all(isinstance(value, dict) for value in mapping.values())
        if not has_mappings or mapping.keys() & parameters_of(cls)[0].keys():
            return None
    for kind in alternatives(hint):
        if origin(kind) in (dict, Mapping):
            _, inner = typing.get_args(kind) or (Any, Any)
            if inner not in (Any, object):
                return inner
    return None


def collection_of(hint: object) -> object:
    for outer in (list, Sequence, tuple, set, frozenset):
        for kind in alternatives(hint):
            if origin(kind) is outer:
                return kind
    return None


def item_hint(collection: object, index: int) -> object:
    """Returns the annotation of an item. datatrove writes ``tuple[str]`` for a tuple of any length,
    as others write ``tuple[str, ...]``.
    """
    hints = [hint for hint in typing.get_args(collection) if hint is not ...]
    if not hints:
        return Any
    return hints[min(index, len(hints) - 1)]


def origin(kind: Any) -> Any:
    outer = typing.get_origin(kind)
    if outer is Annotated:
        return kind.__origin__
    return outer or kind


def show(value: object) -> str:
    return cut(json.dumps(value, default=str, ensure_ascii=False), 57)


def describe_types(hint: object) -> str:
    """Returns the allowed alternatives: "auto or a whole number", "one of gzip, zstd, null"."""
    kinds = alternatives(hint)
    if str in kinds:  # a user who can give a string does not give an object, such as a DataFolder
        kinds = [kind for kind in kinds if not any(map(is_class, (kind, *typing.get_args(kind))))]
    words = _choices(kinds)
    if len(words) > 1:
        words = [f"one of {', '.join(words)}"]
    described: dict[object, str] = {}
    for kind in kinds:
        if origin(kind) not in (type(None), Literal):
            described.setdefault(origin(kind), _word(kind))
    words += described.values()
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]


def _choices(kinds: Sequence[object]) -> list[str]:
    choices = [
        str(choice) for kind in kinds if origin(kind) is Literal for choice in typing.get_args(kind)
    ]
    if choices and type(None) in kinds:
        return [*choices, "null"]
    return choices


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return f"{_word(origin(kind))} {kind.__metadata__[0].rule}"
    if is_callable(kind):
        return "a function, such as my_module.my_function"
    if is_dataclass(kind):
        return f"a mapping such as {{{fields(kind)[0].name}: ...}}"
    for item in typing.get_args(kind):
        if is_dataclass(item):
            return f"a list, each item {_word(item)}"
    if origin(kind) in _PLAIN:
        return _PLAIN[origin(kind)][1]
    name = getattr(origin(kind), "__name__", str(kind))
    article = "a"
    if name[0] in "AEIOU":
        article = "an"
    return f"{article} {name}"


def is_class(kind: object) -> bool:
    return kind is type(None) or (
        inspect.isclass(kind) and kind.__module__ not in ("builtins", "typing")
    )


def is_callable(kind: object) -> bool:
    kind = origin(kind)
    return kind is Callable or (getattr(kind, "_is_protocol", False) and "__call__" in vars(kind))
