"""Submitting to Slurm, where there is none: a fake sbatch.

The real one is in tests/real/test_slurm.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, checksummed_json
from datatrove_ckpt.checkpoint.commits import Commit
from datatrove_ckpt.checkpoint.identity import as_stored
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.executors.slurm import SlurmPipelineExecutor
from tests import golden

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/slurm.yaml")

# Answers as Slurm does, and keeps what it was given.
SBATCH = f"""#!{sys.executable}
import os, pathlib, sys
number = len(list(pathlib.Path("submitted").glob("*"))) + 7
if os.environ.get("REFUSED") == str(number):
    sys.exit("sbatch: error: invalid partition specified: gpu")
pathlib.Path("submitted", str(number)).write_text(" ".join(sys.argv[1:-1]) + os.environ["PYTHONPATH"] + "\\n"
    + pathlib.Path(sys.argv[-1]).read_text())
print(os.environ.get("PRINTED", "Submitted batch job {{number}}").format(number=number))
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """A folder with documents, on a machine that has sbatch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv(LAUNCH, "")  # which a submission sets
    for folder in ("bin", "submitted", "documents"):
        Path(folder).mkdir()
    Path("bin/sbatch").write_text(SBATCH)
    Path("bin/sbatch").chmod(0o755)
    Path("documents/a.jsonl").write_text('{"text": "Rain falls.", "id": "rain"}\n')
    return tmp_path


def run(*arguments):
    return main(["run", CONFIG, *arguments])


def mark_as_finished(tasks):
    """As the first tasks of a job leave their markers and their checkpoints."""
    commit = add_checksum(Commit(0, 0, DocumentCounts()).to_json()).decode()
    executor = build(read_config(CONFIG, [f"--executor.tasks={tasks}"]))
    runs = as_stored(executor.pipeline[1].identity(tasks).fields)
    for rank in range(3):
        for file, text in (
            (f"logs/completions/{rank:05d}", ""),
            (f"checkpoints/{rank:05d}/run.json", checksummed_json(runs).decode()),
            (f"checkpoints/{rank:05d}/commits.jsonl", commit),
            (f"checkpoints/{rank:05d}/shard.json", "{}"),
        ):
            path = Path("slurm_run", file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def scripted(printed):
    """The script that a dry run prints in comments, below the configuration."""
    lines = printed.partition("\n# What would be submitted:\n#\n")[2].splitlines()
    assert all(line.startswith("#") for line in lines)
    return "".join(f"{line[2:]}\n" for line in lines)


def directives(text):
    lines = [
        line.removeprefix("#SBATCH --")
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    ]
    return dict(line.partition("=")[::2] for line in lines)


def hold(section, text):
    golden.hold("slurm", section, text, CONFIG=CONFIG, ROOT=ROOT)


@pytest.mark.parametrize(
    "section, changes",
    [
        ("a dry run", ["--executor.tasks=30"]),
        # Each of two nodes has three tasks in turn.
        (
            "two nodes",
            [
                "--executor.nodes_per_task=2",
                "--executor.srun_args={mpi: none}",
                "--executor.tasks=50",
            ],
        ),
    ],
)
def test_a_dry_run_prints_the_script_and_leaves_nothing_behind(
    login_node, capsys, section, changes
):
    Path("bin/sbatch").unlink()
    before = sorted(login_node.rglob("*"))
    assert run("--dry-run", *changes) == 0
    hold(section, scripted(capsys.readouterr().out))
    assert sorted(login_node.rglob("*")) == before


def test_a_job_is_submitted_and_the_closing_line_says_how_to_look_at_it(login_node, capsys):
    assert run("--executor.tasks=100") == 0
    hold("submitted", capsys.readouterr().out)
    first, last = (Path("submitted", number).read_text() for number in "78")
    hold("what sbatch is given", first.partition("\n")[0])
    hold("the last job", last)
    for what in (CONFIG, "slurm_run", "slurm_run/checkpoints"):
        assert main(["status", what, "--all"]) == 0, "it waits in its queue"
        assert "A submitted job may wait in its queue." in capsys.readouterr().out
        assert main(["status", what, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == []


def test_tasks_that_are_dealt_out_must_all_end_well_before_the_last_job(login_node, capsys):
    """A retry is marked as complete before it has run."""
    assert run("--executor.nodes_per_task=2", "--executor.tasks=4") == 0
    hold("tasks that are dealt out", capsys.readouterr().out)
    hold("the last job of these", Path("submitted/8").read_text())


def test_workers_without_checkpoints_are_refused_before_they_are_submitted(login_node, capsys):
    assert run("--pipeline.1.checkpoints_local_dir=null") != 0
    assert "a worker needs" in capsys.readouterr().err
    assert not list(Path("submitted").iterdir())


def test_only_incomplete_tasks_are_submitted_and_in_the_end_none(login_node, capsys):
    mark_as_finished(tasks=5)
    assert run("--executor.tasks=5") == 0
    assert directives(Path("submitted/7").read_text())["array"] == "0-1"
    # While the first ones are in the queue.
    assert run("--executor.tasks=5", "--executor.workers=1") == 0
    mark_as_finished(tasks=3)
    assert run("--executor.tasks=3") == 0
    hold("incomplete tasks, and then none", capsys.readouterr().out)
    assert run("--executor.tasks=3", "--dry-run") == 0
    hold("a dry run without tasks", scripted(capsys.readouterr().out))


def test_a_variable_that_only_the_nodes_have_is_no_mistake(login_node, monkeypatch, capsys):
    monkeypatch.delenv("NODE_SCRATCH", raising=False)
    arguments = (
        "--pipeline.1.checkpoints_local_dir=$NODE_SCRATCH/kept",
        f"--pipeline.1.checkpoints_remote_dir={login_node}/mirror",
    )
    assert run(*arguments) == 0
    assert "Submitted job" in capsys.readouterr().out
    assert not list(login_node.glob("*NODE_SCRATCH*"))


def test_in_an_element_of_an_array_nothing_is_submitted_and_the_work_is_done(
    login_node, monkeypatch
):
    ran = []
    monkeypatch.setattr(SlurmPipelineExecutor, "run", lambda executor: ran.append(executor))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert run() == 1, "no task is complete"
    Path("bin/sbatch").unlink()  # a compute node may lack it
    assert run() == 1
    assert len(ran) == 2
    assert list(Path("submitted").iterdir()) == []


@pytest.mark.matrix(
    "number, there",
    [
        ("8", "Already submitted: job 7, without its check"),
        ("7", "Nothing was submitted."),
    ],
)
def test_a_refusal_of_sbatch_is_1_and_says_what_was_submitted(
    login_node,
    capfd,
    monkeypatch,
    number,
    there,
):
    monkeypatch.setenv("REFUSED", number)
    assert run() == 1
    said = capfd.readouterr().err
    assert "sbatch: error: invalid partition specified: gpu\n" in said
    assert f"error: sbatch ended with exit code 1; its message is above. {there}" in said
    assert said.endswith(f" The script is in {login_node}/slurm_run/logs/launch_script.slurm.\n")


@pytest.mark.matrix(
    "printed",
    [
        "Submitted batch job {number} on cluster big-2",
        "*** 42 nodes are free ***\nSubmitted batch job {number}\nCost: 12.5 SU (project 4711)",
        "{number};big",  # --parsable
        "Quota: 17\n{number}\n",
    ],
)
def test_the_job_id_is_found_among_the_words_of_a_site(login_node, capsys, monkeypatch, printed):
    monkeypatch.setenv("PRINTED", printed)
    assert run() == 0
    assert "--dependency=afterany:7\n" in Path("submitted/8").read_text()
    said = capsys.readouterr().out
    assert "Submitted job 7: " in said
    assert " Job 8 checks the run:" in said


def test_an_sbatch_that_prints_no_job_id_is_an_error_with_what_it_printed(
    login_node, capsys, monkeypatch
):
    monkeypatch.setenv("PRINTED", "")
    assert run() == 1
    assert (
        "error: sbatch printed no job id, but ''. Cancel this run's jobs (squeue"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("PRINTED", "Job {number} is ready")
    assert run("--executor.job_id_position=1") == 0
