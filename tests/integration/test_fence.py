"""Two real processes for one rank: with locks the second is refused; without, it takes over and the
first stops.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.fence import RunClaim
from datatrove_ckpt.checkpoint.identity import RunIdentity, read_run
from datatrove_ckpt.checkpoint.layout import journal_path
from datatrove_ckpt.checkpoint.open_checkpoint import RankFiles
from datatrove_ckpt.errors import Fenced
from datatrove_ckpt.output.targets import LocalTarget
from datatrove_ckpt.testing import FakeServer
from tests.jobs import run_job
from tests.patience import until

JOB = """
import fcntl, errno, os, sqlite3, sys
folder, url, locks = sys.argv[1:]
if locks == "none":
    def flock(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    fcntl.flock = flock
elif locks == "local":
    fcntl.flock = lambda fd, how: None  # each node sees only its own, of SQLite, too
    connect = sqlite3.connect
    sqlite3.connect = lambda path, **settings: connect(f"file:{path}?vfs=unix-none", uri=True, **settings)
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import CkptError, InferenceConfig, InferenceRunner

async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

writer = JsonlWriter(folder + "/output", "${rank}_${chunk_index}.jsonl", compression=None)
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=4)
runner = InferenceRunner(rollout, config, writer, checkpoints_local_dir=folder + "/checkpoints", records_per_chunk=5)
try:
    runner.run(Document(f"text {n}", f"id {n}") for n in range(60))
except CkptError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def server():
    texts = lambda payload, times: f"answer {times} to {payload['messages'][-1]['content']}"  # noqa: E731
    with FakeServer(texts, delay=lambda payload, times: 0.02, hold_after=12) as running:
        yield running


def start(folder, server, locks):
    argv = [sys.executable, "-c", JOB, str(folder), server.url, locks]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def assert_whole(folder):
    """Every document once, and each file the one its commit speaks of."""
    commits = read_commits(folder / "checkpoints/00000/commits.jsonl").values()
    found = []
    for commit in sorted(commits, key=lambda commit: commit.chunk_index):
        (file,) = commit.files
        content = (folder / "output" / file.path).read_bytes()
        assert len(content) == file.size
        found += [json.loads(line)["id"] for line in content.splitlines()]
    assert found == [f"id {number}" for number in range(60)]


LAUNCH = """
import os, sys
import dill
from MODULE import LocalPipelineExecutor
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

writer = JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None)
config = InferenceConfig("endpoint", "fake", endpoint_url=sys.argv[1])
runner = InferenceRunner(rollout, config, writer, checkpoints_local_dir="checkpoints", records_per_chunk=5)
executor = LocalPipelineExecutor([[Document(f"text {n}", f"id {n}") for n in range(60)], runner], logging_dir="logs")
if "datatrove_ckpt" in "MODULE":
    executor.run()
else:
    with open("executor.pik", "wb") as file:
        dill.dump(executor, file)
    os.execv(sys.executable, [sys.executable, "-m", "datatrove.tools.launch_pickled_pipeline", "executor.pik"])
"""


@pytest.mark.matrix("module", ["datatrove_ckpt", "datatrove.executor"])
def test_a_second_start_of_a_rank_leaves_the_log_of_the_first(tmp_path, server, module):
    log = tmp_path / "logs/logs/task_00000.log"
    argv = [sys.executable, "-c", LAUNCH.replace("MODULE", module), server.url]
    settings = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(argv, **settings)
    until(lambda: server.asked.total() >= 12 + 4)
    begun = log.read_text()
    assert "Launching pipeline for rank=0" in begun
    second = subprocess.run(argv, **settings, check=False, timeout=300)
    assert second.returncode == 1
    assert "Another process works on this task" in second.stderr
    server.release()
    _, error = first.communicate(timeout=400)
    assert first.returncode == 0, error
    ended = log.read_text()
    assert ended.startswith(begun)
    assert "Another process works on this task" in ended
    assert "Processing done for rank=0" in ended
    assert "\0" not in ended


def has_saved_what_is_answered(checkpoints):
    """Two chunks of five documents, and two documents of the next."""
    last_chunk = checkpoints / "last_chunk/00000.txt"
    journals = [checkpoints / f"00000/chunk_0000{index}.jsonl" for index in (1, 2)]
    return (
        last_chunk.exists()
        and last_chunk.read_text().strip() == "1"
        and not journals[0].exists()
        and journals[1].exists()
        and journals[1].read_bytes().count(b"\n") == 2
    )


@pytest.mark.matrix("locks", ["local", "none"])
@pytest.mark.parametrize("asleep", [True, False])
def test_without_locks_the_process_that_started_first_stops_before_it_writes_anything_more(
    tmp_path, server, locks, asleep
):
    first = start(tmp_path, server, locks)
    until(lambda: server.asked.total() >= 12 + 4)
    until(lambda: has_saved_what_is_answered(tmp_path / "checkpoints"))
    if asleep:
        os.kill(first.pid, signal.SIGSTOP)  # a node that was lost, and comes back later
    second = start(tmp_path, server, locks)
    until(lambda: server.asked.total() >= 12 + 4 + 4)  # it has taken over, and asks
    server.release()
    os.kill(first.pid, signal.SIGCONT)
    _, first_error = first.communicate(timeout=400)
    _, second_error = second.communicate(timeout=400)
    assert first.returncode == 1
    assert "Fenced: Another process has taken over" in first_error
    assert f"pid {second.pid}" in first_error
    assert second.returncode == 0, second_error
    assert_whole(tmp_path)


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_a_fenced_off_process_still_appends_to_a_journal_counts_once(
    tmp_path, server, monkeypatch, has_begun
):
    """It looked at the fence, was stopped, and writes once it goes on: before the first line of the
    new owner, or after it.
    """
    write = RankFiles.write
    late = set()

    def write_beside(rank, answers, documents):
        for chunk, group in documents.items():
            path = journal_path(rank.folder, chunk.index)
            if path.exists() is has_begun and chunk.index not in late:
                late.add(chunk.index)
                lines = [replace(one, document=b'{"id":"late"}').to_line() for one in group]
                with path.open("ab") as journal:
                    journal.write(b"".join(lines))
        write(rank, answers, documents)

    monkeypatch.setattr(RankFiles, "write", write_beside)
    server.release()
    run_job(tmp_path, server, 60)
    assert late
    assert_whole(tmp_path)


def test_a_process_that_was_taken_over_while_it_looked_at_the_output_removes_nothing(
    tmp_path, server, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    folder = tmp_path / "checkpoints/00000"
    prepare = LocalTarget.prepare
    staged = []

    def prepare_and_lose(target):
        prepare(target)
        RunClaim(folder, RunIdentity(read_run(folder / "run.json")), accept_changes=True).take()
        target.staging.mkdir(parents=True, exist_ok=True)
        staged.append(target.staging / "of the new owner")
        staged[0].touch()

    monkeypatch.setattr(LocalTarget, "prepare", prepare_and_lose)
    with pytest.raises(Fenced):
        run_job(tmp_path, server, 1)
    assert staged[0].exists()
