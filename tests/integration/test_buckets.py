"""Input, output, logging_dir and mirror in buckets of the hub, through the real client."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from datatrove.io import DataFolder
from datatrove.pipeline.writers import JsonlWriter
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import EntryNotFoundError

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.claims import claims
from datatrove_ckpt.claims.claims import ObjectClaims
from datatrove_ckpt.common.object_store import check_mirror
from datatrove_ckpt.errors import ConfigError, StorageFailed
from datatrove_ckpt.executors import local
from datatrove_ckpt.mirror.restore import restore
from datatrove_ckpt.testing import FakeServer
from tests.hub.server import Access
from tests.mirrors import Job
from tests.yaml_jobs import endpoint, job_yaml

BUCKET = "hf://buckets/org/job"


@pytest.fixture(autouse=True)
def _no_copies(temporary, monkeypatch):
    """Nothing is left in the temporary folder, whatever happens."""
    monkeypatch.setattr(local, "_MARKER_DELAYS", (0.0, 0.01, 0.01, 0.01, 0.01))
    yield
    # datatrove writes logs and markers through fsspec, which leaves one behind that cannot be
    # uploaded.
    left = [path.read_text() for path in temporary.iterdir()]
    assert not [text for text in left if "document 0 0" in text]


def put_input(hub, tasks, documents):
    files = {}
    for task in range(tasks):
        rows = [
            json.dumps({"id": f"{task} {n}", "text": f"document {task} {n}"})
            for n in range(documents)
        ]
        files[f"input/{task}.jsonl"] = "".join(row + "\n" for row in rows).encode()
    hub.put("org/job", files, kind="bucket")


def write_yaml(server, mirror=f"{BUCKET}/mirror", tasks=1):
    text = job_yaml(endpoint(server), tasks, f"{BUCKET}/input", f"{BUCKET}/output")
    text = text.replace("logging_dir: logs", f"logging_dir: {BUCKET}/logs")
    text += f"          records_per_chunk: 2\n          checkpoints_remote_dir: {mirror}\n          mirror_seconds: 0\n"
    Path("job.yaml").write_text(text)


@pytest.fixture
def job(hub, server, here):
    """A bucket with the input of a task, and job.yaml."""
    hub.create_repo("org/job", kind="bucket")
    put_input(hub, 1, 3)
    write_yaml(server)
    return hub


@pytest.fixture
def run(command):
    return partial(command, "run", "job.yaml")


def lose_the_node():
    shutil.rmtree("checkpoints", ignore_errors=True)
    HfFileSystem.clear_instance_cache()
    DataFolder.clear_instance_cache()


def output(hub):
    return {
        name: content
        for name, content in hub.files("org/job", kind="bucket").items()
        if name.startswith("output")
    }


def markers(hub):
    return [
        name for name in hub.files("org/job", kind="bucket") if name.startswith("logs/completions/")
    ]


@pytest.mark.slow
def test_a_plain_run_does_not_wait_for_one_that_was_killed_on_another_machine(job, server, run):
    put_input(job, 1, 1)
    there = f"{'0' * 40}-run"
    store = ObjectClaims(f"{BUCKET}/logs/claims", there, 0.0)
    lose_the_node()
    said = run("--worker", code=1).error
    assert "start each machine with run --worker" in said
    assert server.asked.total() == 0
    run()
    assert server.asked.total() == 1
    store.close()


@pytest.mark.slow
def test_workers_share_a_job_in_a_bucket_and_leave_no_claims(job, server, monkeypatch, run):
    put_input(job, 2, 3)
    write_yaml(server, tasks=2)
    monkeypatch.setattr(claims, "_HUB_SETTLE_SECONDS", 0.0)
    assert "This worker has completed 2 tasks" in run("--worker")
    assert not [name for name in job.files("org/job", kind="bucket") if "/claims/" in name]
    lose_the_node()
    assert "6 of 6 documents are in 4 files" in run()
    assert server.asked.total() == 6


def test_every_command_works_with_all_of_a_job_in_a_bucket(job, server, command, run):
    assert "no problem, no warning" in command("doctor", "job.yaml")
    assert job.files("org/job", kind="bucket").keys() == {"input/0.jsonl"}
    said = run()
    assert "3 of 3 documents are in 2 files in hf://buckets/org/job/output" in said
    assert "Processing Files" not in said  # huggingface_hub's bars
    assert len(output(job)) == 2
    assert len(markers(job)) == 1
    lose_the_node()
    assert "1 task is complete already" in run()
    for what in ("job.yaml", f"{BUCKET}/mirror"):
        assert "1 task (1 finished)" in command("status", what)
        assert "no problem: 1 task, 3 documents" in command("verify", what, "--full")
        assert "report.html: the report of 1 task" in command("report", what)
    assert "document 0 0" in command("show", "job.yaml")
    assert server.asked.total() == 3
    job.remove("org/job", ["output/00000_00001.jsonl"], "bucket")
    assert "00000_00001.jsonl is missing" in command("verify", f"{BUCKET}/mirror", code=1)
    command("repair", "job.yaml")
    run()
    assert len(output(job)) == 2
    read = job.files("org/job", kind="bucket")["input/0.jsonl"]
    job.put("org/job", {"input/0.jsonl": read.replace(b"document", b"Document")}, kind="bucket")
    assert "'0.jsonl' has other content" in run(code=1)


# a repository ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mirror_in_a_repository_is_refused_read_and_moved(job, server, command, tmp_path, run):
    """Versions before this one wrote there: one commit for each object."""
    put_input(job, 1, 1)
    write_yaml(server, str(tmp_path / "mirror"))
    run()
    found = [path for path in Path("mirror").rglob("*") if path.is_file()]
    job.put("org/data", {str(path): path.read_bytes() for path in found})
    lose_the_node()
    write_yaml(server, "hf://datasets/org/data/mirror")
    said = run(code=2)
    assert "Set it to a bucket: hf://buckets/org/data/mirror" in said
    assert "hf cp hf://datasets/org/data/mirror/ hf://buckets/org/data/mirror/" in said
    for what in ("job.yaml", "hf://datasets/org/data/mirror"):
        assert "1 task (1 finished)" in command("status", what)
        assert "no problem: 1 task, 1 document" in command("verify", what)
    # What ``hf cp`` calls.
    HfApi().copy_files("hf://datasets/org/data/mirror/", f"{BUCKET}/mirror/")
    write_yaml(server)
    lose_the_node()
    assert "1 task (1 finished)" in command("status", "job.yaml")
    by_hand = [*markers(job), *job.owners("org/job", "bucket")]
    job.remove("org/job", by_hand, "bucket")
    run()
    assert server.asked.total() == 1


@pytest.mark.parametrize(
    "url", ["hf://datasets/org/data@try/a", "hf://models/org/data/a", "hf://org/data/a"]
)
def test_the_bucket_to_use_instead_is_named(url):
    with pytest.raises(ConfigError, match=r"Set it to a bucket: hf://buckets/org/data/a \("):
        check_mirror(url)


# a token that expires ----------------------------------------------------------------------------


class Expiring(Access):
    """A token that expires after so many requests."""

    left = 0

    @property
    def expired(self):
        self.left -= 1
        return self.left < 0

    @expired.setter
    def expired(self, value):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("after", [60, 3, 30, 45, 75, 90, 120])
def test_a_token_that_expires_in_the_middle_loses_nothing(
    job, server, command, monkeypatch, tmp_path, after, run
):
    access = job.tokens[job.token] = Expiring()
    access.left = after
    said = run(code=None)
    done = len(markers(job)) == 1
    assert said.code or done
    assert done or "401" in said.error
    for name in markers(job):  # a task that is marked has all of its output
        assert len([one for one in output(job) if one.startswith(f"output/{name[-5:]}")]) == 2
    job.tokens["hf_FreshTokenOfTheTests"] = Access()
    monkeypatch.setenv("HF_TOKEN", "")
    (tmp_path / "huggingface").mkdir(exist_ok=True)
    (tmp_path / "huggingface/token").write_text("hf_FreshTokenOfTheTests")
    HfFileSystem.clear_instance_cache()
    DataFolder.clear_instance_cache()
    said = run()
    rows = [
        json.loads(line)["id"]
        for name in sorted(output(job))
        for line in output(job)[name].splitlines()
    ]
    assert rows == [f"0 {n}" for n in range(3)]
    assert set(server.asked.values()) == {1}
    assert "no problem: 1 task, 3 documents" in command("verify", f"{BUCKET}/mirror", "--full")


@pytest.mark.parametrize("folder, lists", [("completions", False), ("logs", True)])
def test_a_marker_that_is_written_while_its_folder_is_looked_for(job, monkeypatch, folder, lists):
    step = LocalPipelineExecutor([], tasks=2, logging_dir=f"{BUCKET}/logs")
    list_tree = HfFileSystem._ls_tree

    def another_rank_completes(files, path, **kwargs):
        try:
            return list_tree(files, path, **kwargs)
        except EntryNotFoundError:  # HfFileSystem lists the parent then
            if path.endswith(folder):
                job.put("org/job", {"logs/completions/00000": b""}, kind="bucket")
            raise

    monkeypatch.setattr(HfFileSystem, "_ls_tree", another_rank_completes)
    if lists:
        assert 1 in step.get_incomplete_ranks()
    else:
        assert not step.is_rank_completed(1)
    assert step.get_incomplete_ranks() == [1]


def test_what_the_hub_refuses_is_one_line_that_names_the_setting_and_what_to_do(
    job, server, command, monkeypatch
):
    def refused(*words, code=1):
        HfFileSystem.clear_instance_cache()
        return command(*words, code=code).error

    write_yaml(server)
    missing = "the bucket org/none does not exist, or is hidden from this token. Make it (hf buckets create org/none"
    assert refused(
        "run", "job.yaml", "--executor.logging_dir=hf://buckets/org/none/logs"
    ).startswith(
        f"error: logging_dir: {missing} --private), correct the name, or log in (hf auth login, or export HF_TOKEN)."
    )
    found = command(
        "doctor", "job.yaml", "--executor.logging_dir=hf://buckets/org/none/logs", code=1
    )
    assert "logging_dir, reachable: hf://buckets/org/none/logs/.datatrove-ckpt-probe-" in found
    assert f"could not be written: {missing}" in found
    assert "Invalid HF URI" not in found
    short = ["--run-folder=x", "--prompt=Say {text}", "--model=m", f"--endpoint={server.url}"]
    said = refused("run", "--input=hf://buckets/org/none/", *short, "--tasks=1", code=2)
    assert f"input: hf://buckets/org/none/ cannot be listed: {missing}" in said
    job.fail("batch", 403, message="You don't have the rights to write here", times=None)
    assert refused("run", "job.yaml") == (
        "error: logging_dir: this token may not do that with the bucket org/job (HTTP 403 You don't have the rights "
        "to write here). Correct the name, or log in (hf auth login, or export HF_TOKEN)."
    )
    monkeypatch.setenv("HF_TOKEN", job.expired_token)
    assert refused("run", "job.yaml").startswith(
        "error: logging_dir: the hub wants a valid token (HTTP 401 "
    )


def test_a_mirror_whose_bucket_this_token_does_not_see_is_no_empty_mirror(
    job, tmp_path, monkeypatch
):
    """A task that started from nothing would pay for everything again."""
    with pytest.raises(
        ConfigError, match=r"the bucket org/none does not exist, or is hidden from this token"
    ):
        restore("hf://buckets/org/none/00000", tmp_path / "00000")
    job.repo("org/job", "bucket").private = True
    HfFileSystem.clear_instance_cache()
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(ConfigError, match="or log in"):
        restore(f"{BUCKET}/mirror/00000", tmp_path / "00000")
    monkeypatch.setenv("HF_TOKEN", job.token)
    job.tokens[job.token] = Access(expired=True)
    HfFileSystem.clear_instance_cache()
    with pytest.raises(StorageFailed, match=r"401.*credentials"):
        restore(f"{BUCKET}/mirror/00000", tmp_path / "00000")


# a node that is lost after its last upload -------------------------------------------------------


@pytest.mark.matrix("place", [BUCKET, "hf://datasets/org/data"])
def test_a_chunk_that_the_lost_node_published_after_its_last_version_is_replaced(
    hub, tmp_path, place
):
    """A model answers with other words the second time, and nobody is there to delete the first
    ones.
    """
    hub.create_repo("org/job", kind="bucket")
    hub.create_repo("org/data")
    output_writer = JsonlWriter(f"{place}/output", "${rank}_${chunk_index}.jsonl", compression=None)
    kind, name = ("bucket", "org/job") if place == BUCKET else ("dataset", "org/data")

    def published():
        files = hub.files(name, kind=kind).items()
        (found,) = (content for file, content in files if file.startswith("output/"))
        return found

    with FakeServer(answer=lambda path, text: "word " * server.asked.total()) as server:
        Job(tmp_path, f"{BUCKET}/mirror").run(server, 3, output_writer=output_writer)
        first = published()
        later = [
            file
            for file in hub.files("org/job", kind="bucket")
            if re.search("generation-(?!00000001-)", file)
        ]
        hub.remove("org/job", later, "bucket")
        lose_the_node()
        shutil.rmtree(tmp_path / "checkpoints")
        Job(tmp_path, f"{BUCKET}/mirror").run(server, 3, output_writer=output_writer)
        second = published()
        assert first != second
        assert len(second.splitlines()) == 3
