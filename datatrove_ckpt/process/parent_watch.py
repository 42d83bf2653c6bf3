"""Parent watch: kills a pool worker whose parent process has died.

Ray kills an actor with SIGKILL. The workers of the actor's pool survive, and Ray gives the rank to another actor at
once. A surviving worker would hold the rank's lock, and its server the GPUs, for a result that nobody takes. So the
worker gets SIGKILL, too, without a drain: the next actor must find the rank free. Answers are already saved.

The other way round, it ends datatrove's manager process with this one.

``LocalPipelineExecutor`` starts a manager process. It ends in a ``finally`` block of datatrove's, so it stays for ever
if our process is killed, and it holds standard output open: ``job | tee log`` never ends. So a third process waits for
the end of ours, and then kills the manager (``manager_guard.py``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import multiprocess
from multiprocess.process import BaseProcess

_GUARD = Path(__file__).with_name("manager_guard.py")

_GUARD_SECONDS = 5.0  # for a guard to end after its manager; it needs a few milliseconds
_ENVIRONMENT = ("LD_LIBRARY_PATH",)  # a Python may need it; secrets are in others

_watched: dict[int, subprocess.Popen[bytes]] = {}


def _managers() -> list[BaseProcess]:
    return [child for child in multiprocess.active_children() if child.name.startswith("SyncManager-")]


def watch_managers() -> None:
    """Starts a guard for each manager process of this process. Does nothing in a pool worker.

    Needs pidfds, which Linux has: a process number could belong to somebody else by the time of the kill.
    """
    if is_pool_worker() or not hasattr(os, "pidfd_open"):
        return
    running = {manager.pid for manager in _managers() if manager.pid is not None}
    for pid in _watched.keys() - running:
        with suppress(subprocess.TimeoutExpired):
            _watched.pop(pid).wait(timeout=_GUARD_SECONDS)
    for pid in running - _watched.keys():
        with suppress(ProcessLookupError):
            _watched[pid] = _start(pid)


def _start(manager: int) -> subprocess.Popen[bytes]:
    handles = []
    # Inherited by the guard, which so never sees a signal to the whole process group.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for pid in (os.getpid(), manager):
            handles.append(os.pidfd_open(pid))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), *map(str, handles)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=handles,
            cwd="/",
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for handle in handles:
            os.close(handle)


def managers_gone() -> bool:
    """Whether a manager process that was there when a rank started has ended."""
    running = {manager.pid for manager in _managers()}
    return not _watched.keys() <= running


def end_managers() -> None:
    """For a process that ends now, past datatrove's ``finally``."""
    for manager in _managers():
        manager.terminate()


_PR_SET_PDEATHSIG = 1
_THREAD_NAME = "datatrove-ckpt parent watch"


def is_pool_worker() -> bool:
    return "PoolWorker" in str(multiprocess.current_process().name)


def die_with_parent() -> None:
    """Starts the parent watch in a pool worker. Does nothing in any other process."""
    parent = multiprocess.parent_process()
    if not is_pool_worker() or parent is None:
        return
    # Both ways are needed. multiprocess watches a pipe, which the other workers of a forked pool may hold open. The
    # kernel watches the process that forked this one: a fork server may outlive the parent, or end of a signal on which
    # this worker drains.
    if sys.platform == "linux" and os.getppid() == parent.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        kill_after(parent.join)


def kill_after(wait: Callable[[], object]) -> None:
    """Kills this process when the call returns, which is made in a thread."""

    def kill() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name=_THREAD_NAME, daemon=True).start()
