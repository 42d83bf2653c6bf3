"""Runs one call of a rollout's ``generate``: takes the answer from the request cache or a server.

A server's answer is cached. Everything here runs on the event loop of ``scheduler.py``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import numpy as np
import orjson
import xxhash
from datatrove.pipeline.inference.types import InferenceError
from datatrove.pipeline.inference.types import ServerError as RolloutServerError
from loguru import logger

from datatrove_ckpt.checkpoint.batch_log import (
    ANSWER,
    FAILURE,
    OF_BATCH,
    ParkedRequest,
    RequestId,
)
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.identity import NOT_ANSWERING
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.numbers import DocumentCounts, Outcome, Work
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, payload_hash
from datatrove_ckpt.common import BATCH, JsonObject
from datatrove_ckpt.common.finish_reasons import ENDINGS, USUAL
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.redaction import redact, shown
from datatrove_ckpt.common.retrying import REJECTED
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.bad_answers import ON_CUT_OFF, ON_LOOP, ON_REFUSAL, AnswerPolicy
from datatrove_ckpt.config.generation_params import (
    PAYLOAD_JSON,
    TOKEN_LIMITS,
    merged,
    refuse_near_misses,
    refuse_unsendable,
)
from datatrove_ckpt.errors import (
    BadAnswer,
    CkptError,
    ConfigError,
    RequestError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerDied,
    ServerError,
    ServerRefused,
    ServerUnavailable,
    TooManyOpenFiles,
    named,
)
from datatrove_ckpt.generation.batches import Batches
from datatrove_ckpt.generation.calls import Call, Calls
from datatrove_ckpt.generation.calls import result_of as result_of_call
from datatrove_ckpt.generation.failures import unanswered
from datatrove_ckpt.generation.limits import LimitWatch
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.quality import INVALID, REPEATING, Quality, choices_of
from datatrove_ckpt.generation.raised_errors import called_at
from datatrove_ckpt.inference.client.answers import (
    CHAT,
    COMPLETIONS,
    Completion,
    Floats,
    RetryableError,
    UnknownForm,
    Way,
    as_asked,
    from_base64,
    kept_whole,
    token_counts,
    typed_way,
    unfinished,
    way_to,
)
from datatrove_ckpt.inference.client.body import AnyBody, Body
from datatrove_ckpt.inference.client.client import CompletionClient, usual_way
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.output.documents import Result, has_nan, result_of, trim
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled
from datatrove_ckpt.rollouts import Classification, Payload
from datatrove_ckpt.rollouts.answers import ends_in_blanks, is_cut_off
from datatrove_ckpt.rollouts.media import media_key, split_media

_PARKED_SECONDS = 0.05
_UNKNOWN_FORMS = 2  # batches with such an answer to one request
_CANCELLED_AGAIN_SECONDS = 1.0
_SHOWN_REASON = 60  # characters
# An answer that calls a tool has no text.
_CALLS = frozenset({"tool_calls", "function_call"})
# The hash of a payload with one of these depends on the order of the keys inside.
_WITH_SCHEMA = frozenset({"response_format", "structured_outputs", "json_schema"})
_GENERATING = (CHAT.path, COMPLETIONS.path)
_IN_TIERS = (*_GENERATING, "responses")
_MOST_SIZES = 1000  # params may be others for each document
# Keys of what is hashed, never sent.
_WAY = "$way"
_MODEL = "$model"
_QUERY = "$query"
_RETRY = "$retry"

_BAD = {ON_LOOP: "is looping", ON_REFUSAL: "is a refusal", ON_CUT_OFF: "is cut off"}


@dataclass(eq=False)
class Model:
    """One of the rank's models.

    Attributes:
        client: ready once its servers are.
        usual: the way of a payload without a path.
        batches: None: texts share no requests.
        policies: for bad answers, by their settings; most models have none.
        sizes: length of the first vector for each set of params.
        is_dead: a drain does not wait for its requests in flight.
    """

    config: InferenceConfig
    client: asyncio.Future[CompletionClient]
    usual: Way
    batches: Batches | None
    policies: Mapping[str, AnswerPolicy]
    sizes: dict[bytes, int] = field(default_factory=dict)
    is_dead: bool = False


@dataclass(eq=False)
class RankRequests:
    """What the requests of a rank share. The ``Scheduler`` adds its documents.

    Must be made on the event loop that runs it.

    Attributes:
        configs: of the models, by their names.
        has_batches: requests may be parked for a batch.
        quality: finds what is wrong with answers.
        code: hash of the user's code.
        waiting: documents that wait for an answer.
        documents: the documents in work, by ordinal. They handle their errors themselves.
    """

    configs: Mapping[str, InferenceConfig]
    checkpoint: OpenCheckpoint
    observer: RankReporter
    shutdown: Shutdown
    has_batches: bool
    quality: Quality
    limits: LimitWatch
    code: str

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.models = {
            name: Model(
                config,
                loop.create_future(),
                usual_way(config),
                Batches(config.texts_per_request) if config.texts_per_request > 1 else None,
                config.answer_policies,
            )
            for name, config in self.configs.items()
        }
        self.model = next(iter(self.models.values()))
        self.calls = Calls(self.observer.own, self.shutdown)
        self.waiting = 0
        self.documents: dict[int, asyncio.Task[None]] = {}
        self.all_started = False
        self.has_ended = False
        self.storage_free = asyncio.Event()

    async def wait_for_storage(self) -> None:
        # Looks at short intervals would wake thousands of waiting requests each time.
        while self.checkpoint.congested:
            self.storage_free.clear()
            await self.storage_free.wait()


class Parked(Exception):
    """The document ends unrecorded: its requests are parked for a batch."""


class Answers:
    """One document's answers: those that are cached, and what its rollouts took.

    Attributes:
        parked: its requests that wait for a batch.
        batch_answers: how many answers of batches the rollout has come to.
        rejections: its requests that the server has rejected.
        failure: stops the rank.
        hashes, payloads: of the last request of each rollout.
        requests: of each rollout, those that ended.
        found: of each rollout, its requests and calls that earlier attempts have kept.
        tokens: prompt and completion tokens of each answer in turn.
        failed: requests without an answer.
        order, is_suspect: see ``attempts.Request``.
        cut_off, empty: answers that ended at max_tokens, and answers without a text, or with a
            vector of zeros.
        reasons: answers by finish_reason, and by what is wrong with them.
        results: of all answers but those that a retry has replaced. A rollout may have marked them
            as invalid.
    """

    failure: CkptError | None = None
    failed = cut_off = empty = 0
    parked = batch_answers = 0
    is_suspect = False
    _cached: asyncio.Future[dict[AnswerKey, Answer]] | None = None
    _pending = 0

    def __init__(self, rank: RankRequests, slot: ChunkSlot, doc_id: str, rollouts: int) -> None:
        self.slot = slot
        self.order = slot.ordinal
        self.doc_id = doc_id
        self.rejections: list[RequestRejected] = []
        self.occurrences: dict[tuple[int, str], int] = {}
        self.hashes = [""] * rollouts
        self.payloads: list[Payload] = [{}] * rollouts
        self.requests = [0] * rollouts
        self.found = [0] * rollouts
        self.tokens: list[int] = []
        self.reasons: dict[str, int] = {}
        self.results: list[Result] = []
        self._rank = rank

    async def cached(self) -> dict[AnswerKey, Answer]:
        """Returns what earlier attempts have kept."""
        if self._cached is None:
            self._cached = asyncio.wrap_future(self._rank.checkpoint.lookup(self.slot))
        return await asyncio.shield(self._cached)

    def fail(self, failure: CkptError) -> None:
        """Stops the rank, after a drain. The document ends unrecorded."""
        self.failure = failure
        self._rank.shutdown.fail(failure)

    @property
    def have_ended(self) -> bool:
        """Whether this document's requests have ended.

        A rollout that swallows its cancellation must not keep the loop busy, and tasks that it left
        behind must not send requests.
        """
        return self.failure is not None or self._rank.has_ended or self._rank.shutdown.aborted

    def finished(
        self, outcome: Outcome, fingerprint: str, document: bytes, kept: int = 0
    ) -> Finished:
        """Returns the finished document. ``kept``: number of rollouts with a result."""
        requests = self.requests
        tokens = self.tokens
        work = None  # the usual case is a shorter line: see Finished.work
        usual = 1 if outcome == "written" else 0
        is_usual = len(requests) == 1 and requests[0] <= 1 and not self.failed and kept == usual
        if not is_usual:  # copies, because cancelled rollouts may still count
            work = Work(kept, self.failed, requests.copy(), tokens.copy())
        return Finished(
            self.slot.ordinal,
            outcome,
            fingerprint,
            document,
            sum(requests),
            sum(tokens[::2]),
            sum(tokens[1::2]),
            work,
            ends=(len(tokens) // 2, self.cut_off, self.empty),
            reasons=self.counted_reasons(),
        )

    def counted_reasons(self) -> dict[str, int]:
        """Returns ``reasons`` with the invalid answers."""
        reasons = self.reasons.copy()  # cancelled rollouts may still count
        invalid = [str(result.text) for result in self.results if result.is_invalid]
        if invalid:
            reasons[INVALID] = len(invalid)
            self._rank.observer.example(INVALID, self.doc_id, invalid[0])
        return reasons

    def quality(self) -> tuple[str, str, int]:
        """Returns the finish_reasons and the faults of its answers, and their completion tokens,
        without those that a retry has replaced.

        They depend on the document's own answers alone, in any order: so not on whether another
        document has the same answer.
        """
        results = self.results
        reasons = {reason for result in results for reason in result.reasons}
        found = {fault for result in results for fault in result.faults}
        if any(result.is_invalid for result in results):
            found.add(INVALID)
        faults = [name for name in DocumentCounts().bad if name in found and name != REPEATING]
        tokens = sum(token_counts(result.usage or {})[1] for result in results)
        return ", ".join(sorted(reasons)), ", ".join(faults), tokens

    def endpoints(self) -> str:
        """Returns the ``endpoints`` that gave its answers; "" if none did."""
        found = {getattr(result, "endpoint", "") for result in self.results}
        return ", ".join(sorted(found - {""}))

    def next_key(self, rollout_idx: int, digest: str) -> AnswerKey:
        """Returns the key of one more request of a rollout with this hash."""
        request = rollout_idx, digest
        key = AnswerKey(rollout_idx, digest, self.occurrences.get(request, 0))
        self.occurrences[request] = key.occurrence + 1
        return key

    def count_failed(self, rollout_idx: int) -> None:
        self.failed += 1
        self.requests[rollout_idx] += 1

    def park(self) -> None:
        """Counts a parked request. The document is dropped once it has nothing else to do: the
        rollout may still send other requests.
        """
        loop = asyncio.get_running_loop()
        self._parked_at = loop.time()
        self.parked += 1
        if self.parked == 1:
            loop.call_later(_PARKED_SECONDS, self._drop)

    def _drop(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._parked_at + _PARKED_SECONDS - loop.time()
        if left > 0 or self._pending:
            loop.call_later(max(left, _PARKED_SECONDS / 2), self._drop)
            return
        task = self._rank.documents.get(self.slot.ordinal)
        if task is not None and task.cancel():
            loop.call_later(_CANCELLED_AGAIN_SECONDS, self._drop)

    @property
    def is_repeatable(self) -> bool:
        """Whether the rollout repeats a request of its last pass that has an answer."""
        run = self._rank.checkpoint.run  # the same code has parked the request
        if self.batch_answers or self._cached is None or not self._cached.done():
            return True
        for answer in self._cached.result().values():
            if answer.result is not None:
                fields = orjson.loads(answer.result)
                if not OF_BATCH.isdisjoint(fields) and fields["run"] == run:
                    return False
        return True

    def request_started(self) -> None:
        self._pending += 1
        if self._pending == 1:
            self._rank.waiting += 1

    def request_finished(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._rank.waiting -= 1


T = TypeVar("T")
Asked = Coroutine[object, None, T]


class Requests:
    """The ``generate`` callback of one rollout. See ``rollouts.Generate``.

    ``model``: None: the first one.
    """

    def __init__(
        self,
        rank: RankRequests,
        answers: Answers,
        rollout_idx: int,
        model: Model | None = None,
    ) -> None:
        self._rank = rank
        self._answers = answers
        self._rollout_idx = rollout_idx
        self._model = model or rank.model
        self._config = self._model.config

    def __getattr__(self, name: str) -> Requests:
        """``generate.judge``: sends to the model of this name."""
        model = None if name.startswith("_") else self._rank.models.get(name)
        if model is None:
            named = (
                ", ".join(filter(None, self._rank.models))
                or 'none: config={"judge": ...} names models'
            )
            raise AttributeError(
                f"generate has no {name!r}, and the models of this run are {named}"
            )
        # Not kept: it would be a reference cycle, freed only by the garbage collector.
        return Requests(self._rank, self._answers, self._rollout_idx, model)

    @property
    def model_name(self) -> str:
        return self._config.model_name_or_path

    def __call__(
        self, payload: Payload, *, path: str | None = None, whole: bool = False
    ) -> Asked[Result]:
        """Checks the arguments before any await, while the caller is known."""
        wrong = ""
        way = self._model.usual
        if type(payload) is not dict and not isinstance(payload, Mapping):
            example = '{"messages": [{"role": "user", "content": document.text}]}'
            wrong = (
                f"generate takes a payload, a dict such as {example}, and not a "
                f"{type(payload).__name__}"
            )
        elif payload.get("stream"):
            wrong = "the payload asks for a stream, and answers are read as a whole: remove stream"
        else:
            try:
                if path is not None:
                    way = way_to(path)
                if way.path in _GENERATING and not whole:
                    refuse_near_misses(payload, "payload")
            except ValueError as problem:
                wrong = str(problem).rstrip(".")
        if wrong:
            return self._refused(wrong)
        if whole:
            way = kept_whole(way)
        if self._model.policies and way.path in _GENERATING:
            return self._acceptable(payload, way, whole)
        return self._answered(payload, way, whole)

    def _refused(self, wrong: str) -> Asked[NoReturn]:
        if self._answers.have_ended:
            return wait_until_cancelled()
        error = ConfigError(f"{wrong}{called_at()}.", setting="rollout_fn")
        self._answers.fail(error)
        raise error

    async def _acceptable(self, payload: Payload, way: Way, whole: bool) -> Result:
        """Returns the answer, or the answer of a retry, as the policies for bad answers say.

        Raises:
            InferenceError: ``error`` is a BadAnswer; or see ``_answered``.
        """
        if self._answers.have_ended:
            await wait_until_cancelled()
        payload = deepcopy(payload)  # the rollout may change it before a retry
        policies = self._model.policies
        retries = Counter[str]()
        try:
            digest = self._digest(payload, way)
        except ConfigError as error:
            raise _failed(error, payload) from error
        # Not the order of the retries, which depends on the order of parallel answers.
        first = self._answers.next_key(self._rollout_idx, f"first {digest}")
        result = await self._answered(payload, way, whole)
        defaults = self._config.default_generation_params
        changed = dict(payload.get("extra_body", defaults.get("extra_body")) or {})
        while setting := self._rank.quality.first_case(policies, result):
            policy = policies[setting]
            if retries[setting] == policy.retries:
                break
            retries[setting] += 1
            if not policy.params.keys().isdisjoint(TOKEN_LIMITS):
                # A limit under the other name would win, or be refused beside the new one.
                given = {*defaults, *payload, *changed}
                changed |= dict.fromkeys(given.intersection(TOKEN_LIMITS))
            changed |= policy.params
            payload = {**payload, "extra_body": changed}
            try:
                retried = await self._answered(payload, way, whole, (*first,))
            except InferenceError as error:
                if not isinstance(error.error, RequestRejected):
                    raise
                _warn_once(
                    f"{setting}: a retry was rejected, so the answer before it counts: "
                    f"{error.error}"
                )
                break
            answers = self._answers
            answers.results = [one for one in answers.results if one is not result]
            result = retried
        if not setting or policies[setting].then == "keep":
            return result
        bad = BadAnswer(f"the answer {_BAD[setting]}.", setting=setting)
        bad.is_dropped = policies[setting].then == "drop"
        raise _failed(named(bad, self._config.name), payload)

    async def _answered(
        self, payload: Payload, way: Way, whole: bool = False, retry_of: Sequence[object] = ()
    ) -> Result:
        """Returns the cached answer, or sends the payload.

        ``retry_of``: what separates a retry from equal requests; () for others.

        Raises:
            InferenceError: the request cannot be answered; ``error`` says why.
            datatrove's ServerError: no request can be answered, or ``accept_null_finish_reason`` is
            proved wrong.
        """
        if self._answers.have_ended:
            await wait_until_cancelled()
        config = self._config
        generates = way.path in _GENERATING
        answers = self._answers
        rollout_idx = self._rollout_idx
        model = config.model_name_or_path
        if whole:
            model = payload.get("model") or model
        # The order in which datatrove sends: engines answer in the order of a schema.
        payload = {**payload, "model": model}
        if generates:
            for name, value in config.default_generation_params.items():
                payload.setdefault(name, value)
        try:
            sent, extras = merged(payload)
            if extras:
                way = way._replace(extras=extras)
            if way.path in _IN_TIERS and type(sent.get("service_tier")) is list:
                way = way._replace(tiers=sent.pop("service_tier"))  # the client adds one of them
            digest = self._digest(sent, way, retry_of)
        except ConfigError as error:
            raise _failed(error, payload) from error
        key = answers.next_key(rollout_idx, digest)
        if config.seed is not None and generates and "seed" not in sent:
            sent["seed"] = request_seed(config.seed, answers.slot.ordinal, answers.doc_id, *key)
            key = key._replace(payload_hash=self._digest(sent, way, retry_of))
        # Before any await: the rollout may change its payload while it waits.
        if config.other_models and sent.get("model") == config.model_name_or_path:
            way = way._replace(lacks_model=True)  # the client adds the endpoint's name
            sent = {name: value for name, value in sent.items() if name != "model"}
        body = _body(sent)
        answers.hashes[rollout_idx] = key.payload_hash
        answers.payloads[rollout_idx] = payload
        answer = None
        if answers.slot.cached:
            answer = (await answers.cached()).get(key)
            answers.found[rollout_idx] += answer is not None
        try:
            result = None if answer is None else _from_cache(answer, config)
            if result is None:
                if generates:
                    way = as_asked(way, sent)
                result = await self._send(key, body, sent, payload, way, answer)
            else:
                self._count_cached(result)
                self._check_size(result, sent, way)
            if config.accept_null_finish_reason and generates and result.finish_reason:
                raise self._disproved(result.finish_reason)
        except (RequestRejected, InferenceError) as error:
            answers.count_failed(rollout_idx)
            if isinstance(error, RequestRejected):
                named(error, config.name)
                answers.rejections.append(error)
                raise _failed(error, payload) from error
            raise
        self._count(result, way, _question(payload))
        return result

    def count_finished(self, result: object) -> None:
        if isinstance(result, Result):
            self._count_cached(result)
            self._count(result, self._model.usual, "")

    def _count_cached(self, result: Result) -> None:
        self._rank.observer.own.cached += 1
        self._answers.tokens += token_counts(result.usage or {})[:2]

    def _count(self, result: Result, way: Way, question: str) -> None:
        answers = self._answers
        choices = choices_of(result)
        answers.results.append(result)
        reasons = [choice["finish_reason"] for choice in choices]
        result.reasons = [
            reason if reason in USUAL else redact(reason)[:_SHOWN_REASON]
            for reason in filter(None, reasons)
        ]
        is_cut = self._count_reasons(result, reasons)
        faults: list[str] = []
        result.faults = faults
        if way.path in _GENERATING:
            quality = self._rank.quality
            is_empty = False
            for choice in choices:
                is_empty = is_empty or _is_empty(choice["text"], choice["finish_reason"])
                faults += quality.faults(choice, question)
            for fault in faults:
                answers.reasons[fault] = answers.reasons.get(fault, 0) + 1
            answers.empty += is_empty
            if is_cut:
                faults.append("cut_off")
            if is_empty:
                faults.append("empty")
            for fault in faults:
                self._rank.observer.example(fault, answers.doc_id, str(result.text))
            quality.note(bool(faults))
        elif way.is_shared and result.answer is not None:
            is_empty = not result.answer["embeddings"][0].strip("A=")  # zeros in base64
            answers.empty += is_empty
            if is_empty:
                faults.append("empty")
        answers.requests[self._rollout_idx] += 1

    def _count_reasons(self, result: Result, reasons: Sequence[str | None]) -> bool:
        """Returns whether an answer is cut off."""
        answers = self._answers
        counted = answers.reasons
        for name in result.reasons:
            counted[name] = counted.get(name, 0) + 1
        if ENDINGS.issuperset(reasons) or not any(map(is_cut_off, reasons)):
            return False
        answers.cut_off += 1
        if ends_in_blanks(str(result.text)):
            _warn_once(
                "An answer ended in blanks until max_tokens cut it off. More tokens do not help: "
                'see "Answers of a given form" in docs/rollouts.md.'
            )
        return True

    async def _send(
        self,
        key: AnswerKey,
        body: AnyBody,
        sent: Payload,
        payload: Payload,
        way: Way,
        cached: Answer | None,
    ) -> Result:
        rank = self._rank
        model = self._model
        answers = self._answers
        try:
            completion = None
            if cached is not None and cached.error_message is not None:
                answers.is_suspect = True
            if cached is not None or rank.has_batches:
                completion = await self._batched(key, body, way, cached)
            if completion is None:
                answers.request_started()
                try:
                    if model.client.done():
                        client = model.client.result()
                    else:
                        client = await rank.observer.until(model.config.name, model.client)
                    if model.batches is not None and way.is_shared:
                        completion = await model.batches.complete(client, sent, way, answers)
                    else:
                        request = Request(
                            client.sender, answers.doc_id, answers.order, body, answers.is_suspect
                        )
                        completion = await client.complete(body, way, request)
                finally:
                    answers.request_finished()
        except (RequestError, ServerError, TooManyOpenFiles) as error:
            await self._raise(error, key, payload)
        if "service_tier" in sent and not completion.service_tier:
            completion.service_tier = str(sent["service_tier"] or "")
        tokens = rank.observer.answered(completion, model.config)
        rank.limits.look()
        self._check_size(completion, sent, way)
        fields = _fields(completion, sent)
        source = {"response_id": completion.response_id, "model": completion.model}
        if completion.endpoint:
            source["endpoint"] = completion.endpoint
        await self._keep(key, Answer(trim(orjson.dumps({**fields, **source})), None))
        answers.tokens += tokens
        return _result(fields, **source)

    async def _raise(self, error: CkptError, key: AnswerKey, payload: Payload) -> NoReturn:
        """Raises what the rollout gets for a request without an answer, and keeps a rejection."""
        rank = self._rank
        model = self._model
        rank.observer.own.failed += 1
        if isinstance(error, RequestRejected):
            await self._keep(key, Answer(None, f"{error.status} {error.body}"))
            raise error
        at_fault = isinstance(error, RequestFailed) and error.is_documents
        if at_fault:
            model.client.result().sender.at_fault.add(self._answers.slot.ordinal)
            # Then the next attempt needs no other requests to compare with. Earlier versions, too,
            # send a request with this status again.
            await self._keep(key, Answer(None, f"0 {error}"))
        if at_fault or isinstance(error, RequestPoisoned):
            raise _failed(named(error, model.config.name), payload) from error
        model.is_dead = model.is_dead or isinstance(error, ServerDied | ServerUnavailable)
        stopped = self._stopped(error)
        if isinstance(error, RequestFailed):
            raise _failed(error, payload) from error
        raise stopped from error

    async def _batched(
        self, key: AnswerKey, body: AnyBody, way: Way, cached: Answer | None
    ) -> Completion | None:
        """Returns the answer of a batch; None if the request must be sent now. Otherwise parks it,
        and never returns.

        Raises:
            RequestFailed: no batch has answered it.
        """
        config = self._config
        answers = self._answers
        fields: JsonObject = {}
        if cached is not None and cached.result is not None:
            fields = orjson.loads(cached.result)
        attempts = 0
        limit = config.request_max_attempts
        if not OF_BATCH.isdisjoint(fields):
            answers.batch_answers += 1
            attempts = fields["attempt"]
            cause = fields.get(FAILURE)
            if ANSWER in fields:
                try:
                    completion = way.parse(orjson.dumps(fields[ANSWER]))
                    if completion.finish_reason or config.accept_null_finish_reason:
                        completion.service_tier = BATCH  # its price
                        return completion
                    raise unfinished(None)
                except RetryableError as error:
                    error.quote()
                    cause = str(error)
                    if isinstance(error, UnknownForm):  # it was paid for
                        limit = min(limit, _UNKNOWN_FORMS)
            if config.provider_batches and attempts >= limit:
                raise RequestFailed(
                    f"Given up after {attempts} batches "
                    f"(request_max_attempts={config.request_max_attempts}; {_UNKNOWN_FORMS} for "
                    f"answers in an unknown form). Last cause: {cause}"
                )
        rank = self._rank
        if rank.has_batches and config.provider_batches:
            if way.path.startswith("/") or way.extras:
                wrong = ConfigError(
                    "provider_batches: a batch has requests to paths below /v1, without "
                    "extra_headers and extra_query."
                )
                answers.fail(wrong)
                raise wrong
            await rank.wait_for_storage()
            content = b"".join(body) if isinstance(body, Body) else body
            slot = answers.slot
            request_id = RequestId(slot.chunk.index, slot.ordinal, key, attempts + 1)
            request = ParkedRequest(config.name, f"/v1/{way.path}", request_id, content)
            rank.checkpoint.park(request)
            answers.park()
            await wait_until_cancelled()
        return None

    def _digest(self, payload: Payload, way: Way, retry_of: Sequence[object] = ()) -> str:
        """Hashes payload, way and model.

        The usual way, and the only model, add nothing to the payload's hash.
        """
        if not NOT_ANSWERING.isdisjoint(payload) and way.path in _IN_TIERS:
            payload = {name: value for name, value in payload.items() if name not in NOT_ANSWERING}
        if way.name != self._model.usual.name:
            payload = {**payload, _WAY: way.name}
        if way.extras and way.extras["extra_query"]:
            payload = {**payload, _QUERY: way.extras["extra_query"]}
        if retry_of:
            payload = {**payload, _RETRY: retry_of}
        return _digest({**payload, _MODEL: self._config.name} if self._config.name else payload)

    def _disproved(self, reason: str) -> RolloutServerError:
        """Stops the rank. The answer is cached, so each further attempt ends here, too."""
        client = self._model.client
        believed = client.result().without_reason if client.done() else 0
        error = ServerRefused(
            f"An answer has the finish_reason {reason!r}, but accept_null_finish_reason is for "
            "servers that never give one. So answers without one may be cut off. This attempt has "
            f"taken {believed} of them as complete, and earlier ones may have taken more. Remove "
            "the setting, and start over, so that everything is asked again. "
            "(Or continue here with accept_changes: then look for null among the finish_reasons "
            "of documents that are finished already, because those stay as they are.)",
            starts_over="anew",
        )
        return self._stopped(error)

    def _check_size(self, answered: Completion | Result, payload: Payload, way: Way) -> None:
        """Stops the rank if a vector, not yet cached, has another size than the first one."""
        if not way.is_shared:
            return
        assert answered.answer is not None
        size = len(answered.answer["embeddings"][0]) * 3 // 16  # base64 of float32
        sizes = self._model.sizes
        if len(sizes) >= _MOST_SIZES:
            sizes.clear()
        first = sizes.setdefault(
            orjson.dumps({**payload, "input": None}, option=PAYLOAD_JSON), size
        )
        if first != size:
            name = answered.model or self._config.model_name_or_path
            error = ServerRefused(
                f"{name!r} has answered embed() with {plural(size, 'number')}, and before with "
                f"{first}, for the same params. So its servers have, or had, different models. "
                "This answer is not kept; when all servers have the model of the first one, run "
                "the same command again. If that is the wrong one, start over.",
                starts_over="anew",
            )
            raise self._stopped(error)

    def _stopped(self, error: CkptError) -> RolloutServerError:
        named(error, self._model.config.name)
        answers = self._answers
        rank = self._rank
        others = 0  # requests that were answered, if only documents that may be at fault are left
        if rank.all_started and self._model.client.done():
            client = self._model.client.result()
            if len(rank.documents) <= client.sender.most_at_fault:
                others = client.answers
        answers.fail(unanswered(answers.doc_id, answers.slot, error, others))
        return RolloutServerError(error)

    async def _keep(self, key: AnswerKey, answer: Answer) -> None:
        rank = self._rank
        answers = self._answers
        rank.checkpoint.put_answer(answers.slot, answers.doc_id, key, answer)
        if rank.checkpoint.congested:
            await rank.wait_for_storage()

    async def once(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        time_limit: float | None = None,
        keep_errors: type[Exception] | tuple[type[Exception], ...] = (),
        **kwargs: object,
    ) -> Any:
        """See ``rollouts.Generate``."""
        rank = self._rank
        answers = self._answers
        if answers.have_ended:
            await wait_until_cancelled()
        if self._model.client.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("generate.once was called from a different loop")
        call = Call(name, function, args, kwargs, time_limit, keep_errors)
        if call.mistake:
            await self._refused(call.mistake)
        try:
            digest = call.digest(rank.code)
        except TypeError as error:
            await self._refused(
                f"the name and arguments of generate.once({name!r}, ...) tell calls apart, so they "
                f"must be JSON: {error}. Give the function what is no JSON in another way"
            )
        key = answers.next_key(self._rollout_idx, digest)
        if answers.slot.cached:
            saved = (await answers.cached()).get(key)
            if saved is not None:
                answers.found[self._rollout_idx] += 1
                return result_of_call(saved)
        answers.request_started()
        try:
            result = await rank.calls.make(call)
        finally:
            answers.request_finished()
        await self._keep(key, result)
        return result_of_call(result)

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        """See ``rollouts.Generate``."""
        # A server takes longer to import than many runs have time.
        from datatrove_ckpt.generation.agent_url import serve

        answers = self._answers
        async with serve(self, self.model_name) as base_url:
            yield base_url
        if not answers.slot.cached:
            return
        number = self._rollout_idx
        kept = sum(key.rollout_idx == number for key in await answers.cached())
        found = answers.found[number]
        if found < kept and found < answers.requests[number]:
            _warn_once(
                f"Document {answers.doc_id!r}: its agent has not asked for answers that an earlier "
                "attempt has saved, and has asked other questions, which were paid for. Are time "
                "or random numbers in its prompts?"
            )

    # The methods of ``generate``: embed, classify, score. ``rollouts.Generate`` documents them.
    # Each is one request, or one for each text, of a way that the engine has (``Engine.ways``).

    async def embed(self, texts: str | Sequence[str], /, **params: object) -> Floats:
        if isinstance(texts, str):
            await self._check("embed", [texts])
            return from_base64((await self._ask("embed", (texts,), params))["embeddings"][0])
        await self._check("embed", texts)
        asked = [self._ask("embed", (text,), params) for text in texts]
        # Gathers all: if one fails, the request cache has the others for a retry.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        vectors = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            vectors.append(from_base64(answer["embeddings"][0]))
        if vectors:
            return np.stack(vectors)
        return np.empty((0, 0), np.float32)

    async def classify(
        self, text: str, /, labels: Sequence[str] | None = None, **params: object
    ) -> Classification:
        await self._check("classify", [text])
        answer = await self._ask("classify", (text,), params)
        label = answer["label"]
        scores = answer["probabilities"]
        best = max(range(len(scores)), key=scores.__getitem__)
        unnamed = f"LABEL_{best}"
        if labels is None:
            before = "LABEL_" if label == unnamed else ""
            labels = [f"{before}{index}" for index in range(len(scores))]
            return Classification(
                label or labels[best], scores[best], dict(zip(labels, scores, strict=True))
            )
        if len(labels) != len(scores):
            await self._refused(
                f"generate.classify has {len(labels)} labels, and the model has {len(scores)} "
                "classes"
            )
        if label not in ("", unnamed, labels[best]):
            await self._refused(
                f"generate.classify: label {best} is {labels[best]!r}, but the model says {label!r}"
            )
        return Classification(labels[best], scores[best], dict(zip(labels, scores, strict=True)))

    async def score(self, query: str, texts: Sequence[str], /) -> Floats:
        await self._check("score", [query])
        await self._check("score", texts)
        if not texts:
            return np.empty(0, np.float32)
        return from_base64(
            (await self._ask("score", (query, list(texts)), {}, count=len(texts)))["scores"]
        )

    async def _ask(
        self, name: str, values: tuple[object, ...], params: Mapping[str, object], count: int = 1
    ) -> JsonObject:
        """Returns what ``answers`` keeps of the answer. ``count``: see ``typed_way``."""
        to = self._config.engine.ways[name]
        result = await self._answered(to.payload(values, params), typed_way(name, to.path, count))
        assert result.answer is not None
        return result.answer

    async def _check(self, name: str, texts: Sequence[object]) -> None:
        wrong = self._config.engine.lacks(name)
        if isinstance(texts, str):
            wrong = wrong or f"generate.{name} takes a list of texts, and not one text"
        for text in texts if isinstance(texts, Sequence) else [texts]:
            if not isinstance(text, str):
                wrong = wrong or f"generate.{name} takes texts, and not a {type(text).__name__}"
        if wrong:
            await self._refused(wrong)


@lru_cache(maxsize=100)
def _warn_once(text: str) -> None:
    logger.warning(text)


def _question(payload: Payload) -> str:
    """Returns the text of the last message, or the prompt, if it is a text."""
    try:
        question = payload["messages"][-1]["content"]
    except (LookupError, TypeError):  # messages may be whatever orjson writes: dataclasses, too
        question = payload.get("prompt")
    if isinstance(question, list):
        question = "\n".join(str(part.get("text", "")) for part in question if type(part) is dict)
    return question if isinstance(question, str) else ""


def _is_empty(text: str | list[object], reason: str | None) -> bool:
    return reason not in _CALLS and not (text.strip() if isinstance(text, str) else text)


def _digest(payload: Payload) -> str:
    """Hashes a payload, whatever the order of its keys.

    Raises:
        ConfigError: JSON cannot express the payload.
    """
    option = PAYLOAD_JSON | orjson.OPT_SORT_KEYS
    fields = payload
    if not _WITH_SCHEMA.isdisjoint(payload):
        option = PAYLOAD_JSON
        fields = dict(sorted(payload.items()))
    try:
        data = orjson.dumps(fields, option=option, default=media_key)
    except TypeError:
        refuse_unsendable(payload, default=media_key)
        raise
    if data.find(b"null") >= 0 and has_nan(payload):  # orjson writes null for NaN
        refuse_unsendable(payload, default=media_key)
    return payload_hash(data)


def _body(payload: Payload) -> AnyBody:
    try:
        return trim(orjson.dumps(payload, option=PAYLOAD_JSON))
    except TypeError:  # there are media in it: ``_digest`` has refused all else
        return Body(*split_media(payload, PAYLOAD_JSON))


def _failed(error: Exception, payload: Payload) -> InferenceError:
    """Returns datatrove's error.

    Its text goes to logs and dead letters, without the payload's secrets.
    """
    failed = InferenceError(None, error, payload=shown("payload", payload))
    failed.payload = payload
    return failed


def _from_cache(answer: Answer, config: InferenceConfig) -> Result | None:
    """Returns the cached answer; None if it must be requested again.

    Raises:
        RequestRejected: the cached answer is a rejection.
    """
    if answer.result is not None:
        fields = orjson.loads(answer.result)  # of earlier versions, datatrove's alone
        if not OF_BATCH.isdisjoint(fields):
            return None
        source = [fields.pop(name, "") for name in ("response_id", "model", "endpoint")]
        result = _result(fields, *source)
        if result.finish_reason or config.accept_null_finish_reason:
            return result
        return None
    status, _, body = (answer.error_message or "").partition(" ")
    if int(status) not in REJECTED:  # 0.1 kept a 402 or a 405 like a 400
        return None
    raise RequestRejected(int(status), body, remembered=True)


def _fields(completion: Completion, payload: Payload) -> JsonObject:
    """Returns what is kept of an answer.

    The fields depend on the payload, too, so that a table has its columns before the first tool
    call.
    """
    asks_for_more = payload.get("tools") or payload.get("logprobs")
    fields: JsonObject = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "reasoning": completion.reasoning,
    }
    if completion.answer is not None:
        fields["answer"] = completion.answer
    elif asks_for_more or completion.tool_calls or completion.logprobs or completion.choices:
        fields |= {
            name: getattr(completion, name) for name in ("tool_calls", "logprobs", "choices")
        }
    return fields


def _result(fields: JsonObject, response_id: str, model: str, endpoint: str = "") -> Result:
    result: Result = result_of(fields, Result)
    result.response_id = response_id
    result.model = model
    result.endpoint = endpoint
    return result


def request_seed(
    seed: int, ordinal: int, doc_id: str, rollout_idx: int, digest: str, occurrence: int
) -> int:
    """Returns the ``seed`` of a request: 0 to 2**31 - 1, which vLLM, SGLang, llama.cpp and OpenAI
    all take.

    Engines that honour seeds repeat their sample when a request is sent again. With one seed for
    all, two rollouts of a document would be one sample.

    Args:
        seed: ``InferenceConfig.seed``.
        ordinal: separates documents whose ids repeat.
        digest: the payload's, without a seed. The number of the call would depend on the order of
            parallel calls.
        occurrence: counts equal payloads within one rollout, from 0.
    """
    request = orjson.dumps([seed, ordinal, doc_id, rollout_idx, digest, occurrence])
    return int(xxhash.xxh3_64_intdigest(request)) >> (64 - 31)
