"""``datatrove_ckpt.run(input=...)`` with what a program or a notebook has in memory."""

import datetime
import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import datasets
import pandas
import pyarrow as pa
import pytest

import datatrove_ckpt
from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError, ServerRefused
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, chat

DAY = datetime.date(1066, 10, 14)
COLUMNS = {"text": ["a", "b", "c"], "day": [DAY, None, DAY], "n": [2**63, 1, 0]}
TABLE = pa.table(COLUMNS, pa.schema({"text": pa.string(), "day": pa.date32(), "n": pa.uint64()}))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(server, rows, **settings):
    job = {"run_folder": "runs/x", "prompt": "{text}", "model": "m", "endpoint": server.url}
    return datatrove_ckpt.run(input=rows, **{**job, **settings})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ["a", "b", "c"],
        lambda: ({"text": text, "n": 2**70} for text in "abc"),
        lambda: pandas.Series(["a", "b", "c"]),
    ],
)
def test_texts_and_dictionaries_are_rows(server, make):
    output = run(server, make())
    assert [document.text for document in output] == ["a", "b", "c"]
    run(server, make())
    assert set(server.asked.values()) == {1}
    with pytest.raises(ConfigError, match=r"differ from runs/x/input/rows.jsonl"):
        run(server, ["a", "b"])
    rows = Path("runs/x/input/rows.jsonl")
    assert list(run(server, rows, run_folder=Path("runs/x"), model=Path("m"))) == list(output)


@pytest.mark.parametrize("settings", [{}, {"text_key": None}])
def test_rows_of_a_rollout_need_no_text(server, log, settings):
    async def rollout(document, generate):
        return await generate(chat(document.metadata["q"] + document.text))

    job = {"prompt": None, "rollout": rollout, "max_concurrent_generations": 1, **settings}
    for _ in range(2):
        output = run(server, [{"q": "a"}, {"q": "b"}], **job)
    assert server.asked == {"a": 1, "b": 1}
    assert [(row.text, row.metadata["q"]) for row in output] == [("", "a"), ("", "b")]
    assert bool(log.said("The first row has no text")) == (not settings)


def test_a_prompt_that_names_the_text_needs_it(server):
    with pytest.raises(InputError, match="No row has a text under text_key='text'"):
        run(server, [{"q": "a"}])
    assert not server.asked


def test_rows_of_a_run_that_has_begun_are_compared_without_a_copy_of_them(server):
    """Which may be too large for the disk."""

    def others():
        yield "b"
        pytest.fail("rows after the first other one are read")

    run(server, ["a"])
    with pytest.raises(ConfigError, match=r"differ from runs/x/input/rows.jsonl"):
        run(server, others())


class Stream:
    """As of polars, or DuckDB."""

    def __arrow_c_stream__(self, requested_schema=None):
        return TABLE.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TABLE,
        Stream,
        lambda: datasets.Dataset(TABLE),
        lambda: pandas.concat([frame() for _ in range(2)]).iloc[1:4].sort_values("text"),
    ],
)
def test_tables_keep_their_types(server, make):
    table = run(server, make(), max_concurrent_generations=1).to_dataset().data.table
    assert table["text"].to_pylist() == COLUMNS["text"]
    assert table.schema.field("n").type == pa.uint64()
    assert table.schema.field("day").type == pa.date32()
    assert "__index_level_0__" not in table.column_names
    run(server, make())
    assert set(server.asked.values()) == {1}
    with pytest.raises(ConfigError, match=r"differ from runs/x/input/rows.parquet"):
        run(server, TABLE.slice(1))


@pytest.mark.parametrize("index", [["x", "y", "z"], [7, 0, 2]])
def test_an_index_without_a_name_is_a_column_unless_it_counts_the_rows(server, index):
    rows = pandas.DataFrame({"text": ["a", "b", "c"]}, index)
    output = run(server, rows)
    assert output.to_pandas().set_index("index")["text"].to_dict() == rows["text"].to_dict()
    # A run that an earlier version has begun.
    rows.reset_index(drop=True).to_parquet("runs/x/input/rows.parquet")
    with pytest.raises(CheckpointMismatch, match="input"):
        run(server, rows)
    plain = run(server, rows.reset_index(drop=True), run_folder="runs/y")
    run(server, rows, run_folder="runs/y")
    assert "index" not in plain.to_pandas()
    assert set(server.asked.values()) == {2}


def frame():
    return TABLE.to_pandas(types_mapper=pandas.ArrowDtype)


def test_a_named_index_is_a_column(server):
    output = run(server, frame().set_index("n"))
    assert [document.metadata["n"] for document in output] == COLUMNS["n"]


def test_rows_that_were_wrong_before_the_first_request_may_change():
    with pytest.raises(ConfigError):
        datatrove_ckpt.run(input=["a"], run_folder="runs/x", prompt="{text}", model="m", endpoint=7)
    with FakeServer() as server:
        run(server, ["b"])
    kept = Path("runs/x/input/rows.jsonl").read_text()
    assert [json.loads(line) for line in kept.splitlines()] == [{"text": "b"}]


def test_rows_are_for_a_run_folder_of_this_machine(server):
    with pytest.raises(ConfigError, match="memory://x"):
        run(server, ["a"], run_folder="memory://x")


def test_a_setting_of_none_is_none(server):
    """As ``null`` of YAML. A setting of a reader or rollout that the job has not does not matter."""
    rows = [{"q": "a"}, {"q": "b", "text": "c"}]

    async def rollout(document, generate):
        answer = await generate({"messages": [{"role": "user", "content": document.metadata["q"]}]})
        return answer.text

    output = run(server, rows, prompt=None, rollout=rollout, text_key=None, json_schema=None)
    assert [document.metadata["q"] for document in output] == ["a", "b"]


def test_an_input_without_documents_is_no_success(server):
    for _ in range(2):
        with pytest.raises(InputError, match=r"No row .* Skipped: 2 rows without text"):
            run(server, [{"text": ""}, {"text": ""}])


def standard_input(monkeypatch):
    lines = b"".join(b'{"text": "%s"}\n' % text for text in (b"a", b"b", b"c", b"d"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    return "-"


KEPT = {
    "stdin.jsonl": standard_input,
    "rows.jsonl": lambda monkeypatch: [*"abcd"],
    "rows.parquet": lambda monkeypatch: pandas.DataFrame({"text": [*"abcd"]}),
}


@pytest.mark.matrix("name", KEPT)
@pytest.mark.matrix("kind", ["", "older", "lost"])
def test_rows_of_a_run_folder_that_moves_have_one_path(tmp_path, monkeypatch, name, kind):
    budget = Budget()
    with FakeServer(status=budget) as server:
        folder = Path("runs/x")
        for place, answers in (("y", 1), ("z", 2), ("link", 9)):
            budget.left = answers
            settings = {"run_folder": folder, "records_per_chunk": 2}
            if kind == "lost":
                settings |= {"checkpoints_remote_dir": str(tmp_path / "mirror")}
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            with nullcontext() if answers > 2 else pytest.raises(ServerRefused):
                run(server, KEPT[name](monkeypatch), **settings)
            if kind == "older":
                (folder / "input" / layout.BEGAN_IN).unlink()
            moved = Path(place)
            if place == "link":
                moved.symlink_to(folder)
            else:
                folder.rename(moved)
            folder = moved
        output = run(server, KEPT[name](monkeypatch), run_folder=folder)
    assert {document.metadata["file_path"] for document in output} == {
        f"{tmp_path}/runs/x/input/{name}"
    }
    assert budget.left == 9 - 1, "answers are paid for once"
