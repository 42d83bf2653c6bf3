"""The standard streams of a command whose terminal, reader or file is gone.

Imports nothing that takes time.
"""

import os
import sys
from contextlib import suppress
from typing import TextIO


def open_streams() -> None:
    """Opens closed standard streams (``2>&-``) to nowhere.

    Else a file of a checkpoint would get the number of the stream, and what other code prints.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "r+"))


def drop_rest(stream: TextIO) -> None:
    """Drops what is not written. Python would try to write it once more at its end, and fail."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # a script has closed it
            try:
                stream.flush()
            except OSError:
                drop_rest(stream)
