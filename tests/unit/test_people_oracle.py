"""The oracle of ``tests/people`` sees each way in which an output or a closing line can be
wrong.
"""

import json

import pytest

from tests.people.inputs import DROPPED, REJECTED, InputFile, Row, expected
from tests.people.oracle import Failure, check_success

ROWS = (
    Row("one", "first text"),
    Row("two", "second text, longer"),
    Row("three", f"third {DROPPED}"),
    Row("four", f"fourth {REJECTED}"),
    Row("five", "fifth text"),
)
FILES = ("00000_chunk_00000.jsonl", "00001_chunk_00000.jsonl")


class Job:
    """A finished job: what its two output files, its dead letters and its terminal hold."""

    def __init__(self, folder):
        self.expected = expected({"a.jsonl": InputFile("a.jsonl", ROWS)}, "model-a", "Say: {text}")
        self.output, self.checkpoints = folder / "output", folder / "checkpoints"
        self.files = {FILES[0]: [self.row("one"), self.row("two")], FILES[1]: [self.row("five")]}
        self.letters = {"four": "HTTP 400"}
        self.terminal = (
            f"some log\n3 of 5 documents are in 2 files in {self.output} (1 dropped, 1 dead letters), for 5 requests "
            "with 13 prompt and 8 completion tokens. Whenever it is interrupted, the same line resumes it: X\n"
        )

    def row(self, id, answer_to=""):
        text = self.expected.rows[id].text
        answer = self.expected.answers[answer_to or id][self.expected.rows[answer_to or id].text]
        return {"text": text, "id": id, "metadata": {"rollout_results": [{"text": answer}]}}

    def check(self):
        letters = [{"id": id, "error": error} for id, error in self.letters.items()]
        contents = {self.output / name: rows for name, rows in self.files.items()}
        for path, rows in (
            contents | {self.checkpoints / "00000/dead_letters.jsonl": letters}
        ).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        check_success(
            self.expected, self.output, self.checkpoints, self.terminal, (5, 5), exact_tokens=True
        )


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_a_true_output_passes(job):
    job.check()


@pytest.mark.parametrize(
    ("falsify", "kind"),
    [
        (lambda job: job.files[FILES[0]].pop(), "missing"),
        (lambda job: job.files[FILES[1]].append(job.row("one")), "twice"),
        (lambda job: job.files[FILES[1]].append(job.row("one") | {"id": "other"}), "stranger"),
        (
            lambda job: job.files.update({FILES[0]: [job.row("one"), job.row("two", "one")]}),
            "wrong answer",
        ),
        (lambda job: (job.files[FILES[1]].clear(), job.letters.update(five="HTTP 503")), "blamed"),
        (lambda job: job.files.update({"00002_chunk_00000.jsonl": []}), "closing line"),
    ],
)
def test_a_falsified_output_fails(job, falsify, kind):
    falsify(job)
    with pytest.raises(Failure) as caught:
        job.check()
    assert caught.value.kind == kind
