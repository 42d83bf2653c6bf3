"""What is asked of the hub before anything is paid for: repository, token, branch, reachability;
and what it costs.
"""

from pathlib import Path

import pytest
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.interruptible_calls import check_access
from tests.jobs import documents, runner

FOLDER = HubFolder.parse("hf://datasets/org/data/part")


def refused(folder=FOLDER, private=None):
    """The message of a refusal; a single line, without a token."""
    with pytest.raises(OutputFailed) as caught:
        check_access(folder, private)
    said = str(caught.value)
    assert "\n" not in said
    assert "hf_Fake" not in said
    return said


# may the folder be written to --------------------------------------------------------------------


def test_a_token_that_may_only_read(hub, monkeypatch):
    hub.create_repo("org/data")
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    said = refused()
    assert said.startswith(
        "hf://datasets/org/data/part: cannot be written to: the hub answers 403, Forbidden: you must use a write token"
    )
    assert "The hub needs HF_TOKEN, or a login (hf auth login), with write access" in said


def test_no_token(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    said = refused()
    assert (
        "there is no token. Where the tasks run, export HF_TOKEN with one that may write to org/data, or run: hf auth"
        in said
    )
    assert not hub.requests


def test_an_answer_that_quotes_the_token_does_not_show_it(hub):
    hub.create_repo("org/data")
    hub.fail("auth-check", 403, message=f"no rights for {hub.token}")
    assert "no rights for ***" in refused()


# a repository that is missing --------------------------------------------------------------------


def test_a_bucket_that_is_missing(hub, log):
    bucket = HubFolder.parse("hf://buckets/org/raw/part")
    assert refused(bucket).endswith("or make it: hf buckets create org/raw --private")
    check_access(bucket, private=True)
    assert log.said("made the private bucket org/raw.")
    assert "first file shows whether" in check_access(bucket)


# the branch --------------------------------------------------------------------------------------


def test_a_missing_branch_stops_a_rank_before_the_first_request(tmp_path, hub, server):
    hub.create_repo("org/data")
    with pytest.raises(OutputFailed, match="Make the bucket, repository or branch"):
        run_rank(tmp_path, server, "hf://datasets/org/data@v2/part")
    assert not server.payloads


# a hub that is away ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_no_hang(hub, monkeypatch, policy):
    policy("HUB_LOOK", patience=0.1)
    monkeypatch.setattr("datatrove_ckpt.output.interruptible_calls._ANSWER_SECONDS", 0.2)
    hub.fail("auth-check", times=None, seconds=2)
    assert "no answer within" in refused()


# a runner, and a job -----------------------------------------------------------------------------


def run_rank(folder, server, output="hf://datasets/org/data/part"):
    """One rank of two whose output is on the hub, two documents to a file."""
    writer = JsonlWriter(output, "${rank}_${chunk_index}.jsonl", compression=None)
    runner(folder, server, output_writer=writer).run(documents(4), world_size=2)


@pytest.fixture
def job(job_on_hub, hub, command):
    """``datatrove-ckpt COMMAND job.yaml ...`` of a job with output on the hub."""
    return lambda name, *arguments, code=0: command(name, "job.yaml", *arguments, code=code)


def test_a_job_whose_repository_is_missing_ends_before_its_tasks(job, hub, server):
    said = job("run", code=1)
    assert "hf repos create org/data" in said.err
    assert "Traceback" not in said
    assert hub.token not in said
    assert not server.payloads
    assert [request.kind for request in hub.requests] == ["auth-check"]
    assert not Path("checkpoints").exists()


def test_a_writer_of_datatrove_has_its_repository_made_once_and_no_file_holds_the_token(
    job, hub, tmp_path, log
):
    text = Path("job.yaml").read_text()
    start = text.index("class_path: JsonlWriter")
    end = text.index("checkpoints_local_dir")
    writer = "class_path: HuggingFaceDatasetWriter\n            init_args: "
    writer += '{dataset: org/made, local_working_dir: work, output_filename: "data/${rank}_${chunk_index}.parquet"}'
    Path("job.yaml").write_text(f"{text[:start]}{writer}\n          {text[end:]}")
    assert "there is no dataset repository org/made yet; a run makes it private." in job(
        "doctor", "--all"
    )
    said = job("run")
    assert log.said("made the private dataset repository org/made.")
    assert hub.repo("org/made").private
    assert hub.asked["create"] == 1
    assert len(hub.files("org/made")) == 3 + 1  # README.md
    assert hub.token not in said
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if hub.token.encode() in path.read_bytes()] == []


# what it costs -----------------------------------------------------------------------------------


def counted(hub):
    """The kinds of the requests that count for the hub's limit of 1000 in 5 minutes."""
    return [
        request.kind for request in hub.requests if request.kind not in ("resolve", "lfs-upload")
    ]


@pytest.mark.slow
def test_a_rank_starts_with_few_requests_however_many_files_there_are(tmp_path, hub, server):
    """100 tasks that start together may make 1000 requests: 10 each."""
    hub.put(
        "org/data",
        {
            f"part/{rank:05d}_{chunk:05d}.jsonl": b"{}"
            for rank in range(2, 102)
            for chunk in range(34)
        },
    )
    hub.fail("preupload", 400, times=None)  # the rank has asked for all it wants by then
    with pytest.raises(OutputFailed):
        run_rank(tmp_path, server)
    assert counted(hub).count("tree") == 4
    assert len(counted(hub)) <= 10, " ".join(counted(hub))
