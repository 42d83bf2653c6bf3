"""Makes multiprocess's fork server ignore SIGTERM. Only the fork server may import this module.

If a SIGTERM to the whole process group ended the fork server, the pool would believe its workers dead, and would start
others while these still drain. Each worker that the server forks reacts to SIGTERM again from its first instruction.
"""

from __future__ import annotations

import os
import signal

_SIGTERM = {signal.SIGTERM}
_server = os.getpid()


def _before() -> None:
    if os.getpid() == _server:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # what comes between the fork and the line below is kept


def _in_parent() -> None:
    if os.getpid() == _server:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)


def _in_child() -> None:
    global _server
    if _server:  # not in what the worker forks
        _server = 0
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)


signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
