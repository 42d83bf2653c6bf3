"""``python -m datatrove_ckpt.inference.servers.dummy``: a server of canned answers, to debug
pipelines.

Completions and token counts equal those of datatrove's dummy server. Embeddings, classes and scores
depend on the text alone. The server checks the key in DATATROVE_CKPT_API_KEY if that is set.
"""

import argparse
import asyncio
import hashlib
import json
import os
import struct
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
_COMPLETION_TOKENS = 100
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(latency: float, api_key: str | None) -> web.Application:
    """Makes the server.

    Args:
        latency: seconds that each answer takes.
        api_key: bearer token for requests to /v1.
    """

    @web.middleware
    async def check_key(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if api_key and request.path != "/health" and given != f"Bearer {api_key}":
            return web.json_response({"error": "Invalid API key"}, status=401)
        return await handler(request)

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        payload = orjson.loads(body)
        if latency:
            await asyncio.sleep(latency)
        if (other := _NUMBERS.get(request.path)) is not None:
            usage = {"prompt_tokens": len(body) // 4, "total_tokens": len(body) // 4}
            return web.json_response(
                {"object": "list", "model": payload.get("model"), **other(payload), "usage": usage}
            )
        return web.json_response(
            _completion(payload, len(body), chat=request.path == "/v1/chat/completions")
        )

    # By default bodies of more than one MiB, such as images, are refused.
    app = web.Application(middlewares=[check_key], client_max_size=1 << 30)
    app.router.add_get("/health", _models)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    for path in _NUMBERS:
        app.router.add_post(path, answer)
    return app


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "dummy-model", "object": "model"}]})


def _completion(payload: JsonObject, size: int, *, chat: bool) -> JsonObject:
    content: JsonObject = (
        {"message": {"role": "assistant", "content": TEXT}} if chat else {"text": TEXT}
    )
    prompt_tokens = size // 4
    return {
        "id": "dummy",
        "object": "chat.completion" if chat else "text_completion",
        "model": payload.get("model", "dummy-model"),
        "choices": [{"index": 0, **content, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": _COMPLETION_TOKENS,
            "total_tokens": prompt_tokens + _COMPLETION_TOKENS,
        },
    }


def _numbers(text: object, count: int) -> list[float]:
    """Returns numbers between 0 and 1, exact as float32 and equal for equal texts."""
    seed = hashlib.shake_128(json.dumps(text).encode()).digest(2 * count)
    return [number / 65536 for (number,) in struct.iter_unpack("<H", seed)]


def _listed(texts: object) -> list[object]:
    if isinstance(texts, list):
        return texts
    return [texts]


def _embeddings(payload: JsonObject) -> JsonObject:
    dimensions = payload.get("dimensions") or 8
    vectors = [_numbers(text, dimensions) for text in _listed(payload.get("input"))]
    return {
        "data": [
            {"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(vectors)
        ]
    }


def _classes(payload: JsonObject) -> JsonObject:
    data = []
    for at, text in enumerate(_listed(payload.get("input"))):
        (score,) = _numbers(text, 1)
        data.append(
            {
                "index": at,
                "label": f"LABEL_{score > 0.5:d}",
                "probs": [1 - score, score],
                "num_classes": 2,
            }
        )
    return {"data": data}


def _scores(payload: JsonObject) -> JsonObject:
    scores = [
        _numbers([payload.get("text_1"), text], 1)[0] for text in _listed(payload.get("text_2"))
    ]
    return {
        "data": [
            {"index": at, "object": "score", "score": score} for at, score in enumerate(scores)
        ]
    }


_NUMBERS = {
    "/v1/embeddings": _embeddings,
    "/classify": _classes,
    "/score": _scores,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="datatrove_ckpt.inference.servers.dummy")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time each answer takes")
    known = parser.parse_args(arguments)
    app = make_app(known.latency_ms / 1000, os.environ.get(API_KEY_VARIABLE))
    web.run_app(app, host=HOST, port=known.port, access_log=None, print=None, shutdown_timeout=1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
