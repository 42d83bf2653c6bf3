"""The limit on open files, with real limits and connections: raised, refused early, never said to
be a disk's fault.
"""

import os
import resource
from contextlib import contextmanager

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.errors import ConfigError, TooManyOpenFiles
from datatrove_ckpt.process import open_files
from tests.jobs import ask, documents, run_job, runner
from tests.yaml_jobs import ENDPOINT, job_yaml

JOB = job_yaml(f"{ENDPOINT}, max_concurrent_generations: 200, request_max_attempts: 2")


@contextmanager
def no_file_left():
    """This process may open no more file, whatever the code does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sum(1 for _ in os.scandir("/dev/fd")) + 40, hard))
    opened = []
    try:
        while True:
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: files.disk.append(folder / "journal", b"line"),
        lambda folder: files.disk.replace(folder / "file", b"content"),
        lambda folder: Lock(folder / "lock"),
    ],
)
def test_a_file_that_cannot_be_opened_is_not_the_disks_fault(tmp_path, use):
    with no_file_left(), pytest.raises(TooManyOpenFiles) as raised:
        use(tmp_path)
    said = str(raised.value)
    assert str(tmp_path) in said
    said = said.replace(str(tmp_path), "")  # which may be on a "disk"
    assert "ulimit -n" in said
    assert "max_concurrent_generations" in said
    assert "disk" not in said


def test_a_connection_that_cannot_be_opened_stops_the_rank_and_is_not_the_servers_fault(
    tmp_path, server
):
    async def greedy(document, generate):
        with no_file_left():
            return await ask(document, generate)

    # A document that is recorded also asks the cache, in another thread.
    step = runner(tmp_path, server, greedy, on_document_error="dead_letter", replay_check=False)
    with pytest.raises(
        TooManyOpenFiles, match=r"No connection to http://127.0.0.1:\d+/v1/.*\(ulimit -n\)"
    ):
        step.run(documents(1))
    assert not (tmp_path / "checkpoints/00000/dead_letters.jsonl").exists()
    run_job(tmp_path, server, 1, accept_changes=True)


def test_the_limit_is_raised_to_the_need_and_neither_lowered_nor_raised_beyond_the_hard_one(
    monkeypatch,
):
    current = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(current))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, pair: current.__setitem__(slice(None), pair)
    )
    open_files.raise_limit(requests=500, servers=1)
    assert current == [1024, 4096]
    open_files.raise_limit(requests=2000, servers=1)
    assert open_files.files_needed(2000, 1) <= current[0] < 2000 + 1000
    open_files.raise_limit(requests=3600, servers=2)
    assert current == [4096, 4096]
    with pytest.raises(ConfigError) as raised:
        open_files.raise_limit(requests=5000, servers=1)
    fitting = int(str(raised.value).rpartition("at most ")[2].rstrip("."))
    open_files.raise_limit(requests=fitting, servers=1)
