"""Several ranks of one process at once (``ranks_at_once``): the next ones start while an answer is
waited for.
"""

import asyncio
import gc
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.errors import DocumentFailed, Preempted, UnexpectedExit
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.process import rank_threads
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.workers import TaskList
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests import jobs
from tests.engines import SCRIPT, asked, engines
from tests.histories import read_history
from tests.kept import until_kept
from tests.patience import until, until_async
from tests.processes import Process, is_alive


@pytest.fixture(autouse=True)
def _in_tmp_path(here, monkeypatch, policy):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    policy("RESTART", first=0.01)
    monkeypatch.setattr(host, "_PROBE_INTERVAL", 0.1)
    Path("engine.py").write_text(SCRIPT)


def executor(*ranks, folder="job", at_once=3, rollout=jobs.ask, workers=1, between=()):
    """A job over one server. ``ranks``: the texts of each, with commas between them."""
    for rank, texts in enumerate(ranks):
        path = Path(folder, f"input/{rank}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"id": f"{rank}-{n}", "text": text})
            for n, text in enumerate(texts.split(","))
        ]
        path.write_text("\n".join(lines) + "\n")
    config = InferenceConfig(
        "custom",
        "m",
        model_kwargs={"server_script": "engine.py"},
        server_stop_timeout_sec=2.0,
        max_concurrent_generations=8,
    )
    root = Path(folder).absolute()
    step = InferenceRunner(
        rollout, config, jobs.writer(root), checkpoints_local_dir=str(root / "checkpoints")
    )
    return LocalPipelineExecutor(
        [JsonlReader(str(root / "input")), *between, step],
        tasks=len(ranks),
        workers=workers,
        logging_dir=str(root / "logs"),
        start_method="fork",
        ranks_at_once=at_once,
    )


@contextmanager
def gate_opens(when):
    """The engine answers the texts that begin with "wait" once ``when`` is true; the test fails if
    it never is.
    """

    def watch():
        try:
            until(when)
        finally:
            Path("gate").touch()

    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(watch)
        yield
    opened.result()


def asked_all(*texts):
    return lambda: asked().keys() >= {*texts}


RANKS = ("wait 0,a,b", "wait 1,c", "d,e")


def test_they_share_a_server_each_has_its_own_log_and_they_write_what_ranks_in_turn_write():
    with gate_opens(asked_all("wait 0", "wait 1", "e")):
        stats = executor(*RANKS).run()
    assert stats is not None
    assert stats.stats[1].stats["documents_processed"].total == 7
    assert len(engines()) == 1
    assert set(asked().values()) == {1}
    for rank in range(3):
        text = Path(f"job/logs/logs/task_{rank:05d}.log").read_text()
        assert f"Processing done for rank={rank}" in text
        assert re.findall(r"Reading input file (\d)", text) == [str(rank)]
        assert len(re.findall(r"documents? written to", text)) == 1
    assert executor(*RANKS).run() is None
    at_once = outputs(Path("job/output"))
    Path("job").rename("at once")
    executor(*RANKS, at_once=1).run()
    assert outputs(Path("job/output")) == at_once


def test_at_most_so_many_run_at_once():
    with gate_opens(asked_all("wait 0", "wait 1")):
        executor("wait 0", "wait 1", "wait 2", at_once=2).run()
    asked_in_order = [line.split(" ", 1)[1] for line in Path("asked").read_text().splitlines()]
    assert sorted(asked_in_order[:2]) == ["wait 0", "wait 1"]
    assert Path("job/checkpoints/00002/run.json").stat().st_mtime >= Path("gate").stat().st_mtime


def is_mended():
    return Path("mended").exists()


async def cannot_do_bad_ones(document, generate):
    if document.text == "bad" and not is_mended():
        raise ValueError("bad")
    return await jobs.ask(document, generate)


def test_the_failure_of_a_rank_lets_the_others_save_what_they_have():
    ranks = ("wait 0,a", "wait 1", "bad", "b")
    log = Path("job/logs/logs/task_00001.log")
    with (
        gate_opens(lambda: log.exists() and "the failure of another task" in log.read_text()),
        pytest.raises(DocumentFailed, match="2-0"),
    ):
        executor(*ranks, rollout=cannot_do_bad_ones).run()
    assert asked() == {"wait 0": 1, "a": 1, "wait 1": 1}
    Path("mended").touch()
    executor(*ranks, rollout=cannot_do_bad_ones).run()
    assert set(asked().values()) == {1}
    assert jobs.ids(Path("job")) == ["0-0", "0-1", "1-0", "2-0", "3-0"]


def the_deadly_one_last(data, rank=0, world_size=1):
    for document in data:
        if document.text == "die once":
            until(asked_all("wait 0", "wait 1"))
        yield document


def test_a_server_that_dies_is_started_once_for_all_and_each_request_is_sent_again_once():
    def restarted():
        return asked()["wait 0"] == asked()["wait 1"] == asked()["die once"] == 2

    with gate_opens(restarted):
        executor("wait 0", "wait 1", "die once", between=[the_deadly_one_last]).run()
    assert len(engines()) == 2
    assert asked() == {"wait 0": 2, "wait 1": 2, "die once": 2}
    histories = [read_history(path) for path in Path("job/checkpoints").glob("*/history.jsonl")]
    assert [history.last.own.restarts for history in histories if history.last].count(1) == 1
    assert all(
        "death" in [event.what for event in history.attempts[-1].servers] for history in histories
    )
    assert jobs.ids(Path("job")) == ["0-0", "1-0", "2-0"]
    for rank in range(3):
        assert "is given up" in Path(f"job/logs/logs/task_{rank:05d}.log").read_text()


class NoServers:
    has_room = True

    async def close(self, ends_well):
        pass


def ignore(rank, result):
    pass


def test_a_signal_just_before_a_rank_starts_stops_it(monkeypatch):
    preemption = Preemption((), 0.0)
    stopped = []

    class SignalledHost(rank_threads.HostLoop):
        def __init__(self, *arguments):
            preemption.shutdown.request("SIGTERM")
            super().__init__(*arguments)

    def run(rank):
        with Preemption((), 0.0) as of_rank:
            stopped.append(of_rank.shutdown.is_requested)

    monkeypatch.setattr(rank_threads, "HostLoop", SignalledHost)
    with pytest.raises(Preempted):
        rank_threads.RankThreads(
            2, preemption, NoServers, run, TaskList(iter([0, 1]), ignore)
        ).work_through()
    assert stopped == [True]


async def leaves(document, generate):
    """For one document, in a task of its own: an exit leaves the event loop, and not the
    rollout.
    """

    async def part():
        if document.text == "exit":
            sys.exit()
        return await jobs.ask(document, generate)

    (result,) = await asyncio.gather(part())
    return result


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exit_in_a_task_of_a_rollout_is_an_error():
    """The loop has ended before it has seen the end of the server's process."""
    gc.freeze()
    with pytest.raises(UnexpectedExit, match=r"called sys.exit\(\)"):
        executor("a,b", "exit", "c", rollout=leaves).run()
    until(lambda: not any(is_alive(pid) for pid in engines()))
    gc.collect()
    gc.unfreeze()
    assert not Path("job/logs/completions/00001").exists()


def bad_ones_after_a_request(data, rank=0, world_size=1):
    """Before they are handed out: a rank that has handed out all its documents lets the next one start."""
    for document in data:
        if document.text == "bad":
            until(asked)
        yield document


left_behind = []
asked_late = []


def is_complete():
    return "Processing done" in Path("job/logs/logs/task_00000.log").read_text()


async def leaves_a_task_behind(document, generate):
    async def late():
        await until_async(is_complete)
        asked_late.append(True)
        await generate({"messages": [{"role": "user", "content": "late"}]})

    if document.id == "0-0":
        left_behind.append(asyncio.create_task(late()))
    return await jobs.ask(document, generate)


def test_a_task_that_a_rollout_has_left_behind_asks_nothing_once_its_rank_is_complete():
    with gate_opens(lambda: asked_late):
        executor("a", "wait 1,b", rollout=leaves_a_task_behind).run()
    assert asked() == {"a": 1, "wait 1": 1, "b": 1}


def test_no_rank_starts_while_another_fails():
    log = Path("job/logs/logs/task_00000.log")
    with (
        gate_opens(lambda: log.exists() and "has failed (DocumentFailed)" in log.read_text()),
        pytest.raises(DocumentFailed, match="0-1"),
    ):
        executor(
            "wait 0,bad", "c", rollout=cannot_do_bad_ones, between=[bad_ones_after_a_request]
        ).run()
    assert asked() == {"wait 0": 1}


@contextmanager
def opened():
    yield {}


@pytest.mark.parametrize(
    "changes, config, most",
    [
        ({}, {}, 32),
        ({"shared_context": {"a": 1}}, {}, 32),
        ({"shared_context": opened}, {}, 1),
        ({}, {"reuse_servers": False}, 1),
    ],
)
def test_ranks_run_in_turn_where_they_cannot_share(changes, config, most):
    async def ask(document, generate, **shared):
        return await jobs.ask(document, generate)

    settings = InferenceConfig("endpoint", "m", endpoint_url="http://127.0.0.1:1", **config)
    step = InferenceRunner(
        ask, settings, jobs.writer(Path()), checkpoints_local_dir="checkpoints", **changes
    )
    assert LocalPipelineExecutor([step], 2, 1, "logs")._most_at_once == most
    assert LocalPipelineExecutor([step, step], 2, 1, "logs", ranks_at_once=3)._most_at_once == 1


# A job in a process of its own -------------------------------------------------------------------

JOB = """
import sys
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.readers import JsonlReader

async def ask(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

config = InferenceConfig("endpoint", "fake", endpoint_url=sys.argv[1], max_concurrent_generations=20)
writer = JsonlWriter("output", "${rank}_chunk_${chunk_index}.jsonl", compression=None)
step = InferenceRunner(ask, config, writer, checkpoints_local_dir="checkpoints", records_per_chunk=3)
LocalPipelineExecutor(
    [JsonlReader("input"), step], tasks=3, workers=1, logging_dir="logs", ranks_at_once=3
).run()
"""


def job(server, before=""):
    Path("job.py").write_text(before + JOB)
    Path("input").mkdir(exist_ok=True)
    for rank in range(3):
        lines = [json.dumps({"id": f"{rank}-{n}", "text": f"text {rank} {n}"}) for n in range(5)]
        Path(f"input/{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return Process([sys.executable, "job.py", server.url], Path.cwd())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_three_ranks_have_requests_in_flight(number):
    with FakeServer(hold_after=9) as server:
        process = job(server)
        until(lambda: len(server.payloads) == 15)
        until_kept(Path("checkpoints"), 9)
        os.kill(process.popen.pid, number)
        if number == signal.SIGTERM:
            until(lambda: b"SIGTERM" in Path("logs/logs/task_00002.log").read_bytes())
            server.release()
        assert process.end() == (-9 if number == signal.SIGKILL else 128 + number)
        server.release()
        process = job(server)
        assert process.end() == 0, process.log
        times = Counter(server.asked.values())
        assert times == ({1: 15} if number == signal.SIGTERM else {1: 9, 2: 6})
    assert jobs.ids(Path()) == sorted(f"{rank}-{n}" for rank in range(3) for n in range(5))


def test_a_signal_does_not_wait_for_a_rank_that_has_not_begun():
    """Task 1 waits for its mirror, in a thread, where no signal interrupts it."""
    slow = """
import time
import datatrove_ckpt.generation.rank as rank
usual = rank._Run.lead
def lead(run):
    if run.rank == 1:
        open("waits", "w").close()
        time.sleep(3600)
    usual(run)
rank._Run.lead = lead
"""
    with FakeServer(hold_after=4) as server:
        process = job(server, slow)
        until(Path("waits").exists)
        os.kill(process.popen.pid, signal.SIGTERM)
        until(lambda: b"SIGTERM" in Path("logs/logs/task_00000.log").read_bytes())
        server.release()
        assert process.end() in (-signal.SIGTERM, 128 + signal.SIGTERM)
        process = job(server)
        assert process.end() == 0, process.log
        assert set(server.asked.values()) == {1}


# Several workers ---------------------------------------------------------------------------------


def test_the_process_waits_for_a_rank_that_closes_its_files():
    preemption = Preemption((), 0.0)

    def run(rank):
        with Preemption((), 0.0) as of_rank:
            with of_rank.watched(lambda: None):
                assert not preemption.shutdown.open_closings
            until(lambda: preemption.shutdown.open_closings == 1)

    rank_threads.RankThreads(
        2, preemption, NoServers, run, TaskList(iter([0]), ignore)
    ).work_through()
    assert not preemption.shutdown.open_closings


def test_a_task_that_ends_after_the_event_loop_of_a_stopped_process_is_no_error():
    """It has closed its files. The loop then waits for no task, and cancels what it leaves."""
    preemption = Preemption((), 0.0)
    left = threading.Event()

    class LeftServers(NoServers):
        async def close(self, ends_well):
            left.set()

    def run(rank):
        preemption.shutdown.request("SIGTERM")
        assert left.wait(300)
        preemption.shutdown.check()

    threads = rank_threads.RankThreads(2, preemption, LeftServers, run, TaskList(iter([0]), ignore))
    with pytest.raises(Preempted):
        threads.work_through()
