"""The formats of output files that can be read again: ``verify --full`` counts rows,
``finished_from`` copies them.

Other files are written, published and compared by their hashes all the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import IO, Any, ClassVar, TypeAlias

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.arrow_types import DataType, Row
from datatrove_ckpt.output.names import writer_name

Rows: TypeAlias = Iterator[tuple[Row | None, bytes]]

_BLOCK = 1 << 20  # bytes
_OWN_FIELDS = ("text", "id", "media", "metadata")


class Format:
    """What the files of one writer hold: a row for each document.

    Attributes:
        writer: the class, as YAML files and ``run.json`` name it.
        suffix: of file names, before that of a compression.
        is_compressed: by itself.
    """

    writer: ClassVar[type[DiskWriter]]
    suffix: ClassVar[str]
    is_compressed: ClassVar[bool] = False

    def is_written_by(self, writer: DiskWriter) -> bool:
        """Whether the writer has no other method for rows than datatrove's class."""
        if not isinstance(writer, self.writer):
            return False
        kind = type(writer)
        return all(
            getattr(kind, one, None) is getattr(self.writer, one, None)
            for one in ("_write", "_write_batch")
        )

    def count(self, file: IO[bytes]) -> int:
        """Returns how many rows a file has. ``file``: decompressed, unless ``is_compressed``."""
        raise NotImplementedError

    def rows(self, file: IO[bytes]) -> Rows:
        """Yields each row, without media, with its line; None for a torn line. The line is empty if
        the format has no lines.
        """
        raise NotImplementedError


class Jsonl(Format):
    writer = JsonlWriter
    suffix = ".jsonl"

    def count(self, file: IO[bytes]) -> int:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))

    def rows(self, file: IO[bytes]) -> Rows:
        # zstandard's stream gives only blocks; other streams give all lines before damage.
        lines: Iterable[bytes] = file if isinstance(file, io.IOBase) else io.BufferedReader(file)  # type: ignore[type-var]
        for line in lines:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            if not isinstance(row, dict) or not line.endswith(b"\n"):
                row = None
            yield row, line


class Parquet(Format):
    writer = ParquetWriter
    suffix = ".parquet"
    is_compressed = True

    def count(self, file: IO[bytes]) -> int:
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)

    def rows(self, file: IO[bytes]) -> Rows:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as parquet:
            wanted = [name for name in parquet.schema_arrow.names if name != "media"]
            has_float32 = "float" in str(parquet.schema_arrow)
            for batch in parquet.iter_batches(1000, columns=wanted):
                kind = pyarrow.struct(list(batch.schema))
                for row in batch.to_pylist():
                    if has_float32:
                        row = _with_float32(row, kind)
                    yield row, b""


def _with_float32(value: Any, kind: DataType) -> Any:
    """Returns the value with numbers and vectors of float32 as numpy's: writers keep that type."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: _with_float32(value[field.name], field.type) for field in kind}
    if types.is_float32(kind):
        return np.float32(value)
    if not types.is_list(kind):
        return value
    if types.is_float32(kind.value_type):
        return np.asarray(value, np.float32)
    return [_with_float32(item, kind.value_type) for item in value]


def document_of(row: Row) -> Document:
    """Returns the row's document, also from columns of metadata."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {name: value for name, value in row.items() if name not in _OWN_FIELDS}
    return Document(row.get("text") or "", str(row.get("id")), metadata=metadata)


JSONL = Jsonl()
PARQUET = Parquet()
FORMATS: tuple[Format, ...] = (JSONL, PARQUET)


def is_known(writer: str) -> bool:
    """Whether the writer that ``run.json`` names has a format.

    Early versions left the package out.
    """
    return any(writer in (writer_name(one.writer), one.writer.__name__) for one in FORMATS)


def format_of_file(name: str) -> Format | None:
    return next((one for one in FORMATS if f"{one.suffix}." in f"{name.rpartition('/')[2]}."), None)
