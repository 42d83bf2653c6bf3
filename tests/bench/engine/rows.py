"""One row over HTTP, in a process of its own: `python -m tests.bench.engine.rows ROW FOLDER`.

    bare        aiohttp, and nothing else: what the engine's HTTP server costs any client
    ours        JSONL reader, InferenceRunner with checkpoints, JSONL writer, in a
                LocalPipelineExecutor
    datatrove   the same with datatrove's InferenceRunner

Each starts a server of its own with the same arguments. FOLDER holds work.json and input;
result.json is written there.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.bench.engine.offline import Clock
from tests.bench.engine.work import Work
from tests.bench.systems import cpu_seconds

_SERVE = Path(__file__).with_name("serve.py")


class Meter:
    """When the first request left, when the last answer came, what they held, and what CPU this
    process took.
    """

    def __init__(self, documents):
        self.clock = Clock()
        self.documents = documents
        self.answers = 0
        self.counts = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        self._cpu = 0.0
        self._sent = False

    def sent(self):
        if not self._sent:
            self._sent = True
            self.clock.start()
            self._cpu = cpu_seconds()

    def answered(self, usage):
        self.answers += 1
        details = usage.get("prompt_tokens_details") or {}
        for name in self.counts:
            self.counts[name] += usage.get(name) or details.get(name) or 0
        if self.answers == self.documents:
            self._cpu = cpu_seconds() - self._cpu
            self.clock.stop()

    def watched(self, send):
        """The same function; the first call is noted.

        What a runner does before its server is ready does not count.
        """

        async def sending(*args, **kwargs):
            self.sent()
            return await send(*args, **kwargs)

        return sending

    def result(self):
        return {**self.clock.result(), "answers": self.answers, "cpu": self._cpu, **self.counts}


METER = Meter(0)  # of the module, because datatrove copies steps and what they hold


async def rollout(document, generate):
    """One request."""
    result = await generate({"prompt": document.text})
    METER.answered(result.usage)
    return result


def run_ours(work, folder):
    from datatrove_ckpt import InferenceRunner
    from datatrove_ckpt.inference.client import client
    from datatrove_ckpt.readers import JsonlReader

    client.post = METER.watched(client.post)
    config = work.config(server_log_folder=str(folder / "server"))
    _run_pipeline(work, folder, JsonlReader(str(folder / "input")), InferenceRunner, config)


def run_datatrove(work, folder):
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.inference.servers import base
    from datatrove.pipeline.readers import JsonlReader

    base._raw_post = METER.watched(base._raw_post)
    argv, environment = work.command("PORT")
    os.environ.update(environment)
    # Its own vLLM and SGLang servers take other arguments, and it has none for llama.cpp. A
    # "custom" server is sent the same requests in the same way, and is started as ours is.
    config = InferenceConfig(
        "custom",
        work.model,
        model_max_context=work.context,
        model_kwargs={"server_script": str(_SERVE), "command": json.dumps(argv)},
        use_chat=False,
        max_concurrent_generations=work.in_flight,
        default_generation_params=work.parameters(),
        server_log_folder=str(folder / "server"),
    )
    _run_pipeline(work, folder, JsonlReader(str(folder / "input")), InferenceRunner, config)


def _run_pipeline(work, folder, reader, runner, config):
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.writers import JsonlWriter

    step = runner(
        rollout,
        config,
        JsonlWriter(str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=max(1, min(1000, work.documents // 4)),
    )
    LocalPipelineExecutor([reader, step], tasks=1, logging_dir=str(folder / "logs")).run()
    written = sum(len(path.read_bytes().splitlines()) for path in (folder / "output").iterdir())
    if written != work.documents:
        raise SystemExit(f"{written} of {work.documents} documents are in {folder / 'output'}")


def run_bare(work, folder):
    rows = [json.loads(line) for line in (folder / "input/prompts.jsonl").read_text().splitlines()]
    asyncio.run(_ask_all(work, iter(rows), folder))


async def _ask_all(work, rows, folder):
    import aiohttp

    from tests.jobs import started_server

    common = {"model": work.model, **work.parameters()}
    async with started_server(work.config(server_log_folder=str(folder / "server")), 0) as server:
        url, key = f"{server.url}/v1/completions", server.api_key
        headers = {"Authorization": f"Bearer {key.reveal()}"} if key else {}

        async def ask(session, file):
            for row in rows:
                METER.sent()
                async with session.post(
                    url, json={"prompt": row["text"], **common}, headers=headers
                ) as response:
                    response.raise_for_status()
                    answer = await response.json()
                METER.answered(answer["usage"])
                file.write(json.dumps({**row, "answer": answer["choices"][0]["text"]}) + "\n")

        timeout = aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        ) as session:
            with (folder / "answers.jsonl").open("w") as file:
                await asyncio.gather(*(ask(session, file) for _ in range(work.in_flight)))


ROWS = {"bare": run_bare, "ours": run_ours, "datatrove": run_datatrove}


def main():
    folder = Path(sys.argv[2])
    work = Work.load(folder / "work.json")
    METER.documents = work.documents
    ROWS[sys.argv[1]](work, folder)
    (folder / "result.json").write_text(json.dumps(METER.result()))


if __name__ == "__main__":
    main()
