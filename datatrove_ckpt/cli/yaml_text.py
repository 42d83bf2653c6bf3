"""YAML as text: read and written by the rules of YAML 1.2.

Those of 1.1, which PyYAML follows, break datatrove's values: ``no`` is a language, ``20:00:00`` a Slurm time limit,
``1e-5`` a number.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Hashable
from typing import Any

import yaml  # type: ignore[import-untyped]


def read_value(text: str) -> Any:
    """A value from the command line, by the rules of the file."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return text


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's core schema. Duplicate keys are errors: YAML would silently drop the first one."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(problem=f'key "{key.value}" twice', problem_mark=key.start_mark)
            names.append(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


for _tag, _first, _pattern in (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
    ("float", "-+.0123456789", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"),
    ("float", "-+.", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    ("merge", "<", r"<<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes a text that is anything else by the rules of YAML 1.1 or 1.2."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *Loader.yaml_implicit_resolvers.get(first, ())]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: object) -> bool:
        return True


_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # PyYAML writes those unescaped in keys, and reads them as spaces


def _represent_text(dumper: _Dumper, text: str) -> Any:
    style = '"' if _ODD_BREAKS.search(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(content: Any) -> str:
    """YAML from which ``read_value`` makes the same again: dicts in their order, lists, texts, numbers, None."""
    text: str = yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=math.inf)
    return text
