"""Guards a server: a process between runner and server, so that no server outlives its runner.

The runner starts it by file path, ``python -I -S guardian.py --stop-timeout 10 -- COMMAND ...``.
The runner holds the write end of its standard input, the lifeline pipe. When that end closes, the
server's process group gets SIGTERM, and after the timeout every descendant gets SIGKILL. A byte in
the pipe requests SIGKILL now. If the server ends by itself, its descendants are also killed. The
exit code is the server's (128 + n for signal n).

PR_SET_PDEATHSIG misses grandchildren (vLLM has three generations), and setsid() leaves the group.
So the guardian is a child subreaper, and /proc shows the whole tree. Without both (macOS) only the
server's process group is killed.

It imports only the standard library, so that it starts fast.
"""

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
_CAUGHT = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
KILL_NOW = b"k"
# Seconds. Needed only if a fork of the runner keeps the lifeline pipe open.
_PARENT_CHECK = 1.0
# Seconds after SIGTERM if the runner is dead: the next runner needs the GPUs.
_ORPHAN_TIMEOUT = 4.0
# Seconds. A process that hangs inside a driver cannot be killed.
KILL_TIMEOUT = 10.0


class Process(NamedTuple):
    """One row of the process table. ``started``: clock ticks since the boot."""

    pid: int
    parent: int
    session: int
    zombie: bool
    started: int
    name: str


def process_table() -> list[Process]:
    table = []
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_bytes()
        except OSError:
            continue
        # Count from the last parenthesis: the name may contain spaces and parentheses.
        pid, _, fields = stat.partition(b" (")
        name, _, fields = fields.rpartition(b") ")
        state, parent, _group, session, *more = fields.split()
        text = name.decode(errors="replace")
        table.append(
            Process(int(pid), int(parent), int(session), state in b"ZX", int(more[15]), text)
        )
    return table


def descendants(ancestor: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in process_table():
        children.setdefault(process.parent, []).append(process)
    processes = []
    todo = [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        processes += below
        todo += [process.pid for process in below]
    return processes


def kill_processes(processes: list[Process]) -> None:
    """Kills processes, and waits a moment: a dying process may still have forked."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.005)


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guardian:
    """Runs one command until it ends, or until the runner ends or requests a stop.

    Args:
        stop_timeout: seconds between SIGTERM and SIGKILL.

    Attributes:
        server_status: status of ``os.waitpid``; None while the server runs.
    """

    def __init__(self, argv: list[str], stop_timeout: float) -> None:
        self.argv = argv
        self.stop_timeout = stop_timeout
        self.server = 0
        self.server_status: int | None = None
        self._runner = os.getppid()
        self._wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)

    def run(self) -> int:
        # A cluster signals all processes of a job, but the draining runner needs its server, so
        # only the closed pipe ends the guardian. The server would inherit SIG_IGN.
        for number in _CAUGHT:
            signal.signal(number, lambda *_: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._launch()
        while self.server_status is None and not self._wait_for_stop():
            self._reap()
        if self.server_status is None:
            self._terminate()
        self._kill_descendants()
        code = -signal.SIGKILL
        if self.server_status is not None:
            code = os.waitstatus_to_exitcode(self.server_status)
        if code >= 0:
            return code
        return 128 - code

    def _launch(self) -> None:
        guardian = os.getpid()
        # Between fork and exec our handlers would swallow the server's SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        self.server = os.fork()
        if self.server == 0:
            self._exec_server(guardian)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
        _set_group(self.server)  # both processes do this, before the first kill

    def _exec_server(self, guardian: int) -> NoReturn:
        try:
            _set_group(0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # Python ignores SIGPIPE, and exec keeps ignored signals ignored.
            for number in (signal.SIGPIPE, *_CAUGHT):
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # "the job ends soon" is for the runner
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
            os.execvp(self.argv[0], self.argv)
        except OSError as error:
            print(f"cannot run {self.argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)

    def _wait_for_stop(self) -> bool:
        ready = select.select([0, self._wakeup_read], [], [], _PARENT_CHECK)[0]
        self._drain_wakeups()
        if 0 in ready:
            if os.read(0, 512):
                self.stop_timeout = 0.0
            return True
        return os.getppid() != self._runner

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup_read, 512):
                pass

    def _terminate(self) -> None:
        _kill_group(self.server, signal.SIGTERM)
        terminated_at = time.monotonic()
        self._reap()
        while self.server_status is None:
            grace = self.stop_timeout
            if os.getppid() != self._runner:
                grace = min(grace, _ORPHAN_TIMEOUT)
            seconds = terminated_at + grace - time.monotonic()
            if seconds <= 0:
                return
            select.select([self._wakeup_read], [], [], min(seconds, _PARENT_CHECK))
            self._drain_wakeups()
            self._reap()

    def _kill_descendants(self) -> None:
        deadline = time.monotonic() + KILL_TIMEOUT
        _kill_group(self.server, signal.SIGKILL)
        while time.monotonic() < deadline:
            self._reap()
            running = [process for process in descendants(os.getpid()) if not process.zombie]
            if not running and self.server_status is not None:
                self._reap()
                return
            kill_processes(running)
        print(
            "guardian: some processes of the server cannot be killed", file=sys.stderr, flush=True
        )

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server:
                self.server_status = status


def _set_group(pid: int) -> None:
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    stop_timeout = float(arguments[arguments.index("--stop-timeout") + 1])
    return Guardian(arguments[split + 1 :], stop_timeout).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
