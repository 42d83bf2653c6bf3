"""``datatrove-ckpt``: parses the command line and calls the command's handler.

Exit codes: 0 done; 1 stopped by an error, the same command continues from there; 2 a mistake in the file or on the
command line, nothing was started; 128 + n ended by signal n, so 130 for Ctrl-C; the same command continues from there.
``verify`` also has 3: no problem, but not finished.

An error of this package is its message: no traceback of it reaches the terminal. The task's log file keeps one.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from datatrove_ckpt.cli.parsers import make_parser, split_overrides, takes_overrides
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.formatting import printable
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.redaction import redact


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    rest, overrides = split_overrides(given)
    parser = make_parser()
    arguments = parser.parse_args(rest)
    from datatrove_ckpt.process.task_errors import safe_log  # not for --help: loguru takes longer than all else

    safe_log()
    arguments.command = shlex.join(["datatrove-ckpt", *given])
    if overrides:
        if not takes_overrides(arguments):
            parser.error(f"unrecognized arguments: --{overrides[0].removeprefix('--')}")
        arguments.overrides = overrides
    try:
        return _handler(arguments.handler)(arguments)
    except ConfigError as error:
        return fail(error, 2)
    except (CkptError, OSError) as error:
        return fail(error, 1)


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """The function for "module:function"; the module is imported now."""
    module, _, function = name.partition(":")
    with gc_paused():
        handler: Callable[[argparse.Namespace], int] = getattr(import_module(f"datatrove_ckpt.cli.{module}"), function)
    return handler


def fail(error: BaseException, code: int) -> int:
    """Prints an error as one message, with notes of one line, and returns the exit code. No traceback."""
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    print(printable(redact("\n".join([f"error: {error}", *notes]))), file=sys.stderr)
    return code
