"""The whole configuration of a run: what a file and its overrides say, and the defaults of all that they leave out.

It is YAML that can be run again. Comments at its top say what a file cannot: values that the run computes from others,
defaults that are no plain values, and where a secret was hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jsonargparse

from datatrove_ckpt.cli.yaml_config import (
    ANYTHING,
    MASK,
    Parameter,
    alternatives,
    checked,
    dump,
    import_name,
    is_callable,
    item_hint,
    leaves,
    parameters_of,
    short,
)
from datatrove_ckpt.redaction import Veil, is_secret

_PLAIN = (str, bool, int, float, type(None))
_LEFT_OUT = object()


class FullConfig:
    """Everything that an executor is built from.

    Args:
        content: what the file says, with overrides applied. ``build`` must have accepted it.
        executor: what ``build`` made of it.
    """

    def __init__(self, content: dict[str, Any], executor: object) -> None:
        self._defaults: list[str] = []
        self._secrets: list[str] = []
        self._content = {"executor": self._node(content["executor"], "executor")}
        self._computed = [*_computed(self._content["executor"], executor, "executor")]

    def text(self) -> str:
        """The configuration as YAML, with secrets masked."""
        head = "# The configuration as it will be used, with all defaults. This text can be run as it stands.\n"
        head += _comment("Computed from the other settings", self._computed)
        head += _comment("Left out, because a file cannot say these defaults", self._defaults)
        hidden = [place for place, value in leaves(self._content["executor"], "executor") if value == MASK]
        head += _comment("Hidden: write each secret in its place, into a file that only you can read", hidden)
        return head + dump(self._content)

    def redact(self, text: str) -> str:
        """Another text, with the same secrets masked."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _node(self, node: dict[str, Any], place: str) -> dict[str, Any]:
        cls = import_name(node["class_path"], place)
        return {"class_path": node["class_path"], "init_args": self._arguments(cls, node.get("init_args") or {}, place)}

    def _arguments(self, cls: Any, given: dict[str, Any], place: str) -> dict[str, Any]:
        """Every argument of a class: those that are given, and the defaults of the others. The pipeline is the last."""
        parameters, _ = parameters_of(cls)
        harmless = _names_without_secrets(cls)
        values: dict[str, Any] = {}
        for name in sorted([*parameters, *(name for name in given if name not in parameters)], key="pipeline".__eq__):
            where = f"{place}.{name}"
            if name in given:
                hint = parameters.get(name, ANYTHING).hint
                values[name] = self._given(hint, given[name], where, "" if name in harmless else name)
                continue
            values[name] = _default(parameters[name], "" if name in harmless else name)
            if values[name] is _LEFT_OUT:
                del values[name]
                self._defaults.append(short(where))
        return values

    def _given(self, hint: Any, value: Any, place: str, name: str) -> Any:
        """A value of the file, as ``build`` reads it."""
        kinds = alternatives(hint)
        plain = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(value, dict) and "class_path" in value:
            return self._node(value, place)
        if isinstance(value, dict) and plain:
            return self._arguments(plain[0], value, place)
        if isinstance(value, list) and (element := item_hint(kinds)) is not None:
            return [self._given(element, item, f"{place}.{index}", name) for index, item in enumerate(value)]
        is_text = isinstance(value, str) and (str in kinds or any(map(is_callable, kinds)))
        read = value if Any in kinds or is_text else _converted(hint, value)
        return self._masked(name, value if read is _LEFT_OUT else read, place)

    def _masked(self, name: str, value: Any, place: str) -> Any:
        """A value without its secrets. ``name`` is "" if it says nothing about them."""
        if value and isinstance(value, str | list | dict) and is_secret(name, value):
            self._secrets += [text for _, text in leaves(value, place) if text and isinstance(text, str)]
            return MASK
        if isinstance(value, dict):
            checked_before = place.endswith(".model_kwargs")  # and "</s>" is a token, but no secret
            return {
                key: self._masked("" if checked_before else f"{name}.{key}", part, f"{place}.{key}")
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [self._masked(name, part, f"{place}.{index}") for index, part in enumerate(value)]
        return value


def _names_without_secrets(cls: type) -> set[str]:
    """Arguments that classes of datatrove or ours have: their ``text_key`` is none."""
    return {name for one in filter(_is_known, cls.__mro__) for name in parameters_of(one)[0]}


def _is_known(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt")


def _default(parameter: Parameter, name: str) -> Any:
    """A default as a file would say it, or ``_LEFT_OUT``."""
    value = _as_written(parameter.default)
    if value is _LEFT_OUT or (value and is_secret(name, value)):
        return _LEFT_OUT
    if parameter.default is None or Any in alternatives(parameter.hint):
        return value if value == parameter.default else _LEFT_OUT
    return value if _converted(parameter.hint, value) == value else _LEFT_OUT


def _converted(hint: Any, value: Any) -> Any:
    """A plain value as jsonargparse makes it, such as 2.0 of "2", or ``_LEFT_OUT``."""
    try:
        return _as_written(checked(hint, value))
    except jsonargparse.ArgumentError:
        return _LEFT_OUT


def _as_written(value: Any) -> Any:
    """A plain value with lists for tuples, or ``_LEFT_OUT`` if it is not plain."""
    if isinstance(value, dict):
        parts = {key: _as_written(part) for key, part in value.items()}
        return _LEFT_OUT if any(part is _LEFT_OUT for part in parts.values()) else parts
    if isinstance(value, list | tuple):
        items = [_as_written(part) for part in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    return value if type(value) in _PLAIN else _LEFT_OUT


def _computed(node: dict[str, Any], built: Any, place: str) -> Iterator[str]:
    """Where datatrove's and our objects have another plain value than their argument says: ``place: value``."""
    for name, value in node.get("init_args", node).items():
        actual = vars(built).get(name, value)
        actual = actual.value if isinstance(actual, Veil) else actual
        if isinstance(value, list) and isinstance(actual, list):
            pairs = [(f".{index}", *pair) for index, pair in enumerate(zip(value, actual, strict=False))]
        else:
            pairs = [("", value, actual)]
        for index, inner, made in pairs:
            if isinstance(inner, dict) and hasattr(made, "__dict__"):
                yield from _computed(inner, made, f"{place}.{name}{index}")
        if type(value) not in _PLAIN or type(actual) not in _PLAIN or actual == value or value == MASK:
            continue
        if _is_known(type(built)) and not is_secret("", actual):
            yield f"{short(place)}.{name}: {dump(actual).partition(chr(10))[0]}"


def _comment(title: str, lines: list[str]) -> str:
    return f"# {title}:\n" + "".join(f"#   {line}\n" for line in lines) if lines else ""
