"""Finds out whether a server continues half-written answers (``inference/client/half_answers.py``).

A server is asked once, at its start: for a short answer, for the same answer by the three steps,
and, if this process has launched it, whether it refuses each of these paths without its key. If
anything is not as expected, its requests are sent as usual, and the log says why.
"""

import asyncio

import orjson
from loguru import logger

from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.inference.client.client import ExchangeFailed, default_api, get, post
from datatrove_ckpt.inference.client.half_answers import (
    GENERATE,
    CannotContinue,
    Continuation,
    HalfAnswer,
)
from datatrove_ckpt.inference.client.http1 import Stream, Transport
from datatrove_ckpt.inference.client.responses import Completion, RetryableError
from datatrove_ckpt.inference.client.urls import HiddenUrl

_SECONDS = 120.0
_TOKENS = 24  # vLLM leaves out its default, 16
_QUESTION = "Write a long poem about the sea."


async def find_continuation(
    config: InferenceConfig, url: HiddenUrl, api_key: Secret | None, model: str
) -> Continuation | None:
    """Returns how the server continues answers; None if it does not."""
    probe = _Probe(config, url, api_key, model)
    try:
        async with asyncio.timeout(_SECONDS):
            continuation = await probe.run()
    except TimeoutError:
        reason = f"it took longer than {_SECONDS:g} s"
    except (LookupError, TypeError, ValueError) as error:
        reason = f"an answer has another form than vLLM's ({error!r})"
    except (CannotContinue, CkptError, RetryableError, ExchangeFailed, OSError) as error:
        reason = str(error)
    else:
        logger.info(f"{config.log_prefix}{url} continues half-written answers.")
        return continuation
    level = "WARNING" if config.half_answers is True else "INFO"
    logger.log(
        level,
        f"{config.log_prefix}half_answers: {url} does not continue half-written answers, so a stop "
        f"costs the requests in flight: {reason}",
    )
    return None


class _Probe:
    def __init__(
        self, config: InferenceConfig, url: HiddenUrl, api_key: Secret | None, model: str
    ) -> None:
        self._api = default_api(config)
        self._url = url
        self._api_key = api_key
        self._model = model
        self._is_endpoint = config.server_type == "endpoint"

    async def run(self) -> Continuation:
        """Takes all steps.

        Raises:
            CannotContinue: the server gives another answer than for the whole request.
            CkptError, RetryableError, OSError: it refuses a request, or fails.
            LookupError, TypeError, ValueError: an answer has another form.
        """
        path = self._api.path
        if not self._is_endpoint:
            for guarded in (f"{path}/render", GENERATE, f"{path}/derender"):
                await self._check_guard(guarded)
        payload = {"model": self._model, "max_tokens": _TOKENS, "temperature": 0}
        payload["min_tokens"] = 2  # an answer without text shows nothing
        if path == "completions":
            payload["prompt"] = _QUESTION
        else:
            payload["messages"] = [{"role": "user", "content": _QUESTION}]
        whole = await self._ask(path, orjson.dumps({**payload, "return_token_ids": True}))
        rendered = await self._ask(f"{path}/render", orjson.dumps(payload))
        version = f"{await self._version()} {self._model}"
        streamed = HalfAnswer({}, WorkCounts())
        await self._ask(GENERATE, streamed.continued(rendered, version) or b"", streamed)
        streamed.derender(payload)  # raises without an end
        answer = orjson.loads(whole)
        (choice,) = answer["choices"]
        usage = tuple(answer["usage"])
        half = HalfAnswer({}, WorkCounts())
        half.continued(rendered, version)
        half.feed(b"data: %b\n\n" % orjson.dumps({"choices": [choice]}))
        prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
        if prompt != half.prompt:
            raise CannotContinue("it renders another prompt than it answers")
        derendered = await self._ask(f"{path}/derender", half.derender(payload))
        theirs = _shown(self._api.parse(whole))
        ours = _shown(self._api.parse(half.answer(derendered, usage)))
        if ours != theirs:
            raise CannotContinue(f"it turns the ids of {theirs} into {ours}")
        return Continuation(version, usage)

    async def _check_guard(self, path: str) -> None:
        transport = Transport(self._url.api(path), None, _SECONDS)
        try:
            status = (await transport.send(b"{}")).status
        finally:
            await transport.close()
        if status != 401:
            raise CannotContinue(f"{path} without the key has HTTP {status}, not 401")

    async def _ask(self, path: str, body: bytes, stream: Stream | None = None) -> bytes:
        transport = Transport(self._url.api(path), self._api_key, _SECONDS, self._is_endpoint)
        try:
            return (await post(transport, body, self._model, stream=stream)).body
        finally:
            await transport.close()

    async def _version(self) -> str:
        url = self._url.api("/version")
        response = await get(url, self._api_key, _SECONDS, self._is_endpoint)
        if response.status == 200:
            return str(orjson.loads(response.body)["version"])
        return ""


def _shown(answer: Completion) -> tuple[object, ...]:
    counts = [answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return answer.text, answer.reasoning, answer.tool_calls, answer.finish_reason, *counts
