"""One run of another project, in its own environment, as its documentation says; its settings as
JSON in the first argument.

    ray          Ray Data with its CheckpointConfig, and aiohttp in an async actor
    curator      curator's LLM, and its cache
    litellm      LiteLLM's acompletion with its disk cache
    data-designer  DataDesigner with ``resume``
    distilabel   a Pipeline of two steps, and its cache

Each asks for every row at most ``concurrency`` times at once, saves what it saves in chunks of
``chunk`` rows, and writes lines of JSON with the row's text and its answer into ``output``.
"""

import asyncio
import json
import sys
from importlib.util import find_spec
from os import environ
from pathlib import Path

from tests.bench.systems import MODEL, Run


def run_ray(run):
    import aiohttp
    import ray
    from ray.data.checkpoint import CheckpointConfig

    at_once = 4  # batches; the default of Ray's async actors

    class Ask:
        session = None

        async def __call__(self, batch):
            self.session = self.session or aiohttp.ClientSession()
            return {**batch, "answer": await asyncio.gather(*map(self.ask, batch["text"]))}

        async def ask(self, text):
            payload = {"messages": [{"role": "user", "content": text}], "model": MODEL}
            url = f"{run.url}/v1/chat/completions"
            async with self.session.post(url, json=payload) as response:
                return (await response.json())["choices"][0]["message"]["content"]

    ray.init(address="local", include_dashboard=False)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig("id", run.checkpoints)
    blocks = len(rows(run)) // run.chunk  # what a checkpoint holds is a block
    documents = ray.data.read_json(source(run), override_num_blocks=blocks)
    # No CPU: on two cores this actor and that of the checkpoint would leave none for reading.
    one = ray.data.ActorPoolStrategy(size=1)
    size = run.concurrency // at_once
    answers = documents.map_batches(Ask, batch_size=size, compute=one, num_cpus=0)
    answers.write_json(f"{run.folder}/output")


def run_curator(run):
    # tiktoken's vocabulary is in litellm's wheel; no network is needed.
    litellm = Path(find_spec("litellm").origin).parent
    environ["TIKTOKEN_CACHE_DIR"] = str(litellm / "litellm_core_utils/tokenizers")
    from bespokelabs import curator
    from datasets import load_dataset

    class Ask(curator.LLM):
        def prompt(self, row):
            return row["text"]

        def parse(self, row, answer):
            return {**row, "answer": answer}

    settings = {
        "base_url": f"{run.url}/v1",
        "api_key": "none",
        "max_requests_per_minute": 10**9,
        "max_tokens_per_minute": 10**12,
        "max_concurrent_requests": run.concurrency,
    }
    ask = Ask(MODEL, backend="openai", backend_params=settings)
    documents = load_dataset("json", data_files=source(run), split="train")
    answers = ask(documents, working_dir=run.checkpoints)
    answers.dataset.to_json(output(run))


def run_litellm(run):
    import litellm
    from litellm.caching.caching import Cache

    litellm.cache = Cache(type="disk", disk_cache_dir=run.checkpoints)
    server = {"model": f"openai/{MODEL}", "api_base": f"{run.url}/v1", "api_key": "none"}
    places = asyncio.Semaphore(run.concurrency)

    async def ask(row):
        messages = [{"role": "user", "content": row["text"]}]
        async with places:
            answer = await litellm.acompletion(messages=messages, caching=True, **server)
        return {**row, "answer": answer.choices[0].message.content}

    async def ask_all():
        return await asyncio.gather(*map(ask, rows(run)))

    lines = map(json.dumps, asyncio.run(ask_all()))
    Path(output(run)).write_text("\n".join(lines))


def run_data_designer(run):
    import data_designer.config as dd
    from data_designer.interface import DataDesigner

    provider = dd.ModelProvider(name="server", endpoint=f"{run.url}/v1", api_key="none")
    at_once = dd.ChatCompletionInferenceParams(max_parallel_requests=run.concurrency)
    model = dd.ModelConfig(
        alias="model", model=MODEL, provider="server", inference_parameters=at_once
    )
    config = dd.DataDesignerConfigBuilder(model_configs=[model])
    config.with_seed_dataset(dd.LocalFileSeedSource(path=source(run)))
    config.add_column(
        dd.LLMTextColumnConfig(name="answer", prompt="{{ text }}", model_alias="model")
    )
    designer = DataDesigner(run.checkpoints, model_providers=[provider])
    designer.set_run_config(dd.RunConfig(buffer_size=run.chunk))
    count = len(rows(run))
    results = designer.create(config, num_records=count, resume=dd.ResumeMode.IF_POSSIBLE)
    results.export(output(run))


def run_distilabel(run):
    from distilabel.models import OpenAILLM
    from distilabel.pipeline import Pipeline
    from distilabel.steps import LoadDataFromFileSystem
    from distilabel.steps.tasks import TextGeneration

    with Pipeline(name="peer", cache_dir=run.checkpoints) as pipeline:
        load = LoadDataFromFileSystem(
            data_files=source(run), batch_size=run.chunk, output_mappings={"text": "instruction"}
        )
        llm = OpenAILLM(model=MODEL, base_url=f"{run.url}/v1", api_key="none")
        load >> TextGeneration(llm=llm, input_batch_size=run.concurrency)
    answers = pipeline.run(use_cache=True)
    answers["default"]["train"].to_json(output(run))


def source(run):
    return str(next(Path(run.source).iterdir()))


def rows(run):
    return [*map(json.loads, Path(source(run)).read_text().splitlines())]


def output(run):
    folder = Path(run.folder, "output")
    folder.mkdir(exist_ok=True)
    return str(folder / "answers.jsonl")


if __name__ == "__main__":
    settings = Run(**json.loads(sys.argv[1]))
    globals()[f"run_{settings.system.replace('-', '_')}"](settings)
