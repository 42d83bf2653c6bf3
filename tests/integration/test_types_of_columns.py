"""What no step and no rollout has changed comes back from Parquet with the type of the input."""

import datetime
import json
import shutil
from decimal import Decimal
from functools import partial
from uuid import UUID

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.checkpoint.layout import COLUMNS
from datatrove_ckpt.errors import ConfigError, DocumentNotSerializable, InputError
from datatrove_ckpt.output.csv_writer import CsvWriter
from datatrove_ckpt.readers import (
    CSVReader,
    DamagedLine,
    JsonlReader,
    ParquetReader,
)
from datatrove_ckpt.readers.declared_types import DeclaredTypes
from tests import golden
from tests.jobs import letters, rejects, rows, runner
from tests.unit.tables import reader_of, write_table
from tests.yaml_jobs import write_rows

DAY = datetime.date(2026, 1, 2)
MIDNIGHT = datetime.datetime(2026, 1, 2)
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
REPEATED = [datetime.datetime(2024, 10, 27, hour, 30) for hour in (0, 1)]  # of one hour in Berlin
TYPES = [eval(code) for code in golden.sections("types_of_columns")]


def a_table(types=TYPES, rows=4):
    columns = {
        f"v{number}": pa.array((values * rows)[:rows], kind)
        for number, (kind, values) in enumerate(types)
    }
    texts = {
        "text": [f"text {row}" for row in range(rows)],
        "id": pa.array(range(rows), pa.int32()),
    }
    return pa.table(texts | columns)


def run_in(folder, server, *tables, kind="parquet", steps=(), metadata=True, **changes):
    """Runs the tables as files a, b, ... in chunks of two rows."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for name, table in zip("abc", tables, strict=False):
        write_table(data / f"{name}.{kind}", table, 3)
    output = ParquetWriter(
        str(folder / "output"), "${chunk_index}.parquet", expand_metadata=metadata
    )
    step = runner(folder, server, records_per_chunk=2, output_writer=output, **changes)
    documents = reader_of(data, kind).run()
    for one in steps:
        documents = one(documents)
    step.run(documents)
    return sorted((folder / "output").glob("*.parquet"))


@pytest.fixture
def run(tmp_path, server):
    return partial(run_in, tmp_path, server)


@pytest.fixture
def run_to_text_2(run, server):
    def run_to_text_2(table, **changes):
        """The first chunk is committed."""
        server._status = rejects({"text 2"}, 401)
        with pytest.raises(Exception, match="401"):
            run(table, **changes)
        server._status = lambda payload, times: None

    return run_to_text_2


def read(files):
    """The files as a loader reads them: with the columns of the first."""
    tables = [pq.read_table(file) for file in files]
    return pa.concat_tables(table.cast(tables[0].schema) for table in tables)


def without_type(table):
    """A column without any value is written as text."""
    fields = [
        field.with_type(pa.string()) if pa.types.is_null(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_come_back_as_they_went_in(tmp_path, kind, run):
    table = a_table()
    output = read(run(table, kind=kind)).select(table.column_names)
    pq.write_table(without_type(table), tmp_path / "expected.parquet")
    expected = pq.read_table(tmp_path / "expected.parquet")
    for name in table.column_names:
        assert output.schema.field(name).type.equals(expected.schema.field(name).type), name
        assert output[name].to_pylist() == expected[name].to_pylist(), name


UUIDS = pa.array([UUID(int=1), None], pa.uuid())


@pytest.mark.parametrize("code", golden.sections("types_of_values"))
def test_a_type_that_no_value_can_have_becomes_the_type_of_its_values(code, run):
    files = run(pa.table({"text": ["a", "b"], "v": eval(code)}), kind="arrow")
    golden.hold("types_of_values", code, repr(read(files)["v"].to_pylist()))


@pytest.mark.parametrize(
    "ids", [[None, None, "c", "d"], ["", "", "c", ""], ["", "b", None, "d"], [0, None, None, None]]
)
def test_an_empty_id_stays_and_each_file_has_the_column(ids, run):
    table = pa.table({"text": ["a", "b", "c", "d"], "id": ids})
    files = run(table)
    assert len(files) == 2
    assert {tuple(pq.read_schema(file).names[:2]) for file in files} == {("text", "id")}
    assert pa.concat_tables(map(pq.read_table, files)).select(["text", "id"]).equals(table)


def test_a_text_that_the_rollout_empties_leaves_its_column(run):
    async def empty(document, generate):
        document.text = ""
        return "an answer"

    table = pa.table({"text": ["a", "b"], "v": [1, 2]})
    (file,) = run(table, rollout=empty)
    assert pq.read_table(file)["text"].to_pylist() == ["", ""]


def test_columns_inside_the_metadata_have_their_types(run):
    table = a_table(TYPES[:12])
    schema = pq.read_schema(run(table, metadata=False)[0])
    metadata = schema.field("metadata").type
    assert [metadata.field(f"v{number}").type for number in range(12)] == [
        kind for kind, _ in TYPES[:12]
    ]


@pytest.mark.parametrize("code", golden.sections("types_of_all_files"))
def test_all_chunks_have_the_types_of_all_files(run, code):
    first, later = eval(code)
    files = run(*(a_table([one], rows=2) for one in (first, later)))
    assert [pq.read_schema(file).field("v0").type for file in files] == [later[0]] * 2


def test_a_clash_names_both_files_before_a_request(server, run):
    tables = [a_table([(kind, [value])]) for kind, value in ((pa.int64(), 1), (pa.string(), "1"))]
    with pytest.raises(
        InputError, match=r"'v0' has the type int64 in 'a\.parquet' and string in 'b\.parquet'"
    ):
        run(*tables)
    assert not server.asked


def test_a_step_may_resolve_a_clash_and_change_types(run):
    def as_text(data):  # a name by which the readers before it are found
        for document in data:
            document.metadata["v0"] = str(document.metadata["v0"])
            document.metadata["v1"] /= 2
            document.metadata["v2"] = float(document.metadata["v2"])
            document.metadata["v3"] = int(document.metadata["v3"])
            yield document

    tables = [
        a_table([(kind, [value]), (pa.int64(), [1]), (kind, [value]), (other, [number])])
        for kind, value, other, number in (
            (pa.int64(), 1, pa.int16(), 1),
            (pa.string(), "1", pa.string(), "70000"),
        )
    ]
    files = run(*tables, steps=[as_text])
    assert read(files)["v0"].to_pylist() == ["1"] * 8
    assert read(files)["v1"].to_pylist() == [0.5] * 8
    assert read(files)["v3"].to_pylist() == [1] * 4 + [70000] * 4  # not in 16 bits, as the first
    for name in ("v1", "v2"):  # though whole floats are integers, too
        assert str(pq.read_schema(files[0]).field(name).type) == "double"


def test_a_restart_takes_the_kept_types_though_the_input_has_grown(
    tmp_path, server, run, run_to_text_2
):
    whole = tmp_path / "whole"
    whole.mkdir()
    table = a_table(TYPES[:10])
    expected = read(run_in(whole, server, table)).drop(["file_path"])
    run_to_text_2(table)
    kept = (tmp_path / "checkpoints" / COLUMNS).read_bytes()
    (tmp_path / "checkpoints" / COLUMNS).unlink()  # the task has a copy
    wider = [(pa.int64() if kind == pa.int8() else kind, values) for kind, values in TYPES[:10]]
    files = run(table, a_table(wider))
    assert (tmp_path / "checkpoints" / "00000" / COLUMNS).read_bytes() == kept
    assert read(files[:2]).drop(["file_path"]).equals(expected)


def test_a_job_that_began_without_kept_types_goes_on_with_those_of_its_values(
    tmp_path, run, run_to_text_2
):
    table = a_table([(pa.int8(), [1])])
    run_to_text_2(table)
    (tmp_path / "checkpoints" / COLUMNS).unlink()
    (tmp_path / "checkpoints" / "00000" / COLUMNS).unlink()
    first, later = run(table)
    assert str(pq.read_schema(first).field("v0").type) == "int8"
    assert str(pq.read_schema(later).field("v0").type) == "int64"


def test_the_types_come_with_a_task_to_another_node(tmp_path, run, run_to_text_2):
    """Of the mirror: the job's folder of the first node is lost."""
    table = a_table([(pa.int8(), [1]), (pa.map_(pa.string(), pa.date32()), [[("a", DAY)]])])
    mirror = {"checkpoints_remote_dir": f"file://{tmp_path}/mirror"}
    run_to_text_2(table, **mirror)
    shutil.rmtree(tmp_path / "checkpoints")
    files = run(table, **mirror)
    assert len(files) == 2
    assert [pq.read_schema(file).remove_metadata() for file in files[1:]] == [
        pq.read_schema(files[0]).remove_metadata()
    ]
    assert read(files).select(["v0", "v1"]).equals(table.select(["v0", "v1"]))


@pytest.mark.parametrize("code", golden.sections("beyond_python"))
def test_what_python_cannot_hold_is_named_before_a_request(server, code, run):
    with pytest.raises(InputError, match=r"a\.(arrow|parquet)' has in the column 'v'"):
        run(pa.table({"text": ["a"], "v": eval(code)}), kind="arrow")
    assert not server.asked


def test_kept_types_that_cannot_be_read_are_named(tmp_path, server, run):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / COLUMNS).write_bytes(b"{}")
    with pytest.raises(Exception, match=COLUMNS):
        run(a_table([(pa.int8(), [1])]))
    assert not server.asked


def own_adapter(writer, document):
    return {"metadata": document.metadata}


@pytest.mark.parametrize("adapter", [None, own_adapter])
def test_json_lines_hold_what_json_lacks_as_text_and_seconds(tmp_path, server, adapter):
    columns = [
        (pa.decimal128(20, 3), [Decimal("1.500")]),
        (pa.binary(), [b"\xff"]),
        (pa.duration("ms"), [datetime.timedelta(1, 2, 3000)]),
        (pa.date32(), [DAY]),
        (pa.list_(pa.decimal128(5, 2)), [[Decimal("1.50"), None]]),
        (pa.timestamp("ns"), [1_700_000_000_000_000_001]),
    ]
    write_table(tmp_path / "a.parquet", a_table(columns, rows=2))
    writer = JsonlWriter(
        str(tmp_path / "output"), "${rank}_chunk_${chunk_index}.jsonl", None, adapter
    )
    step = runner(tmp_path, server, output_writer=writer)
    step.run(ParquetReader(str(tmp_path), glob_pattern="a.parquet").run())
    metadata = rows(tmp_path)[0]["metadata"]
    assert [metadata[f"v{number}"] for number in range(5)] == [
        "1.500",
        "/w==",
        86402.003,
        "2026-01-02",
        ["1.50", None],
    ]
    assert metadata["v5"].startswith("2023-11-14T22:13:20")


@pytest.mark.parametrize(
    "kept, value",
    [
        (Decimal(1), Decimal(10) ** 80),
        (Decimal(1), Decimal("NaN")),
        (datetime.timedelta(1), datetime.timedelta.max),
        (pandas.Timestamp(1_700_000_000_000_000_001), pandas.Timedelta(1)),  # nanoseconds
    ],
)
def test_a_value_that_no_column_holds_is_a_dead_letter_also_after_others(
    tmp_path, kept, value, run
):
    async def rollout(document, generate):
        result = await generate({"messages": [{"role": "user", "content": document.text}]})
        document.metadata["v"] = kept if document.text == "text 0" else value
        return result

    files = run(
        a_table([]),
        rollout=rollout,
        on_document_error="dead_letter",
        max_dead_letters=3,
    )
    assert read(files)["v"].to_pylist() == [kept]
    assert len(letters(tmp_path)) == 3


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_declared_types_are_those_of_the_output_and_a_value_that_does_not_fit_is_named(
    tmp_path, server, suffix
):
    rows = [{"id": str(n), "text": "a", "score": n, "day": f"2026-01-0{n + 1}"} for n in range(3)]
    path = tmp_path / "in" / f"a.{suffix}"
    path.parent.mkdir()
    if suffix == "csv":
        pandas.DataFrame(rows).to_csv(path, index=False)
    else:
        write_rows(path, rows)
    path.write_text(path.read_text().replace("2026-01-03", "2026-01-33"))
    kinds = {"csv": CSVReader, "jsonl": JsonlReader}
    types = {"score": "float64", "day": "date32"}
    writer = ParquetWriter(str(tmp_path / "output"), "${chunk_index}.parquet", expand_metadata=True)
    step = runner(tmp_path, server, output_writer=writer, records_per_chunk=1)

    def start():
        step.run(kinds[suffix](str(path.parent), types=types).run())

    message = "line [34]: the column .day. has .2026-01-33., which is no date32"
    with pytest.raises(DamagedLine, match=message):
        start()
    assert len(server.asked) <= 2
    path.write_text(path.read_text().replace("2026-01-33", ""))
    start()
    files = sorted((tmp_path / "output").glob("*.parquet"))
    expected = pa.table({"score": [0.0, 1.0, 2.0], "day": [DAY.replace(day=1), DAY, None]})
    assert pa.concat_tables(map(pq.read_table, files)).select(["score", "day"]).equals(expected)
    with pytest.raises(ConfigError, match="'dat' of the column 'day' is no type of Arrow"):
        kinds[suffix](str(path.parent), types={"day": "dat"})


BIG = 2**53 + 1


def convert(kind, value):
    row = {"v": value}
    try:
        DeclaredTypes({"v": kind}).convert(row)
    except DocumentNotSerializable as error:
        return str(error)
    return row["v"]


@pytest.mark.parametrize("code", golden.sections("declared_types"))
def test_a_declared_type_never_changes_a_value(code):
    golden.show("declared_types", code, {"convert": convert, "BIG": BIG})


def test_csv_with_one_cell_of_metadata_has_no_columns_of_the_input(tmp_path, server):
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"id": ["0"], "text": ["a"], "tags": [["b"]]}), path)
    writer = CsvWriter(
        str(tmp_path / "output"),
        "${rank}_${chunk_index}.csv",
        expand_metadata=False,
    )
    runner(tmp_path, server, output_writer=writer).run(ParquetReader(str(path.parent)).run())
    table = pandas.read_csv(tmp_path / "output/00000_00000.csv")
    assert [*table.columns] == ["text", "id", "metadata"]
    assert json.loads(table["metadata"][0])["tags"] == ["b"]
