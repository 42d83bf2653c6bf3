"""A pool's worker that is ended leaves no lock behind, and no parent that waits for its result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import multiprocess
import pytest
from loguru import logger
from multiprocess import pool

from datatrove_ckpt import InferenceConfig, InferenceRunner, pool_workers
from datatrove_ckpt.cli import QuietErrors
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.pool_workers import end_after_this_task, hand_in_before_sigterm, sigterm_as_usual
from tests.jobs import ask, writer

FORKSERVER = multiprocess.get_context("forkserver")
MORE_THAN_A_PIPE_HOLDS = b"x" * (1 << 20)


def hand_in(results: Any, mend: bool, patience: float) -> None:
    pool_workers._PATIENCE = patience
    if mend:
        hand_in_before_sigterm()
    results.put(MORE_THAN_A_PIPE_HOLDS)
    wait_for_ever()


def wait_for_ever() -> None:
    FORKSERVER.Semaphore(0).acquire()


def interrupted_while_it_hands_in(mend: bool, patience: float = 60.0) -> tuple[Any, Any]:
    results = FORKSERVER.SimpleQueue()
    worker = FORKSERVER.Process(target=hand_in, args=(results, mend, patience))
    worker.start()
    assert results._reader.poll(60)  # it holds the lock until all is read
    worker.terminate()
    return worker, results


def test_a_worker_that_is_terminated_hands_in_its_error_first_and_lets_go_of_the_lock() -> None:
    worker, results = interrupted_while_it_hands_in(mend=True)
    assert results.get() == MORE_THAN_A_PIPE_HOLDS
    worker.join(60)
    assert worker.exitcode == 128 + signal.SIGTERM
    assert results._wlock.acquire(timeout=0)


def test_without_that_the_lock_is_lost() -> None:
    worker, results = interrupted_while_it_hands_in(mend=False)
    worker.join(60)
    assert worker.exitcode == -signal.SIGTERM
    assert not results._wlock.acquire(timeout=0)


def test_a_queue_that_nobody_empties_does_not_keep_the_worker() -> None:
    worker, _ = interrupted_while_it_hands_in(mend=True, patience=0.1)
    worker.join(60)
    assert worker.exitcode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("next_task", "exitcode"), [(False, 128 + signal.SIGTERM), (True, -signal.SIGTERM)])
def test_a_worker_that_hands_nothing_in_ends_at_once(next_task: bool, exitcode: int) -> None:
    ready = FORKSERVER.Event()
    worker = FORKSERVER.Process(target=idle, args=(ready, next_task))
    worker.start()
    assert ready.wait(60)
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == exitcode


def idle(ready: Any, next_task: bool) -> None:
    hand_in_before_sigterm()
    if next_task:
        sigterm_as_usual()
    ready.set()
    wait_for_ever()


def test_other_signals_and_handlers_that_are_there_stay() -> None:
    worker = FORKSERVER.Process(target=others)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


def others() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hand_in_before_sigterm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    hand_in_before_sigterm()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    sigterm_as_usual()
    hand_in_before_sigterm()
    hand_in_before_sigterm()


def test_outside_a_pool_signals_stay_as_they_are() -> None:
    hand_in_before_sigterm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Worker:
    """One of a pool, and its two queues. Its pool is this test."""

    def __init__(self) -> None:
        self.tasks, self.results = FORKSERVER.SimpleQueue(), FORKSERVER.SimpleQueue()
        self.process = FORKSERVER.Process(target=pool.worker, args=(self.tasks, self.results))
        self.process.start()

    def does(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.tasks.put((0, 0, task, arguments, {}))

    def end(self) -> int:
        """Its exit code. It must not have taken a lock with it."""
        self.process.join(60)
        for lock in (self.tasks._rlock, self.results._wlock):
            assert lock.acquire(timeout=0)
            lock.release()
        return int(self.process.exitcode)


def told_in_a_task(end_of_task: float = 60.0, patience: float = 60.0, result: Any = "done", ends: bool = True) -> Any:
    pool_workers._END_OF_TASK, pool_workers._PATIENCE = end_of_task, patience
    end_after_this_task(signal.SIGUSR1)
    if not ends:
        wait_for_ever()
    return result


def test_a_worker_that_is_to_end_after_its_task_hands_it_in_and_takes_no_other() -> None:
    worker = Worker()
    worker.does(told_in_a_task)
    worker.does(os.getpid)
    assert worker.results.get() == (0, 0, (True, "done"))
    assert worker.end() == 128 + signal.SIGUSR1
    assert worker.tasks.get()[2] is os.getpid


def test_it_does_not_wait_for_ever_for_the_end_of_its_task() -> None:
    worker = Worker()
    worker.does(told_in_a_task, 0.1, 0.1, "", False)
    assert worker.end() == 128 + signal.SIGUSR1


def test_it_does_not_wait_for_ever_for_somebody_who_takes_its_result() -> None:
    worker = Worker()
    worker.does(told_in_a_task, 60.0, 0.1, MORE_THAN_A_PIPE_HOLDS)
    worker.process.join(60)
    assert worker.process.exitcode == 128 + signal.SIGUSR1


def rank_over() -> int:
    hand_in_before_sigterm()
    return os.getpid()


def test_a_worker_that_waits_for_its_next_task_gives_back_the_lock_when_it_is_ended() -> None:
    worker = Worker()
    worker.does(rank_over)
    assert worker.results.get()[2] == (True, worker.process.pid)
    while worker.tasks._rlock.acquire(timeout=0):
        worker.tasks._rlock.release()
        time.sleep(0.001)
    worker.process.terminate()
    assert worker.end() == 128 + signal.SIGTERM


def told_when_the_rank_is_over() -> str:
    hand_in_before_sigterm()
    signal.raise_signal(signal.SIGTERM)
    frame = pool_workers._frame_of(pool.worker.__code__, pool_workers._main_frame())
    while not isinstance(frame.f_locals["inqueue"]._rlock, pool_workers._End):
        time.sleep(0.001)
    return "done"


def test_a_worker_that_is_ended_before_it_hands_in_does_so_first() -> None:
    worker = Worker()
    worker.does(told_when_the_rank_is_over)
    worker.does(os.getpid)
    assert worker.results.get() == (0, 0, (True, "done"))
    assert worker.end() == 128 + signal.SIGTERM
    assert worker.tasks.get()[2] is os.getpid


def test_a_handler_that_a_later_step_installs_is_the_one_that_counts() -> None:
    worker = Worker()
    worker.does(handled_by_a_later_step)
    assert worker.results.get() == (0, 0, (True, [signal.SIGTERM]))
    worker.tasks.put(None)
    assert worker.end() == 0


def handled_by_a_later_step() -> list[int]:
    got: list[int] = []
    hand_in_before_sigterm()
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    signal.raise_signal(signal.SIGTERM)
    sigterm_as_usual()
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, pool_workers._tell)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return got


def test_a_later_step_that_takes_the_wakeup_descriptor_does_not_make_the_worker_deaf() -> None:
    worker = Worker()
    worker.does(descriptor_taken)
    assert worker.results.get() == (0, 0, (True, None))
    worker.process.terminate()
    assert worker.end() == 128 + signal.SIGTERM


def descriptor_taken() -> None:
    hand_in_before_sigterm()
    signal.set_wakeup_fd(-1)  # as an event loop with a signal handler does at its end


class Failing(InferenceRunner):  # type: ignore[misc]
    def _run(self, *_: Any) -> None:
        assert not waits_for_sigterm()
        raise ConfigError("no GPU")


class Succeeding(InferenceRunner):  # type: ignore[misc]
    def _run(self, *_: Any) -> None:
        assert not waits_for_sigterm()


def waits_for_sigterm() -> bool:
    return pool_workers._sentry is not None


def fail_twice(folder: Path) -> None:
    step = Failing(ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), writer(folder))
    for _ in range(2):
        with pytest.raises(ConfigError):
            step.run(None)
        assert waits_for_sigterm()


def succeed_twice(folder: Path) -> None:
    step = Succeeding(ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), writer(folder))
    for _ in range(2):
        step.run(None)
        assert waits_for_sigterm()


def another_step_fails(_: Path) -> None:
    QuietErrors()
    assert not waits_for_sigterm()
    logger.opt(exception=ValueError("a filter's")).error("Got exception in task 3")
    assert waits_for_sigterm()


@pytest.mark.parametrize("work", [fail_twice, succeed_twice, another_step_fails])
def test_a_worker_whose_rank_is_over_hands_in_its_result(work: Any, tmp_path: Path) -> None:
    worker = FORKSERVER.Process(target=work, args=(tmp_path,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


def ends_where_it_would_take_a_task(failed: Any) -> None:
    """What the thread does while the main thread ends in the place of the lock."""

    class Slow(pool_workers._End):
        def __enter__(self) -> NoReturn:
            try:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(pool_workers._give_back_the_lock_of_the_tasks).result()
            except Exception:
                failed.set()
            super().__enter__()

    tasks = FORKSERVER.SimpleQueue()
    tasks._rlock = Slow(signal.SIGTERM)
    tasks.get()


def test_a_worker_that_is_about_to_end_has_no_lock_to_give_back() -> None:
    failed = FORKSERVER.Event()
    worker = FORKSERVER.Process(target=ends_where_it_would_take_a_task, args=(failed,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 128 + signal.SIGTERM
    assert not failed.is_set()
