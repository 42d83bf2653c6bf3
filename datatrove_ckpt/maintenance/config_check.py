"""Whether a YAML file is that of a checkpoint: the settings that can be compared without running the user's code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from datatrove_ckpt.checkpoint.fields import fields_without_secrets
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.setting_values import same_value
from datatrove_ckpt.maintenance.where import Place, runner_arguments

_MAX_SHOWN = 60


def config_differences(place: Place, kept: Sequence[Json]) -> list[str]:
    """What the file says otherwise than every rank, each as "tasks: 1 -> 5". Empty without a file.

    Ranks differ where the user has accepted a change. Secrets are compared and shown as ``run.json`` has them: hashed.

    Args:
        kept: the content of each ``run.json`` that can be read.
    """
    if not place.config:
        return []
    wanted = fields_without_secrets(dict(_comparable_settings(place)))
    found = {name: [fields[name] for fields in kept if name in fields] for name in wanted}
    return [
        f"{name}: {_shown(found[name][0])} -> {_shown(value)}"
        for name, value in wanted.items()
        if found[name] and not any(same_value(name, one, value) for one in found[name])
    ]


def _comparable_settings(place: Place) -> Iterator[tuple[str, Any]]:
    yield "tasks", place.tasks
    runner = runner_arguments(place.config)
    config, writer, rollout = (_arguments(runner.get(name)) for name in ("config", "output_writer", "rollout_fn"))
    if isinstance(folder := writer.get("output_folder"), str) and "$" not in folder:
        yield "output_folder", folder.rstrip("/") if "://" in folder else os.path.abspath(os.path.expanduser(folder))  # noqa: PTH100, PTH111 (as datatrove)
    if "model_name_or_path" in config:
        yield "model", config["model_name_or_path"]
    for name in ("records_per_chunk", "metadata_key", "rollouts_per_document"):
        if name in runner:
            yield name, runner[name]
    for name, value in rollout.items():
        yield f"rollout_fn.{name}", value


def _arguments(node: Any) -> dict[str, Any]:
    """The arguments of a mapping, with or without ``class_path``."""
    if not isinstance(node, dict):
        return {}
    arguments = node.get("init_args") if "class_path" in node else node
    return arguments if isinstance(arguments, dict) else {}


def _shown(value: Any) -> str:
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
