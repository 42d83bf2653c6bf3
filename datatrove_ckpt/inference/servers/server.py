"""InferenceServer: one server that this process launches.

Every engine is launched the same way: on 127.0.0.1, on a free port, with a fresh API key in its environment, with its
output appended to a log file, and under a guardian (see ``guardian.py``), so that it ends with its runner, however the
runner ends. The server is ready when its process is running and GET /v1/models answers 200.

A server can be started again after ``stop``. It then has another port and another key, so read ``urls`` and ``api_key``
again. It belongs to no event loop: a rank can pass it on to the next one of its process (see ``warm.py``).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger

from datatrove_ckpt import retrying
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import LINK_KEY_VARIABLE
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ServerDied, ServerStartFailed
from datatrove_ckpt.inference.servers import guardian, leftovers
from datatrove_ckpt.inference.servers.diagnosis import Cause, find_cause, last_line, read_log, redacted_command, report
from datatrove_ckpt.inference.servers.engines import HOST, EngineCommand, engine_command
from datatrove_ckpt.inference.servers.gpu_slots import GpuLease
from datatrove_ckpt.inference.servers.guarded_process import GuardedProcess
from datatrove_ckpt.inference.servers.health import answers, request_health
from datatrove_ckpt.inference.servers.interface import Server, wait_until_cancelled
from datatrove_ckpt.inference.servers.leftovers import ServerRecord
from datatrove_ckpt.inference.servers.nodes import SINGLE_NODE, Nodes
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached
from datatrove_ckpt.redaction import MIRROR_KEY_VARIABLE, HiddenDict, Key, Redactor

# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind its port minutes after we chose it, and until
# then the kernel must give this port to no outgoing connection.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_MAX_PORT_COLLISIONS = 3
_PROBE_TIMEOUT = 5.0  # seconds
_HEALTH_TRIES = 3  # before a running server of an earlier rank is given up


class _StartAttemptFailed(Exception):
    def __init__(self, text: str, cause: Cause | None) -> None:
        super().__init__(text)
        self.cause = cause or Cause("")


class InferenceServer(Server):
    """A server that this process launches.

    Args:
        config: which engine, which model, how long to wait.
        rank, replica: appear in the name of the log file. With a later rank, they are those of the last start.
        lease: what the server may use of the node.
        nodes: the nodes that serve the model together, this one among them.
        on_launch: called at each launch, so that the other nodes launch their parts, too.

    Attributes:
        started_by: the rank that launched the running process.
        restarted_at: when it was restarted (``time.monotonic``), for all ranks that it has served.
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
        self.rank = rank
        self.started_by = rank
        self.restarted_at: deque[float] = deque()
        self.lease = lease or GpuLease()
        self._replica = replica
        self._nodes = nodes
        self._on_launch = on_launch
        self.urls: list[str] = []
        self.api_key: Key | None = None
        self._process: GuardedProcess | None = None
        self._command = EngineCommand((), HiddenDict())
        self._record: ServerRecord | None = None
        self._log_path: Path | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        name = f"rank_{self.rank:05d}" + (f"_replica_{self._replica}" if self.config.replicas > 1 else "")
        return name + (f"_node_{self._nodes.rank}" if self._nodes.count > 1 else "")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def url(self) -> str:
        """The base URL, without /v1. Only while the server is started."""
        return self.urls[0]

    @property
    def headers(self) -> HiddenDict:
        """The HTTP header with the key; empty if there is none. A session that holds it would show it to tracebacks."""
        return self.api_key.headers() if self.api_key else HiddenDict()

    async def take_over(self, config: InferenceConfig, rank: int) -> bool:
        """Let a server that an earlier rank started serve this one.

        Args:
            config: may differ from the earlier rank's in what is no part of the server's command.

        Returns:
            False if it does not run, or is not well: then it is stopped.
        """
        self.config, self.rank = config, rank
        if self._process is None:
            return False
        problem = await self._lasting_problem()
        whose = f"that rank {self.started_by} started (log {self._log_path})"
        which = f"server {self._replica}" if config.replicas > 1 else "the server"
        if problem is not None:
            logger.warning(f"Rank {rank} cannot take over {which} {whose}: it {problem}. It is started anew.")
            await self.kill()
            return False
        logger.info(f"Rank {rank} takes over {which} {whose}.")
        await asyncio.to_thread(self._log_line, f"Rank {rank} takes over this server from here on.")
        return True

    async def _lasting_problem(self) -> str | None:
        """None if the server is well, else what is wrong. On a busy machine one probe may fail."""
        problem: str | None = None
        for number in range(_HEALTH_TRIES):
            if not self.is_running:
                return "has ended"
            if number:
                await asyncio.sleep(retrying.RELAUNCH.first)
            problem = await self._probe()
            if problem is None:
                break
        return problem

    async def _probe(self) -> str | None:
        if not await answers(f"{self.url}/v1/models", self.headers, _PROBE_TIMEOUT):
            return "does not answer"
        return await request_health(self.url, self.headers, self.config.server_type, _PROBE_TIMEOUT)

    def _log_line(self, line: str) -> None:
        """Adds a line of ours to the server's log, so that what follows can be told apart."""
        assert self._log_path is not None
        with suppress(OSError), self._log_path.open("a") as log:
            log.write(f"=== datatrove-ckpt: {line} ===\n")

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
                await asyncio.sleep(retrying.RELAUNCH.first)

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
        try:
            # First the record: this process may be killed at any moment.
            self._record = await asyncio.to_thread(ServerRecord.create, self.name)
            began = time.monotonic()
            self._process, self.started_by = self._spawn(log), self.rank
            if time.monotonic() - began > (limit := self.config.server_start_timeout_sec):
                text = f"No process was created within server_start_timeout_sec={limit}."
                raise _StartAttemptFailed(text, None)
            if self._record is not None:
                self._record = await asyncio.to_thread(self._record.launched, self._process.pid, log)
        finally:
            os.close(log)

    def _spawn(self, log: int) -> GuardedProcess:
        locks = self.lease.locks  # held until the last process of the server has ended
        try:
            return GuardedProcess(
                self._command.argv, self._environment(), log, locks, self.config.server_stop_timeout_sec
            )
        except OSError as error:
            if is_caused_by_limit(error):
                raise limit_reached("No process could be created") from None
            # Without its cause: the frames of that error hold the environment, and tracebacks show it.
            raise _StartAttemptFailed(f"No process could be created: {error}", None) from None

    def _environment(self) -> HiddenDict:
        """The server's environment: ours without the keys of nodes and mirrors, which no server needs."""
        ours = HiddenDict({**os.environ, **self.lease.env, **self._command.env})
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
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)  # logs may show prompts; an existing folder keeps its mode
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
            await wait_for_first((exit_code, answer), window, partial(self._starting_line, window))
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

    def _starting_line(self, window: float, waited: float) -> str:
        assert self._log_path is not None
        redact = Redactor(*self.headers.values())
        return starting_line(self.config.server_type, waited, window, self._log_path, self._log_start, redact)

    async def _wait_until_answering(self) -> None:
        longest, failures = self.config.server_ready_delay_sec, 0
        while not await answers(f"{self.url}/v1/models", self.headers, _PROBE_TIMEOUT):
            failures += 1
            await asyncio.sleep(min(longest, retrying.READY.wait(failures)))

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
            if not process.stop_requested:
                what = f"The {self.config.server_type} server died with exit code {code}."
                raise ServerDied((await asyncio.to_thread(self._report, what, code))[0])
        await wait_until_cancelled()  # stopped on purpose: there is nothing to report

    async def kill(self) -> None:
        """Stop the server at once, by SIGKILL: it hangs, or its answers are no longer needed."""
        if self._process is not None:
            self._process.request_kill()
        await self.stop()

    async def stop(self) -> None:
        self.request_stop()
        # Cancelled here, it waits in the next call.
        if (process := self._process) is not None and await process.wait_until_stopped() < 0:
            await asyncio.to_thread(self._kill_processes, process)
        self._forget()

    def stop_blocking(self) -> None:
        """The same without an event loop. Call ``request_stop`` of several servers first: then they stop together."""
        self.request_stop()
        if (process := self._process) is not None and process.wait_until_stopped_blocking() < 0:
            self._kill_processes(process)
        self._forget()

    def request_stop(self) -> None:
        """Begin to stop, also if nobody waits for it. ``stop`` or ``stop_blocking`` should follow."""
        if self._process is not None:
            self._process.request_stop()

    def _kill_processes(self, guarded: GuardedProcess) -> None:
        """The guardian itself was killed (it reports its server's signal n as 128 + n): do its work."""
        guardian.kill_session(guarded.pid)
        if self._record is not None:
            self._record.kill_processes()

    def _forget(self) -> None:
        self._process = None
        if self._record is not None:
            self._record.remove()
            self._record = None
        self.urls, self.api_key = [], None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None


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


# A server that loads its model for minutes says so: silence looks like a hang, and its log shows what it does.


_SAY_EVERY = 30.0  # seconds


async def wait_for_first(
    tasks: tuple[asyncio.Task[Any], ...], window: float, line: Callable[[float], str], every: float | None = None
) -> None:
    """Returns when a task is done, or after ``window`` seconds. Until then it logs a line at each interval.

    Args:
        line: makes it from the seconds so far. Called in a thread.
        every: seconds; None: 30.
    """
    started = time.monotonic()
    every = every or _SAY_EVERY
    while True:
        waited = time.monotonic() - started
        done, _ = await asyncio.wait(
            tasks, timeout=max(0.0, min(every, window - waited)), return_when=asyncio.FIRST_COMPLETED
        )
        waited = time.monotonic() - started
        if done or waited >= window:
            return
        logger.info(await asyncio.to_thread(line, waited))


def starting_line(name: str, waited: float, window: float, log: Path, log_start: int, redact: Redactor) -> str:
    """What a server says while it starts.

    Args:
        name: of the engine.
        log: what the server writes; ``log_start``: since this byte.
    """
    last = last_line(redact(read_log(log, log_start)))
    said = f"The last line of its log ({log}): {last}" if last else f"Its log is empty so far ({log})."
    return f"The {name} server is starting, {waited:.0f} s of at most {window:.0f} s. {said}"
