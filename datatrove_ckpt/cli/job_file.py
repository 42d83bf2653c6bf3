"""The file of a job as it is named on the command line: YAML, or a Python script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard


def is_script(path: str | None) -> TypeGuard[str]:
    """Whether the file is a Python script."""
    return path is not None and path.endswith(".py") and not Path(path).is_dir()


def script_arguments(words: Sequence[str]) -> list[str]:
    """The script's own among the words that stand behind it."""
    return [*words[words.index("--") + 1 :]] if "--" in words else []


def start_command(given: Sequence[str]) -> str:
    """The command that runs a job, named by its file, if there is one, and what stands behind it."""
    if given and is_script(given[0]):
        return shlex.join(["python", given[0], *script_arguments(given)])
    return shlex.join(["datatrove-ckpt", "run", *given])
