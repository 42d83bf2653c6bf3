"""Waiting for an item of a queue ends when its time is over, however busy the machine is."""

import os
import queue
import subprocess
import threading

import pytest

from datatrove_ckpt.process.shutdown import get_within


def test_a_wait_ends_also_if_its_time_is_over_before_it_begins():
    burners = [
        subprocess.Popen(["sh", "-c", "while :; do :; done"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        waiters = [threading.Thread(target=wait_often, daemon=True) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(300)
            assert not waiter.is_alive()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def wait_often():
    for _ in range(700):
        items = queue.SimpleQueue()
        with pytest.raises(queue.Empty):
            get_within(items, 2e-6)
        items.put(1)
        assert get_within(items, 2e-6) == 1
