"""Reads CSV as datatrove does, without the silent losses of Python's defaults.

A ``FilePosition`` is (rows, hash of these rows). A resume reads the file from its beginning, and
compares the hash.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from datatrove.io import DataFolderLike
from datatrove.pipeline.readers import csv as datatrove_csv
from xxhash import xxh3_64

from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.base import TextFilesReader
from datatrove_ckpt.readers.inputs import (
    PLAIN_INTEGER,
    BadRow,
    FilePosition,
    ReadRow,
    Row,
    RowBlock,
    file_error,
    position_mismatch,
    refuse_equal_names,
    refuse_pointer,
)


class CSVReader(TextFilesReader, datatrove_csv.CsvReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``CSVReader``, with its arguments. A byte order mark is no part of a name, and
    line breaks within a cell stay as they are.

    Args:
        max_skipped: how many rows of a task may be left out because they have more or fewer cells
            than there are names, or a ``media`` that is none. One more stops the task
            (``DamagedLine``). None: any number.
        delimiter: the character between cells. A backslash and a t also mean a tab. A first line
            such as ``sep=;`` comes before it.
        encoding, types, shuffle_seed, path_columns: see ``JsonlReader``. An empty cell is null, but
            a text or bytes stay empty.

    Raises:
        InputError: two columns have one name, a quote is not closed, or another character is
            between cells.
        ConfigError: the delimiter is no character that can be between cells.
    """

    format = "csv"
    suffixes = ".csv"
    grows = True
    delimiter = ","  # pickles of earlier releases

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        delimiter: str = ",",
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, **options)
        self.delimiter = delimiter.replace("\\t", "\t")
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ConfigError(f"delimiter: {delimiter!r} is not one character, such as ';'.")

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        rows = self._read_rows(name, file_position)
        for first in rows:
            yield RowBlock("the row that begins in line {}", chain([first], islice(rows, 999)))

    def _read_rows(self, name: str, file_position: FilePosition) -> Iterator[ReadRow]:
        done, kept_hash = file_position or (0, 0)
        extent = self._file_extent
        with self.open(name) as content:
            lines = io.TextIOWrapper(content, "utf-8-sig", newline="")
            stored = getattr(content, "stored", content)
            first_line = lines.readline()
            declared = re.fullmatch(r"sep=(.)\s*", first_line)
            if declared:
                rows = _rows(chain(["\n"], lines), name, declared[1])
            else:
                rows = _rows(chain([first_line], lines), name, self.delimiter)
            _, names = next(rows, (1, []))
            refuse_equal_names(names, name)
            if len(names) == 1 and self.text_key not in names:
                refuse_pointer(names[0].encode(), name)
                for delimiter in ",;\t|":
                    if delimiter in names[0]:
                        raise file_error(
                            name,
                            f"has {delimiter!r} between its cells: the first line is {names[0]!r}",
                            f"Set delimiter: {delimiter!r}",
                        )
            digest = xxh3_64("\0".join(names).encode())
            number = 0
            for number, (line, cells) in enumerate(rows, 1):
                digest.update("\0".join(cells).encode())
                if number < done:
                    continue
                if number == done:
                    if digest.intdigest() & PLAIN_INTEGER != kept_hash:
                        raise position_mismatch(
                            f"The input file {name!r} has changed before line {line}."
                        )
                    continue
                extent.per = stored.tell() / number
                row: Row | BadRow
                if len(cells) == len(names):
                    row = dict(zip(names, cells, strict=True))
                else:
                    more_or_fewer = "more" if len(cells) > len(names) else "fewer"
                    row = BadRow(
                        f"{more_or_fewer} cells than columns; put cells with {self.delimiter!r} "
                        "in quotes, without blanks before"
                    )
                yield row, number - 1, (number, digest.intdigest()), line
            if number < done:
                raise position_mismatch(
                    f"The input file {name!r} had {done} rows or more, and has {number}."
                )
            extent.end = stored.tell()


def _rows(lines: Iterable[str], file: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    has_ended = False

    def after_last() -> Iterator[str]:
        nonlocal has_ended
        has_ended = True
        yield from ()

    reader = csv.reader(chain(lines, after_last()), delimiter=delimiter)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem = f"a cell that cannot be read ({error})"
            raise _odd_row(file, problem, line) from error
        if cells is None:
            return
        if has_ended:  # only an open quote reads beyond the last line
            raise _odd_row(file, "a quote that is not closed", line)
        if cells:
            yield line, cells


def _odd_row(file: str, problem: str, line: int) -> InputError:
    return file_error(
        file,
        f"has {problem} in the row that begins in line {line}",
        "Close each quote, double those within a cell",
    )
