"""The commands that help against an error, added to it as notes."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.formatting import without_flag
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.errors.setting_names import form
from datatrove_ckpt.run_folder.run_plan import RunPlan


def advise(error: Exception, plan: RunPlan, argv: Sequence[str] = ()) -> None:
    """Adds complete commands to an error that names what helps.

    Args:
        argv: the command line; empty if the job was started in Python.
    """
    if not isinstance(error, CkptError):
        return
    if argv:
        for number, changes in enumerate(error.changes):
            runner = f"pipeline.{plan.runners[0].index}"
            paths = {
                "tasks": "executor.tasks",
                "max_tokens": f"{runner}.config.default_generation_params.max_tokens",
            }
            # Only a run of all tasks can make all changes.
            changed = [word for word in argv if word != "--worker"]
            for name, value in changes.items():
                text = str(value)
                if isinstance(value, bool):
                    text = text.lower()
                flag = f"--{name.replace('_', '-')}"
                added = [flag, text]
                if not form():
                    flag = f"--{paths.get(name, f'{runner}.{name}')}"
                    added = [f"{flag}={text}"]
                changed = [*without_flag(changed, flag), *added]
            command = shlex.join(changed)
            error.add_note(f"{'or' if number else 'The whole command'}: {command}")
    if error.starts_over and form() and plan.logging_dir.is_local():
        folder = Path(plan.logging_dir.resolve_paths("")).absolute().parent  # the run folder
        inputs = [step.data_folder for step in plan.pipeline if hasattr(step, "data_folder")]
        holds_input = any(Path(data.path).absolute().is_relative_to(folder) for data in inputs)
        if folder.is_dir() and not holds_input:
            move = shlex.join(["mv", str(folder), str(files.free_name(folder, "."))])
            error.add_note(f"To start over, move what is there aside while no task runs: {move}")
