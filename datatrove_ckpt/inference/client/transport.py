"""One HTTP exchange: a body sent, a 2xx body back, or the error that says what the status means.

Plain http:// goes over ``plain.py``, everything else over aiohttp.
See ``client.py`` for the table. Errors raised here have no cause attached: the frames they come from hold headers.
"""

from __future__ import annotations

import io
import os
from typing import Protocol
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from datatrove_ckpt.errors import CkptError, ConfigError, RequestRejected, ServerRefused
from datatrove_ckpt.inference.client.answers import TryAgain, parse_retry_after
from datatrove_ckpt.inference.client.http1 import Response
from datatrove_ckpt.inference.client.plain import ConnectTimeout, PlainTransport
from datatrove_ckpt.redaction import HiddenDict, Key

_CONNECT_TIMEOUT = 30.0
# uvicorn, which serves vLLM and SGLang, closes idle connections after 5 s. We drop them first: a request sent
# into a closing connection is a failed attempt.
_KEEPALIVE = 4.0
_READ_BUFFER = 1 << 18
_RETRIED = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({401, 403, 404})
_SHOWN_BODY = 2000  # characters
# Above this size aiohttp warns about plain bytes and wants a stream that it can send in pieces.
_STREAMED_SIZE = 1 << 20
_HEADERS = {"Content-Type": "application/json"}
_WITHOUT_URL = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError)


class Transport(Protocol):
    """Sends bodies to one URL over connections that it keeps."""

    async def post(self, body: bytes) -> Response:
        """Raises OSError, TimeoutError or aiohttp.ClientError."""
        ...

    async def close(self) -> None: ...


def transport_to(url: URL, api_key: Key | None, timeout: float, proxied: bool) -> Transport:
    """What is cheapest for this URL.

    Args:
        timeout: seconds for one exchange.
        proxied: the environment names a proxy for it.
    """
    headers = api_key.headers() if api_key is not None else None
    if _is_plain(url, proxied):
        return PlainTransport(url, headers, timeout, _CONNECT_TIMEOUT, _KEEPALIVE)
    return AiohttpTransport(url, headers, timeout, proxied)


def _is_plain(url: URL, proxied: bool) -> bool:
    return url.scheme == "http" and bool(url.host) and url.user is None and url.password is None and not proxied


class AiohttpTransport:
    """TLS, proxies, credentials in the URL."""

    def __init__(self, url: URL, headers: HiddenDict | None, timeout: float, proxied: bool) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout, connect=_CONNECT_TIMEOUT, sock_connect=_CONNECT_TIMEOUT),
            read_bufsize=_READ_BUFFER,
            # A proxy in the environment is never meant for 127.0.0.1. For endpoints it is, but aiohttp then asks
            # the environment in a thread per request: only where a proxy applies.
            trust_env=proxied,
        )

    async def post(self, body: bytes) -> Response:
        data = body if len(body) <= _STREAMED_SIZE else io.BytesIO(body)
        async with self._session.post(self._url, data=data, headers=_HEADERS, allow_redirects=False) as response:
            try:
                answer = await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError):
                if response.status < 300:
                    raise
                answer = b""  # the status is known, and it alone decides
            return Response(response.status, answer, response.headers.get("Retry-After", ""))

    async def close(self) -> None:
        await self._session.close()


async def post(transport: Transport, url: URL, body: bytes, model: str) -> bytes:
    """The body of a 2xx answer. ``url`` and ``model`` are for the text of errors.

    Raises:
        RequestRejected, ServerRefused, TryAgain: see the table in ``client.py``.
    """
    try:
        response = await transport.post(body)
    except TimeoutError as error:
        kind = "connect" if isinstance(error, aiohttp.ConnectionTimeoutError | ConnectTimeout) else "answer"
        raise TryAgain(f"no {kind} in time from {shown_url(url)}", unreachable=True) from None
    except (aiohttp.ClientError, OSError) as error:
        details = shown_error(error)
        cause = f"{type(error).__name__} from {shown_url(url)}" + (f": {details}" if details else "")
        raise TryAgain(cause, unreachable=True) from None
    if 200 <= response.status < 300:
        return response.body
    raise _error(response, url, model)


def _error(response: Response, url: URL, model: str) -> TryAgain | CkptError:
    status = response.status
    text = response.body[: 4 * _SHOWN_BODY].decode(errors="replace")[:_SHOWN_BODY]
    if status in _RETRIED or status >= 500:
        wait = parse_retry_after(response.retry_after)
        return TryAgain(f"HTTP {status} from {shown_url(url)}: {text}", wait, status=status)
    if status in _REFUSED or status < 400:
        return ServerRefused(
            f"{shown_url(url)} answered HTTP {status} for model {model!r}. "
            f"{_hint(status)} The server says: {text or '(nothing)'}"
        )
    return RequestRejected(status, text)


def _hint(status: int) -> str:
    if status == 404:
        return "Check model_name_or_path, endpoint_url (without /v1) and use_chat."
    if status in (401, 403):
        return "Check api_key or api_key_env, and that the key may use this model."
    return "Redirects are not followed: give the final address in endpoint_url."


def under(base: str, path: str) -> URL:
    """``path`` below the base URL, whose query string (some gateways want one) is kept.

    Raises:
        ConfigError: not a URL.
    """
    try:
        url = URL(base)
        return url.joinpath(*path.split("/")).with_query(url.query)
    except ValueError as error:
        shown = base.partition("?")[0]  # the query string may hold a secret
        raise ConfigError(f"endpoint_url: {shown!r} is not a URL ({error}).") from None


def shown_url(url: str | URL) -> str:
    """The URL for people: without credentials and query string, which may hold secrets."""
    return str(URL(url).with_user(None).with_query(None).with_fragment(None))


def shown_error(error: Exception) -> str:
    """What went wrong in an exchange, for people; may be empty.

    Many a text of aiohttp's holds the whole URL, and so a query string that may be a secret: only those are shown that
    are known to hold none.
    """
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status}, {' '.join(error.message.split())}"
    if isinstance(error, aiohttp.ClientError) and not isinstance(error, _WITHOUT_URL):
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return str(error)


def needs_proxy(urls: list[str]) -> bool:
    """Whether the environment (HTTPS_PROXY, NO_PROXY and so on) names a proxy for one of the URLs."""
    proxies = getproxies()
    return any(URL(url).scheme in proxies and not proxy_bypass(URL(url).host or "") for url in urls)
