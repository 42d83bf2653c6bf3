"""External servers: only checks, before the first request, that they answer."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass
from functools import partial

import orjson
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.errors import ConfigError, ServerRefused, ServerStartFailed
from datatrove_ckpt.inference.client.attempts import Target
from datatrove_ckpt.inference.client.client import Outage
from datatrove_ckpt.inference.client.plain import Response
from datatrove_ckpt.inference.client.routing import Router
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get, key_hint
from datatrove_ckpt.inference.client.urls import HiddenUrl, needs_proxy
from datatrove_ckpt.inference.servers.probes import adapt_admission, read_metrics, read_page

_PROBE_TIMEOUT = 10.0  # seconds
_OTHER_SCHEME = ("ProtocolError", "SSLError", "ResetError")  # how these exchanges fail
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class ExternalServers:
    """The endpoints of ``config.endpoint_urls``, which all take the same key.

    Args:
        config: of its ready window, at most ``server_patience_seconds`` count.

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

    async def ask(self) -> list[EndpointAnswer]:
        proxied = needs_proxy(self.urls)
        return list(await asyncio.gather(*(_ask(url, self.api_key, proxied) for url in self.urls)))

    async def start(self) -> None:
        """Waits until one of the URLs answers GET /v1/models, or /models below its own path.

        Every status except 401, 403, 429 and 5xx counts as an answer: some gateways do not list
        models. An endpoint gets no requests before it is known whether its API is below /v1.

        Raises:
            ServerRefused: see ``EndpointAnswer.refused``.
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
                        f"answer: {'; '.join(causes)}. Those whose path has no version get no "
                        "requests: their API may be there or below /v1."
                    )
                self.urls = [answer.api for answer in answers if answer.api is not None]
                return
            failures = failures + 1
            self.outage.begun(": HTTP " not in causes[0], started)
            delay = retrying.ENDPOINT.wait(failures)
            if delay > self.outage.left():
                each = "".join(f"  {cause}\n" for cause in causes)
                raise ServerStartFailed(
                    f"No endpoint was ready within {window:g} s:\n{each}Check that the server "
                    "runs, that this "
                    "machine can reach it, and its URL. One that answers 429 "
                    "limits "
                    "requests: start later."
                )
            self.outage.show(causes[0])
            await asyncio.sleep(delay)

    async def follow(self, target: Target, router: Router) -> None:
        """Adapts a target's limit to its engine, if /metrics has the names of an engine.

        Some names come with the first request. So it is looked for until an answer has come.
        """
        assert target.url is not None
        url = target.url.api("/metrics")
        proxied = needs_proxy(self.urls)
        looks = 0
        while True:
            is_last = target.answers > 0
            page = await read_page(url, self.api_key, _PROBE_TIMEOUT, proxied)
            for engine in ENGINES.values():
                names = engine.metrics
                if names is not None and names.are_in(page):
                    target.pace = None
                    read = partial(read_metrics, url, self.api_key, names, proxied=proxied)
                    await adapt_admission(str(target.url), target, router, read)
            if is_last:
                return
            looks += 1
            await asyncio.sleep(retrying.RESTART.wait(looks))

    def _causes(self, answers: list[EndpointAnswer]) -> list[str]:
        """Returns what is wrong with the endpoints that do not answer.

        Raises:
            ServerRefused: see ``EndpointAnswer.refused``.
        """
        for answer in answers:
            if answer.refused:
                raise ServerRefused(f"{answer.url} {answer.cause}.")
        return [
            f"{url}: {answer.cause}"
            for url, answer in zip(self.urls, answers, strict=True)
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
    """

    url: str
    cause: str = ""
    refused: bool = False
    api: HiddenUrl | None = None
    models: dict[str, object] | None = None


async def _ask(url: HiddenUrl, api_key: Secret | None, proxied: bool) -> EndpointAnswer:
    """Requests the URL, and then its /v1 if that may be the API."""
    target = url.api("models")
    below = url.api("/v1")
    api = None if url.may_lack_version else url
    try:
        response = await _get(target, api_key, proxied)
        if api is None and response.status != 200:
            found = await _get(below.api("models"), api_key, proxied)
            if found.status == 200:
                response = found
                url = below
                target = below.api("models")
    except ExchangeFailed as error:
        if error.kind.endswith(_OTHER_SCHEME) and (scheme := await _other_scheme(target, proxied)):
            cause = f"speaks {scheme}: correct its URL"
            return EndpointAnswer(str(target), cause, True)
        return EndpointAnswer(str(target), str(error), api=api)
    status = response.status
    if status in (401, 403):
        return EndpointAnswer(str(target), f"{key_hint(url, api_key)} (HTTP {status})", True)
    return EndpointAnswer(
        str(target), api=url, models=_listed(response.body) if status == 200 else None
    )


async def _other_scheme(target: HiddenUrl, proxied: bool) -> str:
    """Returns http for https, and https for http, if the server speaks it; else ""."""
    scheme = "http" if target.reveal().scheme == "https" else "https"
    url = HiddenUrl(target.reveal().with_scheme(scheme).with_user(None).with_query(None))
    try:
        await get(url, None, _PROBE_TIMEOUT, proxied)
    except ExchangeFailed as error:
        if not error.kind.endswith("CertificateError"):
            return ""
    return scheme


async def _get(target: HiddenUrl, api_key: Secret | None, proxied: bool) -> Response:
    """Raises ExchangeFailed if there is no response, or if another one may come later."""
    response = await get(target, api_key, _PROBE_TIMEOUT, proxied)
    if (status := response.status) in retrying.SERVER.retried:
        raise ExchangeFailed(
            f"HTTP {status}{', which means too many requests' if status == 429 else ''}"
        )
    return response


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
