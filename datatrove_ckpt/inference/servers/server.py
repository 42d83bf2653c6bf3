"""Launches one server, and checks whether it is ready and healthy.

Every engine runs under a guardian (``guardian.py``) on 127.0.0.1, with a free port, a fresh API key
in its environment, and a log file.

The log of a failed start is searched for its cause: engines bury it in tracebacks.

With ``replicas`` or several models the GPUs that this process sees are divided. Slurm and Ray give
each task its own GPUs, but LocalPipelineExecutor starts several ranks that all see all GPUs. With
it, each server holds a file lock per GPU. Its processes inherit the lock, which becomes free when
the last process has ended and freed its memory.

A server can be started again after ``stop``. It belongs to no event loop: a rank can pass it on to
the next rank of its process (``RankModels``).
"""

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import as_line, cut
from datatrove_ckpt.common.redaction import HIDDEN, Secret, hide, may_name_secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    HOST,
    SINGLE_NODE,
    VISIBLE_GPUS,
    Engine,
    EngineCommand,
    KnownFailure,
    NodeGroup,
    visible_gpus,
)
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError, ServerStartFailed, TooManyOpenFiles
from datatrove_ckpt.inference.client.client import ExchangeFailed, get
from datatrove_ckpt.inference.client.half_answers import Continuation
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers import guardian, leftovers
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.open_files import (
    close_descriptor,
    own_descriptor,
    refuse_exhaustion,
)
from datatrove_ckpt.process.shutdown import wait_until_cancelled

# Seconds. The server of a rank that was killed takes up to ten to end.
_LEASE_TIMEOUT = 60.0


@dataclass
class GpuLease:
    """One server's share of the node. The server inherits the descriptors of ``locks``."""

    env: dict[str, str] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.locks:
            close_descriptor(self.locks.pop())


async def lease_gpus(
    configs: Sequence[InferenceConfig], without: Collection[str] = ()
) -> dict[str, list[GpuLease]]:
    """Returns a lease for each server of a rank's models. First ends the servers that killed runs
    have left on this node.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    await in_own_thread(leftovers.end_leftovers)
    leases = {}
    for config in configs:
        if config.name not in without:
            leases[config.name] = [GpuLease() for _ in range(config.replicas)]
    try:
        await _share_gpus(configs, leases)
    except BaseException:
        for lease in chain(*leases.values()):
            lease.close()
        raise
    return leases


async def _share_gpus(
    configs: Sequence[InferenceConfig], leases: Mapping[str, list[GpuLease]]
) -> None:
    visible = visible_gpus()
    is_local = os.environ.get("DATATROVE_EXECUTOR", "LOCAL") == "LOCAL"
    ranks_share_them = is_local and any(config.engine.leases_gpus for config in configs)
    divided = sum(config.replicas for config in configs) > 1
    is_set = any(config.gpus is not None for config in configs)
    if not visible or not leases or not (ranks_share_them or divided or is_set):
        return
    needed = sum(config.gpus_each * config.replicas for config in configs)
    if needed > len(visible):
        raise ConfigError(
            f"gpus: the servers of a task need {needed} GPUs (gpus, or tp * dp * pp for each of "
            f"replicas), and this task sees {len(visible)} ({VISIBLE_GPUS}={','.join(visible)})."
        )
    free = iter([(name, -1) for name in visible])
    if ranks_share_them:
        configs = [one for one in configs if one.name in leases]
        free = iter(await _lock_gpus(visible, sum(one.gpus_each * one.replicas for one in configs)))
    for config in configs:
        servers = [list(islice(free, config.gpus_each)) for _ in range(config.replicas)]
        for lease, share in zip(leases.get(config.name, ()), servers, strict=False):
            lease.env[VISIBLE_GPUS] = ",".join(name for name, _ in share)
            for _, lock in share:
                if lock >= 0:
                    lease.locks.append(own_descriptor(lock))


async def _lock_gpus(visible: list[str], needed: int) -> list[tuple[str, int]]:
    # In Slurm a folder per job: another job's GPU 0 may be another GPU.
    folder = leftovers.runtime_folder(os.environ.get("SLURM_JOB_ID", ""))
    began = time.monotonic()
    while True:
        locked = _try_lock_gpus(folder, visible, needed)
        if locked is not None:
            return locked
        if time.monotonic() - began > _LEASE_TIMEOUT:
            raise ConfigError(
                f"workers: this task needs {needed} of the GPUs {','.join(visible)}, and other "
                f"tasks on this node hold too many (locks in {folder}). Run fewer workers."
            )
        await asyncio.sleep(0.2)


def _try_lock_gpus(folder: Path, visible: list[str], needed: int) -> list[tuple[str, int]] | None:
    """Locks all needed GPUs or none: two ranks with a part each could wait forever.

    One rank tries at a time: else both may find too few.
    """
    gate = _try_lock(folder / "claim.lock")
    if gate is None:
        return None
    locked = []
    try:
        for name in visible:
            lock = _try_lock(folder / f"gpu_{re.sub(r'[^0-9A-Za-z-]', '_', name)}.lock")
            if lock is not None:
                locked.append((name, lock))
            if len(locked) == needed:
                return locked
    finally:
        os.close(gate)
    for _, lock in locked:
        os.close(lock)
    return None


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


# Bytes at the end of the log: vLLM prints the cause well before its last traceback.
_SEARCHED_BYTES = 256 * 1024
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_EXTRAS = {engine.package: engine.name for engine in ENGINES.values()}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


_COMMON = (
    (
        KnownFailure(
            "The server rejects a flag or its value. Check model_kwargs against its --help; "
            "{flag: null} leaves one of ours out.",
            True,
        ),
        r"unrecognized arguments|invalid choice:|ambiguous option|expected (?:one|at least one) "
        r"argument"
        r"|arguments are required|ignored explicit argument|invalid \w+ value:",
    ),
    (Engine.PORT_TAKEN, r"address already in use|errno 98\b"),
    (
        KnownFailure(
            "The model hub refuses access. Accept the model's licence and export HF_TOKEN.", True
        ),
        r"gated ?repo|access to model .* is restricted|401 client error",
    ),
    (
        KnownFailure(
            "There is no such model. Give a name on the hub, or a folder on this node.",
            True,
        ),
        r"repository ?not ?found|not a valid model identifier|incorrect "
        r"path_or_model_id|hfvalidationerror",
    ),
    (
        KnownFailure(
            "The model brings its own code. If you trust it, set trust_remote_code: true.", True
        ),
        r"contains custom code which must be executed|(?:pass the argument|set the option) "
        r".?trust_remote_code",
    ),
    (Engine.TOO_FEW_GPUS, r"invalid device ordinal|no cuda gpus are available"),
    (Engine.GPU_FULL, r"cuda out of memory|outofmemoryerror"),
)
# A user's script may start any engine.
_CAUSES = (*(cause for engine in ENGINES.values() for cause in engine.causes), *_COMMON)


def find_cause(exit_code: int | None, log: str) -> KnownFailure | None:
    if exit_code == 127:
        return KnownFailure("The command was not found, or is not executable.", permanent=True)
    if missing := _MODULE.search(log):
        name = missing[1]
        if name in _EXTRAS:
            package = f"'datatrove-ckpt[{_EXTRAS[name]}]'"
        else:
            package = name.partition(".")[0]
        return KnownFailure(
            f"The Python package {name!r} is missing. Run: pip install {package}", permanent=True
        )
    for cause, pattern in _CAUSES:
        if exit_code is not None and re.search(pattern, log, re.IGNORECASE):
            return cause
    if exit_code == 137:
        return KnownFailure(
            "It was killed (SIGKILL), perhaps out of main memory. See dmesg, or ask Slurm for more "
            "--mem."
        )
    return None


def read_log(path: Path, start: int) -> str:
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _SEARCHED_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: str) -> str:
    for line in reversed(log.replace("\r", "\n").split("\n")):
        text = as_line(_ESCAPE.sub("", line)).strip()
        if text:
            return cut(text, 200)
    return ""


# Seconds beyond the server's own stop timeout: it needs at most ten to kill the remaining
# processes.
_GUARDIAN_MARGIN = 12.0


class GuardedProcess:
    """A server's process below its guardian.

    Args:
        stop_timeout: seconds between SIGTERM and SIGKILL.

    Attributes:
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
            await asyncio.sleep(0.05)  # an event belongs to one loop
        return code

    def request_stop(self) -> None:
        if self.lifeline is not None:
            close_descriptor(self.lifeline)
            self.lifeline = None

    def request_kill(self) -> None:
        if self.lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.lifeline, guardian.KILL_NOW)
        self.request_stop()

    def wait_until_stopped(self) -> int:
        try:
            return self._process.wait(self._stop_timeout + _GUARDIAN_MARGIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


NO_ANSWER = "does not answer"
# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind its port late.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_last_ports: deque[int] = deque(maxlen=100)  # a server does not listen immediately
_PROBE_TIMEOUT = 5.0  # seconds
_SAY_EVERY = 30.0  # seconds
_FLAG = re.compile(r"--([\w-]+)=")
_TAKE_OVER_TIMEOUT = 15.0  # seconds


class _StartAttemptFailed(Exception):
    is_permanent = False


@dataclass(eq=False, repr=False)
class InferenceServer:
    """A server that this process launches.

    Args:
        on_launch: called at each launch, for other nodes.

    Attributes:
        url: URL without /v1; empty while the server is not started.
        restarted_at: monotonic times of its recent restarts, for all ranks.
    """

    config: InferenceConfig
    rank: int
    replica: int = 0
    lease: GpuLease = field(default_factory=GpuLease)
    nodes: NodeGroup = SINGLE_NODE
    on_launch: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.restarted_at: deque[float] = deque()
        self.url = ""
        self.api_key: Secret | None = None
        self.continuation: Continuation | None = None
        self._process: GuardedProcess | None = None
        self._command = EngineCommand((), {})
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

    @property
    def may_continue_answers(self) -> bool:
        flag = self.config.engine.continuing_flag
        wanted = flag != "" and self.config.half_answers is not False
        return wanted and f"--{flag}" in self._command.argv

    async def take_over(self) -> bool:
        """Returns False, and stops the server, if it does not run or is not healthy."""
        if self._process is None:
            return False
        problem: str | None = "has ended"
        if self.is_running:  # on a busy machine an answer may be slow
            problem = await self.problem(_TAKE_OVER_TIMEOUT)
        server = f"server {self.replica} (log {self._log_path})"
        if problem is not None:
            logger.warning(
                f"{self.config.log_prefix}Task {self.rank} cannot take over {server}: it "
                f"{problem}. It is started anew."
            )
            await self.kill()
            return False
        logger.debug(f"{self.config.log_prefix}Task {self.rank} takes over {server}.")
        return True

    async def start(self) -> None:
        attempts = 1 + self.config.server_start_max_retries
        for attempt in range(1, attempts + 1):
            await self.stop()
            try:
                await self.launch()
                await self._wait_until_ready()
                return
            except BaseException as error:
                await self.stop()  # no process and no file may stay
                if not isinstance(error, _StartAttemptFailed):
                    raise
                if error.is_permanent or attempt == attempts:
                    raise ServerStartFailed(str(error)) from None
                logger.warning(f"{error}\nStarting it again (attempt {attempt + 1} of {attempts}).")
            await asyncio.sleep(retrying.RELAUNCH.first)

    async def launch(self) -> None:
        port = free_port()
        key = Secret(secrets.token_urlsafe(32))
        # This searches a disk that may be slow and shared.
        self._command = await in_own_thread(
            self.config.engine.launch, self.config, port, key, self.nodes
        )
        self.api_key = key if self._command.takes_key else None
        self.url = f"http://{HOST}:{port}"
        logger.info(f"starting {redacted_command(self._command.argv)}")
        log = await in_own_thread(self._open_log)
        if self.on_launch is not None:
            self.on_launch()
        try:
            self._process = GuardedProcess(
                self._command.argv,
                self._command.environment({**os.environ, **self.lease.env}),
                log,
                self.lease.locks,  # held until the server's last process has ended
                self.config.server_stop_timeout_sec,
            )
            await in_own_thread(leftovers.ServerRecord.create, self.name, self._process.pid, log)
        except OSError as error:
            refuse_exhaustion(error, "No process could be created")
            # Without a cause, whose frames hold the environment.
            raise _StartAttemptFailed(f"No process could be created: {error}") from None
        finally:
            os.close(log)

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
        name = self.config.server_type
        started_at = time.monotonic()
        say_at = _SAY_EVERY
        failures = 0
        while True:
            is_ready = await self.is_ready()
            seconds = time.monotonic() - started_at
            if (code := self._process.returncode) is not None:
                problem = f"exited with code {code} after {seconds:.1f} s, before it was ready"
                raise await self._explained(problem, code)
            if is_ready:
                break
            if seconds >= window:
                settings = "server_ready_max_attempts * server_ready_delay_sec"
                problem = f"did not become ready within {window:g} s ({settings})"
                raise await self._explained(problem)
            if seconds >= say_at:  # silence during minutes of loading looks like a hang
                say_at += _SAY_EVERY
                line = last_line(await in_own_thread(self._log))
                logger.info(
                    f"{self.config.log_prefix}The {name} server is starting, {seconds:.0f} s of at "
                    f"most {window:.0f} s. Last line of its log ({self._log_path}): {line}"
                )
            failures += 1
            pause = min(self.config.server_ready_delay_sec, retrying.READY.wait(failures))
            with contextlib.suppress(TimeoutError):  # a crash ends the wait
                async with asyncio.timeout(min(pause, window - seconds)):
                    await self._process.wait()
        logger.info(
            f"{self.config.log_prefix}{name} server ready on {self.url} after {seconds:.1f} s"
        )

    async def is_ready(self) -> bool:
        try:
            models = await get(HiddenUrl(f"{self.url}/v1/models"), self.api_key, _PROBE_TIMEOUT)
        except ExchangeFailed:
            return False
        return models.status == 200 and await self.problem(_PROBE_TIMEOUT) is None

    async def problem(self, seconds: float) -> str | None:
        url = HiddenUrl(f"{self.url}/{self.config.engine.health_path}")
        try:
            status = (await get(url, self.api_key, seconds)).status
        except ExchangeFailed as error:
            if error.kind == "TimeoutError":
                return NO_ANSWER
            return f"gives {error.kind}"
        except TooManyOpenFiles:
            return None
        if status >= 500:
            return f"answers HTTP {status}"
        return None

    def _log(self) -> str:
        if self._log_path is not None:
            return hide(read_log(self._log_path, self._log_start))
        return ""

    async def _explained(self, problem: str, exit_code: int | None = None) -> _StartAttemptFailed:
        log = await in_own_thread(self._log)
        cause = find_cause(exit_code, log)
        lines = [f"The {self.config.server_type} server {problem}."]
        if cause is not None:
            lines.append(f"Cause: {cause.text}")
        lines.append(f"Command: {redacted_command(self._command.argv)}")
        lines.append(f"End of its log ({self._log_path}):")
        lines += [f"  {line}" for line in log.rstrip().splitlines()[-20:]]
        failure = _StartAttemptFailed("\n".join(lines))
        failure.is_permanent = cause is not None and cause.permanent
        return failure

    async def report(self, problem: str, exit_code: int | None = None) -> str:
        return str(await self._explained(problem, exit_code))

    async def watch(self) -> int:
        """Returns the exit code once the server has died. Never returns if it was stopped."""
        process = self._process
        if process is None:
            await wait_until_cancelled()
        code = await process.wait()
        if process.lifeline is None:
            await wait_until_cancelled()
        return code

    async def kill(self) -> None:
        if self._process is not None:
            self._process.request_kill()
        await self.stop()

    async def stop(self) -> None:
        self.request_stop()
        # After a cancellation here, the next call waits.
        await in_own_thread(self._wait_until_stopped)
        self.stop_blocking()

    def stop_blocking(self) -> None:
        """Needs no event loop. Call ``request_stop`` before."""
        self._wait_until_stopped()
        if self._process is not None:
            leftovers.remove_record(self._process.pid)
        self._process = None
        self.continuation = None
        self.url = ""
        self.api_key = None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None

    def _wait_until_stopped(self) -> None:
        if self._process is None or self._process.wait_until_stopped() >= 0:
            return
        # The guardian itself was killed (it reports its server's signal n as 128 + n).
        leftovers.kill_session(self._process.pid, self.name)

    def request_stop(self) -> None:
        """``stop`` or ``stop_blocking`` should follow."""
        if self._process is not None:
            self._process.request_stop()


def free_port() -> int:
    """Returns a free port of 127.0.0.1 that was not chosen lately.

    ``secrets`` chooses: with a user's seed of ``random``, all ranks would choose the same ports.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        if port in _last_ports:
            continue
        with socket.socket() as probe:
            # Ports in TIME_WAIT are also free for servers.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _last_ports.append(port)
        return port
    raise ServerStartFailed(
        f"Found no free port on {HOST}: {_PORT_TRIES} tries from {_PORTS[0]} to {_PORTS[-1]} are "
        "in use. Stop other programs."
    )


def redacted_command(argv: tuple[str, ...]) -> str:
    parts = []
    for part in argv:
        flag = _FLAG.match(part)
        if flag is not None and may_name_secret(flag[1]):
            part = f"--{flag[1]}={HIDDEN}"
        parts.append(part)
    return " ".join(parts)
