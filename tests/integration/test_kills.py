"""Real processes, really killed, against servers that count and outlive them.

A job is killed several times, at moments drawn from a seed: at a number of answers (in the server's
thread, just before it sends the last of them), or at a time after the start (in start-up and
recovery, say), and once soon after its last answer (while its last chunk is published and
committed, say). ``pytest -m full`` tries 20 seeds of every kind, and 200 kills of one job whose
rollouts call a tool and run an agent, in workers of which some come late.
"""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import orjson
import pytest

from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.histories import read_history
from tests.kept import answers_kept, results_kept
from tests.kill_job import DOCUMENTS, IN_FLIGHT, JOB, QUESTIONS
from tests.patience import until
from tests.yaml_jobs import write_tasks

# The server waits after each EVERY answers until all are written down, but for those in flight here
# and in an attempt that was killed.
EVERY = 12
LOST = 4 * IN_FLIGHT + EVERY
"""Answers of each rank that a kill may cost."""
# Answers of each rank between two kills: were they lost, more would be requested again than may be.
APART = (60, 75)
# A kill at a time comes at this many answers at the latest.
AT_THE_LATEST = 30
ANSWER = "answer to "
# Of the server's event loop, after which it has read all that a dead process has sent.
_STEPS = 20


def asked_of(kind, task, ordinal):
    """Returns what is asked of the model and the tool for a document, each with its number."""
    text = f"document {task} {ordinal}"
    asked = Counter([text, f"{text} again"])
    if kind == "agents":
        asked |= {f"look at {text}": 1, f"{text} agent": 1, f"{text} equal": 2}
    return asked


def all_asked(kind, tasks):
    documents = itertools.product(range(tasks), range(DOCUMENTS))
    return sum((asked_of(kind, *document) for document in documents), Counter())


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
        self.server.paths["/look"] = self._look
        self._kind, self._tasks, self._number = kind, tasks, number
        self._processes = []
        self._chance = random.Random(seed)
        self._answered = set()
        self._asked = []  # at the start of each attempt
        self._lock = threading.Lock()

    def start(self, kill_at=float("inf")):
        """``kill_at``: so many answers of this attempt."""
        with self._lock:
            self.killed = threading.Event()
            self._kill_at = kill_at
            self._answers = 0
            self._kept = self._count_kept()
            self._asked.append(self.server.asked.copy())
            self.join()

    def join(self):
        words = [str(self.folder), self.server.url, self._kind, str(self._tasks)]
        command = [sys.executable, str(self.folder / "job.py"), *words]
        self._processes.append(processes.start(command))

    def kill(self):
        """Once."""
        with self._lock:
            if not self.killed.is_set():
                self.killed.set()
                _send(self._number, self._processes[-1:])

    def finish(self):
        """Returns the exit code of the process that has begun first."""
        process = self._processes.pop(0)
        try:
            self.log, _ = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.log, _ = process.communicate()
        return process.returncode

    def asked_again(self):
        """Returns for each attempt how many of its questions a later one asked again."""
        seen = itertools.pairwise([*self._asked, self.server.asked])
        attempts = [{*(after - before)} for before, after in seen]
        return [
            len(asked & set().union(*attempts[number:])) for number, asked in enumerate(attempts, 1)
        ]

    def _count_kept(self):
        return answers_kept(self.folder / "checkpoints")

    # in the server's thread ----------------------------------------------------------------------

    def _delay(self, payload, times):
        self.first_question = self.first_question or time.monotonic()
        return (0.04 if self._kind == "agents" else 0.2) * self._chance.random()

    def _answer(self, payload, times):
        """Just before an answer is sent. Tells it without depending on when it is asked for."""
        question = payload["messages"][-1]["content"]
        self._count_answer()
        self._answered.add(question)
        if len(self._answered) == self._tasks * QUESTIONS:
            self.all_answered.set()
        return ANSWER + question

    def _look(self, payload):
        return {"text": ANSWER + payload["prompt"]}  # ``answers_kept`` has no calls

    def _count_answer(self):
        killed = self.killed
        if self._answers % EVERY == 0:
            due = self._kept + self._answers - 2 * self._tasks * IN_FLIGHT
            until(lambda: killed.is_set() or self._count_kept() >= due)
        self._answers += 1
        if self._answers >= self._kill_at:
            self.kill()


def _send(number, victims):
    for victim in victims:
        try:
            os.killpg(victim.pid, number)
        except ProcessLookupError:  # it has no group yet
            os.kill(victim.pid, number)


class Workers(Job):
    """A job whose tasks are done by workers, of which some come late and some are killed.

    Attributes:
        ledger: what has been asked until a SIGKILL, and which of its answers are kept.
        kills: by signal.
    """

    def __init__(self, folder, seed, tasks):
        super().__init__(folder, seed, "agents", tasks)
        self.ledger = []
        self.kills = Counter()
        self._victims = []
        self._noted = threading.Event()

    def begin(self, kill_at, late):
        """``late``: seconds until a further worker comes."""
        self._noted.clear()
        self.start(kill_at)
        if len(self._processes) == 1 and not self.killed.wait(late):
            self.join()

    def end(self, seconds):
        """Waits for the kill; it comes after so many seconds at the latest."""
        if not self.killed.wait(seconds):
            self.server._loop.call_soon_threadsafe(self.kill)
        assert self._noted.wait(300)
        ended = {*self._victims, *(process for process in self._processes if process.poll() == 0)}
        for process in ended:
            process.communicate(timeout=400)
        self._processes = [process for process in self._processes if process not in ended]

    def kept(self):
        """Returns the questions whose answers are kept, each with its number."""
        kept = Counter()
        for task, (done, results) in results_kept(self.folder / "checkpoints").items():
            for ordinal in done:
                kept += asked_of(self._kind, task, ordinal)
            for _, result in results:
                fields = orjson.loads(result)
                kept[fields.get("once", fields)["text"].removeprefix(ANSWER)] += 1
        return kept

    def kill(self):
        """In the server's thread."""
        with self._lock:
            if self.killed.is_set():
                return
            self.killed.set()
            alive = [process for process in self._processes if process.poll() is None]
            number = self._chance.choice([signal.SIGKILL, signal.SIGTERM])
            self.kills[number] += bool(alive)
            self._victims = alive
            if number == signal.SIGTERM or not alive:
                _send(number, alive)
                self._noted.set()
                return
            _send(signal.SIGSTOP, alive)  # those that live on ask nothing until all is noted
            self._victims = self._chance.sample(alive, self._chance.randint(1, len(alive)))
            _send(number, self._victims)
            for victim in self._victims:
                victim.wait()
            others = [process for process in alive if process not in self._victims]
            self._noting = asyncio.ensure_future(self._note(self.kept(), others))

    async def _note(self, kept, others):
        for _ in range(_STEPS):
            await asyncio.sleep(0)
        self.ledger.append((self.server.asked.copy(), kept))
        _send(signal.SIGCONT, others)
        self._noted.set()

    def _count_kept(self):
        return self.kept().total()

    def _look(self, payload):
        self._count_answer()
        return super()._look(payload)


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
            assert job.server.asked == all_asked(kind, tasks)
            known[kind, tasks] = outputs(job.folder / "output"), job.first_question - begun
        return known[kind, tasks]

    return run


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 21))]
)
@pytest.mark.parametrize(
    "kind, number, tasks",
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
        assert (done.read, done.requests) == (DOCUMENTS, QUESTIONS)
    # What is asked to stop waits for its answers.
    most = tasks * LOST if number == signal.SIGKILL else 0
    assert max(job.asked_again()) <= most


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills, tasks", [(8, 2), pytest.param(200, 6, marks=pytest.mark.full)])
def test_no_call_and_no_answer_of_an_agent_is_paid_twice_but_those_in_flight_at_a_kill(
    ram, undisturbed, kills, tasks
):
    output, first_question = undisturbed("agents", tasks)
    expected = all_asked("agents", tasks)
    chance = random.Random(kills)
    job = Workers(ram / "killed", kills, tasks)
    with job.server:
        while (left := kills - job.kills.total()) > 0:
            share = (expected - job.kept()).total() // left
            assert share > 0, f"{left} kills too few"
            job.begin(chance.randint(1, share), chance.uniform(0, 2 * first_question))
            is_early = chance.random() < 0.3
            job.end(chance.uniform(0.1, 1.4) * first_question if is_early else 300)
        job.start()
        while job._processes:
            assert job.finish() == 0, job.log

    assert outputs(job.folder / "output") == output
    assert job.kept() == expected
    before, kept_before = Counter(), Counter()
    in_flight = []  # at each SIGKILL, or answered and not yet kept
    for asked, kept in [*job.ledger, (job.server.asked, expected)]:
        new = asked - before
        assert new - (expected - kept_before) == Counter()
        in_flight.append((new - (kept - kept_before)).total())
        before, kept_before = asked, kept
    assert max(in_flight) <= 2 * LOST
