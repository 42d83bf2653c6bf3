"""CSV as datatrove reads it, but for what Python's defaults lose in silence."""

from __future__ import annotations

import csv

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.readers import csv as datatrove_csv

from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.input_errors import refuse_equal_names


class CSVReader(datatrove_csv.CsvReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``CSVReader``, with its arguments. A byte order mark is no part of a name, and
    line breaks within a cell stay as they are.

    Raises:
        InputError: two columns have one name, a row has more cells than there are names, or another
            character than the comma is between cells.
    """

    _resolved: dict[str, str] | None = None
    has_default_adapter = SeekingReader.has_default_adapter
    get_document_from_dict = SeekingReader.get_document_from_dict

    def read_file(self, filepath: str) -> DocumentsPipeline:
        options = {"compression": self.compression, "encoding": "utf-8-sig", "newline": ""}
        with self.data_folder.open(filepath, "r", **options) as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or []
            refuse_equal_names(names, filepath)
            if len(names) == 1 and self.text_key not in names:
                _refuse_other_delimiter(names[0], filepath)
            for number, row in enumerate(rows):
                if None in row:
                    raise InputError(
                        f"The input file {filepath!r} has more cells than columns in the row that "
                        f"ends in line {rows.line_num}. Put cells with commas in quotes, and run "
                        "the same command again."
                    )
                with self.track_time():
                    document = self.get_document_from_dict(row, filepath, number)
                if document:
                    yield document


def _refuse_other_delimiter(header: str, file: str) -> None:
    for delimiter in ";\t|":
        if delimiter in header:
            raise InputError(
                f"The input file {file!r} has {delimiter!r} between its cells: the first line is "
                f"{header!r}. Save it with commas, and run the same command again."
            )
