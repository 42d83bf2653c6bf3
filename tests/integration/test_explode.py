"""``explode: true``: a row of each item of a list, exactly once and in order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.run_folder.documents import OutputPath
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, rejects
from tests.yaml_jobs import write_rows

TEXTS = ["a b", "c", "", "d e f", "bad", "g h"]
ROWS = [f"{n}/{at}" for n, text in enumerate(TEXTS) if text != "bad" for at in range(len(text.split()))]  # fmt: skip
WORDS = [word for text in TEXTS if text != "bad" for word in text.split()]
FORMS = {
    "dictionaries": (lambda word: {"word": word, "n": 7, "text": word}, "word"),
    "texts": (lambda word: word, "answer"),
}
ODD = {"odd": (lambda word: {"big": 2**70, "inf": float("inf"), "half": "\ud800"}, "")}


def answer(form):
    """For a server: a list of the words of the prompt, which some models put in a fence."""

    def says(payload, times):
        text = payload["messages"][-1]["content"]
        return f"```json\n{json.dumps([form(word) for word in text.split()])}\n```"

    return says


@pytest.fixture
def job(command, tmp_path, monkeypatch):
    """Runs it with flags. ``budget``: stops the task when so many requests are answered."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(n), "text": text or " ", "year": n} for n, text in enumerate(TEXTS)]
    write_rows("in.jsonl", rows)
    table = pa.table({name: [row[name] for row in rows] for name in ("id", "text")})
    pq.write_table(table.append_column("year", pa.array(range(6), pa.int16())), "in.parquet")

    def job(form="dictionaries", given="in.jsonl", folder="x", code=0, budget=10**9, more=""):
        explode = "" if "--explode" in more else "--explode true"
        with FakeServer(answer((FORMS | ODD)[form][0])) as server:
            stop = Budget()
            stop.left = budget
            bad = rejects(["bad"])
            server._status = lambda *request: bad(*request) or stop(*request)
            flags = f"--input {given} --prompt {{text}} --endpoint {server.url} --model m"
            flags += f" --run-folder {folder} {explode} {more} --records-per-chunk 2"
            flags += " --server-patience-seconds 9 --skip-bad-requests true --max-concurrent-generations 1"
            said = command("run", *flags.split(), code=code)
            return said, len(server.payloads)

    return job


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", ["in.jsonl", "in.parquet"])
def test_each_item_is_a_row_after_a_stop_and_documents_are_counted_as_documents(
    job, command, form, given
):
    job(form, given, budget=3, code=1)
    said, _ = job(form, given)
    assert "4 of 6 documents are, as 8 rows, in 3 files" in said
    assert "(1 dropped, 1 dead letter)" in said
    rows = [document.metadata | {"id": document.id} for document in OutputPath("x/output")]
    assert [row["id"] for row in rows] == ROWS
    assert [row["n"] for row in rows] == [int(name[-1]) for name in ROWS]
    assert [row["year"] for row in rows] == [int(name[0]) for name in ROWS]
    assert [row[FORMS[form][1]] for row in rows] == WORDS
    if form == "dictionaries":
        assert [row["answer_text"] for row in rows] == WORDS
        assert {row["answer_n"] for row in rows} == {7}
    whole = [row["id"] for row in rows if row.get("rollout_results")]
    assert whole == [name for name in ROWS if name.endswith("/0")]
    if given == "in.parquet":
        schemas = [pq.read_schema(path) for path in sorted(Path("x/output").glob("*"))]
        assert [schema.field("year").type for schema in schemas] == [pa.int16()] * 3
    command("verify", "x", "--full")
    assert "4 written in 3 chunks as 8 rows" in command("status", "x")
    assert command("export", "x", "all.csv") == "8 rows in all.csv.\n"
    assert "There are more; --n 4 prints them." in command("show", "x", "--n", "2")


@pytest.mark.parametrize("given", ["in.jsonl", "in.parquet"])
def test_whole_documents_of_an_old_run_become_rows_and_rows_are_joined(job, given):
    more = "--rollouts-per-document 2"
    job(given=given, folder="wanted", more=more)
    job(given=given, folder="old", more=f"{more} --explode false")
    old = '--finished-from ["old/output","old/checkpoints"]'
    _, requests = job(given=given, folder="new", more=f"{more} {old}")
    assert requests <= 3  # of the dead one, and a probe
    names, again = ([row.id for row in OutputPath(f"{name}/output")] for name in ("wanted", "new"))
    assert names == again
    assert names[:4] == ["0/0", "0/1", "0/2", "0/3"]
    _, requests = job(given=given, more=f"{more} --finished-from wanted/output")
    assert requests <= 5  # also of the one that was dropped
    assert [row.id for row in OutputPath("x/output")] == names


@pytest.mark.parametrize("before, after", [("true", "false"), ("false", "true")])
def test_a_run_that_changed_to_rows_or_back_is_whole(job, command, before, after):
    job(budget=3, code=1, more=f"--explode {before}")
    job(more=f"--explode {after} --accept-changes true")
    command("verify", "x", "--full")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("output", ["jsonl", "parquet", "csv"])
def test_a_row_is_shown_with_its_item_alone(job, command, form, output):
    job(form, more=f"--answer item --output-format {output}")
    said = command("show", "x", "--n", "9")
    answers = [line.removeprefix("  answer: ") for line in said.splitlines() if "answer: " in line]
    if form == "dictionaries":
        seven = '"7"' if output == "csv" else "7"
        assert answers == [
            f'{{"word":"{word}","item_n":{seven},"item_text":"{word}"}}' for word in WORDS
        ]
    else:
        assert answers == WORDS


def test_a_sample_shows_whole_answers(job):
    said, requests = job(more="--sample 6")
    assert requests == 6
    assert '"word": "a"' in said
    assert '"word": "b"' in said


def test_items_have_the_values_that_readers_of_json_take(job):
    job("odd")
    found = [document.metadata for document in OutputPath("x/output")]
    assert [row["n"] for row in found] == [int(name[-1]) for name in ROWS]
    assert {(row["big"], row["inf"], row["half"]) for row in found} == {(2**70, None, "\ufffd")}
