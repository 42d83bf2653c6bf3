"""A half-done run goes on with another number of tasks: a run in new folders, with ``finished_from`` of the old one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.commands import Command
from tests.datatrove_job import write_input
from tests.jobs import documents, runner
from tests.kept import edit
from tests.patience import until

from .test_finished_from import asked_first, expected, finished, rows_of, write_yaml

FILES = (5, 9, 1, 4, 8, 2, 7, 6, 3, 5, 4, 9, 2, 1, 6, 8)
NUMBER = sum(FILES)
RUN = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml", "--executor.workers=3"]


def run_until_killed(here: Path, answers: int, folder: str, **settings: Any) -> set[str]:
    """Kills a run after so many answers, with requests in flight. Returns the documents that were asked for."""
    before = finished(here / folder)
    with FakeServer(hold_after=answers) as server:
        write_yaml(here, server.url, folder=folder, **settings)
        process = processes.start(RUN, cwd=here)
        until(lambda: server.asked.total() > answers)
        # Some documents need two answers, and some are dropped.
        until(lambda: len(finished_by_now(here / folder) - before) >= answers // 3)
        processes.kill_session(process.pid)
        process.communicate()
        return {*asked_first(server)}


def finished_by_now(folder: Path) -> set[str]:
    """Of a run at work; empty where a journal went away, or got a line, while it was read."""
    try:
        return finished(folder)
    except (FileNotFoundError, json.JSONDecodeError):
        return set()


def rows(here: Path, folder: str) -> list[str]:
    """The rows of the output, without where they are in the input of this machine."""
    found = [row for path in (here / folder / "output").iterdir() for row in rows_of(path)]
    return sorted(json.dumps(row, sort_keys=True) for row in found)


@pytest.mark.real_process
@pytest.mark.matrix
@pytest.mark.parametrize("tasks", ["16", "3"])
def test_no_finished_document_is_asked_again_and_each_is_there_once(here: Path, command: Command, tasks: str) -> None:
    write_input(here, *FILES)
    run_until_killed(here, 36, "old", old="null", TASKS="8")
    # Some are in output files, others in the journals of unfinished chunks alone: no chunk may end just then.
    while finished(here / "old/output") == finished(here / "old"):
        run_until_killed(here, 6, "old", old="null", TASKS="8")
    in_output, done = finished(here / "old/output"), finished(here / "old")
    assert in_output
    assert in_output < done
    assert len(done) < NUMBER // 2
    first = run_until_killed(here, 20, "new", old="[old/output, old/checkpoints]", TASKS=tasks)
    assert not first & done
    done |= finished(here / "new")
    with FakeServer() as server:
        write_yaml(here, server.url, "[old/output, old/checkpoints]", TASKS=tasks)
        command("run", "job.yaml", "--executor.workers=3")
        assert not asked_first(server).keys() & done
        assert {*asked_first(server).values()} == {1}
        command("verify", "job.yaml", "--full")
        write_yaml(here, server.url, "null", "reference", TASKS="8")
        command("run", "job.yaml")
    assert rows(here, "new") == rows(here, "reference")
    assert Counter(json.loads(row)["id"] for row in rows(here, "new")) == expected(NUMBER)


def test_a_task_that_an_unreleased_build_has_resharded_is_refused(tmp_path: Path, server: FakeServer) -> None:
    """It would read other documents than it has read."""
    runner(tmp_path, server).run(documents(3))
    edit(tmp_path / "checkpoints/00000/run.json", reshards=1)
    server.asked.clear()
    with pytest.raises(CheckpointMismatch, match=r"reshards: 1 -> \(not set\)"):
        runner(tmp_path, server, accept_changes=True).run(documents(4))
    assert not server.asked


def test_a_start_with_another_number_of_tasks_on_the_same_folders_names_the_way(here: Path, command: Command) -> None:
    write_input(here, 2, 2)
    with FakeServer() as server:
        write_yaml(here, server.url, "null", TASKS="2")
        command("run", "job.yaml")
        said = command("run", "job.yaml", "--executor.tasks=3", code=None).err
    assert "tasks: 2 -> 3" in said
    assert "set finished_from to the old output_folder and checkpoints_local_dir: finished documents keep" in said
