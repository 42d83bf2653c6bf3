"""InferenceServer: one server that this process launches.

Every engine runs under a guardian (``guardian.py``) on 127.0.0.1, with a free port, a fresh API key
in its environment, and a log file. It is ready when GET /v1/models answers 200.

A server can be started again after ``stop``, with another port and another key. It belongs to no
event loop: a rank can pass it on to the next rank of its process (``warm.py``).

A running server's health and load say how many requests it may get.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import as_line, cut
from datatrove_ckpt.common.redaction import (
    HIDDEN,
    Secret,
    hide,
    may_name_secret,
)
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    FIRST_LIMIT,
    GPU_FULL,
    HOST,
    PORT_TAKEN,
    REQUESTS_WITHOUT_METRICS,
    SINGLE_NODE,
    TOO_FEW_GPUS,
    Cause,
    Engine,
    EngineCommand,
    MetricNames,
    Nodes,
)
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ServerStartFailed, TooManyOpenFiles
from datatrove_ckpt.inference.client.routing import Pace, Router, Target
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers import guardian, node
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.open_files import refuse_exhaustion
from datatrove_ckpt.process.shutdown import wait_until_cancelled

NO_ANSWER = "does not answer"


async def answers(url: str, api_key: Secret | None, seconds: float) -> bool:
    try:
        return (await get(HiddenUrl(url), api_key, seconds)).status == 200
    except ExchangeFailed:
        return False


async def request_health(
    url: str, api_key: Secret | None, engine: Engine, seconds: float
) -> str | None:
    """Returns None if the server reports itself healthy, else what is wrong."""
    try:
        status = (await get(HiddenUrl(f"{url}/{engine.health_path}"), api_key, seconds)).status
    except ExchangeFailed as error:
        if error.kind == "TimeoutError":
            return NO_ANSWER
        return f"gives {error.kind}"
    except TooManyOpenFiles:
        return None  # says nothing about the server
    if status >= 500:
        return f"answers HTTP {status}"
    return None


# An engine's /metrics, in Prometheus text format.


@dataclass(frozen=True)
class Metrics:
    """An engine's metrics at one moment, summed over its data-parallel parts.

    Attributes:
        running, waiting: requests.
        tokens: generated and processed since its start.
        preemptions: requests that lost their place in the KV cache since its start.
        cache_usage: share of the KV cache that running requests use.
    """

    running: float
    waiting: float
    tokens: float
    preemptions: float = 0.0
    cache_usage: float = 0.0


def parse_metrics(names: MetricNames, text: str) -> Metrics | None:
    running, waiting, preemptions, tokens, usage = names
    found = defaultdict[str, float](float)
    caches = 0  # one for each of a server's ``dp``
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name and name in (running, waiting, preemptions, usage, *tokens):
            number, *_ = line[len(name) :].rpartition("}")[2].split()  # a time may follow
            found[name] += float(number)
            caches += name == usage
    if not found or not all(map(math.isfinite, found.values())):
        return None
    return Metrics(
        found[running],
        found[waiting],
        sum(found[name] for name in tokens),
        found[preemptions],
        found[usage] / max(1, caches),
    )


async def read_page(url: HiddenUrl, api_key: Secret | None, seconds: float, proxied: bool) -> str:
    """Returns the text at /metrics; "" if the server shows none, or does not answer in time."""
    try:
        response = await get(url, api_key, seconds, proxied)
        if response.status == 200:
            return response.body.decode()
        return ""
    except (ExchangeFailed, TooManyOpenFiles, ValueError):
        return ""


async def read_metrics(
    url: HiddenUrl,
    api_key: Secret | None,
    names: MetricNames | None,
    seconds: float,
    proxied: bool = False,
) -> Metrics | None:
    """Returns None if the engine has no metrics, or does not answer in time."""
    if names is None:
        return None
    try:
        return parse_metrics(names, await read_page(url, api_key, seconds, proxied))
    except ValueError:
        return None


# At most twice the target wait, even if the engine runs one request at a time.
_LEAST_TARGET = FIRST_LIMIT // 2
_RUNNING_PER_WAITING = 8
_USUAL_SAMPLES = 5
# Requests per sample: one in 2.5 seconds, twice as many after 9 s without a preemption.
_GROWTH_AFTER_PREEMPTION = 0.1
_ACCELERATION = 1.02
_SAMPLE_SECONDS = 0.25
_MOST_FALLS = 2  # of a counter: a restart is one
_METRICS_TIMEOUT = 5.0  # seconds
_WAIT_FOR_METRICS_SECONDS = 30.0


class Admission:
    """How many requests may be in flight at an engine, under ``max_concurrent_generations: auto``.

    An engine is busiest when a few requests always wait in its own queue; more would only be lost
    with a dead server. So the limit follows the engine's metrics.

    - Everything on the way to the queue, or back, may reach the queue at once. So only what is
      always on the way counts as normal, and the limit grows by at most ``target`` per sample: the
      queue stays below twice the target.
    - Until a request waits in the queue, the limit grows twice as fast.
    - vLLM's numbers are as of its last step. A sample that equals the sample before changes
      nothing.
    - With an empty queue the limit never falls: what is missing is on the way.
    - An engine that runs more than its KV cache can hold preempts requests, which lose their work
      and wait again. So after a preemption the limit is what runs, and grows slowly.

    Attributes:
        limit: requests that may be in flight.
        target: requests that should wait in the engine: at least 8, an eighth of the running
            requests, and as many as are always on the way.
    """

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self.target = _LEAST_TARGET
        self._last: Metrics | None = None
        self._has_queued = False
        self._on_the_way: deque[float] = deque(maxlen=_USUAL_SAMPLES)
        self._growth = math.inf  # requests more per sample
        self._exact = float(FIRST_LIMIT)  # the limit with its fraction

    def update(self, metrics: Metrics, in_flight: int) -> None:
        last = self._last
        self._last = metrics
        if metrics == last:
            return
        if len(self._on_the_way) == _USUAL_SAMPLES:
            usual = min(self._on_the_way)
        else:
            usual = 0.0
        on_the_way = max(0.0, in_flight - metrics.running - metrics.waiting)
        self._on_the_way.append(on_the_way)
        self.target = math.ceil(max(_LEAST_TARGET, metrics.running / _RUNNING_PER_WAITING, usual))
        preempted = last is not None and metrics.preemptions > last.preemptions
        if preempted:
            self._growth = _GROWTH_AFTER_PREEMPTION
            wanted = metrics.running
        else:
            self._growth *= _ACCELERATION
            self._has_queued = self._has_queued or metrics.waiting > 0
            more = self.target
            if not self._has_queued:
                more *= 2
            missing = more - metrics.waiting - max(0.0, on_the_way - usual)
            wanted = in_flight + self._exact % 1 + min(missing, self._growth)
        falls = metrics.waiting or preempted
        self._exact = max(_LEAST_TARGET, wanted if falls else max(self._exact, wanted))
        self.limit = math.floor(self._exact)


async def adapt_admission(
    name: str,
    target: Target,
    router: Router,
    read: Callable[[float], Awaitable[Metrics | None]],
) -> NoReturn:
    """Adapts the target's limit to its engine until cancelled.

    Without metrics (vLLM's ``disable-log-stats``) the answers decide. So they do if a counter of
    tokens falls twice: a load balancer then shows another server's metrics each time, of which the
    limit would run away. If the metrics stop, the limit stays, and what they showed of the cache is
    forgotten.

    Args:
        read: gives the engine's metrics within so many seconds.
    """
    admission = Admission()  # new for each process of the server
    read_at = time.monotonic()
    tokens: float | None = None
    falls = 0
    why = "shows no metrics at /metrics"
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        metrics = await read(_METRICS_TIMEOUT)
        if metrics is not None:
            read_at = time.monotonic()
            falls += tokens is not None and metrics.tokens < tokens
            tokens = metrics.tokens
            if falls == _MOST_FALLS:
                why = "shows the metrics of several servers in turn, as a load balancer does"
                break
            admission.update(metrics, target.in_flight)
            target.limit = admission.limit
            # What no request takes now, transfers to other servers hold, say.
            target.usage_each = metrics.cache_usage / (metrics.running or math.inf)
            target.others = max(0.0, metrics.running + metrics.waiting - target.in_flight)
        elif time.monotonic() - read_at < _WAIT_FOR_METRICS_SECONDS:
            continue
        elif tokens is None:
            break
        else:
            target.usage_each = 0.0
        router.admit(resized=True)
    target.pace = Pace(target)
    target.usage_each = 0.0
    target.others = 0.0
    router.admit(resized=True)
    logger.warning(
        f"{name} {why}, so max_concurrent_generations: auto starts with {FIRST_LIMIT} requests at "
        f"once and goes up to {REQUESTS_WITHOUT_METRICS}. Let the server show its own metrics, or "
        "set a number."
    )
    await wait_until_cancelled()


# Outside Linux's ephemeral ports (32768 to 60999): an engine may bind its port late.
_PORTS = range(10_000, 32_768)
_PORT_TRIES = 100
_last_ports: deque[int] = deque(maxlen=100)  # a server needs a while until it listens
_PROBE_TIMEOUT = 5.0  # seconds
_SAY_EVERY = 30.0  # seconds
_TAKE_OVER_TIMEOUT = 15.0  # seconds


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
    lease: node.GpuLease = field(default_factory=node.GpuLease)
    nodes: Nodes = SINGLE_NODE
    on_launch: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.started_by = self.rank
        self.restarted_at: deque[float] = deque()
        self.url = ""
        self.api_key: Secret | None = None
        self._process: GuardedProcess | None = None
        self._command = EngineCommand((), {})
        self._record: node.ServerRecord | None = None
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
        problem: str | None = "has ended"
        if self.is_running:  # on a busy machine an answer takes its time
            problem = await request_health(
                self.url, self.api_key, config.engine, _TAKE_OVER_TIMEOUT
            )
        server = f"server {self.replica} that task {self.started_by} started (log {self._log_path})"
        if problem is not None:
            logger.warning(
                f"{config.said}Task {rank} cannot take over {server}: it {problem}. It is started "
                "anew."
            )
            await self.kill()
            return False
        logger.debug(f"{config.said}Task {rank} takes over {server}.")
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
        """Creates the process, without waiting until it is ready."""
        port = free_port()
        key = Secret(secrets.token_urlsafe(32))
        # It looks for files and packages, perhaps on a slow shared disk.
        self._command = await in_own_thread(
            self.config.engine.launch, self.config, port, key, self.nodes
        )
        self.api_key = key if self._command.takes_key else None
        self.url = f"http://{HOST}:{port}"
        logger.info(f"starting {redacted_command(self._command.argv)}")
        log = await in_own_thread(self._open_log)
        self.on_launch()
        try:
            self._process = self._spawn(log)
            self.started_by = self.rank
            self._record = await in_own_thread(
                node.ServerRecord.create, self.name, self._process.pid, log
            )
        finally:
            os.close(log)

    def _spawn(self, log: int) -> GuardedProcess:
        try:
            return GuardedProcess(
                self._command.argv,
                self._command.environment({**os.environ, **self.lease.env}),
                log,
                self.lease.locks,  # held until the last process of the server has ended
                self.config.server_stop_timeout_sec,
            )
        except OSError as error:
            refuse_exhaustion(error, "No process could be created")
            # Without a cause, whose frames hold the environment.
            raise _StartAttemptFailed(f"No process could be created: {error}", None) from None

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
            is_ready = await answers(
                f"{self.url}/v1/models", self.api_key, _PROBE_TIMEOUT
            ) and not await request_health(
                self.url, self.api_key, self.config.engine, _PROBE_TIMEOUT
            )
            seconds = time.monotonic() - started_at
            if (code := self._process.returncode) is not None:
                what = f"exited with code {code} after {seconds:.1f} s, before it was ready"
                raise _StartAttemptFailed(*await self._explained(what, code))
            if is_ready:
                break
            if seconds >= window:
                settings = "server_ready_max_attempts * server_ready_delay_sec"
                what = f"did not become ready within {window:g} s ({settings})"
                raise _StartAttemptFailed(*await self._explained(what))
            if seconds >= say_at:  # silence during minutes of loading looks like a hang
                say_at += _SAY_EVERY
                log = await in_own_thread(self._log)
                line = starting_line(name, seconds, window, self._log_path, log)
                logger.info(f"{self.config.said}{line}")
            failures += 1
            pause = min(self.config.server_ready_delay_sec, retrying.READY.wait(failures))
            with contextlib.suppress(TimeoutError):  # after a crash the rest is not waited for
                async with asyncio.timeout(min(pause, window - seconds)):
                    await self._process.wait()
        logger.info(f"{self.config.said}{name} server ready on {self.url} after {seconds:.1f} s")

    def _log(self) -> str:
        if self._log_path is not None:
            return hide(read_log(self._log_path, self._log_start))
        return ""

    async def _explained(self, what: str, exit_code: int | None = None) -> tuple[str, Cause | None]:
        """Returns ``what`` is wrong with command and end of the log, and the cause if known."""
        log = await in_own_thread(self._log)
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
        await in_own_thread(self._wait_until_stopped)
        self.stop_blocking()

    def stop_blocking(self) -> None:
        """Stops without an event loop, after ``request_stop``."""
        self._wait_until_stopped()
        self._process = None
        if self._record is not None:
            self._record.remove()
            self._record = None
        self.url = ""
        self.api_key = None
        if self._log_path is not None and self.config.server_log_folder is None:
            self._log_path.unlink(missing_ok=True)
        self._log_path = None

    def _wait_until_stopped(self) -> None:
        if self._process is None or self._process.wait_until_stopped() >= 0:
            return
        # The guardian itself was killed (it reports its server's signal n as 128 + n).
        node.kill_session(self._process.pid, self.name)

    def request_stop(self) -> None:
        """``stop`` or ``stop_blocking`` should follow."""
        if self._process is not None:
            self._process.request_stop()


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
        self.lifeline: int | None = node.own_descriptor(lifeline)
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
            node.close_descriptor(self.lifeline)
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
_FLAG = re.compile(r"--([\w-]+)=")  # as ``arguments`` joins those of users
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
        shown = as_line(_ESCAPE.sub("", line)).strip()
        if shown:
            return cut(shown, _SHOWN_LINE)
    return ""


def redacted_command(argv: tuple[str, ...]) -> str:
    """Returns the command line, without the values of flags that are named like secrets."""
    shown: list[str] = []
    for part in argv:
        flag = _FLAG.match(part)
        if flag is not None and may_name_secret(flag[1]):
            part = f"--{flag[1]}={HIDDEN}"
        shown.append(part)
    return " ".join(shown)
