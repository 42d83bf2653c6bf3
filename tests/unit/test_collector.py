"""The settings of the garbage collector fit a run, and the old ones are restored afterwards."""

import gc
import threading

import pytest

from datatrove_ckpt.process.gc_tuning import gc_tuned


@pytest.fixture(autouse=True)
def settings():
    """Whatever a test does, the next one has Python's."""
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


def test_ranks_in_threads_share_it_until_the_last_one_ends():
    before = gc.get_threshold()
    entered, leave = threading.Event(), threading.Event()

    def other_rank():
        with gc_tuned():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other_rank)
    with gc_tuned():
        during = gc.get_threshold()
        thread.start()
        entered.wait()
    assert gc.get_threshold() == during
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


def test_what_a_rank_leaves_behind_is_not_frozen_for_the_next():
    with gc_tuned():
        frozen = gc.get_freeze_count()
        with gc_tuned():
            left_behind = [[] for _ in range(1000)]
        with gc_tuned():
            assert 0 < gc.get_freeze_count() < frozen + len(left_behind)
