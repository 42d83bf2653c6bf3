"""verify, repair and a run's own checks, with the output in a repository on the hub."""

from functools import partial
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import OWNER

FILES = ["part/00000_00000.jsonl", "part/00000_00001.jsonl", "part/00001_00000.jsonl"]
CARD = {"README.md": b"# About these data", "part/notes.txt": b"by hand"}


@pytest.fixture
def cli(job_on_hub, hub, command):
    hub.put("org/data", CARD)

    def run(*arguments, code=0):
        said = command(*arguments, code=code)
        assert hub.token not in said
        return said

    return run


@pytest.fixture
def run(cli):
    return partial(cli, "run", "job.yaml")


@pytest.mark.slow
def test_files_to_redo_are_removed_in_one_commit(cli, hub, run):
    run()
    before = hub.files("org/data")
    hub.put("org/data", {name: before[name] + b"more" for name in (FILES[0], FILES[2])})
    commits = len(hub.commits("org/data"))
    hub.fail(
        "commit", None, after_effect=True
    )  # and the commit of which nobody learns is not made again
    cli("repair", "checkpoints", "--logging-dir", "logs")
    (removal,) = hub.commits("org/data")[commits:]
    assert removal.title == "Remove 2 files: datatrove-ckpt repair"
    assert sorted(removal.deleted) == [FILES[0], FILES[2]]
    run()
    assert hub.files("org/data") == before


@pytest.mark.matrix("ending", ["jsonl", "jsonl.gz"])  # the second is in LFS
def test_content_that_was_altered_is_found_by_the_hash_in_the_listing(cli, hub, ending, run):
    job = Path("job.yaml")
    text = job.read_text().replace("${chunk_index}.jsonl", f"${{chunk_index}}.{ending}")
    job.write_text(text.replace("compression: null", "compression: infer"))
    run()
    before = hub.files("org/data")
    (name,) = [name for name in before if name.startswith("part/00000_00000")]
    hub.put("org/data", {name: bytes([*before[name][:-1], before[name][-1] ^ 1])})
    hub.requests.clear()
    for command in (
        ["verify", "checkpoints"],
        ["run", "job.yaml"],
        ["verify", "checkpoints", "--full"],
    ):
        said = cli(*command, code=1)
        assert f"{Path(name).name} is altered" in said
    read = [one for one in hub.requests if one.kind == "resolve" and OWNER not in one.path]
    assert len(read) == 2  # of the others, once
    cli("repair", "checkpoints", "--logging-dir", "logs")
    run()
    assert hub.files("org/data") == before


@pytest.mark.slow
def test_commits_of_an_earlier_release_name_no_hash(cli, hub, run):
    run()
    for path in Path("checkpoints").glob("*/commits.jsonl"):
        commits = read_commits(path).values()
        for file in (file for commit in commits for file in commit.files):
            assert len(file.hub_hash) == 40
            file.hub_hash = ""
        path.write_bytes(b"".join(add_checksum(commit.to_json()) for commit in commits))
        assert b"hub_hash" not in path.read_bytes()
    content = hub.files("org/data")[FILES[0]]
    hub.put("org/data", {FILES[0]: bytes([*content[:-1], content[-1] ^ 1])})
    run()
    cli("verify", "checkpoints")
    said = cli("verify", "checkpoints", "--full", code=1)
    assert "00000_00000.jsonl is altered" in said


# a repository that vanishes after files were committed there -------------------------------------


def make_incomplete():
    """As a job that was stopped after its files were committed."""
    for marker in Path("logs/completions").iterdir():
        marker.unlink()


@pytest.mark.matrix("complete", [True, False])
def test_a_repository_that_vanished_is_not_made_anew(cli, hub, server, monkeypatch, complete, run):
    """verify has one line if it cannot list them."""
    run()
    for token in (hub.expired_token, hub.token):
        monkeypatch.setenv("HF_TOKEN", token)
        said = cli("verify", "checkpoints", code=1)
        assert "hf://datasets/org/data/part: cannot be listed" in said
        assert "hf_Fake" not in said
        hub.repos.clear()
    if not complete:
        make_incomplete()
    asked = len(server.payloads)
    said = run(code=1)
    if complete:
        assert "hf://datasets/org/data/part: cannot be listed" in said
        assert "Make the bucket, repository or branch" in said
    else:
        assert "there is no dataset repository org/data, or it is hidden from this token" in said
        assert "restore it, if the run had it" in said
    assert not hub.repos
    assert len(server.payloads) == asked
