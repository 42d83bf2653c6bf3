"""TokenServer: a fake vLLM with the three paths that continue answers, which counts tokens.

The next token depends on all ids before it, so an answer that is continued with other ids, or at
another place, is another answer. As with vLLM, ``derender`` shows the token that ends an answer,
and gives neither "tool_calls" as finish_reason nor details of the usage.
"""

import asyncio
import random
import sys
from pathlib import Path

import orjson
import xxhash
from aiohttp import web

from datatrove_ckpt.testing import FakeServer
from tests.processes import write_program

BEGIN, ANSWER, END = 1, 2, 3
_FIRST = 1000  # of the ids that an answer has
_PARAMS = ("temperature", "top_p", "min_tokens", "seed", "stop", "presence_penalty", "logit_bias")


class TokenServer(FakeServer):
    """Also answers the whole requests of a ``FakeServer``, with the same texts.

    Args:
        lengths: tokens of the answer to each question, with the token that ends it.

    Attributes:
        generated: number of tokens so far.
        requested: paths of the requests in turn, with their payloads.
        peers: the addresses of their connections.
        writing: the last stream of ids.
        template: ids before each prompt.
        version: of the engine.
        key: that requests need; "": none.
        draw: returns whether an answer ends at this place; None: ``lengths`` decides.
        token: awaited before each token of a request.
        sent: awaited after each event of a stream, with the ids of the answer so far.
        change: returns an event of a stream as it is sent, or None in place of the connection.
        missing: paths that are not found.
        changed: functions of a path that change its answer.
    """

    def __init__(self, lengths=None, length=10):
        super().__init__()
        self.lengths = lengths or {}
        self.length = length
        self.generated = 0
        self.requested = []
        self.peers = []
        self.template = [BEGIN]
        self.version = "0.32.0"
        self.key = ""
        self.draw = None
        self.missing = set()
        self.changed = {}
        self.change = lambda event: event
        self.details = {"reasoning_tokens": 0}

    async def token(self, request):
        pass

    async def sent(self, ids):
        pass

    def _route(self, router):
        router.add_get("/version", self._version)
        router.add_get("/health", self._version)
        for path, answer in {
            "/v1/chat/completions": self._whole,
            "/v1/completions": self._whole,
            "/v1/chat/completions/render": self._render,
            "/v1/completions/render": self._render,
            "/inference/v1/generate": self._generate,
            "/v1/chat/completions/derender": self._derender,
            "/v1/completions/derender": self._derender,
        }.items():
            router.add_post(path, self._guarded(path, answer))
        super()._route(router)

    async def _version(self, request):
        return web.json_response({"version": self.version})

    def _guarded(self, path, answer):
        async def handle(request):
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            if path in self.missing:
                return web.json_response({"error": {"message": "Not Found"}}, status=404)
            payload = orjson.loads(await request.read())
            self.requested.append((path, payload))
            self.peers.append(request.transport.get_extra_info("peername"))
            fields = await answer(request, payload)
            if not isinstance(fields, dict | list):
                return fields
            fields = self.changed.get(path, lambda fields: fields)(fields)
            if isinstance(fields, int):
                return web.json_response({"error": {"message": "refused"}}, status=fields)
            return web.Response(body=orjson.dumps(fields), content_type="application/json")

        return handle

    def count(self, path):
        return sum(requested == path for requested, _ in self.requested)

    # tokens --------------------------------------------------------------------------------------

    def _prompt(self, payload):
        text = payload.get("prompt") or payload["messages"][-1]["content"]
        return [*self.template, *(100 + byte for byte in text.encode()), ANSWER]

    def next_id(self, ids):
        """Returns the id after all ids of prompt and answer."""
        begin = ids.index(ANSWER) + 1
        if self.draw is not None:
            is_end = self.draw(len(ids) - begin)
            return END if is_end else _FIRST + random.randrange(50)
        text = bytes(number - 100 for number in ids[:begin] if 100 <= number < 400).decode()
        if len(ids) - begin + 1 >= self.lengths.get(text, self.length):
            return END
        return _FIRST + xxhash.xxh3_64_intdigest(orjson.dumps(ids)) % 50

    async def _next(self, request, ids):
        await self.token(request)
        if request.transport is None:  # vLLM aborts the request of a client that has gone
            raise asyncio.CancelledError
        self.generated += 1
        return self.next_id(ids)

    def shown(self, ids):
        return " ".join("<end>" if number == END else str(number) for number in ids)

    # paths ---------------------------------------------------------------------------------------

    async def _whole(self, request, payload):
        prompt = self._prompt(payload)
        limit = payload.get("max_completion_tokens") or payload.get("max_tokens") or 10_000
        ids = []
        while len(ids) < limit and END not in ids:
            ids.append(await self._next(request, prompt + ids))
        is_end = ids[-1] == END
        choice = self._choice(payload, ids[:-1] if is_end else ids, "stop" if is_end else "length")
        if choice["message"].get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        if "prompt" in payload:
            choice = {**choice, "text": choice.pop("message")["content"]}
        answer = {"id": "chatcmpl-whole", "model": payload["model"], "choices": [choice]}
        if payload.get("return_token_ids"):
            choice["token_ids"] = ids
            answer["prompt_token_ids"] = prompt
        usage = self._usage(len(prompt), len(ids))
        answer["usage"] = {**usage, "completion_tokens_details": self.details}
        return answer

    def _choice(self, payload, ids, reason):
        message = {"role": "assistant", "content": self.shown(ids)}
        if payload.get("tools"):
            call = {"name": "f", "arguments": orjson.dumps({"ids": ids}).decode()}
            message |= {"tool_calls": [{"id": "1", "type": "function", "function": call}]}
        return {"index": 0, "message": message, "finish_reason": reason, "stop_reason": None}

    def _usage(self, prompt, completion):
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }

    async def _render(self, request, payload):
        params = {name: payload[name] for name in _PARAMS if payload.get(name) is not None}
        limit = payload.get("max_completion_tokens") or payload.get("max_tokens") or 10_000
        fields = {
            "request_id": f"chatcmpl-{len(self.requested)}",
            "token_ids": self._prompt(payload),
            "features": None,
            "sampling_params": {"stop": [], **params, "max_tokens": limit, "output_kind": 2},
            "model": payload["model"],
        }
        return [fields] if "prompt" in payload else fields

    async def _generate(self, request, payload):
        params = payload["sampling_params"]
        interval = params["stream_interval"]
        assert payload["stream"]
        assert params["max_tokens"] > 0
        self.writing = response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = payload["token_ids"]
        new = []
        piece = []
        reason = None
        while reason is None:
            new.append(await self._next(request, ids + new))
            piece.append(new[-1])
            if new[-1] == END:
                reason = "stop"
            elif len(new) == params["max_tokens"]:
                reason = "length"
            if reason or len(new) == 1 or len(piece) == interval:
                choice = {"index": 0, "token_ids": piece, "finish_reason": reason}
                event = self.change({"choices": [{**choice, "stop_reason": None}]})
                if event is None:
                    request.transport.abort()
                    return response
                if not isinstance(event, bytes):
                    event = b"data: %b\n\n" % orjson.dumps(event)
                await response.write(event)
                await self.sent(ids[ids.index(ANSWER) + 1 :] + new)
                piece = []
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _derender(self, request, payload):
        is_chat = "chat_request" in payload
        asked = payload["chat_request" if is_chat else "completion_request"]
        generated = payload["generate_response"] if is_chat else payload["generate_responses"][0]
        prompt = payload["prompt_tokens"] if is_chat else payload["prompt_tokens"][0]
        (choice,) = generated["choices"]
        ids = choice["token_ids"]
        if not ids:
            return web.json_response({"error": {"message": "no ids"}}, status=400)
        derendered = self._choice(asked, ids, choice["finish_reason"])
        if not is_chat:
            derendered["text"] = derendered.pop("message")["content"]
        return {
            "id": generated["request_id"],
            "model": payload["model"],
            "choices": [derendered],
            "usage": self._usage(prompt, len(ids)),
        }


PROGRAM = """#!{python}
import asyncio, os, sys
sys.path.insert(0, {root!r})
from aiohttp import web
from tests.token_server import TokenServer

server = TokenServer({lengths!r})
server.key = os.environ["VLLM_API_KEY"]


async def token(request):
    with open({folder!r} + "/tokens", "a") as counted:
        counted.write(".")
    await asyncio.sleep({seconds})


async def serve():
    server.token = token
    server._route(server._runner.app.router)
    await server._runner.setup()
    await web.TCPSite(server._runner, "127.0.0.1", port).start()
    with open({folder!r} + "/started", "a") as started:
        print(os.getpid(), *sys.argv[1:], file=started)
    await asyncio.Event().wait()


port = int(sys.argv[sys.argv.index("--port") + 1])
asyncio.run(serve())
"""


def write_vllm(folder, version, lengths, seconds=0.0):
    """Writes an environment with this "vLLM", whose tokens take so long. Returns its Python.

    Its servers write a dot for each token to ``tokens``, and a line with their command to
    ``started``.
    """
    fields = {
        "python": sys.executable,
        "root": str(Path(__file__).parents[1]),
        "folder": str(folder),
    }
    text = PROGRAM.format(**fields, lengths=lengths, seconds=seconds)
    write_program(folder / "bin/vllm", text)
    write_program(folder / "bin/python", "")
    name = f"lib/python3.12/site-packages/vllm-{version}.dist-info"
    (folder / name).mkdir(parents=True)
    return str(folder / "bin/python")
