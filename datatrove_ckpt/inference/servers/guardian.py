"""The process between a runner and its server: it makes sure that no server outlives its runner.

The runner starts it by file path, ``python -I -S guardian.py --stop-timeout 10 -- COMMAND ...``, and holds the other
end of its standard input. When that closes, because the runner asks or because the runner is gone (kill -9 included),
the server's process group gets SIGTERM, and after the timeout every descendant gets SIGKILL. A byte written there
asks for SIGKILL at once. A server that ends by itself takes its descendants along. The exit code is the server's
(128 + n for signal n).

An ordinary parent cannot do this: PR_SET_PDEATHSIG does not reach grandchildren (vLLM has three generations), and a
process that called setsid() is in no group of ours. So the guardian is a child subreaper: whoever loses its parent
becomes the guardian's child, and /proc shows the whole tree. Where there is neither prctl nor /proc (macOS) only the
server's process group is killed.

Standard library only, one thread, and nothing of this package: it is up in about 20 ms and holds 10 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
AT_ONCE = b"k"
# Seconds between two looks at who our parent is. Only matters when a fork of the runner keeps our stdin open.
_PARENT_CHECK = 1.0
# Seconds a server gets whose runner is dead: nobody waits for its answers, and the next runner needs its GPUs.
_ORPHAN_TIMEOUT = 4.0
# Seconds SIGKILL may take. A process stuck inside a driver cannot be killed, and waiting for it would never end.
_KILL_TIMEOUT = 10.0


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    zombie: bool


def process_table() -> list[Process]:
    """Every process that /proc shows; empty where there is no /proc."""
    table = []
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_bytes()
        except OSError:
            continue  # ended meanwhile
        # The name in parentheses may itself hold spaces and parentheses: count from the last one.
        state, parent, _group, session = stat[stat.rindex(b")") + 2 :].split()[:4]
        table.append(Process(int(folder.name), int(parent), int(session), state in b"ZX"))
    return table


def descendants(ancestor: int) -> list[Process]:
    """Children, grandchildren and so on of the process ``ancestor``, living or zombie."""
    children: dict[int, list[Process]] = {}
    for process in process_table():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def kill_session(session: int) -> None:
    """SIGKILL for what a killed guardian left behind: all processes of the session it led.

    The kernel gives a session's number to nobody else as long as one process is in it, so nobody else is hit.
    """
    for process in process_table():
        if process.session == session and process.pid != os.getpid():
            _kill(process.pid, signal.SIGKILL)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile, or not ours to kill
        os.kill(pid, number)


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guardian:
    """Runs one command until it ends or until the runner lets go.

    Args:
        argv: the server's command line.
        stop_timeout: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, argv: list[str], stop_timeout: float) -> None:
        self.argv = argv
        self.stop_timeout = stop_timeout
        self.engine = 0
        self.engine_status: int | None = None
        self._runner = os.getppid()
        self._wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)

    def run(self) -> int:
        """Start, wait, clean up; the exit code."""
        self._catch_signals()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._launch()
        while self.engine_status is None and not self._runner_let_go(_PARENT_CHECK):
            self._reap()
        if self.engine_status is None:
            self._ask_to_stop()
        self._kill_the_rest()
        return _exit_code(self.engine_status)

    def _catch_signals(self) -> None:
        # Clusters signal every process of a job when they want it to end. The runner then drains, and needs its
        # server for that; so only the closed pipe ends us. Handlers and not SIG_IGN: a server would inherit that.
        for number in _CAUGHT:
            signal.signal(number, lambda *_: None)

    def _launch(self) -> None:
        guardian = os.getpid()
        # Between fork and exec our handlers would swallow the SIGTERM that is meant for the server.
        signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        self.engine = os.fork()
        if self.engine == 0:
            self._become_engine(guardian)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
        _set_group(self.engine)  # both sides do it: whoever comes first, it is done before the first kill

    def _become_engine(self, guardian: int) -> NoReturn:
        try:
            _set_group(0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (signal.SIGPIPE, *_CAUGHT):  # Python ignores SIGPIPE, and ignoring is inherited
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # "the job ends soon" is for the runner; the default is death
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
            os.execvp(self.argv[0], self.argv)
        except OSError as error:
            print(f"cannot run {self.argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)

    def _runner_let_go(self, timeout: float) -> bool:
        """Wait until a signal or the end of stdin, at most ``timeout`` seconds; whether the runner let go."""
        ready = select.select([0, self._wakeup_read], [], [], timeout)[0]
        self._drain_wakeups()
        if 0 in ready:
            if os.read(0, 512):
                self.stop_timeout = 0.0
            return True
        return os.getppid() != self._runner

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wakeup_read, 512):
                pass
        except BlockingIOError:
            pass

    def _ask_to_stop(self) -> None:
        _kill_group(self.engine, signal.SIGTERM)
        began = time.monotonic()
        self._reap()
        while self.engine_status is None and (left := began + self._patience() - time.monotonic()) > 0:
            select.select([self._wakeup_read], [], [], min(left, _PARENT_CHECK))
            self._drain_wakeups()
            self._reap()

    def _patience(self) -> float:
        """Looked at again and again: a runner that is killed lets go before it is dead, and one may die in the wait."""
        return self.stop_timeout if os.getppid() == self._runner else min(self.stop_timeout, _ORPHAN_TIMEOUT)

    def _kill_the_rest(self) -> None:
        """SIGKILL until a look at the process table finds nobody: a dying process may still have forked."""
        deadline = time.monotonic() + _KILL_TIMEOUT
        _kill_group(self.engine, signal.SIGKILL)
        while time.monotonic() < deadline:
            self._reap()
            living = [process for process in descendants(os.getpid()) if not process.zombie]
            if not living and self.engine_status is not None:
                return
            for process in living:
                _kill(process.pid, signal.SIGKILL)
            time.sleep(0.005)
        print("guardian: some processes of the server cannot be killed", file=sys.stderr, flush=True)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.engine:
                self.engine_status = status


def _set_group(pid: int) -> None:
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the other side was first
        os.setpgid(pid, pid)


def _exit_code(status: int | None) -> int:
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """``--stop-timeout SECONDS -- COMMAND ...``"""
    split = arguments.index("--")
    stop_timeout = float(arguments[arguments.index("--stop-timeout") + 1])
    return Guardian(arguments[split + 1 :], stop_timeout).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
