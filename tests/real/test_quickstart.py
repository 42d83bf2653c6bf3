"""README's first line, as a newcomer runs it: a fresh environment, a real model, and kill -9 on the
way.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pages import commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    json.loads(line)["id"]
    for line in (ROOT / "configs/quickstart_documents.jsonl").read_text().splitlines()
]

# llama.cpp's log says when it has answered a request.
COUNTED = "--pipeline.1.config.model_kwargs='{verbosity: 3}'"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a newcomer has: the files git knows, and nothing installed."""
    folder = tmp_path_factory.mktemp("newcomer") / "checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def start(checkout):
    line = f"{commands()[0]} {COUNTED}"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    with (checkout / "terminal.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=checkout,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def answered(checkout):
    log = checkout / "quickstart/logs/server/server_rank_00000.log"
    return (
        len(re.findall("stop processing", log.read_text(errors="replace"))) if log.exists() else 0
    )


def written(checkout):
    files = sorted((checkout / "quickstart/output").glob("*.jsonl"))
    assert [path.name for path in files] == [f"00000_chunk_0000{index}.jsonl" for index in range(3)]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.timeout(1800)  # it installs what it needs, from the network
def test_killed_it_finishes_the_rest_and_pays_nothing_twice(checkout):
    process = start(checkout)
    while answered(checkout) < 10:
        assert process.poll() is None, (checkout / "terminal.log").read_text()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    last = start(checkout)
    assert last.wait() == 0, (checkout / "terminal.log").read_text()
    documents = written(checkout)
    assert [document["id"] for document in documents] == DOCUMENTS
    assert all(len(one["answer"].split()) > 5 for one in documents), "real, if small, text"
    again = answered(checkout) - len(DOCUMENTS)
    assert 0 <= again <= 8, "at most what was in flight at the kill"
    closing = (checkout / "terminal.log").read_text().splitlines()[-1]
    assert "24 of 24 documents are in 3 files" in closing
    assert "To check the files: datatrove-ckpt verify quickstart/checkpoints --full" in closing
