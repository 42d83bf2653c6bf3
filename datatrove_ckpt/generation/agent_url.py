"""Serves an OpenAI-compatible address to the agent of a rollout. Each call of the agent becomes a
request of its document, which is saved, counted and resumed like other requests.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.generation import side_effects
from datatrove_ckpt.process.open_files import make_room
from datatrove_ckpt.process.shutdown import end_tasks

_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's client obeys this header: the request has had its retries here."""


class _OpenRequest(NamedTuple):
    request: web.BaseRequest
    path: str
    body: bytes
    task: asyncio.Task[object]


class _AgentRequests:
    """The requests of an agent. A request that a client repeats takes the result of the first.

    Attributes:
        refusal: error of the last request that has ended; None if it was answered.
    """

    def __init__(self, generate: Any) -> None:
        self.refusal: InferenceError | None = None
        self._generate = generate
        self._open: list[_OpenRequest] = []

    async def result(
        self, request: web.BaseRequest, path: str, body: bytes, payload: JsonObject
    ) -> Any:
        task = self._abandoned(path, body)
        if task is None:
            task = asyncio.create_task(self._generate(payload, path=path, whole=True))
        opened = _OpenRequest(request, path, body, task)
        self._open.append(opened)
        try:
            result = await task
        except InferenceError as error:
            self.refusal = error
            raise
        finally:
            if request.transport is not None:
                self._open.remove(opened)
        self.refusal = None
        return result

    async def cancel(self) -> None:
        """Ends requests whose clients have gone."""
        await end_tasks(*(opened.task for opened in self._open))

    def _abandoned(self, path: str, body: bytes) -> asyncio.Task[object] | None:
        for opened in self._open:
            if opened.request.transport is None and opened[1:3] == (path, body):
                self._open.remove(opened)
                return opened.task
        return None


@asynccontextmanager
async def serve(generate: object, model_name: str) -> AsyncIterator[str]:
    """Yields the base URL, which ends in /v1, of a server on 127.0.0.1. The server refuses clients
    that do not know its secret path.

    Raises:
        InferenceError: the agent failed after its last request was refused with this error.
    """
    secret = f"/{secrets.token_urlsafe(24)}"
    requests = _AgentRequests(generate)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == f"{secret}/v1/models" and request.method == "GET":
            model = {"id": model_name, "object": "model", "created": 0, "owned_by": ""}
            body = orjson.dumps({"object": "list", "data": [model]})
            return web.Response(body=body, content_type="application/json")
        if not path.startswith(f"{secret}/v1/") or request.method != "POST":
            call = f"{request.method} {redact(path.removeprefix(secret))}"
            return _refusal(404, f"{call} is not served; send POST below /v1/")
        try:
            body = await request.content.read()
            payload = orjson.loads(body)
            options = payload.pop("stream_options", None) or {}
            is_stream = payload.pop("stream", False)
        except (ValueError, AttributeError, TypeError) as error:
            return _refusal(400, f"The body is no JSON object: {error}")
        name = payload.pop("model", "")
        path = path.removeprefix(secret)
        if is_stream and not path.endswith("/completions"):
            return _refusal(400, f"{path} cannot stream here: use chat completions, or no stream")
        try:
            result = await requests.result(request, path, body, payload)
        except InferenceError as error:
            return _refusal(400, safe_text(error.error))
        except Exception as error:  # the rank stops
            return _refusal(503, str(error))
        assert result.answer is not None
        answer = {"model": name, **result.answer}  # agents refuse an answer without a model
        if not is_stream:
            return web.Response(body=orjson.dumps(answer), content_type="application/json")
        parts = [*_chunks(answer, bool(options.get("include_usage")))]
        stream = b"".join(b"data: %s\n\n" % orjson.dumps(part) for part in parts)
        return web.Response(body=stream + b"data: [DONE]\n\n", content_type="text/event-stream")

    server = web.Server(handle, access_log=None)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    # A new file gets the lowest free number. Each agent needs four: this listener, both ends of its
    # connection, and the connection to the model's server.
    make_room(4 * listener.sockets[0].fileno())
    address = listener.sockets[0].getsockname()
    side_effects.agents.add(address)
    try:
        yield f"http://127.0.0.1:{address[1]}{secret}/v1"
    except Exception as error:
        # The agent replaced our error with its own.
        if requests.refusal is not None:
            raise requests.refusal from error
        raise
    finally:
        side_effects.agents.discard(address)
        listener.close()
        server.pre_shutdown()
        await server.shutdown(0.1)  # 0 would wait for ever
        await requests.cancel()


def _refusal(status: int, text: str) -> web.Response:
    body = orjson.dumps({"error": {"message": text, "type": "invalid_request_error"}})
    return web.Response(
        status=status, body=body, content_type="application/json", headers=_NO_RETRY
    )


def _chunks(answer: JsonObject, with_usage: bool) -> list[JsonObject]:
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
