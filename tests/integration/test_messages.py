"""What goes wrong is said in one clear message, with an exit code, and without losing or completing anything."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.commands import Command
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job


@pytest.fixture
def job(here: Path, server: FakeServer) -> Path:
    """A job that works, in the working directory."""
    write_job(here, job_yaml(ENDPOINT.replace("URL", server.url)), [f"text {n}" for n in range(5)])
    return here


def refused(job: Path, command: Command, *arguments: str, code: int = 1) -> str:
    """Runs the job, which must fail; gives what it said last."""
    said = command("run", "job.yaml", *arguments, code=code)
    assert "Traceback" not in said.err
    assert not list(job.glob("logs/completions/*"))
    return said.error


def test_a_missing_input_folder_is_named(job: Path, command: Command) -> None:
    assert "pipeline[0] JsonlReader: data_folder" in refused(job, command, "--pipeline.0.data_folder=nowhere", code=2)


def test_a_full_disk_below_the_logs_is_named(job: Path, command: Command) -> None:
    (job / "logs").mkdir()
    (job / "logs" / "executor.json").symlink_to("/dev/full")
    message = refused(job, command)
    assert f"No space left on device: logging_dir {job / 'logs'}" in message
    assert "Free some space and run the same command again" in message


def test_logs_that_cannot_be_written_are_named(job: Path, command: Command) -> None:
    (job / "logs").mkdir()
    (job / "logs" / "executor.json").symlink_to("/proc/sys/kernel/version")  # not even root may write it
    message = refused(job, command)
    assert f"{job / 'logs' / 'executor.json'} (in logging_dir): " in message
    assert "choose another logging_dir, and run the same command again" in message


@pytest.mark.matrix
@pytest.mark.parametrize("call", ["exists", "open"])
def test_a_checkpoint_of_another_user_is_named(
    call: str, job: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("run", "job.yaml")
    path = job / "checkpoints" / "00000" / "run.json"
    works = getattr(Path, call)

    def closed(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return works(self, *arguments, **named)

    monkeypatch.setattr(Path, call, closed)  # as the system does; root may look everywhere
    said = command("run", "job.yaml", code=1).err
    assert f"error: {path}: permission denied. Checkpoints are private" in said
    assert "Run this command as the user who made them" in said
