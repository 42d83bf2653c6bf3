"""What goes wrong is said in one clear message, with an exit code, and without losing or completing
anything.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from datatrove_ckpt import LocalPipelineExecutor
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job


@pytest.fixture
def job(here, server):
    """A job that works, in the working directory."""
    write_job(here, job_yaml(ENDPOINT.replace("URL", server.url)), [f"text {n}" for n in range(5)])
    return here


def refused(job, command, *arguments, code=1):
    """Runs the job, which must fail; gives what it said last."""
    said = command("run", "job.yaml", *arguments, code=code)
    assert "Traceback" not in said.err
    assert not list(job.glob("logs/completions/*"))
    return said.error


def test_a_full_disk_below_the_logs_is_named(job, command):
    (job / "logs").mkdir()
    (job / "logs" / "executor.json").symlink_to("/dev/full")
    message = refused(job, command)
    assert f"No space left on device: logging_dir {job / 'logs'}" in message
    assert "Free some space and run the same command again" in message


def test_logs_that_cannot_be_written_are_named(job, command):
    (job / "logs").mkdir()
    # Not even root may write it.
    (job / "logs" / "executor.json").symlink_to("/proc/sys/kernel/version")
    message = refused(job, command)
    assert f"{job / 'logs' / 'executor.json'} (logging_dir): " in message
    assert "choose another logging_dir, and run the same command again" in message


@pytest.mark.parametrize(
    ("folder", "error", "says"),
    [
        (
            "closed/a",
            PermissionError(errno.EPERM, "Operation not permitted"),
            "choose another logging_dir",
        ),
        (
            "proc/logs",
            FileNotFoundError(errno.ENOENT, "No such file or directory"),
            "Choose another logging_dir",
        ),
    ],
)
def test_a_folder_that_cannot_be_made_is_that_of_its_setting(
    job,
    command,
    monkeypatch,
    folder,
    error,
    says,
):
    def closed(executor, indent=4):
        error.filename = str(job / folder)
        raise error

    monkeypatch.setattr(LocalPipelineExecutor, "save_executor_as_json", closed)
    message = refused(job, command, f"--executor.logging_dir={folder}/logs")
    assert f"{job / folder} (logging_dir): {error.strerror}" in message
    assert says in message
    assert "TMPDIR" not in message


def test_a_place_that_takes_no_folders_was_not_removed(job, command):
    message = refused(job, command, "--pipeline.1.checkpoints_local_dir=/proc/ck")
    assert (
        "Could not make the folder /proc/ck: No such file or directory. /proc takes no folders. Choose"
        in message
    )


def test_a_limit_on_file_sizes_is_named(job):
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))"
    script = (
        f"{limit}; from datatrove_ckpt.cli.main import main; sys.exit(main(['run', 'job.yaml']))"
    )
    # -B: it cuts bytecode.
    ended = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert (
        "No file of this process may have more than 8 kB: raise that limit (ulimit -f)"
        in ended.stderr
    )
    assert ended.returncode == 1


def test_of_many_tasks_the_terminal_shows_what_needs_somebody_and_the_logs_everything(
    here, server, command
):
    write_job(
        here,
        job_yaml(ENDPOINT.replace("URL", server.url), tasks=3, rollout="my_rollout.f"),
        *["abc"] * 3,
    )
    (here / "my_rollout.py").write_text(
        "async def f(document, generate):\n    assert document.id != 'id 4'\n"
        "    return await generate({'messages': [{'role': 'user', 'content': document.text}]})\n"
    )
    with (here / "job.yaml").open("a") as file:
        file.write("          on_document_error: dead_letter\n")
    said = command("run", "job.yaml", "--fail-on-dead-letters", code=1)
    assert [
        line.split(" - ")[1]
        for line in said.err.splitlines()
        if "|" in line and "SUCCESS" not in line
    ] == [
        "task 1: Document 'id 4' (number 1 of this task) becomes a dead letter: AssertionError, in my_rollout.py, "
        "line 2 (f)"
    ]
    assert said.err.count("SUCCESS") == said.err.count("Stats: All 3 tasks") == 1
    for rank in range(3):
        log = (here / "logs" / "logs" / f"task_{rank:05d}.log").read_text()
        assert "| INFO     | datatrove.utils.logging:log_pipeline" in log
        assert "| SUCCESS  | datatrove_ckpt.generation.rank:done:" in log
    assert said.error == "error: 1 dead letter is left (--fail-on-dead-letters)."
    command("run", "job.yaml", "--retry-dead-letters", "--fail-on-dead-letters", code=1)
    (here / "my_rollout.py").write_text(
        (here / "my_rollout.py").read_text().replace("id 4", "no id")
    )
    sys.modules.pop("my_rollout")
    accepted = "--pipeline.1.accept_changes=true"
    command("run", "job.yaml", "--retry-dead-letters", "--fail-on-dead-letters", accepted)


def test_the_statistics_of_a_single_task_are_on_the_terminal_once(job, command):
    assert command("run", "job.yaml").err.count("\U0001f4c9 Stats: ") == 1
    assert "Stats: Task 0" in (job / "logs" / "logs" / "task_00000.log").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("call", ["pathlib.Path.exists", "builtins.open"])
def test_a_checkpoint_of_another_user_is_named(call, job, command, monkeypatch):
    command("run", "job.yaml")
    path = job / "checkpoints" / "00000" / "run.json"
    works = resolve_name(call)

    def closed(file, *arguments, **named):
        if str(file) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return works(file, *arguments, **named)

    monkeypatch.setattr(call, closed)  # as the system does; root may look everywhere
    said = command("run", "job.yaml", code=1).err
    assert f"error: {path}: permission denied. Checkpoints are private" in said
    assert "Run this command as the user who made them" in said
