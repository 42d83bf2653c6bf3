"""Claims: a crash at each effect, and workers that join, die, sleep and wake up in any order."""

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.claims import claims
from datatrove_ckpt.claims.claims import (
    LOOKS,
    RUN,
    Claim,
    Claims,
    DiskClaims,
    ObjectClaims,
    claimants,
    given_up,
    new_owner,
    open_store,
)
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.errors import CheckpointLocked
from tests.crashes import CrashingDisk, disk_in_place
from tests.rank_folders import grow_old

RANKS = 4
ATTEMPTS = 2
KILLS = 3 * ATTEMPTS


class Job:
    """What is true of a job, whatever the claims say: its markers and its fences.

    Args:
        make_store: makes the store of a process with this name.
    """

    def __init__(self, make_store):
        self.make_store = make_store
        self.complete = []
        self.fences = {}
        self.progress = {}
        self.has_time = lambda seconds: True

    def incomplete(self):
        return [rank for rank in range(RANKS) if rank not in self.complete]

    def finish(self):
        """A ``run`` whose process is alone."""
        process = Process(self, alone=True)
        process.claims.clear()
        while process.take() is not None:
            for rank in list(process.ranks):
                process.finish(rank)
        assert sorted(self.complete) == list(range(RANKS))
        process.claims.clear()
        process.claims.close()


class Process:
    def __init__(self, job, alone=False, end="", is_worker=False):
        self.job = job
        self.owner = new_owner(end)
        self.store = job.make_store(self.owner)
        self.ranks = []
        self.is_stopped = False
        reached = lambda rank: job.progress.get(rank, (0, 0, 0))  # noqa: E731
        self.claims = Claims(
            self.store,
            self.owner,
            job.incomplete,
            reached,
            ATTEMPTS,
            alone,
            job.has_time,
            is_worker,
        )
        made.append(self)

    def take(self):
        rank = self.claims.next()
        if rank is not None:
            self.ranks.append(rank)
            self.job.fences[rank] = self
            if rank in self.job.complete:  # a listing lagged
                self.ranks.remove(rank)
                self.claims.complete(rank)
        return rank

    def take_rank(self, rank):
        """As if only this rank were left."""
        complete = list(self.job.complete)
        self.job.complete += {*range(RANKS)} - {rank}
        is_ours = self.claims.next() == rank
        self.job.complete = complete
        return is_ours

    def finish(self, rank):
        self.ranks.remove(rank)
        if self.job.fences[rank] is self:
            self.job.complete.append(rank)
            self.claims.complete(rank)
        else:
            self.claims.lost(rank)

    def die(self):
        self.claims._closed.set()
        if isinstance(self.store, DiskClaims) and self.store._worker_lock._fd >= 0:
            self.store._worker_lock.release()


made = []


@pytest.fixture(autouse=True)
def _ends_all():
    """No thread and no lock of a test is left to the next."""
    yield
    while made:
        made.pop().die()


# crash points ------------------------------------------------------------------------------------


def on_disk(folder):
    return lambda owner: DiskClaims(folder / "claims", owner)


def in_bucket(folder):
    return lambda owner: ObjectClaims(f"file://{folder}/claims", owner, 0.0)


@pytest.mark.parametrize("torn", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", [on_disk, in_bucket])
def test_after_a_crash_at_any_effect_another_process_does_what_is_left(tmp_path, where, torn):
    points = []
    number = 0
    while len(points) == number:
        folder = tmp_path / str(number)
        folder.mkdir()
        job = Job(where(folder))
        disk = CrashingDisk(number, folder, torn)
        processes = []
        with disk_in_place(disk):
            for _ in range(2):
                processes.append(Process(job, alone=True))
                attempt(processes[-1])
        if disk.crashed_at is not None:
            points.append(disk.crashed_at)
        for process in processes:
            process.die()
        grow_old(folder, 1000.0)
        job.finish()
        assert len(job.complete) == RANKS
        assert not list((folder / "claims").glob("*-*"))
        number += 1
    print(points)
    assert len(points) > 15


def attempt(process):
    """One rank fails, another one is done, and the process ends in the middle of the next."""
    first = process.take()
    if first is None:
        return
    process.ranks.remove(first)
    process.claims.failed(first, "bad", for_good=False)
    second = process.take()
    process.finish(second)
    third = process.take()
    if third is not None:
        process.claims.release(third)
    process.take()


# a rank that cannot finish -----------------------------------------------------------------------


@pytest.fixture(params=[on_disk, in_bucket])
def job(tmp_path, request):
    return Job(request.param(tmp_path))


def test_workers_share_ranks_on_each_store(store_kind, tmp_path):
    job = Job(lambda owner: ObjectClaims(store_kind.url(tmp_path), owner, 0.0))
    first, second = Process(job), Process(job)
    assert [first.take(), second.take()] == [0, 1]
    assert first.owner in second.store.snapshot().alive
    first.claims.failed(0, "no memory", for_good=False)
    second.finish(1)
    assert second.take_rank(0)
    second.claims.failed(0, "no memory", for_good=False)
    assert first.claims.given_up() == {0: "no memory"}
    second.claims.close()
    assert second.owner not in first.store.snapshot().alive
    first.claims.close()
    job.finish()


def test_a_worker_takes_any_rank_so_that_not_all_try_the_same_one(job, monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.common.retrying.JITTER.shuffle", list.reverse)
    assert Process(job).take() == 0
    assert Process(job, is_worker=True).take() == RANKS - 1


def test_progress_begins_the_count_anew(job):
    process = Process(job, alone=True)
    for attempt in range(1, 5):
        assert process.take_rank(0)
        job.progress[0] = (0, attempt, 0)
        process.claims.failed(0, "killed", for_good=False)
    assert process.take_rank(0)
    process.claims.failed(0, "killed", for_good=False)
    assert process.claims.given_up() == {0: "killed"}


def test_what_one_launch_gave_up_the_workers_of_the_next_one_try_again(job, monkeypatch):
    for launch in ("first", "second"):
        monkeypatch.setenv(LAUNCH, launch)
        process = Process(job, is_worker=True)
        for _ in range(ATTEMPTS):
            assert process.take_rank(0)
            process.claims.failed(0, launch, for_good=False)
        assert not process.take_rank(0)
        assert process.claims.given_up() == {0: launch}
    assert not Process(job).take_rank(0)


def test_a_death_with_several_ranks_counts_for_none_and_each_is_then_tried_alone(job, tmp_path):
    first = Process(job)
    assert [first.take(), first.take()] == [0, 1]
    first.die()
    grow_old(tmp_path, 1000.0)
    others = Process(job)
    assert others.claims.free() == ([2, 3], False)
    job.complete += [2, 3]
    assert others.claims.free() == ([0, 1], True)
    job.complete.clear()
    for _ in range(KILLS):
        process = Process(job)
        # First those of which nothing bad is known.
        assert [process.take(), process.take()] == [2, 3]
        for rank in (2, 3):
            process.claims.release(rank)
        assert process.take_rank(0)
        assert process.claims.free().ranks == []
        assert not process.take_rank(1)
        process.die()
        grow_old(tmp_path, 1000.0)
    last = Process(job)
    assert not last.take_rank(0)
    assert "6 times in a row without progress" in last.claims.given_up()[0]
    assert last.take_rank(1)


def test_a_worker_with_a_rank_leaves_one_for_each_that_has_none(job):
    first, second = Process(job), Process(job)
    Process(job, end=LOOKS)  # takes none
    assert [first.take() for _ in range(RANKS)] == [0, 1, 2, None]
    assert second.take() == 3
    second.claims.close()  # which gives its rank back
    assert first.take() == 3


def test_a_rank_whose_lock_another_process_holds_is_left_for_a_while(job):
    process = Process(job)
    assert process.take() == 0
    process.claims.lost(0)
    assert process.claims.free().ranks == [1, 2, 3]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_marks_that_cannot_be_listed_stop_no_rank_that_runs(job, monkeypatch, error):
    process = Process(job)
    assert process.take() == 0

    def fails():
        raise error("listing failed")

    with monkeypatch.context() as patch:
        patch.setattr(process.store, "snapshot", fails)
        assert process.take() is None
        assert process.take() is None
        assert process.claims.failures == 2
    assert process.take() == 1
    assert process.claims.failures == 0


def test_a_rank_that_another_process_takes_first_is_no_failure(job, monkeypatch):
    """However often it happens: a run that waits for others for days meets it."""
    process = Process(job)
    monkeypatch.setattr(process.store, "put", lambda mark, content: False)
    assert process.take() is None
    assert process.claims.failures == 0


def test_a_mark_whose_writing_failed_after_it_was_done_keeps_no_rank(job, monkeypatch):
    process = Process(job)
    put = process.store.put

    def fails(mark, content):
        put(mark, content)
        raise OSError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(process.store, "put", fails)
        assert process.take() is None
    assert [process.take() for _ in range(RANKS)] == [0, 1, 2, 3]


def test_what_else_lies_among_the_workers_is_passed_over(job, tmp_path):
    process = Process(job)
    (tmp_path / "claims" / "workers").mkdir(parents=True, exist_ok=True)
    (tmp_path / "claims" / "workers" / "README").write_text("of a person")
    assert process.claims.other_claimants() == []
    assert process.take() == 0
    process.claims.clear()
    assert (tmp_path / "claims" / "workers" / "README").exists()


def test_a_process_without_claims_sees_who_has_which_ranks_and_changes_nothing(job, tmp_path):
    first, second, gone = Process(job), Process(job), Process(job)
    assert [first.take(), first.take(), gone.take(), second.take()] == [0, 1, 2, 3]
    second.claims.failed(3, "no memory", for_good=True)
    gone.die()
    grow_old(tmp_path, 1000.0)
    for process in (first, second):
        process.store.heartbeat()
    before = sorted(tmp_path.rglob("*"))
    reader = ObjectClaims(f"file://{tmp_path}/claims", "", 0.0)
    if isinstance(first.store, DiskClaims):
        reader = open_store(str(tmp_path / "claims"))
    at_work = [claimant for claimant in claimants(reader) if claimant.is_alive]
    assert sorted(claimant.ranks for claimant in at_work) == [[], [0, 1]]
    assert {claimant.process for claimant in at_work} == {
        f"pid {os.getpid()} on {socket.gethostname()}"
    }
    assert [claimant.ranks for claimant in claimants(reader) if not claimant.is_alive] == [[2]]
    assert given_up(reader) == {3: "no memory"}
    assert sorted(tmp_path.rglob("*")) == before


# Botocore and httpx have errors that have no base in common with OSError.
@pytest.mark.parametrize("error", [None, RuntimeError("no route to the store")])
def test_a_process_beats_and_then_sees_what_others_have_completed_also_after_an_error(
    job, monkeypatch, error
):
    done = SimpleQueue()

    def incomplete():
        done.put("look")
        if error:
            raise error
        return []

    monkeypatch.setattr(job, "incomplete", incomplete)
    for store in (DiskClaims, ObjectClaims):
        monkeypatch.setattr(store, "heartbeat_seconds", 0.01)
        monkeypatch.setattr(store, "heartbeat", lambda store: done.put("beat"))
    Process(job)
    while (first := done.get(timeout=300)) != "look":
        assert first == "beat"  # of the store that was made
    assert [done.get(timeout=300) for _ in range(4)] == ["beat", "look"] * 2


@pytest.mark.parametrize("where", [on_disk, in_bucket])
def test_a_beat_keeps_a_process_of_another_host_alive_however_long_it_works(
    tmp_path, monkeypatch, where
):
    monkeypatch.setattr(claims, "has_ended", lambda owner: False)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    job = Job(where(tmp_path))
    late = Process(job)
    other = Process(job)
    for beats, is_alive in ((4.5, True), (5.5, False), (5.5, False)):
        grow_old(tmp_path, beats * late.store.heartbeat_seconds)
        other.store.heartbeat()
        assert (late.owner in other.store.snapshot().alive) == is_alive
        late.store.heartbeat()
        assert late.owner in other.store.snapshot().alive


def test_a_process_whose_file_a_power_loss_has_cut_has_no_name():
    for content in (b"", b'{"host":', b"7"):
        assert claims._name_process(content) == "another process"


def test_no_beat_comes_after_the_end(job, tmp_path):
    process = Process(job, end=RUN)
    process.claims.close()
    process.claims._call_unless_closed(process.claims._store.heartbeat)
    assert Process(job).claims.other_claimants() == []
    assert not (tmp_path / "claims" / "workers" / process.owner).exists()


def test_a_process_of_this_host_that_has_ended_is_dead_at_once_on_object_stores(
    tmp_path,
):
    job = Job(in_bucket(tmp_path))
    code = "from datatrove_ckpt.claims.claims import new_owner; print(new_owner())"
    owner = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    store = job.make_store(owner)
    assert store.put(Claim(0, 1, owner), {})
    assert Process(job).take_rank(0) is True
    assert Process(job).claims.free().ranks == [1, 2, 3]


def test_a_lock_of_another_pid_namespace_with_this_pid_and_host_name_is_no_lock_of_this_process(
    tmp_path, monkeypatch
):
    lock = Lock(tmp_path / "lock")
    with pytest.raises(CheckpointLocked, match="Another call of run or run_async in this process"):
        Lock(lock.path)
    monkeypatch.setattr("datatrove_ckpt.checkpoint.lock.pid_namespace_id", lambda: "another")
    with pytest.raises(CheckpointLocked, match=f"pid {os.getpid()} on {socket.gethostname()}"):
        Lock(lock.path)
    lock.release()


IN_A_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
HOLDS_ITS_NAME = (
    "import sys; from datatrove_ckpt.claims.claims import new_owner; "
    "print(new_owner(), flush=True); sys.stdin.read()"
)


def test_a_process_of_another_pid_namespace_with_this_host_name_keeps_its_ranks(tmp_path):
    """As in containers with a fixed name: its id, looked up here, is another process or none."""
    trial = shlex.join([*IN_A_NAMESPACE, "true"])
    if subprocess.run(["sh", "-c", trial], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make PID namespaces")
    with subprocess.Popen(
        [*IN_A_NAMESPACE, sys.executable, "-c", HOLDS_ITS_NAME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as there:
        owner = there.stdout.readline().strip()
        assert list(is_alive_here(owner, tmp_path)) == [True, False]
        there.stdin.close()


def is_alive_here(owner, folder):
    """Yields whether this process takes an owner for alive: at its first beat, and long after."""
    here = Process(Job(in_bucket(folder)))
    here.job.make_store(owner)
    for seconds in (0.0, 1000.0):
        grow_old(folder, seconds)
        here.store.heartbeat()
        yield owner in here.store.snapshot().alive


def test_where_boot_and_namespace_are_unknown_only_beats_show_a_death(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "pid_namespace_id", lambda: "")
    assert list(is_alive_here(new_owner(), tmp_path)) == [True, False]


def test_of_two_marks_of_one_number_the_first_counts(tmp_path):
    first, second = (Process(Job(on_disk(tmp_path))) for _ in range(2))
    assert first.store.put(Claim(0, 1, first.owner), {}) is True
    assert second.store.put(Claim(0, 1, second.owner), {}) is False


def test_of_two_processes_that_take_a_rank_at_once_the_object_store_gives_it_to_one(
    tmp_path, monkeypatch
):
    """Both have written their mark before either looks again."""
    first, second = (Process(Job(in_bucket(tmp_path))) for _ in range(2))
    monkeypatch.setattr(first.store, "_settle_seconds", 5.0)
    won = []

    def other_writes_meanwhile(seconds):
        if seconds == 5.0:
            won.append(second.store.put(Claim(0, 1, second.owner), {}))

    clock = SimpleNamespace(time=time.time, sleep=other_writes_meanwhile)
    monkeypatch.setattr(claims, "time", clock)
    won.append(first.store.put(Claim(0, 1, first.owner), {}))
    assert sorted(won) == [False, True]


# any order ---------------------------------------------------------------------------------------


class Objects:
    """Stands in for an ``ObjectStore``. Its clock is an hour off, and its listings lag."""

    def __init__(self, lag):
        self.now = time.time() + 3600.0
        self.lag = lag
        self.content = {}
        self._listings = []

    def put(self, name, data):
        self.content[name] = data, self.now
        self._changed()

    def delete(self, name):
        self.content.pop(name, None)
        self._changed()

    def read(self, name, most):
        return self.content.get(name, (None, 0.0))[0]

    def names(self, folder=""):
        """Those of some changes ago."""
        seen = self._listings[-1 - self.lag] if self.lag < len(self._listings) else {}
        found = {name.rpartition("/")[::2]: at for name, at in seen.items()}
        return {name: at for (where, name), at in found.items() if where == folder}

    def _changed(self):
        self._listings.append({name: at for name, (_, at) in self.content.items()})


class Workers(RuleBasedStateMachine):
    """Ranks are completed once each, whatever happens to the workers."""

    kind = "disk"

    def __init__(self):
        super().__init__()
        self.folder = Path(os.environ["CLAIMS_TEST_FOLDER"]) / new_owner()
        self.objects = Objects(lag=3 if self.kind == "objects that lag" else 0)
        self.job = Job(self.make_store)
        self.workers = []
        self.ends = Counter()

    def make_store(self, owner):
        if "disk" in self.kind:
            return DiskClaims(self.folder / "claims", owner)
        store = ObjectClaims("memory://claims", owner, 0.0)
        store._store = self.objects
        store.heartbeat()
        return store

    def awake(self, number):
        awake = [worker for worker in self.workers if not worker.is_stopped]
        return awake[number % len(awake)] if awake else None

    @rule()
    def join(self):
        if len(self.workers) < 4:
            self.workers.append(Process(self.job))

    @rule(number=st.integers(0, 3))
    def take(self, number):
        worker = self.awake(number)
        if worker is None:
            return
        rank = worker.take()
        others = [other for other in self.workers if other is not worker and rank in other.ranks]
        if self.kind == "disk":
            assert not others
        elif self.kind != "objects that lag":
            assert all(
                other.is_stopped or self.job.fences.get(rank or 0) is not other for other in others
            )

    @rule(number=st.integers(0, 3), how=st.sampled_from(["finish", "fail", "release"]))
    def end_rank(self, number, how):
        worker = self.awake(number)
        if worker is None or not worker.ranks:
            return
        rank = worker.ranks[0]
        if how == "finish" and rank not in self.job.complete:
            worker.finish(rank)
            return
        worker.ranks.remove(rank)
        if how == "fail":
            self.ends[rank] += 1
            worker.claims.failed(rank, "bad", for_good=False)
        else:
            worker.claims.release(rank)

    @rule(number=st.integers(0, 3))
    def kill(self, number):
        if self.workers:
            worker = self.workers.pop(number % len(self.workers))
            self.ends.update(worker.ranks)
            worker.die()

    @rule(number=st.integers(0, 3))
    def stop_or_continue(self, number):
        if self.workers:
            worker = self.workers[number % len(self.workers)]
            worker.is_stopped = not worker.is_stopped
            if not worker.is_stopped:
                worker.store.heartbeat()

    @rule(seconds=st.sampled_from([20.0, 400.0]))
    def wait(self, seconds):
        for _ in range(int(seconds // 20)):
            self.pass_time(20.0)

    def pass_time(self, seconds):
        self.objects.now += seconds
        if self.folder.exists():
            grow_old(self.folder, seconds)
        for worker in self.workers:
            if not worker.is_stopped:
                worker.store.heartbeat()
            for rank in worker.claims.locked:
                worker.claims.locked[rank] -= seconds

    def teardown(self):
        if self.workers:
            for rank in self.workers[0].claims.given_up():
                assert self.ends[rank] >= ATTEMPTS
        for worker in self.workers:
            worker.die()
        self.workers = []
        self.objects.lag = 0
        self.wait(400.0)
        self.job.finish()


@pytest.mark.parametrize("examples", [7, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["disk", "disk without locks", "objects", "objects that lag"])
def test_each_rank_is_completed_once_whatever_happens_to_workers(
    kind, examples, tmp_path, monkeypatch
):
    monkeypatch.setenv("CLAIMS_TEST_FOLDER", str(tmp_path))
    if kind == "disk without locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    machine = type("Machine", (Workers,), {"kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )


def no_locks(fd, how):
    raise OSError


def test_flocks_that_no_other_machine_sees_are_not_taken_for_a_death(tmp_path, monkeypatch):
    job = Job(on_disk(tmp_path))
    here = Process(job)
    assert here.take() == 0
    monkeypatch.setattr(claims, "lock_holder", lambda path: None)
    monkeypatch.setattr(claims, "pid_namespace_id", lambda: "another".rjust(16))
    there = Process(job)
    assert there.claims.free().ranks == [1, 2, 3]
    for _ in range(3):
        grow_old(tmp_path, 100.0)
        here.store.heartbeat()
        there.store.heartbeat()
        assert there.claims.free().ranks == [1, 2, 3]


def test_a_mark_that_a_power_loss_cut_off_is_that_of_a_free_rank(tmp_path):
    process = Process(Job(on_disk(tmp_path)))
    (tmp_path / "claims" / "00000-000007").write_bytes(b"\0\0\0")
    assert process.take() == 0
    assert process.claims._store.snapshot().claims == [Claim(0, 8, process.owner)]
