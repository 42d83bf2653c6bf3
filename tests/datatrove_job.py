"""A job of datatrove's own InferenceRunner, to be killed: a program that runs it, and what tests need to go on with it."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading

from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer

SIZE = 4
"""``records_per_chunk``."""
TEMPLATE = "${rank}_chunk_${chunk_index}.jsonl"


async def rollout(document, generate):
    """One request, a second one for some documents, and no result for others."""
    result = await generate(payload(f"first {document.text}"))
    if "twice" in document.text:
        result = await generate(payload(f"second {document.text} {result.text}"))
    return None if "dropped" in document.text else result


def payload(text):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0.5}


def text_of(number):
    """The text of the document with this number."""
    kind = {3: " twice", 5: " dropped"}.get(number % 7, "")
    return f"text {number}{kind}"


def write_input(folder, *numbers):
    """Writes a file for each of the numbers, of so many documents."""
    (folder / "input").mkdir(exist_ok=True)
    rows = [
        json.dumps({"id": f"id {n}", "text": text_of(n), "group": n % 3})
        for n in range(sum(numbers))
    ]
    for index, number in enumerate(numbers):
        (folder / "input" / f"{index}.jsonl").write_text("\n".join(rows[:number]))
        rows = rows[number:]


def start(folder, url, **settings):
    """Starts a run. See ``_job``."""
    order = json.dumps({"folder": str(folder), "url": url, **settings})
    return subprocess.Popen([sys.executable, __file__, order], start_new_session=True)


class Killer:
    """Kills a run a random moment after the server has been asked so often.

    Args:
        seed: of what chance decides.
        rejected: requests with this text are bad requests.
    """

    def __init__(self, seed, rejected="nothing"):
        self.chance = random.Random(seed)
        self.server = FakeServer(
            delay=self._delay, status=lambda asked, times: 400 if rejected in str(asked) else None
        )
        self.server.error = "BadRequestError"
        self._left = 0
        self._process = None
        self._timer = None

    def run(self, folder, requests, **settings):
        """Runs the job, and kills it after ``requests`` requests."""
        self._left = requests
        self._process = start(folder, self.server.url, **settings)
        self._process.wait()
        if self._timer is not None:
            self._timer.join()
        self._process = self._timer = None

    def _delay(self, asked, times):
        self._left -= 1
        if self._left <= 0 and self._process is not None and self._timer is None:
            seconds = self.chance.choice([0, 0.001, 0.01, 0.03])
            self._timer = threading.Timer(seconds, self._process.kill)
            self._timer.start()
        return self.chance.choice([0, 0, 0.002, 0.02])


# the process ---------------------------------------------------------------------------------------------------------


def _job(
    folder,
    url,
    concurrent=3,
    template=TEMPLATE,
    compression=None,
    size=SIZE,
):
    """Runs it."""
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

    output = f"{folder}/output"
    writer = JsonlWriter(output, template, compression)
    if template.endswith(".parquet"):
        writer = ParquetWriter(output, template, expand_metadata=True)
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="fake",
        endpoint_url=url,
        max_concurrent_generations=concurrent,
        metric_interval=3600,
    )
    runner = InferenceRunner(
        rollout,
        config,
        writer,
        checkpoints_local_dir=f"{folder}/checkpoints",
        records_per_chunk=size,
        skip_bad_requests=True,
    )
    runner.run(JsonlReader(f"{folder}/input").run())


def _end_with_parent():
    """The kernel kills this process when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)  # a fork does not inherit that
    # It waits without end, and without a word, for a server that it cannot ask for want of httpx.
    import aiofiles  # noqa: F401
    import aiosqlite  # noqa: F401
    import httpx  # noqa: F401
    from loguru import logger

    logger.disable("datatrove")
    _job(**json.loads(sys.argv[1]))
