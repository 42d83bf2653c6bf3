"""verify, repair and a run's own checks, with the output in a repository on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.output import hub_uploads
from datatrove_ckpt.output.owner import OWNER
from tests.hub.job import hub_job

FILES = ["part/00000_00000.jsonl", "part/00000_00001.jsonl", "part/00001_00000.jsonl"]
CARD = {"README.md": b"# About these data", "part/notes.txt": b"by hand"}


@pytest.fixture
def cli(
    tmp_path,
    hub,
    server,
    monkeypatch,
    capfd,
):
    monkeypatch.setattr(hub_uploads, "LAG_LOOKS", (0.0, 0.01))
    hub.put("org/data", CARD)
    with hub_job(tmp_path, hub, server, monkeypatch, capfd) as run:
        yield run


def remove(hub, *names):
    """By hand: a commit of somebody else."""
    repo = hub.repo("org/data")
    repo.commit("main", "by hand", "", hub.clock.now(), [], list(names))


def test_a_file_removed_by_hand_is_found_named_and_made_again(cli, hub, server):
    cli("run", "job.yaml")
    before = hub.files("org/data")
    remove(hub, FILES[1])
    said = cli("run", "job.yaml", code=1)
    assert "00000_00001.jsonl is missing" in said
    assert "datatrove-ckpt repair " in said
    said = cli("verify", "checkpoints", code=1)
    assert "00000_00001.jsonl is missing" in said
    commits = len(hub.commits("org/data"))
    cli("repair", "checkpoints", "--logging-dir", "logs")
    assert len(hub.commits("org/data")) == commits  # there was nothing to remove
    cli("run", "job.yaml")
    assert hub.files("org/data") == before
    cli("verify", "checkpoints", "--full")


@pytest.mark.slow
def test_files_to_redo_are_removed_in_one_commit(cli, hub):
    cli("run", "job.yaml")
    before = hub.files("org/data")
    hub.put("org/data", {name: before[name] + b"more" for name in (FILES[0], FILES[2])})
    commits = len(hub.commits("org/data"))
    hub.drop_answer("commit")  # and the commit of which nobody learns is not made again
    cli("repair", "checkpoints", "--logging-dir", "logs")
    (removal,) = hub.commits("org/data")[commits:]
    assert removal.title == "Remove 2 files: datatrove-ckpt repair"
    assert sorted(removal.deleted) == [FILES[0], FILES[2]]
    cli("run", "job.yaml")
    assert hub.files("org/data") == before


@pytest.mark.matrix
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])  # the second is in LFS
def test_content_that_was_altered_is_found_by_the_hash_in_the_listing(cli, hub, ending):
    job = Path("job.yaml")
    text = job.read_text().replace("${chunk_index}.jsonl", f"${{chunk_index}}.{ending}")
    job.write_text(text.replace("compression: null", "compression: infer"))
    cli("run", "job.yaml")
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
    read = [request.path for request in hub.asked("resolve") if OWNER not in request.path]
    assert len(read) == 2  # of the others, once
    cli("repair", "checkpoints", "--logging-dir", "logs")
    cli("run", "job.yaml")
    assert hub.files("org/data") == before


@pytest.mark.slow
def test_commits_of_an_earlier_release_name_no_hash(cli, hub):
    cli("run", "job.yaml")
    for path in Path("checkpoints").glob("*/commits.jsonl"):
        commits = read_commits(path).values()
        for file in (file for commit in commits for file in commit.files):
            assert len(file.hub_hash) == 40
            file.hub_hash = ""
        path.write_bytes(b"".join(seal(commit.to_json()) for commit in commits))
        assert b"hub_hash" not in path.read_bytes()
    content = hub.files("org/data")[FILES[0]]
    hub.put("org/data", {FILES[0]: bytes([*content[:-1], content[-1] ^ 1])})
    cli("run", "job.yaml")
    cli("verify", "checkpoints")
    said = cli("verify", "checkpoints", "--full", code=1)
    assert "00000_00000.jsonl is altered" in said


def beside(job):
    """The job with local folders of its own."""
    return job.replace("logging_dir: logs", "logging_dir: b/logs").replace(
        "dir: checkpoints", "dir: b/checkpoints"
    )


def test_two_jobs_with_equal_names_are_refused(cli, hub):
    cli("run", "job.yaml")
    text = Path("job.yaml").read_text()
    Path("b.yaml").write_text(beside(text))
    said = cli("run", "b.yaml", code=1)
    assert "belongs to another run" in said


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["repository", "token"])
def test_a_repository_that_cannot_be_listed_is_one_line(cli, hub, monkeypatch, what):
    cli("run", "job.yaml")
    if what == "repository":
        hub.repos.clear()
    else:
        monkeypatch.setenv("HF_TOKEN", hub.expired_token)
    said = cli("verify", "checkpoints", code=1)
    assert "hf://datasets/org/data/part cannot be listed" in said
    assert "hf_Fake" not in said


@pytest.mark.slow
def test_a_first_listing_that_fails_for_a_moment_is_made_again(cli, hub, policy):
    cli("run", "job.yaml")
    policy("HUB_LOOK", first=0.01)
    for command in (["run", "job.yaml"], ["verify", "checkpoints"]):
        hub.fail("tree", 520, times=2)  # most others, the client itself retries for some seconds
        assert cli(*command).count("Next attempt in") == 2


# a repository that vanishes after files were committed there -------------------------------------

WRITER = """          class_path: HuggingFaceDatasetWriter
            init_args: {dataset: org/data, local_working_dir: work, output_filename: "${rank}_${chunk_index}.jsonl"}
"""


def make_incomplete():
    """As a job that was stopped after its files were committed."""
    for marker in Path("logs/completions").iterdir():
        marker.unlink()


ACCEPTED = "--pipeline.1.accept_changes=true"
GONE = "there is no dataset repository org/data, or this token may not see it, but this job has committed 3 files there"


@pytest.mark.matrix
@pytest.mark.parametrize("complete", [True, False])
def test_run_names_the_files_that_were_there_and_the_ways_out(cli, hub, server, complete):
    cli("run", "job.yaml")
    hub.repos.clear()
    if not complete:
        make_incomplete()
    asked = len(server.payloads)
    said = cli("run", "job.yaml", code=1)
    assert GONE in said
    assert (
        "Restore it or rename it back, or set output_folder to its new name and accept_changes to true"
        in said
    )
    assert "start anew with another checkpoints_local_dir, output_folder and logging_dir" in said
    assert "repos create" not in said
    assert len(server.payloads) == asked


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
def test_a_writer_that_makes_repositories_does_not_make_one_in_its_place(cli, hub, complete):
    text = Path("job.yaml").read_text()
    start, end = (
        text.index("          class_path: JsonlWriter"),
        text.index("          checkpoints_local_dir"),
    )
    Path("job.yaml").write_text(text[:start] + WRITER + text[end:])
    cli("run", "job.yaml")
    hub.repos.clear()
    if not complete:
        make_incomplete()
    for command in ("doctor", "run"):
        said = cli(command, "job.yaml", code=1)
        assert GONE in said
    assert not hub.repos


@pytest.mark.slow
def test_a_repository_under_a_new_name_goes_on_with_that_name(cli, hub):
    cli("run", "job.yaml")
    hub.repos["dataset", "org/new"] = hub.repos.pop(("dataset", "org/data"))
    make_incomplete()
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("org/data", "org/new"))
    cli("run", "job.yaml", ACCEPTED)


def test_output_on_the_hub_is_shown_and_not_started_over(cli):
    cli("run", "job.yaml")
    said = cli("show", "checkpoints", "--n", "9").out
    assert [line for line in said.splitlines() if line.startswith("  text: ")] == [
        f"  text: {one}" for one in "abcd"
    ]
    assert (
        "To start over, move"
        not in cli("run", "job.yaml", "--pipeline.1.rollout_fn.prompt=New {text}", code=1).err
    )
