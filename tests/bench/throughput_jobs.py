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
        servers: how many; of several models, by their names.
        rows: makes the documents, each a text and the lengths of its answers.
        rollout: asks for one document.
        engine: what differs from ``H100``.
        goal: the share of the ideal that is expected of the default settings.
        tasks: that run at once, over the same servers.
        death: when the first server dies, and for how many seconds it is away. The ideal has all
            servers all the time.
    """

    servers: int | dict[str, int]
    rows: Callable[[random.Random], list[dict]]
    rollout: Callable
    engine: dict = field(default_factory=dict)
    goal: float = 0.0
    tasks: int = 1
    death: tuple[float, float] | None = None

    @property
    def settings(self):
        return {**H100, **self.engine}

    @property
    def models(self):
        """How many servers each model has. A single model's name is empty."""
        return self.servers if isinstance(self.servers, dict) else {"": self.servers}


# rollouts: ``ask`` sends a payload, to a model if there are several, and returns the answer's text -


async def one_call(row, ask):
    return await ask(_payload([_user(row["text"])], row["answers"][0]))


def in_sequence(tool_seconds=0.0):
    """Each call has the answers before it in its prompt, and may wait for a tool before it."""

    async def rollout(row, ask):
        turns = [_user(row["text"])]
        for number, tokens in enumerate(row["answers"]):
            answer = await ask(_payload(turns, tokens))
            if tool_seconds:
                await asyncio.sleep(tool_seconds)
            turns = [*turns, {"role": "assistant", "content": answer}, _user(f"Go on, {number}.")]

    return rollout


async def in_parallel(row, ask):
    questions = (
        ask(_payload([_user(f"{row['text']} Question {number}?")], tokens))
        for number, tokens in enumerate(row["answers"])
    )
    await asyncio.gather(*questions)


async def written_and_judged(row, ask):
    answer = await ask(_payload([_user(row["text"])], row["answers"][0]), "writer")
    question = f"{JUDGE_PROMPT}{row['text']}\n{answer}"
    await ask(_payload([_user(question)], row["answers"][1]), "judge")


def _user(text):
    return {"role": "user", "content": text}


def _payload(turns, tokens):
    return {"messages": turns, "max_tokens": max(1, int(tokens))}


# rows ---------------------------------------------------------------------------------------------


def text_of(chance, tokens):
    """Text that no other has."""
    word = f"{chance.getrandbits(64):016x} "
    return (word * (int(tokens) * TOKEN // len(word) + 1))[: int(tokens) * TOKEN]


def _lognormal(chance, mean, sigma=0.6):
    return max(8, mean * chance.lognormvariate(-sigma * sigma / 2, sigma))


def rows_of(documents, text, answers):
    """Makes rows of what both return by chance."""

    def rows(chance):
        return [{"text": text(chance), "answers": answers(chance)} for _ in range(documents)]

    return rows


def rewriting(documents, prompt=500):
    start = text_of(random.Random("system"), 50)
    return rows_of(
        documents,
        lambda chance: start + text_of(chance, _lognormal(chance, prompt)),
        lambda chance: [_lognormal(chance, 300)],
    )


def calls(documents, number, prompt=1500, answer=250):
    return rows_of(
        documents,
        lambda chance: text_of(chance, _lognormal(chance, prompt, 0.3)),
        lambda chance: [_lognormal(chance, answer, 0.4) for _ in range(number)],
    )


JUDGE_PROMPT = text_of(random.Random("judge"), 300)


def judged(documents):
    return rows_of(
        documents,
        lambda chance: text_of(chance, _lognormal(chance, 600)),
        lambda chance: [_lognormal(chance, 300), 20],
    )


def shared(groups, each=8, prompt=3000, answer=60, shuffled=False, system=0):
    """Rows of which several begin with the same document."""

    def rows(chance):
        start = text_of(random.Random("system"), system)
        made = []
        for _ in range(groups):
            document = start + text_of(chance, prompt)
            made += [
                {
                    "text": f"{document} {text_of(chance, 20)}",
                    "answers": [_lognormal(chance, answer, 0.3)],
                }
                for _ in range(each)
            ]
        if shuffled:
            chance.shuffle(made)
        return made

    return rows


def system_prompts(documents, prompts):
    """Rows that begin with one of some texts; the first texts are the most frequent."""
    starts = [text_of(random.Random(f"system {number}"), 2000) for number in range(prompts)]
    weights = [1 / (number + 1) for number in range(prompts)]
    return rows_of(
        documents,
        lambda chance: chance.choices(starts, weights)[0] + text_of(chance, 100),
        lambda chance: [_lognormal(chance, 60, 0.3)],
    )


def reasoning(documents):
    return rows_of(
        documents,
        lambda chance: text_of(chance, 200),
        lambda chance: [min(16_000, _lognormal(chance, 2500, 1.0))],
    )


def labels(documents):
    return rows_of(
        documents,
        lambda chance: text_of(chance, _lognormal(chance, 600, 0.9)),
        lambda chance: [chance.choice([2, 2, 2, 4, 30])],
    )


SMALL_MODEL = {
    "base": 3e-3,
    "per_prompt_token": 4e-6,
    "per_cached_token": 1.2e-8,
    "blocks": 100_000,
}
FP8 = {"base": 4.5e-3, "per_prompt_token": 1.7e-5, "per_cached_token": 2.8e-8, "blocks": 53_000}

# Of documents that are shared and shuffled, 150 a server are a little more than its cache holds.
JOBS = {
    "rewriting, 1 server": Job(1, rewriting(2_500), one_call),
    "rewriting, 4 servers": Job(4, rewriting(8_000), one_call),
    "rewriting, 8 servers": Job(8, rewriting(20_000), one_call, goal=1.0),
    "3 calls in sequence, 1 server": Job(1, calls(2_000, 3), in_sequence(), goal=1.65),
    "3 calls in sequence, 8 servers": Job(8, calls(8_000, 3), in_sequence(), goal=1.6),
    "10 calls in sequence, 1 server": Job(1, calls(400, 10), in_sequence()),
    "10 calls in sequence, 8 servers": Job(8, calls(1_600, 10), in_sequence()),
    "8 rows share a document, 2 servers": Job(2, shared(375), one_call),
    "8 rows share a document, 4 servers": Job(4, shared(750), one_call),
    "8 rows share a document, 8 servers": Job(8, shared(1_500), one_call, goal=3.8),
    "the same, shuffled, 2 servers": Job(2, shared(300, shuffled=True), one_call),
    "the same, shuffled, 4 servers": Job(4, shared(600, shuffled=True), one_call),
    "the same, shuffled, 8 servers": Job(8, shared(1_200, shuffled=True), one_call, goal=2.4),
    "the same, shuffled, 1.4 x the caches, 8 servers": Job(
        8, shared(1_500, shuffled=True), one_call
    ),
    "a system prompt and shared documents, 8 servers": Job(8, shared(1_000, system=500), one_call),
    "8 parallel questions of a rollout, 8 servers": Job(
        8, calls(1_500, 8, prompt=3000, answer=60), in_parallel, goal=3.8
    ),
    "one prompt for all rows, 8 servers": Job(8, system_prompts(20_000, 1), one_call, goal=0.97),
    "64 system prompts, 8 servers": Job(8, system_prompts(10_000, 64), one_call),
    "reasoning to 16k tokens, 1 server": Job(1, reasoning(700), one_call),
    "labels, 8 servers": Job(8, labels(12_000), one_call),
    "prompts of 20,000 tokens, 8 servers": Job(8, rewriting(1_000, prompt=20_000), one_call),
    "max-num-seqs 128, rewriting, 8 servers": Job(8, rewriting(8_000), one_call, {"places": 128}),
    "max-num-batched-tokens 2048, 3 calls, 8 servers": Job(
        8, calls(4_000, 3), in_sequence(), {"budget": 2048}
    ),
    "a small model, rewriting, 8 servers": Job(8, rewriting(12_000), one_call, SMALL_MODEL),
    "fp8, rewriting, 8 servers": Job(8, rewriting(12_000), one_call, FP8),
    "one of 8 servers dies, and is back after 30 s, 3 calls": Job(
        8, calls(6_000, 3), in_sequence(), death=(30.0, 30.0)
    ),
    "a writer on 5 servers, a judge on 3": Job(
        {"writer": 5, "judge": 3}, judged(10_000), written_and_judged
    ),
    "2 tasks over 8 servers, 3 calls": Job(8, calls(6_000, 3), in_sequence(), tasks=2),
    "tools (2 s) between 3 calls, 8 servers": Job(8, calls(6_000, 3), in_sequence(2.0)),
}


@dataclass(frozen=True)
class Kills:
    """One row of the table of kills: a job of long answers.

    Attributes:
        killed: "client" or "server"; "": nothing is killed.
        every: seconds from a start to the next kill.
        answers: how many.
        tokens: of an answer on average.
    """

    killed: str = ""
    every: float | None = None
    answers: int = 3600
    tokens: int = 8000

    @property
    def restart(self):
        """Seconds until what was killed is back."""
        return 30.0 if self.killed == "client" else 120.0


KILLS = {
    "nothing killed": Kills(),
    "client killed, 3,600 s": Kills("client", 3600.0),
    "client killed, 900 s": Kills("client", 900.0, answers=1200),
    "server killed, 3,600 s": Kills("server", 3600.0),
    "server killed, 900 s": Kills("server", 900.0, answers=1200),
}
