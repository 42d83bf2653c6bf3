"""Answers one rollout's requests to a model: from the request cache, a batch or a server.

A server's answer is cached. Everything here runs on the event loop of ``scheduler.py``.
"""

from typing import NoReturn

import orjson
from datatrove.pipeline.inference.types import InferenceError
from datatrove.pipeline.inference.types import ServerError as RolloutServerError

from datatrove_ckpt import errors
from datatrove_ckpt.checkpoint.batch_log import (
    ANSWER,
    FAILURE,
    OF_BATCH,
    ParkedRequest,
    RequestId,
    fields_of_batch,
)
from datatrove_ckpt.checkpoint.identity import NOT_ANSWERING
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common import BATCH, JsonObject
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.redaction import masked
from datatrove_ckpt.common.retrying import REJECTED
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import PAYLOAD_JSON, merged
from datatrove_ckpt.generation.document_answers import DocumentAnswers
from datatrove_ckpt.generation.failure_advice import unanswered
from datatrove_ckpt.generation.payloads import body_of, hash_payload, question_of, request_seed
from datatrove_ckpt.generation.rank_requests import RankContext, RankModel
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody
from datatrove_ckpt.inference.client.responses import (
    Api,
    Completion,
    RetryableError,
    UnexpectedResponse,
    api_for_payload,
    unfinished,
)
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.output.document_codec import Result, result_of, trim
from datatrove_ckpt.process.shutdown import wait_until_cancelled
from datatrove_ckpt.rollouts import Payload

_UNKNOWN_FORMS = 2  # batches for a request whose answers have an unknown form
_IN_TIERS = ("chat/completions", "completions", "responses")


class RolloutRequests:
    """The requests of one rollout to one model."""

    def __init__(
        self, rank: RankContext, answers: DocumentAnswers, rollout_idx: int, model: RankModel
    ) -> None:
        self.rank = rank
        self.answers = answers
        self.rollout_idx = rollout_idx
        self.model = model
        self.config = model.config

    def count_finished(self, result: object) -> None:
        """Counts a result of an old output."""
        if isinstance(result, Result):
            self.answers.count_cached(result)
            self.answers.count(self.rollout_idx, result, self.model.usual)

    async def answered(
        self, payload: Payload, api: Api, whole: bool = False, retry_of: tuple[object, ...] = ()
    ) -> Result:
        """Returns the cached answer, or sends the payload.

        Args:
            whole: whether the payload may name its model.
            retry_of: key that separates a retry from equal requests; () for other requests.

        Raises:
            InferenceError: the request cannot be answered; ``error`` has the cause.
            RolloutServerError: no request can be answered, or ``accept_null_finish_reason`` is
                proved wrong.
        """
        if self.answers.have_ended:
            await wait_until_cancelled()
        config = self.config
        generates = api.generates
        answers = self.answers
        rollout_idx = self.rollout_idx
        model = config.model_name_or_path
        named = payload.get("model") or model
        if whole:
            model = named
        elif named != model:
            warn_once(
                f"A payload names the model {named!r}, which is not sent: the run's model is "
                f"{model!r}. Leave it out of the payload, or start a run with that model."
            )
        # datatrove's order of keys: engines answer in the order of a schema.
        payload = {**payload, "model": model}
        if generates:
            for name, value in config.default_generation_params.items():
                payload.setdefault(name, value)
        try:
            sent, extras = merged(payload)
            if extras:
                api = api._replace(extras=extras)
            if api.path in _IN_TIERS and type(sent.get("service_tier")) is list:
                api = api._replace(tiers=sent.pop("service_tier"))  # the client adds a tier
            digest = self.digest(sent, api, retry_of)
        except errors.ConfigError as error:
            raise failed(error, payload) from error
        key = answers.next_key(rollout_idx, digest)
        if config.seed is not None and generates and "seed" not in sent:
            sent["seed"] = request_seed(config.seed, answers.slot.ordinal, answers.doc_id, *key)
            key = key._replace(payload_hash=self.digest(sent, api, retry_of))
        # Before any await: the rollout may change its payload while it waits.
        if config.other_models and sent.get("model") == config.model_name_or_path:
            api = api._replace(lacks_model=True)  # the client adds the endpoint's name
            sent = {name: value for name, value in sent.items() if name != "model"}
        body = body_of(sent)
        answers.hashes[rollout_idx] = key.payload_hash
        answers.payloads[rollout_idx] = payload
        answer = await answers.saved(key)
        try:
            result = None if answer is None else _from_cache(answer, config)
            if result is None:
                if generates:
                    api = api_for_payload(api, sent)
                result = await self._send(key, body, sent, payload, api, answer)
            else:
                answers.count_cached(result)
                self._check_size(result, sent, api)
            if config.accept_null_finish_reason and generates and result.finish_reason:
                raise self._disproved(result.finish_reason)
        except (errors.RequestRejected, InferenceError) as error:
            answers.count_failed(rollout_idx)
            if isinstance(error, errors.RequestRejected):
                errors.named(error, config.name)
                answers.rejections.append(error)
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
                "A document sends a request again at temperature 0, where the answer is mostly the "
                "same. Raise the temperature, or set show_error for answers in a form."
            )
        try:
            completion = None
            if cached is not None and cached.error_message is not None:
                answers.is_suspect = True
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
                        completion = await model.batches.complete(client, sent, api, answers)
                    else:
                        request = Request(
                            client.sender, answers.doc_id, answers.order, body, answers.is_suspect
                        )
                        completion = await client.complete(body, api, request)
                finally:
                    answers.request_finished()
        except errors.CkptError as error:
            await self._raise(error, key, payload)
        if "service_tier" in sent and not completion.service_tier:
            completion.service_tier = str(sent["service_tier"] or "")
        tokens = rank.observer.answered(completion, model.config)
        rank.limits.look()
        self._check_size(completion, sent, api)
        fields = _fields(completion, sent)
        source = {"response_id": completion.response_id, "model": completion.model}
        if completion.endpoint:
            source["endpoint"] = completion.endpoint
        await self.keep(key, CachedAnswer(trim(orjson.dumps({**fields, **source})), None))
        answers.tokens += tokens
        return _result(fields, **source)

    async def _raise(self, error: errors.CkptError, key: AnswerKey, payload: Payload) -> NoReturn:
        """Raises the rollout's error for a request without an answer. Saves a rejection."""
        model = self.model
        self.rank.observer.own.failed += 1
        if isinstance(error, errors.RequestRejected):
            await self.keep(key, CachedAnswer(None, f"{error.status} {error.body}"))
            raise error
        at_fault = isinstance(error, errors.RequestFailed) and error.is_documents
        if at_fault:
            model.client.result().sender.at_fault.add(self.answers.slot.ordinal)
            # Saved, so that the next attempt needs no other requests to compare with. Status 0: all
            # versions send such a request again.
            await self.keep(key, CachedAnswer(None, f"0 {error}"))
        if at_fault or isinstance(error, errors.RequestPoisoned):
            raise failed(errors.named(error, model.config.name), payload) from error
        model.is_dead = model.is_dead or isinstance(
            error, errors.ServerDied | errors.ServerUnavailable
        )
        stopped = self._stopped(error)
        if isinstance(error, errors.RequestFailed):
            raise failed(error, payload) from error
        raise stopped from error

    async def _batched(
        self, key: AnswerKey, body: AnyBody, api: Api, cached: CachedAnswer | None
    ) -> Completion | None:
        """Returns the answer of a batch; None if the request must be sent now.

        Otherwise parks the request, and never returns.

        Raises:
            RequestFailed: the allowed number of batches have not answered it.
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
                raise errors.RequestFailed(
                    f"Given up after {attempts} batches "
                    f"(request_max_attempts={config.request_max_attempts}; {_UNKNOWN_FORMS} for "
                    f"answers in an unknown form). Last cause: {cause}"
                )
        rank = self.rank
        if config.provider_batches:
            if api.path.startswith("/") or api.extras:
                raise errors.ConfigError(
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

    def digest(self, payload: Payload, api: Api, retry_of: tuple[object, ...] = ()) -> str:
        """Hashes the payload, with API and model under names that no request has.

        The usual API and a single model add nothing.
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
        error = errors.ServerRefused(
            f"An answer has the finish_reason {reason!r}, but accept_null_finish_reason is for "
            "servers that never give one. So answers without one may be cut off. This attempt has "
            f"taken {believed} of them as complete, and earlier ones may have taken more. Remove "
            "the setting, and start over, so that every request is sent again. "
            "(Or continue here with accept_changes: then look for null among the finish_reasons "
            "of documents that are finished already, because those stay as they are.)",
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
            error = errors.ServerRefused(
                f"{name!r} has answered embed() with {plural(size, 'number')}, and before with "
                f"{first}, for the same params. So its servers have, or had, different models. "
                "This answer is not saved. When all servers have the first answer's model, run "
                "the same command again. If that model is wrong, start over.",
                starts_over="anew",
            )
            raise self._stopped(error)

    def _stopped(self, error: errors.CkptError) -> RolloutServerError:
        errors.named(error, self.model.config.name)
        answers = self.answers
        rank = self.rank
        # The number of answered requests, if only documents that may be at fault remain.
        answered_requests = 0
        if rank.all_started and self.model.client.done():
            client = self.model.client.result()
            if len(rank.documents) <= client.sender.most_at_fault:
                answered_requests = client.answers
        answers.fail(unanswered(answers.doc_id, answers.slot.ordinal, error, answered_requests))
        return RolloutServerError(error)

    async def keep(self, key: AnswerKey, answer: CachedAnswer) -> None:
        rank = self.rank
        answers = self.answers
        rank.checkpoint.put_answer(answers.slot, answers.doc_id, key, answer)
        if rank.checkpoint.congested:
            await rank.wait_for_storage()


def failed(error: Exception, payload: Payload) -> InferenceError:
    """Returns datatrove's error, whose text (for logs and dead letters) has no secrets of the
    payload.
    """
    inference_error = InferenceError(None, error, payload=masked("payload", payload))
    inference_error.payload = payload
    return inference_error


def _from_cache(answer: CachedAnswer, config: InferenceConfig) -> Result | None:
    """Returns the cached answer; None if it must be requested again.

    Raises:
        RequestRejected: the cached answer is a rejection.
    """
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
    raise errors.RequestRejected(int(status), body, remembered=True)


def _fields(completion: Completion, payload: Payload) -> JsonObject:
    """Returns the fields of an answer that are saved.

    The fields also depend on the payload, so that a table has its columns before the first tool
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
