"""A pool's worker that is ended leaves no lock behind, and no parent that waits for its result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import multiprocess
import multiprocess.forkserver
import pytest
from datatrove.pipeline.writers import JsonlWriter
from multiprocess import pool

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.errors import ConfigError, Preempted
from datatrove_ckpt.process import pool_workers
from datatrove_ckpt.process.pool_workers import exit_after_this_task, exit_between_tasks, exits_on
from datatrove_ckpt.process.preemption import Preemption
from tests.jobs import ask, writer

FORKSERVER = multiprocess.get_context("forkserver")
MORE_THAN_A_PIPE_HOLDS = b"x" * (1 << 20)
OUR_WORK = partial(pool_workers.worker, {signal.SIGUSR1, signal.SIGINT})
TERMINATED = 128 + signal.SIGTERM


pytestmark = pytest.mark.xdist_group("pool_workers")  # one fork server


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """A fork server that has imported all of this, so that a worker starts in a moment."""
    server = multiprocess.forkserver._forkserver
    server._stop()
    server.set_forkserver_preload([__name__])
    yield
    server._stop()
    server.set_forkserver_preload(["__main__"])


class Worker:
    """One of a pool, and its two queues. Its pool is this test. ``work`` is pool_workers' or multiprocess's own."""

    def __init__(self, work: Callable[..., None] = pool.worker) -> None:
        self.tasks, self.results = FORKSERVER.SimpleQueue(), FORKSERVER.SimpleQueue()
        self.process = FORKSERVER.Process(target=work, args=(self.tasks, self.results), name="PoolWorker-1")
        self.process.start()

    def does(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.tasks.put((0, 0, task, arguments, {}))

    def result(self) -> Any:
        assert self.results._reader.poll(60)
        _, _, (_, result) = self.results.get()
        return result

    def until_it_waits(self) -> None:
        """Until it has the lock of the tasks, and no task."""
        while self.tasks._rlock.acquire(timeout=0):
            self.tasks._rlock.release()
            time.sleep(0.001)

    @property
    def locks(self) -> list[bool]:
        """Whether each of the two is free."""
        free = []
        for lock in (self.tasks._rlock, self.results._wlock):
            free.append(lock.acquire(timeout=0))
            if free[-1]:
                lock.release()
        return free

    def end(self) -> int:
        """Its exit code. It must not have taken a lock with it."""
        self.process.join(60)
        assert self.locks == [True, True]
        return int(self.process.exitcode)


def much() -> bytes:
    return MORE_THAN_A_PIPE_HOLDS


def much_of_a_rank(patience: float = 60.0) -> bytes:
    pool_workers._PATIENCE = patience
    exit_between_tasks()
    return MORE_THAN_A_PIPE_HOLDS


def test_a_worker_that_is_terminated_hands_in_its_result_first_and_lets_go_of_the_lock() -> None:
    worker = Worker()
    worker.does(much_of_a_rank)
    assert worker.results._reader.poll(60)  # it has the lock until all is read
    worker.process.terminate()
    assert worker.result() == MORE_THAN_A_PIPE_HOLDS
    assert worker.end() == TERMINATED


def test_without_that_the_lock_of_the_results_is_lost() -> None:
    worker = Worker()
    worker.does(much)
    assert worker.results._reader.poll(60)
    worker.process.terminate()
    worker.process.join(60)
    assert (worker.process.exitcode, worker.locks) == (-signal.SIGTERM, [True, False])


def test_a_result_that_nobody_takes_does_not_keep_the_worker() -> None:
    worker = Worker()
    worker.does(much_of_a_rank, 0.1)
    assert worker.results._reader.poll(60)
    worker.process.terminate()
    worker.process.join(60)
    assert worker.process.exitcode == TERMINATED


@pytest.mark.parametrize("work", [OUR_WORK, pool.worker])
def test_a_worker_that_waits_for_its_first_task_gives_back_the_lock(work: Any) -> None:
    worker = Worker(work)
    worker.until_it_waits()
    worker.process.terminate()
    if work is OUR_WORK:
        assert worker.end() == TERMINATED
    else:  # so it needs to
        worker.process.join(60)
        assert (worker.process.exitcode, worker.locks) == (-signal.SIGTERM, [False, True])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_worker_that_waits_is_deaf_to_what_its_parent_tells_it_by_sigterm(number: int) -> None:
    worker = Worker(OUR_WORK)
    worker.until_it_waits()
    os.kill(worker.process.pid, number)
    worker.does(os.getpid)
    assert worker.result() == worker.process.pid
    worker.process.terminate()
    assert worker.end() == TERMINATED


def rank_over() -> str:
    exit_between_tasks()
    return "done"


def test_a_worker_that_waits_for_its_next_task_gives_back_the_lock() -> None:
    worker = Worker()
    worker.does(rank_over)
    assert worker.result() == "done"
    worker.until_it_waits()
    worker.process.terminate()
    assert worker.end() == TERMINATED


def test_a_worker_that_waits_for_the_lock_of_the_tasks_needs_none() -> None:
    worker = Worker()
    worker.does(another_worker_has_the_lock)
    assert worker.result() == "done"
    worker.process.terminate()
    assert worker.end() == TERMINATED


def another_worker_has_the_lock() -> str:
    exit_between_tasks()
    frame = pool_workers._frame_of_worker()
    assert frame is not None
    frame.f_locals["inqueue"]._rlock._lock = FORKSERVER.Semaphore(0)
    return "done"


def fork_in_a_task(context: str, in_a_rank: bool) -> tuple[float, int]:
    with Preemption(["SIGTERM", "SIGUSR1"], 60.0) if in_a_rank else nullcontext():
        began = time.monotonic()
        child = multiprocessing.get_context(context).Process(target=forked)
        child.start()
        child.join(0.2)
        child.terminate()
        child.join()
        return time.monotonic() - began, int(child.exitcode or 0)


def forked() -> None:
    exit_between_tasks()  # a rank of its own, say
    signal.pause()


@pytest.mark.parametrize("in_a_rank", [False, True])
def test_what_a_task_forks_is_no_worker(in_a_rank: bool) -> None:
    worker = Worker(OUR_WORK)
    worker.does(fork_in_a_task, "fork", in_a_rank)
    seconds, exitcode = worker.result()
    assert exitcode == -signal.SIGTERM
    assert seconds < 4, "it was not left to the patience that workers have"
    worker.tasks.put(None)
    assert worker.end() == 0


def interruptible() -> str:
    exit_between_tasks()
    signal.signal(signal.SIGUSR2, _raise)
    return "done"


def _raise(*_: object) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("has_the_lock", [True, False])
def test_an_exception_out_of_a_signal_handler_leaves_no_lock_behind(has_the_lock: bool) -> None:
    worker = Worker()
    worker.does(interruptible)
    assert worker.result() == "done"
    worker.until_it_waits()
    if not has_the_lock:
        worker.does(another_worker_has_the_lock)
        assert worker.result() == "done"
    os.kill(worker.process.pid, signal.SIGUSR2)
    assert worker.end() == 3


@pytest.mark.parametrize("work", [OUR_WORK, pool.worker])
def test_a_worker_that_nobody_ends_works_as_any(work: Any) -> None:
    worker = Worker(work)
    for _ in range(3):
        worker.does(rank_over)
        assert worker.result() == "done"
    worker.tasks.put(None)
    assert worker.end() == 0


def told_in_a_task(end_of_task: float = 60.0, result: Any = "done", ends: bool = True) -> Any:
    pool_workers._END_OF_TASK = end_of_task
    exit_after_this_task(signal.SIGUSR1)
    if not ends:
        FORKSERVER.Semaphore(0).acquire()
    return result


def test_a_worker_that_is_to_leave_after_its_task_hands_it_in_and_takes_no_other() -> None:
    worker = Worker()
    worker.does(told_in_a_task)
    worker.does(os.getpid)
    assert worker.result() == "done"
    assert worker.end() == 128 + signal.SIGUSR1
    assert worker.tasks.get()[2] is os.getpid


def test_it_does_not_wait_for_ever_for_the_end_of_its_task() -> None:
    worker = Worker()
    worker.does(told_in_a_task, 0.1, "", False)
    assert worker.end() == 128 + signal.SIGUSR1


def test_it_does_not_wait_for_ever_for_somebody_who_takes_its_result() -> None:
    worker = Worker()
    worker.does(told_in_a_task, 0.1, MORE_THAN_A_PIPE_HOLDS)
    worker.process.join(60)
    assert worker.process.exitcode == 128 + signal.SIGUSR1


def told_when_the_rank_is_over() -> str:
    exit_between_tasks()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    return "done"


def test_a_worker_that_is_ended_before_it_hands_in_does_so_first() -> None:
    worker = Worker()
    worker.does(told_when_the_rank_is_over)
    worker.does(os.getpid)
    assert worker.result() == "done"
    assert worker.end() == TERMINATED
    assert worker.tasks.get()[2] is os.getpid


def told_again(end_of_task: float, patience: float) -> None:
    pool_workers._END_OF_TASK, pool_workers._PATIENCE = end_of_task, patience
    exit_between_tasks()
    exit_after_this_task(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    FORKSERVER.Semaphore(0).acquire()


@pytest.mark.parametrize(("patiences", "number"), [((60.0, 0.1), signal.SIGTERM), ((0.1, 60.0), signal.SIGUSR1)])
def test_a_further_signal_shortens_the_wait_and_never_makes_it_longer(
    patiences: tuple[float, float], number: signal.Signals
) -> None:
    worker = Worker()
    worker.does(told_again, *patiences)
    assert worker.end() == 128 + number


def told_while_the_task_is_taken() -> str:
    exit_between_tasks()
    signal.raise_signal(signal.SIGTERM)
    try:
        with Preemption(["SIGTERM", "SIGUSR1"], 60.0) as preemption:
            preemption.raise_if_stop_requested()
    except Preempted as end:
        return str(end)
    return "it was not told"


def test_a_rank_that_begins_after_the_signal_came_ends_of_it() -> None:
    worker = Worker()
    worker.does(told_while_the_task_is_taken)
    assert worker.result().startswith("Stopped by SIGTERM.")
    assert worker.end() == TERMINATED


def preempted(number: int) -> list[bool]:
    pool_workers._PATIENCE = 0.1  # which is not for the end of a rank's own task
    leaves = []
    try:
        with Preemption(["SIGTERM", "SIGUSR1"], 60.0):
            leaves.append(exits_on(signal.SIGTERM))
            signal.raise_signal(number)
    except Preempted:
        leaves += [exits_on(signal.SIGTERM), exits_on(number)]
    assert not FORKSERVER.Semaphore(0).acquire(timeout=0.5)  # its log is being closed, say
    return leaves


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_is_told_alone_leaves_no_moment_in_which_a_signal_loses_its_error(number: int) -> None:
    worker = Worker()
    worker.does(preempted, number)
    assert worker.result() == [False, True, True]
    assert worker.end() == 128 + number


def not_borrowed() -> list[Any]:
    with Preemption(["SIGUSR1"], 60.0):
        within = signal.getsignal(signal.SIGTERM)
    return [within, *map(exits_on, [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])]


def test_where_the_user_borrows_no_sigterm_it_ends_the_rank_as_usual() -> None:
    worker = Worker()
    worker.does(not_borrowed)
    assert worker.result() == [signal.SIG_DFL, True, True, False]
    worker.tasks.put(None)
    assert worker.end() == 0


def test_a_handler_that_is_there_stays() -> None:
    worker = Worker()
    worker.does(handler_before)
    assert worker.result() == [signal.SIG_IGN, True]
    worker.tasks.put(None)
    assert worker.end() == 0


def handler_before() -> list[Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_between_tasks()
    kept = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_between_tasks()
    exit_between_tasks()
    return [kept, exits_on(signal.SIGTERM)]


def test_outside_a_pool_signals_stay_as_they_are() -> None:
    exit_between_tasks()
    exit_after_this_task(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert pool_workers.stop_signal() is None


class Failing(InferenceRunner):  # type: ignore[misc]
    def _lead(self, *_: Any) -> None:
        assert not exits_on(signal.SIGTERM)
        raise ConfigError("no GPU")


class Succeeding(InferenceRunner):  # type: ignore[misc]
    def _lead(self, *_: Any) -> None:
        assert not exits_on(signal.SIGTERM)


def fail_twice(folder: Path) -> bool:
    step = Failing(ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), writer(folder))
    for _ in range(2):
        with pytest.raises(ConfigError):
            step.run(None)
    return exits_on(signal.SIGTERM)


def refused(folder: Path) -> bool:
    step = Failing(
        ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), JsonlWriter(str(folder), "${chunk_index}")
    )
    with pytest.raises(ConfigError, match="rank"):
        step.run(None, world_size=2)
    return exits_on(signal.SIGTERM)


def succeed_twice(folder: Path) -> bool:
    step = Succeeding(ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), writer(folder))
    for _ in range(2):
        step.run(None)
    return exits_on(signal.SIGTERM)


@pytest.mark.parametrize("work", [fail_twice, refused, succeed_twice])
def test_a_worker_whose_rank_is_over_hands_in_its_result(work: Any, tmp_path: Path) -> None:
    worker = Worker()
    worker.does(work, tmp_path)
    assert worker.result() is True
    worker.tasks.put(None)
    assert worker.end() == 0
