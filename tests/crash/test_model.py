"""A model of the whole: random runs of one job, which complete, fail, are killed, lose power, and
resume.

Each document's answers, and whether it is written, dropped or a dead letter at its n-th attempt,
follow from its text alone. So the model knows what must be on disk from the texts, from where the
input ended at each run, and from the passes over dead letters. It is compared with the disk after
every run, however the run ended.

A kill keeps what was written, but data that was not synced may still be lost when the power fails
in a later run. So each disk of a job passes on to the next one which data is durable.
"""

import errno
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace

import orjson
import pytest
import xxhash
from datatrove.pipeline.readers import JsonlReader as CountingReader
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.checkpoint.checksummed_lines import read_lines
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, DocumentFailed, ServerRefused
from datatrove_ckpt.generation.failures import read_letters
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crashes import CrashingDisk, disk_in_place
from tests.disk_errors import FailingDisk
from tests.jobs import runner
from tests.power_loss import PowerLossDisk
from tests.rank_folders import place_at

# The job -----------------------------------------------------------------------------------------


class Faults:
    """Faults of the server in the current run.

    A rollout's is in the environment: it is no part of the identity.
    """

    answers_left = None


FAULTS = Faults()


async def rollout(document, generate, prompt):
    """Two questions, the second with the answer to the first.

    The text says what happens: its kind and hardness.
    """
    letter = getattr(document, "dead_letter", None)
    attempt = letter["attempts"] + 1 if letter else 1
    kind, hardness, _ = document.text.split()
    first = await generate(question(prompt, document.text, attempt))
    if document.id == os.environ.get("FAULT_RAISING"):
        raise RuntimeError("as asked")
    if kind in ("raises", "drops") and attempt <= int(hardness):
        raise ValueError("as its text says")
    if kind == "drops":
        return None
    second = await generate(question(prompt, document.text, attempt, first.text))
    return [first.text, second.text]


def question(prompt, text, attempt, answer="nothing"):
    return {"messages": [{"role": "user", "content": f"{prompt} {text} {attempt} {answer}"}]}


def _words(content):
    """Prompt, kind, hardness, number, attempt, answer."""
    return content.split(maxsplit=5)


def refuse(payload, times):
    if FAULTS.answers_left is not None:
        FAULTS.answers_left -= 1
        if FAULTS.answers_left < 0:
            return 401
    if _is_probe(payload["messages"][-1]["content"]):
        return None
    _, kind, hardness, _, attempt, answer = _words(payload["messages"][-1]["content"])
    return (
        400
        if kind == "rejected" and answer != "nothing" and int(attempt) <= int(hardness)
        else None
    )


def slowness(payload, times):
    return 0.003 if " slow " in payload["messages"][-1]["content"] else 0.0


def _is_probe(content):
    """Whether a request has one word in place of a text."""
    return content == "JSON"


def outcome(text, attempt):
    kind, hardness, _ = text.split()
    if kind in ("rejected", "raises", "drops") and attempt <= int(hardness):
        return "dead"
    return "dropped" if kind == "drops" else "written"


def line(text, attempt):
    """Returns the line that the output must hold for a document, computed without the package."""
    answers = []
    for answer in ("nothing", "the first"):
        asked = question(PROMPT, text, attempt, answers[0] if answer == "the first" else answer)
        payload = {
            "messages": [{"content": asked["messages"][0]["content"], "role": "user"}],
            "model": "fake",
        }
        answers.append(f"answer {xxhash.xxh3_64_hexdigest(orjson.dumps(payload))}")
    row = {"text": text, "id": identifier(text), "metadata": {"rollout_results": [answers]}}
    return orjson.dumps(row) + b"\n"


def identifier(text):
    return f"id {text.split()[2]}"


PROMPT = "Say:"


@dataclass(frozen=True)
class Way:
    """Settings that may differ from run to run.

    ``retry``: process the dead letters, not the input.
    """

    retry: bool
    seeks: bool
    concurrency: int
    group: int
    sync_seconds: float
    retry_errors: bool


WAYS = st.builds(
    Way,
    retry=st.sampled_from([False, False, False, True]),
    seeks=st.booleans(),
    concurrency=st.sampled_from([50, 3, 1]),
    group=st.sampled_from([1, 2000]),
    sync_seconds=st.sampled_from([1.0, 0.0]),
    retry_errors=st.booleans(),
)
KIND = st.sampled_from(
    ["plain 0", "slow 0", "drops 0", "rejected 1", "raises 1", "rejected 2", "drops 1", "raises 3"]
)
DOCUMENTS = st.lists(KIND, min_size=2, max_size=8) | st.just([])
MOMENT = st.integers(0, 99)
"""A moment in a run, from its start (0) to about its end.

Up to 127, hypothesis prefers no number.
"""

ENDS = ("to_the_end", "killed", "power_lost", "disk_failed", "rollout_failed", "server_refused")


class Powered(PowerLossDisk):
    """A disk that crashes, and knows what earlier runs wrote and did not sync.

    SQLite syncs its files itself, so what it wrote in an earlier run counts as durable.
    """

    def __init__(self, crash_at, folder, torn=False, before=None):
        super().__init__(crash_at, folder, torn)
        if before is not None:
            before._look()
            self._now, self._durable = before._now, before._durable
            for path, file in self._now.items():
                if file is not None and path.name.startswith("replay.sqlite3"):
                    file.durable = file.content
                    self._durable[path] = file


# The machine -------------------------------------------------------------------------------------


class JobMachine(RuleBasedStateMachine):
    """Runs of one job. No rule has a precondition: what is on disk after a crash is not known in
    advance.
    """

    def __init__(self):
        super().__init__()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.job = self.folder / "job"
        self.job.mkdir(parents=True)
        self.input = self.folder / "input"
        self.input.mkdir()
        self.texts = []
        self.ends = set()  # where the input ended at each run
        self.last_completed = self.lost_power = False
        self.power = None
        # Threads race, so hypothesis may be unable to repeat a run to show it.
        self.history = []

    @initialize(
        kinds=st.lists(DOCUMENTS, min_size=1, max_size=3),
        records=st.integers(1, 5),
        ends=st.booleans(),
    )
    def begin(self, kinds, records, ends):
        self.records = records
        for part in kinds:
            self._grow(part, True, ends)

    # rules ---------------------------------------------------------------------------------------

    @rule(kinds=DOCUMENTS, in_a_new_file=st.booleans(), ends=st.booleans())
    def grow(self, kinds, in_a_new_file, ends):
        self._grow(kinds, in_a_new_file, ends)

    # One rule for all ends of a run: with many rules, hypothesis leaves out some in each example.
    @rule(
        way=WAYS,
        end=st.sampled_from(ENDS),
        moment=MOMENT,
        detail=st.integers(0, 11),
        torn=st.booleans(),
    )
    def run_job(self, way, end, moment, detail, torn):
        getattr(self, f"_{end}")(way, moment, detail, torn)

    def _to_the_end(self, way, moment, detail, torn):
        self._run_once(way, self._disk())

    def _killed(self, way, moment, detail, torn):
        disk = self._disk(self._effect(moment), torn)
        self._run_once(way, disk)
        if disk.crashed_at is not None:
            # The folder is as at the crash, and what was not synced is still in memory only.
            next(CrashingDisk.survivors(disk))
            self._died("kills")

    def _power_lost(self, way, moment, detail, torn):
        disk = self._disk(self._effect(moment), torn)
        self._run_once(way, disk)
        if disk.crashed_at is not None:
            survivors = [*itertools.islice(disk.survivors(), detail + 1)]
            assert len(survivors) == detail + 1
            self.power = None
            # Files that a run removed at its very end may be back, so a rank may look as if it had
            # more to do.
            self.last_completed, self.lost_power = False, True
            self._died("power losses")

    def _disk_failed(self, way, moment, detail, torn):
        code, permanent = (errno.ENOSPC, errno.EIO, errno.EROFS)[detail % 3], torn
        disk = FailingDisk(self._effect(moment), code, permanent)
        error = self._run_once(way, disk)
        self.power = None
        if error is None or isinstance(error, CheckpointMismatch):
            assert disk.failed_at is None, f"the job ignored an error of the disk: {disk.failed_at}"
            return
        assert disk.failed_at is not None, f"failed without cause: {error}"
        assert "/" in str(error), f"no file is named: {error}"
        self._died("disk errors")

    def _rollout_failed(self, way, moment, detail, torn):
        """With on_document_error="stop", which is changed for this run only."""
        number = moment * (len(self.texts) + 1) // 100
        with fault(raising=f"id {number}"):
            before = self._finished_on_disk()
            raising = {
                n
                for n, text in enumerate(self.texts)
                if "raises" in text or text.startswith("drops 1") or n == number
            }
            stops = {n for n in raising if (n, 1) not in before}
            error = self._run_once(way, self._disk(), on_document_error="stop")
        if way.retry or error is None:
            assert way.retry or not stops, f"the job did not stop at {stops}"
            return
        assert isinstance(error, DocumentFailed), error
        assert stops, f"failed without cause: {error}"
        self._died("failed rollouts")

    def _server_refused(self, way, moment, detail, torn):
        """It answers some requests, and then 401."""
        with fault(answers_left=moment // 8):
            error = self._run_once(way, self._disk())
        if error is not None and not isinstance(error, CheckpointMismatch):
            assert isinstance(error, ServerRefused), error
            self._died("refusing servers")

    def teardown(self):
        """In any case: runs to the end, and retries until no dead letter is left to retry."""
        with self._history_of_a_fault():
            if (failure := sys.exception()) is not None:
                raise failure
            self._to_the_very_end()

    @contextmanager
    def _history_of_a_fault(self):
        """Prints the job's history if it shows a fault, but not if hypothesis gives the example
        up.
        """
        try:
            yield
        except HypothesisException:
            raise
        except Exception:
            print("history of the job:", *self.history, sep="\n  ")
            raise

    def _to_the_very_end(self):
        way = Way(False, True, 50, 2000, 1.0, False)
        assert self._run_once(way, self._disk()) is None
        before = {}
        while before != (before := outputs(self.job / "checkpoints")):
            assert self._run_once(replace(way, retry=True), self._disk()) is None
        self._check_verify(all_is_done=True)
        self._check_places()

    # runs ----------------------------------------------------------------------------------------

    def _disk(self, crash_at=10**9, torn=False):
        self.power = Powered(crash_at, self.job, torn, self.power)
        return self.power

    def _effect(self, moment):
        """A run has about ten effects per document, and some at its start and end."""
        done = len({number for number, _ in self._finished_on_disk()})
        return moment * (30 + 12 * (len(self.texts) - done)) // 100

    def _run_once(self, way, disk, **changes):
        """Runs the job once and returns what it raised.

        After a simulated crash it returns None, as after a success.
        """
        error = None
        returned = False
        done = self._finished_on_disk()
        self.server.asked.clear()
        self._before(way)
        with disk_in_place(disk), pytest.MonkeyPatch.context() as patch:
            patch.setattr(open_checkpoint, "MAX_GROUP", way.group)
            try:
                self._step(way, **changes).run([] if way.retry else self._read(way))
                returned = True
            except CkptError as raised:
                error = raised
        crashed = getattr(disk, "crashed_at", None)
        fault = crashed or getattr(disk, "failed_at", None)
        self.history.append(
            f"{way} {type(disk).__name__} {fault} {FAULTS.answers_left} -> {error!r:.200}"
        )
        assert not (returned and crashed), f"the job ignored a crash: {crashed}"
        self.count["runs"] += 1
        asked = {
            (int(number), int(attempt))
            for content in self.server.asked
            if not _is_probe(content)
            for *_, number, attempt, _ in [_words(content)]
        }
        assert not asked & done, f"re-requested what was finished: {asked & done}"
        if not way.retry:
            self.last_completed = returned
        self._after(way, error, returned)
        if crashed is None:
            self._check(way if returned else None)
        return error

    def _before(self, way):
        self.retryable = None
        if not way.retry:
            self.ends.add(len(self.texts))
        elif self.last_completed:
            self.retryable = True
        elif len(self._commits()) == 0 and self.texts:
            self.retryable = False

    def _after(self, way, error, returned):
        if way.retry:
            assert not (returned and self.retryable is False), "retried a rank that is not finished"
            refused = isinstance(error, CheckpointMismatch)
            assert not (refused and self.retryable), error
            assert not refused or "not finished" in str(error), error
        else:
            assert not isinstance(error, CheckpointMismatch), error

    def _died(self, how):
        self.count[how] += 1
        self._check(None)

    def _step(self, way, **changes):
        config = {"max_concurrent_generations": way.concurrency, **changes.pop("config", {})}
        arguments = {
            "records_per_chunk": self.records,
            "shared_context": {"prompt": PROMPT},
            "skip_bad_requests": True,
            "on_document_error": "dead_letter",
            "retry_dead_letters": way.retry,
            "sync_seconds": way.sync_seconds,
            "retry_errors": way.retry_errors,
            **changes,
        }
        return runner(self.job, self.server, rollout, config=config, **arguments)

    def _read(self, way):
        reader = JsonlReader if way.seeks else CountingReader
        return reader(str(self.input), add_file_path=False).run()

    def _grow(self, kinds, in_a_new_file, ends):
        rows = []
        for kind in kinds:
            self.texts.append(f"{kind} {len(self.texts)}")
            rows.append(json.dumps({"id": identifier(self.texts[-1]), "text": self.texts[-1]}))
        there = sorted(self.input.iterdir())
        path = self.input / f"{len(there):03d}.jsonl" if in_a_new_file or not there else there[-1]
        before = path.read_text() if path.exists() else ""
        between = "\n" if before and rows and not before.endswith("\n") else ""
        self.history.append(f"input: {path.name} + {rows}, newline at its end: {ends}")
        path.write_text(before + between + "\n".join(rows) + ("\n" if ends and rows else ""))

    # what is on disk -----------------------------------------------------------------------------

    @property
    def _rank(self):
        return self.job / "checkpoints" / "00000"

    def _commits(self, rank=None):
        commits = read_commits((rank or self._rank) / "commits.jsonl")
        return [commits[index] for index in sorted(commits)]

    def _passes(self):
        """Of each pass over dead letters: its number, its rank's folder, and what it was to try."""
        found = []
        for folder in sorted((self.job / "checkpoints").glob("retry-*/00000")):
            if (folder / "input.jsonl").exists():
                taken = [
                    (letter["ordinal"], letter["attempts"] + 1)
                    for letter in read_letters(folder / "input.jsonl")
                ]
                found.append((int(folder.parent.name[-5:]), folder, taken))
        return found

    def _finished_on_disk(self):
        """By commits and journals."""
        found = set()
        inputs = [(self._rank, [(number, 1) for number in range(len(self.texts))])]
        inputs += [(folder, taken) for _, folder, taken in self._passes()]
        for folder, attempts in inputs:
            for commit in self._commits(folder):
                found.update(attempts[commit.first_ordinal : commit.next_ordinal])
            for path in folder.glob("chunk_*.jsonl"):
                found.update(
                    attempts[FinishedDocument.from_body(line.body).ordinal]
                    for line in read_lines(path)
                )
        return found

    # what must be on disk ------------------------------------------------------------------------

    def _check(self, completed):
        """Called after every run. ``completed``: the settings of the run, if it completed."""
        expected = self._check_rank(
            "", self._rank, [(number, 1) for number in range(len(self.texts))], self.ends
        )
        finished = completed is not None and not completed.retry
        if finished:
            commits = self._commits()
            assert [commit.chunk_index for commit in commits] == [*range(len(commits))]
            covered = sum(commit.counts.read for commit in commits)
            assert covered == len(self.texts), (
                f"{covered} of {len(self.texts)} documents are committed"
            )
        taken = Counter()
        begun = (self.job / "checkpoints").glob("retry-*/00000")
        at_work = any(not (folder / "run.json").exists() for folder in begun)
        for number, folder, attempts in self._passes():
            expected |= self._check_rank(f"retry{number}_", folder, attempts, {len(attempts)})
            covered = sum(commit.counts.read for commit in self._commits(folder))
            at_work |= covered < len(attempts) or any(
                (folder / name).exists() for name in ("lock", "replay.sqlite3")
            )
            taken.update(attempts)
        assert all(number == 1 for number in taken.values()), f"retried twice: {taken}"
        if completed is not None and completed.retry:
            assert self.lost_power or not at_work, "a pass ended before its end"
        if (finished and not at_work) or (
            completed is not None and completed.retry and self.last_completed
        ):
            found = outputs(self.job / "output")
            assert found.keys() == expected, f"files {sorted(found)}, not {sorted(expected)}"
        self._check_verify(finished and not at_work)

    def _check_rank(self, prefix, folder, attempts, ends):
        """Every commit against the disk; returns the names of the files that they cover."""
        expected = set()
        letters = Counter()
        covered = []
        for commit in self._commits(folder):
            partial = commit.counts.read < self.records
            assert not partial or commit.next_ordinal in ends, (
                f"cut short where no input ended: {commit}"
            )
            assert 0 < commit.counts.read <= self.records
            covered += range(commit.first_ordinal, commit.next_ordinal)
            chunk = attempts[commit.first_ordinal : commit.next_ordinal]
            outcomes = Counter(outcome(self.texts[number], attempt) for number, attempt in chunk)
            counts = (commit.counts.written, commit.counts.dropped, commit.counts.dead)
            assert counts == (outcomes["written"], outcomes["dropped"], outcomes["dead"]), commit
            letters.update(one for one in chunk if outcome(self.texts[one[0]], one[1]) == "dead")
            content = b"".join(
                line(self.texts[n], a) for n, a in chunk if outcome(self.texts[n], a) == "written"
            )
            if content:
                name = f"00000_chunk_{prefix}{commit.chunk_index:05d}.jsonl"
                expected.add(name)
                path = self.job / "output" / name
                assert path.exists(), f"{name} is committed and missing"
                assert path.read_bytes() == content, name
        assert covered == sorted(set(covered)), (
            f"two commits cover documents, or in another order: {covered}"
        )
        self._check_letters(folder, letters)
        return expected

    def _check_letters(self, folder, committed):
        """Checks the dead letters of commits.

        Others may follow them, until the next run cuts those off.
        """
        end = max((commit.dead_letters_size for commit in self._commits(folder)), default=0)
        path = folder / "dead_letters.jsonl"
        kept = path.read_bytes()[:end] if path.exists() else b""
        found = Counter()
        for row in kept.splitlines():
            letter = json.loads(row)
            number, attempt = letter["ordinal"], letter["attempts"]
            found[number, attempt] += 1
            as_read = {
                "text": self.texts[number],
                "id": identifier(self.texts[number]),
                "media": [],
                "metadata": {},
            }
            assert letter["document"] == as_read
        assert found == committed, f"dead letters {found}, not {committed}"

    def _check_verify(self, all_is_done):
        if not (self._rank / "run.json").exists():
            return
        report = verify(place_at(self.job / "checkpoints"), full=True)
        assert not report.problems, "\n".join(map(str, report.problems))
        if all_is_done:
            assert not report.unfinished, "\n".join(map(str, report.unfinished))

    def _check_places(self):
        """Every document is in exactly one place: an output file, dropped, or a letter that nobody
        retried.
        """
        found = Counter()
        for content in outputs(self.job / "output").values():
            found.update(json.loads(row)["id"] for row in content.splitlines())
        taken = {attempt for _, _, attempts in self._passes() for attempt in attempts}
        for folder in (self._rank, *(folder for _, folder, _ in self._passes())):
            for letter in read_letters(folder / "dead_letters.jsonl"):
                if (letter["ordinal"], letter["attempts"] + 1) not in taken:
                    found[letter["id"]] += 1
        for number, text in enumerate(self.texts):
            last = max([1, *(attempt for n, attempt in taken if n == number)])
            if outcome(text, last) == "dropped":
                found[identifier(text)] += 1
        assert found == Counter(identifier(text) for text in self.texts)


@contextmanager
def fault(raising=None, answers_left=None):
    FAULTS.answers_left = answers_left
    try:
        with pytest.MonkeyPatch.context() as patch:
            if raising is not None:
                patch.setenv("FAULT_RAISING", raising)
            yield
    finally:
        FAULTS.answers_left = None


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("code_described_once")
@pytest.mark.parametrize(
    "examples, steps",
    [
        (2, 20),
        pytest.param(40, 15, marks=pytest.mark.slow),
        pytest.param(150, 30, marks=pytest.mark.full),
    ],
    ids=["few", "more", "many"],
)
def test_whatever_happens_every_document_is_accounted_for_exactly_once(ram, examples, steps):
    with FakeServer(status=refuse, delay=slowness) as server:
        JobMachine.server, JobMachine.folder, JobMachine.count = server, ram / "model", Counter()
        run_state_machine_as_test(
            # A draw of its own would change with every line of this file.
            seed(1)(JobMachine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                # Threads race: a shorter history may pass for another reason.
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(", ".join(f"{number} {what}" for what, number in JobMachine.count.items()))
    expected = ["kills", "power losses", "disk errors", "failed rollouts", "refusing servers"]
    # The last two need unfinished documents, and few examples need not hold each.
    for what in expected[: {2: 3, 40: 3, 150: 5}[examples]]:
        assert JobMachine.count[what], f"no {what}"
