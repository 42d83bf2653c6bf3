"""The whole configuration of a run: what a file and its overrides say, and the defaults of all that they leave out.

It is YAML that can be run again. Comments at its top say what a file cannot: defaults that are no plain values, and
where a secret was hidden.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import jsonargparse

from datatrove_ckpt.cli.yaml_config import (
    ANYTHING,
    MASK,
    alternatives,
    checked,
    dump,
    import_name,
    is_callable,
    is_open,
    item_hint,
    leaves,
    named_hint,
    parameters_of,
    short,
)
from datatrove_ckpt.redaction import is_secret

_PLAIN = (str, bool, int, float, type(None))
_NOT_PLAIN = (TypeError, jsonargparse.ArgumentError)


class FullConfig:
    """Everything that an executor is built from.

    Args:
        content: what the file says, with overrides applied. ``build`` must have accepted it.
        defaults: with those of all that it leaves out.
    """

    def __init__(self, content: dict[str, Any], defaults: bool = True) -> None:
        self._with_defaults = defaults
        self._defaults: list[str] = []
        self._secrets: list[str] = []
        self._content = {**content, "executor": self._node(content["executor"], "executor")}

    def text(self) -> str:
        """The configuration as YAML, with secrets masked."""
        how = ", with all defaults" if self._with_defaults else ""
        head = f"# The configuration as it will be used{how}. This text can be run as it stands.\n"
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
        # Arguments that classes of datatrove or ours have are no secrets by their names, such as ``text_key``.
        known = (one for one in cls.__mro__ if one.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt"))
        harmless = {name for one in known for name in parameters_of(one)[0]}
        values: dict[str, Any] = {}
        others = parameters if self._with_defaults else ()
        for name in sorted([*others, *(name for name in given if name not in others)], key="pipeline".__eq__):
            where, says = f"{place}.{name}", "" if name in harmless else name
            if name in given:
                values[name] = self._given(parameters.get(name, ANYTHING).hint, given[name], where, says)
                continue
            hint, default = parameters[name].hint, parameters[name].default
            with suppress(*_NOT_PLAIN):
                value = _as_written(default)
                same = default if default is None or Any in alternatives(hint) else _as_written(checked(hint, value))
                if value == same and not (value and is_secret(says, value)):
                    values[name] = value
            if name not in values:
                self._defaults.append(short(where))
        return values

    def _given(self, hint: Any, value: Any, place: str, name: str) -> Any:
        """A value of the file, as ``build`` reads it."""
        kinds = alternatives(hint)
        plain = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(value, dict) and "class_path" in value:
            return self._node(value, place)
        if isinstance(value, dict) and plain and (named := named_hint(kinds, value)) is not None:
            return {key: self._given(named, one, f"{place}.{key}", "") for key, one in value.items()}
        if isinstance(value, dict) and plain:
            return self._arguments(plain[0], value, place)
        if isinstance(value, list) and (element := item_hint(kinds)) is not None:
            return [self._given(element, item, f"{place}.{index}", name) for index, item in enumerate(value)]
        is_text = isinstance(value, str) and (str in kinds or any(map(is_callable, kinds)))
        if not (is_text or Any in kinds or (isinstance(value, dict) and is_open(kinds))):
            with suppress(*_NOT_PLAIN):
                value = _as_written(checked(hint, value))  # such as 2.0 of "2"
        return self._masked(name, value, place)

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


def _as_written(value: Any) -> Any:
    """A plain value with lists for tuples. Raises TypeError if it is not plain."""
    if isinstance(value, dict):
        return {key: _as_written(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_written(part) for part in value]
    if type(value) not in _PLAIN:
        raise TypeError
    return value


def _comment(title: str, lines: list[str]) -> str:
    return f"# {title}:\n" + "".join(f"#   {line}\n" for line in lines) if lines else ""
