"""Real processes, really killed, against servers that count and outlive them.

A job is killed several times, at moments drawn from a seed: at a number of answers (in the server's
thread, just before it sends the last of them), or at a time after the start (in start-up and
recovery, say), and once soon after its last answer (while its last chunk is published and
committed, say). ``pytest -m full`` tries 20 seeds of every kind.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.histories import read_history
from tests.kept import answers_kept
from tests.patience import until
from tests.yaml_jobs import write_tasks

JOB = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

folder, url, kind, tasks = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=8)


async def rollout(document, generate):
    first = await generate({"messages": [{"role": "user", "content": document.text}], "temperature": 1})
    second = await generate({"messages": [{"role": "user", "content": document.text + " again"}]})
    return [first, second]


name = "${rank}_chunk_${chunk_index}." + ("parquet" if kind == "parquet" else "jsonl")
writer = (
    ParquetWriter(folder + "/output", name)
    if kind == "parquet"
    else JsonlWriter(folder + "/output", name, compression=None if kind == "plain" else kind)
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
# Answers that may wait to be written down: the server waits for the others after each EVERY answers.
EVERY = 12
WRITE_GROUP = 2 * IN_FLIGHT + EVERY
# Answers of each rank between two kills: were they lost, far more would be requested again than may
# be.
APART = (60, 75)
# A kill at a time comes at this many answers at the latest.
AT_THE_LATEST = 30


class Job:
    """The job above in a process group of its own, as often as it takes."""

    def __init__(self, folder, url, kind, tasks=1):
        self.folder = folder
        self._url = url
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        write_tasks(folder, tasks, DOCUMENTS)
        self._kind, self._tasks = kind, str(tasks)
        self.log = ""

    def start(self, url=""):
        """Starts it, with this server instead of the job's if one is given."""
        arguments = [str(self.folder), url or self._url, self._kind, self._tasks]
        return processes.start([sys.executable, str(self.folder / "job.py"), *arguments])

    def finish(self, process):
        try:
            self.log, _ = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.log, _ = process.communicate()
        return process.returncode


class Life:
    """One process of a job, and what it asked and was answered until it was killed.

    Its server is its own. A server may read a request after the process that sent it was killed,
    and even after the next one has started.
    """

    def __init__(self, watch, checkpoints, kill_at):
        self._checkpoints = checkpoints
        self._kept_before = None
        self.asked = []
        self.answered = []
        self.process = None
        self.killed = threading.Event()
        self.server = FakeServer(self._answer, delay=self._delay)
        self._watch = watch
        self._kill_at = kill_at
        self._lock = threading.Lock()

    def start(self, start):
        with self._lock:
            self.process = start(self.server.url)
        return self.process

    def kill(self):
        """Once."""
        with self._lock:
            if self.process is not None and not self.killed.is_set():
                self.killed.set()
                os.killpg(self.process.pid, self._watch.number)

    # in the server's thread ----------------------------------------------------------------------

    def _delay(self, payload, times):
        self.asked.append(payload["messages"][-1]["content"])
        return self._watch.delay()

    def _answer(self, payload, times):
        """Just before an answer is sent. Tells it without depending on when it is asked for."""
        question = payload["messages"][-1]["content"]
        self._let_answers_be_kept()
        with self._lock:
            # The dead receive no answers.
            if not self.killed.is_set() or self._watch.number != signal.SIGKILL:
                self.answered.append(question)
            due = len(self.answered) >= self._kill_at
        if due:
            self.kill()
        self._watch.answered(question)
        return f"answer to {question}"

    def _let_answers_be_kept(self):
        """However slow its disk is, a kill then loses few answers."""
        if self._kept_before is None:
            self._kept_before = answers_kept(self._checkpoints)
        if len(self.answered) % EVERY == 0:
            in_flight = self._watch.tasks * IN_FLIGHT
            due = self._kept_before + len(self.answered) - in_flight
            until(lambda: self.killed.is_set() or answers_kept(self._checkpoints) >= due)


class Watch:
    """The attempts of a job, and what the server of each does: it kills its attempt at a number of
    answers.
    """

    def __init__(self, seed, tasks, number=signal.SIGKILL):
        self.lives = []
        self.tasks = tasks
        self.number = number
        self.all_answered = threading.Event()
        self.first_question = 0.0
        self._ever = set()
        self._questions = tasks * QUESTIONS
        self._chance = random.Random(seed)
        self._servers = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._servers.close()

    def begin(self, job, kill_at=float("inf")):
        self.lives.append(Life(self, job.folder / "checkpoints", kill_at))
        self._servers.enter_context(self.lives[-1].server)
        return self.lives[-1]

    def delay(self):
        """The seconds until the next question is answered."""
        self.first_question = self.first_question or time.monotonic()
        return 0.2 * self._chance.random()

    def answered(self, question):
        self._ever.add(question)
        if len(self._ever) == self._questions:
            self.all_answered.set()

    def asked_again(self, rank):
        """For each attempt: how many of a rank's questions a later one requested again; how many of
        these this one was answered; and how many answers it was given from the first of these to
        its end.
        """
        lives = [
            (
                [q for q in life.asked if q.split()[1] == str(rank)],
                [q for q in life.answered if q.split()[1] == str(rank)],
            )
            for life in self.lives
        ]
        found = []
        for index, (asked, answered) in enumerate(lives):
            assert len({*asked}) == len(asked), "asked twice in one life"
            later = {question for others, _ in lives[index + 1 :] for question in others}
            places = [place for place, question in enumerate(answered) if question in later]
            found.append(
                (
                    len(later.intersection(asked)),
                    len(places),
                    len(answered) - min(places, default=len(answered)),
                )
            )
        return found


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory,
):
    """The output of a job that nothing interrupts, and the seconds from its start to its first
    question.
    """
    known = {}

    def run(kind, tasks):
        if (kind, tasks) not in known:
            with Watch("undisturbed", tasks) as watch:
                job = Job(tmp_path_factory.mktemp("undisturbed") / "job", "", kind, tasks)
                begun = time.monotonic()
                assert job.finish(watch.begin(job).start(job.start)) == 0, job.log
            known[kind, tasks] = outputs(job.folder / "output"), watch.first_question - begun
        return known[kind, tasks]

    return run


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 21))]
)
@pytest.mark.parametrize(
    ("kind", "number", "tasks"),
    [
        ("plain", signal.SIGKILL, 1),
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

    with Watch(f"delays {seed}", tasks, number) as watch:
        job = Job(ram / "killed", "", kind, tasks)
        for seconds, answers in plan:
            life = watch.begin(job, answers)
            process = life.start(job.start)
            life.killed.wait(min(seconds, 300))
            life.kill()
            assert job.finish(process) != 0, job.log

        life = watch.begin(job)
        process = life.start(job.start)
        assert watch.all_answered.wait(400)
        time.sleep(after_the_last_answer)
        life.kill()  # it may have ended a moment before
        if job.finish(process) != 0:
            assert job.finish(watch.begin(job).start(job.start)) == 0, job.log

    assert outputs(job.folder / "output") == expected
    for rank in range(tasks):
        folder = job.folder / "checkpoints" / f"{rank:05d}"
        history, started = (
            read_history(folder / "history.jsonl"),
            read_run(folder / "run.json")["owner"]["fence"],
        )
        assert history.damaged == 0
        assert history.last_attempt == started, "of the last attempt there is a line"
        assert [attempt.end.why for attempt in history.attempts if attempt.end][-1] == "done"
        assert (history.last.documents.read, history.last.documents.requests) == (
            DOCUMENTS,
            QUESTIONS,
        )
    # Of each rank: datatrove's executor writes no stats.json if a kill came between the last rank's
    # end and its own.
    ranks = [json.loads(path.read_text()) for path in sorted((job.folder / "logs/stats").iterdir())]
    names = ("documents_processed", "requests", "successful_requests", "prompt_tokens")
    totals = [sum(total(rank[1]["stats"][name]) for rank in ranks) for name in names]
    # Tokens: words of the questions.
    of_each = [DOCUMENTS, QUESTIONS, QUESTIONS, DOCUMENTS * (3 + 4)]
    assert totals == [tasks * number for number in of_each]
    again = [watch.asked_again(rank) for rank in range(tasks)]
    # What is asked to stop waits for its answers.
    most = IN_FLIGHT + WRITE_GROUP if number == signal.SIGKILL else 0
    for asked, _, oldest in itertools.chain(*again):
        assert asked <= most
        assert oldest <= most


def total(metric):
    """Of a metric in a stats file, which is a number alone if that says all."""
    return metric["total"] if isinstance(metric, dict) else metric
