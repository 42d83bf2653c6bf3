"""One HTTP exchange: a body sent, a 2xx body back, or the error that says what the status means.

See ``client.py`` for the table. Errors raised here have no cause attached: the frames they come from hold headers.
"""

from __future__ import annotations

import io
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from datatrove_ckpt.errors import CkptError, ConfigError, RequestRejected, ServerRefused
from datatrove_ckpt.inference.answers import TryAgain, parse_retry_after

_RETRIED = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({401, 403, 404})
_SHOWN_BODY = 2000  # characters
# Above this size aiohttp warns about plain bytes and wants a stream that it can send in pieces.
_STREAMED_SIZE = 1 << 20
_HEADERS = {"Content-Type": "application/json"}


async def post(session: aiohttp.ClientSession, url: URL, body: bytes, model: str) -> bytes:
    """The body of a 2xx answer. ``model`` is for the text of errors.

    Raises:
        RequestRejected, ServerRefused, TryAgain: see the table in ``client.py``.
    """
    data = body if len(body) <= _STREAMED_SIZE else io.BytesIO(body)
    try:
        async with session.post(url, data=data, headers=_HEADERS, allow_redirects=False) as response:
            if 200 <= response.status < 300:
                return await response.read()
            raise await _error(response, url, model)
    except TimeoutError as error:
        kind = "connect" if isinstance(error, aiohttp.ConnectionTimeoutError) else "answer"
        raise TryAgain(f"no {kind} in time from {shown_url(url)}", unreachable=True) from None
    except (aiohttp.ClientError, OSError) as error:
        cause = f"{type(error).__name__} from {shown_url(url)}: {error}"
        raise TryAgain(cause, unreachable=True) from None


async def _error(response: aiohttp.ClientResponse, url: URL, model: str) -> TryAgain | CkptError:
    status = response.status
    text = await _error_text(response)
    if status in _RETRIED or status >= 500:
        wait = parse_retry_after(response.headers.get("Retry-After", ""))
        return TryAgain(f"HTTP {status} from {shown_url(url)}: {text}", wait, status=status)
    if status in _REFUSED or status < 400:
        return ServerRefused(
            f"{shown_url(url)} answered HTTP {status} for model {model!r}. "
            f"{_hint(status)} The server says: {text or '(nothing)'}"
        )
    return RequestRejected(status, text)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    try:
        raw = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""  # the status is known, and it alone decides
    return raw[: 4 * _SHOWN_BODY].decode(errors="replace")[:_SHOWN_BODY]


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
        raise ConfigError(f"endpoint_url: {base!r} is not a URL ({error}).") from None


def shown_url(url: str | URL) -> str:
    """The URL for people: without credentials and query string, which may hold secrets."""
    return str(URL(url).with_user(None).with_query(None).with_fragment(None))


def needs_proxy(urls: list[str]) -> bool:
    """Whether the environment (HTTPS_PROXY, NO_PROXY and so on) names a proxy for one of the URLs."""
    proxies = getproxies()
    return any(URL(url).scheme in proxies and not proxy_bypass(URL(url).host or "") for url in urls)
