"""Implements the ``generate`` that a rollout receives; ``rollouts.Generate`` documents it.

Answers that loop, refuse or are cut off are retried by the policies ``on_loop``, ``on_refusal`` and
``on_cut_off``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config.generation_params import TOKEN_LIMITS, refuse_near_misses
from datatrove_ckpt.errors import BadAnswer, ConfigError, RequestRejected, named
from datatrove_ckpt.generation.once import OnceCall, result_of
from datatrove_ckpt.generation.requests import RolloutRequests, failed
from datatrove_ckpt.generation.user_frames import user_call_site
from datatrove_ckpt.inference.client.responses import (
    Api,
    Floats,
    api_for_path,
    from_base64,
    typed_api,
    with_raw_response,
)
from datatrove_ckpt.output.document_codec import Result
from datatrove_ckpt.process.shutdown import wait_until_cancelled
from datatrove_ckpt.rollouts import Classification, Payload
from datatrove_ckpt.rollouts.interface import gather_all
from datatrove_ckpt.rollouts.settings import OneRequest

_BAD = {"on_loop": "is looping", "on_refusal": "is a refusal", "on_cut_off": "is cut off"}


async def acceptable(requests: RolloutRequests, payload: Payload, api: Api, whole: bool) -> Result:
    answers = requests.answers
    if answers.have_ended:
        await wait_until_cancelled()
    payload = deepcopy(payload)  # the rollout may change it before a retry
    policies = requests.model.policies
    retries = Counter[str]()
    try:
        digest, _ = requests.digest(payload, api)
    except ConfigError as error:
        raise failed(error, payload) from error
    # Not the order of the retries, which depends on the order of parallel answers.
    first = answers.next_key(requests.rollout_idx, f"first {digest}")
    result = await requests.answered(payload, api, whole)
    defaults = requests.config.default_generation_params
    changed = dict(payload.get("extra_body", defaults.get("extra_body")) or {})
    while setting := requests.rank.quality.first_case(policies, result):
        policy = policies[setting]
        if retries[setting] == policy.retries:
            break
        retries[setting] += 1
        if not policy.params.keys().isdisjoint(TOKEN_LIMITS):
            # A limit under the other name would win, or be refused beside the new one.
            names = {*defaults, *payload, *changed}
            changed |= dict.fromkeys(names.intersection(TOKEN_LIMITS))
        changed |= policy.params
        payload = {**payload, "extra_body": changed}
        try:
            retried = await requests.answered(payload, api, whole, (*first,))
        except InferenceError as error:
            if not isinstance(error.error, RequestRejected):
                raise
            warn_once(
                f"{setting}: a retry was rejected, so the answer before it counts: {error.error}"
            )
            break
        answers.results = [answer for answer in answers.results if answer is not result]
        result = retried
    if not setting or policies[setting].fallback == "keep":
        return result
    bad = BadAnswer(f"the answer {_BAD[setting]}.", setting=setting)
    bad.is_dropped = policies[setting].fallback == "drop"
    raise failed(named(bad, requests.config.name), payload)


_EXAMPLE = '{"messages": [{"role": "user", "content": document.text}]}'


class BoundGenerate:
    __slots__ = ("_requests",)

    def __init__(self, requests: RolloutRequests) -> None:
        self._requests = requests

    def __getattr__(self, name: str) -> BoundGenerate:
        requests = self._requests
        models = requests.rank.models
        if name.startswith("_") or name not in models:
            names = ", ".join(filter(None, models)) or 'none: config={"judge": ...} names models'
            raise AttributeError(
                f"generate has no {name!r}, and the models of this run are {names}"
            )
        # Not stored: it would be a reference cycle, freed only by the garbage collector.
        return BoundGenerate(
            RolloutRequests(requests.rank, requests.answers, requests.rollout_idx, models[name])
        )

    @property
    def model_name(self) -> str:
        return self._requests.config.model_name_or_path

    def __call__(
        self,
        payload: Payload,
        *,
        path: str | None = None,
        whole: bool = False,
        json_schema: JsonObject | None = None,
        attempts: int = 3,
    ) -> Coroutine[object, None, Any]:
        """Checks the arguments before any await, while the caller's frame is on the stack."""
        requests = self._requests
        api = requests.model.usual
        if type(payload) is not dict and not isinstance(payload, Mapping):
            kind = type(payload).__name__
            return self._refused(f"generate takes a dict such as {_EXAMPLE}, not a {kind}")
        if json_schema is not None:
            if path is not None or whole:
                return self._refused("json_schema is for completions: leave out path and whole")
            return self.form(json_schema, attempts).value(self, payload)
        if payload.get("stream"):
            return self._refused("the payload requests a stream: remove stream")
        try:
            if path is not None:
                api = api_for_path(path)
            if api.generates and not whole:
                refuse_near_misses(payload, "payload")
        except ValueError as problem:
            return self._refused(str(problem).rstrip("."))
        if whole:
            api = replace(with_raw_response(api), model=str(payload.get("model", "")))
        if requests.model.policies and api.generates:
            return acceptable(requests, payload, api, whole)
        return requests.answered(payload, api, whole)

    def form(self, json_schema: JsonObject, attempts: int = 3) -> OneRequest:
        """Returns the form of answers to ask for. Stops the task if there can be none."""
        try:
            form = OneRequest(json_schema=json_schema, answer_attempts=attempts)
            # A copy: the form of one request changes no server of the run.
            return form.for_config(copy(self._requests.config))
        except ConfigError as error:
            self._requests.answers.fail(error)
            raise

    def _refused(self, wrong: str) -> Coroutine[object, None, NoReturn]:
        answers = self._requests.answers
        if answers.have_ended:
            return wait_until_cancelled()
        error = ConfigError(f"{wrong}{user_call_site()}.", setting="rollout_fn")
        answers.fail(error)
        raise error

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
        requests = self._requests
        rank = requests.rank
        answers = requests.answers
        if answers.have_ended:
            await wait_until_cancelled()
        if requests.model.client.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("generate.once was called from a different loop")
        if not isinstance(name, str) or not callable(function):
            await self._refused(
                "generate.once takes a name, a function and its arguments, as in "
                "generate.once('search', search, query)"
            )
        if not isinstance(keep_errors, type):  # ``isinstance`` takes no list
            keep_errors = tuple(keep_errors)
        call = OnceCall(name, function, args, kwargs, time_limit, keep_errors)
        try:
            digest = call.digest(rank.code)
        except TypeError as error:
            await self._refused(
                f"the name and arguments of generate.once({name!r}, ...) must be JSON: {error}. "
                "Give the function other values in another way"
            )
        key = answers.next_key(requests.rollout_idx, digest)
        answers.payloads[requests.rollout_idx] = {"once": name, "args": args, "kwargs": kwargs}
        saved = await answers.saved(key)
        if saved is None:
            answers.request_started()
            try:
                saved = await rank.calls.make(call)
            finally:
                answers.request_finished()
            answers.put(key, saved)
            await rank.wait_for_storage()
        return result_of(saved)

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        # A server takes longer to import than many runs have time.
        from datatrove_ckpt.generation.agent_url import serve

        answers = self._requests.answers
        rank = self._requests.rank
        async with serve(self, self.model_name) as base_url:
            rank.agents += 1
            try:
                yield base_url
            finally:
                rank.agents -= 1
        if not answers.slot.cached:
            return
        number = self._requests.rollout_idx
        cached = await answers.cached()
        saved = sum(key.rollout_idx == number and not key.is_piece for key in cached)
        reused = answers.reused[number]
        if reused < saved and reused < answers.requests[number]:
            warn_once(
                f"Document {answers.doc_id!r}: its agent sent other requests than an earlier "
                "attempt. Are time or random numbers in its prompts?"
            )

    # Each sends a request, or a request for each text, to an API of the engine (``Engine.ways``).

    async def embed(self, texts: str | Sequence[str], /, **params: object) -> Floats:
        if isinstance(texts, str):
            await self._check("embed", [texts])
            return from_base64((await self._ask("embed", (texts,), params))["embeddings"][0])
        await self._check("embed", texts)
        answers = await gather_all(self._ask("embed", (text,), params) for text in texts)
        if answers:
            return np.stack([from_base64(answer["embeddings"][0]) for answer in answers])
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
            label = label or labels[best]
        elif len(labels) != len(scores):
            await self._refused(
                f"generate.classify has {len(labels)} labels, and the model has {len(scores)} "
                "classes"
            )
        elif label not in ("", unnamed, labels[best]):
            await self._refused(
                f"generate.classify: label {best} is {labels[best]!r}, but the model's label is "
                f"{label!r}"
            )
        else:
            label = labels[best]
        return Classification(label, scores[best], dict(zip(labels, scores, strict=True)))

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
        to = self._requests.config.engine.ways[name]
        result = await self._requests.answered(
            to.payload(values, params), typed_api(name, to.path, count)
        )
        assert result.answer is not None
        return result.answer

    async def _check(self, name: str, texts: Sequence[object]) -> None:
        wrong = self._requests.config.engine.lacks(name)
        if isinstance(texts, str):
            wrong = wrong or f"generate.{name} takes a list of texts, not one"
        for text in texts if isinstance(texts, Sequence) else [texts]:
            if not isinstance(text, str):
                wrong = wrong or f"generate.{name} takes texts, and not a {type(text).__name__}"
        if wrong:
            await self._refused(wrong)
