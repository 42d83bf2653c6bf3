"""Parquet chunks: one schema for all documents of a chunk, the same whatever happened, and files
that load as one.
"""

import datetime
import json
from functools import partial
from http import HTTPStatus

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import DocumentNotSerializable, OutputFailed
from datatrove_ckpt.output.arrow_types import type_of
from datatrove_ckpt.output.chunk_writing import ChunkWriter
from tests import golden
from tests.jobs import documents, runner


def parquet(folder, **changes):
    changes.setdefault("expand_metadata", True)
    return ParquetWriter(str(folder / "output"), "${rank}_chunk_${chunk_index}.parquet", **changes)


def with_values(values):
    """Documents with these values in column "c", by chunk; ``...``: without the column."""
    flat = [value for chunk in values for value in chunk]
    found = documents(len(flat))
    for document, value in zip(found, flat, strict=True):
        document.metadata |= {} if value is ... else {"c": value}
    return found


def written(folder, server, values, **changes):
    changes.setdefault("output_writer", parquet(folder))
    step = runner(folder, server, records_per_chunk=len(values[0]), **changes)
    step.run(with_values(values))
    return sorted((folder / "output").glob("*.parquet"))


@pytest.fixture
def write(tmp_path, server):
    return partial(written, tmp_path, server)


def types(files):
    return [
        str(pq.read_schema(file).field("c").type).replace("element: ", "item: ") for file in files
    ]


def rows(files):
    return [row.get("c") for file in files for row in pq.read_table(file).to_pylist()]


# in one chunk ------------------------------------------------------------------------------------


@golden.rows("types_of_a_chunk")
def test_a_chunk_has_the_types_of_all_its_documents(tmp_path, server, code):
    chunk, found = eval(code), []
    for number, order in enumerate((chunk, chunk[::-1])):
        files = written(tmp_path / str(number), server, [order])
        found.append(f"{types(files)} {rows(files)}")
    golden.hold("types_of_a_chunk", code, "\n".join(found))


@pytest.mark.matrix("code", [*golden.sections("chunks")])
def test_what_cannot_be_united_names_document_column_and_both_types(tmp_path, server, code, write):
    chunk = eval(code)
    for _ in range(2):
        with pytest.raises(OutputFailed) as failed:
            write([chunk])
        golden.hold("chunks", code, str(failed.value), FOLDER=tmp_path)
    asked = server.asked.total()

    def adapter(self, document):
        return {"id": document.id, "c": json.dumps(document.metadata["c"])}

    new = parquet(tmp_path, adapter=adapter)
    files = write([chunk], output_writer=new, accept_changes=True)
    assert [json.loads(value) for value in rows(files)] == chunk
    assert server.asked.total() == asked


def test_a_schema_is_obeyed_as_it_is(tmp_path, write):
    schema = pa.schema([("id", pa.string()), ("c", pa.list_(pa.float32()))])
    files = write([[None, None], [[1], ...]], output_writer=parquet(tmp_path, schema=schema))
    assert [pq.read_schema(file).equals(schema) for file in files] == [True, True]


NAIVE = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
AWARE = NAIVE.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
VECTOR = np.array([0.5, 2], np.float32)


@pytest.mark.matrix(
    ("kind", "kept", "read", "changed", "said"),
    [
        (pa.timestamp("us", "UTC"), AWARE, AWARE, NAIVE, r"column 'c' .* timestamp\[us\] \(it"),
        (
            pa.struct({"a": pa.int64()}),
            {"a": 1, "b": None},
            {"a": 1},
            {"b": 2},
            r"column 'c' is struct<b: int64> \(it would change",
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            {"a": 1},
            [("a", 1)],
            {"a": 1.5},
            r"column 'c' is struct<a: double> \(it would change",
        ),
        (pa.list_(pa.float32(), 2), VECTOR, [0.5, 2.0], "x", "column 'c' is string"),
    ],
)
def test_a_value_that_the_given_schema_keeps_is_written_and_one_that_would_change_is_refused(
    tmp_path, server, kind, kept, read, changed, said, write
):
    schema = pa.schema([("id", pa.string()), ("c", kind)])
    files = written(
        tmp_path / "kept", server, [[kept]], output_writer=parquet(tmp_path / "kept", schema=schema)
    )
    assert rows(files) == [read]
    with pytest.raises((OutputFailed, DocumentNotSerializable), match=rf"'id 1' .*{said}"):
        write([[None, changed]], output_writer=parquet(tmp_path, schema=schema))
    assert not list((tmp_path / "output").glob("*.parquet"))


# arrays ------------------------------------------------------------------------------------------


def vector(*values):
    return np.array(values, np.float32)


FIXED, ANY = "fixed_size_list<item: float>[2]", "list<item: float>"


@golden.rows("types_of_arrays")
def test_float32_arrays_of_one_length_are_fixed_size_lists(tmp_path, code, write):
    chunk = eval(code)
    files = write([chunk])
    golden.hold("types_of_arrays", code, str(types(files)))
    plain = json.loads(
        json.dumps(
            [None if value is ... else value for value in chunk], default=lambda a: a.tolist()
        )
    )
    expected = [{"a": None} if value == {} else value for value in plain]
    assert rows(files) == expected
    assert main(["verify", str(tmp_path / "checkpoints"), "--full"]) == 0


@golden.rows("lengths_of_arrays")
def test_files_with_arrays_load_as_one_or_it_is_said(tmp_path, server, code, log, write):
    values = eval(code)
    files = write(values)
    exit_code = main(["verify", str(tmp_path / "checkpoints"), "--full"])
    holders = [file for file in files if "c" in pq.read_schema(file).names]
    found = [types(holders), exit_code, "column 'c' is fixed_size_list" in "".join(log)]
    if exit_code == 0:
        column = ds.dataset([str(file) for file in files]).to_table().column("c")
        found += [str(column.type).replace("element: ", "item: "), column.to_pylist()]
    golden.hold("lengths_of_arrays", code, str(found))
    again = written(tmp_path / "b", server, values)
    assert contents(again) == contents(files)


# from chunk to chunk -----------------------------------------------------------------------------


# bytes -------------------------------------------------------------------------------------------


def contents(files):
    return [file.read_bytes() for file in files]


GUESSED = golden.values("guessed_types", globals())


def test_a_right_guess_and_a_wrong_one_write_the_same_bytes(tmp_path, server, monkeypatch):
    passes = []
    fits = ChunkWriter._fits

    def counted(self, *args):
        passes.append(fits(self, *args))
        return passes[-1]

    monkeypatch.setattr(ChunkWriter, "_fits", counted)
    guessed = [written(tmp_path / str(len(chunks)), server, chunks) for chunks in GUESSED]
    assert passes == [False, False, False, False, True, True]
    monkeypatch.setattr(ChunkWriter, "_fits", lambda self, *args: False)
    for chunks, files in zip(GUESSED, guessed, strict=True):
        assert contents(written(tmp_path / f"again {len(chunks)}", server, chunks)) == contents(
            files
        )


def test_a_subclass_of_int_is_an_integer():
    """``in`` of a range goes through all its numbers for such a value."""
    assert type_of([HTTPStatus.OK, 1], "c") == pa.int64()
