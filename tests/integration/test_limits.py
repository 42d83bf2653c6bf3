"""``until``, ``max_cost`` and ``max_total_tokens``: where a run ends, and how it goes on.

The server is the ledger: what it has answered is what was paid.
"""

import asyncio
import gc
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from datatrove.executor import RayPipelineExecutor

from datatrove_ckpt.errors import GoalReached, LimitReached, StorageFailed
from datatrove_ckpt.executors.local import LocalPipelineExecutor
from datatrove_ckpt.generation.datatrove_errors import DocumentFailed
from datatrove_ckpt.generation.limit_watch import RunReader
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.jobs import ask, chat, ids, rejects_documents, run_job, runner
from tests.kept import answers_kept
from tests.patience import until
from tests.yaml_jobs import endpoint, job_yaml, write_tasks

TASKS, DOCUMENTS, CHUNK, AT_ONCE = 3, 8, 2, 4
PRICES = "prices: {prompt: 100000, completion: 200000}"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
COST, TOKENS = 2, 15
"""Of each answer."""


@pytest.fixture
def server():
    with FakeServer() as running:
        running.usage = USAGE
        yield running


def write(server, tasks=TASKS, documents=DOCUMENTS, chunk=CHUNK, executor=""):
    config = f"{endpoint(server)}, max_concurrent_generations: {AT_ONCE}, {PRICES}"
    more = f"          records_per_chunk: {chunk}\n          drain_seconds: 0\n"
    text = (job_yaml(config, tasks) + more).replace("workers: 1\n", f"workers: 1\n{executor}")
    Path("job.yaml").write_text(text)
    write_tasks(Path.cwd(), tasks, documents)


@pytest.fixture
def run(server, command, here):
    """Writes the job; what it gives runs it."""
    write(server)
    return partial(command, "run", "job.yaml")


def flag(name, value):
    return f"--pipeline.1.{name}={value}"


def written():
    return sum(content.count(b"\n") for content in outputs(Path("output")).values())


def paid(command):
    status = command.json("status", "checkpoints")
    work = status["totals"]["work"]
    return work["cost"] / 1e9, work["prompt_tokens"] + work["completion_tokens"]


@pytest.mark.matrix("worker", [(), ("--worker",)])
def test_until_ends_the_run_well_and_a_higher_one_goes_on(server, command, worker, run):
    for goal in (5, 5, 13):
        asked = server.asked.total()
        said = run(*worker, flag("until", goal))
        assert f"until: {goal} is reached: " in said
        assert flag("until", 2 * written()) in said
        assert goal <= written() < goal + CHUNK
        assert server.asked.total() == written(), "no chunk is left half done"
        assert len([*Path("logs/completions").glob("*")]) == goal // (DOCUMENTS + 1), (
            "no task is complete that was cut short"
        )
    assert asked < written(), "5, again, asks nothing"
    logs = "".join(path.read_text() for path in Path("logs/logs").glob("*"))
    assert "ended by until, saved: " in logs
    assert "interrupted" not in logs
    assert "no problem, 2 things not finished (until is reached)" in command(
        "verify", "checkpoints", "--full"
    )
    said = command("status", "checkpoints")
    assert "until: 14 of 13 documents" in said
    assert "No task needs attention" in said
    assert "Nothing runs. until: 13 is reached" in said
    command("export", "checkpoints", "all.jsonl")
    assert Path("all.jsonl").read_bytes().count(b"\n") == 14
    run()
    assert not Path("checkpoints/limits.json").exists()
    assert {*server.asked.values()} == {1}
    assert server.asked.total() == written() == TASKS * DOCUMENTS


@pytest.mark.matrix(
    ("name", "value", "each", "worker"),
    [
        ("max_cost", 20, COST, ()),
        ("max_total_tokens", 150, TOKENS, ()),
        ("max_cost", 20, COST, ("--worker",)),
    ],
)
def test_money_and_tokens_end_the_run_with_exit_code_4(
    server, command, name, value, each, worker, run
):
    server._delay = lambda payload, times: 0.01
    said = run(*worker, flag(name, value), code=4)
    answers = server.asked.total()
    assert said.err.rstrip().splitlines()[-2].startswith(f"{name}: {value} is reached: ")
    assert flag(name, 2 * answers * each) in said
    assert value <= answers * each < value + 2 * each
    assert " Processes read each other's costs every 0." in said.err
    assert paid(command) == (answers * COST, answers * TOKENS)
    run(*worker, flag(name, value), code=4)
    assert server.asked.total() == answers
    assert f"{name}: " in command("status", "checkpoints")
    assert "2 things" in command("verify", "checkpoints", code=3)
    run(flag(name, 1000 * value))
    assert {*server.asked.values()} == {1}, "the drain takes its time, with drain_seconds: 0"
    assert paid(command) == (server.asked.total() * COST, server.asked.total() * TOKENS)


@pytest.mark.parametrize("name, limit", [("max_cost", 0.4), ("max_total_tokens", 40_000)])
def test_a_limit_of_uneven_answers_holds(server, here, name, limit):
    """700 documents of 100 tokens in the mean are worth 0.7; 64 may be in work."""

    def answer(payload, times):
        tokens = round(random.Random(str(payload)).expovariate(1 / 100))
        server.usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
        return "an answer"

    server._answer = answer
    server._delay = lambda payload, times: 0.02
    config = {"prices": {"prompt": 1, "completion": 10}, "max_concurrent_generations": 64}
    with pytest.raises(LimitReached) as reached:
        run_job(here, server, 700, config=config, **{name: limit})
    spent = float(re.search(r"answers (?:cost|took) ([\d.]+)", str(reached.value))[1])
    assert limit <= spent <= 1.05 * limit
    assert not re.search("Processes read", str(reached.value))


def test_a_resume_whose_documents_have_some_answers_fills_the_places(server, here):
    number = 24
    asked = []
    at_once = Counter()
    stops = True

    async def rollout(document, generate):
        await ask(document, generate)
        if stops:
            asked.append(document)
            while len(asked) < number:
                await asyncio.sleep(0.01)
            raise ValueError
        at_once["now"] += 1
        at_once["most"] = max(at_once.values())
        result = await generate(chat(f"{document.text} again"))
        at_once["now"] -= 1
        return result

    with pytest.raises(DocumentFailed):
        run_job(here, server, number, rollout, rollout_version="1")
    stops = False
    server._delay = lambda payload, times: 0.05
    run_job(here, server, number, rollout, rollout_version="1", max_total_tokens=10**6)
    assert at_once["most"] > 8
    assert {*server.asked.values()} == {1}


def test_until_counts_what_is_written(server, tmp_path):
    async def every_second(document, generate):
        return await ask(document, generate) if int(document.id[3:]) % 2 else None

    for _ in range(2):
        with pytest.raises(GoalReached, match="until: 5 is reached: 5 documents"):
            run_job(tmp_path, server, 40, every_second, until=5)
        assert ids(tmp_path) == [f"id {number}" for number in (1, 3, 5, 7, 9)]
    assert {*server.asked.values()} == {1}
    run_job(tmp_path, server, 40, every_second)
    assert len(ids(tmp_path)) == 20
    run_job(tmp_path / "whole", server, 4, until=4)  # no error: all is done


def test_chunks_that_a_stop_left_half_done_are_finished(server, tmp_path):
    is_broken = True
    is_answered = asyncio.Event()

    async def rollout(document, generate):
        if is_broken and not int(document.id[3:]) % 2:
            await is_answered.wait()
            raise ValueError
        result = await ask(document, generate)
        if document.id == "id 5":
            is_answered.set()
        return result

    job = (tmp_path, server, 40, rollout)
    with pytest.raises(DocumentFailed):
        run_job(*job, until=5, rollout_version="1")
    assert ids(tmp_path) == []
    is_broken = False
    with pytest.raises(GoalReached):
        run_job(*job, until=5, rollout_version="1")
    assert ids(tmp_path) == [f"id {number}" for number in range(6)]


def test_another_node_counts_the_tasks_that_it_did_not_run(command, here, run):
    mirror = flag("checkpoints_remote_dir", here / "mirror")
    for node in ("checkpoints", "second"):
        said = run(mirror, flag("until", 10), flag("checkpoints_local_dir", node))
        assert f"{written()} of {written()} documents are in " in said
        assert "no problem" in command("verify", node, "--full")


def test_what_depends_on_a_run_that_until_ended_takes_its_output(server, here):
    write_tasks(here, 2, DOCUMENTS)
    first = LocalPipelineExecutor(
        [JsonlReader("input"), runner(here / "a", server, until=4)], 2, 1, logging_dir="a/logs"
    )
    second = LocalPipelineExecutor(
        [JsonlReader("a/output"), runner(here / "b", server)], 1, 1, logging_dir="b/logs"
    )
    second.depends = first
    second.run()
    assert len(ids(here / "b")) == 4
    first.pipeline[1] = first.pipeline[1].changed(until=None, max_total_tokens=30)
    with pytest.raises(LimitReached):
        first.run()


@pytest.mark.parametrize("name", ["max_cost", "max_total_tokens"])
def test_answers_without_usage_are_no_reason_to_go_on_without_a_limit(server, name, run):
    server.usage = {"total": 1}
    said = run(flag(name, 20), code=1)
    assert f"error: {name}: needs usage" in said.err
    assert server.asked.total() <= AT_ONCE
    run()
    assert {*server.asked.values()} == {1}


def test_until_with_steps_after_it_is_refused(run):
    more = "      - class_path: JsonlReader\n        init_args: {data_folder: output}\n"
    with Path("job.yaml").open("a") as file:
        file.write(more)
    said = run(flag("until", 5), code=2)
    assert "pipeline[1] InferenceRunner: until: no step after it would run" in said.err


def test_until_does_not_end_a_sample(run):
    seed = "--pipeline.1.config.seed=3"
    assert "6 of 6 documents" in run("--sample", 6, flag("until", 2), seed)


def test_dead_letters_are_not_retried_before_all_tasks_are_complete(server, run):
    refused = iter([400])
    server._status = lambda payload, times: next(refused, None)
    dead = flag("on_document_error", "dead_letter")
    said = run(dead, flag("until", 5))
    assert "To see the dead letters: " in said
    assert "--retry-dead-letters" not in said
    assert " --retry-dead-letters" in run(dead)


def test_a_retry_of_dead_letters_ends_by_max_cost_too(server, run):
    dead = flag("on_document_error", "dead_letter")
    server._status = rejects_documents
    run(dead, code=1)
    server._status = lambda payload, times: None
    retry = (dead, "--retry-dead-letters", "--pipeline.1.retry_errors=true")
    assert "max_cost: 10 is reached: " in run(*retry, flag("max_cost", 10), code=4)
    run(*retry, flag("max_cost", 1000))
    assert {times for text, times in server.asked.items() if text != "JSON"} == {2}
    assert written() == TASKS * DOCUMENTS


@pytest.mark.parametrize("name, value, code", [("until", 5, 0), ("max_cost", 10, 4)])
def test_tasks_of_ray_that_a_limit_ended_have_not_failed(monkeypatch, name, value, code, run):
    def run_all(executor):  # it tells of no error
        for rank in range(TASKS):
            with suppress(LimitReached):
                executor._run_for_rank(rank)

    job = Path("job.yaml").read_text().replace("Local", "Ray").replace("    workers: 1\n", "")
    Path("job.yaml").write_text(job)
    monkeypatch.setattr(RayPipelineExecutor, "run", run_all)
    said = run(flag(name, value), code=code)
    assert f"{name}: {value} is reached: " in said.err


def test_a_mirror_that_is_away_stops_nothing(here, monkeypatch, run):
    away = Mock(side_effect=StorageFailed("away"))
    monkeypatch.setattr("datatrove_ckpt.mirror.restore.MirrorReader.refresh", away)
    mirror = flag("checkpoints_remote_dir", here / "mirror")
    run(flag("until", 5), mirror, "--worker")
    assert away.called
    assert written() == 6


def test_the_copy_of_a_mirror_goes_with_its_reader(here, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    reader = RunReader(here / "checkpoints", str(here / "mirror"))
    assert list(here.glob("datatrove-ckpt-*"))
    del reader
    gc.collect()  # a warning of it fails this test
    assert not list(here.glob("datatrove-ckpt-*"))


def test_chunks_of_the_short_form_are_a_tenth_of_until_and_stay(server, command, here):
    write_tasks(here, 1, 30)
    words = ["--run-folder", "run", "--input", "input", "--model", "fake", "--endpoint"]
    job = ("run", *words, server.url, "--prompt", "Say {text}")
    command(*job, "--until", 20)
    assert {len(one.splitlines()) for one in outputs(here / "run/output").values()} == {2}
    command(*job)
    assert len(outputs(here / "run/output")) == 15


# Kills: at any moment, and at moments when what the server has answered is on the disk, so that its
# ledger is known to the answer.

KILLS, STEP, DELAY = 200, 60, 0.03


class Workers:
    """``run --worker`` with real processes, which are killed and replaced.

    ``kind``: "one" or "four" at a time; "late": up to four, which come when chance has it.
    """

    def __init__(self, server, limit, kind, seed):
        self.limit = limit
        self.kills = 0
        self.chance = random.Random(seed)
        self._server = server
        self._kind = kind
        self._alive = []
        self._codes = Counter()

    def run(self, code):
        """Until all have ended by themselves, with this exit code."""
        self._codes.clear()
        self._start()
        while self._alive:
            due = self._server.billed + self.chance.randrange(1, 25)
            until(lambda due=due: self._server.billed >= due or self._ended())
            for process in self._ended():
                said = process.communicate()[0]
                assert process.returncode == code, said
                self._codes[code] += 1
                self._alive.remove(process)
            if self._alive and not self._codes and self.kills < KILLS:
                self._kill()
                self._start()

    def _ended(self):
        return [process for process in self._alive if process.poll() is not None]

    def _start(self):
        wanted = {"one": 1, "four": 4}.get(self._kind) or self.chance.randrange(1, 5)
        command = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml", "--worker"]
        while len(self._alive) < wanted:
            self._alive.append(processes.start([*command, self.limit]))

    def _kill(self):
        victim = self.chance.choice(self._alive)
        with self._server.before_a_kill():
            try:
                os.killpg(victim.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended by itself: ``run`` looks at its code
                return
            victim.communicate()
        self._alive.remove(victim)
        self.kills += 1


class Ledger(FakeServer):
    """Counts what it has answered. ``quiet``: a kill comes when all of that is on the disk; what is
    asked meanwhile gets no answer, and is not billed.
    """

    def __init__(self, quiet):
        super().__init__(self._bill, self._refuse, self._come)
        self.billed = 0
        self.questions = Counter()
        self._came = self._passed = 0
        self.usage = USAGE
        self._quiet = quiet
        self._is_paused = False

    def _bill(self, payload, times):
        self.billed += 1
        self.questions[payload["messages"][-1]["content"]] += 1
        return "an answer"

    def _come(self, payload, times):
        self._came += 1
        return DELAY

    def _refuse(self, payload, times):
        self._passed += 1
        return 503 if self._is_paused else None

    def _let_pass(self):
        """Waits for what was sent before, but not yet read, and for what is about to be billed."""
        body = json.dumps(chat("the last one")).encode()
        request = Request(f"{self.url}/v1/chat/completions", body)
        with pytest.raises(HTTPError), urlopen(request):
            pass

    @contextmanager
    def before_a_kill(self):
        self._is_paused = self._quiet
        if self._quiet:
            self._let_pass()
            until(lambda: answers_kept(Path("checkpoints")) == self.billed)
        yield
        if self._quiet:
            self._let_pass()
        came = self._came
        until(lambda: self._passed >= came)  # what the victim has asked is refused, too
        self._is_paused = False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "four", "late"])
@pytest.mark.parametrize("name, code", [("until", 0), ("max_cost", 4)])
def test_limits_hold_under_kills(command, here, name, code, kind):
    with Ledger(quiet=name == "max_cost") as server:
        write(server, 6, 3000, 5, executor="    ranks_at_once: 2\n    max_rank_attempts: 99\n")
        workers = Workers(server, "", kind, f"{name} {kind}")
        most = 0
        goal = 0
        at_once = {"one": 2, "four": 8, "late": 8}[kind]
        while workers.kills < KILLS:
            goal += STEP
            workers.limit = flag(name, goal * (COST if name == "max_cost" else 1))
            workers.run(code)
            done = server.billed if name == "max_cost" else written()
            assert done >= goal
            most = max(most, done - goal)
            cost, tokens = paid(command)
            lost = server.billed * COST - cost
            assert 0 <= lost <= (0 if name == "max_cost" else workers.kills * 2 * AT_ONCE * COST)
            assert tokens * COST == cost * TOKENS
        # A chunk for each task at work, and what comes until they see each other's commits.
        assert most <= at_once * (5 + AT_ONCE * 0.5 / DELAY)
        rows = [
            json.loads(line)
            for one in outputs(Path("output")).values()
            for line in one.splitlines()
        ]
        assert max(Counter(row["id"] for row in rows).values()) == 1
        if name == "max_cost":
            assert {*server.questions.values()} == {1}, "nothing is paid twice"
        each = Counter(row["id"].partition(" ")[0] for row in rows)
        whole = [str(int(path.name)) for path in Path("logs/completions").glob("*")]
        assert [each[task] for task in whole] == [3000] * len(whole)
        command("verify", "checkpoints", "--full", code=0 if name == "until" else 3)
