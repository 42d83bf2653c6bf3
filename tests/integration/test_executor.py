"""``datatrove_ckpt.LocalPipelineExecutor`` in a program: with one worker and with several."""

import json
import os
import signal
import sys
from pathlib import Path

import dill
import pytest
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.executor.base import ExecutorJSONEncoder
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.errors import (
    CkptError,
    UnexpectedExit,
    WorkerDied,
)
from tests import processes
from tests.yaml_jobs import write_tasks


class Step(PipelineStep):
    """Does something with the rank, and passes documents on."""

    name = "step"

    def __init__(self, folder, fails=""):
        super().__init__()
        self.folder = str(folder)
        self.fails = fails
        self.ran = []

    def run(self, data, rank=0, world_size=1):
        with Path(self.folder, f"pid {rank}").open("a") as file:
            file.write(f"{os.getpid()} {len(self.ran)}\n")
        self.ran.append(rank)
        self.stat_update("ranks")
        if rank == 1 and self.fails == "exit":
            raise SystemExit(0)
        if rank == 1 and self.fails == "error":
            raise ValueError("no such row")
        if rank == 1 and self.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        yield from data or ()


def attempts(folder):
    """By rank: process id, and how many ranks this copy of the step had seen."""
    return {
        int(path.name.split()[1]): [
            [int(word) for word in line.split()] for line in path.read_text().splitlines()
        ]
        for path in folder.glob("pid *")
    }


def job(folder, tasks=1, workers=1, fails="", kind=LocalPipelineExecutor, **settings):
    """An executor of one step, in a folder that is made."""
    folder.mkdir(exist_ok=True)
    logs = str(folder / "logs")
    return kind([Step(folder, fails)], tasks, workers, logs, start_method="fork", **settings)


def completed(folder):
    return {int(path.name) for path in (folder / "logs/completions").glob("*")}


@pytest.mark.matrix("workers", [1, 2])
def test_each_rank_runs_once_with_a_copy_of_the_pipeline_of_its_own(tmp_path, workers):
    executor = job(tmp_path, 5, workers)
    stats = executor.run()
    tried = attempts(tmp_path)
    assert sorted(tried) == list(range(5))
    assert [seen for rank in range(5) for _, seen in tried[rank]] == [0] * 5
    pids = {pid for rank in tried.values() for pid, _ in rank}
    assert (pids == {os.getpid()}) if workers == 1 else (os.getpid() not in pids and len(pids) <= 2)
    assert completed(tmp_path) == set(range(5))
    assert stats is not None
    saved = json.loads((tmp_path / "logs/stats.json").read_text())
    assert saved[0]["stats"]["ranks"] == 5
    assert executor.run() is None
    assert attempts(tmp_path) == tried


def test_it_runs_the_local_tasks_that_are_not_complete(tmp_path):
    executor = job(tmp_path, 8, 2, local_tasks=4, local_rank_offset=3)
    executor.mark_rank_as_completed(4)
    executor.run()
    assert sorted(attempts(tmp_path)) == [3, 5, 6]


def test_the_last_of_several_machines_writes_the_statistics_of_all(tmp_path):
    for rank in (2, 0, 1):
        job(tmp_path, 3, local_tasks=1, local_rank_offset=rank).run()
        assert (tmp_path / "logs/stats.json").exists() == (rank == 1)
    assert json.loads((tmp_path / "logs/stats.json").read_text())[0]["stats"]["ranks"] == 3


@pytest.mark.matrix(
    "fails, error",
    [
        ("error", ValueError),
        ("exit", UnexpectedExit),
        ("kill", WorkerDied),
    ],
)
def test_a_rank_that_fails_is_an_error_and_not_complete(tmp_path, fails, error):
    executor = job(tmp_path, 3, 2, fails, max_rank_attempts=3)
    with pytest.raises(error) as caught:
        executor.run()
    assert 1 not in completed(tmp_path)
    if fails == "kill":
        assert completed(tmp_path) == {0, 2}
        assert len(attempts(tmp_path)[1]) == 3
        assert "1 of 3 tasks were given up" in str(caught.value)
        assert "task 1: its worker process was ended by SIGKILL" in str(caught.value)


@pytest.mark.matrix("first", [LocalPipelineExecutor, DatatroveExecutor])
def test_what_it_depends_on_runs_first(tmp_path, first):
    job(tmp_path, depends=job(tmp_path / "first", 2, kind=first)).run()
    assert sorted(attempts(tmp_path / "first")) == [0, 1]
    assert sorted(attempts(tmp_path)) == [0]


def test_it_has_datatroves_arguments_pickle_and_json(tmp_path):
    arguments = ([Step(tmp_path)], 4, 2, str(tmp_path / "logs"), None, False, "spawn", 2, 1, 3)
    ours, theirs = LocalPipelineExecutor(*arguments), DatatroveExecutor(*arguments)
    copy = dill.loads(dill.dumps(ours))
    assert (copy.tasks, copy.workers, copy.local_tasks, copy.max_rank_attempts) == (4, 2, 2, 2)
    as_json = [
        json.loads(json.dumps(executor, cls=ExecutorJSONEncoder)) for executor in (ours, theirs)
    ]
    assert as_json[0] == {**as_json[1], "max_rank_attempts": 2, "ranks_at_once": None}
    assert isinstance(ours, DatatroveExecutor)


def test_a_dependency_that_failed_here_is_not_waited_for(tmp_path):
    first = job(tmp_path / "first", 2, fails="error")
    with pytest.raises(ValueError, match="no such row"):
        first.run()
    with pytest.raises(CkptError, match="1 of 2 tasks are not complete; task 1 is"):
        job(tmp_path, depends=first).run()


OTHER_CODE = """
import sys
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.readers import JsonlReader
import prompts

if __name__ == "__main__":
    url, prefix, method = sys.argv[1:]
    prompts.PREFIX = prefix
    runner = InferenceRunner(
        prompts.ask,
        InferenceConfig("endpoint", "m", endpoint_url=url),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
    )
    reader = JsonlReader("input", add_file_path=False)
    LocalPipelineExecutor([reader, runner], 3, 3, "logs", start_method=method).run()
"""
PROMPTS = """
PREFIX = "default"

async def ask(document, generate):
    return (await generate({"messages": [{"role": "user", "content": f"{PREFIX} {document.text}"}]})).text
"""


def run_script(folder, *arguments):
    return processes.run([sys.executable, "script.py", *arguments], cwd=folder, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_workers_with_other_values_than_the_script_are_noticed_before_anything_is_asked(
    tmp_path, server
):
    write_tasks(tmp_path, 3, 5)
    (tmp_path / "script.py").write_text(OTHER_CODE)
    (tmp_path / "prompts.py").write_text(PROMPTS)
    done = run_script(tmp_path, server.url, "of the command line", "spawn")
    assert done.returncode == 1
    assert not server.payloads
    said = "Worker processes have other code or values than their starter:\n"
    assert said in done.stderr
    assert 'uses.prefix: "of the command line" -> ' in done.stderr
    assert "set start_method='fork'" in done.stderr
    done = run_script(tmp_path, server.url, "of the command line", "fork")
    assert done.returncode == 0, done.stderr
    assert all(question.startswith("of the command line") for question in server.asked)


CELLS = """
import sys
import types

notebook = types.ModuleType("__main__")  # that of a kernel has no file
notebook.__dict__["__builtins__"] = __builtins__
sys.modules["__main__"] = notebook
exec('''
import sys
import datatrove_ckpt

LENGTH = 3
API_KEY = "sk-" + "4f9a" * 8

def begin_of(text):
    assert API_KEY
    return text[:LENGTH]

async def rollout(document, generate):
    payload = {"messages": [{"role": "user", "content": begin_of(document.text)}]}
    return (await generate(payload)).text

datatrove_ckpt.run(
    run_folder="job", input=["abcd", "efgh"], rollout=rollout, model="m", tasks=2, workers=2,
    endpoint=sys.argv[1],
)
''', vars(notebook))
"""


def test_workers_of_a_notebook_have_the_names_of_its_cells(tmp_path, server):
    (tmp_path / "script.py").write_text(CELLS)
    done = run_script(tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    assert sorted(server.asked) == ["abc", "efg"]
    secret = b"4f9a4f9a"
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()
    ] == []
