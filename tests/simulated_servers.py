"""Simulated engines behind HTTP, on the event loop of the client, in virtual time.

They answer /v1/chat/completions, /v1/models and /metrics as vLLM does. A token is four bytes of the
prompt. An answer has as many tokens as ``max_tokens`` says.
"""

import asyncio
import json
import math

from tests.bench import mock_server
from tests.simulated_engine import BLOCK, Engine, Request

_BYTES = 4  # of a token
_PIECE = BLOCK * _BYTES


class SimulatedServer:
    """One engine and its address.

    Args:
        settings: of the engine.

    Attributes:
        first, last: when the first request came, and the last answer went.
        preemptions: of the engines that were killed.
        died: set by ``kill``.
    """

    def __init__(self, **settings):
        self._settings = settings
        self._port = 0
        self._connections = set()
        self.first = None
        self.last = 0.0
        self.answered = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.died = asyncio.Event()
        self._reset()

    def _reset(self):
        self.engine = Engine(**self._settings)
        self._answers = {}
        self._step_end = None
        self._seen = self.engine.metrics()
        self._usage = 0.0

    async def start(self):
        """Returns its URL, which stays the same after ``kill``."""
        self.use(asyncio.get_running_loop())
        self._server = await self._loop.create_server(
            self.connect, "127.0.0.1", self._port, backlog=4096
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self.died.clear()
        return f"http://127.0.0.1:{self._port}"

    def connect(self):
        """Returns the protocol of a new connection."""
        return Connection(self)

    def use(self, loop):
        """Lets the engine run on a loop, without an address."""
        self._loop = loop

    def kill(self):
        """Ends without answers to its requests, and forgets what is in its cache."""
        self.preemptions += self.engine.preemptions
        if self._step_end is not None:
            self._step_end.cancel()
        self._reset()
        self.stop()
        self.died.set()

    def stop(self):
        self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def close(self):
        self._server.close()

    def ask(self, payload, answer):
        """Calls ``answer`` with the body, when the engine has finished the request. Returns the
        request.
        """
        prompt = _prompt_of(payload)
        tokens = payload["max_tokens"]
        text = f"{hash(prompt):x} "
        text = (text * (tokens * _BYTES // len(text) + 1))[: tokens * _BYTES]
        request = Request(-(-len(prompt) // _BYTES), tokens, _texts(prompt + text.encode()))
        self._answers[request] = (text, answer)
        if self.first is None:
            self.first = self._loop.time()
        self.engine.submit(request)
        self._step()
        return request

    def abort(self, request):
        if self._answers.pop(request, None) is not None:
            self.engine.abort(request)

    def metrics(self):
        """Returns the page, as of the last step."""
        seen = self._seen
        names = {
            "num_requests_running": seen.running,
            "num_requests_waiting": seen.waiting,
            "kv_cache_usage_perc": self._usage,
            "num_preemptions_total": self.engine.preemptions,
            "prompt_tokens_total": self.engine.prompt_tokens,
            "generation_tokens_total": self.engine.answer_tokens,
            "prefix_cache_queries_total": self.prompt_tokens,
            "prefix_cache_hits_total": self.cached_tokens,
        }
        lines = [
            f'vllm:{name}{{engine="0",model_name="m"}} {value}\n' for name, value in names.items()
        ]
        blocks = self.engine.cache.blocks
        sizes = f'block_size="{BLOCK}",engine="0",num_gpu_blocks="{blocks}"'
        lines.append(f"vllm:cache_config_info{{{sizes}}} 1.0\n")
        return "".join(lines).encode()

    def _step(self):
        if self._step_end is not None or self.engine.is_idle:
            return
        seconds, finished = self.engine.step()
        self._seen = self.engine.metrics()
        self._usage = self.engine.cache.usage
        self._step_end = self._loop.call_later(seconds, self._end_step, finished)

    def _end_step(self, finished):
        self._step_end = None
        for request in finished:
            self._answer(request)
        self._step()
        if self._step_end is None:
            self._seen = self.engine.metrics()
            self._usage = self.engine.cache.usage

    def _answer(self, request):
        if request not in self._answers:
            return
        text, answer = self._answers.pop(request)
        self.last = self._loop.time()
        self.answered += 1
        self.prompt_tokens += request.prompt
        self.cached_tokens += request.cached
        usage = {
            "prompt_tokens": request.prompt,
            "completion_tokens": request.answer,
            "total_tokens": request.prompt + request.answer,
            "prompt_tokens_details": {"cached_tokens": request.cached},
        }
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        answer(json.dumps({**body, "choices": [choice], "usage": usage}).encode())


class SimulatedProvider:
    """A provider that answers so many requests and tokens a minute, and refuses the others.

    Args:
        seconds: returns how long an answer takes.
        tokens: of one request.
        window: the limits reset at each full minute; else they fill steadily, as buckets.
        shows: "quotas" (``x-ratelimit-*``) and "wait" (``Retry-After``).

    Attributes:
        offered: requests that the limits allowed so far.
    """

    def __init__(
        self, seconds, requests=math.inf, tokens=(0, math.inf), window=False, shows=(), status=429
    ):
        self.status = status
        self.answered = 0
        self.refused = 0
        self._seconds = seconds
        self._each, per_minute = tokens
        self._limits = {"requests": requests, "tokens": per_minute}
        self._left = dict(self._limits)
        self._window = window
        self._shows = shows
        self._at = 0.0
        self._port = 0
        self._connections = set()
        self.died = asyncio.Event()

    start = SimulatedServer.start
    connect = SimulatedServer.connect
    close = SimulatedServer.close

    def use(self, loop):
        self._loop = loop

    @property
    def offered(self):
        costs = {"requests": 1, "tokens": self._each}
        minutes = self._loop.time() / 60 + 1
        if self._window:
            # The clock is a moment late, which begins no further minute.
            minutes = math.ceil(round(self._loop.time(), 3) / 60)
        return min(self._limits[kind] * minutes / (cost or 1) for kind, cost in costs.items())

    def ask(self, payload, answer):
        self._refill()
        costs = {"requests": 1, "tokens": self._each}
        fields = []
        lacking = [kind for kind, cost in costs.items() if self._left[kind] < cost]
        if lacking:
            self.refused += 1
            if "wait" in self._shows:
                wait = max(self._until(kind, costs[kind]) for kind in lacking)
                fields.append(f"Retry-After: {math.ceil(wait)}")
            self._loop.call_later(0.05, answer, b"{}", self.status, fields + self._quotas())
            return
        for kind, cost in costs.items():
            self._left[kind] -= cost
        body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
        body["usage"] = {"total_tokens": self._each or None}  # null at some gateways
        self._loop.call_later(self._seconds(), self._answer, body, answer, self._quotas())
        return

    def abort(self, request):
        pass

    def metrics(self):
        return None

    def _answer(self, body, answer, fields):
        self.answered += 1
        answer(json.dumps(body).encode(), 200, fields)

    def _refill(self):
        now = self._loop.time()
        for kind, limit in self._limits.items():
            if not self._window:
                filled = self._left[kind] + limit * (now - self._at) / 60
                self._left[kind] = min(limit, filled)
            elif now // 60 > self._at // 60:
                self._left[kind] = limit
        self._at = now

    def _until(self, kind, level):
        if self._window:
            return 60 - self._at % 60
        return (level - self._left[kind]) * 60 / self._limits[kind]

    def _quotas(self):
        if "quotas" not in self._shows:
            return []
        fields = []
        for kind, limit in self._limits.items():
            if limit < math.inf:
                until = self._until(kind, limit)
                fields += [
                    f"x-ratelimit-limit-{kind}: {limit}",
                    f"x-ratelimit-remaining-{kind}: {int(self._left[kind])}",
                    f"x-ratelimit-reset-{kind}: {int(until // 60)}m{until % 60:.3f}s",
                ]
        return fields


def _prompt_of(payload):
    turns = [f"<|{turn['role']}|>{turn['content']}" for turn in payload["messages"]]
    return "".join([*turns, "<|assistant|>"]).encode()


def _texts(text):
    hashes = []
    before = 0
    for start in range(0, len(text) - _PIECE + 1, _PIECE):
        before = hash((before, text[start : start + _PIECE]))
        hashes.append(before)
    return hashes


class Connection(mock_server.Server):
    def __init__(self, server):
        self._server = server
        self._request = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._server._connections.add(transport)

    def connection_lost(self, error):
        self._server._connections.discard(self._transport)
        if self._request is not None:
            self._server.abort(self._request)

    def _handle(self, head, body, close):
        self._close = close
        if head.startswith(b"POST "):
            self._request = self._server.ask(json.loads(body), self._reply)
        elif b"/metrics" in head:
            page = self._server.metrics()
            self._reply(page or b"", 200 if page else 404)
        else:
            self._reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def _reply(self, body, status=200, fields=()):
        self._request = None
        head = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *fields,
            *(["Connection: close"] if self._close else []),
        ]
        self._send("\r\n".join(head).encode() + b"\r\n\r\n" + body, self._close)
