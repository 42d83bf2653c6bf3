"""What kills cost a job of long answers, on a simulated engine in virtual time.

The real client sends the requests; a kill of the client keeps the pieces that its request cache
would. As many answers are in flight as the KV cache holds. An answer's first token decides its
length, and is drawn: an answer that begins again is drawn again, so short ones are kept more often.
"""

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import orjson

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.half_answers import (
    GENERATE,
    STREAM_INTERVAL,
    Continuation,
    HalfAnswer,
)
from datatrove_ckpt.inference.client.routing import Request
from tests.bench.throughput_jobs import H100
from tests.clients import client_of
from tests.jobs import chat
from tests.simulated_engine import BLOCK
from tests.simulated_engine import Request as EngineRequest
from tests.simulated_servers import Connection, SimulatedServer

PLACES = 58
MOST_TWICE = PLACES * STREAM_INTERVAL  # tokens that a kill may cost
_PROMPT = 500
_LIMIT = 32_000  # max_tokens
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
_SIGMA = math.sqrt(math.log(1 + 0.8**2))  # the lengths' standard deviation is 0.8 of their mean


@dataclass
class Lengths:
    """The lengths of answers, in tokens: the first draws are those of every run."""

    mean: float
    seed: int
    _draws: Counter[int] = field(default_factory=Counter)

    def draw(self, name):
        self._draws[name] += 1
        return self.drawn(name, self._draws[name])

    def drawn(self, name, draw=1):
        chance = random.Random(f"{self.seed} {name} {draw}")
        drawn = chance.lognormvariate(math.log(self.mean) - _SIGMA**2 / 2, _SIGMA)
        return max(8, min(_LIMIT, int(drawn)))


@dataclass
class _Sent:
    """An answer at the engine, and how many of its tokens its connection has."""

    connection: "_Connection"
    tokens: int = 0


class StreamingServer(SimulatedServer):
    """Also continues answers.

    Attributes:
        generated: tokens of all answers, also of those that were cut.
    """

    def __init__(self, lengths):
        # A little more than these places need: few preemptions.
        super().__init__(**{**H100, "places": 256, "blocks": 32_000})
        self.lengths = lengths
        self._sent = {}
        self.generated = 0

    def connect(self):
        return _Connection(self)

    def submit(self, connection, name, length, known=0):
        """Generates the tokens of an answer after its first ``known`` ones."""
        texts = [
            hash((name, length if block * BLOCK >= _PROMPT else 0, block))
            for block in range((_PROMPT + length) // BLOCK)
        ]
        request = EngineRequest(_PROMPT + known, length - known, texts)
        self._sent[request] = _Sent(connection)
        self._answers[request] = ("", None)
        self.engine.submit(request)
        self._step()
        return request

    def abort(self, request):
        super().abort(request)
        if self._sent.pop(request, None) is not None:
            self.generated += self._count(request)

    def _count(self, request):
        if request._since is None:
            return request.answered
        return request.answered + self.engine._round - request._since

    def _end_step(self, finished):
        for request in finished:
            sent = self._sent.pop(request, None)
            if sent is None:  # cut in its last step
                continue
            self._answers.pop(request, None)
            self.generated += request.answer
            sent.connection.ended(request.answer - sent.tokens)
        for request, sent in self._sent.items():
            count = self._count(request)
            if sent.connection.is_stream and _is_due(count, sent.tokens):
                sent.connection.grown(count - sent.tokens)
                sent.tokens = count
        super()._end_step(())

    def kill(self):
        self.generated += sum(map(self._count, self._sent))
        self._sent.clear()
        super().kill()


def _is_due(count, sent):
    """vLLM sends the first token at once."""
    return count - sent >= (STREAM_INTERVAL if sent else 1)


class _Connection(Connection):
    is_stream = False

    def _handle(self, head, body, close):
        self._close = close
        path = head.split()[1].decode()
        if path.endswith("/metrics"):
            self._reply(self._server.metrics())
        elif head.startswith(b"GET "):
            self._reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        else:
            self._post(path, orjson.loads(body))

    def _post(self, path, payload):
        self.is_stream = path == GENERATE
        if self.is_stream:
            name, *known = payload["token_ids"][_PROMPT - 1 :]
            self._transport.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._begin(name, known)
        elif path.endswith("/derender"):
            choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
            self._reply(orjson.dumps({"choices": [choice]}))
        elif path.endswith("/render"):
            ids = [*([0] * (_PROMPT - 1)), _name_of(payload)]
            fields = {"request_id": "r", "features": None, "token_ids": ids}
            params = {"max_tokens": _LIMIT, "temperature": 1.0}
            self._reply(orjson.dumps({**fields, "sampling_params": params}))
        else:
            self._begin(_name_of(payload), [])

    def _begin(self, name, known):
        self._length = known[0] if known else self._server.lengths.draw(name)
        self._first = not known
        self._request = self._server.submit(self, name, self._length, len(known))

    def grown(self, number, reason=None):
        ids = [0] * number
        if self._first:
            ids[0] = self._length
            self._first = False
        choice = {"index": 0, "token_ids": ids, "finish_reason": reason}
        event = b"data: %b\n\n" % orjson.dumps({"choices": [choice]})
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def ended(self, number):
        self._request = None
        if self.is_stream:
            self.grown(number, "stop")
            self._send(b"0\r\n\r\n", self._close)
            return
        usage = {"prompt_tokens": _PROMPT, "completion_tokens": self._length}
        choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
        self._reply(orjson.dumps({"choices": [choice], "usage": usage}))


def _name_of(payload):
    return int(payload["messages"][0]["content"])


class _Run:
    """One job over all its attempts.

    Attributes:
        kept: the lengths of the answers.
    """

    def __init__(self, job, server, continues):
        self._job = job
        self._server = server
        self._continues = continues
        self.kept = {}
        self._pieces = {number: {} for number in range(job.answers)}

    async def attempt(self, url):
        """Asks for all answers that are missing."""
        config = InferenceConfig(
            "endpoint",
            "m",
            endpoint_url=url,
            half_answers=self._continues,
            max_concurrent_generations=PLACES,
            server_patience_seconds=1e6,
            request_timeout=1e6,
            request_max_attempts=10**6,
        )
        missing = [number for number in self._pieces if number not in self.kept]
        async with client_of(config, [url]) as client:
            if self._continues:
                (target,) = client.servers.router.targets
                client.servers.set_continuation(target, Continuation("", _USAGE))
            await asyncio.gather(*(self._ask(client, number) for number in missing))

    async def _ask(self, client, number):
        body = orjson.dumps(chat(str(number), model="m"))
        request = Request(client.sender, order=number, body=body)
        pieces = self._pieces[number]
        if self._continues:
            request.half = HalfAnswer(pieces, client.sender.work)
        answer = await client.complete(body, request=request)
        self.kept[number] = answer.usage["completion_tokens"]
        pieces.clear()

    async def all_attempts(self):
        """Returns the number of kills."""
        kills = 0
        url = await self._server.start()
        attempt = asyncio.ensure_future(self.attempt(url))
        while True:
            await asyncio.wait([attempt], timeout=self._job.every)
            if attempt.done():
                await attempt
                return kills
            kills += 1
            if self._job.killed == "client":
                attempt.cancel()
                await asyncio.wait([attempt])
                await asyncio.sleep(self._job.restart)
                attempt = asyncio.ensure_future(self.attempt(url))
            else:
                self._server.kill()
                await asyncio.sleep(self._job.restart)
                await self._server.start()


async def run_killed(job, seed, *, continues):
    """Returns the result of one run.

    Args:
        continues: whether half-written answers go on (``half_answers``).
    """
    lengths = Lengths(job.tokens, seed)
    server = StreamingServer(lengths)
    run = _Run(job, server, continues)
    began = asyncio.get_running_loop().time()
    kills = await run.all_attempts()
    seconds = asyncio.get_running_loop().time() - began
    server.stop()
    tokens = sum(run.kept.values())
    return {
        "seconds": seconds,
        "kills": kills,
        "twice": (server.generated - tokens) / max(1, kills),
        "mean": tokens / job.answers,
        "true_mean": sum(map(lengths.drawn, range(job.answers))) / job.answers,
    }
