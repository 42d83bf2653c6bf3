"""Starts and stops a server's process through a pipe to its guardian."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from datatrove_ckpt.inference.servers import guardian
from datatrove_ckpt.process.open_files import close_descriptor, own_descriptor

# Seconds beyond the server's own stop timeout: it needs at most ten to kill the remaining
# processes.
_GUARDIAN_MARGIN = 12.0


class GuardedProcess:
    """A server's process below its guardian. It belongs to no event loop.

    Args:
        log: file descriptor for the output of both.
        locks: file descriptors that the server inherits.
        stop_timeout: seconds between SIGTERM and SIGKILL.

    Attributes:
        pid: process id of the guardian.
        lifeline: end of a pipe that keeps the server running; None after a stop request.

    Raises:
        OSError: no process could be created.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        log: int,
        locks: Sequence[int],
        stop_timeout: float,
    ) -> None:
        self._stop_timeout = stop_timeout
        lifeline_end, lifeline = os.pipe()
        # The guardian stops the server when this end closes, even by kill -9.
        self.lifeline: int | None = own_descriptor(lifeline)
        guarded = ("--stop-timeout", str(stop_timeout), "--", *argv)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *guarded],
                stdin=lifeline_end,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C is for the runner
            )
        except BaseException:
            self.request_stop()
            raise
        finally:
            os.close(lifeline_end)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The server's exit code, 128 + n after signal n; -n if signal n ended the guardian."""
        return self._process.poll()

    async def wait(self) -> int:
        """Returns the exit code once the server has ended. Several tasks may wait."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # an event would belong to one loop
        return code

    def request_stop(self) -> None:
        """Sends SIGTERM to the server, and SIGKILL to its remaining processes after the timeout."""
        if self.lifeline is not None:
            close_descriptor(self.lifeline)
            self.lifeline = None

    def request_kill(self) -> None:
        if self.lifeline is not None:
            with contextlib.suppress(BrokenPipeError):  # the guardian has ended
                os.write(self.lifeline, guardian.KILL_NOW)
        self.request_stop()

    def wait_until_stopped(self) -> int:
        try:
            return self._process.wait(self._stop_timeout + _GUARDIAN_MARGIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
