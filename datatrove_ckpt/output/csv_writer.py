"""CSV files: a line of column names, then a row for each document."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import orjson
from datatrove.io import DataFolderLike
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.arrow_types import Row
from datatrove_ckpt.output.documents import for_orjson
from datatrove_ckpt.output.formats import RESULTS

_NESTED = (dict, list, tuple, set, frozenset, np.ndarray)


class CsvWriter(DiskWriter):  # type: ignore[misc]  # datatrove has no types
    """Writes a document as a row. datatrove has no such writer.

    Args:
        expand_metadata: save each metadata entry in a column.
        json_columns: columns whose lists and dictionaries become JSON; a runner adds those that it
            fills. Those of other columns are refused, because a reader could not tell them from
            texts.

    Attributes:
        columns: of the files that are written next; empty: those of a file's first row.
    """

    default_output_filename = "${rank}.csv"
    name = "🔢 Csv"

    def __init__(
        self,
        output_folder: DataFolderLike,
        output_filename: str | None = None,
        compression: str | None = None,
        adapter: Any = None,
        expand_metadata: bool = True,
        json_columns: Sequence[str] = (RESULTS,),
    ) -> None:
        super().__init__(
            output_folder, output_filename, compression, adapter, "wt", expand_metadata
        )
        self.json_columns = json_columns
        self.columns: list[str] = []
        self._written: dict[str, list[str]] = {}

    def cells(self, row: Row) -> Row:
        """Raises TypeError: a value has no form in CSV. A set has none: its order is by chance."""
        cells = {}
        for name, value in row.items():
            if isinstance(value, _NESTED) and name not in self.json_columns:
                raise TypeError(refusal(name, f"a {type(value).__name__}"))
            cells[name] = cell(value)
        return cells

    def _write(self, document: Row, file_handler: IO[str], filename: str) -> None:
        cells = self.cells(document)
        if filename not in self._written:
            self._written[filename] = self.columns or [*cells]
            file_handler.write(_line(self._written[filename]))
        columns = self._written[filename]
        others = [name for name in cells if name not in columns]
        if others:
            raise ValueError(f"the column {others[0]!r} is not in the first line of {filename}")
        file_handler.write(_line([cells.get(name) for name in columns]))


def refusal(column: str, kind: str) -> str:
    """Returns why a column of the input is refused, without a full stop."""
    return (
        f"the column {column!r} has {kind}, which CSV cannot hold. Write output_format: jsonl or "
        "parquet (in a pipeline: JsonlWriter or ParquetWriter), of which datatrove-ckpt export "
        "makes CSV with JSON in such cells"
    )


def text_of(value: object) -> str:
    """Returns the text that a reader of CSV gets for a value."""
    if value is None:
        return ""
    return str(cell(value))


def cell(value: object) -> object:
    """Returns what stands in a cell: JSON of a list or a dictionary.

    Raises TypeError: a value has no form in CSV.
    """
    if isinstance(value, _NESTED):
        return orjson.dumps(for_orjson(value), option=orjson.OPT_NON_STR_KEYS).decode()
    if isinstance(value, bytes):
        return for_orjson(value)
    return value


def _line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    # Until Python 3.13 only characters of the line's end put a cell with them in quotes.
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"
