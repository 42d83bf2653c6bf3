"""Applies overrides of the command line to a YAML file, builds the executor, and describes it in a line per step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from datatrove_ckpt.cli.yaml_config import build, load, read_value, show
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


def _override(content: dict[str, Any], override: str) -> None:
    path, _, text = override.removeprefix("--").partition("=")
    keys = [key for key in path.split(".") if key != "init_args"]
    if "api_key" in keys:
        raise ConfigError(
            f"--{path}: other users can see command lines; export the key and name its variable in api_key_env."
        )
    node: Any = content
    for key in keys[:-1] if keys[0] == "executor" else ["executor", *keys[:-1]]:
        node = _child(node, key, path, {})
    _child(node, keys[-1], path, read_value(text), replace=True)


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


def describe(content: dict[str, Any]) -> list[str]:
    """One line for the executor and one per step: the class and its arguments as written in the file."""
    executor = content["executor"]
    steps = executor["init_args"].get("pipeline", [])
    return [_brief("executor", executor), *(_brief(f"pipeline[{index}]", step) for index, step in enumerate(steps))]


def _brief(place: str, node: Any) -> str:
    if not isinstance(node, dict):
        return f"{place} {node}"
    arguments = (node.get("init_args") or {}).items()
    return f"{place} {node['class_path']} " + ", ".join(f"{k}={_short(k, v)}" for k, v in arguments if k != "pipeline")


def _short(key: str, value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        return str(value["class_path"])
    return "{...}" if isinstance(value, dict) else show(value)
