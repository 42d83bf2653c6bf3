"""Opens the run that WHAT names on the command line."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager

from datatrove_ckpt.run_folder import run_location


def open_run(
    arguments: argparse.Namespace,
    wants_file: Callable[[str, int], bool] = lambda name, size: True,
    output: str | None = None,
) -> AbstractContextManager[run_location.RunLocation]:
    """Opens the run that ``arguments.what`` names, with its overrides. See ``open_location``."""
    config = None
    if run_location.is_config(arguments.what):
        from datatrove_ckpt.cli.short_form import read_config  # slow to import

        config = read_config(arguments.what, arguments.overrides, inspect_only=True)
    return run_location.open_location(
        arguments.what, config, wants_file, arguments.overrides, output
    )
