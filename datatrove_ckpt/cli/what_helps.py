"""The commands that help against an error, added to it as notes: each door prints its own."""

from __future__ import annotations

import shlex
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.errors.doors import ChangeSetting, StartOver, current
from datatrove_ckpt.preflight.run_plan import RunPlan


def advise(error: Exception, plan: RunPlan) -> None:
    """Adds complete commands to an error that names helpful settings."""
    if not isinstance(error, CkptError):
        return
    settings = [remedy for remedy in error.remedies if isinstance(remedy, ChangeSetting)]
    commands = [setting.command for setting in reversed(settings)]  # what helps first stands last
    for number, command in enumerate(filter(None, commands)):
        error.add_note(f"{'or' if number else 'The whole command'}: {command}")
    if any(isinstance(remedy, StartOver) for remedy in error.remedies):
        folder = _run_folder(plan)
        if folder is not None:
            move = shlex.join(["mv", str(folder), str(files.free_name(folder, "."))])
            error.add_note(f"To start over, move what is there aside while no task runs: {move}")


def _run_folder(plan: RunPlan) -> Path | None:
    """Returns the run folder of a job in the short form, if it is on this machine and has nothing
    else.
    """
    folders = [
        plan.logging_dir,
        *(runner.step.output_writer.output_folder for runner in plan.runners),
    ]
    if not current().form or not all(folder.is_local() for folder in folders):
        return None
    below = [Path(folder.resolve_paths("")).absolute() for folder in folders]
    below += [root for _, root in plan.kept]
    found = {path.parent for path in below}
    folder = found.pop()
    holds_input = any(path.is_relative_to(folder) for path in plan.inputs)
    if found or holds_input or not folder.is_dir():
        return None
    return folder
