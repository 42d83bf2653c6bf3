"""README's first line, as a newcomer runs it: a fresh environment, a real model, and kill -9 on the
way.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.journal import ChunkJournal
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


def kill_after(checkout, answers):
    """kill -9 to everything the line started, once the model has answered so many requests."""
    process = start(checkout)
    while answered(checkout) < answers:
        assert process.poll() is None, (checkout / "terminal.log").read_text()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kept(checkout):
    """The answers that are on disk."""
    texts = set()
    rank = checkout / "quickstart/checkpoints/00000"
    copy = checkout / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(rank, copy)
    for path in copy.glob("chunk_*.jsonl"):
        journal = ChunkJournal(path, 0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == len(journal.recovered)
        texts.update(line["document"]["metadata"]["rollout_results"][0]["text"] for line in lines)
    connection = sqlite3.connect(copy / "replay.sqlite3")
    texts.update(
        json.loads(row[0])["text"] for row in connection.execute("SELECT result FROM request_cache")
    )
    connection.close()
    return texts


def written(checkout):
    files = sorted((checkout / "quickstart/output").glob("*.jsonl"))
    assert [path.name for path in files] == [f"00000_chunk_0000{index}.jsonl" for index in range(3)]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.timeout(1800)  # it installs what it needs, from the network
def test_killed_twice_it_finishes_the_rest_and_keeps_every_answer(checkout):
    kill_after(checkout, 5)
    first = kept(checkout)
    kill_after(checkout, answered(checkout) + 5)
    second = kept(checkout)
    assert first <= second, "answers of the first life are still there"
    last = start(checkout)
    assert last.wait() == 0, (checkout / "terminal.log").read_text()

    documents = written(checkout)
    assert [document["id"] for document in documents] == DOCUMENTS
    texts = {document["answer"] for document in documents}
    assert second <= texts, "every answer received before a kill is kept word for word"
    assert all(len(text.split()) > 5 for text in texts), "real, if small, text"
    again = answered(checkout) - len(DOCUMENTS)
    print(
        f"kept over the kills: {len(first)} and {len(second)} answers; answered more than once: {again}"
    )
    assert 0 <= again <= 2 * 8, "at most what was in flight at each kill"
    closing = (checkout / "terminal.log").read_text().splitlines()[-1]
    assert "24 of 24 documents are in 3 files" in closing
    assert "To check the files: datatrove-ckpt verify quickstart/checkpoints --full" in closing
