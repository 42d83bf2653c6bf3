"""What the declaration of a setting says: the bounds with its type, and what it means in the
docstring of its class.

The checks of Python and YAML use it, ``--help``, the completion of a shell, and docs/settings.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal

from datatrove_ckpt.errors import ConfigError

Parameter = inspect.Parameter


@dataclass(frozen=True)
class Range:
    """The numbers that a setting takes. ``rule`` says them in a message."""

    rule: str
    least: float
    most: float = math.inf

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Real) and self.least <= float(value) <= self.most


Positive = Annotated[float, Range("> 0", math.ulp(0))]
NotNegative = Annotated[float, Range(">= 0", 0)]
Count = Annotated[int, Range(">= 1", 1)]
CountFromZero = Annotated[int, Range(">= 0", 0)]
Port = Annotated[int, Range("from 1 to 65535", 1, 65535)]
CountOrAll = Count | Literal[-1]
Seconds = Annotated[float, Range(">= 0", 0, math.nextafter(math.inf, 0))] | Literal["auto"]


@functools.cache
def parameters_of(cls: Any, bounds: bool = False) -> tuple[dict[str, Parameter], bool]:
    """Returns the parameters of a constructor, and whether it takes any others, too.

    A constructor of this package hands its ``**options`` on to the next class.

    Args:
        bounds: their types have these.
    """
    parameters: dict[str, Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        try:
            hints = typing.get_type_hints(base.__init__, include_extras=bounds)
        except NameError:  # an annotation only for type checkers: the constructor checks it
            hints = {}
        arguments = list(inspect.signature(base.__init__).parameters.values())[1:]
        for one in arguments:
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                hint = _hint(one.name, hints.get(one.name, Any), one.default)
                parameters.setdefault(one.name, one.replace(annotation=hint))
        if all(one.kind is not one.VAR_KEYWORD for one in arguments):
            return parameters, False
        if not base.__module__.startswith("datatrove_ckpt."):
            break
    return parameters, True


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


def meanings(cls: type) -> dict[str, tuple[str, str]]:
    """Returns what the docstring of a class says of its settings: what another value does to a run
    that has begun ("identity", "request", "free" or ""), and what the setting means.
    """
    entries = _ENTRY.findall((cls.__doc__ or "").partition("Raises:")[0])
    return {
        name: (effect, " ".join(text.split()).replace("``", "`"))
        for names, effect, text in entries
        for name in names.split(", ")
    }


def check(cls: type, values: Mapping[str, object]) -> None:
    """Checks the arguments of a constructor that have bounds or choices.

    Raises:
        ConfigError: the first one that its declaration does not allow.
    """
    for name, parameter in parameters_of(cls, bounds=True)[0].items():
        kinds = alternatives(parameter.annotation)
        if name in values and not any(_takes(kind, values[name]) for kind in kinds):
            rule = " or ".join(_rule(kind) for kind in kinds if kind is not type(None))
            raise ConfigError(f"must be {rule}; it is {values[name]!r}.", setting=name)


def _takes(kind: Any, value: object) -> bool:
    outer = typing.get_origin(kind)
    if outer is Annotated:
        return value in kind.__metadata__[0]
    if outer is Literal:
        return value in typing.get_args(kind)
    return kind is not type(None) or value is None


def _rule(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].rule)
    return " or ".join(map(json.dumps, typing.get_args(kind)))
