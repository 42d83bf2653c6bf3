"""What kills cost a job of long answers, on a simulated engine in virtual time: ``python -m
tests.bench.half_answers [--answers 120] [--kills 900 3600]``.

Answers have 8,000 tokens on average (lognormal, cv 0.8), a length for each draw; as many are in
flight as the KV cache holds. The real client sends them; a kill of the client keeps what its
request cache would. An answer that begins again is drawn again, so short ones are kept more often.

seconds   from the first request to the last answer, without kills and with them
twice     tokens that were generated and are in no answer, for each kill
mean      tokens of the kept answers: with kills it should be as without
"""

import argparse
import asyncio
import math
import random
import time

import orjson
from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.half_answers import GENERATE, Continuation, HalfAnswer
from datatrove_ckpt.inference.client.routing import Request
from tests import simulated_servers
from tests.bench.throughput_run import virtual_loop
from tests.clients import client_of
from tests.jobs import chat
from tests.simulated_engine import Request as EngineRequest

PLACES = 58
PROMPT = 500
# An 8B model on an H100, measured on vLLM's own scheduler.
ENGINE = {
    "places": 256,
    "blocks": 32_000,
    "base": 0.0075,
    "per_decode": 0.00001,
    "per_prompt_token": 0.0000325,
    "per_cached_token": 0.000000056,
}
RESTARTS = {"client": 30.0, "server": 120.0}  # seconds
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
_SIGMA = math.sqrt(math.log(1 + 0.8**2))


class StreamingServer(simulated_servers.SimulatedServer):
    """Also continues answers: a token is its place in the answer.

    Args:
        is_drawn_once: the length of an answer goes with its first tokens, as with halves.
    """

    def __init__(self, draw, is_drawn_once):
        super().__init__(**ENGINE)
        self._random = draw
        self._is_drawn_once = is_drawn_once
        self._lengths = {}
        self._streams = {}
        self.generated = 0

    def length(self, name):
        if name not in self._lengths or not self._is_drawn_once:
            drawn = self._random.lognormvariate(math.log(8000) - _SIGMA**2 / 2, _SIGMA)
            self._lengths[name] = max(64, min(32_000, int(drawn)))
        return self._lengths[name]

    def submit(self, name, prompt, tokens, connection, interval):
        """``prompt``: ids of prompt and answer so far."""
        texts = [hash((name, block)) for block in range((prompt + tokens) // 16)]
        request = EngineRequest(prompt, tokens, texts)
        self._streams[request] = [connection, 0, interval]
        self._answers[request] = ("", None)
        self.engine.submit(request)
        self._step()
        return request

    def abort(self, request):
        stream = self._streams.pop(request, None)
        super().abort(request)
        if stream is not None:
            self.generated += self._count(request)

    def _count(self, request):
        if request._since is None:
            return request.answered
        return request.answered + self.engine._round - request._since

    def _end_step(self, finished):
        for request in finished:
            connection, sent, _ = self._streams.pop(request)
            self._answers.pop(request, None)
            self.generated += request.answer
            connection.ended(request.answer - sent)
        for request, stream in self._streams.items():
            connection, sent, interval = stream
            count = self._count(request)
            if count - sent >= interval or (count and not sent and interval < math.inf):
                connection.grown(count - sent)
                stream[1] = count
        super()._end_step(())

    def kill(self):
        self.generated += sum(map(self._count, self._streams))
        self._streams.clear()
        super().kill()


class _Connection(simulated_servers._Connection):
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
        if path.endswith("/derender"):
            choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "length"}
            self._reply(orjson.dumps({"choices": [choice]}))
        elif path.endswith("/render"):
            name = payload["messages"][0]["content"]
            params = {"max_tokens": self._server.length(name)}
            ids = [int(name), *([0] * (PROMPT - 1))]
            fields = {"request_id": "r", "features": None, "token_ids": ids}
            self._reply(orjson.dumps({**fields, "sampling_params": params}))
        elif path == GENERATE:
            params = payload["sampling_params"]
            ids = payload["token_ids"]
            head = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
            self._transport.write(head)
            self._is_stream = True
            interval = params["stream_interval"]
            self._begin(ids[0], len(ids), params["max_tokens"], interval)
        else:
            name = payload["messages"][0]["content"]
            self._is_stream = False
            self._begin(int(name), PROMPT, self._server.length(name), math.inf)

    def _begin(self, name, prompt, tokens, interval):
        self._tokens = tokens
        self._request = self._server.submit(name, prompt, tokens, self, interval)

    def grown(self, number, reason=None):
        choice = {"index": 0, "token_ids": [0] * number, "finish_reason": reason}
        event = b"data: %b\n\n" % orjson.dumps({"choices": [choice]})
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def ended(self, number):
        self._request = None
        if self._is_stream:
            self.grown(number, "length")
            self._send(b"0\r\n\r\n", self._close)
            return
        usage = {"prompt_tokens": PROMPT, "completion_tokens": self._tokens}
        choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "length"}
        self._reply(orjson.dumps({"choices": [choice], "usage": usage}))


async def run(half, kind, every, answers, seed):
    """Returns seconds, tokens generated twice a kill, and the mean length."""
    draw = random.Random(seed)
    server = StreamingServer(random.Random(seed + 1), half)
    url = await server.start()
    config = InferenceConfig(
        "endpoint",
        "m",
        endpoint_url=url,
        max_concurrent_generations=PLACES,
        server_patience_seconds=1e6,
        request_timeout=1e6,
        request_max_attempts=10**6,
    )
    lengths = {}
    saved = {number: {} for number in range(answers)}  # the pieces that a request cache has
    loop = asyncio.get_running_loop()
    began = loop.time()
    kills = 0

    async def attempt():
        async with client_of(config, [url]) as client:
            (target,) = client.servers.router.targets
            if half:
                client.servers.set_continuation(target, Continuation("", USAGE))

            async def ask(number):
                body = orjson.dumps(chat(str(number), model="m"))
                request = Request(client.sender, order=number, body=body)
                if half:
                    request.half = HalfAnswer(saved[number], client.sender.work)
                answer = await client.complete(body, request=request)
                lengths[number] = answer.usage["completion_tokens"]
                saved[number].clear()

            await asyncio.gather(*(ask(n) for n in range(answers) if n not in lengths))

    while len(lengths) < answers:
        job = asyncio.ensure_future(attempt())
        while not job.done():
            wait = draw.expovariate(1 / every) if every else None
            await asyncio.wait([job], timeout=wait)
            if job.done():
                break
            kills += 1
            if kind == "client":
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)
                await asyncio.sleep(RESTARTS[kind])
                break
            server.kill()
            await asyncio.sleep(RESTARTS[kind])
            await server.start()
        if job.done() and not job.cancelled():
            job.result()
    seconds = loop.time() - began
    server.stop()
    twice = server.generated - sum(lengths.values())
    return seconds, twice / max(1, kills), sum(lengths.values()) / answers, kills


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=120)
    parser.add_argument("--kills", type=float, nargs="*", default=[900, 3600])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logger.disable("datatrove_ckpt")
    simulated_servers._Connection = _Connection  # type: ignore[misc]
    monotonic = time.monotonic
    rows = [(half, "none", 0.0) for half in (False, True)]
    rows += [
        (half, kind, every)
        for every in options.kills
        for kind in RESTARTS
        for half in (False, True)
    ]
    print("| kills of the | each | halves | seconds | kills | twice a kill | mean |")
    print("|---|---|---|---|---|---|---|")
    for half, kind, every in rows:
        with asyncio.Runner(loop_factory=virtual_loop) as runner:
            found = runner.run(run(half, kind, every, options.answers, options.seed))
        time.monotonic = monotonic  # type: ignore[assignment]
        seconds, twice, mean, kills = found
        row = [kind, f"{every:g} s", "yes" if half else "no", f"{seconds:,.0f}", str(kills)]
        print("|", " | ".join([*row, f"{twice:,.0f}", f"{mean:,.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
