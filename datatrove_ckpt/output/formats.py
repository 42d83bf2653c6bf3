"""Describes the formats of output files that can be read again.

Files of other formats are also written, published and compared by their hashes. Every command
imports this module, so a format imports its libraries in its methods.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import orjson

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.common.lazy_pyarrow import pa, pq

if TYPE_CHECKING:
    import datasets
    from datatrove.io import DataFolder
    from datatrove.pipeline.writers.disk_base import DiskWriter

ParsedRows = Iterator[tuple[JsonObject | None, bytes]]

RESULTS = "rollout_results"
"""The usual ``metadata_key``."""
_BLOCK = 1 << 20


class Format:
    """The format of the files of one writer, with a row for each document.

    Attributes:
        suffix: suffix of file names, before the suffix of a compression. The short form omits the
            dot.
        compressions: suffixes in the short form; none if the format compresses its content.
        loader: name in ``datasets.load_dataset``, with ``load_options``, as code.
    """

    writer: str
    module = "datatrove.pipeline.writers"
    suffix: str
    compressions: tuple[str, ...] = (".gz", ".zst")
    loader: str
    load_options = ""

    def settings(self, has_columns: bool) -> JsonObject:
        """Returns the writer's settings in the short form.

        Args:
            has_columns: whether each key of the metadata is a column, unlike in older runs.
        """
        return {"expand_metadata": has_columns, "compression": "infer"}

    @property
    def writer_class(self) -> Any:
        return getattr(import_module(self.module), self.writer)

    def is_written_by(self, writer: DiskWriter) -> bool:
        ours = self.writer_class
        if not isinstance(writer, ours):
            return False
        kind = type(writer)
        return all(
            getattr(kind, method, None) is getattr(ours, method, None)
            for method in ("_write", "_write_batch")
        )

    def open(self, folder: DataFolder, path: str) -> Any:
        compression = "infer" if self.compressions else None
        return folder.open(path, "rb", compression=compression)

    def count(self, file: IO[bytes]) -> int:
        return sum(1 for _ in self.rows(file))

    def dataset(self, files: list[str]) -> datasets.Dataset:
        import datasets

        return datasets.load_dataset(self.loader, data_files=files, split="train")

    def rows(self, file: IO[bytes], with_media: bool = False) -> ParsedRows:
        """Yields each row with its line; None for a torn line. The line is empty if the format has
        no lines.

        Args:
            with_media: whether to read the media column of a table.
        """
        raise NotImplementedError


class Jsonl(Format):
    writer = "JsonlWriter"
    suffix = ".jsonl"
    loader = "json"

    def count(self, file: IO[bytes]) -> int:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))

    def rows(self, file: IO[bytes], with_media: bool = False) -> ParsedRows:
        # zstandard's stream gives only blocks; other streams give all lines before damage.
        lines = file if isinstance(file, io.IOBase) else io.BufferedReader(file)  # type: ignore[type-var]
        for line in lines:
            try:
                row = loads(line)
            except orjson.JSONDecodeError:
                row = None
            if not isinstance(row, dict) or not line.endswith(b"\n"):
                row = None
            yield row, line


class Parquet(Format):
    writer = "ParquetWriter"
    suffix = ".parquet"
    compressions = ()
    loader = "parquet"

    def settings(self, has_columns: bool) -> JsonObject:
        compression = "snappy"
        if has_columns:  # a third less room than with snappy
            compression = "zstd"
        return {"expand_metadata": True, "compression": compression}

    def count(self, file: IO[bytes]) -> int:
        return int(pq.ParquetFile(file).metadata.num_rows)

    def rows(self, file: IO[bytes], with_media: bool = False) -> ParsedRows:
        from datatrove_ckpt.output.arrow_types import with_float32

        with pq.ParquetFile(file) as parquet:
            columns = [name for name in parquet.schema_arrow.names if with_media or name != "media"]
            has_float32 = "float" in str(parquet.schema_arrow)
            size = 10 if "media" in columns else 1000
            for batch in parquet.iter_batches(size, columns=columns):
                kind = pa.struct(list(batch.schema))
                for row in batch.to_pylist():
                    if has_float32:
                        row = with_float32(row, kind)
                    yield row, b""


class Csv(Format):
    """CSV files: cells are read as texts, except the results, which are JSON."""

    writer = "CsvWriter"
    module = "datatrove_ckpt.output.csv_writer"
    suffix = ".csv"
    compressions = ()
    loader = "csv"
    load_options = ", converters=dict.fromkeys(range(9999), str), na_filter=False"

    def settings(self, has_columns: bool) -> JsonObject:
        return {"expand_metadata": True}

    def rows(self, file: IO[bytes], with_media: bool = False) -> ParsedRows:
        csv.field_size_limit(2**31 - 1)  # of the process: 128 kB, unless a reader was imported
        with io.TextIOWrapper(file, "utf-8", newline="") as lines:
            for cells in csv.DictReader(lines):
                row = dict(cells)
                if RESULTS in row:
                    row[RESULTS] = from_cell(row[RESULTS]) if row[RESULTS] else None
                yield row, b""


def from_cell(results: object) -> object:
    if isinstance(results, str):
        with suppress(orjson.JSONDecodeError):
            return loads(results.encode())
    return results


JSONL = Jsonl()
PARQUET = Parquet()
CSV = Csv()
FORMATS: tuple[Format, ...] = (JSONL, PARQUET, CSV)
BY_NAME = {
    f"{output_format.suffix[1:]}{compression}": output_format
    for output_format in FORMATS
    for compression in ("", *output_format.compressions)
}
"""The formats by their names in the short form."""


def is_known(writer: str) -> bool:
    """Whether the writer in a ``run.json`` has a format. Early versions omitted the package."""
    names = {output_format.writer for output_format in FORMATS}
    return writer.removeprefix("datatrove.").removeprefix("datatrove_ckpt.") in names


def format_of_file(name: str) -> Format | None:
    file_name = f"{name.rpartition('/')[2]}."
    for output_format in FORMATS:
        if f"{output_format.suffix}." in file_name:
            return output_format
    return None
