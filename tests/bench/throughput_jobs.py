"""What jobs ask of engines: documents and rollouts, in tokens (see ``tests/simulated_servers.py``)."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

TOKEN = 4  # bytes
# Llama-3.1-8B in BF16 on an H100 SXM, by its data sheet (3.35 TB/s, 989 TFLOPS): 70 to 80 % of the
# bandwidth, half of the FLOPS.
H100 = {
    "places": 1024,
    "budget": 8192,
    "blocks": 400_000 // 16,
    "base": 7.5e-3,
    "per_decode": 1e-5,
    "per_prompt_token": 3.25e-5,
    "per_cached_token": 56e-9,
}


@dataclass(frozen=True)
class Job:
    """One row of the table.

    Attributes:
        servers: how many.
        rows: makes the documents, each a text and the lengths of its answers.
        rollout: asks for one document.
        engine: what differs from ``H100``.
        best: numbers of requests in flight at a server, of which the best is looked for.
    """

    servers: int
    rows: Callable[[random.Random], list[dict]]
    rollout: Callable
    engine: dict = field(default_factory=dict)
    best: tuple[int, ...] = (64, 128, 192, 256, 384)

    @property
    def settings(self):
        return {**H100, **self.engine}


# rollouts: ``ask`` sends a payload and returns the text of the answer -----------------------------


async def one_call(row, ask):
    return await ask(_payload([_user(row["text"])], row["answers"][0]))


async def in_sequence(row, ask):
    """Each call has the answers before it in its prompt."""
    turns = [_user(row["text"])]
    for number, tokens in enumerate(row["answers"]):
        answer = await ask(_payload(turns, tokens))
        turns = [*turns, {"role": "assistant", "content": answer}, _user(f"Go on, {number}.")]


async def with_tools(row, ask):
    """As ``in_sequence``, with a tool that takes two seconds between two calls."""
    turns = [_user(row["text"])]
    for number, tokens in enumerate(row["answers"]):
        answer = await ask(_payload(turns, tokens))
        await asyncio.sleep(2.0)
        turns = [*turns, {"role": "assistant", "content": answer}, _user(f"Go on, {number}.")]


async def in_parallel(row, ask):
    questions = (
        ask(_payload([_user(f"{row['text']} Question {number}?")], tokens))
        for number, tokens in enumerate(row["answers"])
    )
    await asyncio.gather(*questions)


def _user(text):
    return {"role": "user", "content": text}


def _payload(turns, tokens):
    return {"messages": turns, "max_tokens": max(1, int(tokens))}


# rows ---------------------------------------------------------------------------------------------


def _text(chance, tokens):
    """Text that no other has."""
    word = f"{chance.getrandbits(64):016x} "
    return (word * (int(tokens) * TOKEN // len(word) + 1))[: int(tokens) * TOKEN]


def _lognormal(chance, mean, sigma=0.6):
    return max(8, mean * chance.lognormvariate(-sigma * sigma / 2, sigma))


def rewriting(documents, prompt=500, answer=300, system=50):
    def rows(chance):
        start = _text(random.Random("system"), system)
        return [
            {
                "text": start + _text(chance, _lognormal(chance, prompt)),
                "answers": [_lognormal(chance, answer)],
            }
            for _ in range(documents)
        ]

    return rows


def calls(documents, number, prompt=1500, answer=250):
    def rows(chance):
        return [
            {
                "text": _text(chance, _lognormal(chance, prompt, 0.3)),
                "answers": [_lognormal(chance, answer, 0.4) for _ in range(number)],
            }
            for _ in range(documents)
        ]

    return rows


def shared(groups, each=8, prompt=3000, answer=60, shuffled=False, system=0):
    """Rows of which several begin with the same document."""

    def rows(chance):
        start = _text(random.Random("system"), system)
        made = []
        for _ in range(groups):
            document = start + _text(chance, prompt)
            made += [
                {
                    "text": f"{document} {_text(chance, 20)}",
                    "answers": [_lognormal(chance, answer, 0.3)],
                }
                for _ in range(each)
            ]
        if shuffled:
            chance.shuffle(made)
        return made

    return rows


def system_prompts(documents, prompts, tokens=2000, answer=60, own=100):
    """Rows that begin with one of some texts; the first texts are the most frequent."""

    def rows(chance):
        starts = [_text(random.Random(f"system {number}"), tokens) for number in range(prompts)]
        weights = [1 / (number + 1) for number in range(prompts)]
        return [
            {
                "text": chance.choices(starts, weights)[0] + _text(chance, own),
                "answers": [_lognormal(chance, answer, 0.3)],
            }
            for _ in range(documents)
        ]

    return rows


def reasoning(documents):
    def rows(chance):
        return [
            {
                "text": _text(chance, 200),
                "answers": [min(16_000, _lognormal(chance, 2500, 1.0))],
            }
            for _ in range(documents)
        ]

    return rows


def labels(documents):
    def rows(chance):
        return [
            {
                "text": _text(chance, _lognormal(chance, 600, 0.9)),
                "answers": [chance.choice([2, 2, 2, 4, 30])],
            }
            for _ in range(documents)
        ]

    return rows


SMALL_MODEL = {
    "base": 3e-3,
    "per_prompt_token": 4e-6,
    "per_cached_token": 1.2e-8,
    "blocks": 100_000,
}
FP8 = {"base": 4.5e-3, "per_prompt_token": 1.7e-5, "per_cached_token": 2.8e-8, "blocks": 53_000}

JOBS = {
    "rewriting, 1 server": Job(1, rewriting(2_500), one_call),
    "rewriting, 4 servers": Job(4, rewriting(10_000), one_call),
    "rewriting, 8 servers": Job(8, rewriting(20_000), one_call),
    "3 calls in sequence, 1 server": Job(1, calls(1_000, 3), in_sequence),
    "3 calls in sequence, 8 servers": Job(8, calls(8_000, 3), in_sequence),
    "10 calls in sequence, 1 server": Job(1, calls(400, 10), in_sequence),
    "10 calls in sequence, 8 servers": Job(8, calls(3_200, 10), in_sequence),
    "8 rows share a document, 2 servers": Job(2, shared(375), one_call),
    "8 rows share a document, 4 servers": Job(4, shared(750), one_call),
    "8 rows share a document, 8 servers": Job(8, shared(1_500), one_call),
    "8 rows share a document, shuffled, 2 servers": Job(2, shared(375, shuffled=True), one_call),
    "8 rows share a document, shuffled, 4 servers": Job(4, shared(750, shuffled=True), one_call),
    "8 rows share a document, shuffled, 8 servers": Job(8, shared(1_500, shuffled=True), one_call),
    "a system prompt and shared documents, 8 servers": Job(8, shared(1_500, system=500), one_call),
    "8 parallel questions of a rollout, 8 servers": Job(
        8, calls(1_500, 8, prompt=3000, answer=60), in_parallel
    ),
    "one prompt for all rows, 8 servers": Job(8, system_prompts(20_000, 1), one_call),
    "64 system prompts, 8 servers": Job(8, system_prompts(20_000, 64), one_call),
    "reasoning to 16k tokens, 1 server": Job(1, reasoning(700), one_call),
    "labels, 8 servers": Job(8, labels(24_000), one_call),
    "prompts of 20,000 tokens, 8 servers": Job(
        8, rewriting(1_000, prompt=20_000, answer=300), one_call, best=(8, 12, 16, 24, 32)
    ),
    "max-num-seqs 128, rewriting, 8 servers": Job(8, rewriting(16_000), one_call, {"places": 128}),
    "max-num-batched-tokens 2048, 3 calls, 8 servers": Job(
        8, calls(8_000, 3), in_sequence, {"budget": 2048}
    ),
    "a small model, rewriting, 8 servers": Job(8, rewriting(30_000), one_call, SMALL_MODEL),
    "fp8, rewriting, 8 servers": Job(8, rewriting(20_000), one_call, FP8),
    "tools between 3 calls, 8 servers": Job(8, calls(8_000, 3), with_tools),
}
