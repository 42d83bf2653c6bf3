"""What each launcher of ``LAUNCHERS`` does. A new one is one more row of ``KINDS``."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest

import datatrove_ckpt
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common.launchers import LAUNCHERS
from datatrove_ckpt.errors import CheckpointMismatch, CkptError
from datatrove_ckpt.process import job_launch
from tests.processes import write_program


class Kind(NamedTuple):
    """A launcher.

    ``place``: the setting of the short form that chooses it. ``given``: arguments that it needs.
    ``in_task``: what variables say in a task. ``of_task``: one that differs between tasks.
    ``executor``: what its steps are told. ``command``: submits the file that is its last word.
    """

    place: str
    given: dict[str, str]
    in_task: dict[str, str]
    of_task: str
    executor: str
    command: str = ""
    run_folder: str = "run"


KINDS = {
    "SlurmPipelineExecutor": Kind(
        "slurm",
        {"partition": "p"},
        {"SLURM_ARRAY_TASK_ID": "0", "SLURM_NODELIST": "here"},
        "SLURM_JOB_ID",
        "SLURM",
        "sbatch",
    ),
    "JobsPipelineExecutor": Kind(
        "jobs", {}, {job_launch.LAUNCH: "x"}, "JOB_ID", "JOBS", run_folder="memory://run"
    ),
}
HERE = {"LocalPipelineExecutor"}
OURS = sorted(LAUNCHERS.keys() - HERE - {"RayPipelineExecutor"})  # which is datatrove's
SUBMITTING = [name for name in OURS if LAUNCHERS[name].submits]
ROLLOUT = """
import os

TASK = os.environ.get("{}")

async def ask(document, generate):
    assert TASK != "none"
    return await generate({{"messages": [{{"role": "user", "content": document.text}}]}})
"""


@pytest.fixture
def kind(request, here, server, monkeypatch, empty_memory_file_system):
    """A launcher, in a folder with a job of one task for it."""
    kind = KINDS[request.param]
    module = f"launched_by_{kind.place}"
    Path(f"{module}.py").write_text(ROLLOUT.format(kind.of_task))
    Path("a.jsonl").write_text('{"text": "Rain falls.", "id": "rain"}\n')
    job = {
        "run_folder": kind.run_folder,
        "input": str(here / "a.jsonl"),
        "rollout": f"{module}.ask",
        "model": "m",
        "endpoint": server.url,
        "tasks": 1,
        kind.place: kind.given,
    }
    Path("job.yaml").write_text(json.dumps(job))
    write_program(here / "bin/scontrol", "#!/bin/sh\necho here\n")  # a list of nodes
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("DATATROVE_EXECUTOR", "")  # which a task sets
    return kind


def test_each_has_a_public_name_and_a_row():
    public = {name for name in datatrove_ckpt.__all__ if name.endswith("PipelineExecutor")}
    assert public == {*OURS, *HERE} == {*KINDS, *HERE}
    assert [name for name in SUBMITTING if not KINDS[name].command] == []


@pytest.mark.parametrize("name, kind", [(name, name) for name in OURS], indirect=["kind"])
def test_the_short_form_chooses_it_and_no_second_place(name, kind, command):
    assert read_config("job.yaml", [])["executor"]["class_path"] == name
    assert f"inside `{kind.place}`" in command("run", "job.yaml", "--workers=2", code=2)
    for other in {one.place for one in KINDS.values()} - {kind.place}:
        assert "give only one" in command("run", "job.yaml", f"--{other}={{}}", code=2)


@pytest.mark.parametrize("kind", OURS, indirect=True)
def test_its_tasks_know_where_they_run_and_each_goes_on_with_what_another_has_done(
    kind, server, monkeypatch
):
    for name, value in kind.in_task.items():
        monkeypatch.setenv(name, value)
    identities = []
    for task in ("17", "18"):
        monkeypatch.setenv(kind.of_task, task)
        executor = build(read_config("job.yaml", []))
        identities.append(executor.pipeline[-1].identity(1).stored)
        executor.run()
    assert identities[0] == identities[1]
    assert os.environ["DATATROVE_EXECUTOR"] == kind.executor
    assert server.asked == {"Rain falls.": 1}


@pytest.mark.parametrize("kind", OURS, indirect=True)
def test_it_refuses_changed_code_before_it_submits_and_names_doctor(kind, monkeypatch):
    for name in ("rain", "snow"):
        row = json.dumps({"text": name, "id": name}).encode()
        fsspec.filesystem("memory").pipe_file(f"/rows/{name}.jsonl", row)
    settings = ["--input=memory://rows", "--tasks=2"]
    code = Path(f"launched_by_{kind.place}.py")
    text = code.read_text().replace("return", "answer =")
    code.write_text(f"{text}    assert document.id != 'snow'\n    return answer\n")
    monkeypatch.delitem(sys.modules, code.stem, raising=False)  # of another test
    with monkeypatch.context() as task:
        for name, value in {**kind.in_task, kind.of_task: "17"}.items():
            task.setenv(name, value)
        with suppress(CkptError, SystemExit):
            build(read_config("job.yaml", settings)).run()
    code.write_text(code.read_text().replace('"user"', '"system"'))
    del sys.modules[code.stem]
    monkeypatch.setenv("HF_TOKEN", "any")
    with pytest.raises(CheckpointMismatch) as refused:  # and not because nothing can be submitted
        build(read_config("job.yaml", settings)).run()
    assert code.name in str(refused.value)
    assert "What that does to documents that are done: datatrove-ckpt doctor" in str(refused.value)


@pytest.mark.parametrize("kind", SUBMITTING, indirect=True)
def test_it_submits_what_a_dry_run_shows_and_nothing_without_its_command(
    kind, command, here, monkeypatch
):
    shown = command("run", "job.yaml", "--dry-run").out.partition("be submitted:\n#\n")[2]
    script = "".join(f"{line[2:]}\n" for line in shown.splitlines())
    write_program(
        here / "bin" / kind.command,
        f'#!/bin/sh\nfor last; do :; done\ncat "$last" >> {here}/submitted\necho 17\n',
    )
    command("run", "job.yaml")
    assert script in Path("submitted").read_text()
    assert len(script.splitlines()) > 5
    Path("bin", kind.command).rename("submitted")
    monkeypatch.setenv("PATH", f"{here}/bin")
    assert kind.command in command("run", "job.yaml", "--run_folder=other", code=2)
    assert not Path("other").exists()
