"""Input that only this process has, kept as a file of the run folder, from which each start reads
it: standard input, and objects of Python.
"""

import filecmp
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.cli.job_input import reader_name
from datatrove_ckpt.common.formatting import safe_repr
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.errors import ConfigError


@dataclass(frozen=True)
class SavedInput:
    """The input that a run folder keeps.

    Attributes:
        folder: the folder with the rows, below the run folder.
        has_begun: whether checkpoints or their mirror show that the run has begun.
    """

    folder: Path
    has_begun: bool

    def save_lines(self, lines: Iterable[bytes], name: str) -> Path:
        """Writes JSON lines, unless the run has begun with them.

        Raises:
            ConfigError: the run has begun with other lines.
        """
        path = self.folder / f"{name}.jsonl"
        if not self._has_begun_with(path):
            files.disk.make_dirs(path.parent)
            files.disk.replace(path, lines)
            return path
        with path.open("rb") as file:  # a copy might not fit on the disk
            is_equal = all(file.read(len(line)) == line for line in lines) and not file.read(1)
        return _compared(path, is_equal)

    def save_rows(self, rows: object) -> Path:
        """Writes a table as Parquet, with its types, or else texts or dictionaries as JSON lines,
        unless the run has begun with them.

        Args:
            rows: a DataFrame of pandas or polars, a ``datasets.Dataset``, or another object that
                exports an Arrow stream; or an iterable of texts or dictionaries, which are not held
                in memory.

        Raises:
            ConfigError: ``rows`` is none of these, a row does not fit, or the run began with other
                rows.
        """
        is_series = hasattr(rows, "to_frame")
        if hasattr(rows, "to_parquet") or (hasattr(rows, "__arrow_c_stream__") and not is_series):
            return self._save_table(rows)
        if not isinstance(rows, Iterable) or isinstance(rows, Mapping | bytes):
            raise ConfigError(
                "input: takes a path, a list or an iterator of texts or dictionaries, a "
                f"DataFrame, or a dataset (one split); it is {type(rows).__name__}."
            )
        return self.save_lines(_lines(rows), "rows")

    def _save_table(self, table: Any) -> Path:
        path = self.folder / "rows.parquet"
        new = path.with_name(f"{path.name}.new")
        files.disk.make_dirs(path.parent)
        if hasattr(table, "reset_index"):
            table = self._with_index(table, path)
        if hasattr(table, "to_parquet"):
            table.to_parquet(new)
        else:
            batches = pa.RecordBatchReader.from_stream(table)
            with pq.ParquetWriter(new, batches.schema) as file:
                for batch in batches:
                    file.write_batch(batch)
        if not self._has_begun_with(path):
            files.disk.sync(new)
            files.disk.rename(new, path)
            files.disk.sync_dir(path.parent)
            return path
        is_equal = filecmp.cmp(new, path, shallow=False)
        files.disk.remove(new)
        return _compared(path, is_equal)

    def _with_index(self, frame: Any, path: Path) -> Any:
        """Returns a DataFrame with its index as a column, unless the index only counts the rows, or
        the run has begun without that column.
        """
        rows = frame.reset_index(drop=True)
        if set(frame.index.names) == {None}:
            columns = len(rows.columns)
            begun_without = self._has_begun_with(path) and len(pq.read_schema(path)) == columns
            if begun_without or frame.index.equals(rows.index):
                return rows
        return frame.reset_index()

    def _has_begun_with(self, path: Path) -> bool:
        return self.has_begun and path.exists()


def _lines(rows: Iterable[object]) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        if number == 0:
            _refuse_path(row)
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"input: row {number} is neither a text nor a dictionary: {safe_repr(row)}"
            )
        try:
            line = json.dumps(dict(row)).encode() + b"\n"
            _refuse_other_keys(dict(row))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"input: row {number} does not fit into JSON: {error}. A DataFrame, a "
                "pyarrow.Table or a Dataset keeps its types."
            ) from None
        yield line


def _refuse_path(row: object) -> None:
    """Raises ConfigError for a path, or a text that is probably the path of an input."""
    is_path = isinstance(row, os.PathLike)
    if isinstance(row, str):
        is_file_name = reader_name(row) != "" and not re.search(r"\s", row)
        is_path = is_file_name or ("/" in row and os.path.exists(row))  # noqa: PTH110 (any text)
    if is_path:
        raise ConfigError(
            f"input: row 0 is {str(row)!r}, a path. Give several files as a pattern or a folder, "
            'such as documents/*.jsonl; or give texts that look like paths as {"text": ...}.'
        )


def _refuse_other_keys(value: object) -> None:
    """Raises ValueError for a key that JSON would make a text, perhaps equal to another key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {safe_repr(key)} is no text")
            _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item)


def _compared(path: Path, is_equal: bool) -> Path:
    if not is_equal:
        raise ConfigError(
            f"input: its rows differ from {path}, with which the run has begun. Give the same "
            f"rows, another run_folder, or {path} as the input."
        )
    return path
