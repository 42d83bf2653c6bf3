"""Writes CSV files: a line of column names, then a row for each document."""

import csv
import io
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import orjson
from datatrove.io import DataFolderLike
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.arrow_types import Row
from datatrove_ckpt.output.document_codec import for_orjson


class CsvWriter(DiskWriter):  # type: ignore[misc]  # datatrove has no types
    """Writes a document as a row.

    Args:
        expand_metadata: save each metadata entry in a column.

    Attributes:
        columns: columns of the next files; empty: the columns of a file's first row.
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
    ) -> None:
        super().__init__(
            output_folder, output_filename, compression, adapter, "wt", expand_metadata
        )
        self.columns: list[str] = []
        self._written: dict[str, list[str]] = {}

    def _write(self, document: Row, file_handler: IO[str], filename: str) -> None:
        if filename not in self._written:
            self._written[filename] = self.columns or [*document]
            file_handler.write(line(self._written[filename]))
        columns = self._written[filename]
        new_columns = [name for name in document if name not in columns]
        if new_columns:
            raise ValueError(
                f"the column {new_columns[0]!r} is not in the first line of {filename}"
            )
        file_handler.write(line([document.get(name) for name in columns]))


def line(values: Sequence[object]) -> str:
    text = io.StringIO()
    # Until Python 3.13, a line break puts a cell in quotes only if it is in the line's end.
    csv.writer(text, lineterminator="\r\n").writerow(map(cell, values))
    return text.getvalue().removesuffix("\r\n") + "\n"


def text_of(value: object) -> str:
    if value is None:
        return ""
    return str(cell(value))


def cell(value: object) -> object:
    """Returns the content of a cell; for a list or a dictionary its JSON.

    Raises:
        TypeError: a value has no form in CSV, such as a set, whose order is random.
    """
    if isinstance(value, dict | list | tuple | set | frozenset | np.ndarray):
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(for_orjson(value), option=options).decode()
    if isinstance(value, bytes):
        return for_orjson(value)
    return value
