"""CSV as datatrove reads it, but for what Python's defaults lose in silence."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from datatrove.data import DocumentsPipeline
from datatrove.io import DataFolderLike
from datatrove.pipeline.readers import csv as datatrove_csv

from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.input_errors import refuse_equal_names
from datatrove_ckpt.readers.inputs import refuse_pointer

_END = "\0end of the file"
"""A row after the last one, which an open quote takes into its cell."""
_QUOTES = "Close each quote, double those within a cell"


class CSVReader(datatrove_csv.CsvReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``CSVReader``, with its arguments. A byte order mark is no part of a name, and
    line breaks within a cell stay as they are.

    Args:
        path_columns: folders such as ``lang=en`` are columns.

    Raises:
        InputError: two columns have one name, a row has more or fewer cells than there are names, a
            quote is not closed, or another character than the comma is between cells.
    """

    path_columns = False  # pickles of earlier releases
    _resolved: dict[str, str] | None = None
    has_default_adapter = SeekingReader.has_default_adapter
    get_document_from_dict = SeekingReader.get_document_from_dict

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: Any,
        path_columns: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, **options)
        self.path_columns = path_columns

    def read_file(self, filepath: str) -> DocumentsPipeline:
        options = {"compression": self.compression, "encoding": "utf-8-sig", "newline": ""}
        with self.data_folder.open(filepath, "r", **options) as file:
            rows = _rows(file, filepath)
            _, names = next(rows, (1, []))
            refuse_equal_names(names, filepath)
            if len(names) == 1 and self.text_key not in names:
                refuse_pointer(names[0].encode(), filepath)
                _refuse_other_delimiter(names[0], filepath)
            for number, (line, cells) in enumerate(rows):
                if len(cells) != len(names):
                    more_or_fewer = "more" if len(cells) > len(names) else "fewer"
                    raise _odd_row(
                        filepath,
                        f"{more_or_fewer} cells than columns",
                        line,
                        "Put cells with commas or line breaks in quotes, end no row early",
                    )
                row = dict(zip(names, cells, strict=True))
                with self.track_time():
                    document = self.get_document_from_dict(row, filepath, number)
                if document:
                    yield document


def _rows(lines: Iterable[str], file: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows that are not blank, each after the number of its first line."""
    reader = csv.reader(chain(lines, [_END]))
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except UnicodeDecodeError as error:
            command = "iconv -f latin1 -t utf-8, or another encoding"
            if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                command = "iconv -f utf-16 -t utf-8"
            raise InputError(
                f"The input file {file!r} is not UTF-8: {error}. Convert it ({command}), and run "
                "the same command again."
            ) from error
        except csv.Error as error:
            what = f"a cell that cannot be read ({error})"
            raise _odd_row(file, what, line, _QUOTES) from error
        if cells == [_END]:
            return
        if cells and cells[-1].endswith(_END):
            raise _odd_row(file, "a quote that is not closed", line, _QUOTES)
        if cells:
            yield line, cells


def _odd_row(file: str, problem: str, line: int, advice: str) -> InputError:
    return InputError(
        f"The input file {file!r} has {problem} in the row that begins in line {line}. {advice}, "
        "and run the same command again."
    )


def _refuse_other_delimiter(header: str, file: str) -> None:
    for delimiter in ";\t|":
        if delimiter in header:
            raise InputError(
                f"The input file {file!r} has {delimiter!r} between its cells: the first line is "
                f"{header!r}. Save it with commas, and run the same command again."
            )
