"""Serves canned answers, to debug pipelines (``python -m datatrove_ckpt.inference.servers.dummy``).

Completions and token counts equal those of datatrove's dummy server. The server checks the key in
DATATROVE_CKPT_API_KEY if that is set.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.inference_config import API_KEY_VARIABLE, HOST

TEXT = (
    "This is dummy text content for debugging purposes. Page contains sample text to simulate "
    "OCR output."
)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(latency: float, api_key: str | None) -> web.Application:
    """Makes the server. ``latency``: seconds that each answer takes."""

    @web.middleware
    async def check_key(request: web.Request, handler: _Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        if api_key and request.path != "/health" and authorization != f"Bearer {api_key}":
            return web.json_response({"error": "Invalid API key"}, status=401)
        return await handler(request)

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        payload = orjson.loads(body)
        if latency:
            await asyncio.sleep(latency)
        tokens = len(body) // 4
        answered = {"id": "dummy", "model": payload.get("model", "dummy-model")}
        if request.path in _ROWS:
            name, row = _ROWS[request.path]
            texts = payload.get(name)
            if payload.get("dimensions"):
                row = {**row, "embedding": [0.5] * payload["dimensions"]}
            number = len(texts) if isinstance(texts, list) else 1
            rows = [{"index": index, **row} for index in range(number)]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return web.json_response({**answered, "object": "list", "data": rows, "usage": usage})
        kind = "text_completion"
        content: JsonObject = {"text": TEXT}
        if request.path == "/v1/chat/completions":
            kind = "chat.completion"
            content = {"message": {"role": "assistant", "content": TEXT}}
        usage = {"prompt_tokens": tokens, "completion_tokens": 100, "total_tokens": tokens + 100}
        choice = {"index": 0, **content, "finish_reason": "stop"}
        return web.json_response({**answered, "object": kind, "choices": [choice], "usage": usage})

    # By default bodies of more than one MiB, such as images, are refused.
    app = web.Application(middlewares=[check_key], client_max_size=1 << 30)
    app.router.add_get("/health", _models)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    for path in _ROWS:
        app.router.add_post(path, answer)
    return app


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "dummy-model", "object": "model"}]})


# By path, the field of the request that has the texts, and the answer to each.
_ROWS: dict[str, tuple[str, JsonObject]] = {
    "/v1/embeddings": ("input", {"object": "embedding", "embedding": [0.5] * 8}),
    "/classify": ("input", {"label": "LABEL_1", "probs": [0.25, 0.75], "num_classes": 2}),
    "/score": ("text_2", {"object": "score", "score": 0.5}),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="datatrove_ckpt.inference.servers.dummy")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time each answer takes")
    options = parser.parse_args(arguments)
    app = make_app(options.latency_ms / 1000, os.environ.get(API_KEY_VARIABLE))
    web.run_app(
        app, host=HOST, port=options.port, access_log=None, print=None, shutdown_timeout=1.0
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
