"""WHAT on the command line: the place that a command looks at."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from datatrove_ckpt.maintenance.where import Place, is_config, is_script, open_place


def place_of(
    arguments: argparse.Namespace, wanted: Callable[[str, int], bool] = lambda name, size: True, trusted: bool = False
) -> AbstractContextManager[Place]:
    """The place that ``arguments.what`` names, with what stands behind it if it is a file. See ``open_place``."""
    if not is_config(arguments.what):
        return open_place(arguments.what, wanted=wanted, trusted=trusted)
    from datatrove_ckpt.cli.short_form import read_config  # slow to import

    config = read_config(arguments.what, arguments.overrides, only_look=True)
    return open_place(arguments.what, config, wanted, trusted, arguments.overrides)


def script_arguments(words: Sequence[str]) -> list[str]:
    """The script's own among the words that stand behind it."""
    return [*words[words.index("--") + 1 :]] if "--" in words else []


def start_command(given: Sequence[str]) -> str:
    """The command that runs a job, named by its file, if there is one, and what stands behind it."""
    if given and is_script(given[0]):
        return shlex.join(["python", given[0], *script_arguments(given)])
    return shlex.join(["datatrove-ckpt", "run", *given])
