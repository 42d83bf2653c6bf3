"""A job on a real engine, in a process that may be killed, and the faults that may happen to its
server.

Used with vLLM here, and with llama.cpp in tests/integration.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

from datatrove_ckpt.inference.servers.guardian import descendants, process_table
from tests.yaml_jobs import read_rows


class Attempts:
    """A job in a folder, in a process that may be killed and started again.

    Args:
        module: what the process runs, with the folder as its argument.
        job: the content of job.json.
        environment: additions to the environment of the process.
    """

    def __init__(self, folder, module, job, environment=None):
        self.folder = folder
        self._module = module
        self._environment = environment or {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(job))

    @contextmanager
    def process(self):
        command = [sys.executable, "-m", self._module, str(self.folder)]
        root = Path(__file__).parents[2]
        environment = {**os.environ, **self._environment}
        with (
            (self.folder / "stderr").open("ab") as stderr,
            subprocess.Popen(command, cwd=root, env=environment, stderr=stderr) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def run(self):
        with self.process() as process:
            self.until_end(process)

    def until_end(self, process):
        assert process.wait() == 0, self.log()

    def until(self, kind, number, process):
        """Until there are so many different events, of all attempts together.

        Polls, because other processes write them.
        """
        while len(self.events(kind)) < number:
            assert process.poll() is None, self.log()
            time.sleep(0.01)

    def events(self, kind):
        """How often each document or request was ``asked`` or ``answered``, or its answer ``kept``,
        that is saved.
        """
        return Counter(name for event, name in self._events() if event == kind)

    def _events(self):
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split(maxsplit=1) for line in lines]

    def log(self):
        return "".join(
            path.read_text() for path in (self.folder / "runner.log", self.folder / "stderr")
        )


class Job(Attempts):
    """A job of documents whose answers have a known length.

    Args:
        settings: fields of its InferenceConfig.
        documents: number of documents that can be answered.
        too_long: number of further documents that are too long to be answered.
        tokens: length of each answer.
        concurrency: requests in flight.
        standing_clock: a server hangs only while it is stopped; see ``job.py``.
    """

    def __init__(
        self,
        folder,
        settings,
        *,
        documents,
        too_long=0,
        tokens=32,
        concurrency=16,
        environment=None,
        standing_clock=False,
    ):
        self.documents = documents
        self.tokens = tokens
        self.concurrency = concurrency
        config = {
            "max_concurrent_generations": concurrency,
            "server_patience_seconds": 30.0,
            "server_log_folder": str(folder / "logs"),
            **settings,
        }
        job = {
            "documents": documents,
            "too_long": too_long,
            "tokens": tokens,
            "config": config,
            "standing_clock": standing_clock,
        }
        super().__init__(folder, "tests.real.job", job, environment)

    def note(self, event):
        with (self.folder / "events").open("a") as events:
            events.write(f"{event} -\n")

    def check(self, restarts, attempts=1):
        """Every document is answered at full length, and none was re-requested after its answer.

        Answers that a kill -9 finds unsaved do not count: answers are saved in groups, a moment
        after they came.
        """
        files = sorted((self.folder / "output").iterdir())
        outputs = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        assert sorted(line["id"] for line in outputs) == sorted(
            f"doc-{n}" for n in range(self.documents)
        )
        for line in outputs:
            (result,) = line["metadata"]["rollout_results"]
            assert (result["finish_reason"], result["usage"]["completion_tokens"]) == (
                "length",
                self.tokens,
            )
        answered = set()
        kept = set()
        unwritten = 0
        for event, document in self._events():
            if event == "asked":
                assert document not in answered | kept, (
                    f"{document} was re-requested after its answer"
                )
            elif event == "answered":
                answered.add(document)
            elif event == "kept":
                kept.add(document)
            else:
                unwritten += len(answered - kept)
                answered &= kept
        assert unwritten <= self.concurrency
        assert set(self.events("kept").values()) == {1}
        # The last "kept" events before a kill may be missing, because they are written after the
        # answers are saved.
        assert len({line["id"] for line in outputs} - kept) <= (
            self.concurrency if self.events("killed") else 0
        )
        again = sum(self.events("asked").values()) - len(self.events("asked"))
        assert self.log().count(" is back (restart ") == restarts
        # The requests in flight, and a few that were sent before the death was noticed.
        assert again <= (self.concurrency + 4) * (restarts + attempts - 1) + unwritten

    def dead_letters(self):
        """The errors of the documents that could not be answered."""
        path = self.folder / "checkpoints" / "00000" / "dead_letters.jsonl"
        return {letter["id"]: letter["error"] for letter in read_rows(path)}


def check_fault(job, fault, after):
    """The job completes although the fault happens to its server, after ``after`` answers."""
    with job.process() as process:
        job.until("answered", after, process)
        fault(process)
        job.until_end(process)
    job.check(restarts=1)


def check_faults(job, faults, every):
    """The job completes although all faults happen to its server, one after each ``every`` further
    answers.
    """
    with job.process() as process:
        for number, fault in enumerate(faults, 1):
            job.until("answered", every * number, process)
            answers = len(job.events("answered"))
            fault(process)
            while f"(restart {number} of" not in job.log():
                assert process.poll() is None, job.log()
                time.sleep(0.1)
            job.until("answered", answers + job.concurrency, process)
        job.until_end(process)
    job.check(restarts=len(faults))


def check_killed_runner(job, after):
    """A runner that is killed after ``after`` answers leaves no process, and the next runner
    completes the job.
    """
    with job.process() as process:
        job.until("answered", after, process)
        servers = [child.pid for child in descendants(process.pid)]
        process.kill()
        process.wait()
    job.note("killed")
    deadline = time.monotonic() + 120
    while running := _running(servers):
        assert time.monotonic() < deadline, (
            f"still running two minutes after their runner: {running}"
        )
        time.sleep(0.02)
    job.run()
    job.check(restarts=0, attempts=2)


def preempt(job, number, after):
    """One attempt that ends by a signal to all its processes, as Slurm sends it; how many requests
    were given up.
    """
    with job.process() as process:
        lost_before = job.events("asked").total() - job.events("answered").total()
        job.until("answered", after, process)
        servers = [child.pid for child in descendants(process.pid)]
        for pid in [process.pid, *servers]:
            os.kill(pid, number)
        assert process.wait() == 128 + number, job.log()
    lost = job.events("asked").total() - job.events("answered").total() - lost_before
    assert _running(servers) == []
    return lost


def _running(pids):
    """The ids and names of the processes that still run.

    Zombies do not count: only their parents can remove them.
    """
    running = [
        process.pid for process in process_table() if process.pid in pids and not process.zombie
    ]
    names = []
    for pid in running:
        with suppress(OSError):  # it has ended
            names.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return names


def process_named(title, process):
    """The process of the tree whose command line holds ``title``."""
    for candidate in descendants(process.pid):
        line = Path(f"/proc/{candidate.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if title in line and not candidate.zombie:
            return candidate.pid
    raise AssertionError(f"no process of the tree is called {title}")


def server_process(process):
    """The child of the guardian."""
    guardian = process_named("guardian.py", process)
    return next(child.pid for child in descendants(guardian) if child.parent == guardian)


def terminate_server(process):
    os.kill(server_process(process), signal.SIGTERM)
