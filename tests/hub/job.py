"""A small job whose output goes to a repository on the fake hub, and the commands that people give for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.testing import FakeServer
from tests.hub import FakeHub
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

Cli = Callable[..., tuple[int, str]]
"""``datatrove-ckpt ARGUMENTS``; gives the exit code and the output."""


@contextmanager
def hub_job(
    folder: Path, hub: FakeHub, server: FakeServer, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Commands in a folder with job.yaml, a job of two tasks and three files of org/data."""
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    text = job_yaml(ENDPOINT.replace("URL", server.url), tasks=2, output="hf://datasets/org/data/part")
    write_job(folder, text + "          records_per_chunk: 2\n", ["a", "b", "c"], ["d"])

    def run(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        said = capture.readouterr()
        assert hub.token not in said.out + said.err
        assert "Traceback" not in said.out + said.err
        return code, said.out + said.err

    yield run
