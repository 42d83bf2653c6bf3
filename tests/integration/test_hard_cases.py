"""What users' code does to a run: cancellations that leak, caches, forks, stalled readers, odd
values.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from datatrove.pipeline.inference.types import InferenceError
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.errors import (
    CkptError,
    DocumentFailed,
    RequestPoisoned,
    StorageFailed,
    TooManyDeadLetters,
)
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, config, documents, ids, run_job, runner
from tests.patience import until, until_async


def test_a_run_that_is_stopped_makes_no_dead_letters_of_what_was_in_work(tmp_path):
    stops = [True]

    async def converts(document, generate):
        if document.id == "id 5" and stops:
            await until_async(lambda: server.asked.total() >= 5)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        try:
            return await ask(document, generate)
        except BaseException as error:
            raise RuntimeError("something went wrong") from error

    with FakeServer(hold_after=2) as server:
        step = runner(tmp_path, server, converts, on_document_error="dead_letter", drain_seconds=0)
        with pytest.raises(KeyboardInterrupt):
            step.run(documents(6))
        stops.clear()
        server.release()
        step.run(documents(6))
    assert ids(tmp_path) == [f"id {index}" for index in range(6)]


def test_max_dead_letters_counts_those_of_earlier_attempts(tmp_path, server):
    async def fails(document, generate):
        raise RuntimeError("always")

    settings = {
        "on_document_error": "dead_letter",
        "max_dead_letters": 2,
        "records_per_chunk": 100,
    }
    for _ in range(5):
        with pytest.raises(TooManyDeadLetters):
            run_job(
                tmp_path, server, 8, fails, config={"max_concurrent_generations": 1}, **settings
            )


def test_a_forked_worker_that_outlives_its_runner_does_not_keep_the_rank_locked(
    tmp_path,
):
    code = f"""
import multiprocessing, os, signal
from pathlib import Path
from datatrove_ckpt.checkpoint.lock import Lock
lock = Lock(Path({str(tmp_path / "lock")!r}))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.wait()
    try:
        Lock(tmp_path / "lock").release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_poisoned_document_is_a_dead_letter_only_where_letters_are_kept(
    tmp_path, server, grouped
):
    async def poison(document, generate):
        if document.id == "id 1":
            error = InferenceError(None, RequestPoisoned("kills servers"))
            error.__cause__ = RequestPoisoned("kills servers")
            raise ExceptionGroup("in a task group", [error]) if grouped else error
        return await ask(document, generate)

    plain = JsonlWriter(str(tmp_path / "plain"), "${rank}.jsonl", compression=None)
    with pytest.raises(DocumentFailed, match="'id 1'"):
        InferenceRunner(poison, config(server), plain).run(documents(3))
    run_job(tmp_path, server, 3, poison)
    assert ids(tmp_path) == ["id 0", "id 2"]


def test_documents_are_asked_while_the_reader_stalls(tmp_path, server):
    all_asked = threading.Event()

    def read():
        yield from documents(5)
        until(lambda: len(server.asked) == 5)  # else documents wait for the reader's next one
        all_asked.set()

    runner(tmp_path, server).run(read())
    assert all_asked.is_set()


# a checkpoint that is deleted while its run is on ------------------------------------------------


@pytest.mark.matrix("name", ["", "00000", "00000/run.json"])
def test_a_checkpoint_that_is_deleted_during_its_run(tmp_path, name):
    removed = tmp_path / "checkpoints" / name

    def answer(payload, times):
        if payload["messages"][-1]["content"] == "text 2":
            removed.unlink() if removed.is_file() else shutil.rmtree(removed, ignore_errors=True)
        return "yes"

    with FakeServer(answer) as server, pytest.raises(CkptError) as caught:
        run_job(tmp_path, server, 6, config={"max_concurrent_generations": 1})
    own = caught.value
    assert isinstance(own, StorageFailed)
    assert str(tmp_path / "checkpoints") in str(own)
    assert "It was removed, moved or unmounted during the run" in str(own)
    assert "what is saved is kept" not in str(own)
