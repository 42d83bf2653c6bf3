"""An early stop: what still finishes, what is saved, and which handler gets the signal afterwards.

Most tests run in this process, whose signals they set up themselves; the last ones use real
processes.
"""

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.errors import DocumentFailed, Preempted, StorageFailed
from datatrove_ckpt.inference.servers import guardian
from datatrove_ckpt.output.chunk_writing import ChunkOutput
from datatrove_ckpt.process import preemption, shutdown
from datatrove_ckpt.testing import FakeServer, outputs
from tests.engines import ENGINE, engines, lines
from tests.jobs import ask, documents, run_job, runner, writer
from tests.patience import until_async
from tests.preempted import DRAINS, preempted, send_signal, signal_once, when_logged

SIGNALS = [signal.Signals[name] for name in shutdown.SIGNALS]


async def plain(document, generate):
    return (await ask(document, generate)).text


def expected(tmp_path, rollout, number):
    """The output of a run that nothing interrupted."""
    with FakeServer() as server:
        run_job(tmp_path / "undisturbed", server, number, rollout)
    return outputs(tmp_path / "undisturbed/output")


# --------------------------------------------------------------------------- what still finishes


@pytest.mark.matrix(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name
)
def test_requests_in_flight_finish_nothing_new_starts_and_the_old_handler_gets_the_signal(
    tmp_path, reraised, number
):
    finished = []

    async def rollout(document, generate):
        result = await plain(document, generate)
        finished.append(document.id)
        return result

    with FakeServer(hold_after=0) as server:
        step = runner(tmp_path, server, rollout, config={"max_concurrent_generations": 4})
        handlers = [signal.getsignal(name) for name in SIGNALS]
        end = KeyboardInterrupt if number == signal.SIGINT else Preempted
        preempted(step, 20, server, 4, sent=number, end=end)
        assert reraised == [number]
        assert [signal.getsignal(name) for name in SIGNALS] == handlers
        assert len(finished) == server.asked.total() == 4
        step.run(documents(20))
        assert sorted(finished) == sorted(document.id for document in documents(20))
        assert set(server.asked.values()) == {1}
    assert outputs(tmp_path / "output") == expected(tmp_path, plain, 20)


def test_the_wait_ends_after_drain_seconds_and_only_abandoned_requests_are_sent_again(
    tmp_path, reraised, log
):
    with FakeServer(hold_after=6) as server:
        step = runner(
            tmp_path, server, plain, drain_seconds=0.3, config={"max_concurrent_generations": 4}
        )
        preempted(step, 20, server, 10, lambda: None)
        assert log.said("in flight: 4 requests")
        server.release()
        step.run(documents(20))
        assert server.asked.total() == 24
    assert outputs(tmp_path / "output") == expected(tmp_path, plain, 20)


def test_several_signals_of_one_event_are_one(tmp_path, reraised, log, monkeypatch):
    """srun passes SIGTERM on to tasks that have received it already."""
    monkeypatch.setattr(preemption, "SAME_EVENT", 600.0)
    with FakeServer(hold_after=0) as server:
        step = runner(tmp_path, server, plain)

        def again():
            send_signal()
            send_signal(signal.SIGUSR1)
            server.release()

        preempted(step, 1, server, 1, again)
    assert reraised == [signal.SIGTERM, signal.SIGUSR1]
    assert log.said(", saved: 1 document of this run")
    assert not log.said("Given up")


def test_signals_the_user_names_and_no_others(tmp_path, server, reraised):
    async def sends(document, generate):
        send_signal(number)
        return await plain(document, generate)

    only = {"drain_signals": ["SIGHUP"] * 2}
    number = signal.SIGHUP
    with pytest.raises(Preempted, match="SIGHUP"):
        run_job(tmp_path / "1", server, 1, sends, **only)
    number = signal.SIGUSR1
    run_job(tmp_path / "2", server, 1, sends, **only)
    assert reraised == [signal.SIGHUP, signal.SIGUSR1]


def test_a_document_that_fails_while_the_rank_drains_does_not_keep_the_signal_from_its_handler(
    tmp_path, reraised, log
):
    async def fails(document, generate):
        await ask(document, generate)
        send_signal()
        raise RuntimeError("a bug")

    with FakeServer() as server, pytest.raises(DocumentFailed, match="a bug"):
        run_job(tmp_path, server, 1, fails)
    assert reraised == [signal.SIGTERM]
    assert any("ERROR" in line and "a bug" in line for line in log)


@pytest.mark.matrix("status", [500, 503, 429])
def test_an_answer_of_a_server_that_also_got_the_signal_fails_no_document(
    tmp_path, reraised, status
):
    ending = []
    with FakeServer(
        status=lambda payload, times: status if ending else None, hold_after=0
    ) as server:

        def both_end():
            ending.append(True)
            server.release()

        settings = {"max_concurrent_generations": 4}
        step = runner(tmp_path, server, plain, on_document_error="dead_letter", config=settings)
        preempted(step, 6, server, 4, both_end)
        ending.clear()
        step.run(documents(6))
    letters = tmp_path / "checkpoints/00000/dead_letters.jsonl"
    assert not letters.exists()
    assert outputs(tmp_path / "output") == expected(tmp_path, plain, 6)


# --------------------------------------------------------------------------- at any moment


def test_what_fails_while_a_stop_saves_is_said_and_stays_a_stop(
    tmp_path, reraised, server, monkeypatch, log
):
    close = OpenCheckpoint._close

    def full(checkpoint, *rest):
        checkpoint.fail(StorageFailed("No space left on device."))
        time.sleep(0.1)  # the loop looks for failures meanwhile
        close(checkpoint, *rest)

    monkeypatch.setattr(OpenCheckpoint, "_close", full)

    async def stops(document, generate):
        send_signal()
        await asyncio.Event().wait()

    with pytest.raises(Preempted):
        run_job(tmp_path, server, 1, stops)
    assert reraised == [signal.SIGTERM]
    assert log.said("could not be saved: No space left")
    assert log.said("Correct the cause, and run again.")
    assert not log.said(", saved: ")


@pytest.mark.parametrize("who", ["rollout", "reader"])
def test_what_sleeps_keeps_nobody_waiting_once_nothing_is_in_flight(
    tmp_path, reraised, server, who
):
    never = threading.Event()

    async def rollout(document, generate):
        result = await plain(document, generate)
        if who == "rollout":
            send_signal()
            await asyncio.Event().wait()
        return result

    def reader():
        yield from documents(1)
        if who == "reader":
            send_signal()
            never.wait()

    try:
        with pytest.raises(Preempted):
            # Longer than a test may take.
            runner(tmp_path, server, rollout, drain_seconds=3600).run(reader())
    finally:
        never.set()


def test_a_request_that_was_refused_and_waits_keeps_nobody_waiting(tmp_path, reraised, policy):
    policy("SERVER", first=1e6, longest=1e6)

    def status(payload, times):
        threading.Timer(0.1, send_signal).start()  # while the request waits
        return 429

    with FakeServer(status=status) as server:
        settings = {"max_concurrent_generations": "auto"}
        # Longer than a test may take.
        step = runner(tmp_path, server, plain, drain_seconds=3600, config=settings)
        with pytest.raises(Preempted):
            step.run(documents(1))


def launching(here, monkeypatch, script):
    """A step that launches a server of this script, and waits long for its requests."""
    monkeypatch.setattr("tempfile.tempdir", str(here))
    (here / "engine.py").write_text(script)
    kwargs = {"server_script": "engine.py"}
    config = InferenceConfig("custom", "m", model_kwargs=kwargs, max_concurrent_generations=2)
    checkpoints = str(here / "checkpoints")
    return InferenceRunner(
        plain, config, writer(here), checkpoints_local_dir=checkpoints, drain_seconds=600
    )


def test_a_server_that_is_starting_is_stopped_at_once(here, reraised, monkeypatch):
    script = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(3600)"
    step = launching(here, monkeypatch, script)
    loads = signal_once(lambda: (here / "pid").exists() and (here / "pid").read_text())
    with loads, pytest.raises(Preempted):
        step.run(documents(2))
    pid = int((here / "pid").read_text())
    assert pid not in [process.pid for process in guardian.process_table()]


def test_a_server_that_ends_of_the_same_signal_is_not_started_again(
    here, reraised, monkeypatch, log
):
    """Slurm signals all processes of a step, the server among them."""
    step = launching(here, monkeypatch, ENGINE)
    asked = signal_once(lambda: Path("asked").exists() and len(lines("asked")) >= 2)
    with (
        asked,
        when_logged(DRAINS, lambda: os.kill(engines()[0], signal.SIGKILL)),
        pytest.raises(Preempted),
    ):
        step.run([Document(text=f"wait {number}", id=f"{number}") for number in range(5)])
    assert (len(engines()), len(lines("asked"))) == (1, 2)
    assert not log.said("ERROR")
    assert log.said("in flight: 2 requests")


def test_while_the_users_context_is_entered_a_signal_raises_at_once(tmp_path, reraised, server):
    after = []

    def slow():
        send_signal()
        after.append("still here")
        return {}

    with pytest.raises(Preempted):
        run_job(tmp_path, server, 2, plain, shared_context=slow)
    assert not after
    assert reraised == [signal.SIGTERM]
    assert not server.asked


@pytest.mark.matrix("where", ["restore", "prepare"])
def test_before_the_first_document_a_signal_does_not_wait_for_a_remote(
    tmp_path,
    reraised,
    server,
    monkeypatch,
    where,
):
    """Restoring a checkpoint may take minutes, and a missing output folder is retried for five."""
    mirrored = {"checkpoints_remote_dir": str(tmp_path / "remote")}
    run_job(tmp_path, server, 3, plain, **mirrored)
    shutil.rmtree(tmp_path / "checkpoints")
    still_here = []

    def slow(*_):
        send_signal()
        still_here.append(where)

    with monkeypatch.context() as patch:
        patch.setattr(
            *((ObjectStore, "read") if where == "restore" else (ChunkOutput, "prepare")), slow
        )
        with pytest.raises(Preempted):
            run_job(tmp_path, server, 3, plain, **mirrored)
    assert not still_here
    assert reraised == [signal.SIGTERM]
    run_job(tmp_path, server, 3, plain, **mirrored)
    assert set(server.asked.values()) == {1}
    assert outputs(tmp_path / "output") == expected(tmp_path, plain, 3)


# --------------------------------------------------------------------------- Slurm's time limit


def ends_once_asked(server, monkeypatch):
    """A job whose time limit is near once the server has a request."""

    async def deadline():
        await until_async(lambda: server.payloads)
        return time.time() + 0.1

    monkeypatch.setattr(preemption.slurm_job, "slurm_deadline", deadline)


@pytest.mark.parametrize("requeues", [True, False])
def test_slurms_time_limit_is_a_signal_to_whoever_requeues_and_else_an_error(
    tmp_path, request, monkeypatch, requeues
):
    reraised = request.getfixturevalue("reraised") if requeues else [signal.SIGUSR1]
    with FakeServer(hold_after=0) as server:
        ends_once_asked(server, monkeypatch)
        with when_logged(DRAINS, server.release), pytest.raises(Preempted, match="time limit"):
            run_job(tmp_path, server, 3, plain, config={"max_concurrent_generations": 1})
        assert server.asked.total() == 1
    assert reraised == [signal.SIGUSR1]
