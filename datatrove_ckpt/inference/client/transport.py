"""One HTTP exchange: sends a body, and returns the body of a whole answer or raises the error that the status means.

Plain http:// goes over ``plain.py``, everything else over aiohttp. See ``client.py`` for the table of errors. Errors
raised here have no cause attached, because the frames of their causes hold headers, and headers hold the API key.
"""

from __future__ import annotations

import asyncio
import io
import os
from functools import partial
from typing import Any, TypeAlias

import aiohttp
import orjson
from aiohttp.client_proto import ResponseHandler

from datatrove_ckpt.errors import CkptError, RequestRejected, ServerRefused
from datatrove_ckpt.inference.client import http1
from datatrove_ckpt.inference.client.answers import RetryableError, parse_retry_after
from datatrove_ckpt.inference.client.http1 import RemoteProtocolError, Response
from datatrove_ckpt.inference.client.plain import ConnectTimeout, PlainTransport, is_silent
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached
from datatrove_ckpt.redaction import HiddenBytes, HiddenDict, Key, Redactor, frames_cut, note_sent

_CONNECT_TIMEOUT = 30.0  # seconds
# Seconds. uvicorn, which serves vLLM and SGLang, closes idle connections after 5 s. We close them first: a request
# sent into a closing connection is a failed attempt.
_KEEPALIVE = 4.0
_READ_BUFFER = 1 << 18  # bytes
# 203: a proxy has changed something. 202, 204 and 206 come without the answer, or with a part of it.
_ANSWERED = frozenset({200, 201, 203})
_RETRIED = frozenset({408, 409, 425, 429})
REJECTED = frozenset({400, 413, 414, 422, 431})
"""The statuses that belong to one request: its content, its size. No other status does."""
_SHOWN_BODY = 2000  # characters
# Bytes. Above this size aiohttp warns about plain bytes, and wants a stream that it can send in pieces.
_STREAMED_SIZE = 1 << 20
UNCOMPRESSED = {"Accept-Encoding": "identity"}
_WITHOUT_URL = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError)


class _Connection(ResponseHandler):
    """Closes as the connections of ``plain.py`` do. aiohttp takes a late response for that to the next request."""

    def __init__(self, owner: AiohttpTransport) -> None:
        super().__init__(asyncio.get_running_loop())
        self._owner = owner
        self._is_asked = False

    def set_response_params(self, **params: Any) -> None:
        self._is_asked = True
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        status = data[0].code
        if not self._is_asked:
            self.close()
            self._owner.unasked += status != 408
            return
        self._is_asked = status < 200
        if status >= 300:
            self.force_close()
        super().feed_data(data, size)

    def is_connected(self) -> bool:
        # Asked before a connection is used again.
        return super().is_connected() and is_silent(self.transport.get_extra_info("socket").fileno())  # type: ignore[union-attr]


class AiohttpTransport:
    """Sends over aiohttp, which knows TLS, proxies, and credentials in the URL."""

    def __init__(self, url: HiddenUrl, headers: HiddenDict | None, timeout: float, proxied: bool) -> None:
        self._url = url
        self.unasked = 0
        self.redact = url.redactor(headers)
        # Not given to the session, which would show them among its attributes.
        self._headers = HiddenDict({"Content-Type": "application/json", **UNCOMPRESSED, **(headers or {})})
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE)
        connector._factory = partial(_Connection, self)  # type: ignore[assignment]
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout, connect=_CONNECT_TIMEOUT, sock_connect=_CONNECT_TIMEOUT),
            read_bufsize=_READ_BUFFER,
            auto_decompress=False,
            # A proxy in the environment is never meant for our servers on 127.0.0.1. For endpoints it is, but then
            # aiohttp reads the environment in a thread per request. So we ask for that only where a proxy applies.
            trust_env=proxied,
        )

    async def post(self, body: bytes) -> Response:
        data = body if len(body) <= _STREAMED_SIZE else io.BytesIO(body)
        async with self._session.post(
            self._url.reveal(), data=data, headers=self._headers, allow_redirects=False
        ) as response:
            try:
                answer = await read_body(response)
            except (aiohttp.ClientError, OSError, TimeoutError):
                if response.status < 300:
                    raise
                answer = HiddenBytes()  # the status alone decides, and it is known
            return Response(response.status, answer, response.headers.get("Retry-After", ""))

    async def close(self) -> None:
        await self._session.close()


Transport: TypeAlias = PlainTransport | AiohttpTransport


def make_transport(url: HiddenUrl, api_key: Key | None, timeout: float, proxied: bool) -> Transport:
    """The cheapest transport that can serve this URL.

    Args:
        timeout: seconds for one exchange.
        proxied: the environment names a proxy for this URL.
    """
    headers = api_key.headers() if api_key is not None else None
    if _is_plain(url, proxied):
        return PlainTransport(url, headers, timeout, _CONNECT_TIMEOUT, _KEEPALIVE)
    return AiohttpTransport(url, headers, timeout, proxied)


def _is_plain(url: HiddenUrl, proxied: bool) -> bool:
    return url.reveal().scheme == "http" and not url.has_credentials and not proxied


async def read_body(response: aiohttp.ClientResponse) -> HiddenBytes:
    """The body of a response that aiohttp does not decompress: less than 1 MB may become gigabytes.

    Raises:
        RemoteProtocolError: it is compressed or too long.
    """
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RemoteProtocolError(http1.COMPRESSED)
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > http1.MAX_BODY_BYTES:
            raise RemoteProtocolError(http1.too_long())
    return HiddenBytes(body)


async def post(transport: Transport, url: HiddenUrl, body: bytes, model: str) -> bytes:
    """The body of an answer (200, 201, 203). ``url`` and ``model`` appear in error messages only.

    Raises:
        RequestRejected, ServerRefused, RetryableError: see the table in ``client.py``.
        TooManyOpenFiles: no connection could be opened, which is not the server's fault.
    """
    try:
        with frames_cut():
            response = await transport.post(body)
    except TimeoutError as error:
        kind = "connection" if isinstance(error, aiohttp.ConnectionTimeoutError | ConnectTimeout) else "answer"
        raise RetryableError(f"no {kind} in time from {url}", unreachable=True, timed_out=True) from None
    except (aiohttp.ClientError, OSError) as error:
        if is_caused_by_limit(error):
            raise limit_reached(f"No connection to {url}") from None
        details = transport.redact(redacted_error(error))
        cause = f"{type(error).__name__} from {url}" + (f": {details}" if details else "")
        raise RetryableError(cause, unreachable=True) from None
    if response.status in _ANSWERED:
        return response.body
    if 200 <= response.status < 300:
        raise RetryableError(f"HTTP {response.status} from {url}, which is no whole answer")
    note_sent(orjson.loads(body))
    raise _error(response, url, model, transport.redact)


def may_pass(status: int) -> bool:
    """Whether the same request may get another status later."""
    return status in _RETRIED or status >= 500


def _error(response: Response, url: HiddenUrl, model: str, redact: Redactor) -> RetryableError | CkptError:
    status = response.status
    # Cut after the secrets are replaced: of a secret that is cut in two, a part would stay.
    text = redact(response.body[: 8 * _SHOWN_BODY].decode(errors="replace"))[:_SHOWN_BODY]
    if status in REJECTED:
        return RequestRejected(status, text)
    text = " ".join(text.split())
    if may_pass(status):
        wait = parse_retry_after(response.retry_after)
        return RetryableError(f"HTTP {status} from {url}: {text}", wait, status=status)
    return ServerRefused(
        f"{url} answered HTTP {status} for model {model!r}. {_hint(status)} The server's answer: {text or '(empty)'}"
    )


def _hint(status: int) -> str:
    if status < 400:
        return "Redirects are not followed. Set endpoint_url to the final address."
    if status in (401, 403, 407):
        return "Check api_key or api_key_env, that the key may use this model, and proxies."
    if status == 402:
        return "The account of this key has no credit left."
    return "Check model_name_or_path, endpoint_url and use_chat."


def redacted_error(error: Exception) -> str:
    """What went wrong in an exchange; may be empty.

    Many messages of aiohttp contain the whole URL, and so a query string that may be a secret. Only messages that are
    known to contain no URL are passed on.
    """
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status}, {' '.join(error.message.split())}"
    if isinstance(error, aiohttp.ClientError) and not isinstance(error, _WITHOUT_URL):
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return str(error)
