"""InferenceRunner, in a process of its own: `python -m tests.bench.engine.ours FOLDER`.

JSONL reader, InferenceRunner with checkpoints, and JSONL writer, in a LocalPipelineExecutor. It
starts a server of its own. FOLDER holds work.json and input; result.json is written there.
"""

import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.readers import JsonlReader
from tests.bench.engine.offline import Clock
from tests.bench.engine.work import Work
from tests.bench.systems import cpu_seconds


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


def run(work, folder):
    client.post = METER.watched(client.post)
    step = InferenceRunner(
        rollout,
        work.config(server_log_folder=str(folder / "server")),
        JsonlWriter(str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=max(1, min(1000, work.documents // 4)),
    )
    pipeline = [JsonlReader(str(folder / "input")), step]
    LocalPipelineExecutor(pipeline, tasks=1, logging_dir=str(folder / "logs")).run()
    written = sum(len(path.read_bytes().splitlines()) for path in (folder / "output").iterdir())
    if written != work.documents:
        raise SystemExit(f"{written} of {work.documents} documents are in {folder / 'output'}")


def main():
    folder = Path(sys.argv[1])
    work = Work.load(folder / "work.json")
    METER.documents = work.documents
    run(work, folder)
    (folder / "result.json").write_text(json.dumps(METER.result()))


if __name__ == "__main__":
    main()
