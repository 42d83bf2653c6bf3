"""An OpenAI-compatible address for a rollout: what an agent asks there is a request of its
document, saved, counted and found again like any other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import redact

_LINGER_SECONDS = 0.1  # 0 would wait for ever
_NO_RETRY = {"x-should-retry": "false"}
"""What OpenAI's client heeds. We have retried what may be retried."""


@asynccontextmanager
async def serve(generate: Callable[..., Awaitable[Any]]) -> AsyncIterator[str]:
    """Yields the base URL, which ends in /v1, of a server on 127.0.0.1. Who does not know its path
    is refused.
    """
    secret = f"/{secrets.token_urlsafe(24)}"
    asked: set[asyncio.Task[Any]] = set()
    # Requests whose agent has hung up: its next try takes their answers, and is not paid again.
    left = defaultdict[tuple[str, bytes], list[asyncio.Task[Any]]](list)

    async def ask(payload: JsonObject, path: str) -> Any:
        return await generate(payload, path=path, whole=True)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if not path.startswith(f"{secret}/v1/") or request.method != "POST":
            what = f"{request.method} {redact(path.removeprefix(secret))}"
            return _refusal(404, f"{what} has no answer here; POST below /v1/ has")
        try:
            body = await request.content.read()
            payload = orjson.loads(body)
            options = payload.pop("stream_options", None) or {}
            is_stream = payload.pop("stream", False)
        except (ValueError, AttributeError, TypeError) as error:
            return _refusal(400, f"The body is no JSON object: {error}")
        model = payload.pop("model", "")  # the run's is asked
        path = path.removeprefix(secret)
        if is_stream and not path.endswith("/completions"):
            return _refusal(400, f"{path} has no streams here: ask without stream")
        if left.get((path, body)):
            task = left[path, body].pop(0)
        else:
            task = asyncio.create_task(ask(payload, path))
            asked.add(task)
            task.add_done_callback(asked.discard)  # contexts of agents are long
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            left[path, body].append(task)
            raise
        except InferenceError as error:
            return _refusal(400, str(error))
        except Exception as error:  # the rank stops
            return _refusal(503, str(error))
        assert result.answer is not None  # whole
        answer = {"model": model, **result.answer}  # agents refuse an answer without one
        if not is_stream:
            return web.Response(body=orjson.dumps(answer), content_type="application/json")
        parts = [*_chunks(answer, bool(options.get("include_usage")))]
        stream = b"".join(b"data: %s\n\n" % orjson.dumps(part) for part in parts)
        return web.Response(body=stream + b"data: [DONE]\n\n", content_type="text/event-stream")

    server = web.Server(handle, access_log=None, handler_cancellation=True)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        port = listener.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}{secret}/v1"
    finally:
        listener.close()
        server.pre_shutdown()
        await server.shutdown(_LINGER_SECONDS)
        running = [*asked]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _refusal(status: int, text: str) -> web.Response:
    error = {"error": {"message": text, "type": "invalid_request_error"}}
    body = orjson.dumps(error)
    return web.Response(
        status=status, body=body, content_type="application/json", headers=_NO_RETRY
    )


def _chunks(answer: JsonObject, with_usage: bool) -> list[JsonObject]:
    """Returns a whole answer as a stream has it: all of a choice at once."""
    common = {name: answer.get(name) for name in ("id", "created", "model")}
    common["object"] = "text_completion"
    choices = []
    for choice in answer["choices"]:
        part = dict(choice)
        message = part.pop("message", None)
        if message is not None:
            common["object"] = "chat.completion.chunk"
            calls = message.get("tool_calls") or ()
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            part["delta"] = {**message, "tool_calls": numbered} if numbered else message
        choices.append(part)
    chunks = [{**common, "choices": choices}]
    if with_usage:
        chunks.append({**common, "choices": [], "usage": answer.get("usage")})
    return chunks
