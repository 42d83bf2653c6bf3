"""``verify`` and ``repair`` take what ``status`` takes: a folder, its mirror, the YAML file of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.redaction import MIRROR_KEY_VARIABLE
from datatrove_ckpt.testing import FakeServer, outputs
from tests.mirrors import Job
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([*map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture
def mirrored(tmp_path: Path, server: FakeServer) -> Job:
    """A finished job of two chunks, of which only the output and the mirror are left."""
    job = Job(tmp_path)
    job.run(server)
    job.lose_the_node()
    server.asked.clear()
    return job


def test_a_mirror_is_verified_and_repaired_and_the_next_node_makes_the_chunk_again(
    mirrored: Job, server: FakeServer, said: Said
) -> None:
    expected = outputs(mirrored.folder / "output")
    assert said("verify", mirrored.remote, "--full")[0] == 0
    assert said("repair", mirrored.remote) == (0, "There is nothing to repair.\n")
    (mirrored.folder / "output/00000_chunk_00001.jsonl").unlink()
    code, text = said("verify", mirrored.remote)
    assert code == 1
    assert text.startswith("rank 0, chunk 1: 00000_chunk_00001.jsonl is missing.")
    assert f"datatrove-ckpt repair {mirrored.remote}" in text
    assert json.loads(said("verify", mirrored.remote, "--json")[1])["checkpoints"] == mirrored.remote
    assert said("repair", mirrored.remote, "--dry-run")[0] == 0
    assert said("verify", mirrored.remote)[0] == 1
    code, text = said("repair", mirrored.remote)
    assert (code, "datatrove-ckpt-" in text) == (0, False)  # no name of a temporary folder
    assert text.startswith("rank 0, chunk 1: take back its commit, to have 3 documents processed again")
    code, text = said("verify", mirrored.remote)
    assert (code, text.splitlines()[0]) == (
        3,
        "rank 0: is not finished: the run is active, or must be run again.",
    )
    mirrored.run(server)
    assert set(server.asked) == {f"text {n}{end}" for n in (3, 4, 5) for end in ("", " again")}
    assert outputs(mirrored.folder / "output") == expected
    assert said("verify", mirrored.remote, "--full")[0] == 0


@pytest.mark.slow
def test_a_node_that_still_has_the_folder_takes_the_repaired_version(
    tmp_path: Path, server: FakeServer, said: Said
) -> None:
    job = Job(tmp_path)
    job.run(server)
    expected = outputs(tmp_path / "output")
    server.asked.clear()
    (tmp_path / "output/00000_chunk_00000.jsonl").unlink()
    assert said("repair", job.remote)[0] == 0
    job.run(server)
    assert set(server.asked) == {f"text {n}{end}" for n in (0, 1, 2) for end in ("", " again")}
    assert outputs(tmp_path / "output") == expected


def test_a_sealed_mirror_is_read_without_the_key_and_not_repaired(
    tmp_path: Path, server: FakeServer, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, "0123456789abcdef0123456789abcdef")
    job.run(server)
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    assert said("verify", job.remote)[0] == 0
    code, text = said("repair", job.remote)
    assert code == 2
    assert f"{MIRROR_KEY_VARIABLE} is not set" in text


def test_the_yaml_file_of_a_run_is_enough_to_repair_it(
    tmp_path: Path, server: FakeServer, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, job_yaml(ENDPOINT.replace("URL", server.url)), ["a", "b"])
    assert main(["run", "job.yaml"]) == 0
    expected = outputs(tmp_path / "output")
    assert said("verify", "job.yaml")[0] == 0
    Path("output/00000_00000.jsonl").unlink()
    code, text = said("repair", "job.yaml")
    assert code == 0
    assert "remove logs/completions/00000, so that the executor runs it again" in text
    assert text.endswith("Done. Run the pipeline again to process these chunks.\n")
    assert main(["run", "job.yaml"]) == 0
    assert outputs(tmp_path / "output") == expected
