"""What people change between two runs of a command: exit code 0 means that every document is in the
output.
"""

import json
import shutil
from pathlib import Path

import pytest
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt import LocalPipelineExecutor as OurExecutor
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder.earlier_runs import check_inputs_unchanged
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, rows, runner
from tests.yaml_jobs import ENDPOINT, job_yaml, write_input, write_job

JOB = job_yaml(ENDPOINT, tasks=3) + "          records_per_chunk: 2\n"


@pytest.fixture(scope="module")
def server():

    def status(payload, times):
        content = payload["messages"][-1]["content"]
        return (
            400
            if content == "Say refused"
            else 401
            if "forbidden" in content or "Deny" in content
            else None
        )

    with FakeServer(status=status) as server:
        yield server


@pytest.fixture
def run(here, command, server):
    """Runs a job of three tasks with four documents each, in the working folder, and returns what
    was printed.
    """
    write_job(
        here,
        JOB.replace("URL", server.url),
        *([f"text {n}" for n in range(at, at + 4)] for at in (0, 4, 8)),
    )

    def execute(*arguments, code=0):
        server.asked.clear()
        server.payloads.clear()
        printed = command("run", "job.yaml", *arguments, code=code)
        return printed.out if code == 0 else printed.err

    execute.server = server
    return execute


def written():
    return sorted(row["id"] for row in rows(Path()))


def test_a_marked_task_whose_checkpoint_is_not_finished_runs(run):
    run("--executor.tasks=1", "--pipeline.0.limit=4")
    before = written()
    shutil.copytree("checkpoints", "saved")
    # An old copy of the folder: the second chunk is not committed yet.
    log = Path("checkpoints/00000/commits.jsonl")
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    Path("checkpoints/last_chunk/00000.txt").write_text("0\n")
    Path("checkpoints/00000/lock").touch()
    Path("output/00000_00001.jsonl").unlink()
    line = run("--executor.tasks=1", "--pipeline.0.limit=4")
    assert "4 of 4 documents are in 2 files" in line
    assert written() == before
    assert len(run.server.asked) == 2


def test_markers_stay_until_all_checks_have_passed(run):
    run()
    shutil.copy("output/00000_00000.jsonl", "output/00000_00007.jsonl")
    Path("checkpoints/00001/lock").touch()  # not finished
    for _ in range(2):
        assert "no commit of task 0 names: 00000_00007.jsonl" in run(code=1)
    assert len(list(Path("logs/completions").iterdir())) == 3
    Path("output/00000_00007.jsonl").unlink()
    assert "12 of 12 documents" in run()


OTHER_MODEL = "--pipeline.1.config.model_name_or_path=other"


def test_another_job_on_a_finished_one_is_refused_once_with_both_values(run):
    run()
    before = written()
    for change, field, said in (
        ("--executor.tasks=6", "tasks: 3 -> 6", "Finished with the old settings: tasks 0, 1, 2."),
        (OTHER_MODEL, 'model: "fake" -> "other"', "All tasks"),
    ):
        error = run(change, "--pipeline.1.accept_changes=true", code=1)
        assert error.count(field) == 1
        assert "(tasks 0, 1, 2) were made by another run" in error
        assert said in error
        assert not run.server.asked
    assert written() == before
    assert "12 of 12 documents" in run()


def finish_one_task(run):
    """Task 0 is finished, task 1 has half of its documents, task 2 has not started."""
    fails = Path("input/1.jsonl")
    whole = fails.read_text()
    fails.write_text("\n".join([*whole.splitlines()[:3], '{"id": "id 7", "text": "refused"}']))
    assert "refused" in run("--executor.ranks_at_once=1", code=1)
    fails.write_text(whole)
    assert sorted(path.name for path in Path("logs/completions").iterdir()) == ["00000"]


def test_accepted_changes_apply_to_the_tasks_that_are_not_finished(run, command):
    finish_one_task(run)
    error = run(OTHER_MODEL, code=1)
    assert 'model: "fake" -> "other"' in error
    assert "Finished with the old settings: task 0. Go on with the old settings, or" in error
    line = run(OTHER_MODEL, "--pipeline.1.accept_changes=true")
    assert "12 of 12 documents" in line
    assert {payload["model"] for payload in run.server.payloads} == {"other"}
    assert "12 of 12 documents" in run(OTHER_MODEL), "what was accepted once is not refused later"
    mixed = 'accept_changes: model was "fake" for some documents, and "other" for others.\n'
    assert mixed in command("verify", "checkpoints").out
    assert 'model: "other" -> "fake"' in run(code=1)


def test_an_attempt_that_kept_nothing_refuses_no_other_settings(run):
    run("--pipeline.1.rollout_fn.prompt=Deny {text}", code=1)
    assert Path("checkpoints/00000/run.json").exists()
    line = run("--executor.tasks=2", "--pipeline.1.records_per_chunk=3")
    assert "12 of 12 documents are in 5 files" in line


def test_without_a_checkpoint_the_number_of_tasks_is_compared_too(run):
    none = "--pipeline.1.checkpoints_local_dir=null"
    run(none)
    assert "tasks: 3 -> 2" in run(none, "--executor.tasks=2", code=1)
    run(none)


@pytest.mark.slow
def test_a_step_that_would_get_no_documents_is_refused_before_anything_is_asked(run):
    text = Path("job.yaml").read_text()
    reader = "      - class_path: JsonlReader\n        init_args: {data_folder: input}\n"
    start = text.index("      - class_path: InferenceRunner")
    another = (
        text[start:]
        .replace("output_folder: output", "output_folder: other")
        .replace(": checkpoints", ": second")
    )
    writer = "      - {class_path: JsonlWriter, init_args: {output_folder: copies}}\n"
    for later, name in ((another, "InferenceRunner"), (writer, "JsonlWriter")):
        Path("job.yaml").write_text(text + later)
        error = run(code=2)
        assert (
            f"pipeline[2] {name} would get no documents: pipeline[1] InferenceRunner passes none on"
            in error
        )
        assert "second executor" in error
    Path("job.yaml").write_text(text.replace(reader, ""))
    assert "pipeline[0] InferenceRunner would get no documents. Put a reader" in run(code=2)
    assert not run.server.asked
    Path("job.yaml").write_text(text + reader + another)
    assert run().count("12 of 12 documents") == 2
    # Finished, and compared with the steps since the runner before.
    assert run().count("12 of 12 documents") == 2


def drop_odd(data, rank, world_size):
    return (document for document in data if int(document.id[3:]) % 2 == 0)


class Hidden(PipelineStep):
    """It leaves no trace in the generators."""

    name, type = "Hidden", "test"

    def run(self, data, rank=0, world_size=1):
        return data


KEEPS_FIRST, KEEPS_ALL = [
    lambda data, rank, world_size: (document for document in data if document.id == "id 0"),
    lambda data, rank, world_size: (document for document in data if document.id != "none"),
]


def executor_of(folder, server, *steps):
    pipeline = [JsonlReader(str(folder / "input")), *steps, runner(folder, server)]
    return OurExecutor(pipeline, tasks=2, workers=1, logging_dir=str(folder / "logs"))


@pytest.mark.matrix(
    "then, now, shown",
    [
        ([drop_odd], [], "then: reader -> drop_odd\n  now: reader\n"),
        ([drop_odd], [Hidden()], "then: reader -> drop_odd\n  now: reader -> tests.Hidden"),
        ([KEEPS_FIRST], [KEEPS_ALL], "<lambda>, code: "),
    ],
    ids=["gone", "a class", "lambda"],
)
def test_other_plain_functions_are_refused_for_finished_ranks(tmp_path, server, then, now, shown):
    write_input(tmp_path, ["text 0", "text 1"], ["text 2", "text 3"])
    executor_of(tmp_path, server, *then).run()
    with pytest.raises(
        CheckpointMismatch,
        match=r"The steps before InferenceRunner have changed since task",
    ):
        executor_of(tmp_path, server, *now).run()
    with pytest.raises(CheckpointMismatch) as caught:
        check_inputs_unchanged(RunPlan(executor_of(tmp_path, server, *now)))
    assert shown in str(caught.value)
    assert "Put the steps back" in str(caught.value)
    executor_of(tmp_path, server, *then).run()


# the number of tasks is the run's, not the rank's ------------------------------------------------


class Nodes:
    """Each rank runs on an empty disk; mirror and output are shared. datatrove would skip the ranks
    that are done.
    """

    def __init__(self, folder, server):
        self.folder = folder
        self.mirror = folder / "mirror"
        self.server = server

    def run(self, rank, tasks, **changes):
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self.server.asked.clear()
        step = runner(
            self.folder,
            self.server,
            checkpoints_remote_dir=str(self.mirror),
            mirror_seconds=1000,
            **changes,
        )
        step.run(documents(12)[rank::tasks], rank, tasks)


@pytest.fixture
def nodes(tmp_path, server):
    return Nodes(tmp_path, server)


@pytest.mark.matrix("kept", [True, False])
def test_another_number_of_tasks_is_refused_though_the_finished_rank_is_on_another_node(
    nodes, kept
):
    nodes.run(0, 1)
    if not kept:
        (nodes.mirror / "job.json").unlink()
    for rank in (1, 2, 3):
        with pytest.raises(CheckpointMismatch, match="tasks: 1 -> 4") as refused:
            nodes.run(rank, 4, accept_changes=True)
        assert not nodes.server.asked
    assert str(nodes.mirror) in str(refused.value)
    assert (
        "Go on with 1 task (tasks: 1). To start over, choose another checkpoints_local_dir"
        in str(refused.value)
    )
    assert "set finished_from to the old output_folder and checkpoints_local_dir" in str(
        refused.value
    )


def test_another_model_is_refused_unless_it_is_accepted(nodes):
    nodes.run(0, 2)
    other = {"config": {"model_name_or_path": "other"}}
    with pytest.raises(
        CheckpointMismatch,
        match=r'\(task 0\) were made by another run:\n  model: "fake" -> "other"',
    ):
        nodes.run(1, 2, **other)
    assert not nodes.server.asked
    nodes.run(1, 2, accept_changes=True, **other)
    nodes.run(1, 2, **other)
    accepted = json.loads((nodes.mirror / "job.json").read_text())["accepted_changes"]
    assert [(change["field"], change["old"], change["new"]) for change in accepted] == [
        ("model", "fake", "other")
    ]


def test_ranks_that_hold_nothing_refuse_nobody(nodes):
    shutil.rmtree(nodes.folder / "checkpoints", ignore_errors=True)
    step = runner(
        nodes.folder, nodes.server, checkpoints_remote_dir=str(nodes.mirror), mirror_seconds=1000
    )
    step.run([], 0, 1)
    nodes.run(1, 4)
    assert json.loads((nodes.mirror / "job.json").read_text())["tasks"] == 4
