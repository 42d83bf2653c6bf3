"""Makes one HTTP exchange: returns a whole answer, or raises the error of its status.

Errors raised here have no cause, because its frames would hold the API key.
"""

import asyncio
import re

import orjson

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import Secret, excerpt, redact, remember_sent
from datatrove_ckpt.errors import CkptError, RequestRejected, ServerRefused
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody
from datatrove_ckpt.inference.client.http1 import (
    ConnectTimeout,
    ProxyRefused,
    Response,
    Transport,
    UnreadableResponse,
)
from datatrove_ckpt.inference.client.responses import RetryableError, UnexpectedResponse
from datatrove_ckpt.inference.client.urls import Extras, HiddenUrl, proxy_advice
from datatrove_ckpt.process.open_files import refuse_exhaustion

# 203: a proxy changed something. 202, 204 and 206 lack the answer or a part.
_ANSWERED = frozenset({200, 201, 203})
# The whole body of llama.cpp's 500 for a text that it cannot embed.
_TOO_LARGE = re.compile(
    rb'\s*\{"error":\{"code":500,"message":"input \(\d+ tokens\) is too large to process\. '
    rb"increase the physical batch "
    rb'size \(current batch size: \d+\)","type":"server_error"\}\}\s*'
)
_OUT_OF_CREDIT = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "exceeded_current_quota_error", "1113"}
)
"""The codes of OpenAI, Moonshot and Z.ai in a 429 that only a payment ends."""


class ExchangeFailed(Exception):
    """Reports that there is no response. ``kind``: "TimeoutError" after a timeout."""

    def __init__(self, details: str, kind: str = "") -> None:
        self.details = details
        self.kind = kind
        super().__init__(details or kind)


async def get(
    url: HiddenUrl, api_key: Secret | None, seconds: float, proxied: bool = False
) -> Response:
    """Returns the response to one GET, whatever its status.

    Raises:
        ExchangeFailed: there is no response within ``seconds``.
    """
    transport = Transport(url, api_key, seconds, proxied, "GET")
    try:
        async with asyncio.timeout(seconds):
            return await transport.send()
    except TimeoutError:
        raise ExchangeFailed("", "TimeoutError") from None
    except OSError as error:
        raise _failure(transport, error) from None
    finally:
        await transport.close()


def _failure(transport: Transport, error: Exception) -> ExchangeFailed:
    refuse_exhaustion(error, f"No connection to {transport.url}")
    return ExchangeFailed(redact(transport.explain(error)), type(error).__name__)


async def post(transport: Transport, body: AnyBody, model: str, extras: Extras | None) -> Response:
    """Returns an answer. ``model``: name for messages, if the body has none.

    Raises:
        RequestRejected, ServerRefused, RetryableError, TooManyOpenFiles: the table in ``client.py``
            has the causes.
    """
    url = transport.url
    try:
        response = await transport.send(body, extras)
    except TimeoutError as error:
        unsent = isinstance(error, ConnectTimeout)
        kind = "connection" if unsent else "answer"
        raise RetryableError(
            f"no {kind} in time from {url}", unreachable=True, unsent=unsent, timed_out=True
        ) from None
    except OSError as error:
        remember_sent(extras)
        failure = _failure(transport, error)
        cause = f"{failure.kind} from {url}"
        if failure.details:
            cause += f": {failure.details}"
        if isinstance(error, ProxyRefused):
            raise ServerRefused(f"{url}: {failure.details}.") from None
        if isinstance(error, UnreadableResponse):
            raise UnexpectedResponse(cause) from None
        unsent = isinstance(error, ConnectionRefusedError)
        raise RetryableError(cause, unreachable=True, unsent=unsent) from None
    if response.status in _ANSWERED:
        return response
    if 200 <= response.status < 300:
        raise RetryableError(f"HTTP {response.status} from {url}, which is no whole answer")
    sent = orjson.loads(body.text if isinstance(body, RequestBody) else body)
    remember_sent([sent, extras])
    raise _error(response, transport, sent.get("model", model))


def _error(response: Response, transport: Transport, model: str) -> RetryableError | CkptError:
    url = f"{transport.url}{transport.through}"
    status = response.status
    if status == 500 and _TOO_LARGE.fullmatch(response.body):
        status = 413
    text = excerpt(response.body.decode(errors="replace"), 2000)
    if status in retrying.REJECTED:
        return RequestRejected(status, text)
    text = " ".join(text.split())
    lacks_credit = status == 402 or (status == 429 and _lacks_credit(response.body))
    if status in retrying.SERVER.retried and not lacks_credit:
        return RetryableError(
            f"HTTP {status} from {url}: {text}", retry_after=response.wait, status=status
        )
    hint = _hint(status, transport, text)
    if lacks_credit:
        hint = "The account of this key has no credit left."
    refused = ServerRefused(
        f"{url} answered HTTP {status} for model {model!r}. {hint} "
        f"The server's answer: {text or '(empty)'}"
    )
    refused.status = status
    if status in retrying.OF_ONE_TEXT:
        return RetryableError(f"HTTP {status} from {url}: {text}", status=status, refusal=refused)
    return refused


def _lacks_credit(body: bytes) -> bool:
    """Returns whether the code or type of an error is about credit. Its message may quote the
    document.
    """
    try:
        error = orjson.loads(body)["error"]
        return not _OUT_OF_CREDIT.isdisjoint({error.get("code"), error.get("type")})
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def refusal_hint(
    url: HiddenUrl, api_key: Secret | None, status: int, proxy: HiddenUrl | None
) -> str:
    """Returns the rest of a sentence about a URL that answers 401, 403 or 407."""
    hint = _key_hint(url, api_key)
    if proxy is None or status == 401 or url.reveal().scheme == "https":
        return hint
    hint = "" if status == 407 else f". Or it {hint}"
    return f"is reached through the proxy {proxy}: {proxy_advice(url, status)}{hint}"


def _key_hint(url: HiddenUrl, api_key: Secret | None) -> str:
    if api_key is None and not any(url.secrets):
        return "wants a key, and this run sends none: set api_key_env, or check proxies"
    return "refuses this run's key: check api_key_env, that the key may use this model, and proxies"


def _hint(status: int, transport: Transport, text: str) -> str:
    if status < 400:
        return "Redirects are not followed. Set the endpoint's URL to the final address."
    if status in (401, 403, 407):
        return f"It {refusal_hint(transport.url, transport.api_key, status, transport.proxy)}."
    if not (path := transport.url.reveal().path).endswith("/completions"):
        if "model" in text.lower():
            return "Check the model's name and the endpoint's URL."
        otherwise = "check the endpoint's URL and the model's name"
        if path.endswith("/responses"):
            otherwise = "let your agent use chat completions"
        return f"This server may not have the path {path}: {otherwise}."
    return "Check the model's name, the endpoint's URL and use_chat."
