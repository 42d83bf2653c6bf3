"""Sends one payload until there is an answer, or until no answer can come.

    what happens                                                     then
    400, 413, 414, 422, 431                                          RequestRejected: this request
                                                                     never succeeds; ServerRefused
                                                                     if no other does
    408, 409, 424, 425, 429, 444, 460, 498, 499, 5xx; refused,       retried, as long as the clocks
    reset, torn connections;                                         below allow; then
    timeouts; bodies that are no completion; no choices;             ServerUnavailable (no request
                                                                     is answered), or
    two answers to one; finish_reason null, "abort" and the like     RequestFailed (others are);
                                                                     both stop the run
    an unknown form, three times in a row, also of HTTP, or for a    ServerRefused, with path and
    minute finish_reason null, from a server that has sent no other  body
    401, 402, 403, 404 and any other 4xx, any 3xx, 501, 429          ServerRefused: no request of
    for lack of credit                                               this run succeeds. 403, 406,
                                                                     451 are retried while others
                                                                     are answered. One of several
                                                                     endpoints gets no more requests
    bytes without a request, for the third time                      ServerRefused: answers may be
                                                                     exchanged
    the server we launched died, or hangs                            sent again, without using up an
                                                                     attempt
    the server died of this request alone, after two other deaths    RequestPoisoned
    this process may open no more connections                        TooManyOpenFiles: the run stops

Only the HTTP status decides: a body may quote the document. Two exceptions: llama.cpp's 500 for a
text that is too long for an embedding counts as 413, and a 429 whose code is "insufficient_quota"
or the like as 402.

Sleeps between attempts grow from 0.5 s to 30 s with full jitter, or last as long as Retry-After
requires (at most 120 s, and never beyond the patience).

Answers from stopped or lost servers are dropped: they may be half a text with status 200.

Two clocks end the retries; both run for ``server_patience_seconds``:

    the outage clock   runs while no request is answered, unless an endpoint works and only its
                       limit per minute is used up. At its end the run stops
                       (``ServerUnavailable``).
    a request's clock  adds up the time in which this request fails while others are answered. At
                       its end, and after ``request_max_attempts`` such failures, the request has
                       failed (``RequestFailed``).

Other requests of the same kind show whether a server works (``evidence.py``). A rejection is its
document's fault if the server then answers a request that was sent later. So are
``request_max_attempts`` failures (``RequestFailed.is_documents``) since which it has answered 50
others. Without these answers, a probe decides: answered, it is the document's fault; refused, the
server's, which gets no more requests of the run. A request that failed in an outage is counted anew
when the server answers others again.

Many requests may compete for a small rate, so failures of a busy server (429, 498, 503, 529) have
ten times the patience. A busy server that has worked on a request for a minute counts as reachable.

The errors of ``post`` and ``get`` have no cause, because its frames would hold the API key.
"""

import asyncio
import contextvars
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import orjson
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.counts import Tokens, WorkCounts
from datatrove_ckpt.common.formatting import cut
from datatrove_ckpt.common.redaction import Secret, excerpt, redact, remember_sent
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.endpoints import EndpointConfig
from datatrove_ckpt.config.inference_config import FIRST_LIMIT
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerRefused,
    ServerUnavailable,
    named,
)
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody, with_field
from datatrove_ckpt.inference.client.evidence import PROBE_INTERVAL, AnsweredRequests, with_one_word
from datatrove_ckpt.inference.client.half_answers import (
    GENERATE,
    CannotContinue,
    Continuation,
    HalfAnswer,
)
from datatrove_ckpt.inference.client.http1 import (
    ConnectTimeout,
    Response,
    Stream,
    Transport,
    UnreadableResponse,
)
from datatrove_ckpt.inference.client.responses import (
    CHAT,
    COMPLETIONS,
    Api,
    Completion,
    NoFinishReason,
    RetryableError,
    UnexpectedResponse,
    listed_models,
    token_counts,
    unfinished,
    unlisted,
)
from datatrove_ckpt.inference.client.routing import (
    AdaptiveLimit,
    Attempt,
    AttemptLost,
    MustDivide,
    Request,
    Router,
    Sender,
    Target,
    limits_of,
)
from datatrove_ckpt.inference.client.urls import Extras, HiddenUrl
from datatrove_ckpt.process.open_files import refuse_exhaustion, requests_at_once

# 203: a proxy changed something. 202, 204 and 206 lack the answer or a part.
_ANSWERED = frozenset({200, 201, 203})
_TOO_LARGE = re.compile(
    rb'\s*\{"error":\{"code":500,"message":"input \(\d+ tokens\) is too large to process\. '
    rb"increase the physical batch "
    rb'size \(current batch size: \d+\)","type":"server_error"\}\}\s*'
)
# The codes of OpenAI, Moonshot and Z.ai in a 429 that only a payment ends. Quotes in a quoted
# document are escaped.
_LACKS_CREDIT = re.compile(
    rb'"(?:code|type)": ?"(?:insufficient_quota|billing_hard_limit_reached'
    rb'|exceeded_current_quota_error|1113)"'
)


class ExchangeFailed(Exception):
    """There is no response. ``kind``: "TimeoutError" after a timeout."""

    def __init__(self, details: str, kind: str = "") -> None:
        self.details = details
        self.kind = kind
        super().__init__(details or kind)


async def get(
    url: HiddenUrl, api_key: Secret | None, seconds: float, proxied: bool = False
) -> Response:
    """Returns the response, whatever its status.

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


async def post(
    transport: Transport,
    body: AnyBody,
    model: str,
    extras: Extras | None = None,
    stream: Stream | None = None,
) -> Response:
    """Returns an answer.

    Raises:
        RequestRejected, ServerRefused, RetryableError, TooManyOpenFiles: the table in ``client.py``
            has the causes.
    """
    url = transport.url
    try:
        response = await transport.send(body, extras, stream)
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
    lacks_credit = status == 402 or (status == 429 and bool(_LACKS_CREDIT.search(response.body)))
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


def refusal_hint(
    url: HiddenUrl, api_key: Secret | None, status: int, proxy: HiddenUrl | None
) -> str:
    hint = "refuses this run's key: check api_key_env, that the key may use this model, and proxies"
    if api_key is None and not any(url.secrets):
        hint = "wants a key, and this run sends none: set api_key_env, or check proxies"
    if proxy is None or status == 401:
        return hint
    variables = f"{url.reveal().scheme}_proxy or all_proxy"
    advice = f"name {url.reveal().host} in NO_PROXY, or correct {variables}. Or it {hint}"
    if status == 407:
        advice = f"write its user and password into {variables}, as http://USER:PASSWORD@HOST:PORT"
    return f"is reached through the proxy {proxy}: {advice}"


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


# Seconds for which only other servers get requests after a failed connection, and after other
# failures: a server that fails immediately has the fewest requests in flight, and would get all.
_COOLDOWN = 5.0
_SHORTEST_REST = 1.0
_SAY_AFTER = 3.0  # a reset connection or a single 503 is normal
_SAY_FAILS_AGAIN = 600.0  # an endpoint with a limit fails each minute
_WORKS = 60.0
_ENOUGH = 50  # answers that show that a server works
_ANSWERS_WITHIN = 1.0  # seconds before a probe
_MOST_UNDECIDED = 8  # rejected requests that let others start before a probe
_LOOK_SECONDS = 0.05
_LIST_SECONDS = 10.0

_HINT = "If its answers are complete, set accept_null_finish_reason to true"


def hang_after(longest: float) -> float:
    """Returns the silence, in seconds, after which a server that has answered counts as hanging.

    CPUs may be silent for minutes, so the limit grows with the longest silence so far.
    """
    return max(120.0, 6 * longest)


class Outage:
    """The outage clock of one client. ``hangs``: seconds of unusual silence, or 0."""

    def __init__(
        self, patience: float, clock: Callable[[], float] = time.monotonic, model: str = ""
    ) -> None:
        self.patience = patience
        self.model = model
        self.clock = clock
        self.answers = 0
        self.unreachable = False
        self.hangs = 0.0
        self._seen = 0
        self._seen_at = math.inf
        self._quiet = 0.0
        self._longest = 0.0
        self._prefix = f"{model}: " if model else ""
        self._context = contextvars.copy_context()
        self._since = self._next_line_at = math.inf
        self._is_shown = False

    def answered(self) -> None:
        self.answers += 1
        if self._since < math.inf:
            self.ended()

    def grown(self) -> None:
        self._seen_at = self.clock()
        self.ended()

    def ended(self) -> None:
        if self._is_shown:
            self._log("INFO", f"The server answers, after {self.seconds:.0f} s.")
        self._since = self._next_line_at = math.inf
        self._is_shown = False

    def check_silence(self, busy: float, timeout: float, name: str = "The server") -> None:
        """Warns of an unusual silence, and sends nothing again: a slow endpoint, which may be paid,
        behaves alike.
        """
        now = self.clock()
        if self.answers > self._seen:
            self._seen = self.answers
            self._seen_at = now
            self._longest = max(self._longest, self._quiet, busy)
            if self.hangs:
                self._log("INFO", f"The server answers, after {self._quiet:.0f} s.")
        self._quiet = min(busy, now - self._seen_at)
        had_hung = self.hangs > 0
        self.hangs = 0.0
        if self._since == math.inf and self._quiet >= hang_after(self._longest):
            self.hangs = self._quiet
            if not had_hung:
                self._log(
                    "WARNING",
                    f"{name} has not answered for {self.hangs:.0f} s; its slowest answer took "
                    f"{self._longest:.0f} s. Requests wait {timeout:g} s each (request_timeout). "
                    "If it hangs, stop the run, and run again.",
                )

    def begin(self, unreachable: bool, since: float) -> None:
        self.unreachable = unreachable
        if self._since == math.inf:
            self._since = since
            self._next_line_at = since + _SAY_AFTER

    def failed(self, failure: RetryableError, oldest: Callable[[], float]) -> None:
        """Raises ServerUnavailable if no request was answered for ``patience`` seconds."""
        self.begin(failure.unreachable, self.clock())
        waited = self.seconds
        if failure.server_is_limited and waited >= _WORKS and oldest() >= _WORKS:
            return
        if waited >= self.patience:
            raise ServerUnavailable(
                f"No request was answered for {waited:.0f} s "
                f"(server_patience_seconds={self.patience:g}). The last failure: {failure}.",
                " Check the server and the network, and run again.",
            )
        self.show(str(failure))

    def show(self, cause: str) -> None:
        if self.next_line() > 0:
            return
        self._next_line_at = self.clock() + 60.0
        self._is_shown = True
        state = "is unreachable" if self.unreachable else "gives no answers"
        first = ""
        if self.unreachable and not self.answers:
            first = " Nothing has answered there yet: is the address right?"
        self._log(
            "WARNING",
            f"The server {state} ({cut(cause, 300)}); waiting, {self.seconds:.0f} s of "
            f"{self.patience:g} s (server_patience_seconds), then the task stops.{first}",
        )

    def _log(self, level: str, line: str) -> None:
        self._context.run(logger.log, level, f"{self._prefix}{line}")

    def next_line(self) -> float:
        return self._next_line_at - self.clock()

    def remaining(self) -> float:
        return self._since + self.patience - self.clock()

    @property
    def seconds(self) -> float:
        return max(0.0, self.clock() - self._since)


@dataclass(eq=False)
class _ServerFailures:
    """A request's failures at a server that had given ``answers`` to others before."""

    answers: int
    since: float
    number: int
    last_at: float


@dataclass(eq=False)
class RequestClock:
    """The clock of one request that has failed.

    Attributes:
        is_alone: whether the server has answered no request that was sent between the last two
            failures, unless it only has no room.
    """

    _outage: Outage
    _began_at: float
    _answers: int
    _tiers: Sequence[str]
    _attempts: int = 0
    beside: int = 0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self._at = self._began_at
        self._failures: dict[AnsweredRequests, _ServerFailures] = {}
        self.is_alone = False

    def failed(self, failure: RetryableError, answered: AnsweredRequests, max_attempts: int) -> int:
        """Counts a failure and returns the number of failures.

        Raises:
            RequestFailed: this request has used up its patience or attempts.
        """
        self._attempts += 1
        self.is_alone = False
        if not (failure.unsent or failure.server_is_limited):
            self._count(answered)
            self.check(failure, max_attempts)
        now = self._outage.clock()
        if self._outage.answers > self._answers:
            self.beside += 1
            self._seconds += now - self._at
        self._at = now
        self._answers = self._outage.answers
        if self.beside >= max_attempts and self.remaining(failure) <= 0:
            raise RequestFailed(
                f"Given up after {self._attempts} attempts: for {self._seconds:.0f} s this request "
                f"failed while others were answered (request_max_attempts={max_attempts}, "
                f"server_patience_seconds={self._outage.patience:g}). Last cause: {failure}"
            )
        return self._attempts

    def _count(self, answered: AnsweredRequests) -> None:
        now = time.monotonic()
        failures = self._failures.get(answered)
        if failures is not None:
            self.is_alone = answered.sent_at < failures.last_at
        # A server that has answered nothing since the first failure may have been away.
        if failures is None or answered.sent_at < failures.since:
            failures = self._failures[answered] = _ServerFailures(answered.number, now, 0, now)
        failures.number += 1
        failures.last_at = now

    @property
    def number(self) -> int:
        return sum(failures.number for failures in self._failures.values())

    def check(self, failure: RetryableError, max_attempts: int) -> None:
        counted = sum(
            failures.number
            for answered, failures in self._failures.items()
            if answered.number - failures.answers >= _ENOUGH or answered.probed_at >= failures.since
        )
        if counted >= max_attempts:
            error = RequestFailed(
                f"Given up after {self._attempts} attempts: the server answers other requests "
                f"(request_max_attempts={max_attempts}). Last cause: {failure}"
            )
            error.is_documents = True
            raise error

    def next_api(self, api: Api, failure: RetryableError) -> Api:
        if not self._tiers or (failure.unreachable and not failure.timed_out):
            return api
        waited = (self._outage.clock() - self._began_at) / self._outage.patience
        tier = min(int(waited * len(self._tiers)), len(self._tiers) - 1)
        return replace(api, tiers=self._tiers[tier:])

    def remaining(self, failure: RetryableError) -> float:
        return self._outage.patience * (10 if failure.server_is_limited else 1) - self._seconds


class EndpointAccess(NamedTuple):
    name: str
    config: EndpointConfig
    url: HiddenUrl
    api_key: Secret | None
    ranks: int = 1


class ModelServers:
    """The servers of one model. Ranks share ``config.max_concurrent_generations``."""

    def __init__(
        self, config: InferenceConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.router = Router(requests_at_once(config.max_concurrent_generations, config.servers))
        self.outage = Outage(config.server_patience_seconds, clock, config.name)
        self.continues_answers = False

    def add_endpoints(self, endpoints: Sequence[EndpointAccess]) -> None:
        for endpoint in endpoints:
            if endpoint.api_key is not None and endpoint.url.has_credentials:
                raise ConfigError(
                    f"{endpoint.url} contains credentials, and an API key is also set. Remove one.",
                    setting="endpoint_url",
                )
        self.router.has_homes = self.config.endpoints is None
        for order, endpoint in enumerate(endpoints):
            target = self.router.add()
            settings = endpoint.config
            if self.config.endpoints is not None:
                target.name = endpoint.name
            target.model = settings.model or self.config.model_name_or_path
            if settings.weight is None:
                target.order = order
            else:
                target.weight = settings.weight
            if settings.requests_per_minute or settings.tokens_per_minute:
                target.limits = limits_of(settings)
                self.router.has_limits = True
            self.router.divide(target, endpoint.ranks)
            self.mark_up(target, endpoint.url, endpoint.api_key)

    async def close(self) -> None:
        for target in self.router.targets:
            target.up = False
            await _close(target)

    def report_event(self, event: str, name: str, url: str | None, cause: str) -> None:
        for sender in self.router.senders:
            if sender.on_server is not None:
                sender.on_server(event, name, url, cause)

    def mark_up(
        self,
        target: Target,
        url: HiddenUrl,
        api_key: Secret | None,
        first_limit: int = FIRST_LIMIT,
    ) -> None:
        """Sends requests to this URL, such as the new port and key of a restarted server."""
        for rank in target.ranks:
            rank.url = url
            rank.api_key = api_key
            self.transport(rank, default_api(self.config).path)  # raises for a wrong URL now
            rank.pace = None
            if self.config.follows_metrics:
                rank.limit = first_limit
            elif self.config.max_concurrent_generations == "auto":
                rank.pace = AdaptiveLimit(rank)
            else:
                rank.limit = self.config.max_concurrent_generations / len(target.ranks)
            rank.cache_share_per_request = 0.0
            rank.failures = 0
            rank.cooldown_until = 0.0
            rank.up = True
        self.outage.ended()  # a restart is no outage
        self.router.admit(resized=True)

    def set_continuation(self, target: Target, continuation: Continuation | None) -> None:
        for rank in target.ranks:
            rank.continuation = continuation
        self.continues_answers = self.continues_answers or continuation is not None

    async def disconnect(self, target: Target) -> None:
        while target.attempts:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for rank in target.ranks:
            await _close(rank)

    def transport(self, target: Target, path: str) -> Transport:
        """Returns the connections to a server, which hold the key.

        Raises:
            ServerRefused: nothing more is sent to this path of the server.
        """
        if (transport := target.transports.get(path)) is None:
            assert target.url is not None
            proxied = self.config.server_type == "endpoint"
            beside = next(iter(target.transports.values()), None)
            url = target.url.api(path)
            transport = Transport(
                url,
                target.api_key,
                self.timeout,
                proxied,
                beside=beside,
                headers={"X-data-parallel-rank": target.rank} if target.rank else {},
            )
            target.transports[path] = transport
        transport.check()
        return transport

    @property
    def timeout(self) -> float:
        return self.config.request_timeout or 3600.0

    def look(self) -> None:
        if self.config.server_type == "endpoint":
            name = "The server"
            if len(self.router.servers) > 1:
                name = ", ".join(
                    str(target.url) for target in self.router.servers if target.attempts
                )
            self.outage.check_silence(self.oldest_in_flight(), self.timeout, name)

    def oldest_in_flight(self) -> float:
        now = time.monotonic()
        starts = [
            attempt.started_at for target in self.router.servers for attempt in target.attempts
        ]
        return now - min(starts, default=now)


def count_answer(work: WorkCounts, answer: Completion, config: InferenceConfig) -> Tokens:
    tokens = token_counts(answer.usage)
    work.requests += 1
    work.prompt_tokens += tokens.prompt
    work.completion_tokens += tokens.completion
    if tokens.cached:
        work.cached_tokens += tokens.cached
    if tokens.reasoning:
        work.reasoning_tokens += tokens.reasoning
    tier = answer.service_tier
    if tier:
        tiers = work.tiers
        name = tier if tier in tiers else redact(tier)
        if name in tiers or len(tiers) < 20:  # a server may say anything
            tiers[name] += 1
    if answer.endpoint:
        work.endpoints[answer.endpoint] += 1
    if config.prices_at(answer.endpoint):
        cost = config.cost(tokens, tier, answer.endpoint)
        work.cost += cost
        if answer.endpoint:
            work.endpoint_costs[answer.endpoint] += cost
    return tokens


def default_api(config: InferenceConfig) -> Api:
    if config.use_chat:
        return CHAT
    return COMPLETIONS


class CompletionClient:
    """Sends a rank's requests to a model's servers. ``pausing``: requests before their next
    attempt.
    """

    def __init__(
        self,
        servers: ModelServers,
        sender: Sender,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.servers = servers
        self.sender = sender
        self.without_reason = self.pausing = 0
        self.outage = servers.outage
        self.api = default_api(servers.config)
        self._config = servers.config
        self._router = servers.router
        self._router.senders.append(self.sender)
        self._sleep = sleep

    async def unlisted_models(self) -> str:
        sentences = ""
        for target in self._router.servers:
            if target.url is None or self._config.server_type != "endpoint":
                continue
            url = target.url.api("models")
            with suppress(ExchangeFailed):
                response = await get(url, target.api_key, _LIST_SECONDS, proxied=True)
                models = listed_models(response.body) if response.status == 200 else None
                if models is not None and target.model not in models:
                    sentences += f" {unlisted(url, target.model, models)}"
        return sentences

    @property
    def is_first(self) -> bool:
        return self._router.senders[:1] == [self.sender]

    def leave(self) -> None:
        self._router.senders.remove(self.sender)

    @property
    def oldest(self) -> Attempt | None:
        return self._router.oldest_of(self.sender)

    @property
    def in_flight(self) -> int:
        return len(self._router.in_flight_of(self.sender))

    @property
    def must_be_answered(self) -> int:
        """Requests in flight that would be paid for again after a stop."""
        attempts = self._router.in_flight_of(self.sender)
        return sum(not attempt.request.continues for attempt in attempts)

    @property
    def waiting(self) -> int:
        return self._router.waiting_of(self.sender) + self.pausing

    async def complete(
        self, body: AnyBody, api: Api | None = None, request: Request | None = None
    ) -> Completion:
        """Returns the answer to one request.

        Raises:
            MustDivide: a shared request was in flight at several deaths, or fails while others
                succeed.
            RequestRejected, RequestPoisoned, RequestFailed, ServerUnavailable, ServerRefused,
                TooManyOpenFiles: the table of this module has the causes.
            ServerDied: no server remains, and none may be restarted.
        """
        asked = api = api or self.api
        request = request or Request(self.sender)
        work = self.sender.work
        began_at = self.outage.clock()
        answers = self.outage.answers
        clock: RequestClock | None = None
        rejection: CkptError | None = None
        while True:
            target = self._router.take(request) or await self._router.acquire(request)
            deaths = len(request.deaths)
            was_quarantined = deaths > 0 and request.is_quarantined
            try:
                # At the end of the patience, a last request is sent, which decides.
                if target.pace is not None and (
                    seconds := min(target.pace.take(), max(0.0, self.outage.remaining()))
                ):
                    if not self._router.has_other(target):
                        await self._pause(seconds)
                    if target.limits is not None:
                        target.limits.not_counted(request.quota_use)
                    continue
                return await self._attempt(target, request, body, api)
            except AttemptLost:
                self._lost(request, deaths, was_quarantined)
                continue
            except ServerRefused as error:
                self._leave(target, error)
                continue
            except RequestRejected as error:
                rejection = named(error, target.name)
            except RetryableError as error:
                work.sent -= error.unsent
                # A cluster stops our servers together with us.
                if request.may_not_be_sent:
                    work.resent += 1
                    continue
                clock = clock or RequestClock(self.outage, began_at, answers, api.tiers)
                failure = error
                clock, delay = await self._failed(error, target, request, clock, body, api)
            finally:
                self._router.release(target)
            if rejection is not None:
                await self._decide(target, request, body, asked, rejection)
                return await self.complete(body, asked, request)
            assert clock is not None
            work.retries += not failure.unsent
            if request.is_shared and clock.beside >= 2 and not failure.server_is_well:
                raise MustDivide
            await self._wait(delay, failure)
            api = clock.next_api(api, failure)

    def _lost(self, request: Request, deaths: int, was_quarantined: bool) -> None:
        alone = len(request.deaths) > deaths and request.deaths[-1].in_flight == 1
        if was_quarantined and alone and not request.may_not_be_sent:
            self._router.attribute_deaths(request)
            raise RequestPoisoned(
                f"This request was in flight at {len(request.deaths)} deaths of its server, the "
                f"last time alone. Last cause: {request.deaths[-1].cause}"
            ) from None
        self.sender.work.resent += 1
        self.sender.work.errors["server lost"] += 1
        if request.is_shared and request.is_quarantined:
            raise MustDivide from None

    async def _failed(
        self,
        error: RetryableError,
        target: Target,
        request: Request,
        clock: RequestClock,
        body: AnyBody,
        api: Api,
    ) -> tuple[RequestClock, float]:
        """Returns the clock of the next attempt, and the seconds of the wait. The clock is new if
        the answer has grown, or is requested as a whole from now on.
        """
        half = request.half
        new = RequestClock(self.outage, self.outage.clock(), self.outage.answers, api.tiers)
        if half is not None and half.has_grown:
            clock = new  # many attempts may each add a part
        try:
            return clock, await self._delay_after(error, target, clock, body, api)
        except RequestFailed:
            if half is None or not request.continues:
                raise
            half.is_refused = True
            return new, 0.0

    async def _delay_after(
        self, error: RetryableError, target: Target, clock: RequestClock, body: AnyBody, api: Api
    ) -> float:
        """Waits while the request keeps its place. Returns the seconds of the further wait."""
        if not self._router.has_spent:
            self.outage.failed(error, self.servers.oldest_in_flight)
        max_attempts = self._config.request_max_attempts
        answered = target.evidence.of(api)
        failures = clock.failed(error, answered, max_attempts)
        if clock.is_alone or clock.number >= max_attempts:
            if await self._probe(target, body, api):
                clock.check(error, max_attempts)
            elif answered.refusal is not None:
                self._leave(target, copy(answered.refusal))
                return 0.0
        if target.cooldown_until > time.monotonic() and self._router.has_other(target):
            return 0.0
        retry_after = min(error.retry_after or 0.0, clock.remaining(error))
        delay = retrying.SERVER.wait(failures, retry_after)
        if target.pace is None or not error.server_is_limited:
            return delay
        await self._wait(max(delay, target.pace.seconds), error)
        return 0.0

    async def _decide(
        self,
        target: Target,
        request: Request,
        body: AnyBody,
        api: Api,
        rejection: CkptError,
    ) -> None:
        """Waits for evidence about a rejection. Returns if another server must get the request."""
        answered = target.evidence.of(api)
        # Its model and key stay the same.
        is_own = self._config.server_type != "endpoint"
        if request.is_shared:
            raise rejection
        rejected_at = time.monotonic()
        began_at = self.outage.clock()
        is_shown = False
        is_limited = began_at < target.evidence.probe_at < math.inf
        frees_place = is_limited or self.sender.undecided < _MOST_UNDECIDED
        with self.sender.deciding(frees_place):
            async with target.evidence.deciding:
                while answered.sent_at < rejected_at and target.up:
                    if is_own and answered.number:
                        break
                    if answered.refusal is not None:
                        self._leave(target, copy(answered.refusal))
                        return
                    waited = self.outage.clock() - began_at
                    if waited >= _SAY_AFTER and not is_shown:
                        is_shown = True
                        logger.info(
                            f"{rejection}: another answer, or a probe within {PROBE_INTERVAL:.0f} "
                            "s, shows whether the document is at fault."
                        )
                    patience = self.outage.patience
                    if any(attempt.started_at > rejected_at for attempt in target.attempts):
                        patience = max(patience, self.servers.timeout)
                    if waited >= patience:
                        raise RequestFailed(
                            "The server rejected this request, and answered no other in "
                            f"{waited:.0f} s (server_patience_seconds={self.outage.patience:g}): "
                            f"{rejection}"
                        )
                    has_time = waited < _ANSWERS_WITHIN and (
                        self.sender.undecided < _MOST_UNDECIDED
                    )
                    may_answer = waited < PROBE_INTERVAL and target.attempts and not answered.number
                    if not (has_time or may_answer):
                        await self._probe(target, body, api)
                    await self._pause(_LOOK_SECONDS)
        if target.up:
            raise rejection

    async def _probe(self, target: Target, body: AnyBody, api: Api) -> bool:
        """Probes at most once a minute. Returns whether the probe was answered."""
        evidence = target.evidence
        now = self.outage.clock()
        if now < evidence.probe_at or self.sender.shutdown.is_stopping:
            return False
        evidence.probe_at = math.inf
        answered = evidence.of(api)
        others = "a request that it had answered before"
        if answered.api is not None:
            body = answered.shortest
            api = answered.api
        else:
            body = with_one_word(body)
            others = "a request with one word in place of each text"
        request = Request(self.sender, body=body)
        self._router.assign(target, request)
        work = self.sender.work
        sent_at = time.monotonic()
        try:
            answer = await self._attempt(target, request, body, api)
            answered.probed_at = sent_at
            count_answer(work, answer, self._config)
            return True
        except AttemptLost:
            pass
        except RequestRejected as error:
            answered.refusal = ServerRefused(
                f"{target.url} answers HTTP {error.status}, also to {others}, so no document is at "
                f"fault: {error.message.rstrip('.')}."
            )
            answered.refusal.advice = (
                " Check the key, the model and the request's settings, and run again."
            )
            answered.refusal.status = error.status
            answered.refusal.body = error.body
        except ServerRefused as error:
            answered.refusal = error
        except RetryableError as error:
            answered.refusal = error.refusal
            if error.refusal is None and not self._router.has_spent:
                self.outage.failed(error, self.servers.oldest_in_flight)
        finally:
            self._router.release(target)
            evidence.probe_at = now + PROBE_INTERVAL
        work.failed += 1
        return False

    def _leave(self, target: Target, refusal: ServerRefused) -> None:
        has_others = any(
            other.up and other.ranks is not target.ranks for other in self._router.targets
        )
        if self._config.server_type != "endpoint" or not has_others:
            raise refusal
        if target.up:
            for rank in target.ranks:
                rank.up = False
            logger.warning(f"{refusal} The other endpoints get its requests until the next start.")

    async def _wait(self, seconds: float, failure: RetryableError) -> None:
        bounded = self.outage.remaining() > 0
        while seconds > 0 and not (bounded and self.outage.remaining() <= 0):
            pause = seconds
            if bounded:
                pause = min(pause, self.outage.remaining())
            if failure.retry_after:  # without it attempts are frequent enough to show the line
                pause = min(pause, self.outage.next_line())
            await self._pause(pause)
            seconds -= pause
            self.outage.show(str(failure))

    async def _pause(self, seconds: float) -> None:
        self.pausing += 1
        try:
            await self._sleep(seconds)
        finally:
            self.pausing -= 1

    async def _attempt(
        self, target: Target, request: Request, body: AnyBody, api: Api
    ) -> Completion:
        if not target.up:
            raise AttemptLost
        transport = self.servers.transport(target, api.path)
        attempt = target.start_attempt(request)
        self.sender.work.sent += 1
        sent = body
        try:
            if api.tiers:
                sent = with_field(sent, b"service_tier", api.tiers[0])
            if api.lacks_model:
                sent = with_field(sent, b"model", target.model)
            try:
                if request.half is None:
                    model = self._config.model_name_or_path
                    response = await post(transport, sent, model, api.extras)
                else:
                    response = await self._continued(attempt, request.half, transport, sent)
                answer = self._read(attempt, transport, response, api)
            except (RequestRejected, ServerRefused):
                target.mark_alive(attempt.started_at)
                self.outage.answered()
                raise
            except RetryableError as failure:
                remember_sent(api.extras)  # the answer may quote them
                failure.quote()
                await self._attempt_failed(attempt, transport, failure)
                raise
        except (RetryableError, CkptError) as error:
            if not attempt.lost:
                self.sender.count_error(_kind(error), target.name)
                raise
        except asyncio.CancelledError:
            if not attempt.lost or attempt.is_cancelled:
                raise
        finally:
            attempt.end()
            target.attempts.discard(attempt)
        if attempt.lost:
            raise AttemptLost
        answer.seconds = time.monotonic() - attempt.started_at
        answer.endpoint = target.name
        if target.limits is not None:
            tokens = token_counts(answer.usage)
            target.limits.answered(request.quota_use, tokens.prompt + tokens.completion)
        if not answer.finish_reason:
            self.without_reason += 1
        target.answers += 1
        target.evidence.of(api).add(body, api, attempt.started_at)
        self.outage.answered()
        return answer

    def _read(
        self, attempt: Attempt, transport: Transport, response: Response, api: Api
    ) -> Completion:
        target = attempt.target
        try:
            answer = api.parse(response.body)
            if answer.answer is None or api.generates:
                self._check_reason(answer, target)
        except UnexpectedResponse as failure:
            failure.quoted = response.body.decode(errors="replace")
            raise
        if api.tiers and not answer.service_tier:
            answer.service_tier = api.tiers[0]
        transport.is_read = True
        target.mark_alive(attempt.started_at)
        target.failures = 0
        if target.is_reported:
            target.is_reported = False
            logger.info(f"{target.url} answers again.")
        if target.pace is not None:
            tokens = answer.usage.get("total_tokens") or 0  # null at some gateways
            target.pace.answered(attempt.started_at, tokens, response.quotas)
        return answer

    async def _attempt_failed(
        self, attempt: Attempt, transport: Transport, failure: RetryableError
    ) -> None:
        target = attempt.target
        started_at = attempt.started_at
        if isinstance(failure, UnexpectedResponse):
            transport.note_unread(self.outage.clock(), failure, failure.seconds)
        elif failure.status:
            transport.unread = 0
        if failure.server_is_well:
            target.mark_alive(started_at)
        if target.limits is not None and (failure.unsent or failure.server_is_limited):
            target.limits.not_counted(attempt.request.quota_use)
        if target.pace is not None and failure.server_is_limited:
            target.pace.refused(started_at, failure.retry_after or 0.0)
        self._cool_down(target, failure)
        if target.probe is not None and not failure.server_is_well:
            await target.probe(started_at, failure.status not in retrying.BUSY)

    async def _continued(
        self, attempt: Attempt, half: HalfAnswer, transport: Transport, body: AnyBody
    ) -> Response:
        target = attempt.target
        request = attempt.request
        half.has_grown = False
        request.continues = False
        if target.continuation is not None and not half.is_refused:
            request.continues = True
            try:
                return await self._continue(attempt, half, target.continuation, body)
            except (CannotContinue, RequestRejected, ServerRefused, RetryableError) as error:
                is_transient = isinstance(error, RetryableError) and error.refusal is None
                if is_transient and not isinstance(error, UnexpectedResponse):
                    raise
                half.is_refused = True
                request.continues = False
                # A rejection quotes its document.
                status = getattr(error, "status", 0)
                reason = f"HTTP {status}" if status else str(error)
                warn_once(f"{target.url} cannot continue an answer: {reason}")
        return await post(transport, body, self._config.model_name_or_path)

    async def _continue(
        self, attempt: Attempt, half: HalfAnswer, continuation: Continuation, body: AnyBody
    ) -> Response:
        if isinstance(body, RequestBody):
            raise CannotContinue("the request has media")
        model = self._config.model_name_or_path
        path = self.api.path
        render, generate, derender = (
            self.servers.transport(attempt.target, name)
            for name in (f"{path}/render", GENERATE, f"{path}/derender")
        )
        rendered = await post(render, body, model)
        rest = half.continued(rendered.body, continuation.version)
        if rest is not None:
            await post(generate, rest, model, stream=_Ids(half, attempt, self.outage))
        derendered = await post(derender, half.derender(orjson.loads(body)), model)
        return Response(200, half.answer(derendered.body, continuation.usage))

    def _cool_down(self, target: Target, failure: RetryableError) -> None:
        if not target.up:
            return
        now = time.monotonic()
        if not target.failures:
            target.failing_since = now
        target.failures += 1
        lasts = now - target.failing_since
        if failure.unreachable:
            seconds = max(_COOLDOWN, lasts)
        elif target.is_failing or failure.server_is_limited:
            retry_after = failure.retry_after or 0.0
            if not self._router.has_other(target):
                retry_after = min(_COOLDOWN, retry_after)
            seconds = max(_SHORTEST_REST, lasts, retry_after)
        else:
            return
        until = now + min(seconds, 30.0)
        if target.limits is not None and failure.server_is_limited and not failure.retry_after:
            until = min(until, max(now + _SHORTEST_REST, target.limits.frees_at))
        target.cooldown_until = max(target.cooldown_until, until)
        if lasts < _SAY_AFTER or len(self._router.servers) < 2:
            return
        if failure.refusal is not None and target.is_failing and self._router.has_other(target):
            self._leave(target, failure.refusal)
        elif not target.is_reported and now - target.reported_at >= _SAY_FAILS_AGAIN:
            target.is_reported = True
            target.reported_at = now
            advice = ""
            if failure.server_is_limited and self._config.endpoints and target.limits is None:
                advice = " If it limits requests, give the limits in endpoints."
            logger.warning(
                f"{target.url} has failed for {lasts:.0f} s ({failure}). It gets few requests from "
                f"now on.{advice}"
            )

    def _check_reason(self, answer: Completion, target: Target) -> None:
        if answer.finish_reason:
            target.gives_reasons = True
            return
        if self._config.accept_null_finish_reason and answer.text and not target.gives_reasons:
            return
        if target.gives_reasons or self._config.engine.is_known or not answer.text:
            raise unfinished(answer.finish_reason)
        raise NoFinishReason(f"the answer has no finish_reason, so it may be cut off. {_HINT}")


@dataclass(eq=False)
class _Ids:
    """A stream of ids, which shows that its server works."""

    half: HalfAnswer
    attempt: Attempt
    outage: Outage

    def feed(self, data: bytes) -> bool:
        has_grown = self.half.feed(data)
        if has_grown:
            self.attempt.target.mark_alive(self.attempt.started_at)
            self.outage.grown()
        return has_grown


def _kind(error: RetryableError | CkptError) -> str:
    if isinstance(error, RetryableError):
        return error.kind
    if (status := getattr(error, "status", None)) is None:
        return "refused"
    return f"HTTP {status}"


async def _close(target: Target) -> None:
    transports = target.transports
    target.transports = {}
    for transport in transports.values():
        await transport.close()
