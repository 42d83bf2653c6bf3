"""``max_concurrent_generations: auto`` against fixed numbers, on a real engine.

    python -m tests.bench.auto_concurrency --engine vllm --model MODEL [--python PYTHON] [--flags max-num-seqs=64 ...]

One server is launched as a run launches it, and each setting in turn has it for a while, several times. So all settings
meet the same load of the machine, and what counts are ratios. Each phase uses the real client and the real controller,
and always has more requests than may be in flight. Answers differ in length, as those of models do. The table shows, as
medians over the rounds:

    tokens/s      answered in the last two thirds of a phase, by the engine's own counter
    of the best   that, as a share of the best fixed number
    running       the mean number of requests that ran meanwhile; other work on the machine changes it less
    seconds       until ten seconds begin in which the engine reaches 95 % of the best fixed number
    queue         the longest queue in the engine's metrics, sampled ten times per second, and the longest relative to
                  the target that ``auto`` had then
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import aiohttp

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.servers.admission import Admission, adapt_admission
from datatrove_ckpt.inference.servers.gpu_slots import leased_gpus
from datatrove_ckpt.inference.servers.metrics import Metrics, read_metrics
from datatrove_ckpt.inference.servers.server import InferenceServer
from tests.bench import tables

REACHED = 0.95
WINDOW = 10.0  # seconds
SAMPLE = 0.1  # seconds
WORDS = ("the", "river", "stone", "bird", "light", "market", "seven", "under", "glass", "window", "paper", "north")
TASKS = 1024  # more than may be in flight
Setting: TypeAlias = int | str


@dataclass
class Phase:
    """What one setting did with the server.

    Attributes:
        samples: seconds since the start, the engine's metrics, the target of ``auto``.
    """

    samples: list[tuple[float, Metrics, int]] = field(default_factory=list)

    def rate(self, since: float, until: float) -> float:
        """Tokens per second in a part of the phase."""
        part = [(at, metrics.tokens) for at, metrics, _ in self.samples if since <= at <= until]
        return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]) if len(part) > 1 else 0.0

    @property
    def steady(self) -> float:
        return self.rate(self.samples[-1][0] / 3, self.samples[-1][0])

    @property
    def running(self) -> float:
        """Mean number of running requests, once they are steady."""
        end = self.samples[-1][0]
        part = [metrics.running for at, metrics, _ in self.samples if at >= end / 3]
        return sum(part) / len(part)

    def reaches(self, rate: float) -> float:
        """Seconds until ten seconds begin in which the rate is reached; infinite if there are none."""
        starts = (at for at, _, _ in self.samples if at + WINDOW <= self.samples[-1][0])
        return next((at for at in starts if self.rate(at, at + WINDOW) >= rate), float("inf"))

    @property
    def longest_queue(self) -> float:
        return max(metrics.waiting for _, metrics, _ in self.samples)

    @property
    def longest_relative_queue(self) -> float:
        return max(metrics.waiting / target for _, metrics, target in self.samples)

    @property
    def preemptions(self) -> float:
        return self.samples[-1][1].preemptions - self.samples[0][1].preemptions


class Bench:
    """A server, and what is asked of it."""

    def __init__(self, server: InferenceServer, settings: dict[str, Any], words: int, tokens: int) -> None:
        self.server = server
        self.settings = settings
        self.words = words
        self.tokens = tokens
        self.chance = random.Random(0)

    def body(self) -> bytes:
        chance = self.chance
        prompt = " ".join(chance.choices(WORDS, k=chance.randint(self.words // 4, self.words)))
        tokens = chance.randint(self.tokens // 4, self.tokens)
        model = self.settings["model_name_or_path"]
        return json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}).encode()

    async def phase(self, setting: Setting, seconds: float) -> Phase:
        """The server under one setting, from no request to steady state."""
        config = InferenceConfig(**self.settings, max_concurrent_generations=setting)  # type: ignore[arg-type]
        used = Admission()
        async with CompletionClient(config, [], None) as client, aiohttp.ClientSession() as session:
            target = client.add()
            client.mark_up(target, self.server.url, self.server.api_key)
            read = partial(self._metrics, session)
            tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._ask(client)) for _ in range(TASKS)]
            if setting == "auto":
                tasks.append(asyncio.create_task(adapt_admission("The server", target, client.router, read, used)))
            phase = await self._watch(session, seconds, used)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._until_idle()
        return phase

    async def _ask(self, client: CompletionClient) -> None:
        while True:
            await client.complete(self.body())

    async def _watch(self, session: aiohttp.ClientSession, seconds: float, used: Admission) -> Phase:
        phase, start = Phase(), time.monotonic()
        while (at := time.monotonic() - start) < seconds:
            if (metrics := await self._metrics(session, 5.0)) is not None:
                phase.samples.append((at, metrics, used.target))
            await asyncio.sleep(SAMPLE)
        return phase

    async def _metrics(self, session: aiohttp.ClientSession, seconds: float) -> Metrics | None:
        server, engine = self.server, self.settings["server_type"]
        return await read_metrics(server.url, server.headers, engine, seconds)

    async def _until_idle(self) -> None:
        async with aiohttp.ClientSession() as session:
            while (metrics := await self._metrics(session, 5.0)) is None or metrics.running + metrics.waiting:
                await asyncio.sleep(SAMPLE)


@asynccontextmanager
async def launched(settings: dict[str, Any]) -> AsyncIterator[InferenceServer]:
    config = InferenceConfig(**settings)
    async with AsyncExitStack() as stack:
        leases = await stack.enter_async_context(leased_gpus(config))
        server = InferenceServer(config, 0, 0, leases[0])
        yield await stack.enter_async_context(server)


async def measure(
    settings: dict[str, Any], fixed: list[int], seconds: float, rounds: int, words: int = 60, tokens: int = 96
) -> dict[Setting, list[Phase]]:
    """The phases of each setting. They take turns."""
    found: dict[Setting, list[Phase]] = {"auto": [], **{number: [] for number in fixed}}
    async with launched(settings) as server:
        bench = Bench(server, settings, words, tokens)
        await bench.phase(fixed[0], min(seconds, WINDOW))  # warms the engine up
        for number in range(rounds):
            order = list(found) if number % 2 == 0 else list(reversed(found))
            for setting in order:
                found[setting].append(await bench.phase(setting, seconds))
                print(
                    f"# {setting}: {found[setting][-1].steady:.0f} tokens/s, load {os.getloadavg()[0]:.1f}", flush=True
                )
    return found


def best_fixed(found: dict[Setting, list[Phase]]) -> float:
    """The best median of a fixed number, in tokens per second."""
    return max(median(phase.steady for phase in found[setting]) for setting in found if setting != "auto")


def report(found: dict[Setting, list[Phase]]) -> str:
    best = best_fixed(found)
    names = ("tokens/s", "of the best fixed", "running", "seconds to 95 %", "queue", "in targets", "preempted")
    rows = []
    for setting, phases in found.items():
        steady = median(phase.steady for phase in phases)
        reached = median(phase.reaches(REACHED * best) for phase in phases)
        relative = f"{max(phase.longest_relative_queue for phase in phases):.1f}" if setting == "auto" else ""
        cells = [
            f"`{setting}`",
            f"{steady:,.0f}",
            f"{steady / best:.2f}",
            f"{median(phase.running for phase in phases):.1f}",
            "never" if reached == float("inf") else f"{reached:.0f}",
            f"{max(phase.longest_queue for phase in phases):.0f}",
            relative,
            f"{median(phase.preemptions for phase in phases):.0f}",
        ]
        rows.append(cells)
    return tables.markdown(("setting", *names), rows)


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--engine", choices=["vllm", "sglang", "llamacpp"], default="vllm")
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", help="interpreter of the engine's environment")
    parser.add_argument("--context", type=int, default=1024, help="model_max_context, in tokens")
    parser.add_argument(
        "--flags", nargs="*", default=[], metavar="NAME=VALUE", help="of the server; NAME alone is true"
    )
    parser.add_argument("--fixed", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--words", type=int, default=60, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    options = parser.parse_args()
    flags: dict[str, Any] = {}
    for flag in options.flags:
        name, given, value = flag.partition("=")
        flags[name] = value if given else True
    settings = {
        "server_type": options.engine,
        "model_name_or_path": options.model,
        "model_max_context": options.context,
        "use_chat": False,
        "server_python": options.python,
        "model_kwargs": flags,
    }
    with suppress(KeyboardInterrupt):
        arguments = (settings, options.fixed, options.seconds, options.rounds, options.words, options.tokens)
        print(report(asyncio.run(measure(*arguments))))


if __name__ == "__main__":
    main()
