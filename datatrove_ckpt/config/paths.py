"""Expands ``~`` and ``$NAME`` in paths of settings where the task runs."""

import os
import socket
from pathlib import Path

from datatrove_ckpt.common.redaction import VARIABLE, refuse_tilde
from datatrove_ckpt.errors import ConfigError

COMMAND_FILE = "command.txt"
"""The file in the ``logging_dir`` with the last command of ``run``."""


def expand_path(setting: str, path: str) -> Path:
    """Returns the path on this node: ``~``, ``$NAME`` and ``${NAME}`` as in a shell, then absolute.

    Call this where the task runs: on another node a variable may have another value.

    Raises:
        ConfigError: a variable is not set here, or there is no such home folder.
    """
    for match in VARIABLE.finditer(path):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(
                f"{path!r}: the environment variable {name} is not set on "
                f"{socket.gethostname()}. Export it, or write the path out.",
                setting=setting,
            )
    try:
        expanded = Path(os.path.expandvars(path)).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{path!r}: there is no such home folder. Write the path out.", setting=setting
        ) from None
    refuse_tilde(setting, path, expanded)
    return expanded


def existing_part(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
