"""Files with other types in one column: the types of all files count, not those of the rows that
come together.
"""

import datetime

import pyarrow as pa
import pytest

from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.blocks import BlockInput
from tests import golden
from tests.unit.tables import reader_of, write_table

TEXTS = ["a", None, "é"]
DAY = datetime.datetime(2026, 1, 1)


def written(folder, *tables, kind="parquet"):
    for number, table in enumerate(tables):
        write_table(folder / f"{number}.{kind}", table)
    return reader_of(folder, kind)


def read(reader, columns=None):
    blocks = BlockInput(reader)
    unified = blocks.unified(columns)
    found = [blocks.read(block, columns, unified) for block in blocks]
    assert len({str(table.schema) for table in found}) == 1
    return found


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@golden.rows("unified")
def test_types_are_those_of_all_files(tmp_path, kind, code):
    arrays = eval(code)
    found = read(written(tmp_path, *(pa.table({"x": array}) for array in arrays), kind=kind), ["x"])
    kind_of_all = str(found[0].schema.field("x").type).replace("element:", "item:")
    golden.hold("unified", code, kind_of_all)
    for table, array in zip(found, arrays, strict=True):
        wanted = [
            value | {"b": value.get("b")} if isinstance(value, dict) else value
            for value in array.to_pylist()
        ]
        assert table["x"].to_pylist() == wanted
        table.validate(full=True)


def test_all_columns_in_one_order_with_none_where_a_file_has_none(tmp_path):
    one, two = pa.table({"a": [1], "b": ["x"]}), pa.table({"c": [[1.5]], "b": ["y"], "a": [2]})
    assert [table.to_pylist() for table in read(written(tmp_path, one, two))] == [
        [{"a": 1, "b": "x", "c": None}],
        [{"a": 2, "b": "y", "c": [1.5]}],
    ]


@pytest.mark.parametrize("columns", golden.sections("columns_of_files"))
def test_types_that_are_no_values_of_one_column_are_named_at_the_start(tmp_path, columns):
    tables = [pa.table({"x": each} if each else {"y": [1]}) for each in eval(columns)]
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, *tables), ["x"])
    golden.hold("columns_of_files", columns, str(refused.value), FOLDER=tmp_path)


def test_a_value_that_does_not_fit_is_an_input_error(tmp_path):
    reader = written(tmp_path, pa.table({"x": [1.5]}), pa.table({"x": [2**60 + 1]}))
    with pytest.raises(
        InputError, match=r"'1.parquet' has a value that does not fit.*1152921504606"
    ):
        read(reader, ["x"])
