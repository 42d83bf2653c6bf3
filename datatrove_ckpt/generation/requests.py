"""Answers a rollout's requests from the request cache, a batch or a server.

``DocumentAnswers`` looks up one document's saved answers, counts its answers, and parks it for a
batch. Everything here runs on the event loop of ``scheduler.py``.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NoReturn, TypeVar

import orjson
import xxhash
from datatrove.pipeline.inference.types import InferenceError
from datatrove.pipeline.inference.types import ServerError as RolloutServerError

from datatrove_ckpt.checkpoint.batch_log import (
    ANSWER,
    FAILURE,
    OF_BATCH,
    ParkedRequest,
    RequestId,
    fields_of_batch,
)
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.identity import NOT_ANSWERING
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer, payload_hash
from datatrove_ckpt.common import BATCH, JsonObject
from datatrove_ckpt.common.counts import ENDINGS, USUAL, DocumentCounts, DocumentWork, Outcome
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.redaction import masked, redact
from datatrove_ckpt.common.retrying import REJECTED
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import PAYLOAD_JSON, merged, refuse_unsendable
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerDied,
    ServerRefused,
    ServerUnavailable,
    named,
)
from datatrove_ckpt.generation.embedding_batches import EmbeddingBatches
from datatrove_ckpt.generation.failures import unanswered
from datatrove_ckpt.generation.limit_watch import LimitWatch
from datatrove_ckpt.generation.once import OnceCalls
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.quality import INVALID, REPEATING, AnswerQuality, choices_of, text_of
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody
from datatrove_ckpt.inference.client.client import CompletionClient, default_api
from datatrove_ckpt.inference.client.half_answers import HalfAnswer, is_long, may_continue
from datatrove_ckpt.inference.client.responses import (
    Api,
    Completion,
    RetryableError,
    UnexpectedResponse,
    api_for_payload,
    token_counts,
    unfinished,
)
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.output.document_codec import Result, has_nan, result_of, trim
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled
from datatrove_ckpt.rollouts import Payload
from datatrove_ckpt.rollouts.media import media_key, split_media
from datatrove_ckpt.rollouts.settings import ends_in_blanks, is_cut_off

T = TypeVar("T")
# Three requests for an answer take twice the CPU of the server's HTTP process, and of ours, and a
# kill loses little of short answers.
_SHORT_MEAN = 250  # tokens
_ENOUGH = 100  # answers


class RankModel:
    """One of the rank's models.

    Attributes:
        client: future of the client, which is done once the servers are ready.
        sizes: length of the first vector for each set of params.
        is_dead: whether a drain ignores its requests in flight.
        halves, half_tokens: number of its answers that could be continued, and of their tokens.
    """

    batches: EmbeddingBatches | None = None
    is_dead = False
    halves = half_tokens = 0

    def __init__(self, config: InferenceConfig) -> None:
        self.config = config
        self.client: asyncio.Future[CompletionClient] = asyncio.get_running_loop().create_future()
        self.usual = default_api(config)
        self.policies = config.answer_policies
        self.sizes: dict[bytes, int] = {}
        if config.texts_per_request > 1:
            self.batches = EmbeddingBatches(config.texts_per_request)

    @property
    def has_short_answers(self) -> bool:
        is_auto = self.config.half_answers == "auto"
        return is_auto and self.halves >= _ENOUGH and self.half_tokens < _SHORT_MEAN * self.halves


@dataclass(eq=False)
class RankContext:
    """The shared state of a rank's requests.

    Must be created on the rank's event loop.

    Attributes:
        documents: tasks of the documents in work, by ordinal. They handle their own errors.
    """

    configs: dict[str, InferenceConfig]
    checkpoint: OpenCheckpoint
    observer: RankReporter
    shutdown: Shutdown
    quality: AnswerQuality
    limits: LimitWatch
    code: str

    def __post_init__(self) -> None:
        self.models = {name: RankModel(config) for name, config in self.configs.items()}
        self.model = next(iter(self.models.values()))
        self.calls = OnceCalls(self.observer.own, self.shutdown)
        self.waiting = 0
        self.agents = 0
        self.documents: dict[int, asyncio.Task[None]] = {}
        self.has_ended = False
        self.is_ending = False
        self.storage_free = asyncio.Event()

    async def wait_for_storage(self) -> None:
        # Polls at short intervals would wake thousands of waiting requests each time.
        while self.checkpoint.congested:
            self.storage_free.clear()
            await self.storage_free.wait()


_PARKED_SECONDS = 0.05
_finish_reason = itemgetter("finish_reason")


class DocumentParked(Exception):
    """The document ends unrecorded: its requests are parked for a batch."""


class DocumentAnswers:
    """One document's answers, and the counts of its rollouts.

    Attributes:
        is_asked: whether ``saved`` is called for each request, also if nothing is saved.
        paid, cost: number of answers that this attempt has paid for, and their cost in billionths.
        hashes, payloads: hash and payload of the last request of each rollout.
        reused: number of requests and calls of each rollout that earlier attempts have saved.
        cut_off, empty: number of answers that ended at max_tokens, and of answers without a text,
            or with a vector of zeros.
        results: all answers except those that a retry has replaced. A rollout may have marked them
            as invalid.
    """

    failure: CkptError | None = None
    rejections: tuple[RequestRejected, ...] = ()
    is_asked = False
    failed = cut_off = empty = 0
    parked = batch_answers = paid = cost = 0
    _cached: asyncio.Future[dict[AnswerKey, CachedAnswer]] | None = None
    _pending = 0

    def __init__(self, rank: RankContext, slot: ChunkSlot, doc_id: str, rollouts: int) -> None:
        self.slot = slot
        self.order = self.ordinal_in_run = slot.ordinal
        self.doc_id = doc_id
        self.occurrences: dict[tuple[int, str], int] = {}
        self.hashes = [""] * rollouts
        self.payloads: list[Payload] = [{}] * rollouts
        self.requests = [0] * rollouts
        self.reused = [0] * rollouts
        self.tokens: list[int] = []
        self.reasons: dict[str, int] = {}
        self.results: list[Result] = []
        self._rank = rank

    async def cached(self) -> dict[AnswerKey, CachedAnswer]:
        if self._cached is None:
            self._cached = asyncio.wrap_future(self._rank.checkpoint.lookup(self.slot))
        return await asyncio.shield(self._cached)

    async def saved(self, key: AnswerKey) -> CachedAnswer | None:
        if not self.slot.cached:
            return None
        answer = (await self.cached()).get(key)
        self.reused[key.rollout_idx] += answer is not None
        return answer

    def observed(self, work: Coroutine[object, None, T]) -> Awaitable[T]:
        return work

    def put(self, key: AnswerKey, answer: CachedAnswer, ends_pieces: bool = False) -> None:
        """The caller waits for the storage then."""
        self._rank.checkpoint.put_answer(self.slot, self.doc_id, key, answer, ends_pieces)

    def fail(self, failure: CkptError) -> None:
        """Drains the rank. The document ends unrecorded."""
        self.failure = failure
        self._rank.shutdown.fail(failure)

    @property
    def have_ended(self) -> bool:
        """True once this document may send no more requests.

        A rollout that swallows its cancellation must not keep the loop busy, and tasks that it left
        behind must not send requests.
        """
        return self.failure is not None or self._rank.has_ended or self._rank.shutdown.aborted

    def finished(
        self, outcome: Outcome, fingerprint: str, document: bytes, valid: int = 0
    ) -> FinishedDocument:
        requests = self.requests
        tokens = self.tokens
        work = None  # the usual case is a shorter line: see FinishedDocument.work
        is_usual = len(requests) == 1 and requests[0] <= 1 and not self.failed
        if not is_usual or valid != (outcome == "written"):
            # Copies, because cancelled rollouts may still count.
            work = DocumentWork(valid, self.failed, requests.copy(), tokens.copy())
        return FinishedDocument(
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
        reasons = self.reasons.copy()  # cancelled rollouts may still count
        invalid = [str(result.text) for result in self.results if result.is_invalid]
        if invalid:
            reasons[INVALID] = len(invalid)
            self._rank.observer.example(INVALID, self.doc_id, invalid[0])
        return reasons

    def count_cached(self, result: Result) -> None:
        self._rank.observer.own.cached += 1
        tokens = token_counts(result.usage or {})
        self.tokens += (tokens.prompt, tokens.completion)

    def count(self, rollout_idx: int, result: Result, api: Api, question: str = "") -> None:
        choices = choices_of(result)
        self.results.append(result)
        self.requests[rollout_idx] += 1
        reasons = list(map(_finish_reason, choices))
        is_cut = False
        if not ENDINGS.issuperset(reasons):
            reasons = [
                reason if reason in USUAL else redact(reason)[:60]
                for reason in filter(None, reasons)
            ]
            is_cut = any(map(is_cut_off, reasons))
        result.reasons = reasons
        if is_cut:
            self.cut_off += 1
            if ends_in_blanks(str(result.text)):
                warn_once(
                    'An answer ended in blanks up to max_tokens: see "Answers of a given form" '
                    "in docs/rollouts.md."
                )
        faults: list[str] = []
        result.faults = faults
        is_empty = False
        quality = self._rank.quality
        if api.generates:
            for choice in choices:
                text = text_of(choice)
                if not text:
                    # An answer that calls a tool has no text; other contents are a list.
                    has_parts = isinstance(choice["text"], list) and choice["text"]
                    calls_tool = choice["finish_reason"] in ("tool_calls", "function_call")
                    is_empty = is_empty or not (has_parts or calls_tool)
                faults += quality.faults(choice, text, question)
        elif api.is_shared and result.answer is not None:
            is_empty = not result.answer["embeddings"][0].strip("A=")  # zeros in base64
        for name in (*reasons, *faults):
            self.reasons[name] = self.reasons.get(name, 0) + 1
        if is_cut and api.generates:
            faults.append("cut_off")
        if is_empty:
            self.empty += 1
            faults.append("empty")
        if api.generates:
            for fault in faults:
                self._rank.observer.example(fault, self.doc_id, str(result.text))
            quality.note(bool(faults))

    def added(self) -> dict[str, str | int]:
        """Returns the values of ``RunnerSettings.added_columns``, without answers that a retry has
        replaced.

        They depend only on the document's own answers, in any order: not on whether another
        document has the same answer.
        """
        results = self.results
        reasons = {reason for result in results for reason in result.reasons}
        fault_names = {fault for result in results for fault in result.faults}
        if any(result.is_invalid for result in results):
            fault_names.add(INVALID)
        faults = [
            name for name in DocumentCounts().bad if name in fault_names and name != REPEATING
        ]
        tokens = sum(token_counts(result.usage or {}).completion for result in results)
        endpoints = {getattr(result, "endpoint", "") for result in results} - {""}
        return {
            "finish_reason": ", ".join(sorted(reasons)),
            "faults": ", ".join(faults),
            "tokens": tokens,
            "endpoint": ", ".join(sorted(endpoints)),
        }

    def next_key(self, rollout_idx: int, digest: str) -> AnswerKey:
        request = rollout_idx, digest
        occurrence = self.occurrences.get(request, 0)
        self.occurrences[request] = occurrence + 1
        return AnswerKey(rollout_idx, digest, occurrence)

    def count_failed(self, rollout_idx: int) -> None:
        self.failed += 1
        self.requests[rollout_idx] += 1

    def park(self) -> None:
        """Counts a parked request. The document is dropped once it has nothing else to do."""
        loop = asyncio.get_running_loop()
        self._parked_at = loop.time()
        self.parked += 1
        if self.parked == 1:
            loop.call_later(_PARKED_SECONDS, self._drop)

    def _drop(self) -> None:
        task = self._rank.documents.get(self.slot.ordinal)
        if task is None or task.done():
            return
        loop = asyncio.get_running_loop()
        seconds = _PARKED_SECONDS
        if loop.time() >= self._parked_at + _PARKED_SECONDS and not self._pending:
            task.cancel()
            seconds = 1.0
        loop.call_later(seconds, self._drop)

    @property
    def is_repeatable(self) -> bool:
        """False if the rollout did not repeat its answered request of the last pass."""
        run = self._rank.checkpoint.run  # the same code has parked the request
        if self.batch_answers or self._cached is None or not self._cached.done():
            return True
        cached = self._cached.result().values()
        return all(fields_of_batch(answer).get("run") != run for answer in cached)

    def request_started(self) -> None:
        self._pending += 1
        if self._pending == 1:
            self._rank.waiting += 1

    def request_finished(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._rank.waiting -= 1


# The hash of a payload with such a key depends on the order of the keys inside.
_OF_TOOLS = ("arguments", "input")  # their nulls are values
_WITH_SCHEMA = frozenset({"response_format", "structured_outputs", "json_schema"})


_SIMPLE = frozenset({str, int, bool})


def _is_simple(payload: Payload) -> bool:
    """Whether a payload has only texts and numbers, and lists of dictionaries of texts: no null
    and no NaN. A search in its JSON would take longer.
    """
    for value in payload.values():
        kind = type(value)
        if kind is list:
            for item in value:
                if type(item) is not dict:
                    return False
                for text in item.values():
                    if type(text) is not str:
                        return False
        elif kind not in _SIMPLE and not (kind is float and value - value == 0):
            return False
    return True


def hash_payload(payload: Payload) -> tuple[str, bool]:
    """Hashes a payload in any order of keys. Also returns whether it may hold a null.

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
    has_null = not _is_simple(payload) and data.find(b"null") >= 0
    if has_null and has_nan(payload):  # orjson writes null for NaN
        refuse_unsendable(payload, default=media_key)
    return payload_hash(data), has_null


def body_of(payload: Payload, has_null: bool) -> AnyBody:
    try:
        if has_null:
            payload = _without_filled(payload)
        return trim(orjson.dumps(payload, option=PAYLOAD_JSON))
    except TypeError:  # media: ``hash_payload`` has refused everything else
        return RequestBody(*split_media(_without_filled(payload), PAYLOAD_JSON))


def _without_filled(payload: Payload) -> Payload:
    """Returns the payload without the nulls with which Arrow fills the keys of other messages.
    OpenAI refuses them.

    The hash includes them, so that runs that have begun find their answers.
    """
    if "messages" not in payload:
        return payload
    return {**payload, "messages": _without_nulls(payload["messages"])}


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict) or not value:
        return value
    kept = {}
    for name, part in value.items():
        if name not in _OF_TOOLS:
            part = _without_nulls(part)
        if part is not None or name == "content":
            kept[name] = part
    return kept or None


def question_of(payload: Payload) -> str:
    try:
        question = payload["messages"][-1]["content"]
    except (
        LookupError,
        TypeError,
    ):  # messages may be anything that orjson writes, such as dataclasses
        question = payload.get("prompt")
    if isinstance(question, list):
        question = "\n".join(str(part.get("text", "")) for part in question if type(part) is dict)
    return question if isinstance(question, str) else ""


def request_seed(
    seed: int, ordinal: int, doc_id: str, rollout_idx: int, digest: str, occurrence: int
) -> int:
    """Returns the ``seed`` of a request: 0 to 2**31 - 1, which vLLM, SGLang, llama.cpp and OpenAI
    all take.

    Engines that honour seeds repeat their sample when a request is sent again. With one seed for
    all, two rollouts of a document would be one sample.

    Args:
        digest: hash of the payload without a seed. The number of the call would depend on the order
            of parallel calls.
    """
    request = orjson.dumps([seed, ordinal, doc_id, rollout_idx, digest, occurrence])
    return int(xxhash.xxh3_64_intdigest(request)) >> (64 - 31)


_UNKNOWN_FORMS = 2  # batches for a request whose answers have an unknown form
_IN_TIERS = ("chat/completions", "completions", "responses")


@dataclass(frozen=True)
class AnswerPieces:
    rank: RankContext
    answers: DocumentAnswers
    key: AnswerKey
    saved: Mapping[AnswerKey, CachedAnswer]
    new: dict[int, bytes] = field(default_factory=dict)

    def get(self, number: int) -> bytes | None:
        if number in self.new:
            return self.new[number]
        row = self.saved.get(self.key.piece(number))
        return None if row is None else row.result

    def __setitem__(self, number: int, piece: bytes) -> None:
        self.new[number] = piece
        answers = self.answers
        key = self.key.piece(number)
        row = CachedAnswer(piece, None)
        self.rank.checkpoint.put_answer(answers.slot, answers.doc_id, key, row)


class RolloutRequests:
    def __init__(
        self, rank: RankContext, answers: DocumentAnswers, rollout_idx: int, model: RankModel
    ) -> None:
        self.rank = rank
        self.answers = answers
        self.rollout_idx = rollout_idx
        self.model = model
        self.config = model.config

    def count_finished(self, result: object) -> None:
        if isinstance(result, Result):
            self.answers.count_cached(result)
            self.answers.count(self.rollout_idx, result, self.model.usual)

    async def answered(
        self, payload: Payload, api: Api, whole: bool = False, retry_of: tuple[object, ...] = ()
    ) -> Result:
        """Returns the cached answer, or sends the payload.

        Args:
            retry_of: key that separates a retry from equal requests; () for other requests.

        Raises:
            InferenceError: the request cannot be answered; ``error`` has the cause.
            RolloutServerError: no request can be answered, or ``accept_null_finish_reason`` is
                proved wrong.
        """
        if self.answers.have_ended:
            await wait_until_cancelled()
        config = self.config
        answers = self.answers
        rollout_idx = self.rollout_idx
        model = config.model_name_or_path
        model_of_payload = payload.get("model") or model
        if whole:
            model = model_of_payload
        elif model_of_payload != model:
            warn_once(
                f"A payload names the model {model_of_payload!r}, which is not sent: the run's "
                f"model is {model!r}. Leave it out, or start a run with that model."
            )
        # datatrove's order of keys: engines answer in the order of a schema.
        payload = {**payload, "model": model}
        if api.generates:
            for name, value in config.default_generation_params.items():
                payload.setdefault(name, value)
        try:
            sent, extras = merged(payload)
            if extras:
                api = replace(api, extras=extras)
            if type(sent.get("service_tier")) is list and api.path in _IN_TIERS:
                api = replace(api, tiers=sent.pop("service_tier"))  # the client adds a tier
            digest, has_null = self.digest(sent, api, retry_of)
        except ConfigError as error:
            raise failed(error, payload) from error
        key = answers.next_key(rollout_idx, digest)
        if config.seed is not None and api.generates and "seed" not in sent:
            sent["seed"] = request_seed(config.seed, answers.ordinal_in_run, answers.doc_id, *key)
            key = key._replace(payload_hash=self.digest(sent, api, retry_of)[0])
        # Before any await: the rollout may change its payload while it waits.
        if config.other_models and sent.get("model") == config.model_name_or_path:
            api = replace(api, lacks_model=True)  # the client adds the endpoint's name
            sent = {name: value for name, value in sent.items() if name != "model"}
        body = body_of(sent, has_null)
        answers.hashes[rollout_idx] = key.payload_hash
        answers.payloads[rollout_idx] = payload
        answer = await answers.saved(key) if answers.is_asked or answers.slot.cached else None
        try:
            result = None if answer is None else _from_cache(answer, config)
            if result is None:
                if api.generates:
                    api = api_for_payload(api, sent)
                result = await self._send(key, body, sent, payload, api, answer)
            else:
                answers.count_cached(result)
                self._check_size(result, sent, api)
            if config.accept_null_finish_reason and api.generates and result.finish_reason:
                raise self._disproved(result.finish_reason)
        except (RequestRejected, InferenceError) as error:
            answers.count_failed(rollout_idx)
            if isinstance(error, RequestRejected):
                named(error, config.name)
                answers.rejections += (error,)
                raise failed(error, payload) from error
            raise
        answers.count(rollout_idx, result, api, question_of(payload))
        return result

    async def _send(
        self,
        key: AnswerKey,
        body: AnyBody,
        sent: Payload,
        payload: Payload,
        api: Api,
        cached: CachedAnswer | None,
    ) -> Result:
        rank = self.rank
        model = self.model
        answers = self.answers
        if key.occurrence and sent.get("temperature") == 0:
            warn_once(
                "A document repeats a request at temperature 0. Raise the temperature, or set "
                "show_error for answers in a form."
            )
        ends_pieces = False
        try:
            completion = None
            if cached is not None or model.config.provider_batches:
                completion = await self._batched(key, body, api, cached)
            if completion is None:
                answers.request_started()
                try:
                    if model.client.done():
                        client = model.client.result()
                    else:
                        client = await rank.observer.until(model.config.name, model.client)
                    if model.batches is not None and api.is_shared:
                        completion = await model.batches.complete(client, sent, api, answers.order)
                    else:
                        request = Request(client.sender, answers.doc_id, answers.order, body)
                        if client.servers.continues_answers:
                            request.half = await self._half_answer(key, sent, api)
                            ends_pieces = request.half is not None
                        completion = await client.complete(body, api, request)
                finally:
                    answers.request_finished()
        except CkptError as error:
            await self._raise(error, key, payload)
        if "service_tier" in sent and not completion.service_tier:
            completion.service_tier = str(sent["service_tier"] or "")
        cost_before = rank.observer.own.cost
        tokens = rank.observer.answered(completion, model.config)
        answers.cost += rank.observer.own.cost - cost_before
        if ends_pieces:
            model.halves += 1
            model.half_tokens += tokens[1]
        if rank.limits.is_on:
            rank.limits.look()
        self._check_size(completion, sent, api)
        fields = _fields(completion, sent)
        response_id = completion.response_id
        name = completion.model
        endpoint = completion.endpoint
        row = {**fields, "response_id": response_id, "model": name}
        if endpoint:
            row["endpoint"] = endpoint
        answers.put(key, CachedAnswer(trim(orjson.dumps(row)), None), ends_pieces)
        if rank.checkpoint.congested:
            await rank.wait_for_storage()
        answers.tokens += tokens
        answers.paid += 1
        return _result(fields, response_id, name, endpoint)

    async def _raise(self, error: CkptError, key: AnswerKey, payload: Payload) -> NoReturn:
        model = self.model
        self.rank.observer.own.failed += 1
        if isinstance(error, RequestRejected):
            self.answers.put(key, CachedAnswer(None, f"{error.status} {error.body}"))
            await self.rank.wait_for_storage()
            raise error
        at_fault = isinstance(error, RequestFailed) and error.is_documents
        if at_fault or isinstance(error, RequestPoisoned):
            raise failed(named(error, model.config.name), payload) from error
        model.is_dead = model.is_dead or isinstance(error, ServerDied | ServerUnavailable)
        stopped = self._stopped(error, payload)
        if isinstance(error, RequestFailed):
            raise failed(error, payload) from error
        raise stopped from error

    async def _batched(
        self, key: AnswerKey, body: AnyBody, api: Api, cached: CachedAnswer | None
    ) -> Completion | None:
        """Returns the answer of a batch; None if the request must be sent now.

        Otherwise parks the request, and never returns.
        """
        config = self.config
        answers = self.answers
        fields = fields_of_batch(cached)
        attempts = 0
        limit = config.request_max_attempts
        if fields:
            answers.batch_answers += 1
            attempts = fields["attempt"]
            cause = fields.get(FAILURE)
            if ANSWER in fields:
                try:
                    completion = api.parse(orjson.dumps(fields[ANSWER]))
                    if completion.finish_reason or config.accept_null_finish_reason:
                        completion.service_tier = BATCH  # its price
                        return completion
                    raise unfinished(None)
                except RetryableError as error:
                    error.quote()
                    cause = str(error)
                    if isinstance(error, UnexpectedResponse):  # it was paid for
                        limit = min(limit, _UNKNOWN_FORMS)
            if config.provider_batches and attempts >= limit:
                raise RequestFailed(
                    f"Given up after {attempts} batches "
                    f"(request_max_attempts={config.request_max_attempts}; {_UNKNOWN_FORMS} for "
                    f"answers in unknown forms). Last cause: {cause}"
                )
        rank = self.rank
        if config.provider_batches:
            if api.path.startswith("/") or api.extras:
                raise ConfigError(
                    "provider_batches: a batch has requests to paths below /v1, without "
                    "extra_headers and extra_query."
                )
            await rank.wait_for_storage()
            encoded = b"".join(body) if isinstance(body, RequestBody) else body
            slot = answers.slot
            request_id = RequestId(slot.chunk.index, slot.ordinal, key, attempts + 1)
            request = ParkedRequest(config.name, f"/v1/{api.path}", request_id, encoded)
            rank.checkpoint.park(request)
            answers.park()
            await wait_until_cancelled()
        return None

    def digest(
        self, payload: Payload, api: Api, retry_of: tuple[object, ...] = ()
    ) -> tuple[str, bool]:
        """Does ``hash_payload`` with API and model; the usual API and a single model add
        nothing.
        """
        if not NOT_ANSWERING.isdisjoint(payload) and api.path in _IN_TIERS:
            payload = {name: value for name, value in payload.items() if name not in NOT_ANSWERING}
        if api.name != self.model.usual.name:
            payload = {**payload, "$way": api.name}
        if api.extras and api.extras["extra_query"]:
            payload = {**payload, "$query": api.extras["extra_query"]}
        if retry_of:
            payload = {**payload, "$retry": retry_of}
        if self.config.name:
            payload = {**payload, "$model": self.config.name}
        return hash_payload(payload)

    def _disproved(self, reason: str) -> RolloutServerError:
        """Stops the rank, because an answer disproves ``accept_null_finish_reason``.

        The answer is cached, so each further attempt also ends here.
        """
        client = self.model.client
        believed = client.result().without_reason if client.done() else 0
        error = ServerRefused(
            f"An answer has the finish_reason {reason!r}, so {believed} answers without one, "
            "which accept_null_finish_reason let pass, may be cut off. Remove it and start over; "
            "or set accept_changes, and look for null among finish_reasons.",
            starts_over="anew",
        )
        return self._stopped(error)

    def _check_size(self, answered: Completion | Result, payload: Payload, api: Api) -> None:
        """Stops the rank, before a vector is cached, if its size differs from earlier vectors."""
        if not api.is_shared:
            return
        assert answered.answer is not None
        size = len(answered.answer["embeddings"][0]) * 3 // 16  # base64 of float32
        sizes = self.model.sizes
        if len(sizes) >= 1000:  # each document may have other params
            sizes.clear()
        first = sizes.setdefault(
            orjson.dumps({**payload, "input": None}, option=PAYLOAD_JSON), size
        )
        if first != size:
            name = answered.model or self.config.model_name_or_path
            error = ServerRefused(
                f"{name!r} has answered embed() with {plural(size, 'number')}, and before with "
                f"{first}, for the same params. Give all its servers the first answer's model, "
                "and run again; or start over.",
                starts_over="anew",
            )
            raise self._stopped(error)

    def _stopped(self, error: CkptError, payload: Payload | None = None) -> RolloutServerError:
        named(error, self.model.config.name)
        answers = self.answers
        answers.fail(unanswered(answers.doc_id, answers.slot.ordinal, error, payload or {}))
        return RolloutServerError(error)

    async def _half_answer(self, key: AnswerKey, sent: Payload, api: Api) -> HalfAnswer | None:
        rank = self.rank
        saved = await self.answers.cached() if self.answers.slot.cached else {}
        is_short = self.model.has_short_answers or not is_long(sent, rank.checkpoint.mean_answer)
        if is_short and key.piece(0) not in saved:
            return None
        is_usual = api.name == self.model.usual.name and not (api.extras or api.tiers)
        if not is_usual or not may_continue(sent):
            return None
        pieces = AnswerPieces(rank, self.answers, key, saved)
        return HalfAnswer(pieces, rank.checkpoint.own)


def failed(error: Exception, payload: Payload) -> InferenceError:
    """Returns datatrove's error, whose text has no secrets of the payload."""
    inference_error = InferenceError(None, error, payload=masked("payload", payload))
    inference_error.payload = payload
    return inference_error


def _from_cache(answer: CachedAnswer, config: InferenceConfig) -> Result | None:
    """Returns None if it must be requested again."""
    if answer.result is not None:
        fields = orjson.loads(answer.result)  # earlier versions saved only datatrove's fields
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
    """Returns the saved fields. They depend on the payload, so that a table has its columns before
    the first tool call.
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
