"""InferenceServer: the servers that this process launches, and ``make_server`` for every kind.

It launches any engine the same way: on 127.0.0.1, on a free port, with a fresh API key handed over in
the environment, its output appended to a log file, and under a guardian (see ``guardian.py``), so that it ends with
its runner whatever ends the runner. Ready means: the process lives and GET /v1/models answers 200.

A server can be started again after ``stop``: port and key are new then, so ``urls`` and ``api_key`` must be read again.
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
from datatrove_ckpt.errors import ServerDied, ServerStartFailed
from datatrove_ckpt.inference.servers import guardian
from datatrove_ckpt.inference.servers.diagnosis import Cause, find_cause, read_log, report, shown_command
from datatrove_ckpt.inference.servers.endpoint import ExternalServers
from datatrove_ckpt.inference.servers.engines import HOST, EngineCommand, engine_command
from datatrove_ckpt.inference.servers.gpu_slots import GpuLease
from datatrove_ckpt.inference.servers.interface import Server, wait_until_cancelled
from datatrove_ckpt.inference.servers.nodes import ALONE, Nodes
from datatrove_ckpt.redaction import HiddenDict, Key

# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind minutes after we chose, and until then
# no outgoing connection of any process can be given this port.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_PORT_COLLISIONS = 3
_PROBE_TIMEOUT = 5.0
_FIRST_POLL = 0.05
_POLL_GROWTH = 1.2  # a start is noticed at most a fifth later than it happened
# Seconds before another attempt: what the last one held (GPU memory, above all) takes a moment to be free.
_RETRY_DELAY = 1.0
# Seconds a guardian gets beyond the server's own stop timeout: its kill of the rest takes at most ten.
_GUARDIAN_MARGIN = 12.0


class _StartAttemptFailed(Exception):
    def __init__(self, text: str, cause: Cause | None) -> None:
        super().__init__(text)
        self.cause = cause or Cause("")


class InferenceServer(Server):
    """A server that this process launches.

    Args:
        config: which engine, which model, how long to wait.
        rank, replica: name the log file.
        slot: what it may use of the node.
        nodes: the nodes that serve the model together, this one among them.
        on_launch: called at each launch: the other nodes launch with us.
    """

    def __init__(
        self,
        config: InferenceConfig,
        rank: int,
        replica: int = 0,
        slot: GpuLease | None = None,
        *,
        nodes: Nodes = ALONE,
        on_launch: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.name = f"rank_{rank:05d}" + (f"_replica_{replica}" if config.replicas > 1 else "")
        self.name += f"_node_{nodes.rank}" if nodes.count > 1 else ""
        self._nodes = nodes
        self._on_launch = on_launch
        self._slot = slot or GpuLease()
        self.urls = []
        self.api_key = None
        self._process: asyncio.subprocess.Process | None = None
        self._leash: int | None = None
        self._command = EngineCommand((), HiddenDict())
        self._log_path: Path | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """The base URL, without /v1. Only while the server is started."""
        return self.urls[0]

    async def start(self) -> None:
        attempts = 1 + self.config.server_start_max_retries
        attempt, collisions = 1, 0
        while True:
            try:
                return await self._start_once()
            except _StartAttemptFailed as failure:
                collision = failure.cause.port_taken and collisions < _PORT_COLLISIONS
                collisions += collision
                if not collision and (failure.cause.hopeless or attempt >= attempts):
                    raise ServerStartFailed(str(failure)) from None
                attempt += not collision
                logger.warning(f"{failure}\nStarting it again (attempt {attempt} of {attempts}).")
                await asyncio.sleep(_RETRY_DELAY)

    async def _start_once(self) -> None:
        """One launch.

        Raises:
            _StartAttemptFailed: it ended, or did not become ready; nothing of it is left.
        """
        await self.stop()
        try:
            await self.launch()
            await self._until_ready()
        except BaseException:
            await self.stop()  # cancelled or failed: either way no process and no file stays
            raise

    async def launch(self) -> None:
        """Make the process. ``start`` does that and waits until it is ready."""
        port = free_port()
        key = Key(secrets.token_urlsafe(32))
        # Checks of files and packages, which may lie on a slow shared disk.
        self._command = await asyncio.to_thread(engine_command, self.config, port, key, self._nodes)
        self.api_key = key if self._command.takes_key else None
        self.urls = [f"http://{HOST}:{port}"]
        logger.info(f"starting {shown_command(self._command.argv)}")
        log = await asyncio.to_thread(self._open_log)
        self._on_launch()
        leash_end, self._leash = os.pipe()
        limit = self.config.server_start_timeout_sec
        try:
            async with asyncio.timeout(limit):
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guardian.__file__),
                    *("--stop-timeout", str(self.config.server_stop_timeout_sec), "--", *self._command.argv),
                    stdin=leash_end,
                    stdout=log,
                    stderr=log,
                    env=self._environment(),
                    pass_fds=self._slot.locks,  # held until the last process of the server is gone
                    start_new_session=True,  # Ctrl-C in the terminal is for the runner
                )
        except TimeoutError:
            text = f"No process could be made within server_start_timeout_sec={limit}."
            raise _StartAttemptFailed(text, None) from None
        except OSError as error:
            # Not passed on as it is: the frames it comes from hold the environment, and tracebacks show that.
            raise _StartAttemptFailed(f"No process could be made: {error}", None) from None
        finally:
            os.close(leash_end)
            os.close(log)

    def _environment(self) -> HiddenDict:
        return HiddenDict({**os.environ, **self._slot.env, **self._command.env})

    def _open_log(self) -> int:
        """A file descriptor that appends to this rank's log."""
        if self.config.server_log_folder is None:
            descriptor, name = tempfile.mkstemp(prefix=f"server_{self.name}_", suffix=".log")
            os.close(descriptor)
            self._log_path = Path(name)
        else:
            self._log_path = Path(self.config.server_log_folder) / f"server_{self.name}.log"
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._log_start = os.fstat(descriptor).st_size
        return descriptor

    async def _until_ready(self) -> None:
        assert self._process is not None
        window = self.config.server_ready_max_attempts * self.config.server_ready_delay_sec
        began = time.monotonic()
        death = asyncio.create_task(self._process.wait())
        answer = asyncio.create_task(self._until_answer())
        try:
            # The race: whoever ends first decides, so that a crash is not waited out.
            await asyncio.wait((death, answer), timeout=window, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                what = f"exited with code {death.result()} after {time.monotonic() - began:.1f} s, before it was ready"
                raise await self._failed(what, death.result())
            if not answer.done():
                knobs = "server_ready_max_attempts * server_ready_delay_sec"
                raise await self._failed(f"did not become ready within {window:g} s ({knobs})", None)
            answer.result()
        finally:
            death.cancel()
            answer.cancel()
            await asyncio.gather(death, answer, return_exceptions=True)
        logger.info(f"{self.config.server_type} server ready on {self.url} after {time.monotonic() - began:.1f} s")

    async def _until_answer(self) -> None:
        headers = self.api_key.headers() if self.api_key else None
        longest, failures = self.config.server_ready_delay_sec, 0
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while not await _answers(session, f"{self.url}/v1/models"):
                failures += 1
                await asyncio.sleep(backoff_seconds(failures, _FIRST_POLL, longest, growth=_POLL_GROWTH))

    async def _failed(self, what: str, exit_code: int | None) -> _StartAttemptFailed:
        text, cause = await asyncio.to_thread(self._report, f"The {self.config.server_type} server {what}.", exit_code)
        return _StartAttemptFailed(text, cause)

    def _report(self, what: str, exit_code: int | None) -> tuple[str, Cause | None]:
        assert self._log_path is not None
        log = read_log(self._log_path, self._log_start)
        if self.api_key:
            log = log.replace(self.api_key.reveal(), "***")
        cause = find_cause(exit_code, log)
        return report(what, self._command.argv, self._log_path, log, cause), cause

    async def report(self, what: str) -> str:
        """``what`` the server does wrong, with the command and the log's tail."""
        return (await asyncio.to_thread(self._report, f"The {self.config.server_type} server {what}.", None))[0]

    async def watch(self) -> NoReturn:
        process = self._process
        if process is not None:
            code = await process.wait()
            if self._process is process:
                what = f"The {self.config.server_type} server died with exit code {code}."
                raise ServerDied((await asyncio.to_thread(self._report, what, code))[0])
        await wait_until_cancelled()  # stopped on purpose: nothing to report, ever

    async def kill(self) -> None:
        """Stop it without giving it time to end by itself: it hangs, or is half dead."""
        if self._leash is not None:
            with contextlib.suppress(BrokenPipeError):  # its guardian is gone already
                os.write(self._leash, guardian.AT_ONCE)
        await self.stop()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if self._leash is not None:
            os.close(self._leash)  # from here on the guardian ends everything, even if we are cancelled below
            self._leash = None
        if process is not None:
            await self._until_gone(process)
        self.urls, self.api_key = [], None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None

    async def _until_gone(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(self.config.server_stop_timeout_sec + _GUARDIAN_MARGIN):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        if code < 0:  # a guardian reports its server's signal as 128 + n: it was itself killed
            await asyncio.to_thread(guardian.kill_session, process.pid)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, allow_redirects=False) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on right now.

    Drawn by ``secrets``: users seed ``random``, and then all ranks of a node would draw the same ports.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            # Without it a port whose last connections are in TIME_WAIT would look taken; servers set it too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerStartFailed(f"No free port on {HOST}: {_PORT_TRIES} of {_PORTS[0]} to {_PORTS[-1]} were all taken.")


def make_server(config: InferenceConfig, rank: int) -> Server:
    """The server that ``config.server_type`` asks for: launched by us, or an endpoint that runs already."""
    return ExternalServers(config) if config.server_type == "endpoint" else InferenceServer(config, rank)
