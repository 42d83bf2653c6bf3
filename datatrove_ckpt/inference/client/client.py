"""CompletionClient: one payload in, one answer out, and what to do with everything that is not an answer.

    what happens                                                     then
    400, 413, 422 and any other 4xx                                  RequestRejected: this request never succeeds
    401, 403, 404, any 3xx                                           ServerRefused: no request of this run succeeds
    408, 409, 425, 429, 5xx; refused, reset, torn connections;       tried again, at most request_max_attempts times
    timeouts; bodies that are no completion; no choices;             in all, then RequestFailed
    finish_reason null, "abort", "error"
    the server we launched died, or hangs                            sent again, without using up an attempt
    it died of this request alone, after two other deaths            RequestPoisoned

Only the HTTP status decides, never words in a body: a body may quote the document, and documents say anything.

Sleeps between attempts grow from 0.5 s to 30 s with full jitter, or last as long as Retry-After says (at most 120 s).
A sleeping request holds no slot. There is no task and no log line per request: about 0.1 ms of CPU each, which at
thousands of requests per second is what the event loop has.

An answer that comes from a server that is given up is thrown away, complete as it may look: servers that are told to
stop have answered 200 with half a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerRefused,
)
from datatrove_ckpt.inference.client.answers import Completion, TryAgain, parse_chat, parse_completion
from datatrove_ckpt.inference.client.routing import Death, HealthProbe, Request, Router, ServerLost, Target
from datatrove_ckpt.inference.client.transport import needs_proxy, post, shown_url, transport_to, under
from datatrove_ckpt.redaction import Key

_DEFAULT_TIMEOUT = 3600.0
_FIRST_BACKOFF = 0.5
_MAX_BACKOFF = 30.0
# Seconds a URL is passed over after its connection failed. Without it a dead server, which fails at once and so
# always has the fewest requests in flight, would draw all requests to itself.
_COOLDOWN = 5.0


@dataclass(slots=True)
class ClientStats:
    """Counters of one client's life.

    Attributes:
        requests: attempts sent.
        retries: attempts that failed and were followed by another one.
        resent: attempts that were lost with their server, and sent again.
        answers: completions received.
        in_flight: attempts under way now.
    """

    requests: int = 0
    retries: int = 0
    resent: int = 0
    answers: int = 0
    in_flight: int = 0

    @property
    def lost(self) -> int:
        """Attempts that ended without an answer, and whose request is sent again."""
        return self.retries + self.resent


class CompletionClient:
    """Sends requests to one or several servers that serve the same model.

    Args:
        config: timeouts, attempts, slots; ``use_chat`` chooses the path.
        urls: base URLs, without /v1, of servers that are there to stay. Others come and go with ``up`` and ``died``.
        api_key: bearer token, or None.
        sleep: replaces ``asyncio.sleep`` between attempts; takes seconds.

    Attributes:
        stats: counters.
        router: who is up, and who waits.
        fast_stop: there is no time left for servers to end by themselves.

    Raises:
        ConfigError: a URL that cannot be used.
    """

    def __init__(
        self,
        config: InferenceConfig,
        urls: list[str],
        api_key: Key | str | None,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.stats = ClientStats()
        self.fast_stop = False
        self.router = Router(config.max_concurrent_generations)
        self._config = config
        self._sleep = sleep
        self._parse = parse_chat if config.use_chat else parse_completion
        self._path = "v1/chat/completions" if config.use_chat else "v1/completions"
        self._proxied = config.server_type == "endpoint" and needs_proxy(urls)
        self._fixed = urls
        self._key = Key.wrap(api_key)
        for url in urls:
            if self._key is not None and under(url, "").user is not None:
                raise ConfigError(
                    f"endpoint_url: {shown_url(url)} has credentials inside, and there is an API key too."
                )

    async def __aenter__(self) -> Self:
        for url in self._fixed:
            self.up(self.add(), url, self._key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for target in self.router.targets:
            target.up = False
            await _close(target)

    def add(self, check: HealthProbe | None = None) -> Target:
        """A further target, not up yet.

        Args:
            check: see ``HealthProbe``; called after a failure that may mean that the server is dead.
        """
        target = Target(check)
        self.router.targets.append(target)
        return target

    def up(self, target: Target, url: str, api_key: Key | None) -> None:
        """From now on requests are sent to this URL. A restarted server has another port and another key."""
        # One per server: it is closed with its server, and it holds the key, so that no call has to.
        target.url = under(url, self._path)
        timeout = self._config.request_timeout or _DEFAULT_TIMEOUT
        target.transport = transport_to(target.url, api_key, timeout, self._proxied)
        target.up = True
        self.router.admit()

    def died(self, target: Target, cause: str) -> Death:
        """A server is gone, or will be killed now: what it has in flight is sent again."""
        return self.router.died(target, cause)

    async def disconnect(self, target: Target) -> None:
        """Close all connections to a server that has ``died``."""
        while target.attempts:  # noqa: ASYNC110
            await asyncio.sleep(0)  # they were told to end, and do when it is their turn
        await _close(target)

    async def complete(self, body: bytes) -> Completion:
        """The answer to one request.

        Args:
            body: the final payload as JSON.

        Raises:
            RequestRejected: this request can never succeed.
            RequestPoisoned: this request kills servers.
            RequestFailed: every attempt failed.
            ServerRefused: no request of this run can succeed.
            ServerDied: the server is gone for good.
        """
        request = Request()
        failures = 0
        while True:
            target = await self.router.acquire(request)
            deaths, was_suspect = len(request.deaths), request.is_suspect
            try:
                return await self._attempt(target, request, body)
            except ServerLost:
                alone = len(request.deaths) > deaths and request.deaths[-1].lost == 1
                if was_suspect and alone and not self.router.closed:
                    raise self._poisoned(request) from None
                self.stats.resent += 1
                continue
            except TryAgain as failure:
                if self.router.closed:  # a cluster ends our servers with us: that says nothing about the request
                    self.stats.resent += 1
                    continue
                failures += 1
                delay = self._delay(failure, failures)
            finally:
                self.router.release(target)
            self.stats.retries += 1
            await self._sleep(delay)

    def _delay(self, failure: TryAgain, failures: int) -> float:
        """Seconds until the next attempt.

        Raises:
            RequestFailed: there is none.
        """
        last = self._config.request_max_attempts
        if failures >= last:
            raise RequestFailed(
                f"Given up after {failures} attempts (request_max_attempts={last}). Last cause: {failure}"
            ) from None
        return max(failure.retry_after, backoff_seconds(failures, _FIRST_BACKOFF, _MAX_BACKOFF, jitter=1.0))

    def _poisoned(self, request: Request) -> RequestPoisoned:
        self.router.explain(request)
        deaths = request.deaths
        return RequestPoisoned(
            f"This request was in flight at {len(deaths)} deaths of its server, the last time with nothing else in "
            f"flight. Last cause: {deaths[-1].cause}"
        )

    async def _attempt(self, target: Target, request: Request, body: bytes) -> Completion:
        if not target.up:  # it died between the moment it was given to us and this one
            raise ServerLost
        attempt = target.begin(request)
        self.stats.in_flight += 1
        self.stats.requests += 1
        try:
            async with attempt.scope:
                answer = await self._ask(target, body, attempt.began)
        except (TimeoutError, TryAgain, CkptError):
            if attempt.lost:
                raise ServerLost from None
            raise
        finally:
            target.attempts.discard(attempt)
            self.stats.in_flight -= 1
        if attempt.lost:
            raise ServerLost
        self.stats.answers += 1
        return answer

    async def _ask(self, target: Target, body: bytes, began: float) -> Completion:
        assert target.transport is not None
        try:
            raw = await post(target.transport, target.url, body, self._config.model_name_or_path)
            answer = self._parse(raw)
            target.alive(began)
            return answer
        except (RequestRejected, ServerRefused):
            target.alive(began)
            raise
        except TryAgain as failure:
            if failure.is_sound:
                target.alive(began)
            if failure.unreachable:
                target.cools_until = time.monotonic() + _COOLDOWN
            if target.check is not None and not failure.is_sound:
                await target.check(began, not failure.is_busy)
            raise


async def _close(target: Target) -> None:
    transport, target.transport = target.transport, None
    if transport is not None:
        await transport.close()
