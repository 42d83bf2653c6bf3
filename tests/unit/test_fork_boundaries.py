"""Forks beside a reader that starts programs: who waits, and for whom."""

import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
import weakref

import pytest
from datatrove.data import Document

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.process import event_loop, fork_boundaries
from datatrove_ckpt.process.fork_boundaries import between_forks, wait_to_fork


@pytest.fixture
def children():
    """Forks that live until the end of the test, as workers of a pool do."""
    pids = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_loop(call):
    call()


FORKS = {
    "the loop": in_loop,
    "to_thread": asyncio.to_thread,
    "executor": lambda call: asyncio.get_running_loop().run_in_executor(None, call),
}


@pytest.mark.parametrize("where", FORKS)
def test_a_fork_of_a_rollout_has_no_copy_of_a_pipe_that_the_reader_has_open(children, where):
    opened = threading.Event()
    forks = threading.Event()
    read = []

    def documents():
        reading, writing = os.pipe()
        opened.set()
        forks.wait(60)
        time.sleep(0.2)  # the fork comes now, if it does not wait
        os.close(writing)
        read.append(os.read(reading, 1))  # until all copies are closed
        os.close(reading)
        yield Document(text="", id="0")

    def fork():
        forks.set()
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        children.append(pid)

    async def main():
        wait_to_fork()
        batches = DocumentSource(documents()).batches(ResumePoint())
        first = asyncio.create_task(anext(batches))
        while not opened.is_set():
            await asyncio.sleep(0.001)
        if (waits := FORKS[where](fork)) is not None:
            await waits
        async with asyncio.timeout(10):
            await first
        await batches.aclose()

    event_loop.run(main())
    assert read == [b""]


def test_a_fork_for_which_the_reader_waits_does_not_wait_for_the_reader(monkeypatch):
    monkeypatch.setattr(fork_boundaries, "_SECONDS", 600.0)
    ended = []

    def fork():
        if (pid := os.fork()) == 0:
            os._exit(len(fork_boundaries._forks | fork_boundaries._reads))
        ended.append(os.waitpid(pid, 0)[1])

    def documents():
        for _ in range(2):
            pool = threading.Thread(target=fork, daemon=True)
            pool.start()
            pool.join(30)
            yield Document(text="", id="0")

    assert len(list(between_forks(documents()))) == 2
    assert ended == [0, 0]


def test_a_fork_waits_once_for_a_reader_that_waits_for_the_rollout(monkeypatch):
    monkeypatch.setattr(fork_boundaries, "_SECONDS", 0.1)
    forked = threading.Event()
    began = threading.Event()

    def documents():
        began.set()
        forked.wait(60)
        yield Document(text="", id="0")

    def fork_twice():
        wait_to_fork()
        for _ in range(2):
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        assert not fork_boundaries._reads
        forked.set()

    reader = threading.Thread(target=lambda: list(between_forks(documents())), daemon=True)
    reader.start()
    assert began.wait(60)
    rollout = threading.Thread(target=fork_twice, daemon=True)
    rollout.start()
    rollout.join(30)
    reader.join(30)
    assert not reader.is_alive()


def test_a_fork_waits_while_another_thread_starts_a_program():
    starts = threading.Event()
    goes_on = threading.Event()
    order = []

    class Slow(subprocess.Popen):
        def _execute_child(self, *arguments):
            starts.set()
            goes_on.wait(60)
            time.sleep(0.1)
            order.append("started")
            raise FileNotFoundError

    def start():
        with pytest.raises(FileNotFoundError):
            Slow(["true"])

    starter = threading.Thread(target=start)
    starter.start()
    assert starts.wait(60)
    goes_on.set()
    if (pid := os.fork()) == 0:
        os._exit(0)
    order.append("forked")
    os.waitpid(pid, 0)
    starter.join()
    assert order == ["started", "forked"]


def test_a_fork_keeps_no_variable_of_its_callers():
    """The loader of a training, say, whose workers would live as long as it."""

    def start():
        event = threading.Event()
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return weakref.ref(event)

    gc.disable()
    try:
        assert start()() is None
    finally:
        gc.enable()


def test_reads_and_forks_exclude_each_other_and_neither_starves():
    reads = []
    overlaps = []
    forking = set()
    ended = threading.Event()

    def documents():
        for number in range(50):
            reads.append(number)
            for _ in range(3):
                overlaps.extend(forking)
                time.sleep(0.0005)
            reads.remove(number)
            yield Document(text="", id=f"{number}")

    def fork(number):
        wait_to_fork()
        while not ended.is_set():
            fork_boundaries._before_fork()
            forking.add(number)
            overlaps.extend(reads)
            time.sleep(0.002)
            forking.discard(number)
            fork_boundaries._after_fork()

    threads = [threading.Thread(target=fork, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    assert len(list(between_forks(documents()))) == 50
    seconds = time.monotonic() - began
    ended.set()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert seconds < 30
