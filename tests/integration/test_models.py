"""Several models in one rollout: each has its own servers, faults, numbers and answers, and a
document waits for none that it does not need.
"""

import asyncio
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint import history_records
from datatrove_ckpt.checkpoint.history_records import Progress
from datatrove_ckpt.config.models import models_of
from datatrove_ckpt.errors import (
    ConfigError,
    DocumentFailed,
    ServerDied,
    ServerRefused,
    ServerStartFailed,
)
from datatrove_ckpt.generation import progress
from datatrove_ckpt.generation.generate import Drain, Requests
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.inference.client.transport import ExchangeFailed
from datatrove_ckpt.inference.servers import endpoints
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crash_points import assert_same_output_after_every_crash
from tests.histories import read_history
from tests.integration.test_supervision import ENGINE
from tests.jobs import ask, chat, config, documents, letters, rows, writer
from tests.patience import until_async
from tests.yaml_jobs import job_yaml, write_job


async def generate_and_judge(document, generate):
    written = await generate(chat(f"Write {document.text}"))
    judged = await generate.judge(chat(f"Judge {written.text}"))
    return {"text": written.text, "score": judged.text}


def says(name):
    return FakeServer(lambda payload, times: f"{name} on {payload['messages'][-1]['content']}")


@pytest.fixture
def writes():
    with says("writer") as server:
        yield server


@pytest.fixture
def judges():
    with says("judge") as server:
        yield server


@pytest.fixture
def slow(here):
    """A server that takes its time."""
    (here / "slow.py").write_text("import time\ntime.sleep(60)\n")


def runner(
    folder,
    writes,
    judges,
    rollout=generate_and_judge,
    **changes,
):
    """``writer`` and ``judge`` hold changes to their configs."""
    models = {
        "writer": config(writes, **changes.pop("writer", {})),
        "judge": config(judges, **changes.pop("judge", {})),
    }
    changes.setdefault("records_per_chunk", 2)
    return InferenceRunner(
        rollout,
        models,
        writer(folder),
        checkpoints_local_dir=str(folder / "checkpoints"),
        **changes,
    )


def test_each_request_goes_to_its_model(here, writes, judges):
    runner(here, writes, judges, judge={"default_generation_params": {"temperature": 0}}).run(
        documents(3)
    )
    expected = [
        {"text": f"writer on Write text {n}", "score": f"judge on Judge writer on Write text {n}"}
        for n in range(3)
    ]
    assert [row["metadata"]["rollout_results"] for row in rows(here)] == [[one] for one in expected]
    assert [len(server.payloads) for server in (writes, judges)] == [3, 3]
    assert {payload.get("temperature") for payload in writes.payloads} == {None}
    assert {payload.get("temperature") for payload in judges.payloads} == {0}


def test_killed_at_every_write_and_resumed(ram):
    def attempt(folder):
        runner(folder, writes, judges).run(documents(2))

    with says("writer") as writes, says("judge") as judges:
        (ram / "job").mkdir()
        report = assert_same_output_after_every_crash(attempt, ram / "job")
    assert len(report.points) > 10


class Answered:
    """Counts the requests that servers answer; further ones than ``most`` are refused, which stops
    the rank.
    """

    def __init__(self):
        self.most = 0
        self.questions = Counter()

    def server(self, name):
        def answer(payload, times):
            question = payload["messages"][-1]["content"]
            self.questions[f"{name}: {question}"] += 1
            return f"{name} on {question}"

        return FakeServer(
            answer, lambda payload, times: 403 if self.questions.total() >= self.most else None
        )


@pytest.mark.matrix
@pytest.mark.parametrize("most", [3, 0, 1, 2, 4, 5])
def test_stopped_after_each_request_nothing_is_asked_twice(here, most):
    answered, alone = Answered(), {"max_concurrent_generations": 1, "max_concurrent_documents": 1}
    with answered.server("writer") as writes, answered.server("judge") as judges:

        def run(folder, most):
            answered.most, answered.questions = most, Counter()
            runner(folder, writes, judges, writer=alone).run(documents(3))

        run(here / "undisturbed", 100)
        assert len(answered.questions) == 6
        with pytest.raises(ServerRefused, match=f"^{'judge' if most % 2 else 'writer'}: "):
            run(here / "job", most)
        before = answered.questions
        run(here / "job", 100)
    assert (before + answered.questions).total() == 6
    assert outputs(here / "job/output") == outputs(here / "undisturbed/output")


# whose fault -------------------------------------------------------------------------------------


def test_a_judge_that_is_not_there_stops_the_rank_by_its_name(here, writes, real_ready_window):
    with says("judge") as gone:
        pass
    with pytest.raises(ServerStartFailed, match=r"^judge: No endpoint was ready within 0\.1 s"):
        runner(
            here,
            writes,
            gone,
            judge={"server_ready_max_attempts": 1, "server_ready_delay_sec": 0.1},
        ).run(documents(3))
    assert not letters(here)


def test_a_server_that_is_away_at_the_start_is_noted_as_one_that_goes_away_later(
    here, writes, judges, monkeypatch, policy
):
    """It answers once a line of the history tells of it, and the screen too."""
    monkeypatch.setattr(history_records, "_LASTS", 0.2)
    monkeypatch.setattr(progress, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_SILENCE_SECONDS", 0.4)
    policy("ENDPOINT", first=0.01, longest=0.02)
    states, get, now = [], endpoints._get, RankReporter.now
    history = here / "checkpoints/00000/history.jsonl"

    def lines():
        records = read_history(history).records
        return [one for one in records if isinstance(one, Progress) and one.silence.lasts]

    async def away(target, *settings):
        if str(judges.url) in str(target) and not (lines() and states[-1].startswith("the server")):
            raise ExchangeFailed("no connection")
        return await get(target, *settings)

    def shown(rank):
        states.append(now(rank).state)
        return now(rank)

    monkeypatch.setattr(endpoints, "_get", away)
    monkeypatch.setattr(RankReporter, "now", shown)
    runner(here, writes, judges).run(documents(1))
    (line,) = lines()
    assert line.silence[1:] == (60.0, True, "judge")
    assert (line.waiting, line.in_flight) == (1, 0)
    assert "waiting for the server of judge" in states
    assert "the server of judge is unreachable" in states
    assert not states[-1]
    assert not read_history(history).attempts[-1].last.silence.seconds


async def test_who_waits_for_the_judge_stops_no_other(here, writes):
    """The judge takes one request at a time, and answers none; the writer takes one at a time,
    too.
    """
    one = {"max_concurrent_generations": 1}
    with FakeServer(hold_after=0) as judges:
        step = runner(here, writes, judges, writer=one, judge={"max_concurrent_generations": 7})
        running = asyncio.create_task(step.run_async(documents(20)))
        # As many documents as both have room for.
        await until_async(lambda: len(writes.payloads) == 8)
        await until_async(lambda: len(judges.payloads) == 7)
        judges.release()
        await running
    assert len(rows(here)) == 20


async def test_a_server_that_loads_its_model_stops_no_other(here, writes, slow):
    """Requests to the writer are answered while the judge starts."""
    judge = InferenceConfig("custom", "m", model_kwargs={"server_script": "slow.py"})
    models = {"writer": config(writes), "judge": judge}
    step = InferenceRunner(generate_and_judge, models, writer(here), drain_seconds=0)
    running = asyncio.create_task(step.run_async(documents(3)))
    await until_async(lambda: len(writes.payloads) == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# servers that the run launches -------------------------------------------------------------------


def launched(folder, **changes):
    models = {
        name: InferenceConfig("dummy", name, server_log_folder="logs", **changes)
        for name in ("writer", "judge")
    }
    return InferenceRunner(
        generate_and_judge,
        models,
        writer(folder.absolute()),
        checkpoints_local_dir=str(folder.absolute() / "c"),
    )


def test_a_rank_with_other_models_takes_over_those_that_are_the_same(here, log):
    launched(here).run(documents(2), 0, 3)
    again = launched(here / "again")
    again.named_models["judge"].model_kwargs = {"latency-ms": 1}
    again.run(documents(2), 1, 3)
    assert any("writer: Rank 1 takes over the server" in line for line in log)
    (line,) = [line for line in log if "needs other servers" in line]
    assert (
        "Rank 1 needs other servers than the server of judge of rank 0, which is stopped." in line
    )
    alone = InferenceRunner(ask, InferenceConfig("dummy", "m"), writer(here / "alone"))
    alone.run(documents(1))
    assert sum("needs other servers" in line for line in log) == 3


def of_scripts(folder, **judge):
    """The writer's server answers, and the judge's is an engine that does what a prompt says."""

    async def rollout(document, generate):
        await generate(chat(document.text))
        return (await generate.judge(chat(document.text))).text.partition(" says ")[2]

    (folder / "engine.py").write_text(ENGINE)
    engine = InferenceConfig("custom", "m", model_kwargs={"server_script": "engine.py"}, **judge)
    models = {"writer": InferenceConfig("dummy", "m"), "judge": engine}
    return InferenceRunner(rollout, models, writer(folder), checkpoints_local_dir=str(folder / "c"))


def test_a_judge_whose_server_dies_is_restarted_and_the_writer_is_not(here, policy, log):
    policy("RESTART", first=0.01)
    of_scripts(here).run([Document(text=text, id=text) for text in ("a", "die once", "b")])
    assert [row["metadata"]["rollout_results"] for row in rows(here)] == [
        ["a"],
        ["die once"],
        ["b"],
    ]
    last = read_history(here / "c/00000/history.jsonl")
    assert last.last.own.restarts == 1
    (line,) = [line for line in log if "is given up" in line]
    assert line.startswith("WARNING judge: The server of rank 0 is given up: ")
    died = [event.name for event in last.attempts[0].servers if event.what == "death"]
    assert died == ["judge 0"]


def test_a_judge_whose_server_dies_too_often_stops_the_rank_by_its_name(here):
    with pytest.raises(
        ServerDied, match=r"^judge: The server of rank 0 was restarted 0 times"
    ) as raised:
        of_scripts(here, server_max_restarts=0).run([Document(text="die", id="a")])
    assert str(raised.value).count("judge: ") == 1
    assert not letters(here)


def test_a_judge_that_does_not_start_stops_the_rank_by_its_name(here):
    step = of_scripts(here, server_start_max_retries=0)
    (here / "engine.py").write_text("raise SystemExit(3)")
    with pytest.raises(ServerStartFailed, match=r"^judge: The custom server exited with code 3"):
        step.run(documents(2))


def test_several_models_on_several_nodes_are_refused(here, writes, judges, monkeypatch):
    monkeypatch.setenv("DATATROVE_NODE_RANK", "0")
    monkeypatch.setenv("DATATROVE_NODE_IPS", "a,b")
    with pytest.raises(
        ConfigError, match="2 nodes per task serve one model, and this run has writer, judge"
    ):
        runner(here, writes, judges).run(documents(2))


# settings ----------------------------------------------------------------------------------------


async def test_a_drain_is_not_over_while_one_model_has_requests():
    clients = [SimpleNamespace(sender=SimpleNamespace(in_flight=number)) for number in (0, 1, 1)]
    models = [
        SimpleNamespace(client=SimpleNamespace(result=lambda c=c: c), is_dead=False)
        for c in clients
    ]
    models[2].is_dead = True
    drain = Drain([1])
    drain.request_started()
    over = asyncio.ensure_future(drain.until_over(models))
    for _ in range(9):
        await asyncio.sleep(0)
    assert not over.done()
    clients[1].sender.in_flight = 0
    clients[1].sender.on_release()
    await over


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1st",
        "my judge",
        "class",
        "embed",
        "count_finished",
        "tp",
        "rollout_fn",
        "uses",
        "_judge",
        "rollouts-2",
    ],
)
def test_a_name_that_cannot_be_one_is_refused(name):
    made = InferenceConfig("dummy", "m")
    with pytest.raises(
        ConfigError, match=rf"^config: {re.escape(repr(name))} cannot be the name of a model"
    ):
        models_of({"writer": made, name: made})


def test_what_generate_has_is_no_name_for_a_model():
    own = [name for name in dir(Requests) if not name.startswith("_")]
    own += [
        name
        for name in vars(
            Requests(
                SimpleNamespace(model=SimpleNamespace(config=InferenceConfig("dummy", "m"))),
                None,
                0,
            )
        )
        if not name.startswith("_")
    ]
    assert own
    for name in own:
        with pytest.raises(ConfigError, match="cannot be the name of a model"):
            models_of({name: InferenceConfig("dummy", "m")})


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({}, "config: is empty"),
        (
            {"writer": InferenceConfig("dummy", "m"), "judge": None},
            "config: judge: takes an InferenceConfig",
        ),
        (
            {
                "a": InferenceConfig("dummy", "m"),
                "b": InferenceConfig("dummy", "m", rollouts_per_document=2),
            },
            "b: roll",
        ),
        (
            {
                "a": InferenceConfig("dummy", "m"),
                "b": InferenceConfig("dummy", "m", max_concurrent_documents=2),
            },
            "b: max",
        ),
    ],
)
def test_what_cannot_work_is_refused(here, models, said):
    with pytest.raises(ConfigError, match=said):
        InferenceRunner(ask, models, writer(here))


def test_a_model_that_is_not_there_is_named(here, writes, judges):
    async def rollout(document, generate):
        return await generate.jugde(chat(document.text))

    with pytest.raises(
        DocumentFailed,
        match="generate has no 'jugde', and the models of this run are writer, judge",
    ):
        runner(here, writes, judges, rollout).run(documents(1))


# numbers -----------------------------------------------------------------------------------------


def test_the_bar_names_the_model_that_gives_no_answers(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    checkpoint = SimpleNamespace(
        resumed=SimpleNamespace(finished=SimpleNamespace(read=0)),
        clock=SimpleNamespace(serving=lambda: None),
    )
    rank = RankReporter(0, checkpoint, Shutdown(), 1.0)
    one = InferenceConfig("endpoint", "m", endpoint_url="http://h")
    models = models_of({"writer": one, "judge": one})
    clients = {}
    for name, one in models.items():
        clients[name] = client.CompletionClient(client.ModelServers(one, lambda: now[0]))
        rank.of(one).serving(clients[name])
        clients[name].stats.in_flight = 1
    now[0] += 50
    clients["writer"].stats.answers += 1
    rank._look()
    now[0] += 20
    assert rank.now()[-4:] == ("no answer from judge", 70, False, 2)
    clients["judge"].outage.begun(True, now[0])
    now[0] += 31
    assert rank.now()[-4:] == ("the server of judge is unreachable", 31, True, 2)


# YAML --------------------------------------------------------------------------------------------

YAML = job_yaml(
    "writer: {server_type: endpoint, endpoint_url: WRITER, model_name_or_path: w}, "
    "judge: {server_type: dummy, model_name_or_path: j}",
    rollout="two_models.rollout",
)
ROLLOUT = """
async def rollout(document, generate):
    written = await generate({"messages": [{"role": "user", "content": document.text}]})
    judged = await generate.judge({"messages": [{"role": "user", "content": written.text}]})
    return {"text": written.text, "score": judged.text}
"""


@pytest.fixture
def job(here, writes, monkeypatch):
    (here / "two_models.py").write_text(ROLLOUT)
    monkeypatch.syspath_prepend(str(here))
    write_job(here, YAML.replace("WRITER", writes.url), ["a", "b"])
    return here


def test_a_yaml_file_names_models(job, command):
    command("run", "job.yaml")
    assert [row["metadata"]["rollout_results"][0]["text"] for row in rows(job)] == [
        "writer on a",
        "writer on b",
    ]
    other = "--pipeline.1.config.judge.model_name_or_path"
    assert 'judge.model: "j" -> "other"' in command("run", "job.yaml", other, "other", code=None)
    assert "writer server, endpoint: " in command("doctor", "job.yaml", code=None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("judge.tpp=2", 'pipeline[1] InferenceRunner.config.judge: unknown key "tpp"'),
        ("judge.tp=x", "pipeline[1] InferenceRunner.config.judge: tp:"),
        ("tp=2", 'pipeline[1] InferenceRunner.config: unknown key "writer"'),
        (
            "embed={server_type: dummy, model_name_or_path: e}",
            "config: 'embed' cannot be the name of a model",
        ),
        ("judge.gpus=-1", "gpus must be >= 0; it is -1"),
    ],
)
def test_a_mistake_in_a_model_is_one_line(job, command, override, said):
    done = command("run", "job.yaml", f"--pipeline.1.config.{override}", code=2)
    assert said in done
