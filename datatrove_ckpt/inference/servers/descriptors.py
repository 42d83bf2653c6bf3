"""File descriptors that belong to this process alone: a fork of it closes its copies.

The copy of a lifeline pipe would keep a server running that its runner stops, and the copy of a lock would keep a GPU
taken. Programs that this process starts get no copy in the first place, unless it is passed on (``pass_fds``).
"""

from __future__ import annotations

import os

_ours: set[int] = set()


def own(descriptor: int) -> int:
    """The descriptor, which forks of this process close from now on. Close it with ``close``."""
    _ours.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor that this process owns. In a fork of this process: nothing, since it is closed already."""
    if descriptor in _ours:
        _ours.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    while _ours:
        os.close(_ours.pop())


os.register_at_fork(after_in_child=_close_all)
