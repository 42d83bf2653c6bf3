"""The job that is killed, by kind: plain, gzip, Parquet, agents."""

JOB = """
import asyncio
import json
import sys
from urllib.request import Request, urlopen
import aiohttp
import datatrove_ckpt
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

folder, url, kind, tasks = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=8)


def look(text):
    body = json.dumps({"prompt": text}).encode()
    with urlopen(Request(url + "/look", body, {"content-type": "application/json"})) as answer:
        return json.load(answer)


async def ask(session, base_url, text, is_stream):
    payload = {"model": "any", "messages": [{"role": "user", "content": text}], "stream": is_stream}
    async with session.post(base_url + "/chat/completions", json=payload) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


async def rollout(document, generate):
    text = document.text
    found = {}
    said = []
    if kind == "agents":
        found = await generate.once("look", look, "look at " + text)
    first = await generate({"messages": [{"role": "user", "content": text}], "temperature": 1})
    if kind == "agents":
        async with generate.url() as base_url, aiohttp.ClientSession() as session:
            asked = ((text + " agent", True), (text + " equal", False), (text + " equal", False))
            said = await asyncio.gather(*(ask(session, base_url, *one) for one in asked))
    second = await generate({"messages": [{"role": "user", "content": text + " again"}]})
    return [found, *said, first, second]


name = "${rank}_chunk_${chunk_index}." + ("parquet" if kind == "parquet" else "jsonl")
writer = (
    ParquetWriter(folder + "/output", name)
    if kind == "parquet"
    else JsonlWriter(folder + "/output", name, compression="gzip" if kind == "gzip" else None)
)
runner = InferenceRunner(
    rollout, config, writer, checkpoints_local_dir=folder + "/checkpoints", records_per_chunk=7, sync_seconds=0.01
)
reader = JsonlReader(folder + "/input", add_file_path=False)
if __name__ == "__main__" and kind == "agents":
    datatrove_ckpt.LocalPipelineExecutor([reader, runner], tasks=int(tasks), logging_dir=folder + "/logs", ranks_at_once=1).run_worker()
elif __name__ == "__main__":
    LocalPipelineExecutor([reader, runner], tasks=int(tasks), workers=int(tasks), logging_dir=folder + "/logs").run()
"""


DOCUMENTS = 120  # of each rank


QUESTIONS = 2 * DOCUMENTS


IN_FLIGHT = 8  # of each rank
