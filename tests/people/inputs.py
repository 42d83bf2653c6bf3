"""Input files as people make them, and what a run must make of their rows."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash
import zstandard

Outcome = Literal["written", "dropped", "dead"]
Form = Literal["lines", "gz", "zst", "array", "plain text", "cut gz", "cut zst"]

REJECTED = "REJECT"  # the server answers 400 to a question with this word
DROPPED = "DROP"  # the rollout returns None for a document with this word
LEAVES = "LEAVE"  # the rollout calls sys.exit(0)
RAISES = "RAISE"  # the rollout raises an exception that cannot be printed
UNWRITABLE = "UNWRITABLE"  # the rollout puts an object into the metadata that nobody can write

SUFFIX: dict[Form, str] = {"gz": ".gz", "cut gz": ".gz", "zst": ".zst", "cut zst": ".zst"}


@dataclass(frozen=True)
class Row:
    """One document of the input. ``extra`` holds its other keys, which become metadata."""

    id: str
    text: str
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def outcome(self) -> Outcome:
        """What becomes of it if nothing else goes wrong and dead letters are allowed."""
        if any(word in self.text for word in (REJECTED, RAISES, LEAVES, UNWRITABLE)):
            return "dead"
        return "dropped" if DROPPED in self.text else "written"

    @property
    def is_asked(self) -> bool:
        """Its rollout sends a request."""
        return RAISES not in self.text and LEAVES not in self.text

    @property
    def is_answered(self) -> bool:
        return self.is_asked and REJECTED not in self.text

    def line(self, text_key: str = "text") -> bytes:
        return json.dumps({"id": self.id, text_key: self.text, **self.extra}).encode() + b"\n"


@dataclass(frozen=True)
class InputFile:
    """A file of the input folder.

    Attributes:
        name: without the suffix of its compression.
        damaged: number of lines at its end that are no JSON.
    """

    name: str
    rows: tuple[Row, ...]
    form: Form = "lines"
    damaged: int = 0

    @property
    def file_name(self) -> str:
        return self.name + SUFFIX.get(self.form, "")

    @property
    def is_readable(self) -> bool:
        return self.form in ("lines", "gz", "zst")

    @property
    def is_cut(self) -> bool:
        return self.form in ("cut gz", "cut zst")

    @property
    def lines_without_document(self) -> int:
        if self.form == "array":
            return 1
        return self.damaged if self.is_readable else len(self.rows)

    def content(self) -> bytes:
        lines = [row.line() for row in self.rows] + [b'{"id": "torn", "text": "to\n'] * self.damaged
        match self.form:
            case "lines":
                return b"".join(lines)
            case "array":
                return json.dumps([json.loads(row.line()) for row in self.rows]).encode() + b"\n"
            case "plain text":
                return b"".join(row.text.encode() + b"\n" for row in self.rows)
            case "gz":
                return gzip.compress(b"".join(lines), mtime=0)
            case "cut gz":
                whole = gzip.compress(b"".join(lines), mtime=0)
                return whole[: len(whole) * 2 // 3]
        compressor = zstandard.ZstdCompressor().compressobj()
        blocks = [compressor.compress(line) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for line in lines]
        blocks.append(compressor.flush())
        if self.form == "cut zst":
            return b"".join(blocks[:-2]) or b"".join(blocks)[:8]
        return b"".join(blocks)

    def with_rows(self, rows: tuple[Row, ...]) -> InputFile:
        return replace(self, rows=rows)


def write_inputs(folder: Path, inputs: dict[str, InputFile]) -> None:
    """Makes the folder hold these files. Files that are right already are not touched."""
    folder.mkdir(exist_ok=True)
    wanted = {file.file_name: file.content() for file in inputs.values()}
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def question_to(row: Row, prompt: str) -> str:
    return prompt.replace("{text}", row.text)


def answer_of(model: str, question: str) -> str:
    """What the server answers: it depends on model and question, and on nothing else."""
    return "answer " + xxhash.xxh3_64_hexdigest(f"{model}|{question}".encode())


@dataclass(frozen=True)
class Expected:
    """What the output must hold if a run with these settings and this input ends with exit code 0.

    Attributes:
        rows: the documents that a reader can read, by id.
        answers: the right answer for each.
        questions: what the server is asked for each.
        unread_lines: lines of the input that hold no document; the closing line must count them.
        impossible: why exit code 0 cannot be right, or "".
    """

    rows: dict[str, Row]
    answers: dict[str, str]
    questions: dict[str, str]
    unread_lines: int = 0
    impossible: str = ""

    def ids(self, outcome: Outcome) -> set[str]:
        return {id for id, row in self.rows.items() if row.outcome == outcome}


def expected(inputs: dict[str, InputFile], model: str, prompt: str, impossible: str = "") -> Expected:
    readable = {row.id: row for file in inputs.values() if file.is_readable for row in file.rows}
    cut = sorted(file.file_name for file in inputs.values() if file.is_cut)
    if cut:
        impossible = impossible or f"the end of {cut[0]} is missing"
    questions = {id: question_to(row, prompt) for id, row in readable.items()}
    return Expected(
        rows=readable,
        answers={id: answer_of(model, question) for id, question in questions.items()},
        questions=questions,
        unread_lines=sum(file.lines_without_document for file in inputs.values()),
        impossible=impossible,
    )
