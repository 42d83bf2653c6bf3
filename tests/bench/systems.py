"""One run of one system, in a process of its own: settings as JSON in the first argument, what it
cost on stdout.

    ours, ours-asyncio   datatrove_ckpt.InferenceRunner, on uvloop where it is installed, and on
                         asyncio's own loop
    datatrove            datatrove's own InferenceRunner
    bare, bare-uvloop    aiohttp + orjson in a loop, without documents, output or checkpoint: the
                         practical limit

A run begins after all imports, and ends when the runner returns. CPU and memory are of this process
alone.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL = "mock"


@dataclass
class Run:
    """What is run, and how.

    ``output``: jsonl, jsonl.gz, jsonl.zst or parquet. ``checkpoints`` None: off.
    """

    system: str
    url: str
    source: str
    folder: str
    output: str = "jsonl"
    checkpoints: str | None = None
    concurrency: int = 256
    chunk: int = 1000
    watch_loop: bool = False
    count_bytecodes: bool = False
    replay_check: bool = True


async def ask(document, generate):
    """The rollout: one request."""
    return await generate(
        {"messages": [{"role": "user", "content": document.text}], "max_tokens": 64}
    )


def run_ours(run):
    from datatrove_ckpt import InferenceConfig, InferenceRunner, readers
    from datatrove_ckpt.generation import rank  # noqa: F401 (so that importing it is no part of the run)

    config = InferenceConfig(**_config(run), hang_timeout=120)
    return _step(run, InferenceRunner, config, readers)


def run_datatrove(run):
    import aiofiles  # noqa: F401 (so that importing it is no part of the run)
    import aiosqlite  # noqa: F401
    import httpx  # noqa: F401
    from datatrove.pipeline import readers
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

    return _step(run, InferenceRunner, InferenceConfig(**_config(run)), readers)


def _config(run):
    return {
        "server_type": "endpoint",
        "model_name_or_path": MODEL,
        "endpoint_url": run.url,
        "max_concurrent_generations": run.concurrency,
    }


def _step(run, runner, config, readers):
    reader = readers.JsonlReader(run.source)
    settings = {}
    if not run.replay_check:  # datatrove's runner and older commits have no such setting
        settings["replay_check"] = False
    step = runner(
        ask,
        config,
        _writer(run),
        checkpoints_local_dir=run.checkpoints,
        records_per_chunk=run.chunk,
        **settings,
    )
    return lambda: step.run(reader.run())


def _writer(run):
    from datatrove.pipeline import writers

    folder, name = (
        f"{run.folder}/output",
        "${rank}_chunk_${chunk_index}." + run.output.partition(".")[0],
    )
    if run.output == "parquet":
        return writers.ParquetWriter(folder, name, compression="zstd")
    compression = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}[run.output]
    return writers.JsonlWriter(folder, name, compression=compression)


def run_bare(run):
    import aiohttp  # noqa: F401 (so that importing it, a quarter of a second, is no part of the run)
    import orjson  # noqa: F401

    return lambda: asyncio.run(_ask_all(run))


def _payloads(run):
    import orjson

    with next(Path(run.source).iterdir()).open("rb") as file:
        for line in file:
            messages = [{"role": "user", "content": orjson.loads(line)["text"]}]
            yield orjson.dumps({"messages": messages, "max_tokens": 64, "model": MODEL})


async def _ask_all(run):
    import aiohttp
    import orjson

    payloads, url = _payloads(run), f"{run.url}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=3600, connect=30)
    headers = {"Content-Type": "application/json"}

    async def work(session):
        for payload in payloads:
            async with session.post(url, data=payload, headers=headers) as response:
                orjson.loads(await response.read())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**18
    ) as session:
        await asyncio.gather(*(work(session) for _ in range(run.concurrency)))


SYSTEMS = {
    "ours": run_ours,
    "datatrove": run_datatrove,
    "bare": run_bare,
}


def counted(work, results):
    """Returns ``work``, which then puts the number of bytecodes that all its threads executed into
    ``results``. Unlike CPU time, it is the same on a busy machine.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    def run():
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
            threading.settrace(None)
            results["bytecodes"] = count

    return run


def cpu_seconds(who=resource.RUSAGE_SELF):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def highest_memory():
    """MB. Of this program; ``ru_maxrss`` may be that of the process it was forked from."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def main():
    run = Run(**json.loads(sys.argv[1]))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    name, _, loop = run.system.partition("-")
    if loop == "asyncio":
        sys.modules["uvloop"] = None  # type: ignore[assignment] (what cannot be imported is not installed)
    if loop == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    work = SYSTEMS[name](run)
    with suppress(ImportError):
        from loguru import logger

        logger.remove()  # only now: datatrove's import adds its own
    health = {}
    if run.watch_loop:
        from tests.bench.loop_watch import watched

        work = watched(work, health)
    if run.count_bytecodes:
        work = counted(work, health)
    before, started = cpu_seconds(), time.monotonic()
    work()
    ended, cpu = time.monotonic(), cpu_seconds() - before
    print(
        json.dumps(
            {
                "run": asdict(run),
                "started": started,
                "ended": ended,
                "cpu": cpu,
                "memory": highest_memory(),
                **health,
            }
        )
    )


if __name__ == "__main__":
    main()
