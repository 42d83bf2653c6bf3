"""``datatrove-ckpt export``: one file of a whole run, or a repository."""

import csv
import datetime
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.run_folder import documents
from datatrove_ckpt.run_folder.documents import dataset
from datatrove_ckpt.run_folder.run_location import RunLocation, open_location
from datatrove_ckpt.testing import FakeServer
from tests.jobs import rejects
from tests.yaml_jobs import read_rows, write_rows

ROWS = [
    {"id": str(n), "text": f'text "{n}",\n', "n": n, "tags": ["a", "é"], "day": "2026-01-02"}
    for n in range(5)
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(row) + "\n" for row in ROWS]
    lines[3] = json.dumps({**ROWS[3], "more": 2**70}) + "\n"
    Path("in.jsonl").write_text("".join(lines))
    table = pa.Table.from_pylist([{**row, "day": datetime.date(2026, 1, 2)} for row in ROWS])
    pq.write_table(table, "in.parquet")
    return tmp_path


@pytest.fixture
def run(command, here):
    def run(given="in.jsonl", *flags, prompt="{id}", **options):
        with FakeServer() as server:
            job = ["run", "--input", given, "--prompt", prompt, "--endpoint", server.url]
            command(*job, "--model=m", "--run-folder=x", "--records-per-chunk=2", *flags, **options)

    return run


@pytest.fixture
def exported(command):
    return partial(command, "export", "x")


@pytest.mark.parametrize("given", ["in.jsonl", "in.parquet"])
def test_a_csv_has_all_columns_and_rows_in_order(run, given, exported):
    run(given)
    assert exported("all.csv") == "5 documents in all.csv.\n"
    table = pandas.read_csv("all.csv", dtype={"more": str})
    assert table["text"].tolist() == [row["text"] for row in ROWS]
    assert [json.loads(tags) for tags in table["tags"]] == [["a", "é"]] * 5
    assert table["day"].tolist() == ["2026-01-02"] * 5
    if given == "in.jsonl":
        assert table["more"].tolist()[3] == str(2**70)


def test_json_lines_are_those_of_the_files(run, exported):
    run("in.jsonl", "--output-format=jsonl.zst")
    exported("all.jsonl")
    rows = read_rows("all.jsonl")
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    assert rows[3]["more"] == 2**70


def test_parquet_files_need_pyarrow_alone_and_keep_maps_and_columns_of_later_files(
    run, here, monkeypatch, exported
):
    maps = pa.array([[("k", n)] if n else None for n in range(5)], pa.map_(pa.string(), pa.int32()))
    pq.write_table(pq.read_table("in.parquet").append_column("m", maps), "in.parquet")
    Path("own_late.py").write_text(
        "async def rollout(document, generate):\n"
        "    n = document.metadata['n']\n"
        "    if n > 1:\n"
        "        document.metadata['late'] = n if n < 4 else 4.5\n"
        "    return 'x'\n"
    )
    monkeypatch.syspath_prepend(here)
    run("in.parquet", "--rollout=own_late.rollout", prompt="null")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert exported("all.parquet") == "5 documents in all.parquet.\n"
    whole = pq.ParquetFile("all.parquet")
    assert whole.num_row_groups == 1
    table = whole.read()
    assert table["m"].combine_chunks().equals(maps)
    assert table.schema.field("day").type == pa.date32()
    assert table["late"].to_pylist() == [None, None, 2, 3, 4.5]
    said = exported("hf://datasets/org/answers", code=1)
    assert "pip install 'datatrove-ckpt[hub]'" in said.error


def test_json_lines_become_parquet_in_a_process_that_has_imported_nothing_else(run):
    write_rows("in.jsonl", ROWS)
    run()
    words = [sys.executable, "-m", "datatrove_ckpt", "export", "x", "all.parquet"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "5 documents in all.parquet.\n", done.stderr


def test_parquet_of_json_lines_keeps_values_and_unites_columns_of_files(run, exported):
    rows = [{"id": str(n), "text": "2026-01-02", "n": None} for n in range(4)]
    rows[1] |= {"n": 1}
    rows[2] |= {"n": 0.5, "late": {"a": 1}}
    rows[3] |= {"late": {"b": "2026-01-02T00:00:00Z"}}
    write_rows("in.jsonl", rows)
    run()
    exported("all.parquet")
    table = pq.read_table("all.parquet")
    assert table["text"].to_pylist() == ["2026-01-02"] * 4
    assert table["n"].to_pylist() == [None, 1, 0.5, None]
    late = [None, None, {"a": 1, "b": None}, {"a": None, "b": "2026-01-02T00:00:00Z"}]
    assert table["late"].to_pylist() == late
    with open_location("x") as place:
        assert [*dataset(place)][3]["late"] == late[3]
        assert dataset(place)["text"][:] == ["2026-01-02"] * 4


def test_parquet_has_no_column_for_numbers_beside_texts(run, exported):
    rows = [{"id": str(n), "text": "a", "n": n or "none"} for n in range(3)]
    write_rows("in.jsonl", rows)
    run()
    said = exported("all.parquet", code=1)
    assert "column 'n' has values of the types" in said
    assert "A .jsonl or .csv file takes them" in said
    assert not list(Path().glob("all.*"))


def test_values_of_parquet_keep_all_digits_and_what_json_lacks_is_text(run, exported):
    vector = np.arange(2000, dtype=np.float32) / 7
    row = {"id": "a", "text": "b", "f": 0.12345678901234566, "small": 1e-12, "data": b"\xff"}
    row |= {"day": datetime.date(2026, 1, 2), "n": 2**53 + 1, "none": None}
    table = pa.Table.from_pylist([row])
    pq.write_table(
        table.append_column("v", pa.array([vector], pa.list_(pa.float32()))), "v.parquet"
    )
    run("v.parquet")
    exported("all.jsonl")
    kept = json.loads(Path("all.jsonl").read_text())
    row |= {"data": "/w==", "day": "2026-01-02"}
    assert {name: kept[name] for name in row} == row
    assert np.array_equal(np.array(kept["v"], np.float32), vector)
    exported("all.csv")
    with Path("all.csv").open() as file:
        (cells,) = csv.DictReader(file)
    assert (float(cells["f"]), float(cells["small"]), cells["data"]) == (row["f"], 1e-12, "/w==")
    assert np.array_equal(np.array(json.loads(cells["v"]), np.float32), vector)


@pytest.mark.parametrize("target", ["all.csv", "all.jsonl", "all.parquet"])
def test_files_that_differ_from_their_commits_are_not_exported(run, target, exported):
    run()
    first, second, _ = sorted(Path("x/output").glob("*.jsonl"))
    whole = first.read_bytes()
    one = second.read_bytes().splitlines(keepends=True)[0]
    for changed, kind in ((whole + one, "grown"), (one, "truncated"), (None, "missing")):
        first.unlink()
        if changed is not None:
            first.write_bytes(changed)
        said = exported(target, code=1)
        assert f"Nothing was exported. task 0, chunk 0: {first.name} is {kind}" in said
        assert not list(Path().glob("all.*"))
        first.write_bytes(whole)


@pytest.mark.parametrize("target", ["all.csv", "all.jsonl", "all.parquet"])
def test_a_target_that_cannot_be_written_leaves_nothing_behind(run, target, monkeypatch, exported):
    run()

    def fail(location, path):
        path.write_text("a part")
        raise OSError(28, "No space left on device")

    for name in ("_write_csv", "_write_lines", "_write_parquet"):
        monkeypatch.setattr(f"datatrove_ckpt.run_folder.documents.{name}", fail)
    assert "No space left on device" in exported(target, code=1)
    assert not list(Path().glob("all.*"))


def test_a_run_that_is_not_finished_gives_its_complete_chunks(command, here, exported):
    with FakeServer(status=rejects(["4"], 401)) as server:
        job = ["run", "--input", "in.jsonl", "--prompt", "{id}", "--endpoint", server.url]
        flags = ["--records-per-chunk=2", "--max-concurrent-documents=1"]
        command(*job, "--model=m", "--run-folder=x", *flags, code=1)
    assert "4 documents in all.csv. The run is not finished" in exported("all.csv")
    assert len(pandas.read_csv("all.csv")) == 4


def test_a_damaged_task_hides_no_other_and_is_never_missing_in_silence(run, command, exported):
    Path("in").mkdir()
    for file in range(2):
        write_rows(f"in/{file}.jsonl", [{"id": f"{file}{n}", "text": "a"} for n in range(3)])
    run("in", "--tasks=2")
    rank = Path("x/checkpoints/00000")
    commits = (rank / "commits.jsonl").read_bytes()
    settings = (rank / "run.json").read_bytes()
    (rank / "run.json").write_text("no JSON")
    assert command("show", "x", "--n", 9).count("answer: ") == 6
    said = exported("all.csv")
    assert said.startswith("6 documents in all.csv. The run is not finished")
    (rank / "run.json").write_bytes(settings)
    (rank / "commits.jsonl").write_bytes(commits.replace(b"chunk", b"chunq", 1))
    said = command("show", "x", "--n", 9, code=1)
    assert said.out.count("answer: ") == 3
    assert "With neither, datatrove-ckpt repair" in said.err
    assert "Nothing was exported. task 0: " in exported("two.csv", code=1).err
    shutil.rmtree(rank)
    said = exported("two.csv")
    assert said.startswith("3 documents in two.csv. The run is not finished")


def test_columns_and_rows_are_of_the_same_chunks(run, monkeypatch, exported):
    run()
    found = [*documents.committed_files(RunLocation("x", Path("x/checkpoints"), ["x"]))]
    looks = iter([found[:1], found])  # a run goes on, and its next document has one column more
    monkeypatch.setattr(documents, "committed_files", lambda *given: iter(next(looks)))
    assert exported("all.csv").startswith("2 documents")


@pytest.mark.parametrize("target", ["all.csv", "all.jsonl", "all.parquet"])
def test_files_of_others_stay(run, target, monkeypatch, exported):
    run("in.parquet")
    Path(f"{target}.new").write_text("mine")
    exported(target)
    assert Path(f"{target}.new").read_text() == "mine"
    Path(target).unlink()

    def write(location, path):
        path.write_text("an export")
        Path(target).write_text("made meanwhile")

    for name in ("_write_csv", "_write_lines", "_write_parquet"):
        monkeypatch.setattr(f"datatrove_ckpt.run_folder.documents.{name}", write)
    assert "is there already" in exported(target, code=2).error
    assert Path(target).read_text() == "made meanwhile"
    assert {path.name for path in Path().glob("all.*")} == {target, f"{target}.new"}


def test_what_cannot_be_written_is_one_line(run, exported):
    run()
    exported("all.csv")
    assert "is there already" in exported("all.csv", code=2).error
    said = exported("none/all.csv", code=2).error
    assert "none/all.csv: the folder none does not exist. Make it first." in said


def test_a_repository_gets_a_dataset(run, hub, exported):
    hub.create_repo("org/answers")
    run("in.parquet")
    assert "5 documents" in exported("hf://datasets/org/answers")
    (data,) = [name for name in hub.files("org/answers") if name.endswith(".parquet")]
    assert data.startswith("data/train")
    exported("hf://datasets/org/new")
    assert hub.repos["dataset", "org/new"].private
