"""Standard output: what it takes, and that nobody may read it to its end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def takes_unicode() -> bool:
    """Whether the output takes more than ASCII."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def write_out(text: str) -> bool:
    """Prints the text. Returns False if nobody reads on (``status | head``): the rest is dropped without a word."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would fail again when Python ends.
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return False
    return True
