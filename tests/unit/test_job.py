"""All ranks of a job have one identity, whichever starts first, and whatever a crash leaves."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from datatrove_ckpt.checkpoint import files, job_file
from datatrove_ckpt.checkpoint.fence import RunClaim
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.job_file import compare_job, join_job
from datatrove_ckpt.checkpoint.layout import LOCK, journal_path, rank_folder
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.errors import CheckpointMismatch


def identity(**fields):
    return RunIdentity({"model": "m", "tasks": 3, **fields})


class Rank:
    """A process that works on a rank, up to the point where it has written ``run.json``."""

    def __init__(self, root, number):
        self.root, self.number, self.folder = root, number, rank_folder(root, number)
        files.disk.make_dirs(self.folder)
        self.lock = Lock(self.folder / LOCK)

    def start(self, identity, accept_changes=False):
        claim = RunClaim(self.folder, identity, accept_changes)
        with join_job(self.root, self.number, identity, accept_changes, lambda: None):
            claim.take()

    def work(self):
        journal_path(self.folder, 0).write_bytes(b"a document")

    def die(self):
        self.lock.release()

    def finish(self):
        self.lock.release(remove=True)


def test_of_two_jobs_that_start_at_once_one_is_refused(tmp_path, monkeypatch):
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    looks = threading.Semaphore(0)

    def sleep(seconds):
        looks.release()
        time.sleep(seconds)

    claim = RunClaim(first.folder, identity())
    monkeypatch.setattr(job_file, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    with join_job(tmp_path, 0, identity(), False, lambda: None):
        # Between job.json and run.json of the first.
        late = in_thread(lambda: second.start(identity(tasks=4)), "second")
        for _ in range(2):
            assert looks.acquire(timeout=300), "it must wait until the first has said what it is"
        claim.take()
    with pytest.raises(CheckpointMismatch, match="tasks: 3 -> 4"):
        late.result(300)
    assert json.loads((tmp_path / "job.json").read_bytes())["tasks"] == 3


def test_ranks_that_hold_nothing_and_have_ended_refuse_nobody(tmp_path):
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    first.start(identity())
    second.start(identity())
    other = Rank(tmp_path, 2)
    with pytest.raises(CheckpointMismatch, match=r"\(tasks 0, 1\)"):
        other.start(identity(tasks=4))
    first.finish()
    second.die()
    other.start(identity(tasks=4))
    assert compare_job(tmp_path, identity(), None, False).ranks == [2], "it is at work"
