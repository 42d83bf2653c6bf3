"""InferenceServer: one server that this process launches.

Every engine runs under a guardian (``guardian.py``) on 127.0.0.1, with a free port, a fresh API key
in its environment, and a log file. It is ready when GET /v1/models answers 200.

A server can be started again after ``stop``, with another port and another key. It belongs to no
event loop: a rank can pass it on to the next rank of its process (``warm.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import (
    HIDDEN,
    MIRROR_KEY_VARIABLE,
    Secret,
    may_name_secret,
    redact,
)
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    GPU_FULL,
    HOST,
    PORT_TAKEN,
    SINGLE_NODE,
    TOO_FEW_GPUS,
    Cause,
    EngineCommand,
    Nodes,
)
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ServerStartFailed
from datatrove_ckpt.inference.servers import guardian
from datatrove_ckpt.inference.servers.node import (
    GpuLease,
    ServerRecord,
    close_descriptor,
    kill_session,
    own_descriptor,
)
from datatrove_ckpt.inference.servers.probes import answers, request_health
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached
from datatrove_ckpt.process.shutdown import wait_until_cancelled

# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind its port late.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_last_ports: deque[int] = deque(maxlen=100)  # a server needs a while until it listens
_PROBE_TIMEOUT = 5.0  # seconds
_HEALTH_TRIES = 3  # of a running server of an earlier rank


class _StartAttemptFailed(Exception):
    def __init__(self, text: str, cause: Cause | None) -> None:
        super().__init__(text)
        self.is_permanent = cause is not None and cause.permanent


@dataclass(eq=False, repr=False)
class InferenceServer:
    """A server that this process launches.

    Args:
        rank, replica: appear in the name of the log file.
        nodes: the nodes that serve the model together, including this node.
        on_launch: called at each launch: the other nodes launch their parts, too.

    Attributes:
        url: without /v1; empty while the server is not started.
        started_by: the rank that launched the running process.
        restarted_at: ``time.monotonic`` of its restart, for all ranks.
    """

    config: InferenceConfig
    rank: int
    replica: int = 0
    lease: GpuLease = field(default_factory=GpuLease)
    nodes: Nodes = SINGLE_NODE
    on_launch: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.started_by = self.rank
        self.restarted_at: deque[float] = deque()
        self.url = ""
        self.api_key: Secret | None = None
        self._process: GuardedProcess | None = None
        self._command = EngineCommand((), {})
        self._record: ServerRecord | None = None
        self._log_path: Path | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        name = f"rank_{self.rank:05d}" + (f"_{self.config.name}" if self.config.name else "")
        name += f"_replica_{self.replica}" if self.config.replicas > 1 else ""
        return name + (f"_node_{self.nodes.rank}" if self.nodes.count > 1 else "")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def take_over(self, config: InferenceConfig, rank: int) -> bool:
        """Lets a server that an earlier rank started serve this one.

        Args:
            config: may differ from the earlier rank's in what is no part of the server's command.

        Returns:
            False if it does not run, or is not well: then it is stopped.
        """
        self.config = config
        self.rank = rank
        if self._process is None:
            return False
        problem = await self._lasting_problem()
        whose = f"that task {self.started_by} started (log {self._log_path})"
        if config.replicas > 1:
            which = f"server {self.replica}"
        else:
            which = "the server"
        if problem is not None:
            logger.warning(
                f"{config.said}Task {rank} cannot take over {which} {whose}: it {problem}. It is "
                "started anew."
            )
            await self.kill()
            return False
        logger.debug(f"{config.said}Task {rank} takes over {which} {whose}.")
        return True

    async def _lasting_problem(self) -> str | None:
        """Returns what is wrong with the server. On a busy machine one probe may fail."""
        problem: str | None = None
        for number in range(_HEALTH_TRIES):
            if not self.is_running:
                return "has ended"
            if number:
                await asyncio.sleep(retrying.RELAUNCH.first)
            problem = await request_health(
                self.url, self.api_key, self.config.engine, _PROBE_TIMEOUT
            )
            if problem is None:
                break
        return problem

    async def start(self) -> None:
        attempts = 1 + self.config.server_start_max_retries
        for attempt in range(1, attempts + 1):
            try:
                await self._start_once()
                return
            except _StartAttemptFailed as failure:
                if failure.is_permanent or attempt == attempts:
                    raise ServerStartFailed(str(failure)) from None
                logger.warning(
                    f"{failure}\nStarting it again (attempt {attempt + 1} of {attempts})."
                )
                await asyncio.sleep(retrying.RELAUNCH.first)

    async def _start_once(self) -> None:
        """Raises _StartAttemptFailed if the server does not become ready.

        No process of it is left then.
        """
        await self.stop()
        try:
            await self.launch()
            await self._wait_until_ready()
        except BaseException:
            await self.stop()  # no process and no file may stay
            raise

    async def launch(self) -> None:
        """Creates the process, without waiting until it is ready."""
        port = free_port()
        key = Secret(secrets.token_urlsafe(32))
        # It looks for files and packages, perhaps on a slow shared disk.
        self._command = await asyncio.to_thread(
            self.config.engine.launch, self.config, port, key, self.nodes
        )
        self.api_key = key if self._command.takes_key else None
        self.url = f"http://{HOST}:{port}"
        logger.info(f"starting {redacted_command(self._command.argv)}")
        log = await asyncio.to_thread(self._open_log)
        self.on_launch()
        try:
            self._process = self._spawn(log)
            self.started_by = self.rank
            self._record = await asyncio.to_thread(
                ServerRecord.create, self.name, self._process.pid, log
            )
        finally:
            os.close(log)

    def _spawn(self, log: int) -> GuardedProcess:
        locks = self.lease.locks  # held until the last process of the server has ended
        try:
            return GuardedProcess(
                self._command.argv,
                self._environment(),
                log,
                locks,
                self.config.server_stop_timeout_sec,
            )
        except OSError as error:
            if is_caused_by_limit(error):
                raise limit_reached("No process could be created") from None
            # Without a cause, whose frames hold the environment.
            raise _StartAttemptFailed(f"No process could be created: {error}", None) from None

    def _environment(self) -> dict[str, str]:
        """Returns our environment without the key of mirrors."""
        ours = self._command.environment({**os.environ, **self.lease.env})
        ours.pop(MIRROR_KEY_VARIABLE, None)
        return ours

    def _open_log(self) -> int:
        if self.config.server_log_folder is None:
            descriptor, name = tempfile.mkstemp(prefix=f"server_{self.name}_", suffix=".log")
            os.close(descriptor)
            self._log_path = Path(name)
        else:
            folder = expand_path("server_log_folder", self.config.server_log_folder)
            self._log_path = folder / f"server_{self.name}.log"
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Logs may show prompts; an existing folder keeps its mode.
            folder.mkdir(mode=0o700, exist_ok=True)
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
            # After a crash the rest of the window is not waited for.
            await wait_for_first((exit_code, answer), window, partial(self._starting_line, window))
            seconds = time.monotonic() - started_at
            if exit_code.done():
                code = exit_code.result()
                what = f"exited with code {code} after {seconds:.1f} s, before it was ready"
                raise _StartAttemptFailed(*await self._explained(what, code))
            if not answer.done():
                settings = "server_ready_max_attempts * server_ready_delay_sec"
                what = f"did not become ready within {window:g} s ({settings})"
                raise _StartAttemptFailed(*await self._explained(what))
            answer.result()
        finally:
            exit_code.cancel()
            answer.cancel()
            await asyncio.gather(exit_code, answer, return_exceptions=True)
        logger.info(
            f"{self.config.said}{self.config.server_type} server ready on {self.url} after "
            f"{seconds:.1f} s"
        )

    def _starting_line(self, window: float, waited: float) -> str:
        line = starting_line(self.config.server_type, waited, window, self._log_path, self._log())
        return f"{self.config.said}{line}"

    async def _wait_until_answering(self) -> None:
        longest = self.config.server_ready_delay_sec
        failures = 0
        while not await answers(f"{self.url}/v1/models", self.api_key, _PROBE_TIMEOUT) or (
            await request_health(self.url, self.api_key, self.config.engine, _PROBE_TIMEOUT)
        ):
            failures += 1
            await asyncio.sleep(min(longest, retrying.READY.wait(failures)))

    def _log(self) -> str:
        if self._log_path is not None:
            return redact(read_log(self._log_path, self._log_start))
        return ""

    async def _explained(self, what: str, exit_code: int | None = None) -> tuple[str, Cause | None]:
        """Returns ``what`` is wrong with command and end of the log, and the cause if known."""
        log = await asyncio.to_thread(self._log)
        cause = find_cause(exit_code, log)
        lines = [f"The {self.config.server_type} server {what}."]
        if cause is not None:
            lines.append(f"Cause: {cause.text}")
        lines.append(f"Command: {redacted_command(self._command.argv)}")
        tail = log.rstrip().splitlines()[-LOG_TAIL_LINES:]
        lines.append(
            f"End of its log ({self._log_path}):"
            if tail
            else f"Its log is empty ({self._log_path})."
        )
        lines += [f"  {line}" for line in tail]
        return "\n".join(lines), cause

    async def report(self, what: str, exit_code: int | None = None) -> str:
        return (await self._explained(what, exit_code))[0]

    async def watch(self) -> int:
        """Returns the exit code once the server died, not if it was stopped."""
        process = self._process
        if process is None:
            await wait_until_cancelled()
        code = await process.wait()
        if process.lifeline is None:
            await wait_until_cancelled()
        return code

    async def kill(self) -> None:
        """Stops the server by SIGKILL."""
        if self._process is not None:
            self._process.request_kill()
        await self.stop()

    async def stop(self) -> None:
        self.request_stop()
        # Cancelled here, it waits in the next call.
        await asyncio.to_thread(self._wait_until_stopped)
        self._forget()

    def stop_blocking(self) -> None:
        """Stops without an event loop, after ``request_stop``."""
        self._wait_until_stopped()
        self._forget()

    def _wait_until_stopped(self) -> None:
        if self._process is None or self._process.wait_until_stopped() >= 0:
            return
        # The guardian itself was killed (it reports its server's signal n as 128 + n).
        kill_session(self._process.pid, self.name)

    def request_stop(self) -> None:
        """``stop`` or ``stop_blocking`` should follow."""
        if self._process is not None:
            self._process.request_stop()

    def _forget(self) -> None:
        self._process = None
        if self._record is not None:
            self._record.remove()
            self._record = None
        self.url = ""
        self.api_key = None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None


def free_port() -> int:
    """Returns a free port of 127.0.0.1 that was not chosen lately.

    Chosen by ``secrets``: with a user's seed of ``random``, all ranks would choose the same ports.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        if port in _last_ports:
            continue
        with socket.socket() as probe:
            # Ports in TIME_WAIT are free for servers, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _last_ports.append(port)
        return port
    raise ServerStartFailed(
        f"Found no free port on {HOST}: {_PORT_TRIES} tries from {_PORTS[0]} to {_PORTS[-1]} met "
        "only ports in use. Stop other programs on this node."
    )


# Silence during minutes of loading looks like a hang.


_SAY_EVERY = 30.0  # seconds


async def wait_for_first(
    tasks: tuple[asyncio.Task[object], ...], window: float, line: Callable[[float], str]
) -> None:
    """Returns when a task is done, or after ``window`` seconds. Until then it logs a line at each
    interval.

    Args:
        line: makes it from the seconds so far. Called in a thread.
    """
    started = time.monotonic()
    waited = 0.0
    while True:
        done, _ = await asyncio.wait(
            tasks,
            timeout=min(_SAY_EVERY, window - waited),
            return_when=asyncio.FIRST_COMPLETED,
        )
        waited = time.monotonic() - started
        if done or waited >= window:
            return
        logger.info(await asyncio.to_thread(line, waited))


def starting_line(name: str, waited: float, window: float, path: Path | None, log: str) -> str:
    last = last_line(log)
    if last:
        said = f"The last line of its log ({path}): {last}"
    else:
        said = f"Its log is empty so far ({path})."
    return f"The {name} server is starting, {waited:.0f} s of at most {window:.0f} s. {said}"


_POLL = 0.05  # seconds
# Seconds beyond the server's own stop timeout: it needs at most ten to kill the remaining
# processes.
_GUARDIAN_MARGIN = 12.0


class GuardedProcess:
    """A server's process below its guardian, as the runner sees it. It belongs to no event loop.

    Args:
        log: a file descriptor for the output of both.
        locks: file descriptors that the server inherits.
        stop_timeout: seconds between SIGTERM and SIGKILL.

    Attributes:
        pid: the guardian's.
        lifeline: the end of a pipe that keeps the server running; None: stop requested.

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
        """Several tasks may wait."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL)  # an event would belong to one loop
        return code

    def request_stop(self) -> None:
        """Sends SIGTERM, and SIGKILL to what is left after the timeout."""
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


# Why a server did not start: engines bury the cause in tracebacks, and each wrong guess costs a
# start-up on a GPU node.


LOG_TAIL_LINES = 20
# At the end of the log: vLLM prints the cause well before its last traceback.
_SEARCHED_BYTES = 256 * 1024
_FLAG = re.compile(r"--([\w-]+)(=|$)")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_EXTRAS = {engine.package: engine.name for engine in ENGINES.values()}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SHOWN_LINE = 200  # characters
_EXIT_NOT_FOUND = 127
_EXIT_KILLED = 137


_COMMON = (
    (
        Cause(
            "The server does not know a flag or its value. Check model_kwargs against its "
            "--help. To leave out a flag of ours that an old version lacks, set model_kwargs "
            "{flag: null}.",
            True,
        ),
        r"unrecognized arguments|invalid choice:|ambiguous option|expected (?:one|at least one) "
        r"argument"
        r"|arguments are required|ignored explicit argument|invalid \w+ value:",
    ),
    (PORT_TAKEN, r"address already in use|errno 98\b"),
    (
        Cause(
            "The model hub refuses access. Accept the model's licence and export HF_TOKEN.", True
        ),
        r"gated ?repo|access to model .* is restricted|401 client error",
    ),
    (
        Cause(
            "There is no such model. Check its name: a name on the hub, or a folder on this node.",
            True,
        ),
        r"repository ?not ?found|not a valid model identifier|incorrect "
        r"path_or_model_id|hfvalidationerror",
    ),
    (
        Cause("The model brings its own code. If you trust it, set trust_remote_code: true.", True),
        r"contains custom code which must be executed|(?:pass the argument|set the option) "
        r".?trust_remote_code",
    ),
    (TOO_FEW_GPUS, r"invalid device ordinal|no cuda gpus are available"),
    (GPU_FULL, r"cuda out of memory|outofmemoryerror"),
)
# Causes of all engines: a user's script may start any.
_CAUSES = (*(cause for engine in ENGINES.values() for cause in engine.causes), *_COMMON)


def find_cause(exit_code: int | None, log: str) -> Cause | None:
    if exit_code == _EXIT_NOT_FOUND:
        return Cause("The command was not found, or is not executable.", permanent=True)
    if missing := _MODULE.search(log):
        name = missing[1]
        if name in _EXTRAS:
            package = f"'datatrove-ckpt[{_EXTRAS[name]}]'"
        else:
            package = name.partition(".")[0]
        return Cause(
            f"The Python package {name!r} is missing. Run: pip install {package}", permanent=True
        )
    for cause, pattern in _CAUSES:
        if exit_code is not None and re.search(pattern, log, re.IGNORECASE):
            return cause
    if exit_code == _EXIT_KILLED:
        return Cause(
            "It was killed (SIGKILL), perhaps out of main memory. See dmesg, or ask Slurm for more "
            "--mem."
        )
    return None


def read_log(path: Path, start: int) -> str:
    """Returns what was written to the log since byte ``start``, or its end; empty if there is no
    log.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _SEARCHED_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: str) -> str:
    """Returns the last line that says something, fit for a terminal; of a progress bar its last
    state.
    """
    for line in reversed(log.replace("\r", "\n").split("\n")):
        shown = "".join(
            part if part.isprintable() else " " for part in _ESCAPE.sub("", line)
        ).strip()
        if shown:
            if len(shown) <= _SHOWN_LINE:
                return shown
            return f"{shown[:_SHOWN_LINE]}..."
    return ""


def redacted_command(argv: tuple[str, ...]) -> str:
    """Returns the command line, without the values of flags that are named like secrets."""
    shown: list[str] = []
    hide_next = False
    for part in argv:
        flag = _FLAG.match(part)
        is_secret = flag is not None and may_name_secret(flag[1])
        if hide_next:
            part = HIDDEN
        elif flag and is_secret and flag[2]:
            part = f"--{flag[1]}={HIDDEN}"
        shown.append(part)
        hide_next = is_secret and flag is not None and not flag[2]
    return " ".join(shown)
