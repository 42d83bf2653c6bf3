"""One job on one system, in a process of its own: arguments as JSON, the result as JSON on stdout.

ideal      all documents are at the engines at once, each call at the one with the fewest
ours       datatrove_ckpt.InferenceRunner, which believes that it has launched the engines
datatrove  datatrove's own InferenceRunner, which has one server: a task for each server

Jobs with kills have the systems ``ours`` and ``false``, which is ``half_answers: false``.
"""

import asyncio
import json
import random
import sys
import threading
import time
import types
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from unittest import mock

from tests.bench.throughput_jobs import JOBS, KILLS
from tests.simulated_servers import SimulatedServer
from tests.virtual_time import VirtualTimeLoop

_REAL_MONOTONIC = time.monotonic


def virtual_loop():
    loop = VirtualTimeLoop()
    own_thread = threading.get_ident()

    def monotonic():
        # Other threads wait in real time: their clock must move while they do.
        return loop.time() if threading.get_ident() == own_thread else _REAL_MONOTONIC()

    time.monotonic = monotonic  # type: ignore[assignment]
    return loop


def servers_of(job):
    """By model."""
    return {
        model: [SimulatedServer(**job.settings) for _ in range(count)]
        for model, count in job.models.items()
    }


def rows_of(job, seed):
    return job.rows(random.Random(seed))


def schedule_death(job, server):
    asyncio.get_running_loop().call_later(job.death[0], server.kill)


async def ideal(job, seed):
    loop = asyncio.get_running_loop()
    servers = servers_of(job)
    in_flight = {model: dict.fromkeys(own, 0) for model, own in servers.items()}
    for server in chain(*servers.values()):
        server.use(loop)

    async def ask(payload, model=""):
        loads = in_flight[model]
        server = min(loads, key=loads.__getitem__)
        loads[server] += 1
        body = loop.create_future()
        server.ask(payload, body.set_result)
        answer = json.loads(await body)
        loads[server] -= 1
        return answer["choices"][0]["message"]["content"]

    async with asyncio.TaskGroup() as group:
        for row in rows_of(job, seed):
            group.create_task(job.rollout(row, ask))
    return servers


def documents(job, seed, task=0, tasks=1):
    """Every task has its part of the rows, in their order."""
    from datatrove.data import Document

    rows = rows_of(job, seed)
    size = -(-len(rows) // tasks)
    for number, row in enumerate(rows[task * size : (task + 1) * size]):
        yield Document(row["text"], f"{number}", metadata={"answers": row["answers"]})


def rollout_of(job):
    async def rollout(document, generate):
        async def ask(payload, model=""):
            generate_there = getattr(generate, model) if model else generate
            return (await generate_there(payload)).text

        await job.rollout({"text": document.text, **document.metadata}, ask)
        return {"done": True}

    return rollout


def writer():
    from datatrove.pipeline.writers import JsonlWriter

    return JsonlWriter(
        str(Path.cwd() / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None
    )


def ours(job, seed):
    from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor

    servers = servers_of(job)
    settings = {"hang_timeout": 1e6, "reuse_servers": job.tasks > 1}
    models = {
        model: InferenceConfig("vllm", "m", replicas=count, **settings)
        for model, count in job.models.items()
    }
    runner = InferenceRunner(
        rollout_of(job),
        models.get("", models),
        writer(),
        checkpoints_local_dir=str(Path.cwd() / "checkpoints"),
        records_per_chunk=1000,
    )

    def read(data, rank, world_size):
        return documents(job, seed, rank, world_size)

    with _simulated(job, servers):
        if job.tasks == 1:
            runner.run(documents(job, seed), 0, 1)
        else:
            LocalPipelineExecutor(
                [read, runner], job.tasks, workers=1, logging_dir=str(Path.cwd() / "logs")
            ).run()
    return servers


@contextmanager
def _simulated(job, servers):
    """Lets the runner launch simulated servers, and its loops run in virtual time."""
    from datatrove_ckpt.generation import rank
    from datatrove_ckpt.inference.servers import host
    from datatrove_ckpt.run_folder import environment_checks

    loops = types.SimpleNamespace(new_event_loop=virtual_loop)
    with (
        mock.patch.dict(sys.modules, uvloop=loops),
        mock.patch.object(host, "InferenceServer", _launched(job, servers)),
        mock.patch.object(rank, "check_servers"),
        mock.patch.object(environment_checks, "check_servers"),
    ):
        yield


def _launched(job, servers):
    from datatrove_ckpt.inference.servers import host

    class Launched(host.InferenceServer):  # type: ignore[misc]
        """Believes that a simulated engine is its process."""

        @property
        def engine(self):
            return servers[self.config.name][self.replica]

        async def start(self):
            if self.engine.died.is_set():
                await asyncio.sleep(job.death[1])
            elif job.death is not None and self.replica == 0:
                schedule_death(job, self.engine)
            self.url = await self.engine.start()

        async def take_over(self):
            return False

        async def watch(self):
            await self.engine.died.wait()
            return -9

        async def stop(self):
            self.engine.stop()
            self.url = ""

        kill = stop

    return Launched


def datatrove(job, seed):
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

    servers = servers_of(job)
    for task, server in enumerate(servers[""]):
        config = InferenceConfig(
            server_type="endpoint",
            model_name_or_path="m",
            endpoint_url="http://127.0.0.1",
            max_concurrent_generations=500,
        )
        runner = InferenceRunner(rollout_of(job), config, writer(), records_per_chunk=1000)
        _start_before(runner, server, config)
        runner.run(documents(job, seed, task, len(servers[""])), task, len(servers[""]))
    return servers


def _start_before(runner, server, config):
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            return virtual_loop()

    asyncio.set_event_loop_policy(Policy())
    run_async = runner.run_async

    async def run(*arguments):
        config.endpoint_url = await server.start()
        return await run_async(*arguments)

    runner.run_async = run


def run(job, system, seed):
    """Returns the result of one run. It leaves ``time.monotonic`` with the run's virtual time."""
    if system == "ideal":
        with asyncio.Runner(loop_factory=virtual_loop) as runner:
            by_model = runner.run(ideal(job, seed))
    else:
        by_model = {"ours": ours, "datatrove": datatrove}[system](job, seed)
    servers = [server for server in chain(*by_model.values()) if server.first is not None]
    prompts = sum(server.prompt_tokens for server in servers)
    return {
        "seconds": max(server.last for server in servers) - min(server.first for server in servers),
        "requests": sum(server.answered for server in servers),
        "cached": sum(server.cached_tokens for server in servers) / prompts,
        "preemptions": sum(server.preemptions + server.engine.preemptions for server in servers),
    }


def killed(job, system, seed):
    """Returns the result of one run with kills. It leaves ``time.monotonic`` as ``run`` does."""
    from tests.bench.throughput_kills import run_killed  # another commit's package may lack parts

    with asyncio.Runner(loop_factory=virtual_loop) as runner:
        return runner.run(run_killed(job, seed, continues=system == "ours"))


def main():
    name, system, seed = json.loads(sys.argv[1])
    began = time.perf_counter()
    measure = killed if name in KILLS else run
    result = measure((JOBS | KILLS)[name], system, seed)
    print(json.dumps({**result, "took": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
