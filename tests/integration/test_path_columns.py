"""Folders such as ``lang=en`` are columns, where the reader is told so."""

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import CSVReader, JsonlReader, ParquetReader
from tests.jobs import rejects, rows, runner
from tests.unit.tables import write_table

FOLDERS = [
    "lang=de/year=2026",
    "lang=en/year=__HIVE_DEFAULT_PARTITION__",
    "lang=a%20b%2Fc=d/year=",
    "plain",
]
READERS = {"parquet": ParquetReader, "jsonl": JsonlReader, "csv": CSVReader}


def write(folder, kind, folders=FOLDERS):
    for number, name in enumerate(folders):
        (folder / name).mkdir(parents=True)
        path = folder / name / f"part=0.{kind}"
        if kind == "csv":
            path.write_text(f"id,text\n{number},text {number}\n")
        else:
            write_table(path, pa.table({"id": [f"{number}"], "text": [f"text {number}"]}))
    return str(folder)


@pytest.mark.parametrize("kind", READERS)
def test_the_folders_of_a_file_are_columns_as_for_pyarrow(tmp_path, kind):
    data = write(tmp_path / "data", kind)
    documents = list(READERS[kind](data, path_columns=True).run())
    found = [
        {"id": each.id, "lang": each.metadata.get("lang"), "year": each.metadata.get("year")}
        for each in documents
    ]
    text = pa.schema([("lang", pa.string()), ("year", pa.string())])
    write(tmp_path / "for pyarrow", "parquet")
    read = ds.dataset(
        tmp_path / "for pyarrow", partitioning=ds.partitioning(text, flavor="hive")
    ).to_table(["id", "lang", "year"])
    expected = sorted(read.to_pylist(), key=lambda row: row["id"])
    assert sorted(found, key=lambda row: row["id"]) == expected
    assert "lang" not in documents[-1].metadata
    assert all("lang" not in each.metadata for each in READERS[kind](data).run())


def test_a_column_of_the_file_wins(tmp_path):
    (tmp_path / "lang=de").mkdir()
    (tmp_path / "lang=de" / "a.jsonl").write_text('{"text": "a", "lang": "fr"}\n{"text": "b"}\n')
    documents = JsonlReader(str(tmp_path), path_columns=True).run()
    assert [document.metadata["lang"] for document in documents] == ["fr", "de"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_a_run_keeps_to_the_setting_that_it_began_with(tmp_path, server, kind, before, finished):
    data = write(tmp_path / "data", kind)

    def run(given):
        runner(tmp_path, server, records_per_chunk=1).run(
            READERS[kind](data, path_columns=given).run()
        )

    if not finished:
        server._status = rejects({"text 3"}, 401)
        with pytest.raises(Exception, match="401"):
            run(before)
        server._status = lambda payload, times: None
    else:
        run(before)
    asked = server.asked.total()
    if finished or kind != "csv":
        with pytest.raises(CheckpointMismatch):
            run(not before)
        assert server.asked.total() == asked
    run(before)
    assert [("lang" in row["metadata"]) for row in rows(tmp_path)].count(True) == 3 * before
    assert max(server.asked.values()) <= 2


def test_the_prompt_of_the_short_form_may_name_such_a_column(here, command, server):
    write(here / "data", "jsonl", FOLDERS[:2])
    options = ["--endpoint", server.url, "--model=m", "--run-folder=job"]
    words = ("run", "--input=data", "--prompt={lang}: {text}", *options)
    assert "It is in the name of a folder: set path_columns to true." in command(*words, code=1).err
    command(*words, "--path-columns=true")
    assert set(server.asked) == {"de: text 0", "en: text 1"}
