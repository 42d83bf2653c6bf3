"""A fake server, which answers like an OpenAI-compatible server, and counts the requests."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Self

import orjson
import xxhash
from aiohttp import web

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.setting_types import check


class FakeServer:
    """An OpenAI-compatible server in its own thread, which counts the requests.

    Args:
        answer: returns the text for a payload and the number of earlier requests with its question.
            By default the same payload always gets the same text.
        status: returns an HTTP status other than 200, or None; called like ``answer``.
        delay: returns the seconds to wait before answering; called like ``answer``.
        hold_after: number of requests that are answered at once; later ones wait for ``release``.
    """

    def __init__(
        self,
        answer: Callable[[JsonObject, int], str] | None = None,
        status: Callable[[JsonObject, int], int | None] = lambda payload, times: None,
        delay: Callable[[JsonObject, int], float] = lambda payload, times: 0.0,
        hold_after: int | None = None,
    ) -> None:
        check(FakeServer, locals())
        self.asked: Counter[str] = Counter()
        """Number of requests by question: the last message's text or the prompt, as JSON if it is
        more than text; of another path without a prompt the whole payload.
        """
        self.payloads: list[JsonObject] = []
        self.error = "refused"
        """The message of answers with another status than 200."""
        self.finish_reason: str | None = "stop"
        """``finish_reason`` of each answer."""
        self.usage: JsonObject = {}
        """``usage`` of each answer; empty: counts of words."""
        self.message: JsonObject = {}
        """Fields of each answer's message beside its content, such as tool calls."""
        self.logprobs: JsonObject = {}
        """``logprobs`` of each choice."""
        self.most_choices = 128
        """Limit on the ``n`` of a payload."""
        self.paths: dict[str, Callable[[JsonObject], JsonObject]] = {}
        """Functions that answer the payloads of other paths, such as /v1/embeddings.

        Without a function, a path is not found.
        """
        self._answer = answer or _answer_to
        self._status = status
        self._delay = delay
        self._hold_after = hold_after
        self._port = 0  # known once the server listens
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        app = web.Application(client_max_size=2**30)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        self._thread = threading.Thread(target=self._serve, name="fake server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def release(self) -> None:
        self._hold_after = None
        self._loop.call_soon_threadsafe(self._released.set)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        self._route(self._runner.app.router)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    def _route(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self._models)
        router.add_post("/{path:.*}", self._answered)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _answered(self, request: web.Request) -> web.Response:
        other = self.paths.get(request.path)
        if other is None and request.path not in ("/v1/chat/completions", "/v1/completions"):
            return web.json_response(
                {"error": {"message": f"there is no {request.path}"}}, status=404
            )
        payload = orjson.loads(await request.read())
        question = _question(payload)
        times = self.asked[question]
        self.asked[question] += 1
        self.payloads.append(payload)
        if self._hold_after is not None and len(self.payloads) > self._hold_after:
            await self._released.wait()
        await asyncio.sleep(self._delay(payload, times))
        status = self._status(payload, times)
        if status is not None:
            return web.json_response(
                {"error": {"message": f"{self.error} with {status}"}}, status=status
            )
        if other is not None:
            return web.Response(body=orjson.dumps(other(payload)), content_type="application/json")
        text = self._answer(payload, times)
        choice: JsonObject = {"finish_reason": self.finish_reason}
        if "messages" in payload:
            choice["message"] = {"role": "assistant", "content": text, **self.message}
        else:
            choice["text"] = text
        if self.logprobs:
            choice["logprobs"] = self.logprobs
        choices = [
            {"index": index, **choice}
            for index in range(min(payload.get("n", 1), self.most_choices))
        ]
        usage = {"prompt_tokens": len(question.split()), "completion_tokens": len(text.split())}
        answer = {"id": "fake", "created": 0, "choices": choices, "usage": self.usage or usage}
        answer["object"] = "chat.completion" if "messages" in payload else "text_completion"
        if "service_tier" in payload:
            answer["service_tier"] = payload["service_tier"]
        return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _question(payload: JsonObject) -> str:
    asked = payload.get("prompt", payload)
    if "messages" in payload:
        asked = payload["messages"][-1].get("content")
    if (
        isinstance(asked, list)
        and asked
        and all(isinstance(part, dict) and "text" in part for part in asked)
    ):
        return "".join(part["text"] for part in asked)
    if isinstance(asked, str):
        return asked
    return orjson.dumps(asked, option=orjson.OPT_SORT_KEYS).decode()


def _answer_to(payload: JsonObject, times: int) -> str:
    return f"answer {xxhash.xxh3_64_hexdigest(orjson.dumps(payload, option=orjson.OPT_SORT_KEYS))}"
