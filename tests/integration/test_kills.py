"""Real processes, really killed, against servers that count and outlive them.

A job is killed several times, at moments drawn from a seed: at a number of answers (in the server's
thread, just before it sends the last of them), or at a time after the start (in start-up and
recovery, say), and once soon after its last answer (while its last chunk is published and
committed, say). ``pytest -m full`` tries 20 seeds of every kind.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.histories import read_history
from tests.kept import answers_kept
from tests.patience import until
from tests.yaml_jobs import write_tasks

JOB = """
import json
import sys
from urllib.request import Request, urlopen
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

folder, url, kind, tasks = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=8)


def look(text):
    body = {"messages": [{"role": "user", "content": text}]}
    request = Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as answer:
        return {"text": json.load(answer)["choices"][0]["message"]["content"]}


async def rollout(document, generate):
    found = {}
    if kind == "calls":
        found = await generate.once("look", look, "look at " + document.text)
    first = await generate({"messages": [{"role": "user", "content": document.text}], "temperature": 1})
    second = await generate({"messages": [{"role": "user", "content": document.text + " again"}]})
    return [found, first, second]


name = "${rank}_chunk_${chunk_index}." + ("parquet" if kind == "parquet" else "jsonl")
writer = (
    ParquetWriter(folder + "/output", name)
    if kind == "parquet"
    else JsonlWriter(folder + "/output", name, compression="gzip" if kind == "gzip" else None)
)
runner = InferenceRunner(
    rollout, config, writer, checkpoints_local_dir=folder + "/checkpoints", records_per_chunk=7, sync_seconds=0.01
)
reader = JsonlReader(folder + "/input", add_file_path=False)
if __name__ == "__main__":
    LocalPipelineExecutor([reader, runner], tasks=int(tasks), workers=int(tasks), logging_dir=folder + "/logs").run()
"""

DOCUMENTS = 120  # of each rank
QUESTIONS = 2 * DOCUMENTS
IN_FLIGHT = 8  # of each rank
# The server waits after each EVERY answers until all are written down, but for those in flight here
# and in an attempt that was killed.
EVERY = 12
LOST = 4 * IN_FLIGHT + EVERY
"""Answers of each rank that a kill may cost."""
# Answers of each rank between two kills: were they lost, more would be requested again than may be.
APART = (60, 75)
# A kill at a time comes at this many answers at the latest.
AT_THE_LATEST = 30


class Job:
    """The job above in a process group of its own, as often as it takes, and the server of all its
    attempts, which kills them.
    """

    def __init__(self, folder, seed, kind, tasks, number=signal.SIGKILL):
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        write_tasks(folder, tasks, DOCUMENTS)
        self.log = ""
        self.first_question = 0.0
        self.all_answered = threading.Event()
        self.server = FakeServer(self._answer, delay=self._delay)
        self._kind, self._tasks, self._number = kind, tasks, number
        self._chance = random.Random(seed)
        self._answered = set()
        self._asked = []  # at the start of each attempt
        self._lock = threading.Lock()

    def start(self, kill_at=float("inf")):
        """``kill_at``: so many answers of this attempt."""
        words = [str(self.folder), self.server.url, self._kind, str(self._tasks)]
        with self._lock:
            self.killed = threading.Event()
            self._kill_at = kill_at
            self._answers = 0
            self._kept = answers_kept(self.folder / "checkpoints")
            self._asked.append(self.server.asked.copy())
            self._process = processes.start([sys.executable, str(self.folder / "job.py"), *words])

    def kill(self):
        """Once."""
        with self._lock:
            if not self.killed.is_set():
                self.killed.set()
                os.killpg(self._process.pid, self._number)

    def finish(self):
        try:
            self.log, _ = self._process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.log, _ = self._process.communicate()
        return self._process.returncode

    def asked_again(self):
        """Returns for each attempt how many of its questions a later one asked again."""
        seen = itertools.pairwise([*self._asked, self.server.asked])
        attempts = [{*(after - before)} for before, after in seen]
        return [
            len(asked & set().union(*attempts[number:])) for number, asked in enumerate(attempts, 1)
        ]

    # in the server's thread ----------------------------------------------------------------------

    def _delay(self, payload, times):
        self.first_question = self.first_question or time.monotonic()
        return 0.2 * self._chance.random()

    def _answer(self, payload, times):
        """Just before an answer is sent. Tells it without depending on when it is asked for."""
        question = payload["messages"][-1]["content"]
        if question.startswith("look"):  # no answer of a model: ``answers_kept`` has none of them
            return f"answer to {question}"
        killed = self.killed
        if self._answers % EVERY == 0:
            due = self._kept + self._answers - 2 * self._tasks * IN_FLIGHT
            until(lambda: killed.is_set() or answers_kept(self.folder / "checkpoints") >= due)
        self._answers += 1
        self._answered.add(question)
        if self._answers >= self._kill_at:
            self.kill()
        if len(self._answered) == self._tasks * QUESTIONS:
            self.all_answered.set()
        return f"answer to {question}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of a job that nothing interrupts, and the seconds from its start to its first
    question.
    """
    known = {}

    def run(kind, tasks):
        if (kind, tasks) not in known:
            job = Job(tmp_path_factory.mktemp("undisturbed") / "job", "", kind, tasks)
            with job.server:
                begun = time.monotonic()
                job.start()
                assert job.finish() == 0, job.log
            assert {*job.server.asked.values()} == {1}
            known[kind, tasks] = outputs(job.folder / "output"), job.first_question - begun
        return known[kind, tasks]

    return run


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 21))]
)
@pytest.mark.parametrize(
    ("kind", "number", "tasks"),
    [
        ("plain", signal.SIGKILL, 1),
        pytest.param("calls", signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param("calls", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("plain", signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param("gzip", signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param("parquet", signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param("plain", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("plain", signal.SIGINT, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_job_killed_at_random_moments_ends_with_the_bytes_of_one_that_was_not(
    ram,
    undisturbed,
    kind,
    number,
    tasks,
    seed,
):
    expected, first_question = undisturbed(kind, tasks)
    # Of its own: how many delays the server draws depends on timing.
    chance = random.Random(f"{kind} {number} {tasks} {seed}")
    # Python itself may lose a SIGINT while it imports (in a destructor, say): none comes before the
    # first question.
    at_a_time = (
        chance.uniform(0.3, 1.4) * first_question if number != signal.SIGINT else float("inf")
    )
    plan = [
        (float("inf"), tasks * chance.randrange(*APART)),
        (at_a_time, chance.randrange(1, AT_THE_LATEST)),
        (float("inf"), tasks * chance.randrange(*APART)),
    ]
    after_the_last_answer = chance.uniform(0, 0.1)

    job = Job(ram / "killed", f"delays {seed}", kind, tasks, number)
    with job.server:
        for seconds, answers in plan:
            job.start(answers)
            job.killed.wait(min(seconds, 300))
            job.kill()
            assert job.finish() != 0, job.log
        job.start()
        assert job.all_answered.wait(400)
        time.sleep(after_the_last_answer)
        job.kill()  # it may have ended a moment before
        if job.finish() != 0:
            job.start()
            assert job.finish() == 0, job.log

    assert outputs(job.folder / "output") == expected
    for rank in range(tasks):
        folder = job.folder / "checkpoints" / f"{rank:05d}"
        history = read_history(folder / "history.jsonl")
        assert history.damaged == 0
        assert history.last_attempt == read_run(folder / "run.json")["owner"]["fence"]
        assert [attempt.end.why for attempt in history.attempts if attempt.end][-1] == "done"
        done = history.last.documents
        calls = history.last.total.calls["look"]
        assert (done.read, done.requests) == (DOCUMENTS, QUESTIONS)
        assert (calls > 0) == (kind == "calls")
    # What is asked to stop waits for its answers.
    most = tasks * LOST if number == signal.SIGKILL else 0
    assert max(job.asked_again()) <= most
