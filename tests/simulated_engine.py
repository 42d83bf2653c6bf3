"""An engine in simulated time, which schedules as vLLM does, and the client that sends requests to
it.

Each step decodes one token of every running request, and processes prompts with what is left of the
step's token budget. Requests that arrive during a step wait for the next one. A running request
needs a block of the KV cache per 16 tokens; if none is left, the youngest request loses its blocks,
and waits at the front of the queue. The metrics are those of the last step.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

from datatrove_ckpt.inference.servers.probes import Admission, Metrics

BLOCK = 16  # tokens

"""Tokens of a prompt and its answer. Takes the time, in seconds."""


@dataclass
class Request:
    """``computed``: its tokens in the KV cache."""

    prompt: int
    answer: int
    answered: int = 0
    computed: int = 0

    @property
    def length(self):
        return self.prompt + self.answered


@dataclass
class Engine:
    """How long a step takes, in seconds, and what it has room for.

    Attributes:
        places: requests that can run (``max-num-seqs``).
        budget: tokens per step.
        blocks: of the KV cache.
        base, per_decode, per_prompt_token: seconds.
    """

    places: int
    budget: int = 2048
    blocks: int = 1 << 40
    base: float = 0.02
    per_decode: float = 0.001
    per_prompt_token: float = 0.0002

    def __post_init__(self):
        self.free = self.blocks
        self.arrived = []
        self.waiting = deque()
        self.running = []
        self.tokens = 0  # of prompts and answers, each once
        self.preemptions = 0

    @property
    def idle(self):
        return not (self.arrived or self.waiting or self.running)

    def metrics(self):
        return Metrics(len(self.running), len(self.waiting), self.tokens, self.preemptions)

    def step(self):
        """The seconds it takes, and the requests that it finishes."""
        self.waiting.extend(self.arrived)
        self.arrived = []
        scheduled = self._schedule()
        prompts = sum(tokens for _, tokens in scheduled if tokens > 1)
        decodes = sum(tokens == 1 for _, tokens in scheduled)
        for request, tokens in scheduled:
            request.computed += tokens
            if request.computed == request.length:
                self.tokens += 1 if request.answered else request.prompt + 1
                request.answered += 1
        finished = [request for request in self.running if request.answered >= request.answer]
        self.running = [request for request in self.running if request.answered < request.answer]
        self.free += sum(_blocks(request.computed) for request in finished)
        return self.base + decodes * self.per_decode + prompts * self.per_prompt_token, finished

    def _schedule(self):
        budget, preemptions, scheduled = self.budget, self.preemptions, list[tuple[Request, int]]()
        while len(scheduled) < len(self.running) and budget:
            request = self.running[len(scheduled)]
            tokens = min(max(1, request.length - request.computed), budget)
            while (
                new := _blocks(request.computed + tokens) - _blocks(request.computed)
            ) > self.free:
                self._preempt()
                if len(scheduled) == len(self.running):  # it was the youngest itself
                    return scheduled
            self.free -= new
            budget -= tokens
            scheduled.append((request, tokens))
        while (
            self.preemptions == preemptions
            and self.waiting
            and len(self.running) < self.places
            and budget
        ):
            request = self.waiting[0]
            tokens = min(request.length, budget)
            if _blocks(tokens) > self.free:
                break
            self.free -= _blocks(tokens)
            budget -= tokens
            self.running.append(self.waiting.popleft())
            scheduled.append((request, tokens))
        return scheduled

    def _preempt(self):
        youngest = self.running.pop()
        self.free += _blocks(youngest.computed)
        youngest.computed = 0
        self.waiting.appendleft(youngest)
        self.preemptions += 1


def _blocks(tokens):
    return -(-tokens // BLOCK)


@dataclass(frozen=True)
class Step:
    """What there was at the end of a step: the time in seconds, requests, tokens so far, and the
    target of ``auto``.
    """

    at: float
    running: int
    waiting: int
    tokens: int
    target: int


class Simulation:
    """A run of one engine.

    Args:
        limit: requests in flight, or what adapts it.
        lengths: of the requests.
        requests: that want to be in flight at once. None: always more than the limit.

    Attributes:
        steps: what there was at the end of each.
    """

    def __init__(
        self,
        engine,
        lengths,
        limit,
        *,
        seed=0,
        requests=None,
    ):
        self.engine = engine
        self.lengths = lengths
        self.admission = limit if isinstance(limit, Admission) else None
        self.steps = []
        self.in_flight = 0
        self._fixed = limit if isinstance(limit, int) else 0
        self._requests = requests
        self._chance = random.Random(seed)
        self._now = 0.0
        self._busy = False
        self._events = []
        self._count = 0
        self._seen = Metrics(0.0, 0.0, 0.0)

    def run(self, seconds):
        if self.admission is not None:
            self._after(0.25, self._read_metrics)
        self._send()
        while self._events[0][0] < seconds:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self

    def rate(self, since):
        """Tokens per second from then on."""
        first, last = next(step for step in self.steps if step.at >= since), self.steps[-1]
        return (last.tokens - first.tokens) / (last.at - first.at)

    def mean_running(self, since):
        """Requests that run, from then on. Between two runs it varies less than the tokens."""
        part = [step.running for step in self.steps if step.at >= since]
        return sum(part) / len(part)

    def _after(self, seconds, event):
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, event))

    def _delay(self):
        return self._chance.expovariate(50)

    def _send(self):
        limit = self.admission.limit if self.admission else self._fixed
        while self.in_flight < min(limit, self._requests or limit):
            self.in_flight += 1
            request = Request(*self.lengths(self._chance, self._now))
            self._after(self._delay(), lambda request=request: self._arrive(request))  # type: ignore[misc]

    def _arrive(self, request):
        self.engine.arrived.append(request)
        self._step()

    def _step(self):
        if self._busy or self.engine.idle:
            return
        self._busy = True
        seconds, finished = self.engine.step()
        self._after(seconds, lambda: self._end_step(finished))

    def _end_step(self, finished):
        self._busy = False
        self._seen = self.engine.metrics()
        target = self.admission.target if self.admission else 0
        running, waiting = len(self.engine.running) + len(finished), len(self.engine.waiting)
        self.steps.append(Step(self._now, running, waiting, self.engine.tokens, target))
        for _ in finished:
            self._after(self._delay(), self._answer)
        self._step()

    def _answer(self):
        self.in_flight -= 1
        self._send()

    def _read_metrics(self):
        seen = self._seen
        self._after(self._delay(), lambda: self._update(seen))

    def _update(self, metrics):
        assert self.admission is not None
        self.admission.update(metrics, self.in_flight)
        self._after(0.25, self._read_metrics)
        self._send()
