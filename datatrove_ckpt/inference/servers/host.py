"""Lends the servers of a process, launched or external, to one rank or to several ranks.

A rank calls ``ServerHost.lend``. ``ServerSupervisor`` keeps each launched server running, and
restarts a server that dies or hangs. External servers are only checked: they must answer before the
first request.

Executors and pipelines with several runners run ranks in turn, each with its own ``ServerHost``.
With ``reuse_servers``:

    a rank's end                    its servers become warm (``RankModels.keep``), if the rank
                                    succeeds (``one_rank``)
    the next rank needs a server    it gets the warm servers (``RankModels.get``) if its settings
                                    are equal and each server is healthy; else these are stopped
                                    first
    an error, a stop request        warm servers are stopped
    the process ends                it stops warm servers and waits; if it is killed, the
                                    guardians stop them

Servers that serve a model on several nodes are not kept: their other parts belong to processes that
end with the rank. A fork of this process has no warm servers: it would stop its parent's.
"""

import asyncio
import atexit
import contextvars
import math
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import NoReturn

import xxhash
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import as_line, cut
from datatrove_ckpt.common.memory import ByteBudget, media_bytes
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    FIRST_LIMIT,
    REQUESTS_WITHOUT_METRICS,
    MetricNames,
    NodeGroup,
)
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    ServerDied,
    ServerRefused,
    ServerStartFailed,
    TooManyOpenFiles,
    named,
)
from datatrove_ckpt.inference.client.client import (
    CompletionClient,
    EndpointAccess,
    ExchangeFailed,
    ModelServers,
    Outage,
    get,
    hang_after,
    refusal_hint,
)
from datatrove_ckpt.inference.client.http1 import UnreadableResponse
from datatrove_ckpt.inference.client.responses import listed_models, unlisted
from datatrove_ckpt.inference.client.routing import (
    AdaptiveLimit,
    HealthProbe,
    Router,
    Sender,
    ServerDeath,
    Target,
)
from datatrove_ckpt.inference.client.urls import HiddenUrl, proxy_of
from datatrove_ckpt.inference.servers.continuation import find_continuation
from datatrove_ckpt.inference.servers.multi_node import HeadNode
from datatrove_ckpt.inference.servers.server import NO_ANSWER, GpuLease, InferenceServer, lease_gpus
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.screen import has_terminal
from datatrove_ckpt.process.shutdown import Shutdown, end_tasks, wait_until_cancelled


@dataclass(frozen=True)
class Metrics:
    """An engine's metrics at one moment. ``cache_tokens``: size of the KV cache; 0: it is not
    shown.
    """

    running: float
    waiting: float
    tokens: float
    cache_usage: float = 0.0
    cache_tokens: int = 0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0


_RANK = re.compile(r'[{,](?:engine|dp_rank)="([^"]*)"')
_VLLM_RANK = re.compile(r'^vllm:num_requests_running\{[^}]*?engine="([^"]*)"', re.MULTILINE)
# SGLang shows the sum of all priorities without a priority.
_PRIORITY = re.compile(r'[{,]priority="[^"]')
# Older versions show blocks, and not tokens.
_CACHE_SIZE = re.compile(r'[{,](kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


def _cache_tokens(labels: str) -> int:
    sizes = {name: int(size) for name, size in _CACHE_SIZE.findall(labels)}
    blocks = sizes.get("num_gpu_blocks", 0) * sizes.get("block_size", 0)
    return sizes.get("kv_cache_size_tokens", blocks)


def parse_metrics(names: MetricNames, text: str, rank: str = "") -> Metrics | None:
    sums = defaultdict[str, float](float)
    usages: dict[str, float] = {}
    cache_tokens = 0
    shown = frozenset(names.shown)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in shown:
            continue
        labels, _, values = line[len(name) :].rpartition("}")
        number, *_ = values.split()
        label = "".join(_RANK.findall(labels))
        if rank and label != rank:
            continue
        if name == names.cache_usage:
            usages[label] = max(usages.get(label, -math.inf), float(number))
        elif name == names.cache_config:
            cache_tokens += _cache_tokens(labels)
        elif name not in (names.running, names.waiting) or not _PRIORITY.search(labels):
            sums[name] += float(number)
    usage = sum(usages.values()) / max(1, len(usages))
    if not (sums or usages) or not all(map(math.isfinite, (*sums.values(), usage))):
        return None
    return Metrics(
        sums[names.running],
        sums[names.waiting],
        sum(sums[name] for name in names.tokens),
        usage,
        cache_tokens,
        sums[names.prefix_queries],
        sums[names.prefix_hits],
    )


async def _read_page(target: Target, all_names: Sequence[MetricNames], seconds: float) -> str:
    """Returns the text at /metrics; "" without one.

    A page of the names alone takes a tenth of the time of vLLM's API process. vLLM restricts it at
    /metrics/, not at /metrics. Other servers, and several API processes, show nothing there.
    """
    page = ""
    with suppress(ExchangeFailed):  # a second request would fail, too
        if target.restricts_metrics:
            query = [("name[]", name) for names in all_names for name in names.shown]
            page = await _get_text(target, "/metrics", seconds, query)
        if not any(names.are_in(page) for names in all_names):
            page = await _get_text(target, "/metrics", seconds)
            if any(names.are_in(page) for names in all_names):
                target.restricts_metrics = False
    return page


async def _get_text(
    target: Target, path: str, seconds: float, query: Sequence[tuple[str, str]] = ()
) -> str:
    assert target.url is not None
    url = target.url.api(path)
    if query:
        url = HiddenUrl((url.reveal() / "").update_query(query))
    try:
        response = await get(url, target.api_key, seconds, target.probe is None)
        if response.status == 200:
            return response.body.decode()
        return ""
    except (TooManyOpenFiles, ValueError):
        return ""


async def read_metrics(target: Target, names: MetricNames | None, seconds: float) -> list[Metrics]:
    if names is None:
        return []
    page = await _read_page(target, [names], seconds)
    all_metrics = []
    for rank in target.ranks:
        try:
            metrics = parse_metrics(names, page, rank.rank)
        except ValueError:
            metrics = None
        if metrics is None:
            return []
        all_metrics.append(metrics)
    return all_metrics


async def count_ranks(url: HiddenUrl, api_key: Secret | None, probe: HealthProbe | None) -> int:
    target = Target(probe=probe, url=url, api_key=api_key)
    names = ENGINES["vllm"].metrics
    assert names is not None
    page = await _read_page(target, [names], _METRICS_TIMEOUT)
    if "vllm:" in page and names.cache_usage not in page:
        version = ""
        with suppress(ExchangeFailed):
            version = await _get_text(target, "/version", _METRICS_TIMEOUT)
        logger.warning(
            f"{url} does not show its KV cache (/version: "
            f"{as_line(cut(version, 80)) or 'none'}), so max_concurrent_generations: auto may "
            "send more than it holds. Update vLLM, set a number, or list the URLs of a router's "
            "servers."
        )
    ranks = {*_VLLM_RANK.findall(page)}
    # One node of several may have other ranks alone, which its header does not take.
    if "0" in ranks and str(len(ranks) - 1) in ranks:
        return len(ranks)
    return 1


# At most twice the target waits, even if the engine runs a single request at a time.
_LEAST_TARGET = FIRST_LIMIT // 2
_USUAL_SAMPLES = 5
# More are no faster, and would push each other's prompts out of the cache.
_MOST_AT_FIRST = 4 * FIRST_LIMIT
_USUAL_PROMPT = 4096  # tokens
_SAMPLE_SECONDS = 0.25
_METRICS_TIMEOUT = 5.0  # seconds
_WAIT_FOR_METRICS_SECONDS = 30.0


class Admission:
    """Decides the number of requests in flight for ``max_concurrent_generations: auto``.

    An engine is busiest when a few requests always wait in its own queue; further requests would
    only be lost with a dead server.

    - All requests on the way to the queue, or back, may reach the queue together. So only requests
      that are always on the way count as normal, and the limit grows by at most ``target`` per
      sample: the queue stays below twice the target.
    - vLLM's numbers describe its last step. A sample that equals the sample before changes nothing.
    - With an empty queue the limit never falls: the missing requests are on the way.
    - Preemptions hold nothing back: an engine whose KV cache is full loses less by them than by
      places that stay empty.

    Attributes:
        target: number of requests that should wait in the engine: at least 8, an eighth of the
            running requests, the number that is always on the way, and the number that the engine
            started since the last sample, so that its queue lasts until the next sample.
    """

    def __init__(self, limit: float = FIRST_LIMIT, answers: int = 0) -> None:
        self.limit = limit
        self._answers = answers
        self.target = _LEAST_TARGET
        self._last = Metrics(0.0, 0.0, 0.0)
        self._on_the_way: deque[float] = deque(maxlen=_USUAL_SAMPLES)

    def update(self, metrics: Metrics, in_flight: int, answers: int) -> None:
        last = self._last
        self._last = metrics
        if metrics == last:
            return
        usual = 0.0
        if len(self._on_the_way) == _USUAL_SAMPLES:
            usual = min(self._on_the_way)
        on_the_way = max(0.0, in_flight - metrics.running - metrics.waiting)
        self._on_the_way.append(on_the_way)
        started = metrics.running - last.running + answers - self._answers
        self._answers = answers
        self.target = math.ceil(max(_LEAST_TARGET, metrics.running / 8, usual, started))
        missing = self.target - metrics.waiting - max(0.0, on_the_way - usual)
        wanted = max(_LEAST_TARGET, math.floor(in_flight + missing))
        self.limit = wanted if metrics.waiting else max(self.limit, wanted)


async def first_limit(target: Target, names: MetricNames | None) -> int:
    all_metrics = await read_metrics(target, names, _METRICS_TIMEOUT)
    tokens = min((metrics.cache_tokens for metrics in all_metrics), default=0)
    return max(FIRST_LIMIT, min(tokens // _USUAL_PROMPT, _MOST_AT_FIRST))


async def adapt_admission(
    name: str, target: Target, router: Router, names: MetricNames | None
) -> NoReturn:
    """Adapts the limits of a server's ranks to its engine until cancelled.

    Without metrics (vLLM's ``disable-log-stats``) the answers decide. The answers also decide if a
    counter of tokens falls twice: a load balancer then shows another server's metrics each time,
    and the limit would grow without bound. If the metrics stop, the limit stays, and the measured
    use of the cache is dropped.
    """
    admissions = [Admission(rank.limit, rank.answers) for rank in target.ranks]
    read_at = time.monotonic()
    tokens: float | None = None
    queries = hits = math.inf
    falls = 0
    reason = "shows no metrics at /metrics"
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        all_metrics = await read_metrics(target, names, _METRICS_TIMEOUT)
        if all_metrics:
            read_at = time.monotonic()
            before = tokens
            tokens = sum(metrics.tokens for metrics in all_metrics)
            falls += before is not None and tokens < before
            # A restart also lets the counter fall, once.
            if falls == 2:
                reason = "shows several servers' metrics in turn, as load balancers do"
                break
            known = queries, hits
            queries = sum(metrics.prefix_queries for metrics in all_metrics)
            hits = sum(metrics.prefix_hits for metrics in all_metrics)
            for sender in router.senders[:1]:
                sender.work.prefix_queries += int(max(0.0, queries - known[0]))
                sender.work.prefix_hits += int(max(0.0, hits - known[1]))
            for rank, admission, metrics in zip(target.ranks, admissions, all_metrics, strict=True):
                admission.update(metrics, rank.in_flight, rank.answers)
                rank.limit = admission.limit
                # Space that no request uses may belong to transfers to other servers.
                share = metrics.cache_usage / (metrics.running or math.inf)
                rank.cache_share_per_request = share
                rank.foreign_requests = max(0.0, metrics.running + metrics.waiting - rank.in_flight)
        elif time.monotonic() - read_at < _WAIT_FOR_METRICS_SECONDS:
            continue
        elif tokens is None:
            break
        else:
            for rank in target.ranks:
                rank.cache_share_per_request = 0.0
        router.admit(resized=True)
    for rank in target.ranks:
        rank.pace = AdaptiveLimit(rank)
        rank.cache_share_per_request = 0.0
        rank.foreign_requests = 0.0
    router.admit(resized=True)
    logger.warning(
        f"{name} {reason}, so max_concurrent_generations: auto starts with {FIRST_LIMIT} "
        f"requests and goes up to {REQUESTS_WITHOUT_METRICS}. Let the server show its own "
        "metrics, or set a number."
    )
    await wait_until_cancelled()


async def follow_endpoint(target: Target, router: Router) -> None:
    """Adapts a target's limit to its engine's metrics. Some names appear with the first answer."""
    looks = 0
    all_names = [engine.metrics for engine in ENGINES.values() if engine.metrics is not None]
    while True:
        is_last = target.answers > 0
        page = await _read_page(target, all_names, _METRICS_TIMEOUT)
        for names in all_names:
            if names.are_in(page):
                for rank in target.ranks:
                    rank.pace = None
                await adapt_admission(str(target.url), target, router, names)
        if is_last:
            return
        looks += 1
        await asyncio.sleep(retrying.RESTART.wait(looks))


_OTHER_SCHEME = ("ProtocolError", "SSLError", "ResetError", UnreadableResponse.__name__)
NEW_RUN_SECONDS = 30.0
"""The wait of a new run at a terminal if nothing listens, at the usual patience."""
_ENDPOINT_TIMEOUT = 10.0  # seconds
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class EndpointProbe:
    """The answer of an endpoint to GET /v1/models.

    Attributes:
        cause: "" if the endpoint can be used.
        refused: whether it refuses the key, or speaks http where the URL has https, or https where
            it has http.
        api: the URL, or its /v1; None if the API is not known yet.
        is_absent: whether the connection was refused: nothing listens.
    """

    url: str
    cause: str = ""
    refused: bool = False
    api: HiddenUrl | None = None
    models: dict[str, object] | None = None
    is_unreachable: bool = False
    is_absent: bool = False

    def unlisted(self, model: str) -> str:
        return unlisted(self.url, model, self.models or ())


def endpoints_of(config: InferenceConfig) -> list[EndpointAccess]:
    return [
        EndpointAccess(
            name, endpoint, _with_environment(endpoint.url), config.endpoint_api_key(endpoint)
        )
        for name, endpoint in config.endpoints_by_name.items()
    ]


async def ask_endpoints(config: InferenceConfig) -> list[EndpointProbe]:
    return await asyncio.gather(
        *(_ask(endpoint.url, endpoint.api_key) for endpoint in endpoints_of(config))
    )


async def ready_endpoints(
    config: InferenceConfig, outage: Outage, is_new: bool = False
) -> list[EndpointAccess]:
    """Waits until an endpoint answers GET /v1/models, or /models below its own path.

    Every status except 401, 403, 429 and 5xx counts as an answer: some gateways do not list models.

    If nothing listens, the port may be wrong: a new run at a terminal waits only for
    ``NEW_RUN_SECONDS``. A job may start beside its server, which loads a model for minutes.

    Raises:
        ConfigError: an endpoint_url is not a URL, or the key is not set.
        ServerRefused: all endpoints refuse (``EndpointProbe.refused``).
        ServerStartFailed: no server answered in time.
    """
    endpoints = endpoints_of(config)
    is_usual = config.server_patience_seconds == InferenceConfig.server_patience_seconds
    may_be_wrong = is_new and is_usual and has_terminal()
    started = outage.clock()
    failures = 0
    while True:
        answers = await ask_endpoints(config)
        if all(answer.refused for answer in answers):
            raise ServerRefused(f"{answers[0].url} {answers[0].cause}.")
        probes = [*zip(endpoints, answers, strict=True)]
        causes = [f"{endpoint.url}: {answer.cause}" for endpoint, answer in probes if answer.cause]
        if len(causes) < len(answers):
            if causes:
                logger.warning(
                    f"{config.log_prefix}{len(causes)} of {len(answers)} endpoints do not answer: "
                    f"{'; '.join(causes)}. Those that refuse, or whose path has no version, get no "
                    "requests."
                )
            outage.patience = config.server_patience_seconds
            return [endpoint._replace(url=answer.api) for endpoint, answer in probes if answer.api]
        failures = failures + 1
        advice = ""
        outage.patience = ready_window(config)
        if may_be_wrong and all(answer.is_absent for answer in answers):
            outage.patience = min(outage.patience, NEW_RUN_SECONDS)
            advice = " To wait for a server that starts later: server_patience_seconds: 1800."
        outage.begin(answers[0].is_unreachable, started)
        delay = retrying.ENDPOINT.wait(failures)
        if delay > outage.remaining():
            each = "".join(f"  {cause}\n" for cause in causes)
            raise ServerStartFailed(
                f"No endpoint was ready within {outage.patience:g} s:\n{each}Check its URL, that "
                f"it runs, and the network; after a 429, start later.{advice}"
            )
        outage.show(causes[0])
        await asyncio.sleep(delay)


def ready_window(config: InferenceConfig) -> float:
    return min(
        config.server_patience_seconds,
        config.server_ready_max_attempts * config.server_ready_delay_sec,
    )


async def _ask(url: HiddenUrl, api_key: Secret | None) -> EndpointProbe:
    target = url.api("models")
    below = url.api("/v1")
    api = None if url.may_lack_version else url
    try:
        response = await get(target, api_key, _ENDPOINT_TIMEOUT, proxied=True)
        if api is None and response.status not in (200, *retrying.SERVER.retried):
            below_response = await get(
                below.api("models"), api_key, _ENDPOINT_TIMEOUT, proxied=True
            )
            if below_response.status in (200, *retrying.SERVER.retried):
                response = below_response
                url = below
                target = below.api("models")
    except ExchangeFailed as error:
        if error.kind.endswith(_OTHER_SCHEME) and (scheme := await _other_scheme(target)):
            cause = f"speaks {scheme}: correct its URL"
            return EndpointProbe(str(target), cause, True)
        if error.kind == UnreadableResponse.__name__:
            return EndpointProbe(str(target), f"sends no HTTP that can be read: {error}", True)
        is_absent = error.kind == ConnectionRefusedError.__name__
        return EndpointProbe(
            str(target), str(error), api=api, is_unreachable=True, is_absent=is_absent
        )
    status = response.status
    if status in retrying.SERVER.retried:
        return EndpointProbe(str(target), f"HTTP {status}", api=api)
    if status in (401, 403, 407):
        cause = refusal_hint(url, api_key, status, proxy_of(url))
        return EndpointProbe(str(target), f"{cause} (HTTP {status})", True)
    return EndpointProbe(
        str(target), api=url, models=listed_models(response.body) if status == 200 else None
    )


async def _other_scheme(target: HiddenUrl) -> str:
    scheme = "http" if target.reveal().scheme == "https" else "https"
    url = HiddenUrl(target.reveal().with_scheme(scheme).with_user(None).with_query(None))
    try:
        await get(url, None, _ENDPOINT_TIMEOUT, proxied=True)
    except ExchangeFailed as error:
        if error.kind != "SSLCertVerificationError":
            return ""
    return scheme


def _with_environment(url: str) -> HiddenUrl:
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            raise ConfigError(
                f"{url} names the environment variable {name}, which is "
                "not set. Export it where the tasks run.",
                setting="endpoint_url",
            )
    return HiddenUrl(_VARIABLE.sub(lambda name: os.environ[name[1]].strip(), url), url)


Replicas = list[InferenceServer]
# A signal handler may close the servers while its thread holds the lock.
_lock = threading.RLock()
_warm: dict[str, tuple[str, Replicas]] = {}
"""Hash of ``server_settings`` and servers, by the model's name."""
_of_parents: list[object] = []  # Python warns of a collected running process


def _forget() -> None:
    global _lock
    _lock = threading.RLock()
    _of_parents.extend(_warm.values())
    _warm.clear()


os.register_at_fork(after_in_child=_forget)


@cache
def _end_with_process(pid: int) -> None:
    atexit.register(close_warm_servers)
    # Processes of multiprocessing end without atexit.
    for name in ("multiprocessing", "multiprocess"):
        module = sys.modules.get(name)
        util = sys.modules.get(f"{name}.util")
        if module is not None and util is not None and module.parent_process() is not None:
            util.Finalize(None, close_warm_servers, exitpriority=0)


def server_settings(config: InferenceConfig, gpus: Sequence[int]) -> str:
    """Hashes everything that the servers of a rank depend on, except the content of files.

    Args:
        gpus: number of GPUs of each earlier model; the GPUs are divided in this order.
    """
    # Any port, but always the same.
    command = config.engine.launch(config, 1, Secret(""))
    parts = (
        command.argv,
        config.replicas,
        config.server_stop_timeout_sec,
        str(Path.cwd()),
        [config.gpus, *gpus],
        sorted(command.environment(os.environ).items()),
    )
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _keep(settings: str, servers: Replicas) -> bool:
    model = servers[0].config.name
    with _lock:
        if model in _warm or not any(server.is_running for server in servers):
            return False
        _warm[model] = settings, servers
        _end_with_process(os.getpid())
    return True


@contextmanager
def one_rank(shutdown: Shutdown) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close_warm_servers()
        raise
    if shutdown.is_requested:
        close_warm_servers()


def close_warm_servers() -> None:
    """Stops the servers that this process keeps for its next rank, and waits for their end.

    Call this before ``os._exit``, or before other work after the last rank. Any thread may call it
    at any time.
    """
    _stop([server for _, servers in _take_all().values() for server in servers])


def _stop(servers: Replicas) -> None:
    for server in servers:
        server.request_stop()
    for server in servers:
        server.stop_blocking()
        server.lease.close()


def _take_all() -> dict[str, tuple[str, Replicas]]:
    with _lock:
        warm = dict(_warm)
        _warm.clear()
        return warm


class RankModels:
    """Provides a rank's models with the servers of the rank before, or leases for new servers.

    All models are served together: ranks that each hold some GPUs would wait for each other.

    Args:
        keeps: whether servers may come from the rank before, and stay for the next rank.
    """

    def __init__(self, configs: Iterable[InferenceConfig], keeps: bool) -> None:
        self._keeps = keeps
        self._configs = [config for config in configs if config.server_type != "endpoint"]
        self._lock = asyncio.Lock()
        self._settings: dict[str, str | None] = {}
        self._warm: dict[str, Replicas] = {}
        self._leases: dict[str, list[GpuLease]] | None = None

    async def get(self, config: InferenceConfig) -> tuple[Replicas, list[GpuLease]]:
        """Returns warm servers, or leases for new servers. The caller must close them."""
        async with self._lock:
            if self._leases is None:
                self._leases = await self._find()
        return self._warm.pop(config.name, []), self._leases.pop(config.name, [])

    def keep(self, servers: Replicas) -> bool:
        settings = self._settings[servers[0].config.name]
        return settings is not None and _keep(settings, servers)

    def close(self) -> None:
        for servers in self._warm.values():
            if not self.keep(servers):
                _stop(servers)
        for lease in chain(*(self._leases or {}).values()):
            lease.close()

    async def _find(self) -> dict[str, list[GpuLease]]:
        for config in self._configs:
            self._settings[config.name] = await in_own_thread(self._settings_of, config)
        unfit: Replicas = []
        for name, (settings, servers) in _take_all().items():
            if settings == self._settings.get(name):
                self._warm[name] = servers
            else:
                unfit += servers
        await in_own_thread(_stop, unfit)
        return await lease_gpus(self._configs, self._warm)

    def _settings_of(self, config: InferenceConfig) -> str | None:
        if NodeGroup.from_environment().count > 1 or not config.reuse_servers or not self._keeps:
            return None
        # Without locks a model's GPUs depend on the models before it.
        before = takewhile(lambda model: model is not config, self._configs)
        return server_settings(config, [model.gpus_each * model.replicas for model in before])


# All times are seconds.
_PROBE_INTERVAL = 5.0
_PROBE_TIMEOUT = 10.0
_PROBE_PAUSE = 0.3
_DRAIN_MARGIN = 5.0
_RESTART_WINDOW_SECONDS = 3600.0  # for ``server_max_restarts``
_LONG_AGO = -1.0


@dataclass(eq=False, repr=False)
class ServerSupervisor:
    """Keeps one server running: starts it, watches it, and restarts it when it dies or hangs.

    A server counts as dead when

    - its process ends;
    - its health address answers 5xx or refuses connections. The address is probed after failures
      that may be the server's fault, and every few seconds while requests are in flight: vLLM's
      HTTP process may outlive its engine;
    - it has requests, and for ``hang_timeout`` seconds (``hang_after``, once it has answered) it
      answered none and counted no tokens.

    It may be restarted ``server_max_restarts`` times within an hour, apart from deaths that are
    attributed to a request.
    """

    server: InferenceServer
    model_servers: ModelServers
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self.target = self.model_servers.router.add(self.probe)
        self.restarts = 0
        self.config = self.model_servers.config
        self._name = (
            f"{self.config.log_prefix}Server {self.server.replica} of task {self.server.rank}"
        )
        self._death = ServerDeath("")
        self._death_cause: asyncio.Future[str]
        self._recent_restarts = self.server.restarted_at
        self._probing: asyncio.Task[None] | None = None
        self._probed_since = _LONG_AGO
        self._watching = False
        self._longest = 0.0

    async def start(self) -> None:
        if await self.server.take_over():
            self._tell("reused")
        else:
            self._tell("restart" if self.restarts else "start")
            await self.server.start()
            self._tell("ready")
            if self.server.may_continue_answers:
                self.server.continuation = await find_continuation(
                    self.config,
                    HiddenUrl(self.server.url),
                    self.server.api_key,
                    self.config.model_name_or_path,
                )
        self._death_cause = asyncio.get_running_loop().create_future()
        if self.config.half_answers is not False:
            self.model_servers.set_continuation(self.target, self.server.continuation)
        url = HiddenUrl(self.server.url)
        if self.config.engine.metrics is not None:
            ranks = await count_ranks(url, self.server.api_key, self.probe)
            self.model_servers.router.divide(self.target, ranks)
        limit = FIRST_LIMIT
        if self.config.follows_metrics:
            # Before the first request: else servers would get requests whose prefix others have.
            self.target.url = url
            self.target.api_key = self.server.api_key
            limit = await first_limit(self.target, self.config.engine.metrics)
        self.model_servers.mark_up(self.target, url, self.server.api_key, limit)

    def _tell(self, event: str, cause: str = "") -> None:
        url = self.server.url if event in ("ready", "reused") else None
        self.model_servers.report_event(
            event, self.config.server_name(self.server.replica), url, cause.partition("\n")[0]
        )

    async def stop(self) -> None:
        await self.model_servers.disconnect(self.target)
        with self.shutdown.closing():
            # The server has no time to stop by itself.
            is_late = self.shutdown.is_fast or self.shutdown.late
            await (self.server.kill() if is_late else self.server.stop())

    async def supervise(self) -> NoReturn:
        while True:
            cause = await self._until_death()
            self._tell("death", cause)
            await self.model_servers.disconnect(self.target)
            if self.shutdown.is_stopping:
                # A cluster also signals the server.
                logger.info(f"{self._name} has ended. It is not restarted, because the run ends.")
                await wait_until_cancelled()
            logger.warning(
                f"{self._name} is given up: {cause}\n{self._death.in_flight} requests are sent "
                "again."
            )
            await self.server.kill()
            await self._restart(cause)

    async def _until_death(self) -> str:
        self._watching = True
        self._exit_code: int | None = None
        watchers = [self._watch_process(), self._watch_health(), self._watch_progress()]
        if self.config.follows_metrics:
            router = self.model_servers.router
            names = self.config.engine.metrics
            watchers.append(adapt_admission(self._name, self.target, router, names))
        tasks = [asyncio.create_task(watcher) for watcher in watchers]
        waits: list[asyncio.Future[str] | asyncio.Task[None]] = [self._death_cause, *tasks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises only if a watcher has a bug
            cause = await self._death_cause
        finally:
            await end_tasks(*tasks, *([self._probing] if self._probing else []))
        return await self.server.report(cause, self._exit_code)

    def mark_dead(self, cause: str) -> None:
        if not self._death_cause.done():
            self._death = self.model_servers.router.mark_dead(self.target, cause)
            self._death_cause.set_result(cause)

    async def _restart(self, cause: str) -> None:
        while True:
            await asyncio.sleep(self._next_backoff(cause))
            if self.shutdown.is_stopping:
                await wait_until_cancelled()
            self.restarts += 1
            try:
                await self.start()
            except ServerStartFailed as error:
                cause = str(error)
                logger.warning(f"{self._name} could not be restarted: {cause}")
            else:
                number = len(self._recent_restarts)
                logger.info(
                    f"{self._name} is back (restart {number} of {self.config.server_max_restarts})."
                )
                return

    def _next_backoff(self, cause: str) -> float:
        now = time.monotonic()
        allowed = self.config.server_max_restarts
        while self._recent_restarts and self._recent_restarts[0] < now - _RESTART_WINDOW_SECONDS:
            self._recent_restarts.popleft()
        if self._death.attributed:
            self._death = ServerDeath("")
            return retrying.RESTART.first
        if len(self._recent_restarts) >= allowed:
            raise ServerDied(
                f"{self._name} was restarted {len(self._recent_restarts)} times within "
                f"{_RESTART_WINDOW_SECONDS:g} s, and died again (server_max_restarts={allowed}). "
                f"Last cause: {cause}"
            )
        self._recent_restarts.append(now)
        return retrying.RESTART.wait(len(self._recent_restarts))

    async def _watch_process(self) -> None:
        self._exit_code = await self.server.watch()
        self.mark_dead(f"died with exit code {self._exit_code}")

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL)
            if self.target.attempts:
                await self.probe(_LONG_AGO, False)

    async def _watch_progress(self) -> None:
        interval = min(self.config.hang_timeout / 4, 30.0)
        last: float | None = None
        while True:
            await asyncio.sleep(interval)
            last = await self._check_progress(last, min(interval, 5.0))

    async def _check_progress(self, last: float | None, seconds: float) -> float | None:
        tokens = None
        if self.target.attempts:
            all_metrics = await read_metrics(self.target, self.config.engine.metrics, seconds)
            if all_metrics:
                tokens = sum(metrics.tokens for metrics in all_metrics)
        quiet = time.monotonic() - self.target.alive_at
        if tokens is not None and last is not None and tokens != last:
            self._longest = max(self._longest, quiet)
            quiet = 0.0
            self.target.mark_alive()
        in_flight = len(self.target.attempts)
        timeout = self.config.hang_timeout
        # Without token counts a long answer looks like a hang; a user's setting is obeyed.
        is_usual = timeout == InferenceConfig.hang_timeout
        if is_usual and tokens and self.target.accepted_at:
            timeout = min(timeout, hang_after(self._longest))
        if in_flight and quiet >= timeout:
            self.mark_dead(
                f"hangs: it has {in_flight} requests, and answered none and counted no token for "
                f"{timeout:g} s (hang_timeout={self.config.hang_timeout:g})"
            )
        return tokens

    async def probe(self, since: float, until_proof: bool) -> None:
        """Returns when the server is known to be alive. Aborts attempts if it is dead.

        A vLLM that received SIGTERM answers 500 to new requests, and reports itself healthy. So the
        proof of health is an answer to an attempt that started after ``since``, or a server that
        still runs after ``server_drain_sec``.
        """
        if not self._watching or self._death_cause.done():
            return
        if self._probing is None or self._probing.done():
            self._probed_since = _LONG_AGO
            self._probing = asyncio.create_task(self._run_probes())
        self._probed_since = max(self._probed_since, since)
        await asyncio.wait([self._probing])
        if self.shutdown.is_stopping:
            return  # nothing is sent again
        deadline = time.monotonic() + self.config.server_drain_sec + _DRAIN_MARGIN
        while until_proof and self.target.accepted_at <= since and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_PROBE_PAUSE)

    async def _run_probes(self) -> None:
        problem: str | None = None
        for number in range(3):
            if number:
                await asyncio.sleep(_PROBE_PAUSE)
            problem = await self.server.problem(_PROBE_TIMEOUT)
            if problem is None:
                return
        # A server too busy to answer a probe is dead only if it has answered no request since the
        # youngest failed attempt started.
        if problem != NO_ANSWER or self.target.alive_at <= self._probed_since:
            self.mark_dead(
                f"is dead, although its process is running: its health address {problem}"
            )


@asynccontextmanager
async def launched_servers(
    rank: int, model_servers: ModelServers, shutdown: Shutdown, models: RankModels
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Runs the servers of a model in this block. After a good end, they may stay for the next rank.

    Yields an async function that raises ServerDied once no server remains, and none may be
    restarted.
    """
    config = model_servers.config
    async with AsyncExitStack() as stack:
        nodes = NodeGroup.from_environment()
        on_launch = None
        if nodes.count > 1:
            head = await stack.enter_async_context(HeadNode(config))
            on_launch = head.start_workers
        servers, leases = await models.get(config)
        for server in servers:
            server.config = config
            server.rank = rank
        servers = servers or [
            InferenceServer(config, rank, index, lease, nodes, on_launch)
            for index, lease in enumerate(leases)
        ]
        supervisors = []
        ends_well = False
        try:
            for server in servers:
                supervisors.append(ServerSupervisor(server, model_servers, shutdown))
            await _run_all(supervisor.start() for supervisor in supervisors)
            supervision = asyncio.create_task(_supervise(supervisors, model_servers.router))
            try:
                yield lambda: asyncio.shield(supervision)
                ends_well = True
            finally:
                await end_tasks(supervision)
        finally:
            for supervisor in supervisors:
                model_servers.router.mark_dead(supervisor.target, "the run ends")
            if ends_well and models.keep(servers):
                await asyncio.gather(
                    *(model_servers.disconnect(supervisor.target) for supervisor in supervisors)
                )
            else:
                try:
                    await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
                finally:
                    for server in servers:
                        server.lease.close()


async def _supervise(supervisors: list[ServerSupervisor], router: Router) -> None:
    running = len(supervisors)

    async def supervise(supervisor: ServerSupervisor) -> None:
        nonlocal running
        try:
            await supervisor.supervise()
        except ServerDied as error:
            running -= 1
            if not running:
                raise
            logger.error(
                f"{error}\nThe run continues without this server, with {running} of "
                f"{len(supervisors)}."
            )

    try:
        await _run_all(map(supervise, supervisors))
    except ServerDied as error:
        router.fail(str(error))
        raise


async def _run_all(work: Iterable[Awaitable[None]]) -> None:
    """Raises the first error, without an exception group, and cancels the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


Watch = Callable[[], Awaitable[None]]
"""A function that raises when no server remains."""


def check_servers(config: InferenceConfig) -> None:
    """Checks the model file, the packages and the key. Starts and sends nothing.

    Raises:
        ConfigError, ServerStartFailed: something is missing; the message names it.
    """
    try:
        if config.server_type == "endpoint":
            endpoints_of(config)
        else:
            config.engine.launch(config, 1, Secret(""))
    except CkptError as error:
        named(error, config.name)
        raise


@asynccontextmanager
async def _connected(servers: ModelServers, is_new: bool) -> AsyncIterator[Watch]:
    config = servers.config
    endpoints = await ready_endpoints(config, servers.outage, is_new)
    if config.endpoints is None:
        all_ranks = await asyncio.gather(
            *(count_ranks(endpoint.url, endpoint.api_key, None) for endpoint in endpoints)
        )
        with_ranks = zip(endpoints, all_ranks, strict=True)
        endpoints = [endpoint._replace(ranks=ranks) for endpoint, ranks in with_ranks]
    servers.add_endpoints(endpoints)
    if config.half_answers is True:
        await asyncio.gather(
            *(_test_continuation(servers, target) for target in servers.router.servers)
        )
    if config.endpoints is not None:
        open_ones = {endpoint.name for endpoint in endpoints}
        for name in config.endpoints_by_name.keys() - open_ones:
            servers.router.senders[0].count_error("left out at the start", name)
    for index, endpoint in enumerate(endpoints):
        servers.report_event("ready", config.server_name(index), str(endpoint.url), "")
    following = []
    if config.max_concurrent_generations == "auto":
        for target in servers.router.servers:
            following.append(asyncio.create_task(follow_endpoint(target, servers.router)))
    try:
        yield wait_until_cancelled  # failures show in the answers
    finally:
        await end_tasks(*following)


async def _test_continuation(servers: ModelServers, target: Target) -> None:
    assert target.url is not None
    continuation = await find_continuation(servers.config, target.url, target.api_key, target.model)
    servers.set_continuation(target, continuation)


@dataclass
class _Running:
    servers: ModelServers
    ready: asyncio.Future[Watch]
    serving: asyncio.Task[None]


class ServerHost:
    """Starts a model's servers for the first rank, and stops all at its end.

    Attributes:
        media: limit on the bytes of media of all documents in work.
    """

    def __init__(
        self, shutdown: Shutdown, configs: Iterable[InferenceConfig], keeps: bool = False
    ) -> None:
        self.media = ByteBudget(media_bytes())
        self._shutdown = shutdown
        self._models = RankModels(configs, keeps)
        self._ends_well = asyncio.Event()
        self._running: dict[str, _Running] = {}
        # Log lines of servers belong to all ranks.
        self._context = contextvars.copy_context()

    @property
    def has_room(self) -> bool:
        routers = [running.servers.router for running in self._running.values()]
        return routers != [] and all(
            router.in_flight < router.capacity and not router.waiting for router in routers
        )

    @asynccontextmanager
    async def lend(
        self,
        config: InferenceConfig,
        rank: int,
        sender: Sender,
        is_new: bool = False,
    ) -> AsyncIterator[tuple[CompletionClient, Awaitable[Watch]]]:
        """Yields a client of one model's servers, and an awaitable of their watch.

        Args:
            is_new: whether no request of the run has been answered yet.

        Raises:
            ServerStartFailed, ServerRefused, ConfigError: the servers cannot start, or no endpoint
                answers.
        """
        running = self._running.get(config.name)
        if running is None:
            servers = self._context.copy().run(ModelServers, config)
            ready = asyncio.get_running_loop().create_future()
            # The servers start after this rank has joined below.
            serve = self._serve(servers, ready, rank, is_new)
            serving = asyncio.create_task(serve, context=self._context.copy())
            running = self._running[config.name] = _Running(servers, ready, serving)
        client = CompletionClient(running.servers, sender)
        try:
            if running.ready.done() and sender.on_server is not None:  # others have seen the start
                event = "reused"
                if config.server_type == "endpoint":
                    event = "ready"
                for index, target in enumerate(running.servers.router.servers):
                    if target.up:
                        sender.on_server(event, config.server_name(index), str(target.url), "")
            yield client, asyncio.shield(running.ready)
        finally:
            client.leave()

    async def _serve(
        self, servers: ModelServers, ready: asyncio.Future[Watch], rank: int, is_new: bool
    ) -> None:
        config = servers.config
        logger.info(f"{config.log_prefix}Requests: {config.places} (max_concurrent_generations).")
        if config.server_type == "endpoint":
            running = _connected(servers, is_new)
        else:
            running = launched_servers(rank, servers, self._shutdown, self._models)
        try:
            async with running as watch:
                ready.set_result(watch)
                await self._ends_well.wait()
        except Exception as error:
            if ready.done():
                raise
            # Later ranks also fail: the leases of these servers are gone.
            ready.set_exception(error)
        finally:
            await servers.close()

    async def close(self, ends_well: bool = False) -> None:
        if ends_well:
            self._ends_well.set()
        for running in self._running.values():
            if not ends_well or not running.ready.done():
                running.serving.cancel()
        await asyncio.gather(
            *(running.serving for running in self._running.values()), return_exceptions=True
        )
        self._models.close()
