"""An engine in simulated time, which schedules as vLLM V1 does, and a client that sends requests to
it.

Each step decodes one token of every running request, and processes prompts with what is left of the
step's token budget. Requests that arrive during a step wait for the next one. The KV cache is made
of blocks of 16 tokens. A block keeps its text after its request has ended, until the block is
needed: a later request whose text begins alike does not process it again. If no block is left, the
youngest request loses its blocks, and waits at the front of the queue. The metrics are those of the
last step.
"""

import math
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from datatrove_ckpt.inference.servers.host import Admission, Metrics
from tests.virtual_time import VirtualTimeLoop

BLOCK = 16  # tokens


@dataclass(eq=False)
class Request:
    """What one request asks for, and how far it is.

    Attributes:
        prompt, answer: tokens.
        texts: hashes of the leading text up to the end of each block, of the prompt and the answer;
            empty for a text that no other request has.
        cached: tokens of the prompt that were found in the cache.
        blocks: the hash of each block that others can find, None for the others.
    """

    prompt: int
    answer: int
    texts: Sequence[int] = ()
    answered: int = 0
    cached: int = 0
    blocks: list[int | None] = field(default_factory=list)
    _computed: int = 0
    _since: int | None = None  # the round in which it began to decode
    is_aborted: bool = False

    @property
    def length(self):
        return self.prompt + self.answered


class BlockCache:
    """The KV cache, block by block: in use, kept for its text, or blank."""

    def __init__(self, blocks):
        self.blocks = blocks
        self._blank = blocks
        self._used = {}  # how many requests use a block, by the hash of its text
        self._kept = OrderedDict()  # the block that was used last is at the end

    @property
    def free(self):
        return self._blank + len(self._kept)

    @property
    def usage(self):
        return 1 - self.free / self.blocks

    def has(self, text):
        return text in self._used or text in self._kept

    def needs_room(self, text):
        """Whether a request that takes this block leaves one free block less."""
        return text in self._kept

    def share(self, text):
        self._kept.pop(text, None)
        self._used[text] = self._used.get(text, 0) + 1

    def take(self):
        """Takes a blank block, or the one that was used longest ago."""
        if self._blank:
            self._blank -= 1
        else:
            self._kept.popitem(last=False)

    def name(self, text):
        """Makes a full block of a request one that others can find. Returns its hash, or None if
        there is one already.
        """
        if self.has(text):
            return None
        self._used[text] = 1
        return text

    def drop(self, blocks):
        """The block at the end of a text is the first that others take."""
        for text in reversed(blocks):
            if text is None:
                self._blank += 1
            elif self._used[text] == 1:
                del self._used[text]
                self._kept[text] = None
            else:
                self._used[text] -= 1


class Engine:
    """One engine.

    Args:
        places: requests that can run (``max-num-seqs``).
        budget: tokens per step (``max-num-batched-tokens``).
        blocks: of the KV cache.
        base, per_decode, per_prompt_token, per_cached_token: seconds that a step takes, for each
            request that decodes, each token of a prompt, and each token of the cache that is read.
    """

    def __init__(
        self,
        places,
        budget=2048,
        blocks=1 << 40,
        base=0.02,
        per_decode=0.001,
        per_prompt_token=0.0002,
        per_cached_token=0.0,
    ):
        self.places = places
        self.budget = budget
        self.base = base
        self.per_decode = per_decode
        self.per_prompt_token = per_prompt_token
        self.per_cached_token = per_cached_token
        self.cache = BlockCache(blocks)
        self.waiting = deque()
        self.running = {}  # in the order of their start; the values mean nothing
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self._arrived = []
        self._prefilling = {}  # how many tokens of each are processed in this step
        # Requests that decode. All advance by one token per step, so nothing is counted for each:
        # they are kept by the step in which they need a block, and by the step in which they end.
        self._round = 0
        self._decoding = 0
        self._read = 0  # tokens of the cache that these read in a step
        self._by_phase = [{} for _ in range(BLOCK)]
        self._ends = defaultdict(dict)

    @property
    def is_idle(self):
        return not (self._arrived or self.waiting or self.running)

    def submit(self, request):
        self._arrived.append(request)

    def abort(self, request):
        request.is_aborted = True
        if request in self.running:
            self._stop(request)

    def metrics(self):
        tokens = self.prompt_tokens + self.answer_tokens
        return Metrics(len(self.running), len(self.waiting), tokens)

    def step(self):
        """Returns the seconds it takes, and the requests that it finishes."""
        self.waiting.extend(self._arrived)
        self._arrived = []
        prompt_tokens = self._schedule()
        seconds = (
            self.base
            + self._decoding * self.per_decode
            + prompt_tokens * self.per_prompt_token
            + self._read * self.per_cached_token
        )
        self.answer_tokens += self._decoding
        self._read += self._decoding
        finished = list(self._ends.pop(self._round, ()))
        self._round += 1
        for request in finished:
            request.answered = request.answer
            self._stop(request)
        for request, tokens in list(self._prefilling.items()):
            request._computed += tokens
            if request._computed < request.length:
                continue
            del self._prefilling[request]
            if not request.answered:
                self.prompt_tokens += request.prompt
            request.answered += 1
            self.answer_tokens += 1
            if request.answered >= request.answer:
                finished.append(request)
                self._stop(request)
            else:
                self._decode(request)
        return seconds, finished

    def _schedule(self):
        """Returns the tokens of prompts that this step processes."""
        preemptions = self.preemptions
        for request in list(self._by_phase[self._round % BLOCK]):
            if request in self.running:
                self._add_blocks(request, self._computed(request) + 1)
        left = self.budget - self._decoding
        tokens = 0
        for request in list(self._prefilling):
            part = min(request.length - request._computed, left - tokens)
            if request in self.running and self._add_blocks(request, request._computed + part):
                self._prefilling[request] = part
                tokens += part
        while (
            self.preemptions == preemptions
            and self.waiting
            and len(self.running) < self.places
            and tokens < left
        ):
            request = self.waiting[0]
            if not request.is_aborted:
                part = self._start(request, left - tokens)
                if not part:
                    break
                tokens += part
            self.waiting.popleft()
        return tokens

    def _start(self, request, left):
        """Returns how many tokens are processed; 0 if there is no room."""
        known = 0
        texts = request.texts
        for text in texts[: (request.length - 1) // BLOCK]:
            if not self.cache.has(text):
                break
            known += 1
        part = min(request.length - known * BLOCK, left)
        kept = sum(map(self.cache.needs_room, texts[:known]))
        if _blocks(known * BLOCK + part) - known + kept > self.cache.free:
            return 0
        for text in texts[:known]:
            self.cache.share(text)
        request.blocks = list(texts[:known])
        request._computed = known * BLOCK
        if not request.answered:
            request.cached = known * BLOCK
            self.cached_tokens += known * BLOCK
        self.running[request] = None
        self._prefilling[request] = part
        self._add_blocks(request, request._computed + part)
        return part

    def _add_blocks(self, request, length):
        """Returns False if the request has lost its blocks instead."""
        while len(request.blocks) < _blocks(length):
            while not self.cache.free:
                self._preempt()
                if request not in self.running:
                    return False
            self.cache.take()
            request.blocks.append(None)
        self._name_blocks(request, length)
        return True

    def _name_blocks(self, request, length):
        full = min(length // BLOCK, len(request.texts))
        number = full - 1
        while number >= 0 and request.blocks[number] is None:
            number -= 1
        for index in range(number + 1, full):
            request.blocks[index] = self.cache.name(request.texts[index])

    def _preempt(self):
        youngest = next(reversed(self.running))
        self._stop(youngest)
        youngest._computed = 0
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def _computed(self, request):
        if request._since is None:
            return request._computed
        return request._computed + self._round - request._since

    def _decode(self, request):
        request._since = self._round
        self._decoding += 1
        self._read += request._computed
        self._by_phase[(self._round - request._computed) % BLOCK][request] = None
        self._ends[self._end_of(request)][request] = None

    def _end_of(self, request):
        return request._since + request.answer - request.answered - 1

    def _stop(self, request):
        """Takes the request's blocks. What it has decoded so far counts."""
        del self.running[request]
        self._prefilling.pop(request, None)
        if request._since is not None:
            decoded = self._round - request._since
            self._decoding -= 1
            self._read -= request._computed + decoded
            del self._by_phase[(request._since - request._computed) % BLOCK][request]
            if request.answered < request.answer:
                self._ends[self._end_of(request)].pop(request, None)
                request.answered += decoded
            request._computed += decoded
            request._since = None
            self._name_blocks(request, request._computed)
        self.cache.drop(request.blocks)
        request.blocks = []


def _blocks(tokens):
    return -(-tokens // BLOCK)


class Simulation:
    """A run of one engine.

    Args:
        limit: requests in flight, or what adapts it.
        lengths: of the requests.
        requests: that want to be in flight at once.

    Attributes:
        steps: at the end of each: the time in seconds, the requests that run, those that wait, and
            the target of ``auto``.
    """

    def __init__(self, engine, lengths, limit, *, seed=0, requests=math.inf):
        self.engine = engine
        self.lengths = lengths
        self.admission = (
            limit if isinstance(limit, Admission) else SimpleNamespace(limit=limit, target=0)
        )
        self.steps = []
        self.in_flight = 0
        self._answers = 0
        self._requests = requests
        self._chance = random.Random(seed)
        self._loop = VirtualTimeLoop()
        self._busy = False
        self._seen = Metrics(0.0, 0.0, 0.0)

    def run(self, seconds):
        if isinstance(self.admission, Admission):
            self._loop.call_later(0.25, self._read_metrics)
        self._send()
        self._loop.call_later(seconds, self._loop.stop)
        self._loop.run_forever()
        self._loop.close()
        return self

    def mean_running(self, since):
        """Requests that run, from then on. Between two runs it varies less than the tokens."""
        part = [running for at, running, _, _ in self.steps if at >= since]
        return sum(part) / len(part)

    def _soon(self, event, *arguments):
        self._loop.call_later(self._chance.expovariate(50), event, *arguments)

    def _send(self):
        while self.in_flight < min(self.admission.limit, self._requests):
            self.in_flight += 1
            self._soon(self._arrive, Request(*self.lengths(self._chance, self._loop.time())))

    def _arrive(self, request):
        self.engine.submit(request)
        self._step()

    def _step(self):
        if not self._busy and not self.engine.is_idle:
            self._busy = True
            seconds, finished = self.engine.step()
            self._loop.call_later(seconds, self._end_step, finished)

    def _end_step(self, finished):
        self._busy = False
        self._seen = self.engine.metrics()
        running, waiting = len(self.engine.running) + len(finished), len(self.engine.waiting)
        self.steps.append((self._loop.time(), running, waiting, self.admission.target))
        for _ in finished:
            self._soon(self._answer)
        self._step()

    def _answer(self):
        self.in_flight -= 1
        self._answers += 1
        self._send()

    def _read_metrics(self):
        self._soon(self._update, self._seen)

    def _update(self, metrics):
        self.admission.update(metrics, self.in_flight, self._answers)
        self._loop.call_later(0.25, self._read_metrics)
        self._send()
