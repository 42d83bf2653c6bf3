"""Several endpoints, whose providers fail in ten ways: what share of the ideal a run gets, and
whether it pays for each document once, and knows what it has paid.

In virtual time: minutes of a provider take milliseconds, and how fast the machine is changes no
result. The ideal sends a minute's requests at once, and knows before what will fail.
"""

import asyncio
import math
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import orjson
import pytest
from aiohttp import web

from datatrove_ckpt import InferenceConfig
from tests import golden
from tests.bench.throughput_run import virtual_loop
from tests.histories import read_history
from tests.jobs import documents, rows, runner

DOCUMENTS = 1150
TOKENS = 117  # of a request and its answer, at most
MINUTE = 60.0
LATENCY = 2.0  # seconds
FOREVER = math.inf
TIMEOUT = 60.0
HALF_WAY = 150.0
LONGEST = 7200.0


@dataclass(eq=False)
class Provider:
    """A provider with a limit, a key, prices and a bill of its own.

    Attributes:
        faults: kinds ("down", "fail", "hang", "key", "storm") with the seconds from which and until which
            they last.
        requests, tokens: the limits for each minute.
        declared: the limit of requests that the run is told.
        says_when: its answers 429 have a Retry-After.
        billed: answers by question.
        tokens_billed: prompt and completion tokens of the bill.
        most: requests that it has accepted in a minute.
    """

    faults: tuple[tuple[str, float, float], ...] = ()
    requests: int = 60
    declared: int = 60
    tokens: int = 200_000
    latency: float = LATENCY
    says_when: bool = True
    number: int = 0

    def __post_init__(self):
        self.billed = Counter()
        self.tokens_billed = Counter()
        self.statuses = Counter()
        self.most = 0
        self.last = 0.0
        self._accepted = deque()
        self._outages = 0
        self._sockets = []
        self._port = self._listen(0).getsockname()[1]

    def _listen(self, port):
        self._sockets.append(socket.create_server(("127.0.0.1", port), backlog=2048))
        return self._sockets[-1]

    def close(self):
        for one in self._sockets:
            one.close()

    @property
    def name(self):
        return f"p{self.number}"

    @property
    def prices(self):
        return {"prompt": 0.2 + self.number, "completion": 0.6 + self.number}

    @property
    def settings(self):
        return {
            "url": f"http://127.0.0.1:{self._port}",
            "api_key_env": f"KEY_{self.number}",
            "model": f"model-at-{self.name}",
            "requests_per_minute": self.declared,
            "tokens_per_minute": self.tokens,
            "prices": self.prices,
        }

    @property
    def cost(self):
        """Returns billionths."""
        return round(sum(1000 * self.prices[name] * n for name, n in self.tokens_billed.items()))

    def has(self, kind, now):
        return any(fault == kind and begin <= now < end for fault, begin, end in self.faults)

    def answers_at(self):
        """Yields when the ideal has each answer."""
        now = 0.0
        while now < LONGEST:
            ends = [end for _, begin, end in self.faults if begin <= now < end]
            if ends:
                now = max(ends)
                continue
            answered = now + self.latency
            if not any(kind == "down" and now < begin < answered for kind, begin, _ in self.faults):
                yield from [answered] * min(self.requests, self.declared, self.tokens // TOKENS)
            now += MINUTE

    async def start(self):
        self._loop = asyncio.get_running_loop()
        self._web = web.Server(self._answered, access_log=None)
        self._server = await self._loop.create_server(self._web, sock=self._sockets[0])
        for kind, begin, end in self.faults:
            if kind == "down" and begin:
                self._loop.call_later(begin, self._go_down)
            elif kind == "down":
                self._go_down()
            if kind == "down" and end < FOREVER:
                self._loop.call_later(end, self._come_back)

    def _go_down(self):
        self._outages += 1
        self._server.close()
        for connection in self._web.connections:
            connection.transport.abort()

    def _come_back(self):
        opened = self._loop.create_server(self._web, sock=self._listen(self._port))
        self._back = self._loop.create_task(opened)

    async def _answered(self, request):
        now = self._loop.time()
        if request.headers.get("Authorization") != f"Bearer key-{self.number}" or self.has(
            "key", now
        ):
            return self._refusal(401)
        if request.method == "GET":
            return web.json_response({"object": "list", "data": [{"id": f"model-at-{self.name}"}]})
        payload = orjson.loads(await request.read())
        assert payload["model"] == f"model-at-{self.name}"
        question = payload["messages"][-1]["content"]
        used = {"prompt": 90 + len(question), "completion": 2 * len(question)}
        assert sum(used.values()) <= TOKENS
        if self.has("hang", now):
            await asyncio.sleep(LONGEST)
        if self.has("storm", now) or not self._accepts(now, sum(used.values())):
            return self._refusal(429, self._wait(now))
        if self.has("fail", now):
            await asyncio.sleep(self.latency)
            return self._refusal(503)
        outages = self._outages
        await asyncio.sleep(self.latency)
        if outages == self._outages:
            self.billed[question] += 1
            self.tokens_billed.update(used)
            self.last = self._loop.time()
        self.statuses[200] += 1
        usage = {f"{name}_tokens": number for name, number in used.items()}
        usage["total_tokens"] = sum(used.values())
        message = {"role": "assistant", "content": f"answer to {question}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({"id": "a", "choices": [choice], "usage": usage})

    def _accepts(self, now, tokens):
        while self._accepted and self._accepted[0][0] + MINUTE <= now:
            self._accepted.popleft()
        used = sum(number for _, number in self._accepted)
        if len(self._accepted) >= self.requests or used + tokens > self.tokens:
            return False
        self._accepted.append((now, tokens))
        self.most = max(self.most, len(self._accepted))
        return True

    def _wait(self, now):
        ends = [end for kind, begin, end in self.faults if kind == "storm" and begin <= now < end]
        return max([*ends, *(sent + MINUTE for sent, _ in list(self._accepted)[:1])]) - now

    def _refusal(self, status, wait=0.0):
        self.statuses[status] += 1
        headers = {}
        if wait and self.says_when:
            headers["Retry-After"] = str(math.ceil(wait))
        return web.json_response({"error": {"message": "refused"}}, status=status, headers=headers)


def ideal_seconds(providers):
    answers = sorted(chain(*(provider.answers_at() for provider in providers)))
    return answers[DOCUMENTS - 1]


STORM = (("storm", 60.0, 70.0),)
PLANS = {code.partition("  # ")[2]: eval(code) for code in golden.sections("fault_plans")}
"""What differs from a provider with 60 requests a minute."""
TASKS = {"tasks in turn": 20}


@pytest.fixture
def providers(plan):
    made = [Provider(number=number, **settings) for number, settings in enumerate(PLANS[plan])]
    yield made
    for provider in made:
        provider.close()


@pytest.mark.matrix("plan", PLANS)
def test_a_run_over_several_endpoints_gets_nine_tenths_of_the_ideal_and_knows_its_bill(
    tmp_path, monkeypatch, plan, providers, log
):
    monkeypatch.setattr(time, "monotonic", time.monotonic)  # it becomes the virtual time's
    for provider in providers:
        monkeypatch.setenv(f"KEY_{provider.number}", f"key-{provider.number}")

    clock = SimpleNamespace(now=0.0)

    def new_event_loop():
        nonlocal clock
        loop = virtual_loop()
        loop.now = clock.now
        clock = loop
        for provider in providers:
            loop.run_until_complete(provider.start())
        return loop

    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(new_event_loop=new_event_loop))
    endpoints = [provider.settings for provider in providers]
    tasks = TASKS.get(plan, 1)
    for rank in range(tasks):
        config = InferenceConfig("endpoint", "m", endpoints=endpoints, request_timeout=TIMEOUT)
        step = runner(tmp_path, config, records_per_chunk=100)
        step.run(documents(DOCUMENTS)[rank::tasks], rank, tasks)

    seconds = max(provider.last for provider in providers)
    ideal = ideal_seconds(providers)
    for provider in providers:
        print(provider.name, provider.billed.total(), dict(provider.statuses))
    print(f"{plan}: {seconds:.0f} s of {ideal:.0f} s, {ideal / seconds:.3f} of the ideal")
    given = {provider.settings["url"]: set() for provider in providers}
    for row in rows(tmp_path):
        given[row["metadata"]["rollout_results_endpoint"]].add(row["text"])
    for provider, texts in zip(providers, given.values(), strict=True):
        assert provider.billed == Counter(texts)
        assert sum(f"{provider.settings['url']} has failed" in line for line in log) <= 1
        assert provider.most <= provider.declared
    assert sum(map(len, given.values())) == DOCUMENTS
    histories = (tmp_path / "checkpoints").glob("*/history.jsonl")
    costs = [read_history(history).last.total.cost for history in histories]
    assert sum(costs) == sum(provider.cost for provider in providers)
    refused = sum(provider.statuses[429] for provider in providers)
    assert tasks == 1 or not refused
    assert ideal / seconds >= 0.9
