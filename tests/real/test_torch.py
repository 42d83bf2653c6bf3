"""A torch training loop stops and resumes in the middle of an epoch: no sample twice, none left
out.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from datatrove.data import Document

from datatrove_ckpt.output.document_codec import as_read
from tests.pages import blocks, torch_example
from tests.patience import until
from tests.real.training_ranks import kill, processes_below

DOCUMENTS = 97


HOLDS = """
import time

from datatrove_ckpt.torch import TrainingCheckpoints


def maybe_save(self, step, *, usual=TrainingCheckpoints.maybe_save, **what):
    usual(self, step, **what)
    if step == {}:
        time.sleep(1000)


TrainingCheckpoints.maybe_save = maybe_save
"""
"""Before the script: it waits there to be killed, or it might end before the test looks."""


@pytest.fixture
def started(tmp_path):
    """Starts the command of the docs in a folder that has the script and documents."""
    (line,) = [line for block in blocks("bash", "docs/training.md") for line in block.lines]
    assert line.startswith("torchrun ")
    running = []

    def start(name, before=""):
        folder = tmp_path / name
        folder.joinpath("documents").mkdir(parents=True, exist_ok=True)
        folder.joinpath("train.py").write_text(before + torch_example().text)
        lines = [json.dumps({"text": f"text {number}"}) + "\n" for number in range(DOCUMENTS)]
        folder.joinpath("documents/0.jsonl").write_text("".join(lines))
        command = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:]]
        variables = {**os.environ, "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, cwd=folder, env=variables))
        return running[-1]

    yield start
    for process in running:
        kill(processes_below(process.pid))


@pytest.mark.timeout(1800)  # six starts of torchrun
def test_the_script_in_the_docs_goes_on_after_kills(tmp_path, started):
    assert started("whole").wait(300) == 0
    expected = tmp_path.joinpath("whole/run/metrics.csv").read_text()
    assert len(expected.splitlines()) == 1 + 3 * (DOCUMENTS // 4)
    for saved in (10, 30):
        process = started("killed", HOLDS.format(saved + 3))
        until(tmp_path.joinpath(f"killed/run/step-{saved:08}").exists)
        kill(processes_below(process.pid))
        process.wait()
        assert not tmp_path.joinpath("killed/run/step-00000072").exists()
    assert started("killed").wait(300) == 0
    assert tmp_path.joinpath("killed/run/metrics.csv").read_text() == expected
    for _ in range(2):  # there is nothing left to train
        assert started("killed").wait(300) == 0
        assert tmp_path.joinpath("killed/run/metrics.csv").read_text() == expected


def test_a_tensor_of_a_document_counts_by_type_shape_and_content():
    def kept(tensor):
        return as_read(Document(text="", id="a", metadata={"tensor": tensor})).data

    ones = [
        torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(()),
        torch.ones(2, 1),
        torch.zeros(2),
    ]
    assert len(set(map(kept, ones))) == len(ones)
    assert kept(torch.ones(2)) == kept(torch.ones(2))
