"""Types that can be united, and files that load as one: compared with what Arrow itself does."""

import datetime
import itertools
from decimal import Decimal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.output.arrow_types import TypeConflict, unify_types
from datatrove_ckpt.output.chunk_writing import (
    ColumnTypes,
    RankColumns,
    SchemaMismatch,
    infers_schema,
    raw_types,
    schema_mismatches,
)
from tests import golden

VALUES = {
    code.partition("  # ")[2]: eval(code, {"datetime": datetime, "Decimal": Decimal})
    for code in golden.sections("values_of_columns")
}


def a_writer(folder, **changes):
    return ParquetWriter(str(folder), "${rank}.parquet", expand_metadata=True, **changes)


def schema_of(*values):
    types = ColumnTypes()
    types.add([{} if value is ... else {"c": value} for value in values])
    return types.schema()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file with two rows for each value."""
    folder = tmp_path_factory.mktemp("files")
    for name, value in VALUES.items():
        rows = [{"id": "x", "c": value}, {"id": "y", "c": value}]
        types = ColumnTypes()
        types.add(rows)
        pq.write_table(
            pa.Table.from_pylist(rows, schema=types.schema()), folder / f"{name}.parquet"
        )
    return {name: folder / f"{name}.parquet" for name in VALUES}


def rows(first, later):
    """The later file's two values, as they load after the first one."""
    try:
        return [row["c"] for row in ds.dataset([str(first), str(later)]).to_table().to_pylist()[2:]]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


def without_none(value):
    """The value without the keys of dicts that have no value."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def test_files_that_fit_load_as_one_with_the_values_that_they_have(files):
    fitting = 0
    for first, later in itertools.permutations(files, 2):
        if not schema_mismatches(pq.read_schema(files[first]), pq.read_schema(files[later])):
            read = rows(files[first], files[later])
            assert read is not None, (first, later)
            assert without_none(read) == without_none([VALUES[later]] * 2), (first, later)
            fitting += 1
    assert fitting >= 27


test_all_misfits_are_found_also_inside_dicts_and_lists = golden.shows("misfits", globals())


def test_any_two_types_are_united_in_either_order_or_in_none():
    for one, other in itertools.combinations(VALUES.values(), 2):
        outcomes = []
        for pair in ((one, other), (other, one)):
            types = [raw_types(schema_of(value))["c"] for value in pair]
            try:
                both = unify_types(types[0], types[1], "c")
            except TypeConflict as error:
                assert error.column.startswith("c")
                outcomes.append(None)
            else:
                assert unify_types(both, types[0], "c").equals(both)
                assert unify_types(both, types[1], "c").equals(both)
                outcomes.append(both if not pa.types.is_nested(both) else "nested")
        assert outcomes[0] == outcomes[1], (one, other)


NAIVE = datetime.datetime(2026, 1, 2, 3)


@pytest.mark.parametrize(
    "one, other",
    golden.values("values_that_would_change", globals()),
)
def test_values_that_would_change_beside_each_other_are_refused(one, other):
    for pair in ((one, other), (other, one)):
        with pytest.raises(TypeConflict):
            schema_of(*pair)


def test_only_a_writer_that_infers_its_schema_gets_another_one(tmp_path):
    class Own(ParquetWriter):
        def _write(self, document, file_handler, filename):
            super()._write(document, file_handler, filename)

    class Renamed(ParquetWriter):
        name = "another"

    assert infers_schema(a_writer(tmp_path))
    assert infers_schema(Renamed(str(tmp_path), "${rank}.parquet"))
    assert not infers_schema(a_writer(tmp_path, schema=pa.schema([("c", pa.string())])))
    assert not infers_schema(Own(str(tmp_path), "${rank}.parquet"))
    assert not infers_schema(JsonlWriter(str(tmp_path), "${rank}.jsonl"))


def test_the_rank_is_warned_whichever_chunk_is_written_first():
    whole, broken = schema_of(1), schema_of(0.5)
    columns = RankColumns()
    assert columns.add(1, broken) == []
    assert columns.add(0, whole) == [SchemaMismatch("c", "int64", "double")]
    assert columns.add(2, broken) == []  # said once
    columns = RankColumns()
    columns.start(0, whole)
    assert columns.add(1, broken) == [SchemaMismatch("c", "int64", "double")]
    with pytest.raises(TypeConflict):
        columns.add(2, schema_of("a"))
