"""``verify`` and ``repair`` take what ``status`` takes: a folder, its mirror, the YAML file of the
run.
"""

import json
import time
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.history import AttemptStart
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE
from datatrove_ckpt.mirror.manifests import Manifest, Version, VersionStore
from datatrove_ckpt.testing import outputs
from tests.mirrors import Job
from tests.yaml_jobs import endpoint, job_yaml, write_job


@pytest.fixture
def mirrored(tmp_path, server):
    """A finished job of two chunks, of which only the output and the mirror are left."""
    job = Job(tmp_path)
    job.run(server)
    job.lose_the_node()
    server.asked.clear()
    return job


def test_a_mirror_is_verified_and_repaired_and_the_next_node_makes_the_chunk_again(
    mirrored, server, command
):
    expected = outputs(mirrored.folder / "output")
    command("verify", mirrored.remote, "--full")
    assert command("repair", mirrored.remote) == "There is nothing to repair.\n"
    (mirrored.folder / "output/00000_chunk_00001.jsonl").unlink()
    text = command("verify", mirrored.remote, code=1)
    assert text.startswith("task 0, chunk 1: 00000_chunk_00001.jsonl is missing.")
    assert f"datatrove-ckpt repair {mirrored.remote}" in text
    assert (
        json.loads(command("verify", mirrored.remote, "--json", code=1))["checkpoints"]
        == mirrored.remote
    )
    said = command("repair", mirrored.remote, "--dry-run")
    assert said.splitlines()[-1] == "Nothing was done (--dry-run)."
    command("verify", mirrored.remote, code=1)
    text = command("repair", mirrored.remote)
    assert "datatrove-ckpt-" not in text  # no name of a temporary folder
    assert text.startswith(
        "task 0, chunk 1: take back its commit, to have 3 documents processed again"
    )
    text = command("verify", mirrored.remote, code=3)
    assert text.startswith(
        "task 0: is not finished: the run is active, ended early, or must be run again.\n"
    )
    mirrored.run(server)
    assert set(server.asked) == {f"text {n}{end}" for n in (3, 4, 5) for end in ("", " again")}
    assert outputs(mirrored.folder / "output") == expected
    command("verify", mirrored.remote, "--full")


def test_a_rank_that_runs_as_its_mirror_shows_is_not_repaired(mirrored, command):
    (mirrored.folder / "output/00000_chunk_00001.jsonl").unlink()
    versions = VersionStore(f"{mirrored.remote}/00000")
    newest = versions.all_versions()[-1]
    manifest = versions.read_manifest(newest)
    line = AttemptStart(at=time.time(), attempt=99, host="node7", pid=42).to_line()
    parts = [versions.put_object(f"{newest.nonce}-999999", line)]
    running = Manifest(manifest.run, {**manifest.files, "history.jsonl": parts}, [], False)
    versions.write_manifest(Version(newest.number + 1, newest.nonce), running)
    assert "error: task 0: pid 42 on node7 works on this task" in command(
        "repair", mirrored.remote, code=1
    )
    command("verify", mirrored.remote, code=1)  # as it was


def test_a_sealed_mirror_is_read_without_the_key_and_not_repaired(
    tmp_path, server, command, monkeypatch
):
    job = Job(tmp_path)
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, "0123456789abcdef0123456789abcdef")
    job.run(server)
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    command("verify", job.remote)
    assert f"{MIRROR_KEY_VARIABLE} is not set" in command("repair", job.remote, code=2)


def test_the_yaml_file_of_a_run_is_enough_to_repair_it(here, server, command):
    write_job(here, job_yaml(endpoint(server)), ["a", "b"])
    command("run", "job.yaml")
    expected = outputs(here / "output")
    command("verify", "job.yaml")
    Path("output/00000_00000.jsonl").unlink()
    text = command("repair", "job.yaml")
    assert "remove logs/completions/00000, so that the task runs again" in text
    assert text.endswith("Done. Run the pipeline again to process these chunks.\n")
    command("run", "job.yaml")
    assert outputs(here / "output") == expected
