"""Several models in one rollout: each has its own servers, faults, numbers and answers, and a
document waits for none that it does not need.
"""

import asyncio

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import ConfigError, DocumentFailed, ServerStartFailed
from datatrove_ckpt.testing import FakeServer
from tests import jobs
from tests.crashes import assert_same_output_after_crash
from tests.engines import ENGINE
from tests.histories import read_history
from tests.jobs import chat, documents, letters, rows
from tests.patience import until_async
from tests.two_models import runner, says
from tests.yaml_jobs import job_yaml, write_job


@pytest.fixture
def writes():
    with says("writer") as server:
        yield server


@pytest.fixture
def judges():
    with says("judge") as server:
        yield server


@pytest.mark.matrix("step", [17, 1])
def test_killed_at_every_write_and_resumed(ram, step):
    def attempt(folder):
        runner(folder, writes, judges).run(documents(2))

    with says("writer") as writes, says("judge") as judges:
        (ram / "job").mkdir()
        report = assert_same_output_after_crash(attempt, ram / "job", step=step, recoveries=0)
    assert len(report.points) > 10


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


# servers that the run launches -------------------------------------------------------------------


def of_scripts(folder):
    """Both servers are engines; only the judge's gets prompts that say what it does."""

    async def rollout(document, generate):
        await generate(chat(f"Write {document.text}"))
        return (await generate.judge(chat(document.text))).text.partition(" says ")[2]

    (folder / "engine.py").write_text(ENGINE)
    engine = InferenceConfig("custom", "m", model_kwargs={"server_script": "engine.py"})
    return jobs.runner(folder, {"writer": engine, "judge": engine}, rollout)


def test_a_judge_whose_server_dies_is_restarted_and_the_writer_is_not(here, policy, log):
    policy("RESTART", first=0.01)
    of_scripts(here).run([Document(text=text, id=text) for text in ("a", "die once", "b")])
    assert [row["metadata"]["rollout_results"] for row in rows(here)] == [
        ["a"],
        ["die once"],
        ["b"],
    ]
    last = read_history(here / "checkpoints/00000/history.jsonl")
    assert last.last.own.restarts == 1
    (line,) = log.said("is given up")
    assert line.startswith("WARNING judge: Server 0 of task 0 is given up: ")
    died = [event.name for event in last.attempts[0].servers if event.what == "death"]
    assert died == ["judge 0"]


def test_several_models_on_several_nodes_are_refused(here, writes, judges, monkeypatch):
    monkeypatch.setenv("DATATROVE_NODE_RANK", "0")
    monkeypatch.setenv("DATATROVE_NODE_IPS", "a,b")
    with pytest.raises(
        ConfigError, match="2 nodes per task serve one model, and this run has writer, judge"
    ):
        runner(here, writes, judges).run(documents(2))


# settings ----------------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_named(here, writes, judges):
    async def rollout(document, generate):
        return await generate.jugde(chat(document.text))

    with pytest.raises(
        DocumentFailed,
        match="generate has no 'jugde', and the models of this run are writer, judge",
    ):
        runner(here, writes, judges, rollout).run(documents(1))


YAML = job_yaml(
    "writer: {server_type: endpoint, endpoint_url: WRITER, model_name_or_path: w}, "
    "judge: {server_type: endpoint, endpoint_url: JUDGE, model_name_or_path: j}",
    rollout="two_models.rollout",
)
ROLLOUT = """
async def rollout(document, generate):
    written = await generate({"messages": [{"role": "user", "content": document.text}]})
    judged = await generate.judge({"messages": [{"role": "user", "content": written.text}]})
    return {"text": written.text, "score": judged.text}
"""


@pytest.fixture
def job(here, writes, judges, monkeypatch):
    (here / "two_models.py").write_text(ROLLOUT)
    monkeypatch.syspath_prepend(str(here))
    write_job(here, YAML.replace("WRITER", writes.url).replace("JUDGE", judges.url), ["a", "b"])
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
