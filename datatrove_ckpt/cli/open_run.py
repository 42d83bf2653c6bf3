"""Opens the run that WHAT names on the command line."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from datatrove_ckpt.cli.printing import note
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder import run_location
from datatrove_ckpt.run_folder.steps import StepFolder, outdated, step_folders


def steps_of(arguments: argparse.Namespace) -> dict[str, StepFolder]:
    """Returns the steps of WHAT by name; none if it is a single run."""
    root = Path(arguments.what)
    job = {}
    if run_location.is_config(arguments.what):
        from datatrove_ckpt.cli.short_form import read_job

        job = read_job(arguments.what, arguments.overrides)
        root = Path(str(job.get("run_folder"))).expanduser()
    steps = step_folders(root)
    if "steps" in job and not steps:
        raise run_location.RunNotStarted(f"{arguments.what}: no step has started yet.")
    return steps


def note_stale(steps: Mapping[str, StepFolder], name: str) -> None:
    stale = outdated(steps)
    if name in stale:
        note(f"{steps[name].folder} is stale: the rows of step {stale[name]} have changed.")


def open_run(
    arguments: argparse.Namespace,
    wants_file: Callable[[str, int], bool] = lambda name, size: True,
    output: str | None = None,
) -> AbstractContextManager[run_location.RunLocation]:
    """Opens the run; of steps, the one that ``--step`` names, or the last."""
    config = None
    what = arguments.what
    steps = steps_of(arguments)
    name = getattr(arguments, "step", "")
    if steps and name is None:
        name = [*steps][-1]
    if name in steps:
        step = steps[name]
        what = str(step.folder)
        if not (step.has_begun or step.rows):
            raise run_location.RunNotStarted(f"{what}: this step has not begun. Another: --step.")
        note_stale(steps, name)
    elif steps or name:
        folders = ", ".join(str(step.folder) for step in steps.values())
        raise ConfigError(f"{what}: give the folder of a step: {folders or 'it has none'}.")
    elif run_location.is_config(what):
        from datatrove_ckpt.cli.short_form import read_config

        config = read_config(what, arguments.overrides, inspect_only=True)
    return run_location.open_location(what, config, wants_file, arguments.overrides, output)
