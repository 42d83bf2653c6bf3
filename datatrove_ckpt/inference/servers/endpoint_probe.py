"""Servers that run already: they are only checked, before the first request."""

import asyncio
import os
import re
from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError, ServerRefused, ServerStartFailed
from datatrove_ckpt.inference.client.client import (
    EndpointAccess,
    ExchangeFailed,
    Outage,
    get,
    refusal_hint,
)
from datatrove_ckpt.inference.client.http1 import UnreadableResponse
from datatrove_ckpt.inference.client.responses import listed_models, unlisted
from datatrove_ckpt.inference.client.urls import HiddenUrl, proxy_of
from datatrove_ckpt.process.screen import has_terminal

# How exchanges with the other scheme fail.
_OTHER_SCHEME = ("ProtocolError", "SSLError", "ResetError", UnreadableResponse.__name__)
NEW_RUN_SECONDS = 30.0
"""The wait of a new run at a terminal if nothing listens, at the usual patience."""
_PROBE_TIMEOUT = 10.0  # seconds
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class EndpointProbe:
    """The answer of an endpoint to GET /v1/models.

    Attributes:
        url: URL without credentials and query string.
        cause: cause of a failure; "" if the endpoint can be used.
        refused: whether it refuses the key, or speaks http where the URL has https, or https where
            it has http.
        api: the URL, or its /v1; None if the API is not known yet.
        models: listed names, each with its ``max_model_len`` or None; None without a list, as with
            some gateways.
        is_absent: whether the connection was refused, so that nothing listens there.
    """

    url: str
    cause: str = ""
    refused: bool = False
    api: HiddenUrl | None = None
    models: dict[str, object] | None = None
    is_absent: bool = False

    def unlisted(self, model: str) -> str:
        return unlisted(self.url, model, self.models or ())


def endpoints_of(config: InferenceConfig) -> list[EndpointAccess]:
    """Returns the endpoints of a config.

    Raises:
        ConfigError: an endpoint_url is not a URL, or the key is not set.
    """
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
    An endpoint gets no requests before it is known whether its API is below /v1.

    If nothing listens, the port may be wrong: a new run at a terminal waits only for
    ``NEW_RUN_SECONDS``. A job may start beside its server, which loads a model for minutes.

    Args:
        config: config with the ready window, of which at most ``server_patience_seconds`` count.
        outage: the model's outage clock, which runs while there is no answer.
        is_new: whether no request of the run has been answered yet.

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
                    f"{'; '.join(causes)}. Endpoints that refuse get no requests, nor do endpoints "
                    "whose path has no version: their API may be there or below /v1."
                )
            outage.patience = config.server_patience_seconds
            return [endpoint._replace(url=answer.api) for endpoint, answer in probes if answer.api]
        failures = failures + 1
        advice = ""
        outage.patience = ready_window(config)
        if may_be_wrong and all(answer.is_absent for answer in answers):
            outage.patience = min(outage.patience, NEW_RUN_SECONDS)
            advice = " To wait for a server that starts later: server_patience_seconds: 1800."
        outage.begin(": HTTP " not in causes[0], started)
        delay = retrying.ENDPOINT.wait(failures)
        if delay > outage.remaining():
            each = "".join(f"  {cause}\n" for cause in causes)
            raise ServerStartFailed(
                f"No endpoint was ready within {outage.patience:g} s:\n{each}Check that the "
                "server runs, that this machine can reach it, and its URL. If an endpoint "
                f"answers 429, it limits requests: start later.{advice}"
            )
        outage.show(causes[0])
        await asyncio.sleep(delay)


def ready_window(config: InferenceConfig) -> float:
    return min(
        config.server_patience_seconds,
        config.server_ready_max_attempts * config.server_ready_delay_sec,
    )


async def _ask(url: HiddenUrl, api_key: Secret | None) -> EndpointProbe:
    """Requests the URL, and then its /v1 if the API may be there."""
    target = url.api("models")
    below = url.api("/v1")
    api = None if url.may_lack_version else url
    try:
        response = await get(target, api_key, _PROBE_TIMEOUT, proxied=True)
        if api is None and response.status not in (200, *retrying.SERVER.retried):
            below_response = await get(below.api("models"), api_key, _PROBE_TIMEOUT, proxied=True)
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
        return EndpointProbe(str(target), str(error), api=api, is_absent=is_absent)
    status = response.status
    if status in retrying.SERVER.retried:  # another answer may come later
        return EndpointProbe(str(target), f"HTTP {status}", api=api)
    if status in (401, 403, 407):
        cause = refusal_hint(url, api_key, status, proxy_of(url))
        return EndpointProbe(str(target), f"{cause} (HTTP {status})", True)
    return EndpointProbe(
        str(target), api=url, models=listed_models(response.body) if status == 200 else None
    )


async def _other_scheme(target: HiddenUrl) -> str:
    """Returns the other scheme (http for https) if the server speaks it; else ""."""
    scheme = "http" if target.reveal().scheme == "https" else "https"
    url = HiddenUrl(target.reveal().with_scheme(scheme).with_user(None).with_query(None))
    try:
        await get(url, None, _PROBE_TIMEOUT, proxied=True)
    except ExchangeFailed as error:
        if error.kind != "SSLCertVerificationError":
            return ""
    return scheme


def _with_environment(url: str) -> HiddenUrl:
    """Returns the URL with each ``${NAME}`` replaced by that environment variable, stripped.

    Raises:
        ConfigError: a variable is not set, or the result is no URL.
    """
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            raise ConfigError(
                f"{url} names the environment variable {name}, which is "
                "not set. Export it where the tasks run.",
                setting="endpoint_url",
            )
    return HiddenUrl(_VARIABLE.sub(lambda name: os.environ[name[1]].strip(), url), url)
