"""What ``executor.json`` tells of datatrove's run: its tasks, model and parameters. Compared with the run that goes on.

The file lies in the ``logging_dir``. A run of ours that has the same folder writes its own there, which tells nothing
of datatrove's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from datatrove.io import get_datafolder

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.generation.run_identity import answering_flags
from datatrove_ckpt.preflight.migration.findings import Shape
from datatrove_ckpt.redaction import shown
from datatrove_ckpt.retrying import file_system_call
from datatrove_ckpt.runner import InferenceRunner

_OURS = "sync_seconds"
"""An attribute that our runner has, and datatrove's has not."""


@dataclass
class Known:
    """What there is to know of datatrove's run, beside the run that goes on.

    Attributes:
        tasks: its number; None: not known.
        runner: the attributes of its runner; empty: not known.
        why: why ``runner`` is not known.
        other: settings of its requests that differ: name, theirs, ours; without secrets.
    """

    tasks: int | None = None
    runner: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    other: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def why_not_same(self) -> str:
        """Why its requests are not known to have had the settings of ours; "" if they had."""
        return self.why or (f"datatrove's run had another {', '.join(self.other)}" if self.other else "")


def read_known(executor: Any, logging_dir: str | None, step: InferenceRunner) -> Known:
    """Reads ``executor.json``.

    Args:
        executor: that of the run that goes on.
        logging_dir: of datatrove's run; None: the executor's.
        step: the runner that goes on.
    """
    content = _executor_json(executor, logging_dir)
    steps = [one for one in content.get("pipeline") or () if isinstance(one, dict)]
    if any(_OURS in one for one in steps):
        return Known(
            why="executor.json in the logging_dir is of a run of this program, so it tells nothing of datatrove's "
            "(name that of datatrove's run with --logging-dir)"
        )
    tasks = content.get("world_size")
    known = Known(tasks if isinstance(tasks, int) else None)
    runners = [one for one in steps if isinstance(one.get("config"), dict)]
    if len(runners) != 1:
        known.why = (
            "no executor.json of datatrove's run says which model and parameters it had (name its logging_dir with "
            "--logging-dir)"
        )
        return known
    try:
        theirs, ours = _settings_of(runners[0]["config"]), _settings_of(step.config)
    except (KeyError, TypeError, ValueError, AttributeError):
        known.why = "executor.json of datatrove's run has no config of its runner"
        return known
    known.runner = runners[0]
    known.other = {
        name: (shown(name, theirs[name]), shown(name, value)) for name, value in ours.items() if theirs[name] != value
    }
    return known


def _executor_json(executor: Any, logging_dir: str | None) -> dict[str, Any]:
    """What datatrove's executor wrote about itself when it started last; empty if there is nothing."""
    folder = executor.logging_dir if logging_dir is None else get_datafolder(logging_dir)
    try:
        with file_system_call(), folder.open("executor.json", "rb") as file:
            content = orjson.loads(file.read())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _settings_of(config: InferenceConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a request gets besides what its rollout gives, of our config, or of datatrove's as JSON.

    Raises:
        KeyError, TypeError, ValueError: it is no config.
    """
    fields = vars(config) if isinstance(config, InferenceConfig) else config
    settings = {
        "model_name_or_path": fields["model_name_or_path"],
        "canned_answers": fields["server_type"] == "dummy",
        "use_chat": fields["use_chat"],
        "default_generation_params": fields["default_generation_params"],
        "model_kwargs": answering_flags(fields["model_kwargs"]),
    }
    plain: dict[str, Any] = orjson.loads(orjson.dumps(settings, option=orjson.OPT_NON_STR_KEYS, default=str))
    return plain


def check_known(known: Known, step: InferenceRunner, tasks: int) -> None:
    """Compares what decides which documents are in which file, and what is in them.

    Raises:
        CheckpointMismatch: datatrove's run had another value.
    """
    if known.tasks not in (None, tasks):
        raise CheckpointMismatch(
            f"tasks: {tasks}, but datatrove's run had {known.tasks}, as executor.json in its logging_dir says. Set "
            "tasks to that: each rank must get the documents that it had."
        )
    if not known.runner:
        return
    ours = {"metadata_key": step.metadata_key, "rollouts_per_document": step.config.rollouts_per_document}
    theirs = known.runner | known.runner["config"]
    for name, value in ours.items():
        if name in theirs and theirs[name] != value:
            raise CheckpointMismatch(
                f"{name}: {value!r}, but datatrove's run had {theirs[name]!r}, as executor.json in its logging_dir "
                f"says. Set {name} to that, or its documents and those of this run would differ in the same output. "
                "Nothing was changed."
            )


def check_shape(known: Known, shape: Shape, step: InferenceRunner) -> str:
    """Compares the rows that are kept with the settings, where ``executor.json`` is not known.

    Returns:
        What is to be said about them; "" if all is as it should be.

    Raises:
        CheckpointMismatch: datatrove's run had other settings.
    """
    if known.runner or not shape.rows:
        return ""
    if not shape.with_key:
        raise CheckpointMismatch(
            f"metadata_key: {step.metadata_key!r}, but none of the {shape.rows} documents that datatrove's run has "
            "kept has it in its metadata. Set metadata_key to that of datatrove's run. Nothing was changed."
        )
    rollouts = step.config.rollouts_per_document
    if shape.most_results > rollouts:
        raise CheckpointMismatch(
            f"rollouts_per_document: {rollouts}, but datatrove's run has kept a document with {shape.most_results} "
            "results. Set rollouts_per_document to that of datatrove's run. Nothing was changed."
        )
    if lacking := shape.rows - shape.with_key:
        return f"{lacking} of {shape.rows} kept documents have no {step.metadata_key!r} in their metadata"
    return ""
