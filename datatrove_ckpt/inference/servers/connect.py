"""The servers of one rank: ``async with connect(config, rank) as (client, watch)``.

What launches servers is imported where servers are launched.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import HiddenDict, Key
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError, ConfigError, ServerRefused, ServerStartFailed, named
from datatrove_ckpt.errors.doors import written
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers, Outage, waiting
from datatrove_ckpt.inference.client.plain import Response
from datatrove_ckpt.inference.client.routing import OnServer, Sender
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get
from datatrove_ckpt.inference.client.urls import HiddenUrl, needs_proxy
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled

if TYPE_CHECKING:
    from datatrove_ckpt.inference.servers.warm import RankModels

Watch = Callable[[], Awaitable[None]]


def check_servers(config: InferenceConfig) -> None:
    """Checks that the model file, the packages and the key that the servers need are here. Starts and sends nothing.

    Raises:
        ConfigError, ServerStartFailed: what is missing, and what to do.
    """
    try:
        if config.server_type == "endpoint":
            ExternalServers(config)
        else:
            config.engine.launch(config, 1, Key("unused"))
    except CkptError as error:
        named(error, config.name)
        raise


@asynccontextmanager
async def connect(
    config: InferenceConfig,
    rank: int,
    shutdown: Shutdown | None = None,
    on_server: OnServer | None = None,
    models: RankModels | None = None,
    on_outage: Callable[[Outage], None] = lambda outage: None,
) -> AsyncIterator[tuple[CompletionClient, Watch]]:
    """The client of a rank's servers, ready for requests, and a coroutine function that raises when none is left.

    If the block ends without an exception, the servers may stay for the next rank.

    Args:
        shutdown: of the rank; None: of nobody.
        on_server: gets what happens to servers; None: nobody does.
        models: the rank's, this one among them. None: it is the only one.
        on_outage: gets the outage clock of endpoints that are waited for before the client is there.

    Raises:
        ServerStartFailed, ServerRefused, ConfigError: see ``InferenceServer.start`` and ``ExternalServers.start``.
    """
    shutdown = shutdown or Shutdown()
    client = CompletionClient(ModelServers(config), Sender(shutdown, on_server=on_server))
    async with running(client.servers, rank, shutdown, models, on_outage) as watch:
        yield client, watch


@asynccontextmanager
async def running(
    servers: ModelServers,
    rank: int,
    shutdown: Shutdown,
    models: RankModels | None,
    on_outage: Callable[[Outage], None],
) -> AsyncIterator[Watch]:
    """The servers are ready for requests in this block. For the arguments and the value see ``connect``."""
    config = servers.config
    try:
        if config.server_type == "endpoint":
            endpoints = ExternalServers(config)
            on_outage(endpoints.outage)
            await endpoints.start()
            servers.add_endpoints(endpoints.urls, endpoints.api_key)
            for index, url in enumerate(endpoints.urls):
                servers.tell("ready", config.server_name(index), str(url), "")
            yield wait_until_cancelled  # a failure of these servers shows in their answers
        else:
            from datatrove_ckpt.inference.servers.pool import ServerPool

            async with ServerPool(config, rank, servers, shutdown, models).running() as watch:
                yield watch
    finally:
        await servers.close()


# Servers that run already: nothing to launch or stop, only a check that they answer before the first request.


_PROBE_TIMEOUT = 10.0  # seconds
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SAY_AGAIN = 60.0  # seconds
_SILENT = 3.0  # seconds


class ExternalServers:
    """The endpoints of ``config.endpoint_urls``, which all take the same key.

    Args:
        config: ``endpoint_url``, the key, and the ready window, of which at most ``server_patience_seconds`` count.

    Attributes:
        outage: since when ``start`` has had no answer.

    Raises:
        ConfigError: an endpoint_url is not a URL, or the key is not set.
    """

    def __init__(self, config: InferenceConfig) -> None:
        self.config = config
        self.outage = Outage(ready_window(config), time.monotonic, config.name)
        self.urls: list[HiddenUrl] = [_with_environment(url) for url in config.endpoint_urls]
        self.api_key = config.endpoint_api_key()
        if self.api_key is None:
            self._headers = None
        else:
            self._headers = self.api_key.headers()

    async def ask(self) -> list[EndpointAnswer]:
        """Asks each of them once which models it serves."""
        proxied = needs_proxy(self.urls)
        return list(await asyncio.gather(*(_ask(url, self._headers, proxied) for url in self.urls)))

    async def start(self) -> None:
        """Wait until one of the URLs answers GET /v1/models, or /models below its own path.

        Every status except 401, 403 and those that may pass (429, 5xx) counts as an answer: some gateways do not list
        models (404), and the first request will show whether they work. An endpoint of which it is not known then
        whether its API is below /v1 gets no requests.

        Raises:
            ServerRefused: a server answered 401 or 403.
            ServerStartFailed: no server answered within that window.
        """
        window = self.outage.patience
        said = self.config.said
        started = time.monotonic()
        said_at = started - _SAY_AGAIN
        failures = 0
        while True:
            answers = await self.ask()
            causes = self._causes(answers)
            if len(causes) < len(answers):
                self.outage.answered()
                if said_at >= started:
                    logger.info(f"{said}An endpoint answers, after {time.monotonic() - started:.0f} s.")
                if causes:
                    logger.warning(
                        f"{said}{len(causes)} of {len(answers)} endpoints do not answer: {'; '.join(causes)}. Those "
                        "whose path has no version get no requests: their API may be there or below /v1."
                    )
                self.urls = [answer.api for answer in answers if answer.api is not None]
                return
            failures = failures + 1
            unreachable = ": HTTP " not in causes[0]
            self.outage.begun(unreachable, started)
            delay = retrying.ENDPOINT.wait(failures)
            now = time.monotonic()
            if now + delay > started + window:
                each = "".join(f"  {cause}\n" for cause in causes)
                raise ServerStartFailed(
                    f"No endpoint was ready within {window:g} s:\n{each}Check that the server runs, that this "
                    f"machine can reach it, and {written.endpoint_url}. One that answers 429 limits "
                    "requests: start later."
                )
            # One that refuses connections is tried again at once; one that is silent has taken its time already.
            if (failures > 1 or now >= started + _SILENT) and now >= said_at + _SAY_AGAIN:
                said_at = now
                logger.warning(said + waiting(causes[0], unreachable, now - started, window))
            await asyncio.sleep(delay)

    def _causes(self, answers: list[EndpointAnswer]) -> list[str]:
        """What is wrong with the endpoints that do not answer. Raises ServerRefused if one refuses the key."""
        for answer in answers:
            if answer.refused:
                raise ServerRefused(
                    f"{answer.url} refuses this run's API key (HTTP {answer.refused}). Check api_key_env and what its "
                    f"variable holds, or the secret in {written.endpoint_url}."
                )
        return [f"{url}: {answer.cause}" for url, answer in zip(self.urls, answers, strict=True) if answer.cause]


def ready_window(config: InferenceConfig) -> float:
    """Seconds within which an endpoint must answer before the first request."""
    return min(config.server_patience_seconds, config.server_ready_max_attempts * config.server_ready_delay_sec)


@dataclass(frozen=True)
class EndpointAnswer:
    """What one endpoint answered to GET /v1/models.

    Attributes:
        url: without credentials and query string.
        cause: why it cannot be used; "" if it can.
        refused: the status with which it refused the key.
        api: the URL, or its /v1; None: not known yet.
        models: the names that it lists; None if it lists none of its own accord, as some gateways do.
    """

    url: str
    cause: str = ""
    refused: int = 0
    api: HiddenUrl | None = None
    models: list[str] | None = None


async def _ask(url: HiddenUrl, headers: HiddenDict | None, proxied: bool) -> EndpointAnswer:
    """Asks at the URL, and then at its /v1 if the API may be there and is not here.

    datatrove appends /v1 to the URL of a local server, and nothing to another one.
    """
    target = url.api("models")
    below = url.join("v1")
    api = None if url.may_lack_version else url
    try:
        response = await _get(target, headers, proxied)
        if api is None and response.status != 200:
            found = await _get(below.api("models"), headers, proxied)
            if found.status == 200:
                response = found
                url = below
                target = below.api("models")
    except ExchangeFailed as error:
        return EndpointAnswer(str(target), str(error), api=api)
    status = response.status
    if status in (401, 403):
        return EndpointAnswer(str(target), "it refuses this run's API key", refused=status)
    return EndpointAnswer(str(target), api=url, models=_listed(response.body) if status == 200 else None)


async def _get(target: HiddenUrl, headers: HiddenDict | None, proxied: bool) -> Response:
    """A response whose status lasts. Raises ExchangeFailed if there is none, or one that may be another one later."""
    response = await get(target, headers, _PROBE_TIMEOUT, proxied)
    if (status := response.status) in retrying.SERVER.retried:
        raise ExchangeFailed(f"HTTP {status}{', which means too many requests' if status == 429 else ''}")
    return response


def _listed(body: bytes) -> list[str] | None:
    """The names in the answer to GET /v1/models; None if it lists none."""
    try:
        data = orjson.loads(memoryview(body))["data"]  # orjson takes no subclass of bytes
        found = [str(one["id"]) for one in data if isinstance(one, dict) and "id" in one]
        if isinstance(data, list):
            return found
        return None
    except (ValueError, TypeError, KeyError):
        return None


def _with_environment(url: str) -> HiddenUrl:
    """The URL with each ``${NAME}`` replaced by that environment variable, without spaces around its value.

    Raises:
        ConfigError: a variable is not set, or this is no URL.
    """
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            raise ConfigError(
                f"{written.endpoint_url}: {url} names the environment variable {name}, which is not set. Export it "
                "where the tasks run."
            )
    try:
        return HiddenUrl(_VARIABLE.sub(lambda name: os.environ[name[1]].strip(), url))
    except ConfigError:
        raise ConfigError(
            f"{written.endpoint_url}: {url} is not a URL. Write http://HOST:PORT or https://HOST. In a user, a "
            "password or a query, write %2F for /, %40 for @, and %23 for #."
        ) from None
