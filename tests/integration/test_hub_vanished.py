"""A repository that vanishes after files were committed there: what run and doctor say, and the ways out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.hub import FakeHub
from tests.hub.job import Cli, hub_job

WRITER = """          class_path: HuggingFaceDatasetWriter
            init_args: {dataset: org/data, local_working_dir: work, output_filename: "${rank}_${chunk_index}.jsonl"}
"""


@pytest.fixture
def cli(
    tmp_path: Path,
    hub: FakeHub,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Cli]:
    hub.create_repo("org/data")
    with hub_job(tmp_path, hub, server, monkeypatch, capfd) as run:
        yield run


def make_incomplete() -> None:
    """As a job that was stopped after its files were committed."""
    for marker in Path("logs/completions").iterdir():
        marker.unlink()


ACCEPTED = "--pipeline.1.accept_changes=true"
GONE = "there is no dataset repository org/data, or this token may not see it, but this job has committed 3 files there"


@pytest.mark.parametrize("complete", [True, False])
def test_run_names_the_files_that_were_there_and_the_ways_out(
    cli: Cli, hub: FakeHub, server: FakeServer, complete: bool
) -> None:
    assert cli("run", "job.yaml")[0] == 0
    hub.repos.clear()
    if not complete:
        make_incomplete()
    asked = len(server.payloads)
    code, said = cli("run", "job.yaml")
    assert (code, GONE in said) == (1, True)
    assert "Restore it or rename it back, or set output_folder to its new name and accept_changes to true" in said
    assert "start anew with another checkpoints_local_dir and logging_dir" in said
    assert "repos create" not in said
    assert len(server.payloads) == asked


def test_doctor_says_the_same_once(cli: Cli, hub: FakeHub) -> None:
    assert cli("run", "job.yaml")[0] == 0
    hub.repos.clear()
    code, said = cli("doctor", "job.yaml")
    assert (code, said.count(GONE)) == (1, 1)
    assert "1 problem" in said
    assert "repos create" not in said


@pytest.mark.parametrize("complete", [True, False])
def test_a_writer_that_makes_repositories_does_not_make_one_in_its_place(
    cli: Cli, hub: FakeHub, complete: bool
) -> None:
    text = Path("job.yaml").read_text()
    start, end = text.index("          class_path: JsonlWriter"), text.index("          checkpoints_local_dir")
    Path("job.yaml").write_text(text[:start] + WRITER + text[end:])
    assert cli("run", "job.yaml")[0] == 0
    hub.repos.clear()
    if not complete:
        make_incomplete()
    for command in ("doctor", "run"):
        code, said = cli(command, "job.yaml")
        assert (code, GONE in said) == (1, True)
    assert not hub.repos


def test_a_branch_that_is_gone(cli: Cli, hub: FakeHub) -> None:
    hub.create_repo("org/data", branches=("v2",))
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("org/data/part", "org/data@v2/part"))
    assert cli("run", "job.yaml")[0] == 0
    hub.create_repo("org/data")
    make_incomplete()
    code, said = cli("run", "job.yaml")
    assert (code, "org/data has no branch 'v2', but this job has committed 3 files there" in said) == (1, True)


def test_a_repository_under_a_new_name_goes_on_with_that_name(cli: Cli, hub: FakeHub) -> None:
    assert cli("run", "job.yaml")[0] == 0
    hub.repos["dataset", "org/new"] = hub.repos.pop(("dataset", "org/data"))
    make_incomplete()
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("org/data", "org/new"))
    assert cli("run", "job.yaml", ACCEPTED)[0] == 0


def test_files_of_another_repository_are_not_counted(cli: Cli, hub: FakeHub) -> None:
    assert cli("run", "job.yaml")[0] == 0
    make_incomplete()
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("org/data", "org/misspelt"))
    code, said = cli("run", "job.yaml", ACCEPTED)
    assert (code, "hf repos create org/misspelt" in said, "has committed" in said) == (1, True, False)
