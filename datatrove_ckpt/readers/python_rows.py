"""Rows of Arrow as values of Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from datatrove_ckpt.common.lazy import pa
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.positions import Row


def python_rows(batch: pa.RecordBatch | pa.Table, name: str) -> list[Row]:
    """Returns the rows with Python's values.

    Raises:
        InputError: a value has no form in Python, or would lose digits.
    """
    shorter = {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}
    for field in batch.schema:
        if not any(kind in str(field.type) for kind in shorter):
            continue
        try:
            for values in _leaves(batch.column(field.name)):
                if str(values.type) in shorter:
                    values.cast(shorter[str(values.type)])
        except pa.ArrowInvalid as error:
            raise _without_form(field, name, error) from error
    try:
        return cast("list[Row]", batch.to_pylist())
    except (OverflowError, ValueError):
        for field in batch.schema:
            try:
                batch.column(field.name).to_pylist()
            except (OverflowError, ValueError) as error:
                raise _without_form(field, name, error) from error
        raise


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Yields the arrays of a column that hold its values."""
    parts = []
    if isinstance(column, pa.ChunkedArray):
        parts = column.chunks
    elif isinstance(column, pa.DictionaryArray):
        parts = [column.dictionary]
    elif isinstance(column, pa.RunEndEncodedArray):
        parts = [column.values]
    elif isinstance(column, pa.MapArray):
        parts = [column.keys, column.items]
    elif isinstance(column, pa.StructArray):
        parts = column.flatten()
    elif hasattr(column, "flatten"):  # a list
        parts = [column.flatten()]
    else:
        yield column
    for part in parts:
        yield from _leaves(part)


def _without_form(field: pa.Field, name: str, error: Exception) -> InputError:
    return InputError(
        f"The input file {name!r} has a value in the column {field.name!r}, of type {field.type}, "
        f"that Python cannot hold: {error}. Convert the column, for example to microseconds or "
        "to text, and run the same command again."
    )
