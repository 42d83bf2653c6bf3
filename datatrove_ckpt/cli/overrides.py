"""Applies overrides of the command line to a YAML file, and builds the executor.

A value is read as in the file, but where the argument takes text, it is that text: ``Summarise: {text}`` is no mapping
on a command line, and ``# {text}`` no comment.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from datatrove_ckpt.cli.annotations import ANYTHING, alternatives, origin, parameters_of
from datatrove_ckpt.cli.yaml_config import build, import_name, load, show
from datatrove_ckpt.cli.yaml_text import read_value
from datatrove_ckpt.errors import ConfigError


def read_config(path: str, overrides: list[str]) -> dict[str, Any]:
    """The file's content with the overrides applied. Each override is a ``path=value``.

    Raises:
        ConfigError: see ``load``; or the path of an override does not fit the file.
    """
    content = load(path)
    for override in overrides:
        _override(content, override)
    return content


def make_executor(arguments: argparse.Namespace) -> Any:
    """Builds the executor that the file and the overrides describe. Runs nothing.

    Raises:
        ConfigError: the first mistake in it.
    """
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    return build(read_config(arguments.config, arguments.overrides))


def read_argument(text: str, kinds: list[Any]) -> Any:
    """A value of the command line, for an argument that takes these kinds."""
    value = read_value(text)
    if str not in kinds:
        in_one_line = isinstance(value, dict | list) and "\n" not in text
        return text if Any in kinds and in_one_line and not _is_bracketed(text) else value
    if isinstance(value, str):
        return value if text.startswith(("'", '"')) else text
    if isinstance(value, dict | list):
        takes_several = any(origin(kind) not in (str, int, float, bool, type(None)) for kind in kinds)
        return value if takes_several and _is_bracketed(text) else text
    return value if type(value) in kinds else text


def _is_bracketed(text: str) -> bool:
    return text.lstrip().startswith(("{", "["))


def _override(content: dict[str, Any], override: str) -> None:
    path, _, text = override.removeprefix("--").partition("=")
    keys = [key for key in path.split(".") if key != "init_args"]
    if "api_key" in keys:
        raise ConfigError(
            f"--{path}: other users can see command lines; export the key and name its variable in api_key_env."
        )
    node: Any = content
    kinds: list[Any] = []
    *outer, last = keys if keys[0] == "executor" else ["executor", *keys]
    for key in outer:
        kinds = _kinds_inside(node, kinds, key)
        node = _child(node, key, path, {})
    _child(node, last, path, read_argument(text, _kinds_inside(node, kinds, last)), replace=True)


def _child(node: Any, key: str, path: str, value: Any, replace: bool = False) -> Any:
    """The value at a key. ``value`` is stored there if the key is missing or None, or if ``replace``."""
    if isinstance(node, dict) and "class_path" in node:
        node["init_args"] = node.get("init_args") or {}
        node = node["init_args"]
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise ConfigError(f'--{path}: "{key}" is not the index of one of {len(node)} items (they count from 0).')
        index: Any = int(key)
    elif isinstance(node, dict):
        index = key
    else:
        raise ConfigError(f'--{path}: there is no "{key}" inside {show(node)}.')
    if replace or (isinstance(node, dict) and node.get(key) is None):
        node[index] = value
    return node[index]


def _kinds_inside(node: Any, kinds: list[Any], key: str) -> list[Any]:
    """What the value at a key of the node may be, if the node is one of ``kinds``."""
    if isinstance(node, list):
        inner = [typing.get_args(kind)[0] for kind in kinds if origin(kind) is list and typing.get_args(kind)]
    elif isinstance(node, dict) and "class_path" in node:
        try:
            inner = [_hint(import_name(node["class_path"], "class_path"), key)]
        except ConfigError:  # reported with its place when the executor is built
            inner = []
    else:
        inner = [_hint(kind, key) for kind in kinds if dataclasses.is_dataclass(kind)]
    return alternatives(inner[0]) if len(inner) == 1 else [Any]


def _hint(cls: Any, key: str) -> Any:
    return parameters_of(cls)[0].get(key, ANYTHING).hint
