"""InferenceServer: one server that this process launches. ``make_server`` makes a server of any kind.

Every engine is launched the same way: on 127.0.0.1, on a free port, with a fresh API key in its environment, with its
output appended to a log file, and under a guardian (see ``guardian.py``), so that it ends with its runner, however the
runner ends. The server is ready when its process is running and GET /v1/models answers 200.

A server can be started again after ``stop``. It then has another port and another key, so read ``urls`` and ``api_key``
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import aiohttp
from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import LINK_KEY_VARIABLE
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ServerDied, ServerStartFailed
from datatrove_ckpt.inference.servers import guardian, leftovers
from datatrove_ckpt.inference.servers.diagnosis import Cause, find_cause, read_log, redacted_command, report
from datatrove_ckpt.inference.servers.endpoint import ExternalServers
from datatrove_ckpt.inference.servers.engines import HOST, EngineCommand, engine_command
from datatrove_ckpt.inference.servers.gpu_slots import GpuLease
from datatrove_ckpt.inference.servers.interface import Server, wait_until_cancelled
from datatrove_ckpt.inference.servers.leftovers import ServerRecord
from datatrove_ckpt.inference.servers.nodes import SINGLE_NODE, Nodes
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached
from datatrove_ckpt.redaction import MIRROR_KEY_VARIABLE, HiddenDict, Key, Redactor, frames_cut

# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind its port minutes after we chose it, and until
# then the kernel must give this port to no outgoing connection.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_MAX_PORT_COLLISIONS = 3
_PROBE_TIMEOUT = 5.0  # seconds
_FIRST_POLL = 0.05  # seconds
_POLL_GROWTH = 1.2  # so a server is found ready at most a fifth later than it was
# Seconds before another attempt: the resources of the last one (GPU memory, above all) take a moment to become free.
_RETRY_DELAY = 1.0
# Seconds a guardian gets beyond the server's own stop timeout: it needs at most ten to kill the remaining processes.
_GUARDIAN_MARGIN = 12.0


class _StartAttemptFailed(Exception):
    def __init__(self, text: str, cause: Cause | None) -> None:
        super().__init__(text)
        self.cause = cause or Cause("")


class InferenceServer(Server):
    """A server that this process launches.

    Args:
        config: which engine, which model, how long to wait.
        rank, replica: appear in the name of the log file.
        lease: what the server may use of the node.
        nodes: the nodes that serve the model together, this one among them.
        on_launch: called at each launch, so that the other nodes launch their parts, too.
    """

    def __init__(
        self,
        config: InferenceConfig,
        rank: int,
        replica: int = 0,
        lease: GpuLease | None = None,
        *,
        nodes: Nodes = SINGLE_NODE,
        on_launch: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.name = f"rank_{rank:05d}" + (f"_replica_{replica}" if config.replicas > 1 else "")
        self.name += f"_node_{nodes.rank}" if nodes.count > 1 else ""
        self._nodes = nodes
        self._on_launch = on_launch
        self._lease = lease or GpuLease()
        self.urls: list[str] = []
        self.api_key: Key | None = None
        self._process: asyncio.subprocess.Process | None = None
        # The write end of the lifeline pipe: the guardian stops the server when it closes. The kernel closes it even if
        # this process is killed.
        self._lifeline: int | None = None
        self._command = EngineCommand((), HiddenDict())
        self._record: ServerRecord | None = None
        self._log_path: Path | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """The base URL, without /v1. Only while the server is started."""
        return self.urls[0]

    @property
    def headers(self) -> HiddenDict:
        """The HTTP header with the key; empty if there is none. A session that holds it would show it to tracebacks."""
        return self.api_key.headers() if self.api_key else HiddenDict()

    async def start(self) -> None:
        attempts = 1 + self.config.server_start_max_retries
        attempt, collisions = 1, 0
        while True:
            try:
                return await self._start_once()
            except _StartAttemptFailed as failure:
                collision = failure.cause.port_taken and collisions < _MAX_PORT_COLLISIONS
                collisions += collision
                if not collision and (failure.cause.permanent or attempt >= attempts):
                    raise ServerStartFailed(str(failure)) from None
                attempt += not collision
                logger.warning(f"{failure}\nStarting it again (attempt {attempt} of {attempts}).")
                await asyncio.sleep(_RETRY_DELAY)

    async def _start_once(self) -> None:
        """One launch.

        Raises:
            _StartAttemptFailed: the server ended, or did not become ready. No process of it is left.
        """
        await self.stop()
        try:
            await self.launch()
            await self._wait_until_ready()
        except BaseException:
            await self.stop()  # cancelled or failed: in both cases no process and no file may stay
            raise

    async def launch(self) -> None:
        """Create the process, without waiting until it is ready as ``start`` does."""
        port = free_port()
        key = Key(secrets.token_urlsafe(32))
        # In a thread: it looks for files and packages, which may be on a slow shared disk.
        self._command = await asyncio.to_thread(engine_command, self.config, port, key, self._nodes)
        self.api_key = key if self._command.takes_key else None
        self.urls = [f"http://{HOST}:{port}"]
        logger.info(f"starting {redacted_command(self._command.argv)}")
        log = await asyncio.to_thread(self._open_log)
        self._on_launch()
        lifeline_end, self._lifeline = os.pipe()
        try:
            # First the record: this process may be killed at any moment.
            self._record = await asyncio.to_thread(ServerRecord.create, self.name)
            self._process = await self._spawn(lifeline_end, log)
            if self._record is not None:
                self._record = await asyncio.to_thread(self._record.launched, self._process.pid, log)
        finally:
            os.close(lifeline_end)
            os.close(log)

    async def _spawn(self, lifeline_end: int, log: int) -> asyncio.subprocess.Process:
        """The guardian's process.

        Args:
            lifeline_end, log: file descriptors that become its standard input and its output.
        """
        limit = self.config.server_start_timeout_sec
        try:
            async with asyncio.timeout(limit):
                return await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guardian.__file__),
                    *("--stop-timeout", str(self.config.server_stop_timeout_sec), "--", *self._command.argv),
                    stdin=lifeline_end,
                    stdout=log,
                    stderr=log,
                    env=self._environment(),
                    pass_fds=self._lease.locks,  # held until the last process of the server has ended
                    start_new_session=True,  # Ctrl-C in the terminal is for the runner
                )
        except TimeoutError:
            text = f"No process was created within server_start_timeout_sec={limit}."
            raise _StartAttemptFailed(text, None) from None
        except OSError as error:
            if is_caused_by_limit(error):
                raise limit_reached("No process could be created") from None
            # Without its cause: the frames of that error hold the environment, and tracebacks show it.
            raise _StartAttemptFailed(f"No process could be created: {error}", None) from None

    def _environment(self) -> HiddenDict:
        """The server's environment: ours without the keys of nodes and mirrors, which no server needs."""
        ours = HiddenDict({**os.environ, **self._lease.env, **self._command.env})
        for key in (LINK_KEY_VARIABLE, MIRROR_KEY_VARIABLE):
            ours.pop(key, None)
        if self._record is not None:
            ours[leftovers.VARIABLE] = self._record.nonce
        return ours

    def _open_log(self) -> int:
        """A file descriptor that appends to the server's log."""
        if self.config.server_log_folder is None:
            descriptor, name = tempfile.mkstemp(prefix=f"server_{self.name}_", suffix=".log")
            os.close(descriptor)
            self._log_path = Path(name)
        else:
            folder = expand_path("server_log_folder", self.config.server_log_folder)
            self._log_path = folder / f"server_{self.name}.log"
            _make_private_folder(self._log_path.parent)
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_start = os.fstat(descriptor).st_size
        return descriptor

    async def _wait_until_ready(self) -> None:
        assert self._process is not None
        window = self.config.server_ready_max_attempts * self.config.server_ready_delay_sec
        started_at = time.monotonic()
        exit_code = asyncio.create_task(self._process.wait())
        answer = asyncio.create_task(self._wait_until_answering())
        try:
            # Whichever is first decides: after a crash there is no wait for the rest of the window.
            await asyncio.wait((exit_code, answer), timeout=window, return_when=asyncio.FIRST_COMPLETED)
            seconds = time.monotonic() - started_at
            if exit_code.done():
                code = exit_code.result()
                what = f"exited with code {code} after {seconds:.1f} s, before it was ready"
                raise await self._start_failure(what, code)
            if not answer.done():
                settings = "server_ready_max_attempts * server_ready_delay_sec"
                raise await self._start_failure(f"did not become ready within {window:g} s ({settings})", None)
            answer.result()
        finally:
            exit_code.cancel()
            answer.cancel()
            await asyncio.gather(exit_code, answer, return_exceptions=True)
        logger.info(f"{self.config.server_type} server ready on {self.url} after {seconds:.1f} s")

    async def _wait_until_answering(self) -> None:
        longest, failures = self.config.server_ready_delay_sec, 0
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not await _answers(session, f"{self.url}/v1/models", self.headers):
                failures += 1
                await asyncio.sleep(backoff_seconds(failures, _FIRST_POLL, longest, growth=_POLL_GROWTH))

    async def _start_failure(self, what: str, exit_code: int | None) -> _StartAttemptFailed:
        text, cause = await asyncio.to_thread(self._report, f"The {self.config.server_type} server {what}.", exit_code)
        return _StartAttemptFailed(text, cause)

    def _report(self, what: str, exit_code: int | None) -> tuple[str, Cause | None]:
        assert self._log_path is not None
        redact = Redactor(*self.headers.values())
        log = redact(read_log(self._log_path, self._log_start))
        cause = find_cause(exit_code, log)
        return report(what, self._command.argv, self._log_path, log, cause), cause

    async def report(self, what: str) -> str:
        """``what`` is wrong with the server, with its command and the end of its log."""
        return (await asyncio.to_thread(self._report, f"The {self.config.server_type} server {what}.", None))[0]

    async def watch(self) -> NoReturn:
        process = self._process
        if process is not None:
            code = await process.wait()
            if self._process is process:
                what = f"The {self.config.server_type} server died with exit code {code}."
                raise ServerDied((await asyncio.to_thread(self._report, what, code))[0])
        await wait_until_cancelled()  # stopped on purpose: there is nothing to report

    async def kill(self) -> None:
        """Stop the server at once, by SIGKILL: it hangs, or its answers are no longer needed."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):  # its guardian has ended already
                os.write(self._lifeline, guardian.KILL_NOW)
        await self.stop()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if self._lifeline is not None:
            os.close(self._lifeline)  # from now on the guardian stops everything, even if we are cancelled below
            self._lifeline = None
        if process is not None:
            await self._wait_until_ended(process)
        if self._record is not None:
            self._record.remove()
            self._record = None
        self.urls, self.api_key = [], None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None

    async def _wait_until_ended(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(self.config.server_stop_timeout_sec + _GUARDIAN_MARGIN):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        if code < 0:  # the guardian itself was killed: it reports its server's signal n as 128 + n
            await asyncio.to_thread(guardian.kill_session, process.pid)
            if self._record is not None:
                await asyncio.to_thread(self._record.kill_processes)


async def _answers(session: aiohttp.ClientSession, url: str, headers: HiddenDict) -> bool:
    try:
        with frames_cut():
            async with session.get(url, headers=headers, allow_redirects=False) as response:
                return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _make_private_folder(folder: Path) -> None:
    """Makes the folder of the logs, which may show prompts. An existing folder keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def free_port() -> int:
    """A port of 127.0.0.1 that no process listens on now.

    Chosen by ``secrets``: users seed ``random``, and then all ranks of a node would choose the same ports.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            # Without it a port whose last connections are in TIME_WAIT would look taken. Servers set it, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerStartFailed(
        f"Found no free port on {HOST}: {_PORT_TRIES} tries from {_PORTS[0]} to {_PORTS[-1]} met only ports in use. "
        "Stop other programs on this node."
    )


def make_server(config: InferenceConfig, rank: int) -> Server:
    """The server for ``config.server_type``: one that we launch, or an endpoint that runs already."""
    return ExternalServers(config) if config.server_type == "endpoint" else InferenceServer(config, rank)
