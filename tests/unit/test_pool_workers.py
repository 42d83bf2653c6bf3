"""A pool's worker that is ended while it hands in its error leaves no lock behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import multiprocess
import pytest
from loguru import logger

from datatrove_ckpt import InferenceConfig, InferenceRunner, pool_workers
from datatrove_ckpt.cli import QuietErrors
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.pool_workers import hand_in_before_sigterm, sigterm_as_usual
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


class Failing(InferenceRunner):  # type: ignore[misc]
    def _run(self, *_: Any) -> None:
        assert not waits_for_sigterm()
        raise ConfigError("no GPU")


def waits_for_sigterm() -> bool:
    return pool_workers._sentry is not None


def fail_twice(folder: Path) -> None:
    step = Failing(ask, InferenceConfig(server_type="dummy", model_name_or_path="m"), writer(folder))
    for _ in range(2):
        with pytest.raises(ConfigError):
            step.run(None)
        assert waits_for_sigterm()


def another_step_fails(_: Path) -> None:
    QuietErrors()
    assert not waits_for_sigterm()
    logger.opt(exception=ValueError("a filter's")).error("Got exception in task 3")
    assert waits_for_sigterm()


@pytest.mark.parametrize("work", [fail_twice, another_step_fails])
def test_a_worker_whose_task_failed_hands_its_error_in(work: Any, tmp_path: Path) -> None:
    worker = FORKSERVER.Process(target=work, args=(tmp_path,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
