"""``datatrove-ckpt completion``: prints the script that shtab writes. It is static: pressing Tab starts no Python."""

from __future__ import annotations

import argparse

from datatrove_ckpt.cli.main import make_parser
from datatrove_ckpt.errors import ConfigError


def completion(arguments: argparse.Namespace) -> int:
    """Prints the script. Returns the exit code."""
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion: needs shtab: pip install 'datatrove-ckpt[completion]'.") from None
    parser = make_parser()
    kinds = {"FOLDER": shtab.DIRECTORY, "DIR": shtab.DIRECTORY}
    kinds |= dict.fromkeys(("CONFIG", "WHAT", "FILE"), shtab.FILE)
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in (action for command in commands.choices.values() for action in command._actions):
        if action.metavar in kinds:
            action.complete = kinds[action.metavar]  # shtab looks for it
    print(shtab.complete(parser, arguments.shell))
    return 0
