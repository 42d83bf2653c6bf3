"""Shortens the package's own waits: ``pytest --waits 0.1``.

A machine ten times as fast changes what a test does while the package waits, and no verdict may
depend on that. Patience (``asyncio.timeout``, deadlines) stays as long as it is.
"""

import asyncio
import os
import sys
import threading
import time

VARIABLE = "TESTS_WAITS"


def shorten():
    """Multiplies each wait that a module of the package begins; call it before they are imported.

    The factor is in the environment, where the processes of a test find it, too.
    """
    factor = float(os.environ.get(VARIABLE, "1"))
    if factor == 1:
        return

    def shortened(wait):
        def wrapper(*arguments, **named):
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.startswith("datatrove_ckpt."):
                arguments = [each * factor if _is_number(each) else each for each in arguments]
                named = {
                    name: each * factor if _is_number(each) else each
                    for name, each in named.items()
                }
            return wait(*arguments, **named)

        return wrapper

    time.sleep = shortened(time.sleep)
    asyncio.sleep = shortened(asyncio.sleep)
    asyncio.BaseEventLoop.call_later = shortened(asyncio.BaseEventLoop.call_later)
    threading.Event.wait = shortened(threading.Event.wait)
    threading.Condition.wait = shortened(threading.Condition.wait)
    threading.Condition.wait_for = shortened(threading.Condition.wait_for)
    from datatrove_ckpt.process import shutdown

    shutdown.get_within = shortened(shutdown.get_within)


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)
