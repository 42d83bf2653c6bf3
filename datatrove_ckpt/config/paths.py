"""Paths in settings: ``~`` and ``$NAME`` are expanded where the task runs, or refused where nothing expands them."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from datatrove_ckpt.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand_path(setting: str, path: str) -> Path:
    """The path on this node: ``~``, ``$NAME`` and ``${NAME}`` as in a shell, then absolute.

    To be called where the task runs: on another node a variable may have another value.

    Raises:
        ConfigError: a variable is not set here, or there is no such home folder.
    """
    for match in _VARIABLE.finditer(path):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(
                f"{setting}: {path!r}: the environment variable {name} is not set here ({socket.gethostname()}). "
                "Export it where the tasks run, or write the path out."
            )
    try:
        found = Path(os.path.expandvars(path)).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{setting}: {path!r}: there is no such home folder. Write the path out.") from None
    _refuse_tilde(setting, path, found)
    return found


def refuse_variables(setting: str, path: str) -> None:
    """For a folder that datatrove opens: it expands a ``~`` at the beginning, and takes the rest as it is.

    Raises:
        ConfigError: there is a variable in the path, or another ``~``.
    """
    if match := _VARIABLE.search(path):
        raise ConfigError(
            f"{setting}: {path!r} contains {match[0]}, which nothing expands here: there would be a folder of that "
            "name. Write the path out. (checkpoints_local_dir may contain variables.)"
        )
    if not path.startswith("~"):
        _refuse_tilde(setting, path, Path(path))


def _refuse_tilde(setting: str, path: str, found: Path) -> None:
    if "~" in found.parts:
        raise ConfigError(f"{setting}: {path!r}: only a ~ at the beginning of a path means a home folder.")


def existing_part(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
