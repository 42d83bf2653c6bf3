"""Rows taken out of several tables: those that pyarrow takes out of one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from datatrove_ckpt.readers import gather
from datatrove_ckpt.readers.gather import Batches, owned
from tests.unit.test_samples import COLUMNS, LISTS, sliced

ALL = COLUMNS | LISTS


@pytest.fixture(params=[0, 10**6], ids=["apart", "joined"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of any size stay apart, or are joined."""
    monkeypatch.setattr(gather, "_SMALL", request.param)


def check(tables: list[pa.Table], rows: list[int]) -> None:
    whole = pa.concat_tables(tables, promote_options="permissive")
    numbers = np.array(rows, dtype=np.int64)
    taken = Batches(tables).take(numbers)
    assert taken.schema == whole.schema
    assert taken.to_pylist() == [whole.to_pylist()[number] for number in rows]
    taken.validate(full=True)


@pytest.mark.usefixtures("small")
def test_rows_of_one_table() -> None:
    for table in itertools.chain.from_iterable(map(sliced, ALL.values())):
        for rows in ([2, 0, 3, 0], [1, 2, 3], []):
            check([table], rows)


@pytest.mark.usefixtures("small")
def test_rows_of_several_tables() -> None:
    for tables in map(sliced, ALL.values()):
        for rows in ([11, 0, 5, 4, 11, 3, 7], [3, 4, 5], [9, 1]):
            check(tables, rows)


@pytest.mark.usefixtures("small")
def test_rows_of_many_columns_and_batches_in_any_order() -> None:
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


@pytest.mark.usefixtures("small")
def test_lists_of_two_lengths_that_are_even_in_each_table() -> None:
    tables = [pa.table({"a": pa.array([[n] * length] * 3, pa.list_(pa.int8()))}) for n, length in ((1, 2), (2, 5))]
    check(tables, [4, 0, 5, 1])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "types", [(pa.int32(), pa.int64()), (pa.null(), pa.string()), (pa.string(), pa.large_string())]
)
def test_types_that_differ_are_unified(types: Any) -> None:
    values = {pa.null(): [None] * 2, pa.int32(): [1, 2], pa.int64(): [2**40, 3]}
    tables = [pa.table({"a": pa.array(values.get(kind, ["a", "b"]), kind)}) for kind in types]
    check(tables, [3, 0, 2, 1])


def test_owned_rows_hold_no_more_than_themselves() -> None:
    table = pa.table({"text": ["x" * 100] * 10_000, "ids": [[1, 2]] * 10_000})
    for rows in (0, 1, 2, 7):
        own = owned(table.slice(5000, rows))
        assert own.to_pylist() == table.slice(5000, rows).to_pylist()
        assert own.get_total_buffer_size() < 2_000
