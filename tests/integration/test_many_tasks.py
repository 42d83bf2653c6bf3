"""A task that many tasks have gone before costs what the first one cost."""

import sys
import threading
from contextlib import contextmanager

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.executors.local import LocalPipelineExecutor
from datatrove_ckpt.process.screen import Screen
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, config, writer
from tests.ptys import Terminal
from tests.yaml_jobs import write_tasks

TASKS = 400
PART = 100


@contextmanager
def counted_calls():
    """Counts what this process calls, in Python and in C: its work, however fast the machine is."""
    calls = [0]

    def count(frame, event, argument):
        if event in ("call", "c_call"):
            calls[0] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", ["run", "run_worker"])
def test_the_last_of_many_tasks_in_a_terminal_do_not_more_than_the_first(
    tmp_path, monkeypatch, start
):
    write_tasks(tmp_path, TASKS, 1)
    at_ends = []
    complete = Screen.complete

    def note(screen, rank):
        complete(screen, rank)
        at_ends.append(calls[0])

    monkeypatch.setattr(Screen, "complete", note)
    with FakeServer() as server, Terminal() as terminal:
        drained = threading.Event()

        def drain():
            while not drained.wait(0.01):
                terminal.read()

        reader = threading.Thread(target=drain)
        reader.start()
        runner = InferenceRunner(
            ask,
            config(server),
            writer(tmp_path),
            checkpoints_local_dir=str(tmp_path / "checkpoints"),
        )
        executor = LocalPipelineExecutor(
            [JsonlReader(str(tmp_path / "input")), runner],
            tasks=TASKS,
            workers=1,
            logging_dir=str(tmp_path / "logs"),
        )
        with terminal.streams(), counted_calls() as calls:
            getattr(executor, start)()
        drained.set()
        reader.join()
    assert len(at_ends) == TASKS
    first = at_ends[PART] - at_ends[0]
    last = at_ends[-1] - at_ends[-1 - PART]
    print(first, last, last / first)
    assert last <= 1.2 * first
