"""Servers that run already: nothing to launch or stop, only a check that they answer before the first request."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass
from typing import NoReturn

import aiohttp
import orjson
from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError, ServerRefused, ServerStartFailed
from datatrove_ckpt.inference.client.patience import waiting
from datatrove_ckpt.inference.client.transport import redacted_error
from datatrove_ckpt.inference.client.urls import HiddenUrl, needs_proxy
from datatrove_ckpt.inference.servers.interface import Server, wait_until_cancelled
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached
from datatrove_ckpt.redaction import HiddenDict, frames_cut

_PROBE_TIMEOUT = 10.0  # seconds
_FIRST_DELAY = 0.25  # seconds
_MAX_DELAY = 5.0  # seconds
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SAY_AGAIN = 60.0  # seconds
_SILENT = 3.0  # seconds


class ExternalServers(Server):
    """The endpoints of ``config.endpoint_urls``, which all take the same key.

    Args:
        config: ``endpoint_url``, the key, and the ready window, of which at most ``server_patience_seconds`` count.
    """

    def __init__(self, config: InferenceConfig) -> None:
        self.config = config
        self.urls: list[HiddenUrl] = [_with_environment(url) for url in config.endpoint_urls]
        self.api_key = config.endpoint_api_key()

    async def start(self) -> None:
        """Wait until one of the URLs answers GET /v1/models, or /models below its own path.

        Every status except 401, 403 and 5xx counts as an answer: some gateways do not list models (404), and the first
        request will show whether they work.

        Raises:
            ConfigError: an endpoint_url is not a URL.
            ServerRefused: a server answered 401 or 403.
            ServerStartFailed: no server answered within that window.
        """
        targets = [url.api("models") for url in self.urls]
        window = ready_window(self.config)
        started = time.monotonic()
        said_at = started - _SAY_AGAIN
        failures = 0
        headers = self.api_key.headers() if self.api_key is not None else None
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
        proxy = needs_proxy(self.urls)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=proxy) as session:
            while True:
                causes = await asyncio.gather(*(_probe(session, target, headers) for target in targets))
                if None in causes:
                    if said_at >= started:
                        logger.info(f"An endpoint answers, after {time.monotonic() - started:.0f} s.")
                    self._warn_of_silent(causes)
                    self.urls = list(await asyncio.gather(*(_api_of(session, url, headers) for url in self.urls)))
                    return
                failures += 1
                delay = backoff_seconds(failures, _FIRST_DELAY, _MAX_DELAY)
                now = time.monotonic()
                if now + delay > started + window:
                    raise ServerStartFailed(self._none_answered(causes, window))
                # One that refuses connections is tried again at once; one that is silent has taken its time already.
                if (failures > 1 or now >= started + _SILENT) and now >= said_at + _SAY_AGAIN:
                    said_at = now
                    cause = f"{self.urls[0]}: {causes[0]}"
                    logger.warning(waiting(cause, True, now - started, window))
                await asyncio.sleep(delay)

    def _warn_of_silent(self, causes: list[str | None]) -> None:
        silent = [f"{url}: {cause}" for url, cause in zip(self.urls, causes, strict=True) if cause]
        if silent:
            logger.warning(f"{len(silent)} of {len(self.urls)} endpoints do not answer: {'; '.join(silent)}")

    def _none_answered(self, causes: list[str | None], window: float) -> str:
        each = "\n".join(f"  {url}: {cause}" for url, cause in zip(self.urls, causes, strict=True))
        return (
            f"No endpoint answered within {window:g} s:\n{each}\n"
            "Check that the server runs, that this machine can reach it, and endpoint_url."
        )

    async def watch(self) -> NoReturn:
        """Never ends: there is no process to watch. A failure of the server shows in its answers."""
        await wait_until_cancelled()

    async def stop(self) -> None:
        """Does nothing: we did not start these servers."""


def ready_window(config: InferenceConfig) -> float:
    """Seconds within which an endpoint must answer before the first request."""
    return min(config.server_patience_seconds, config.server_ready_max_attempts * config.server_ready_delay_sec)


@dataclass(frozen=True)
class EndpointAnswer:
    """What one endpoint answered to GET /v1/models.

    Attributes:
        url: without credentials and query string.
        cause: why it cannot be used; "" if it can.
        refused: it refused the key.
        models: the names that it lists; None if it lists none of its own accord, as some gateways do.
    """

    url: str
    cause: str = ""
    refused: bool = False
    models: list[str] | None = None


async def ask_endpoints(config: InferenceConfig) -> list[EndpointAnswer]:
    """Asks each of ``config.endpoint_urls`` once which models it serves.

    Raises:
        ConfigError: an endpoint_url is not a URL, or the key is not set.
    """
    servers = ExternalServers(config)
    headers = servers.api_key.headers() if servers.api_key is not None else None
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=needs_proxy(servers.urls)) as session:
        urls = await asyncio.gather(*(_api_of(session, url, headers) for url in servers.urls))
        targets = [url.api("models") for url in urls]
        return list(await asyncio.gather(*(_ask(session, target, headers) for target in targets)))


async def _ask(session: aiohttp.ClientSession, target: HiddenUrl, headers: HiddenDict | None) -> EndpointAnswer:
    shown = str(target)
    try:
        cause = await _probe(session, target, headers)
        if cause is not None:
            return EndpointAnswer(shown, cause)
        with frames_cut():
            async with session.get(target.reveal(), headers=headers, allow_redirects=False) as response:
                status, body = response.status, await response.read()
    except ServerRefused:
        return EndpointAnswer(shown, "it refuses this run's API key", refused=True)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return EndpointAnswer(shown, target.redactor(headers)(redacted_error(error)) or type(error).__name__)
    return EndpointAnswer(shown, models=_listed(body) if status == 200 else None)


async def _api_of(session: aiohttp.ClientSession, url: HiddenUrl, headers: HiddenDict | None) -> HiddenUrl:
    """The URL, or its /v1 if the models are listed there only.

    datatrove appends /v1 to the URL of a local server, and nothing to another one.
    """
    if not url.may_lack_version:
        return url
    below = url.join("v1")
    statuses = await asyncio.gather(*(_status(session, one.api("models"), headers) for one in (url, below)))
    return below if [status == 200 for status in statuses] == [False, True] else url


async def _status(session: aiohttp.ClientSession, target: HiddenUrl, headers: HiddenDict | None) -> int:
    """The HTTP status of a GET; 0 if there is no answer."""
    try:
        with frames_cut():
            async with session.get(target.reveal(), headers=headers, allow_redirects=False) as response:
                return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return 0


def _listed(body: bytes) -> list[str] | None:
    """The names in the answer to GET /v1/models; None if it lists none."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        return None
    return [str(one["id"]) for one in data if isinstance(one, dict) and "id" in one]


def _with_environment(url: str) -> HiddenUrl:
    """The URL with each ``${NAME}`` replaced by that environment variable, without spaces around its value.

    Raises:
        ConfigError: a variable is not set, or this is no URL.
    """
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            raise ConfigError(
                f"endpoint_url: {url} names the environment variable {name}, which is not set. Export it where the "
                "tasks run."
            )
    try:
        return HiddenUrl(_VARIABLE.sub(lambda name: os.environ[name[1]].strip(), url))
    except ConfigError:
        raise ConfigError(
            f"endpoint_url: {url} is not a URL. Write http://HOST:PORT or https://HOST. In a user, a password or a "
            "query, write %2F for /, %40 for @, and %23 for #."
        ) from None


async def _probe(session: aiohttp.ClientSession, target: HiddenUrl, headers: HiddenDict | None) -> str | None:
    """None if the URL answers, else what went wrong.

    Raises:
        ServerRefused: it answered 401 or 403.
    """
    try:
        with frames_cut():
            async with session.get(target.reveal(), headers=headers, allow_redirects=False) as response:
                status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if is_caused_by_limit(error):
            raise limit_reached(f"No connection to {target}") from None
        return target.redactor(headers)(redacted_error(error)) or type(error).__name__
    if status in (401, 403):
        raise ServerRefused(
            f"{target} refuses this run's API key (HTTP {status}). Check api_key_env and what its variable holds, or "
            "the secret in endpoint_url."
        )
    return f"HTTP {status}" if status >= 500 else None
