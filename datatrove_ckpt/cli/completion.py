"""``datatrove-ckpt completion``: a script that lets a shell complete commands, options and files. shtab writes it.

The script is static: pressing Tab starts no Python.
"""

from __future__ import annotations

import argparse

from datatrove_ckpt.cli.parsers import make_parser
from datatrove_ckpt.errors import ConfigError


def completion(arguments: argparse.Namespace) -> int:
    """Prints the script. Returns the exit code.

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion: needs shtab: pip install 'datatrove-ckpt[completion]'.") from None
    parser = make_parser()
    _complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, arguments.shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser, files: object, folders: object) -> None:
    """Marks the arguments that are paths, by the word that stands for them in the help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files, folders)
        elif action.metavar in ("FOLDER", "DIR", "CHECKPOINTS"):
            action.complete = folders  # type: ignore[attr-defined]  # shtab looks for it
        elif action.metavar in ("CONFIG", "WHAT", "FILE"):
            action.complete = files  # type: ignore[attr-defined]
