"""What the ends of tasks cost a real GPU: ``python -m tests.bench.gpu_tasks [--tasks 1 10 40]
[--ranks-at-once 1]``.

The same documents, as one task and as many, in one worker, over one server: the continuous batching
of transformers with a Llama of random weights, so no model has to be fetched. The lengths of the
answers have a long tail, as those of reasoning models. The first run warms up, and is not measured.
The second has no datatrove and no HTTP: as many requests at once are given to the engine in its
process.
"""

import asyncio
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from datatrove_ckpt import InferenceConfig
from tests.bench.measure import table
from tests.bench.tasks import AT_ONCE, run_tasks, tasks_parser

PROMPT = 64  # tokens


class Engine:
    """Answers requests with as many tokens as they ask for."""

    def __init__(self):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
        )
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        settings = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024
        )
        self.tokens = 0
        self._waiting = {}
        self._loop = asyncio.get_running_loop()
        self._manager = model.init_continuous_batching(generation_config=settings)
        self._manager.start()
        threading.Thread(target=self._deliver, daemon=True).start()

    def _deliver(self):
        while True:
            output = self._manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                number = len(output.generated_tokens)
                self._loop.call_soon_threadsafe(self._finish, output.request_id, number)

    def _finish(self, name, number):
        self.tokens += number
        self._waiting.pop(name).set_result(number)

    async def generate(self, tokens):
        """Returns the number of tokens of an answer."""
        name = f"{time.monotonic_ns()}"
        future = self._loop.create_future()
        self._waiting[name] = future
        prompt = [random.randrange(3, 32_000) for _ in range(PROMPT)]
        self._manager.add_request(prompt, request_id=name, max_new_tokens=tokens)
        return await future

    async def batch(self, lengths):
        """Returns the seconds that the engine needs for answers of these lengths, with as many at
        once as a job has.
        """
        left = iter(lengths)

        async def work():
            for tokens in left:
                await self.generate(tokens)

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return time.monotonic() - began

    async def complete(self, request):
        payload = await request.json()
        number = await self.generate(payload["max_tokens"])
        name = f"{time.monotonic_ns()}"
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": PROMPT, "completion_tokens": number}
        return web.json_response(
            {"id": name, "model": "random", "choices": [choice], "usage": usage}
        )


async def serve(started, found):
    engine = Engine()
    found["engine"] = engine
    found["loop"] = asyncio.get_running_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.complete)
    app.router.add_get(
        "/v1/models", lambda request: web.json_response({"data": [{"id": "random"}]})
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    started.set()
    await asyncio.Event().wait()


async def rollout(document, generate):
    """One request, of as many tokens as the document says."""
    return await generate(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": document.metadata["tokens"]}
    )


def run(folder, url, tasks, ranks_at_once, lengths):
    """Returns the seconds of a job."""
    config = InferenceConfig(
        "endpoint",
        "random",
        endpoint_url=url,
        max_concurrent_generations=AT_ONCE,
        server_patience_seconds=60,
    )
    rows = [{"id": f"{n}", "text": "x", "tokens": number} for n, number in enumerate(lengths)]
    return run_tasks(
        folder, rollout, config, rows, tasks=tasks, workers=1, ranks_at_once=ranks_at_once
    )


def main():
    parser = tasks_parser(__doc__, 480)
    parser.add_argument("--ranks-at-once", type=int, help="1: tasks run in turn")
    options = parser.parse_args()
    chance = random.Random(0)
    lengths = [
        min(512, max(16, int(chance.lognormvariate(4.2, 0.8)))) for _ in range(options.documents)
    ]
    started, found = threading.Event(), dict[str, Any]()
    threading.Thread(target=lambda: asyncio.run(serve(started, found)), daemon=True).start()
    started.wait()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        run(Path(name, "warm up"), found["url"], 1, 1, lengths[:AT_ONCE])
        engine = found["engine"]
        alone = asyncio.run_coroutine_threadsafe(engine.batch(lengths), found["loop"]).result()
        rows.append(["the engine alone", f"{alone:.1f}", f"{sum(lengths) / alone:,.0f}", "1.00"])
        print(rows[-1], flush=True)
        for tasks in options.tasks:
            seconds = run(
                Path(name, str(tasks)), found["url"], tasks, options.ranks_at_once, lengths
            )
            rate = f"{sum(lengths) / seconds:,.0f}"
            rows.append([tasks, f"{seconds:.1f}", rate, f"{alone / seconds:.2f}"])
            print(rows[-1], flush=True)
    table(["tasks", "seconds", "tokens/s", "of the engine alone"], rows)


if __name__ == "__main__":
    main()
