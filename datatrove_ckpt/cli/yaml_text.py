"""Reads and writes YAML 1.2, because PyYAML's 1.1 breaks datatrove's values: ``no`` is a language,
``20:00:00`` a Slurm time limit, ``1e-5`` a number.
"""

import math
import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.common import JsonObject


def read_value(text: str) -> object:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError):
        return text


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's core schema. Duplicate keys are errors: PyYAML would silently drop the first."""

    yaml_implicit_resolvers: ClassVar[JsonObject] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, object]:
        names: list[object] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    problem=f'key "{key.value}" twice', problem_mark=key.start_mark
                )
            names.append(key.value)
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep)
        return mapping


for _tag, _first, _pattern in (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
    ),
    ("float", "-+.", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    ("merge", "<", r"<<"),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""]
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: object) -> bool:
        return True


# PyYAML writes these unescaped in keys, and reads them as spaces.
_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029]")


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None
    if _ODD_BREAKS.search(text):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif read_value(text) != text:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(value: object) -> str:
    """Returns YAML that ``read_value`` reads back unchanged."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=math.inf
    )
    return text
