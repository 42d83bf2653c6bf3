"""GuardedProcess: a server's process below its guardian, as the runner sees it.

It belongs to no event loop, so a rank can pass it on to the next one, which has another loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from datatrove_ckpt.inference.servers import descriptors, guardian
from datatrove_ckpt.redaction import HiddenDict

_POLL = 0.05  # seconds, where there is no pidfd
# Seconds a guardian gets beyond the server's own stop timeout: it needs at most ten to kill the remaining processes.
_GUARDIAN_MARGIN = 12.0


class GuardedProcess:
    """Starts a guardian, which starts the server.

    Args:
        argv: the server's command line.
        env: the server's whole environment.
        log: a file descriptor for the output of both.
        locks: file descriptors that the server inherits.
        stop_timeout: seconds between SIGTERM and SIGKILL.

    Attributes:
        pid: the guardian's.

    Raises:
        OSError: no process could be created.
    """

    def __init__(
        self, argv: Sequence[str], env: HiddenDict, log: int, locks: Sequence[int], stop_timeout: float
    ) -> None:
        self._stop_timeout = stop_timeout
        lifeline_end, lifeline = os.pipe()
        # The guardian stops the server when this end closes. The kernel closes it even if this process is killed.
        self._lifeline: int | None = descriptors.own(lifeline)
        guarded = ("--stop-timeout", str(stop_timeout), "--", *argv)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *guarded],
                stdin=lifeline_end,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C in the terminal is for the runner
            )
        except BaseException:
            self._close_lifeline()
            raise
        finally:
            os.close(lifeline_end)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The guardian's exit code: the server's, 128 + n if signal n ended it. -n: signal n ended the guardian."""
        return self._process.poll()

    async def wait(self) -> int:
        """The exit code, once the process has ended. Several tasks may wait."""
        while (code := self._process.poll()) is None:
            await self._until_exit()
        return code

    async def _until_exit(self) -> None:
        try:
            handle = os.pidfd_open(self.pid)  # still ours: a process that was not waited for keeps its number
        except (OSError, AttributeError):
            await asyncio.sleep(_POLL)
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)

    @property
    def stop_requested(self) -> bool:
        return self._lifeline is None

    def request_stop(self) -> None:
        """Let the guardian stop the server: SIGTERM, and SIGKILL for what is left after the timeout."""
        self._close_lifeline()

    def request_kill(self) -> None:
        """Let the guardian stop the server at once, by SIGKILL."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):  # the guardian has ended already
                os.write(self._lifeline, guardian.KILL_NOW)
        self._close_lifeline()

    async def wait_until_stopped(self) -> int:
        """The exit code. Only after one of the two requests."""
        try:
            async with asyncio.timeout(self._stop_timeout + _GUARDIAN_MARGIN):
                return await self.wait()
        except TimeoutError:
            self._process.kill()
            return await self.wait()

    def wait_until_stopped_blocking(self) -> int:
        """The same without an event loop."""
        try:
            return self._process.wait(self._stop_timeout + _GUARDIAN_MARGIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            descriptors.close(self._lifeline)
            self._lifeline = None
