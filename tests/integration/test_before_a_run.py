"""What is asked before a run, on real folders: is all fit for it (doctor)."""

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from datatrove.executor import LocalPipelineExecutor
from datatrove.io import DataFolder
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.run_folder import checks, findings
from datatrove_ckpt.run_folder.checks import check_remote
from datatrove_ckpt.run_folder.input_checks import Sample
from datatrove_ckpt.run_folder.run_plan import RunPlan
from tests.jobs import runner
from tests.yaml_jobs import doctor_lines, job_yaml

JOB = job_yaml(
    "server_type: dummy, model_name_or_path: m, default_generation_params: {max_tokens: 100}",
    tasks=2,
    data="documents",
    output="out",
)


@pytest.fixture
def job(here):
    """The working directory: JOB, and two documents."""
    Path("documents").mkdir()
    lines = [json.dumps({"text": "Rain falls.", "id": f"rain {number}"}) for number in range(2)]
    Path("documents/a.jsonl").write_text("\n".join(lines))
    Path("job.yaml").write_text(JOB)
    return here


@pytest.fixture
def examined(job, command):
    """``datatrove-ckpt doctor job.yaml ...`` in the job's folder; gives what it says, by what was
    checked.
    """
    return lambda *arguments, code=0: doctor_lines(
        command("doctor", "job.yaml", "--all", *arguments, code=code).out
    )


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_fit_folders_have_no_problem_and_nothing_is_changed(examined, tmp_path):
    before = names(tmp_path)
    said = examined()
    for check in (
        "checkpoints, writable",
        "checkpoints, locks",
        "checkpoints, SQLite",
        "checkpoints, room",
        "logging_dir, reachable",
        "input, readable",
        "server, ready",
    ):
        assert said[check].startswith("ok: ")
    assert names(tmp_path) == before


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("override", "check", "says"),
    [
        ("--pipeline.1.output_writer.output_folder=job.yaml", "output, reachable",
         "problem: output_folder: '{}/job.yaml' cannot be a folder, because {}/job.yaml is a file"),
        ("--pipeline.1.checkpoints_local_dir=null", "checkpoints, folder", "warning: none: a run"),
        ("--pipeline.1.config={server_type: llamacpp, model_name_or_path: no.gguf}", "server, ready",
         "problem: model_name_or_path: there is no file no.gguf"),
    ],
)  # fmt: skip
def test_what_would_fail_is_named_with_what_to_do(examined, tmp_path, override, check, says):
    says = says.replace("{}", str(tmp_path))
    before = names(tmp_path)
    assert examined(override, code=int(says.startswith("problem")))[check].startswith(says)
    assert names(tmp_path) == before


def test_a_file_system_without_locks_is_a_warning(examined, monkeypatch):
    def flock(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert examined()["checkpoints, locks"].startswith("warning: the file system has no locks.")


def test_a_folder_that_never_answers_is_a_problem(examined, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(checks, "file_system", lambda folder: never.wait())
    monkeypatch.setattr(checks, "REMOTE_SECONDS", 0.5)
    said = examined(code=1)["checkpoints, reachable"]
    never.set()
    assert said.endswith("there was no answer within 0 s. Check the network, or the mount.")


# Remote folders ----------------------------------------------------------------------------------

TO_MEMORY = "--pipeline.1.output_writer.output_folder=memory://doctor/out"


def test_a_remote_output_is_tried_and_left_as_it_was(examined):
    said = examined(TO_MEMORY)
    assert said["output, reachable"].startswith("ok: memory:///doctor/out")
    assert MemoryFileSystem().find("/doctor") == []


def checks_of(step, folder, sample):
    plan = RunPlan(LocalPipelineExecutor([step], logging_dir=str(folder)))
    return list(findings.check_runner(plan.runners[0], sample))


def test_the_mirror_is_tried_where_a_step_has_one(tmp_path, server):
    step = runner(tmp_path, server)
    for remote, state in ((str(tmp_path / "mirror"), "ok"), ("nosuch://bucket", "problem")):
        step.checkpoints_remote_dir = remote
        found = checks_of(step, tmp_path, Sample())
        assert [check.state for check in found if check.subject == "mirror"] == [state]
    assert names(tmp_path) == []


def test_nothing_is_written_into_a_repository_where_each_write_is_a_commit(tmp_path):
    class Repository(DataFolder):
        def is_local(self):
            return False

        def resolve_paths(self, path):
            return "hf://datasets/me/answers"

    [found] = check_remote(Repository(str(tmp_path)))
    assert not any(tmp_path.iterdir())
    assert found.state == "warning"
    assert "is not tested: each write is a commit" in found.message
    assert "Use hf://buckets/" in found.message


# Beside a run ------------------------------------------------------------------------------------


def test_a_disk_with_too_little_room_is_a_problem(tmp_path, monkeypatch):
    free = [1 << 27, 100]

    def statvfs(path):
        return SimpleNamespace(f_bavail=free[0], f_frsize=1, f_files=1000, f_favail=free[1])

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert checks.check_room(tmp_path, 20).state == "ok"
    free[1] = 19
    assert checks.check_room(tmp_path, 20).state == "problem"
    free[:] = [1 << 25, 100]
    assert checks.check_room(tmp_path, 20).state == "problem"
