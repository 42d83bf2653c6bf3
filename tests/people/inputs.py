"""Input files as people make them, and what a run must make of their rows."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import xxhash
import zstandard

Outcome = Literal["written", "dropped", "dead"]
Form = Literal["lines", "gz", "zst", "array", "plain text", "cut gz", "cut zst"]

REJECTED = "REJECT"  # the server answers 400 to a question with this word
DROPPED = "DROP"  # the rollout returns None for a document with this word
LEAVES = "LEAVE"  # the rollout calls sys.exit(0)
RAISES = "RAISE"  # the rollout raises an exception that cannot be printed
OUTSIDE = "OUTSIDE"  # its metadata names an output file that is outside of the output folder
UNWRITABLE = "UNWRITABLE"  # the rollout puts an object into the metadata that nobody can write

_DAMAGED = (
    b'{"id": "torn", "text": "to\n',
    b'{"id": "half a pair", "text": "half \\ud83d", "lang": "de"}\n',
)
SUFFIX = {"gz": ".gz", "cut gz": ".gz", "zst": ".zst", "cut zst": ".zst"}


@dataclass(frozen=True)
class Row:
    """One document of the input. ``extra`` holds its other keys, which become metadata."""

    id: str
    text: str
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def outcome(self):
        """What becomes of it if nothing else goes wrong and dead letters are allowed."""
        if any(word in self.text for word in (REJECTED, RAISES, LEAVES, OUTSIDE, UNWRITABLE)):
            return "dead"
        return "dropped" if DROPPED in self.text else "written"

    @property
    def is_asked(self):
        """Its rollout sends a request."""
        return RAISES not in self.text and LEAVES not in self.text

    @property
    def is_answered(self):
        return self.is_asked and REJECTED not in self.text

    def line(self, text_key="text"):
        return json.dumps({"id": self.id, text_key: self.text, **self.extra}).encode() + b"\n"


@dataclass(frozen=True)
class InputFile:
    """A file of the input folder.

    Attributes:
        name: without the suffix of its compression.
        damaged: number of lines at its end that are no JSON, or whose text is no Unicode.
    """

    name: str
    rows: tuple[Row, ...]
    form: Form = "lines"
    damaged: int = 0

    @property
    def file_name(self):
        return self.name + SUFFIX.get(self.form, "")

    @property
    def is_readable(self):
        return self.form in ("lines", "gz", "zst")

    @property
    def is_cut(self):
        return self.form in ("cut gz", "cut zst")

    @property
    def lines_without_document(self):
        if self.form == "array":
            return 1
        return self.damaged if self.is_readable else len(self.rows)

    def content(self):
        lines = [row.line() for row in self.rows] + [
            _DAMAGED[number % 2] for number in range(self.damaged)
        ]
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
        blocks = [
            compressor.compress(line) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            for line in lines
        ]
        blocks.append(compressor.flush())
        if self.form == "cut zst":
            return b"".join(blocks[:-2]) or b"".join(blocks)[:8]
        return b"".join(blocks)

    def with_rows(self, rows):
        return replace(self, rows=rows)


def write_inputs(folder, inputs):
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


WORDS_OF_AN_ANSWER = 2


def answer_of(model, question):
    """What the server answers: it depends on model and question, and on nothing else."""
    return "answer " + xxhash.xxh3_64_hexdigest(f"{model}|{question}".encode())


@dataclass(frozen=True)
class Expected:
    """What the output must hold if a run with these settings and this input ends with exit code 0.

    Attributes:
        rows: the documents that a reader can read, by id.
        answers: the right answer for each text that the document may have. There may be more than
            one if it was edited while the run was on, in a way that no run sees.
        questions: what the server is asked for each.
        rollouts: answers of each document.
        unread_lines: lines of the input that hold no document; the closing line must count them.
        impossible: why exit code 0 cannot be right, or "".
    """

    rows: dict[str, Row]
    answers: dict[str, dict[str, str]]
    questions: dict[str, str]
    rollouts: int = 1
    unread_lines: int = 0
    impossible: str = ""

    def ids(self, outcome):
        return {id for id, row in self.rows.items() if row.outcome == outcome}

    @property
    def requests(self):
        """Fewest and most requests of an undisturbed run: a rejected rollout cancels the others of
        its document.
        """
        asked = [row for row in self.rows.values() if row.is_asked]
        return sum(self.rollouts if row.is_answered else 1 for row in asked), self.rollouts * len(
            asked
        )


def expected(inputs, model, prompt, impossible="", *, rollouts=1, older_texts=None):
    readable = {row.id: row for file in inputs.values() if file.is_readable for row in file.rows}
    cut = sorted(file.file_name for file in inputs.values() if file.is_cut)
    if cut:
        impossible = impossible or f"the end of {cut[0]} is missing"
    questions = {id: prompt.replace("{text}", row.text) for id, row in readable.items()}
    older = older_texts or {}
    return Expected(
        rows=readable,
        answers={
            id: {
                text: answer_of(model, prompt.replace("{text}", text))
                for text in {row.text, *older.get(id, ())}
            }
            for id, row in readable.items()
        },
        questions=questions,
        rollouts=rollouts,
        unread_lines=sum(file.lines_without_document for file in inputs.values()),
        impossible=impossible,
    )
