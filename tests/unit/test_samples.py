"""Rows of tables as samples: the values of pyarrow, but token rows are arrays that can be
written.
"""

import datetime
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from datatrove_ckpt.torch import dataset
from datatrove_ckpt.torch.dataset import RowBatches, batch_rows, joined_tables, json_row
from tests import golden
from tests.unit.tables import table_rows

TOKENS = [[1, 2, 3], [], [4], [5, 6]]
NAMES = {"datetime": datetime, "pa": pa, "pc": pc, "TOKENS": TOKENS}
COLUMNS = {code: eval(code, NAMES) for code in golden.sections("columns_of_tables")}
LISTS = {code: eval(code, NAMES) for code in golden.sections("lists_of_tables")}


def sliced(array):
    """The same column as a whole, as a part of a longer one, and in several chunks."""
    longer = pa.concat_arrays([array, array, array])
    chunks = pa.chunked_array([array.slice(0, 1), array.slice(1, 0), array.slice(1)])
    return [
        pa.table({"a": column}) for column in (array, longer.slice(len(array), len(array)), chunks)
    ]


def test_values_are_those_of_pyarrow():
    for name, column in COLUMNS.items():
        for table in sliced(column):
            assert table_rows(table) == table.to_pylist(), name


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_numbers_are_arrays_of_their_own(name):
    for table in sliced(LISTS[name]):
        rows = [row["a"] for row in table_rows(table)]
        assert [row.tolist() for row in rows] == table["a"].to_pylist()
        assert {row.dtype for row in rows} == {
            np.dtype(LISTS[name].type.value_type.to_pandas_dtype())
        }
        for row in rows:
            assert row.base is None, "a row keeps no others in memory"
            row += 1
        assert table["a"].to_pylist() == LISTS[name].to_pylist()


def test_rows_of_json_are_the_same():
    row = {"a": ["x", 1], "b": [], "c": [True], "n": 1, "text": "a"}
    assert json_row(dict(row)) == row


@pytest.mark.parametrize(
    "values, dtype",
    golden.values("numbers_of_json", globals()),
    ids=str,
)
def test_numbers_of_json_become_an_array_only_if_that_changes_none(values, dtype):
    made = json_row({"a": values})["a"]
    if dtype is None:
        assert [(type(one), one) for one in made] == [(type(one), one) for one in values]
    else:
        assert made.dtype == dtype
        assert made.tolist() == values
        made += 0


# Rows taken out of several tables: those that pyarrow takes out of one ---------------------------


ALL = COLUMNS | LISTS


@pytest.fixture(params=[0, 10**6], ids=["apart", "joined"])
def small(request, monkeypatch):
    """Batches of any size stay apart, or are joined."""
    monkeypatch.setattr(dataset, "_JOINED", request.param)


def check(tables, rows):
    whole = pa.concat_tables(tables, promote_options="permissive")
    numbers = np.array(rows, dtype=np.int64)
    for joined in (False, True):
        found = {}
        for places, batch, taken in RowBatches(joined_tables(tables) if joined else tables).take(
            numbers
        ):
            batch.validate(full=True)
            found.update(zip(places.tolist(), batch_rows(batch, taken), strict=True))
        assert [plain(found[place]) for place in range(len(rows))] == [
            whole.to_pylist()[number] for number in rows
        ]


def plain(row):
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in row.items()
    }


@pytest.mark.usefixtures("small")
def test_rows_of_one_table_and_of_several():
    for tables in map(sliced, ALL.values()):
        for table, rows in itertools.product(tables, ([2, 0, 3, 0], [1, 2, 3], [2])):
            check([table], rows)
        for rows in ([11, 0, 5, 4, 11, 3, 7], [3, 4, 5], [9, 1]):
            check(tables, rows)


@pytest.mark.usefixtures("small")
def test_rows_of_many_columns_and_batches_in_any_order():
    generator = np.random.default_rng(0)
    tables = [
        pa.table({
            "ids": pa.array([[n, n + 1, n + 2] for n in range(first, first + rows)], pa.list_(pa.int32())),
            "uneven": pa.array([list(range(n % 7)) for n in range(first, first + rows)], pa.large_list(pa.int16())),
            "text": [f"row {n}" for n in range(first, first + rows)],
        })
        for first, rows in ((0, 40), (40, 1), (41, 100), (141, 59))
    ]  # fmt: skip
    for count in (1, 7, 200):
        check(tables, generator.permutation(200)[:count].tolist())
    check(tables, generator.integers(0, 200, 500).tolist())
