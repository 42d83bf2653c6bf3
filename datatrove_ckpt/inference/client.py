"""CompletionClient: one payload in, one answer out, and what to do with everything that is not an answer.

    what happens                                                     then
    400, 413, 422 and any other 4xx                                  RequestRejected: this request never succeeds
    401, 403, 404, any 3xx                                           ServerRefused: no request of this run succeeds
    408, 409, 425, 429, 5xx; refused, reset, torn connections;       tried again, at most request_max_attempts times
    timeouts; bodies that are no completion; no choices;             in all, then RequestFailed
    finish_reason null, "abort", "error"

Only the HTTP status decides, never words in a body: a body may quote the document, and documents say anything.

Sleeps between attempts grow from 0.5 s to 30 s with full jitter, or last as long as Retry-After says (at most 120 s).
A sleeping request holds no slot. There is no task and no log line per request: about 0.1 ms of CPU each, which at
thousands of requests per second is what the event loop has.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError, ConfigError, RequestFailed, RequestRejected, ServerRefused
from datatrove_ckpt.inference.answers import Completion, TryAgain, parse_chat, parse_completion, parse_retry_after

_RETRIED = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({401, 403, 404})
_DEFAULT_TIMEOUT = 3600.0
_CONNECT_TIMEOUT = 30.0
_FIRST_BACKOFF = 0.5
_MAX_BACKOFF = 30.0
_SHOWN_BODY = 2000  # characters
# Seconds a URL is passed over after its connection failed. Without it a dead server, which fails at once and so
# always has the fewest requests in flight, would draw all requests to itself.
_COOLDOWN = 5.0
# uvicorn, which serves vLLM and SGLang, closes idle connections after 5 s. We drop them first: a request sent
# into a closing connection is a failed attempt.
_KEEPALIVE = 4.0
_READ_BUFFER = 1 << 18
# Above this size aiohttp warns about plain bytes and wants a stream that it can send in pieces.
_STREAMED_SIZE = 1 << 20


@dataclass(slots=True)
class ClientStats:
    """Counters of one client's life.

    Attributes:
        requests: attempts sent.
        retries: attempts that failed and were followed by another one.
        answers: completions received.
        in_flight: attempts under way now.
    """

    requests: int = 0
    retries: int = 0
    answers: int = 0
    in_flight: int = 0


@dataclass(slots=True)
class _Target:
    """One server: where to post, and how busy it is."""

    url: URL
    headers: dict[str, str] = field(repr=False)
    in_flight: int = 0
    cools_until: float = 0.0


class CompletionClient:
    """Sends requests to one or several servers that serve the same model.

    Args:
        config: timeouts, attempts, slots; ``use_chat`` chooses the path.
        urls: base URLs, without /v1.
        api_key: bearer token, or None.
        sleep: replaces ``asyncio.sleep`` between attempts; takes seconds.

    Attributes:
        stats: counters.

    Raises:
        ConfigError: a URL that cannot be used.
    """

    def __init__(
        self,
        config: InferenceConfig,
        urls: list[str],
        api_key: str | None,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.stats = ClientStats()
        self._config = config
        self._sleep = sleep
        self._parse = parse_chat if config.use_chat else parse_completion
        self._slots = asyncio.Semaphore(config.max_concurrent_generations)
        self._session: aiohttp.ClientSession | None = None
        self._targets: list[_Target] = []
        self.retarget(urls, api_key)
        self._proxied = config.server_type == "endpoint" and needs_proxy(urls)

    def retarget(self, urls: list[str], api_key: str | None) -> None:
        """Send all further attempts elsewhere: a restarted server has another port and another key."""
        path = "v1/chat/completions" if self._config.use_chat else "v1/completions"
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._targets = [_Target(under(url, path), headers) for url in urls]
        for target in self._targets:
            if api_key and target.url.user is not None:
                shown = shown_url(target.url)
                raise ConfigError(f"endpoint_url: {shown} has credentials inside, and there is an API key too.")

    async def __aenter__(self) -> Self:
        config = self._config
        timeout = aiohttp.ClientTimeout(
            total=config.request_timeout or _DEFAULT_TIMEOUT, connect=_CONNECT_TIMEOUT, sock_connect=_CONNECT_TIMEOUT
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=timeout,
            read_bufsize=_READ_BUFFER,
            # A proxy in the environment is never meant for 127.0.0.1. For endpoints it is, but aiohttp then asks
            # the environment in a thread per request: only where a proxy applies.
            trust_env=self._proxied,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def complete(self, body: bytes) -> Completion:
        """The answer to one request.

        Args:
            body: the final payload as JSON.

        Raises:
            RequestRejected: this request can never succeed.
            ServerRefused: no request of this run can succeed.
            RequestFailed: every attempt failed.
        """
        last = self._config.request_max_attempts
        attempt = 1
        while True:
            try:
                async with self._slots:
                    return await self._attempt(body)
            except TryAgain as failure:
                if attempt >= last:
                    raise RequestFailed(
                        f"Given up after {attempt} attempts (request_max_attempts={last}). Last cause: {failure}"
                    ) from None
                delay = max(failure.retry_after, _backoff(attempt))
            attempt += 1
            self.stats.retries += 1
            await self._sleep(delay)

    async def _attempt(self, body: bytes) -> Completion:
        target = self._least_busy()
        target.in_flight += 1
        self.stats.in_flight += 1
        self.stats.requests += 1
        try:
            answer = self._parse(await self._post(target, body))
        except TryAgain as failure:
            if failure.unreachable:
                target.cools_until = time.monotonic() + _COOLDOWN
            raise
        finally:
            target.in_flight -= 1
            self.stats.in_flight -= 1
        self.stats.answers += 1
        return answer

    def _least_busy(self) -> _Target:
        if len(self._targets) == 1:
            return self._targets[0]
        now = time.monotonic()
        return min(self._targets, key=lambda target: (target.cools_until > now, target.in_flight))

    async def _post(self, target: _Target, body: bytes) -> bytes:
        """The body of a 2xx answer.

        Raises:
            RequestRejected, ServerRefused, TryAgain: see the table above.
        """
        assert self._session is not None, "use the client as `async with CompletionClient(...)`"
        data = body if len(body) <= _STREAMED_SIZE else io.BytesIO(body)
        try:
            async with self._session.post(
                target.url, data=data, headers=target.headers, allow_redirects=False
            ) as response:
                if 200 <= response.status < 300:
                    return await response.read()
                raise await self._error(response, target)
        except TimeoutError as error:
            kind = "connect" if isinstance(error, aiohttp.ConnectionTimeoutError) else "answer"
            raise TryAgain(f"no {kind} in time from {shown_url(target.url)}", unreachable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{type(error).__name__} from {shown_url(target.url)}: {error}"
            raise TryAgain(cause, unreachable=True) from None

    async def _error(self, response: aiohttp.ClientResponse, target: _Target) -> TryAgain | CkptError:
        status = response.status
        text = await _error_text(response)
        if status in _RETRIED or status >= 500:
            wait = parse_retry_after(response.headers.get("Retry-After", ""))
            return TryAgain(f"HTTP {status} from {shown_url(target.url)}: {text}", wait)
        if status in _REFUSED or status < 400:
            return ServerRefused(
                f"{shown_url(target.url)} answered HTTP {status} for model {self._config.model_name_or_path!r}. "
                f"{_hint(status)} The server says: {text or '(nothing)'}"
            )
        return RequestRejected(status, text)


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


def _hint(status: int) -> str:
    if status == 404:
        return "Check model_name_or_path, endpoint_url (without /v1) and use_chat."
    if status in (401, 403):
        return "Check api_key or api_key_env, and that the key may use this model."
    return "Redirects are not followed: give the final address in endpoint_url."


def _backoff(attempt: int) -> float:
    """Seconds to sleep after the ``attempt``-th failure; full jitter, so that waiting requests do not come at once."""
    return random.uniform(0, min(_MAX_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(attempt - 1, 30)))


async def _error_text(response: aiohttp.ClientResponse) -> str:
    try:
        raw = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""  # the status is known, and it alone decides
    return raw[: 4 * _SHOWN_BODY].decode(errors="replace")[:_SHOWN_BODY]
