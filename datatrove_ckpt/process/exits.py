"""Turns attempts of foreign code to end the process (``sys.exit(0)`` in a rollout, a reader or
``shared_context``) into errors.

``SystemExit`` is no ``Exception``, so datatrove would see no failure: documents would be missing
after exit code 0, or its pool would wait without end.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from datatrove_ckpt.common.formatting import safe_repr
from datatrove_ckpt.errors import UnexpectedExit
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.shutdown import Shutdown

_EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


def exit_error(caller: str, error: BaseException) -> UnexpectedExit:
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else safe_repr(error.code)})"
    else:
        did = f"raised {type(error).__name__}"
    return UnexpectedExit(
        f"{caller} {did}, which would end the process with documents missing. Raise an Exception "
        "instead."
    )


@contextmanager
def no_exit(caller: str, shutdown: Shutdown) -> Iterator[None]:
    """Turns an exit of foreign code into an error, and ends a fork that leaves the block.

    Raises:
        UnexpectedExit: the code tried to end the process, and no signal requested it.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        end_fork(pid, error)
        if not isinstance(error, _EXITS) or shutdown.raised(error):
            raise
        raise exit_error(caller, error) from error
    end_fork(pid)
