"""The oracle of ``tests/people`` sees each way in which an output or a closing line can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.people.inputs import DROPPED, REJECTED, Expected, InputFile, Row, expected
from tests.people.oracle import Failure, check_success

ROWS = (
    Row("one", "first text"),
    Row("two", "second text, longer"),
    Row("three", f"third {DROPPED}"),
    Row("four", f"fourth {REJECTED}"),
    Row("five", "fifth text"),
)
FILES = ("00000_chunk_00000.jsonl", "00001_chunk_00000.jsonl")
LETTERS = "00000/dead_letters.jsonl"


class Job:
    """A finished job, made by hand: two output files, one dead letter, a closing line."""

    def __init__(self, folder: Path) -> None:
        self.expected: Expected = expected({"a.jsonl": InputFile("a.jsonl", ROWS)}, "model-a", "Say: {text}")
        self.output, self.checkpoints = folder / "output", folder / "checkpoints"
        self.output.mkdir()
        (self.checkpoints / "00000").mkdir(parents=True)
        for name, ids in zip(FILES, (("one", "two"), ("five",)), strict=True):
            self.write(name, [self.line(id) for id in ids])
        letter = {"id": "four", "error": "HTTP 400"}
        (self.checkpoints / LETTERS).write_text(json.dumps(letter) + "\n")
        self.terminal = (
            f"some log\n3 of 5 documents are in 2 files in {self.output} (1 dropped, 1 dead letters), for 5 requests "
            "with 13 prompt and 8 completion tokens. Whenever it is interrupted, the same line resumes it: X\n"
        )

    def line(self, id: str) -> str:
        text = self.expected.rows[id].text
        result = {"text": self.answer(id), "finish_reason": "stop"}
        return json.dumps({"text": text, "id": id, "metadata": {"rollout_results": [result]}}) + "\n"

    def answer(self, id: str) -> str:
        return self.expected.answers[id][self.expected.rows[id].text]

    def write(self, name: str, lines: list[str]) -> None:
        (self.output / name).write_text("".join(lines))

    def lines(self, name: str) -> list[str]:
        return (self.output / name).read_text().splitlines(keepends=True)

    def add(self, line: str) -> None:
        self.write(FILES[1], [*self.lines(FILES[1]), line])

    def replace(self, old: str, new: str) -> None:
        self.write(FILES[0], [line.replace(old, new) for line in self.lines(FILES[0])])

    def check(self) -> None:
        check_success(self.expected, self.output, self.checkpoints, self.terminal, (5, 5), {}, exact_tokens=True)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_true_output_passes(job: Job) -> None:
    job.check()


def healthy_document_dead(job: Job) -> None:
    job.write(FILES[1], [])
    with (job.checkpoints / LETTERS).open("a") as file:
        file.write(json.dumps({"id": "five", "error": "HTTP 503"}) + "\n")


@pytest.mark.parametrize(
    ("falsify", "kind"),
    [
        (lambda job: job.write(FILES[0], job.lines(FILES[0])[:1]), "missing"),
        (lambda job: job.add(job.lines(FILES[0])[0]), "twice"),
        (lambda job: job.add(job.line("one").replace('"one"', '"other"')), "stranger"),
        (lambda job: job.replace(job.answer("two"), job.answer("one")), "wrong answer"),
        (lambda job: (job.checkpoints / LETTERS).unlink(), "missing"),
        (healthy_document_dead, "blamed"),
        (lambda job: job.write("00002_chunk_00000.jsonl", []), "closing line"),
    ],
)
def test_a_falsified_output_fails(job: Job, falsify: Callable[[Job], None], kind: str) -> None:
    falsify(job)
    with pytest.raises(Failure) as caught:
        job.check()
    assert caught.value.kind == kind


def test_a_falsified_number_of_the_closing_line_fails(job: Job) -> None:
    said = job.terminal
    for number in ("3 of 5", "of 5 ", "2 files", "1 dropped", "1 dead", "5 requests", "13 prompt", "8 completion"):
        digits = next(word for word in number.split() if word.isdigit())
        assert said.count(number) == 1
        job.terminal = said.replace(number, number.replace(digits, "7", 1))
        with pytest.raises(Failure, match=r"closing line"):
            job.check()
