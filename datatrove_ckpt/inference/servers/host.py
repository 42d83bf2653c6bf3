"""The servers of a process, launched or external, for one rank or for several ranks at once.

A rank calls ``ServerHost.lend``. Its servers may be taken over from the rank before (see
``warm.py``). Rollouts do not notice a server that is down: its requests go to the other servers, or
wait. External servers are only checked, before the first request: they must answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import orjson
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.memory import ByteBudget, media_bytes
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import ENGINES, Nodes
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    ServerDied,
    ServerRefused,
    ServerStartFailed,
    named,
)
from datatrove_ckpt.inference.client import routing
from datatrove_ckpt.inference.client.client import (
    CompletionClient,
    EndpointAccess,
    ModelServers,
    Outage,
    hang_after,
)
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get, key_hint
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers.multi_node import HeadNode
from datatrove_ckpt.inference.servers.server import (
    NO_ANSWER,
    InferenceServer,
    Metrics,
    adapt_admission,
    read_metrics,
    read_page,
    request_health,
)
from datatrove_ckpt.inference.servers.warm import RankModels
from datatrove_ckpt.process.screen import has_terminal
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled

_OTHER_SCHEME = ("ProtocolError", "SSLError", "ResetError")  # how these exchanges fail
NEW_RUN_SECONDS = 30.0
"""How long a new run at a terminal waits where nothing listens, at the usual patience."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class ExternalServers:
    """The endpoints of a config.

    Args:
        config: of its ready window, at most ``server_patience_seconds`` count.
        is_new: no request of the run has been answered yet.

    Attributes:
        outage: since when ``start`` has had no answer.

    Raises:
        ConfigError: an endpoint_url is not a URL, or the key is not set.
    """

    def __init__(self, config: InferenceConfig, is_new: bool = False) -> None:
        self.config = config
        self._is_new = is_new
        self.outage = Outage(ready_window(config), time.monotonic, config.name)
        self.endpoints = [
            EndpointAccess(name, one, _with_environment(one.url), config.endpoint_api_key(one))
            for name, one in config.endpoints_by_name.items()
        ]

    async def ask(self) -> list[EndpointAnswer]:
        asked = (_ask(one.url, one.api_key) for one in self.endpoints)
        return list(await asyncio.gather(*asked))

    async def start(self) -> None:
        """Waits until one of the URLs answers GET /v1/models, or /models below its own path.

        Every status except 401, 403, 429 and 5xx counts as an answer: some gateways do not list
        models. An endpoint gets no requests before it is known whether its API is below /v1.

        Where nothing listens, it may be a wrong port: at a terminal a new run waits only for
        ``NEW_RUN_SECONDS``. A job may start beside its server, which loads a model for minutes.

        Raises:
            ServerRefused: see ``EndpointAnswer.refused``; of all of them.
            ServerStartFailed: no server answered in time.
        """
        window = self.outage.patience
        started = time.monotonic()
        failures = 0
        while True:
            answers = await self.ask()
            causes = self._causes(answers)
            if len(causes) < len(answers):
                self.outage.answered()
                if causes:
                    logger.warning(
                        f"{self.config.said}{len(causes)} of {len(answers)} endpoints do not "
                        f"answer: {'; '.join(causes)}. Those that refuse get no requests, nor do "
                        "those whose path has no version: their API may be there or below /v1."
                    )
                asked = zip(self.endpoints, answers, strict=True)
                self.endpoints = [one._replace(url=got.api) for one, got in asked if got.api]
                return
            failures = failures + 1
            advice = ""
            self.outage.patience = window
            if self._may_be_wrong and all(answer.is_absent for answer in answers):
                self.outage.patience = min(window, NEW_RUN_SECONDS)
                advice = " To wait for a server that starts later: server_patience_seconds: 1800."
            self.outage.begun(": HTTP " not in causes[0], started)
            delay = retrying.ENDPOINT.wait(failures)
            if delay > self.outage.left():
                each = "".join(f"  {cause}\n" for cause in causes)
                raise ServerStartFailed(
                    f"No endpoint was ready within {self.outage.patience:g} s:\n{each}Check that "
                    "the server runs, that this machine can reach it, and its URL. One that "
                    f"answers 429 limits requests: start later.{advice}"
                )
            self.outage.show(causes[0])
            await asyncio.sleep(delay)

    async def follow(self, target: routing.Target, router: routing.Router) -> None:
        """Adapts a target's limit to its engine, if /metrics has the names of an engine.

        Some names come with the first request. So it is looked for until an answer has come.
        """
        assert target.url is not None
        url = target.url.api("/metrics")
        looks = 0
        while True:
            is_last = target.answers > 0
            page = await read_page(url, target.api_key, _PROBE_TIMEOUT, proxied=True)
            for engine in ENGINES.values():
                names = engine.metrics
                if names is not None and names.are_in(page):
                    target.pace = None
                    read = partial(read_metrics, url, target.api_key, names, proxied=True)
                    await adapt_admission(str(target.url), target, router, read)
            if is_last:
                return
            looks += 1
            await asyncio.sleep(retrying.RESTART.wait(looks))

    @property
    def _may_be_wrong(self) -> bool:
        is_usual = self.config.server_patience_seconds == InferenceConfig.server_patience_seconds
        return self._is_new and is_usual and has_terminal()

    def _causes(self, answers: list[EndpointAnswer]) -> list[str]:
        """Returns what is wrong with the endpoints that do not answer.

        Raises:
            ServerRefused: see ``EndpointAnswer.refused``.
        """
        if all(answer.refused for answer in answers):
            raise ServerRefused(f"{answers[0].url} {answers[0].cause}.")
        return [
            f"{one.url}: {answer.cause}"
            for one, answer in zip(self.endpoints, answers, strict=True)
            if answer.cause
        ]


def ready_window(config: InferenceConfig) -> float:
    return min(
        config.server_patience_seconds,
        config.server_ready_max_attempts * config.server_ready_delay_sec,
    )


@dataclass(frozen=True)
class EndpointAnswer:
    """The answer of an endpoint to GET /v1/models.

    Attributes:
        url: without credentials and query string.
        cause: why it cannot be used; "" if it can.
        refused: it refuses the key, or speaks http where the URL has https, or the other way round.
        api: the URL, or its /v1; None: not known yet.
        models: the listed names, each with its ``max_model_len``, if the server lists it; None: no
            list, as with some gateways.
        is_absent: the connection was refused, so nothing listens there.
    """

    url: str
    cause: str = ""
    refused: bool = False
    api: HiddenUrl | None = None
    models: dict[str, object] | None = None
    is_absent: bool = False


async def _ask(url: HiddenUrl, api_key: Secret | None) -> EndpointAnswer:
    """Requests the URL, and then its /v1 if that may be the API."""
    target = url.api("models")
    below = url.api("/v1")
    api = None if url.may_lack_version else url
    try:
        response = await get(target, api_key, _PROBE_TIMEOUT, proxied=True)
        if api is None and response.status not in (200, *retrying.SERVER.retried):
            found = await get(below.api("models"), api_key, _PROBE_TIMEOUT, proxied=True)
            if found.status in (200, *retrying.SERVER.retried):
                response = found
                url = below
                target = below.api("models")
    except ExchangeFailed as error:
        if error.kind.endswith(_OTHER_SCHEME) and (scheme := await _other_scheme(target)):
            cause = f"speaks {scheme}: correct its URL"
            return EndpointAnswer(str(target), cause, True)
        is_absent = error.kind == ConnectionRefusedError.__name__
        return EndpointAnswer(str(target), str(error), api=api, is_absent=is_absent)
    status = response.status
    if status in retrying.SERVER.retried:  # another answer may come later
        cause = f"HTTP {status}{', which means too many requests' if status == 429 else ''}"
        return EndpointAnswer(str(target), cause, api=api)
    if status in (401, 403):
        return EndpointAnswer(str(target), f"{key_hint(url, api_key)} (HTTP {status})", True)
    return EndpointAnswer(
        str(target), api=url, models=_listed(response.body) if status == 200 else None
    )


async def _other_scheme(target: HiddenUrl) -> str:
    """Returns http for https, and https for http, if the server speaks it; else ""."""
    scheme = "http" if target.reveal().scheme == "https" else "https"
    url = HiddenUrl(target.reveal().with_scheme(scheme).with_user(None).with_query(None))
    try:
        await get(url, None, _PROBE_TIMEOUT, proxied=True)
    except ExchangeFailed as error:
        if error.kind != "SSLCertVerificationError":
            return ""
    return scheme


def _listed(body: bytes) -> dict[str, object] | None:
    try:
        data = orjson.loads(memoryview(body))["data"]
        found = {
            str(one["id"]): one.get("max_model_len")
            for one in data
            if isinstance(one, dict) and "id" in one
        }
        if isinstance(data, list):
            return found
        return None
    except (ValueError, TypeError, KeyError):
        return None


def _with_environment(url: str) -> HiddenUrl:
    """Returns the URL with each ``${NAME}`` replaced by that environment variable, stripped.

    Raises:
        ConfigError: a variable is not set, or this is no URL.
    """
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            raise ConfigError(
                f"{url} names the environment variable {name}, which is "
                "not set. Export it where the tasks run.",
                setting="endpoint_url",
            )
    return HiddenUrl(_VARIABLE.sub(lambda name: os.environ[name[1]].strip(), url), url)


Watch = Callable[[], Awaitable[None]]
"""Raises when no server is left."""


def check_servers(config: InferenceConfig) -> None:
    """Checks that the model file, the packages and the key are here. Starts and sends nothing.

    Raises:
        ConfigError, ServerStartFailed: what is missing, and what to do.
    """
    try:
        if config.server_type == "endpoint":
            ExternalServers(config)
        else:
            config.engine.launch(config, 1, Secret(""))
    except CkptError as error:
        named(error, config.name)
        raise


@asynccontextmanager
async def running(
    servers: ModelServers,
    rank: int,
    shutdown: Shutdown,
    models: RankModels,
    on_outage: Callable[[Outage], None],
    is_new: bool,
) -> AsyncIterator[Watch]:
    """Keeps the servers ready for requests in this block. See ``ServerHost.lend``."""
    config = servers.config
    logger.info(f"{config.said}Requests: {config.places} (max_concurrent_generations).")
    following: list[asyncio.Task[None]] = []
    try:
        if config.server_type == "endpoint":
            endpoints = ExternalServers(config, is_new)
            on_outage(endpoints.outage)
            await endpoints.start()
            servers.add_endpoints(endpoints.endpoints)
            if config.endpoints is not None:
                open_ones = {one.name for one in endpoints.endpoints}
                for name in config.endpoints_by_name.keys() - open_ones:
                    servers.router.senders[0].count_error("left out at the start", name)
            for index, one in enumerate(endpoints.endpoints):
                servers.tell("ready", config.server_name(index), str(one.url), "")
            if config.max_concurrent_generations == "auto":
                router = servers.router
                following += [
                    asyncio.create_task(endpoints.follow(target, router))
                    for target in router.targets
                ]
            yield wait_until_cancelled  # a failure of these servers shows in their answers
        else:
            async with ServerPool(config, rank, servers, shutdown, models).running() as watch:
                yield watch
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await servers.close()


@dataclass
class _Running:
    servers: ModelServers
    ready: asyncio.Future[Watch]
    serving: asyncio.Task[None] = field(init=False)


class ServerHost:
    """Starts the servers of a model when the first rank needs them, and stops all at its end.

    Args:
        shutdown: of the ranks.
        keeps: it has one rank, whose servers may stay for the next rank: see ``warm.py``.

    Attributes:
        media: limit on the bytes of media of all documents in work.
    """

    def __init__(self, shutdown: Shutdown, keeps: bool = False) -> None:
        self.media = ByteBudget(media_bytes())
        self._shutdown = shutdown
        self._keeps = keeps
        self._ends_well = asyncio.Event()
        self._running: dict[str, _Running] = {}
        self._models: RankModels | None = None
        # Servers outlive the rank that starts them: log lines belong to all ranks.
        self._context = contextvars.copy_context()

    @property
    def has_room(self) -> bool:
        routers = [one.servers.router for one in self._running.values()]
        return routers != [] and all(
            one.in_flight < one.capacity and not one.waiting for one in routers
        )

    @asynccontextmanager
    async def lend(
        self,
        config: InferenceConfig,
        configs: Sequence[InferenceConfig],
        rank: int,
        sender: routing.Sender,
        on_outage: Callable[[Outage], None],
        is_new: bool = False,
    ) -> AsyncIterator[tuple[CompletionClient, Watch]]:
        """Returns a rank's client of one model's servers, once they are ready.

        Args:
            configs: of all models of the rank.
            on_outage: gets the outage clock of endpoints before the client is there.
            is_new: no request of the run has been answered yet.

        Raises:
            ServerStartFailed, ServerRefused, ConfigError: see ``InferenceServer.start`` and
                ``ExternalServers.start``.
        """
        one = self._running.get(config.name)
        if one is None:
            model_servers = self._context.copy().run(ModelServers, config)
            one = _Running(model_servers, asyncio.get_running_loop().create_future())
            self._running[config.name] = one
            # It begins once this rank has joined below.
            serve = self._serve(one, configs, rank, on_outage, is_new)
            one.serving = asyncio.create_task(serve, context=self._context.copy())
        was_ready = one.ready.done()
        client = CompletionClient(one.servers, sender)
        try:
            watch = await asyncio.shield(one.ready)
            if was_ready and sender.on_server is not None:  # others have seen the start
                if config.server_type == "endpoint":
                    what = "ready"
                else:
                    what = "reused"
                for index, target in enumerate(one.servers.router.targets):
                    if target.up:
                        sender.on_server(what, config.server_name(index), str(target.url), "")
            yield client, watch
        finally:
            client.leave()

    async def _serve(
        self,
        one: _Running,
        configs: Sequence[InferenceConfig],
        rank: int,
        on_outage: Callable[[Outage], None],
        is_new: bool,
    ) -> None:
        if self._models is None:
            self._models = RankModels(configs, rank, self._keeps)
        kept = running(one.servers, rank, self._shutdown, self._models, on_outage, is_new)
        try:
            async with kept as watch:
                one.ready.set_result(watch)
                await self._ends_well.wait()
        except Exception as error:
            if one.ready.done():
                raise
            # Later ranks fail, too: these servers' leases are gone.
            one.ready.set_exception(error)

    async def close(self, ends_well: bool = False) -> None:
        if ends_well:
            self._ends_well.set()
        for one in self._running.values():
            if not ends_well or not one.ready.done():
                one.serving.cancel()
        await asyncio.gather(
            *(one.serving for one in self._running.values()), return_exceptions=True
        )
        if self._models is not None:
            self._models.close()


@dataclass(eq=False, repr=False)
class ServerPool:
    config: InferenceConfig
    rank: int
    model_servers: ModelServers
    shutdown: Shutdown
    models: RankModels
    supervisors: list[ServerSupervisor] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Runs servers in this block. After a good end, they may stay for the next rank.

        Yields a function to await: it raises ServerDied once none is left, and none may be
        restarted.
        """
        async with AsyncExitStack() as stack:
            nodes = Nodes.from_environment()
            if nodes.count > 1:
                head = await stack.enter_async_context(HeadNode(self.config))
            servers, leases = await self.models.get(self.config)
            servers = servers or [
                InferenceServer(self.config, self.rank, index, lease, nodes)
                for index, lease in enumerate(leases)
            ]
            if nodes.count > 1:
                servers[0].on_launch = head.start_workers
            ends_well = False
            try:
                for index, server in enumerate(servers):
                    supervisor = ServerSupervisor(
                        self.config, self.rank, index, server, self.model_servers, self.shutdown
                    )
                    self.supervisors.append(supervisor)
                await _run_all(supervisor.start() for supervisor in self.supervisors)
                supervision = asyncio.create_task(self._supervise())
                try:
                    yield lambda: asyncio.shield(supervision)
                    ends_well = True
                finally:
                    supervision.cancel()
                    await asyncio.gather(supervision, return_exceptions=True)
            finally:
                await self._end(servers, ends_well)

    async def _supervise(self) -> None:
        left = len(self.supervisors)

        async def supervise(supervisor: ServerSupervisor) -> None:
            nonlocal left
            try:
                await supervisor.supervise()
            except ServerDied as error:
                left -= 1
                if not left:
                    raise
                logger.error(
                    f"{error}\nThe run goes on without this server, with {left} of "
                    f"{len(self.supervisors)}."
                )

        try:
            await _run_all(supervise(supervisor) for supervisor in self.supervisors)
        except ServerDied as error:
            self.model_servers.router.fail(str(error))
            raise

    async def _end(self, servers: list[InferenceServer], ends_well: bool) -> None:
        for supervisor in self.supervisors:
            self.model_servers.router.mark_dead(supervisor.target, "the run ends")
        if ends_well and self.models.keep(self.config, servers):
            await asyncio.gather(
                *(
                    self.model_servers.disconnect(supervisor.target)
                    for supervisor in self.supervisors
                )
            )
            return
        try:
            await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        finally:
            for server in servers:
                server.lease.close()


async def _run_all(work: Iterable[Awaitable[None]]) -> None:
    """Raises the first error, without an exception group, and cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# All times are seconds.
_PROBE_INTERVAL = 5.0
_PROBE_TIMEOUT = 10.0
_PROBES = 3  # in a row
_PROBE_PAUSE = 0.3
# Added to the time for requests in flight after a SIGTERM.
_DRAIN_MARGIN = 5.0
_RESTART_WINDOW_SECONDS = 3600.0  # for ``server_max_restarts``
_LONG_AGO = -1.0
_PROGRESS_CHECKS_PER_HANG = 4
_MAX_PROGRESS_INTERVAL = 30.0
_METRICS_TIMEOUT = 5.0


@dataclass(eq=False, repr=False)
class ServerSupervisor:
    """Keeps one server running: starts it, watches it, and restarts it when it dies or hangs.

    Requests that were in flight are then sent again. A server counts as dead when

    - its process ends;
    - its health address answers 5xx or refuses connections, probed after failures that may be the
      server's fault, and every few seconds while requests are in flight: vLLM's HTTP process may
      outlive its engine;
    - it has requests, and for ``hang_timeout`` seconds it answered none and counted no tokens, or
      for ``hang_after``, once it has answered.

    It may be restarted ``server_max_restarts`` times within an hour, apart from deaths that are
    attributed to a request.

    Args:
        rank: the server may have been started for an earlier rank.
        index: number of the server among the rank's replicas.
        shutdown: the rank's: after a requested stop the server is not restarted.
    """

    config: InferenceConfig
    rank: int
    index: int
    server: InferenceServer
    model_servers: ModelServers
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self.target = self.model_servers.router.add(self.probe)
        self.restarts = 0
        self._name = f"{self.config.said}Server {self.index} of task {self.rank}"
        self._death = routing.Death("")
        self._death_cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recent_restarts = self.server.restarted_at
        self._probing: asyncio.Task[None] | None = None
        self._probed_since = _LONG_AGO
        self._watching = False
        self._longest = 0.0

    async def start(self) -> None:
        if await self.server.take_over(self.config, self.rank):
            self._tell("reused")
        else:
            self._tell("restart" if self.restarts else "start")
            await self.server.start()
            self._tell("ready")
        self._death_cause = asyncio.get_running_loop().create_future()
        self.model_servers.mark_up(self.target, HiddenUrl(self.server.url), self.server.api_key)

    def _tell(self, what: str, why: str = "") -> None:
        url = self.server.url if what in ("ready", "reused") else None
        self.model_servers.tell(
            what, self.config.server_name(self.index), url, why.partition("\n")[0]
        )

    async def stop(self) -> None:
        await self.model_servers.disconnect(self.target)
        with self.shutdown.closing():
            # It has no time to stop by itself.
            is_late = self.shutdown.is_fast or self.shutdown.late
            await (self.server.kill() if is_late else self.server.stop())

    async def supervise(self) -> NoReturn:
        """Raises ServerDied once the server may not be restarted again."""
        while True:
            cause = await self._until_death()
            self._tell("death", cause)
            await self.model_servers.disconnect(self.target)
            if self.shutdown.is_stopping:
                # A cluster signals the server, too, which may end before us.
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
            watchers.append(adapt_admission(self._name, self.target, router, self._metrics))
        tasks = [asyncio.create_task(watcher) for watcher in watchers]
        waits: list[asyncio.Future[str] | asyncio.Task[None]] = [self._death_cause, *tasks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises only if a watcher has a bug
            cause = await self._death_cause
        finally:
            started = [*tasks, *([self._probing] if self._probing else [])]
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
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
        """Raises ServerDied after too many restarts within the window."""
        now = time.monotonic()
        allowed = self.config.server_max_restarts
        while self._recent_restarts and self._recent_restarts[0] < now - _RESTART_WINDOW_SECONDS:
            self._recent_restarts.popleft()
        # The request is a dead letter now, so the next start should work.
        if self._death.attributed:
            self._death = routing.Death("")
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
        interval = min(self.config.hang_timeout / _PROGRESS_CHECKS_PER_HANG, _MAX_PROGRESS_INTERVAL)
        last: Metrics | None = None
        while True:
            await asyncio.sleep(interval)
            last = await self._check_progress(last, min(interval, _METRICS_TIMEOUT))

    async def _check_progress(self, last: Metrics | None, seconds: float) -> Metrics | None:
        """Marks the server dead if it hangs. Returns its metrics; None without any, or requests."""
        metrics = None
        if self.target.attempts:
            metrics = await self._metrics(seconds)
        quiet = time.monotonic() - self.target.alive_at
        if metrics is not None and last is not None and metrics.tokens != last.tokens:
            self._longest = max(self._longest, quiet)
            quiet = 0.0
            self.target.mark_alive()
        in_flight = len(self.target.attempts)
        timeout = self.config.hang_timeout
        # Without token counts a long answer looks like a hang; a user's setting is obeyed.
        is_usual = timeout == InferenceConfig.hang_timeout
        if is_usual and metrics is not None and metrics.tokens and self.target.accepted_at:
            timeout = min(timeout, hang_after(self._longest))
        if in_flight and quiet >= timeout:
            self.mark_dead(
                f"hangs: it has {in_flight} requests, and answered none and counted no token for "
                f"{timeout:g} s (hang_timeout={self.config.hang_timeout:g})"
            )
        return metrics

    async def _metrics(self, seconds: float) -> Metrics | None:
        server = self.server
        url = HiddenUrl(f"{server.url}/metrics")
        return await read_metrics(url, server.api_key, self.config.engine.metrics, seconds)

    async def probe(self, since: float, until_proof: bool) -> None:
        """Returns once the server is known to be alive. If it is dead, the waiting attempts are
        aborted.

        A vLLM that received SIGTERM answers 500 to new requests, and reports itself healthy. So the
        proof of health is an answer to an attempt that started after ``since``, or that the server
        still runs after the time that a SIGTERM leaves it.

        Args:
            since: when the failed attempt started.
            until_proof: wait for that proof.
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
        for number in range(_PROBES):
            if number:
                await asyncio.sleep(_PROBE_PAUSE)
            server = self.server
            problem = await request_health(
                server.url, server.api_key, self.config.engine, _PROBE_TIMEOUT
            )
            if problem is None:
                return
        # A server too busy to answer a probe is dead only if it has answered no request since the
        # youngest failed attempt started.
        if problem != NO_ANSWER or self.target.alive_at <= self._probed_since:
            self.mark_dead(
                f"is dead, although its process is running: its health address {problem}"
            )
