"""InferenceRunner, in a process of its own: `python -m tests.bench.engine.ours FOLDER`.

JSONL reader, InferenceRunner with checkpoints, and JSONL writer, in a LocalPipelineExecutor. It
starts a server of its own. FOLDER holds work.json and input; result.json is written there.
"""

import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.readers import JsonlReader
from tests.bench.engine.work import Work

# Of the module, because datatrove copies steps and what they hold.
sent, usages, ends = [], [], []
_post = client.post


async def post(*args, **kwargs):
    """What a runner does before its server is ready does not count."""
    sent.append(time.monotonic())
    return await _post(*args, **kwargs)


async def rollout(document, generate):
    """One request."""
    result = await generate({"prompt": document.text})
    usages.append(result.usage)
    ends.append(time.monotonic())
    return result


def main(folder):
    work = Work(**json.loads((folder / "work.json").read_text()))
    client.post = post
    step = InferenceRunner(
        rollout,
        work.config(server_log_folder=str(folder / "server")),
        JsonlWriter(str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=max(1, min(1000, work.documents // 4)),
        replay_check=False,  # the rollout counts
    )
    pipeline = [JsonlReader(str(folder / "input")), step]
    LocalPipelineExecutor(pipeline, tasks=1, logging_dir=str(folder / "logs")).run()
    written = sum(len(path.read_bytes().splitlines()) for path in (folder / "output").iterdir())
    result = {"seconds": ends[-1] - sent[0], "answers": written}
    for kind in ("prompt", "completion"):
        result[kind] = sum(usage[f"{kind}_tokens"] for usage in usages)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
