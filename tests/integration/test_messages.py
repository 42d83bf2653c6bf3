"""What goes wrong is said in one clear message, with an exit code, and without losing or completing
anything.
"""

import errno
from pkgutil import resolve_name

import pytest

from tests.yaml_jobs import endpoint, job_yaml, write_job


@pytest.fixture
def job(here, server):
    """A job that works, in the working directory."""
    write_job(here, job_yaml(endpoint(server)), [f"text {n}" for n in range(5)])
    return here


def refused(job, command, *arguments, code=1):
    """Runs the job, which must fail; gives what it said last."""
    said = command("run", "job.yaml", *arguments, code=code)
    assert "Traceback" not in said.err
    assert not list(job.glob("logs/completions/*"))
    return said.error


def test_a_full_disk_below_the_logs_is_named(job, command):
    (job / "logs").mkdir()
    (job / "logs/executor.json").symlink_to("/dev/full")
    message = refused(job, command)
    assert f"Could not use {job / 'logs'} or {job / 'checkpoints'}: No space left" in message
    assert "Free some space and run the same command again" in message


@pytest.mark.matrix("call", ["pathlib.Path.exists", "builtins.open"])
def test_a_checkpoint_of_another_user_is_named(call, job, command, monkeypatch):
    command("run", "job.yaml")
    path = job / "checkpoints/00000/run.json"
    works = resolve_name(call)

    def closed(file, *arguments, **named):
        if str(file) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return works(file, *arguments, **named)

    monkeypatch.setattr(call, closed)  # as the system does; root may look everywhere
    said = command("run", "job.yaml", code=1).err
    assert f"{path}: Permission denied. Checkpoints are private" in said
    assert "run this command as the user who made them" in said
