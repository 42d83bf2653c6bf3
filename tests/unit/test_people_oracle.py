"""The oracle of ``tests/people`` sees each way in which an output or a closing line can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.people.commands import Ended
from tests.people.inputs import DROPPED, LEAVES, REJECTED, Expected, InputFile, Row, expected
from tests.people.oracle import Failure, check_end, check_success

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

    def check(self) -> None:
        check_success(self.expected, self.output, self.checkpoints, self.terminal, (5, 5), {}, exact_tokens=True)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_true_output_passes(job: Job) -> None:
    job.check()


def _line_removed(job: Job) -> None:
    job.write(FILES[0], job.lines(FILES[0])[:1])


def _line_doubled(job: Job) -> None:
    job.write(FILES[0], job.lines(FILES[0]) * 2)


def _line_in_two_files(job: Job) -> None:
    job.write(FILES[1], job.lines(FILES[1]) + job.lines(FILES[0])[:1])


def _stranger(job: Job) -> None:
    job.write(FILES[1], [*job.lines(FILES[1]), job.line("one").replace('"one"', '"other"')])


def _dropped_document_written(job: Job) -> None:
    job.write(FILES[1], [*job.lines(FILES[1]), job.line("three")])


def _answer_of_another(job: Job) -> None:
    text = "".join(job.lines(FILES[0]))
    (job.output / FILES[0]).write_text(text.replace(job.answer("two"), job.answer("one")))


def _other_text(job: Job) -> None:
    text = "".join(job.lines(FILES[0]))
    (job.output / FILES[0]).write_text(text.replace("first text", "first  text"))


def _torn_line(job: Job) -> None:
    job.write(FILES[1], [*job.lines(FILES[1]), '{"id": "o'])


def _dead_letter_lost(job: Job) -> None:
    (job.checkpoints / LETTERS).unlink()


def _healthy_document_dead(job: Job) -> None:
    job.write(FILES[1], [])
    with (job.checkpoints / LETTERS).open("a") as file:
        file.write(json.dumps({"id": "five", "error": "HTTP 503"}) + "\n")


def _file_left_over(job: Job) -> None:
    job.write("00002_chunk_00000.jsonl", [])


def _line_not_read(job: Job) -> None:
    job.expected = replace(job.expected, unread_lines=2)


def _sys_exit(job: Job) -> None:
    rows = (*ROWS, Row("six", LEAVES))
    job.expected = expected({"a.jsonl": InputFile("a.jsonl", rows)}, "model-a", "Say: {text}")


@pytest.mark.parametrize(
    ("falsify", "kind"),
    [
        (_line_removed, "missing"),
        (_line_doubled, "twice"),
        (_line_in_two_files, "twice"),
        (_stranger, "stranger"),
        (_dropped_document_written, "stranger"),
        (_answer_of_another, "wrong answer"),
        (_other_text, "wrong text"),
        (_torn_line, "unreadable output"),
        (_dead_letter_lost, "missing"),
        (_healthy_document_dead, "blamed"),
        (_file_left_over, "closing line"),
        (_line_not_read, "unread lines"),
        (_sys_exit, "missing"),
    ],
)
def test_a_falsified_output_fails(job: Job, falsify: Callable[[Job], None], kind: str) -> None:
    falsify(job)
    with pytest.raises(Failure) as caught:
        job.check()
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "number",
    ["3 of 5", "of 5 ", "2 files", "1 dropped", "1 dead", "5 requests", "13 prompt", "8 completion"],
)
def test_a_falsified_number_of_the_closing_line_fails(job: Job, number: str) -> None:
    digits = next(word for word in number.split() if word.isdigit())
    assert job.terminal.count(number) == 1
    job.terminal = job.terminal.replace(number, number.replace(digits, "7", 1))
    with pytest.raises(Failure, match=r"closing line"):
        job.check()


def test_a_run_without_a_closing_line_fails(job: Job) -> None:
    job.terminal = "done\n"
    with pytest.raises(Failure, match="closing line: there is none"):
        job.check()


def test_another_model_or_a_compressed_input_that_lacks_its_end_fails(job: Job) -> None:
    inputs = {"a.jsonl": InputFile("a.jsonl", ROWS)}
    job.expected = expected(inputs, "model-b", "Say: {text}")
    with pytest.raises(Failure, match="wrong answer"):
        job.check()
    job.expected = expected({"a.jsonl": replace(inputs["a.jsonl"], form="cut zst")}, "model-a", "Say: {text}")
    with pytest.raises(Failure, match="impossible"):
        job.check()


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended([], None, "", 60.0), "hang"),
        (Ended([], 1, "Traceback (most recent call last):\n  ...\nOSError\n", 1.0), "traceback"),
    ],
)
def test_a_hang_or_a_traceback_fails_whatever_the_exit_code(ended: Ended, kind: str) -> None:
    with pytest.raises(Failure) as caught:
        check_end(ended)
    assert caught.value.kind == kind
