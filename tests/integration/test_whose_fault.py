"""Whose fault is it? A server that is away never costs a document, a document that always fails
never ends a run, and nobody's sys.exit ends a rank in success.
"""

import asyncio
import re
import sqlite3
import threading
from contextlib import closing, contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
from datatrove.executor import LocalPipelineExecutor

from datatrove_ckpt.checkpoint.history import ProgressRecord
from datatrove_ckpt.errors import (
    CkptError,
    DocumentFailed,
    ServerRefused,
    ServerStartFailed,
    ServerUnavailable,
    UnexpectedExit,
)
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.testing import FakeServer
from tests.histories import read_history
from tests.jobs import (
    STOPS_SOON,
    Budget,
    all_of,
    ask,
    documents,
    ids,
    letters,
    rejects,
    run_job,
    runner,
)
from tests.patience import until

# servers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, patience, at_terminal, ends",
    [
        ("nothing", 600, True, "0.1 s:\n.*: Connection refused\n.*server_patience_seconds: 1800"),
        ("nothing", 600, False, "0.5 s:"),  # a job's server may start later
        ("nothing", 500, True, "0.5 s:"),
        ("answers", 600, True, "0.5 s:"),
        ("a chunk of another task", 600, True, "0.5 s:"),
    ],
)
def test_only_a_new_run_at_a_terminal_ends_soon_where_nothing_listens(
    tmp_path, monkeypatch, before, patience, at_terminal, ends
):
    monkeypatch.setattr(host, "has_terminal", lambda: at_terminal)
    monkeypatch.setattr(host, "NEW_RUN_SECONDS", 0.1)
    monkeypatch.setattr(host, "ready_window", lambda config: 0.5)
    settings = {"server_patience_seconds": patience}
    with FakeServer(status=rejects(["text 3"], 401)) as server:
        if before == "answers":
            with pytest.raises(ServerRefused):
                runner(tmp_path, server).run(documents(4), 0, 2)
        if before == "a chunk of another task":
            runner(tmp_path, server).run(documents(2), 1, 2)
    with pytest.raises(ServerStartFailed, match=f"(?s)No endpoint was ready within {ends}"):
        runner(tmp_path, server, config=settings).run(documents(4), 0, 2)


async def swallows_and_tries_again(document, generate):
    while True:
        try:
            return await ask(document, generate)
        except Exception:
            continue


async def gives_up(document, generate):
    try:
        return await ask(document, generate)
    except Exception:
        return None


@pytest.mark.matrix(
    "rollout, status", [(gives_up, 503), (ask, 429), (swallows_and_tries_again, 500)]
)
def test_an_outage_makes_no_dead_letters_and_the_same_command_resumes(tmp_path, rollout, status):
    settings = {"on_document_error": "dead_letter", "skip_bad_requests": True, "config": STOPS_SOON}
    with FakeServer(status=lambda payload, times: status) as server:
        with pytest.raises(
            ServerUnavailable, match=rf"HTTP {status} .*A request of document 'id \d' \(number"
        ):
            run_job(tmp_path, server, 8, rollout, **settings)
        assert letters(tmp_path) == ids(tmp_path) == []
        server._status = lambda payload, times: None
        run_job(tmp_path, server, 8, rollout, **settings)
    assert ids(tmp_path) == all_of(8)


def test_an_endpoint_that_goes_away_is_waited_for(tmp_path):
    gone = threading.Event()

    async def rollout(document, generate):
        if document.id == "id 3" and not gone.is_set():
            gone.set()
            server.__exit__(None, None, None)
        return await ask(document, generate)

    server = FakeServer()
    server.__enter__()
    settings = {
        "on_document_error": "dead_letter",
        "config": {"max_concurrent_generations": 1} | STOPS_SOON,
    }
    with pytest.raises(
        ServerUnavailable, match=r"No request was answered .*ConnectionRefusedError.*'id 3'"
    ):
        run_job(tmp_path, server, 8, rollout, **settings)
    assert letters(tmp_path) == []
    with FakeServer() as another:
        run_job(tmp_path, another, 8, rollout, **settings)
        assert set(another.asked) == {f"text {number}" for number in range(3, 8)}
    assert ids(tmp_path) == all_of(8)


@pytest.mark.parametrize("number", [1, 2])
def test_an_endpoint_that_hangs_is_in_the_log_and_in_the_history(
    tmp_path, log, monkeypatch, number
):
    monkeypatch.setattr(client, "hang_after", lambda longest: 0.1)
    path = tmp_path / "checkpoints/00000/history.jsonl"

    def is_told():
        silent = [one for one in read_history(path).records if isinstance(one, ProgressRecord)]
        return any(one.silence.seconds > one.silence.patience == 0 for one in silent)

    def answer(payload, times):
        if "text 3" in str(payload):
            until(is_told)
        return "hi"

    with FakeServer(answer) as server:
        urls = [server.url, f"{server.url}/v1"][:number]
        endpoints = SimpleNamespace(url=urls)
        run_job(tmp_path, endpoints, 4, config={"max_concurrent_generations": 1})
        assert server.asked.total() == 4
    name = "The server" if number == 1 else server.url
    assert re.search(rf"{name}(/v1)? has not answered for ", "".join(log))
    assert ids(tmp_path) == all_of(4)


# documents ---------------------------------------------------------------------------------------


async def embeds(document, generate):
    await generate.embed(document.text)
    return {"text": "fine"}


def vector(last):
    return {"data": [{"index": 0, "embedding": [0.5, last]}]}


FAULTS = {"error": {"error": {"message": "upstream", "code": 500}}, "NaN": vector(None)}
AT_FAULT = {"request_max_attempts": 2, "max_concurrent_generations": 4}


@pytest.mark.matrix("fault", [500, 504, 403, 451, *FAULTS])
def test_a_document_that_always_fails_while_others_are_answered_is_set_aside(tmp_path, fault):
    """First it stops the run by name. The next run has nothing to compare it with."""
    rollout = ask if isinstance(fault, int) else embeds
    dead = {"on_document_error": "dead_letter", "config": AT_FAULT}
    retry = {**dead, "retry_dead_letters": True}

    def asked():
        return sum("'text 1'" in str(payload) for payload in server.payloads)

    def embedding(payload):
        return FAULTS[fault] if payload["input"] in bad else vector(0.5)

    bad = ["text 1"]
    with FakeServer() as server:
        if rollout is ask:
            server._status = rejects(bad, fault)
        server.paths["/v1/embeddings"] = embedding
        named = r"'id 1' \(number 1 .* after \d attempts: .* dead letters of such documents"
        with pytest.raises(DocumentFailed, match=named) as caught:
            run_job(tmp_path, server, 90, rollout, config=AT_FAULT)
        assert "Check the server" not in str(caught.value)
        before = asked()
        for settings in (dead, retry):
            run_job(tmp_path, server, 90, rollout, **settings)
        # Once more, where only a probe shows that the server works.
        assert before + 4 <= asked() <= before + 6
        assert [letter["id"] for letter in letters(tmp_path)] == ["id 1"]
        assert [letter["attempts"] for letter in letters(tmp_path, "retry-00001")] == [2]
        assert len(ids(tmp_path)) == 89
        bad.clear()
        run_job(tmp_path, server, 90, rollout, **retry)
    assert sorted(ids(tmp_path)) == sorted(all_of(90))


# probes ------------------------------------------------------------------------------------------


def cached_errors(folder):
    with closing(sqlite3.connect(folder / "checkpoints/00000/replay.sqlite3")) as cache:
        query = "select count(*) from request_cache where error_message is not null"
        return cache.execute(query).fetchone()[0]


def combined(*columns):
    """All combinations. Those that are not slow have each value at least once."""
    count = max(map(len, columns))
    quick = [tuple(column[row % len(column)] for column in columns) for row in range(count)]
    return [
        row if row in quick else pytest.param(*row, marks=pytest.mark.slow)
        for row in product(*columns)
    ]


@pytest.mark.parametrize("status, answered", combined([400, 404, 422, 403], [0, 20, 80]))
def test_a_server_that_refuses_all_from_some_moment_on_makes_no_dead_letter(
    tmp_path, status, answered
):
    """As with a key that expires, and a model that is withdrawn."""
    settings = {"on_document_error": "dead_letter", "skip_bad_requests": True}
    config = {"model_name_or_path": "m", "max_concurrent_generations": 8}
    with FakeServer(status=Budget(answered, status)) as server:
        server.error = "no access to v1/m"
        with pytest.raises(
            ServerRefused, match=rf"(?s)HTTP {status}.*no access to v1/m.*it lists fake\."
        ) as caught:
            run_job(tmp_path, server, 200, config=config, **settings)
        assert "other documents" not in str(caught.value)
        assert len(server.payloads) < answered + 60
        assert letters(tmp_path) == []
        assert cached_errors(tmp_path) == 0
        server._status = lambda payload, times: None
        run_job(tmp_path, server, 200, config=config, **settings)
        assert server.asked.total() < 300
    assert sorted(ids(tmp_path)) == sorted(all_of(200))


def test_a_probe_whose_answer_takes_time_lets_few_others_start(tmp_path, monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.inference.client.client._ANSWERS_WITHIN", 0.0)
    config = {"model_name_or_path": "m", "max_concurrent_generations": 8}
    is_probe = lambda payload, times: float(times > 0)  # noqa: E731
    with FakeServer(status=Budget(20, 400), delay=is_probe) as server:
        with pytest.raises(ServerRefused):
            run_job(tmp_path, server, 200, config=config)
        assert len(server.payloads) <= 20 + 8 + 8 + 1  # places, undecided requests, the probe


@pytest.mark.parametrize(
    "bad, status",
    combined(
        [["text 7"], ["text 0", "text 3", "text 39"], ["text 39"]],
        [400, 422, 500, 403],
    ),
)
def test_documents_of_a_small_job_are_at_fault_if_a_probe_is_answered(tmp_path, bad, status):
    """The probe is sent byte for byte, and counted."""
    config = {**AT_FAULT, "prices": {"prompt": 1}}
    with FakeServer(status=rejects(bad, status)) as server:
        run_job(tmp_path, server, 40, on_document_error="dead_letter", config=config)
        probes = [text for text, times in server.asked.items() if text not in bad and times > 1]
        assert len(probes) <= 2
        assert {text for text in server.asked if not text.startswith("text ")} <= {"JSON"}
        answered = sum(times for text, times in server.asked.items() if text not in bad)
    records = read_history(tmp_path / "checkpoints/00000/history.jsonl").records
    work = [record for record in records if isinstance(record, ProgressRecord)][-1].own
    assert (work.requests, work.sent) == (answered, server.asked.total())
    assert work.cost == 1000 * work.prompt_tokens > 0
    assert sorted(letter["id"].replace("id", "text") for letter in letters(tmp_path)) == sorted(bad)
    assert len(ids(tmp_path)) == 40 - len(bad)


# exits -------------------------------------------------------------------------------------------


class Odd(BaseException):
    """A BaseException of the user's."""


EXITS = [
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    Odd("odd"),
]


@pytest.mark.matrix("error, rollouts", [*((error, 1) for error in EXITS), (EXITS[3], 2)])
def test_a_rollout_that_exits_fails_its_document(tmp_path, server, error, rollouts):
    async def leave(document, generate):
        result = await ask(document, generate)
        if document.id == "id 2":
            raise error
        return result

    config = {"rollouts_per_document": rollouts}
    with pytest.raises(
        DocumentFailed, match=r"'id 2' \(number 2 of this task\) failed: "
    ) as failed:
        run_job(tmp_path, server, 6, leave, config=config)
    if isinstance(error, SystemExit):
        assert "<locals>.leave called sys.exit(" in str(failed.value)
    run_job(tmp_path, server, 6, leave, config=config, on_document_error="dead_letter")
    assert ids(tmp_path) == [name for name in all_of(6) if name != "id 2"]
    assert [letter["id"] for letter in letters(tmp_path)] == ["id 2"]


async def leaves_a_task_that_exits(document, generate):
    async def leave():
        raise SystemExit(0)

    task = asyncio.create_task(leave())
    # Else the garbage collector logs it in another test.
    task.add_done_callback(asyncio.Task.exception)
    await asyncio.sleep(0.01)
    await task


def exiting_context():
    raise SystemExit(0)


@contextmanager
def exiting_manager():
    raise SystemExit(0)
    yield {}


@pytest.mark.matrix("place", ["task", "context", "manager", "reader", "generator"])
def test_nothing_that_a_rank_runs_can_end_it_in_success(tmp_path, server, place):
    def reader(data=None, rank=0, world_size=1):
        yield from documents(3)
        if place == "reader":
            raise SystemExit(0)
        if place == "generator":
            raise KeyboardInterrupt

    context = {"context": exiting_context, "manager": exiting_manager}.get(place)
    rollout = leaves_a_task_that_exits if place == "task" else ask
    step = runner(tmp_path, server, rollout, shared_context=context)
    executor = LocalPipelineExecutor([reader, step], logging_dir=str(tmp_path / "logs"))
    with pytest.raises(
        UnexpectedExit, match=r"(called sys\.exit\(0\)|raised KeyboardInterrupt), which would lose"
    ):
        executor.run()
    assert executor.get_incomplete_ranks() == [0]
    assert issubclass(UnexpectedExit, CkptError)
