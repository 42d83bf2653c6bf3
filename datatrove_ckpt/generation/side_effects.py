"""Sees what a rollout does outside its process: connections, programs, changed files, signals.

The replay check runs the rollouts of a few documents that are done again (``replay.py``). What they
do besides ``generate`` and ``generate.once`` would happen again, so a rollout that was seen to do
something is not replayed. An audit hook sees the beginning of it:

    where                                             what counts
    a rollout, its tasks and ``asyncio.to_thread``    everything
    a replay                                          everything; it is refused, and does not happen
    an import, ``shared_context``                     what is still open when rollouts start: a
                                                      pooled connection makes no further event
    a thread without a context, while rollouts run    everything: ``run_in_executor`` passes no
                                                      context on
    our code, ``generate.once``, readers, the hub,    nothing
    log files, what ``sys.stdout`` is redirected to

C extensions hide what they do (libpq, gRPC, Arrow's writers); uvloop would, too.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from datatrove_ckpt.user_code.description import is_of_user

_EVENTS = frozenset(
    """
    open os.exec os.fork os.forkpty os.kill os.link os.mkdir os.posix_spawn os.remove os.rename
    os.rmdir os.symlink os.system os.truncate socket.connect socket.sendmsg socket.sendto
    sqlite3.connect subprocess.Popen
    """.split()  # noqa: SIM905
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_VERBS = {
    "open": "write",
    "socket.connect": "open a connection to",
    "sqlite3.connect": "write",
    "subprocess.Popen": "start",
}
_HARMLESS = re.compile(r"__pycache__|/\.[^/]*cache|^/dev/null$|^:memory:$")  # caches of libraries
_LOOP = "datatrove_ckpt.process.event_loop"  # raises events for others
_CALLERS = ("datatrove_ckpt.generation.document_runs", "datatrove_ckpt.generation.user_rollout")
_OURS = frozenset(
    """
    datatrove datatrove_ckpt datasets fsspec gcsfs huggingface_hub logging loguru s3fs
    """.split()  # noqa: SIM905
)


class RefusedInReplay(Exception):
    """A replay tried to do something outside its process."""


class EffectWatch:
    """Code whose effects count.

    Attributes:
        effect: the first effect, such as "write /tmp/a"; "" if there was none.
    """

    effect = ""

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        self.effect = self.effect or _described(event, arguments)


class ReplayWatch(EffectWatch):
    """Watches a replay: nothing that it tries happens. What it leaves behind, such as a task that
    later documents share, acts as rollouts do.
    """

    has_ended = False

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.has_ended:
            ROLLOUTS.see(event, arguments)
            return
        super().see(event, arguments)
        raise RefusedInReplay(f"the replay check does not let a rollout {self.effect}")


class SetupEffects(EffectWatch):
    """Sees what an import or ``shared_context`` opens: it may be open when rollouts start."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # of sockets and files, as /proc names them
        self._programs = WeakSet[subprocess.Popen[Any]]()

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        first = arguments[0] if arguments else None
        program = sys._getframe(2).f_locals.get("self")
        with suppress(OSError):  # a closed socket, a working folder that is gone
            if isinstance(first, socket.socket):
                self._names.add(f"socket:[{os.fstat(first.fileno()).st_ino}]")
            elif isinstance(program, subprocess.Popen):
                self._programs.add(program)
            elif isinstance(first, str | bytes | os.PathLike):
                self._names.add(os.path.realpath(os.fsdecode(first)))

    def lasting(self) -> str:
        if any(program.returncode is None for program in self._programs):
            return "keep a program open"
        with suppress(OSError):
            for descriptor in Path("/proc/self/fd").iterdir():
                with suppress(OSError):
                    name = str(descriptor.readlink())
                    is_written = descriptor.lstat().st_mode & stat.S_IWUSR
                    if is_written and name in self._names and int(descriptor.name) > 2:
                        shown = "a connection" if name.startswith("socket:") else name
                        return f"keep {shown} open"
        return ""


ROLLOUTS = EffectWatch()
"""All rollouts of this process."""
SETUP = SetupEffects()
OURS = EffectWatch()
current = ContextVar[EffectWatch | None]("watch", default=None)
agents: set[object] = set()
"""Addresses of ``generate.url``."""
_running: list[object] = []


@contextmanager
def watched(watch: EffectWatch) -> Iterator[None]:
    token = current.set(watch)
    try:
        yield
    finally:
        current.reset(token)


@contextmanager
def rollouts_run() -> Iterator[None]:
    _running.append(None)
    ROLLOUTS.effect = ROLLOUTS.effect or SETUP.lasting()
    try:
        yield
    finally:
        _running.pop()


def _see(
    event: str,
    arguments: tuple[object, ...],
    # At the end of the process, a module has no globals.
    events: Collection[str] = _EVENTS,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:
    if event not in events or is_finalizing():
        return
    watch = current.get()
    if watch is OURS or not _changes(event, arguments) or _is_ours(sys._getframe(1)):
        return
    if watch is None:
        watch = ROLLOUTS if _running else SETUP
    watch.see(event, arguments)


def _changes(event: str, arguments: tuple[object, ...]) -> bool:
    first = arguments[0] if arguments else ""
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return False
    if event == "socket.connect":
        address = arguments[1]
        return not (isinstance(address, tuple) and address[:2] in agents)
    return _HARMLESS.search(str(first)) is None


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != _LOOP and name.partition(".")[0] in _OURS:
            return name not in _CALLERS
        if is_of_user(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False


def _described(event: str, arguments: tuple[object, ...]) -> str:
    shown = arguments[1:2] if event.startswith("socket.") else arguments[:1]
    return " ".join([_VERBS.get(event, f"call {event}"), *map(str, shown)])


sys.addaudithook(_see)
