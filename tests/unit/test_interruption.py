"""A pool ends although a worker died with the lock of its tasks."""

from __future__ import annotations

import threading
from typing import Any

import multiprocess
import pytest
from multiprocess.pool import Pool

from datatrove_ckpt.interruption import Interruption

FORKSERVER = multiprocess.get_context("forkserver")
MORE_THAN_A_PIPE_HOLDS = b"x" * (1 << 20)


def dies_with_the_lock(tasks: Any) -> None:
    tasks._rlock.acquire()


@pytest.fixture
def tasks() -> Any:
    queue = FORKSERVER.SimpleQueue()
    worker = FORKSERVER.Process(target=dies_with_the_lock, args=(queue,))
    worker.start()
    worker.join(60)
    assert not queue._rlock.acquire(timeout=0)
    return queue


def help_while_it_runs(tasks: Any, task_handler: threading.Thread) -> None:
    helps = Pool._help_stuff_finish
    with Interruption([]):
        assert Pool._help_stuff_finish is not helps
        Pool._help_stuff_finish(tasks, task_handler, 1)
    assert Pool._help_stuff_finish is helps


@pytest.mark.timeout(60)
def test_a_task_handler_that_has_no_more_to_put_needs_no_lock(tasks: Any) -> None:
    task_handler = threading.Thread(target=tasks.put, args=("sentinel",))
    task_handler.start()
    help_while_it_runs(tasks, task_handler)
    task_handler.join()


@pytest.mark.timeout(60)
def test_a_task_handler_that_waits_for_room_in_the_pipe_gets_it(tasks: Any) -> None:
    task_handler = threading.Thread(target=tasks.put, args=(MORE_THAN_A_PIPE_HOLDS,))
    task_handler.start()
    help_while_it_runs(tasks, task_handler)
    task_handler.join()


@pytest.mark.timeout(60)
def test_where_the_lock_is_free_no_worker_takes_a_task_any_more() -> None:
    tasks = FORKSERVER.SimpleQueue()
    task_handler = threading.Thread(target=tasks.put, args=(MORE_THAN_A_PIPE_HOLDS,))
    task_handler.start()
    help_while_it_runs(tasks, task_handler)
    task_handler.join()
    assert not tasks._rlock.acquire(timeout=0)
