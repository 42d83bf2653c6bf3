"""A job whose input is a dataset on the hub: killed with -9, while somebody adds commits to the dataset."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.preflight import probes
from datatrove_ckpt.testing import FakeServer, outputs
from tests.hub import FakeHub
from tests.mirrors import answered
from tests.yaml_jobs import ENDPOINT, job_yaml

pytestmark = pytest.mark.xdist_group("datasets")  # its import takes seconds

JOB = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.readers import HuggingFaceDatasetReader

folder, url, streaming = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=4)


async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


reader = HuggingFaceDatasetReader("org/data", {"split": "train"}, streaming=streaming == "True", batch_size=4)
runner = InferenceRunner(
    rollout,
    config,
    JsonlWriter(folder + "/output", "${rank}_${chunk_index}.jsonl", compression=None),
    checkpoints_local_dir=folder + "/checkpoints",
    records_per_chunk=5,
    sync_seconds=0.01,
)
if __name__ == "__main__":
    LocalPipelineExecutor([reader, runner], tasks=2, workers=1, logging_dir=folder + "/logs").run()
"""


def parquet(first: int, count: int) -> bytes:
    rows = [{"text": f"text {i}", "n": i} for i in range(first, first + count)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=4)
    return buffer.getvalue()


class Runs:
    """The job's processes. ``kill_at``: the number of answers at which one is killed."""

    def __init__(self, hub: FakeHub, folder: Path, streaming: bool) -> None:
        self._environment = os.environ | hub.environment(folder / "home")
        self._folder, self._streaming = folder, streaming
        folder.mkdir()
        (folder / "job.py").write_text(JOB)
        self.asked: list[str] = []

    def _wait_for_a_commit(self) -> None:
        """Of the chunks that are complete by now, so that the next attempt has a position."""
        commits, deadline = self._folder / "checkpoints/00000/commits.jsonl", time.monotonic() + 300
        while not (commits.exists() and commits.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def run(self, kill_at: int = 0) -> tuple[int, str]:
        lock, process = threading.Lock(), None
        answered = 0

        def answer(payload: dict[str, Any], times: int) -> str:
            nonlocal answered
            with lock:
                self.asked.append(payload["messages"][-1]["content"])
                answered += 1
                if answered == kill_at and process is not None:
                    self._wait_for_a_commit()
                    os.killpg(process.pid, signal.SIGKILL)
            return f"answer to {payload['messages'][-1]['content']}"

        with FakeServer(answer) as server:
            arguments = [str(self._folder), server.url, str(self._streaming)]
            with lock:
                process = subprocess.Popen(
                    [sys.executable, str(self._folder / "job.py"), *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                    env=self._environment,
                )
            try:
                log, _ = process.communicate(timeout=400)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, log


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three programs, one after the other
@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_output_is_that_of_the_commit_that_the_job_began_with(hub: FakeHub, tmp_path: Path, streaming: bool) -> None:
    """The second task starts only after the last commit, and reads what the first one began."""
    files = {f"data/train-{n}.parquet": parquet(100 * n, 16) for n in range(4)}
    hub.put("org/data", files)
    undisturbed = Runs(hub, tmp_path / "undisturbed", streaming)
    assert undisturbed.run()[0] == 0

    killed = Runs(hub, tmp_path / "killed", streaming)
    code, log = killed.run(kill_at=24)
    assert code == -signal.SIGKILL, log
    kept = answered(tmp_path / "killed/checkpoints/00000") & Counter(f"text {ordinal}" for ordinal in range(64))
    killed.asked.clear()
    hub.put("org/data", {"data/train-0.parquet": parquet(900, 40), "data/added.parquet": parquet(700, 3)})
    code, log = killed.run()
    assert code == 0, log
    assert "finished documents by seeking" in log
    assert outputs(tmp_path / "killed/output") == outputs(tmp_path / "undisturbed/output")
    assert len(killed.asked) == 64 - kept.total() < 64


@pytest.fixture
def job(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], server: FakeServer
) -> Callable[..., tuple[int, str]]:
    """``datatrove-ckpt COMMAND job.yaml`` in this process, with two tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "_repeats", lambda seconds, at_most: iter(range(3)))
    hub.put("org/data", {f"data/train-{n}.parquet": parquet(100 * n, 8) for n in range(3)})

    def run(command: str, options: str = "streaming: true, dataset_options: {split: train}") -> tuple[int, str]:
        text = job_yaml(ENDPOINT.replace("URL", server.url), tasks=2)
        text = text.replace("class_path: JsonlReader", "class_path: HuggingFaceDatasetReader")
        Path("job.yaml").write_text(text.replace("{data_folder: input}", f"{{dataset: org/data, {options}}}"))
        code = main([command, "job.yaml"])
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err
        return code, said.out + said.err

    return run


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    ["streaming: true, dataset_options: {split: train}", "streaming: false, dataset_options: {split: train}"],
)
def test_a_finished_run_stays_finished_when_the_dataset_moves_on(
    job: Callable[..., tuple[int, str]], hub: FakeHub, options: str
) -> None:
    code, said = job("run", options)
    assert (code, "24 of 24 documents" in said) == (0, True)
    hub.put("org/data", {"data/train-0.parquet": parquet(900, 40), "data/a.parquet": parquet(700, 3)})
    code, said = job("run", options)
    assert (code, "24 of 24 documents" in said) == (0, True)
    other = options.replace("split: train", "split: train, revision: main")
    code, said = job("run", other)
    assert code == 1
    assert "revision" in said


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("streaming: true, dataset_options: {split: train}", "3 files for 2 tasks"),
        ("dataset_options: {split: train}", "each of 2 tasks gets an equal part of the rows"),
    ],
)
def test_the_doctor_reads_the_beginning_of_a_dataset(
    job: Callable[..., tuple[int, str]], hub: FakeHub, options: str, found: str
) -> None:
    code, said = job("doctor", options)
    assert code == 0
    # On a busy machine the doctor's two seconds end before all 24 are read.
    assert re.search(r"the dataset org/data: (all|the first) \d+ documents? read", said)
    assert found in said


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("streaming: true, dataset_options: {split: validation}", "validation"),
        ("dataset_options: {split: train}, text_key: body", "no column 'body'. Its columns are 'text', 'n'"),
        ("dataset_options: {split: train, token: hf_abcdefghijklmnopqrstuvwxyz}", "HF_TOKEN"),
        ("streaming: true, shuffle_files: true", "streaming=False"),
    ],
)
def test_a_mistake_is_found_before_anything_is_asked(
    job: Callable[..., tuple[int, str]], server: FakeServer, options: str, message: str
) -> None:
    for command in ("doctor", "run"):
        code, said = job(command, options)
        assert code != 0
        assert message in said
        assert "hf_abcdefghijklmnopqrstuvwxyz" not in said
    assert not server.payloads
