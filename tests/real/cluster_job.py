"""What the workers of a job on a cluster import, and what the test compares their output with.

Documents are asked about at a counting server, which holds every request after the first few until
it may continue. So "in the middle" is an exact place: all requests that may be in flight are in
flight.
"""

import errno
import fcntl
import os

from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests.kept import until_kept
from tests.patience import until
from tests.yaml_jobs import write_tasks

DOCUMENTS = 24  # per task
IN_FLIGHT = 4  # per task
HELD = 10  # so many requests are answered, later ones wait
DRAIN_SECONDS = 3.0  # less than the cluster's KillWait

if os.environ.get("TEST_WITHOUT_LOCKS"):

    def _no_locks(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = _no_locks


async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def answer(payload, times):
    return f"answer to {payload['messages'][-1]['content']}"


def counting_server():
    return FakeServer(answer, delay=lambda payload, times: 0.02, hold_after=HELD)


def pipeline(folder, url, **settings):
    """Reader and runner of the job in ``folder``: input/ there, and output/, checkpoints/, logs/ to
    come.
    """
    config = InferenceConfig(
        "endpoint", "fake", endpoint_url=url, max_concurrent_generations=IN_FLIGHT
    )
    runner = InferenceRunner(
        rollout,
        settings.pop("config", config),
        JsonlWriter(str(folder / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=7,
        **{"drain_seconds": DRAIN_SECONDS, **settings},
    )
    return [JsonlReader(str(folder / "input"), add_file_path=False), runner]


def undisturbed(folder, tasks):
    """The output of the same pipeline, with nothing in its way."""
    other = folder / "undisturbed"
    (other / "input").parent.mkdir()
    (other / "input").symlink_to(folder / "input")
    with FakeServer(answer) as server:
        reader, runner = pipeline(other, server.url)
        for rank in range(tasks):
            runner.run(reader.run(None, rank, tasks), rank, tasks)
    return outputs(other / "output")


class ClusterJob:
    """A job in a folder of its own, with input for each of its tasks."""

    def __init__(self, folder, server, tasks):
        self.folder = folder
        self.server = server
        self.tasks = tasks
        write_tasks(folder, tasks, DOCUMENTS)

    def asked(self):
        return self.server.asked.total()

    def describe(self):
        return f"{self.asked()} requests"

    def until_held(self):
        """Everything is in flight that may be, and what was answered is kept."""
        expected = HELD + IN_FLIGHT * self.tasks
        until(lambda: self.asked() >= expected, 240, self.describe)
        until_kept(self.folder / "checkpoints", HELD)
