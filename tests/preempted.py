"""Runs that are told to stop, by a signal or at a line of the log."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from loguru import logger

from datatrove_ckpt.errors import Preempted
from tests.jobs import documents

DRAINS = "requests in flight have"


def send_signal(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@contextmanager
def when_logged(text, action):
    """Does something once a line with this text is logged."""
    todo = [action]
    handler = logger.add(lambda line: todo.pop()() if text in line and todo else None)
    try:
        yield
    finally:
        logger.remove(handler)


@contextmanager
def signal_once(condition, sent=signal.SIGTERM):
    """Sends this process a signal."""

    def watch():
        while not condition():
            time.sleep(0.001)
        send_signal(sent)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def preempted(
    step,
    number,
    server,
    asked,
    draining=None,
    sent=signal.SIGTERM,
    end=Preempted,
    match=None,
):
    """Runs so many documents, and is signalled once so many requests are asked.

    Args:
        draining: what happens while requests are waited for: the server answers.
    """
    once_asked = signal_once(lambda: len(server.payloads) >= asked, sent)
    with (
        once_asked,
        when_logged(DRAINS, draining or server.release),
        pytest.raises(end, match=match),
    ):
        step.run(documents(number))
