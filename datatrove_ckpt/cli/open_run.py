"""Opens the run that WHAT names on the command line."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder import run_location
from datatrove_ckpt.run_folder.steps import step_folders


def open_run(
    arguments: argparse.Namespace,
    wants_file: Callable[[str, int], bool] = lambda name, size: True,
    output: str | None = None,
) -> AbstractContextManager[run_location.RunLocation]:
    config = None
    steps = step_folders(Path(arguments.what))
    if steps:
        raise ConfigError(
            f"{arguments.what}: has steps: name the folder of one: {', '.join(steps)}."
        )
    if run_location.is_config(arguments.what):
        from datatrove_ckpt.cli.short_form import read_config

        config = read_config(arguments.what, arguments.overrides, inspect_only=True)
    return run_location.open_location(
        arguments.what, config, wants_file, arguments.overrides, output
    )
