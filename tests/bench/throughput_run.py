"""One job on one system, in a process of its own: arguments as JSON, the result as JSON on stdout.

ideal      all documents are at the engines at once, each call at the one with the fewest
ours       datatrove_ckpt.InferenceRunner, which believes that it has launched the engines
datatrove  datatrove's own InferenceRunner; one server only
loop       a plain aiohttp loop, each request to the next server in turn
"""

import asyncio
import json
import random
import sys
import time
import types
from itertools import count, cycle

from tests.bench.throughput_jobs import JOBS
from tests.simulated_engine import Engine
from tests.simulated_servers import SimulatedServer
from tests.virtual_time import VirtualTimeLoop


def servers_of(job):
    return [SimulatedServer(Engine(**job.settings)) for _ in range(job.servers)]


def rows_of(job, seed):
    return job.rows(random.Random(seed))


async def ideal(job, seed, at_once):
    servers = servers_of(job)
    in_flight = dict.fromkeys(servers, 0)
    loop = asyncio.get_running_loop()
    for server in servers:
        server._loop = loop

    async def ask(payload):
        server = min(in_flight, key=in_flight.__getitem__)
        in_flight[server] += 1
        body = loop.create_future()
        server.ask(payload, body.set_result)
        answer = json.loads(await body)
        in_flight[server] -= 1
        return answer["choices"][0]["message"]["content"]

    async with asyncio.TaskGroup() as group:
        for row in rows_of(job, seed):
            group.create_task(job.rollout(row, ask))
    return servers


async def plain_loop(job, seed, at_once):
    import aiohttp

    servers = servers_of(job)
    urls = cycle([await server.start() for server in servers])
    rows = iter(rows_of(job, seed))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(payload):
            url = f"{next(urls)}/v1/chat/completions"
            async with session.post(url, json={"model": "m", **payload}) as response:
                return (await response.json())["choices"][0]["message"]["content"]

        async def work():
            for row in rows:
                await job.rollout(row, ask)

        await asyncio.gather(*(work() for _ in range(at_once or 500)))
    return servers


def documents(job, seed):
    from datatrove.data import Document

    for number, row in enumerate(rows_of(job, seed)):
        yield Document(row["text"], f"{number}", metadata={"answers": row["answers"]})


def rollout_of(job):
    async def rollout(document, generate):
        async def ask(payload):
            return (await generate(payload)).text

        await job.rollout({"text": document.text, **document.metadata}, ask)
        return {"done": True}

    return rollout


def writer():
    from datatrove.pipeline.writers import JsonlWriter

    return JsonlWriter("output", "${rank}_chunk_${chunk_index}.jsonl", compression=None)


def ours(job, seed, at_once):
    sys.modules["uvloop"] = types.SimpleNamespace(new_event_loop=VirtualTimeLoop)  # type: ignore[assignment]
    from datatrove_ckpt import InferenceConfig, InferenceRunner
    from datatrove_ckpt.generation import rank
    from datatrove_ckpt.inference.servers import pool

    servers = servers_of(job)
    numbers = count()

    class Launched(pool.InferenceServer):  # type: ignore[misc]
        """Believes that a simulated engine is its process."""

        async def start(self):
            self.url = await servers[next(numbers)].start()

        async def take_over(self, config, rank):
            return False

        async def watch(self):
            await asyncio.Event().wait()

        async def stop(self):
            self.url = ""

        kill = stop

    pool.InferenceServer = Launched  # type: ignore[misc]
    rank.check_servers = lambda config: None
    settings = {}
    if at_once is not None:
        settings["max_concurrent_generations"] = at_once
    config = InferenceConfig(
        server_type="vllm",
        model_name_or_path="m",
        replicas=job.servers,
        reuse_servers=False,
        hang_timeout=1e6,
        **settings,
    )
    runner = InferenceRunner(
        rollout_of(job),
        config,
        writer(),
        checkpoints_local_dir="checkpoints",
        records_per_chunk=1000,
    )
    runner.run(documents(job, seed), 0, 1)
    return servers


def datatrove(job, seed, at_once):
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

    (server,) = servers_of(job)

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            return VirtualTimeLoop()

    asyncio.set_event_loop_policy(Policy())
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="m",
        endpoint_url="http://127.0.0.1",
        max_concurrent_generations=at_once or 500,
    )
    runner = InferenceRunner(rollout_of(job), config, writer(), records_per_chunk=1000)
    run_async = runner.run_async

    async def run(*arguments):
        config.endpoint_url = await server.start()
        return await run_async(*arguments)

    runner.run_async = run
    runner.run(documents(job, seed), 0, 1)
    return [server]


def main():
    name, system, seed, at_once = json.loads(sys.argv[1])
    job = JOBS[name]
    began = time.monotonic()
    if system in ("ours", "datatrove"):
        servers = {"ours": ours, "datatrove": datatrove}[system](job, seed, at_once)
    else:
        run = {"ideal": ideal, "loop": plain_loop}[system]
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            servers = runner.run(run(job, seed, at_once))
    seconds = max(server.last for server in servers) - min(
        server.first for server in servers if server.first is not None
    )
    prompts = sum(server.prompt_tokens for server in servers)
    result = {
        "seconds": seconds,
        "requests": sum(server.answered for server in servers),
        "cached": sum(server.cached_tokens for server in servers) / prompts,
        "preemptions": sum(server.engine.preemptions for server in servers),
        "took": time.monotonic() - began,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
