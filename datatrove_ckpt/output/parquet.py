"""Writes the Parquet files of a chunk with one schema, in the batches of datatrove's ParquetWriter.

datatrove opens a file with the schema of its first document, and a dictionary for each column. Here
pyarrow writes the rows. For an equal schema the bytes equal datatrove's; but no column has a
dictionary in files with vectors, which outweigh the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.arrow_types import Row, Schema, for_arrow, has_other_form
from datatrove_ckpt.output.file_managers import OutputStream

RecordBatch = Any
Inspect = Callable[[list[Row]], object]
"""Raises an error for rows that must not be written."""


class _Table:
    def __init__(self, file: OutputStream, writer: _BatchWriter) -> None:
        import pyarrow.parquet as pq

        self._writer = writer
        self._rows: list[Row] = []
        self._parquet = pq.ParquetWriter(
            file,
            schema=writer.schema,
            compression=writer.compression,
            use_content_defined_chunking=writer.use_content_defined_chunking,
            write_page_index=writer.write_page_index,
            use_dictionary=writer.dictionary,
        )

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == self._writer.batch_size:
            self._write_batch()

    def close(self) -> None:
        if self._rows:
            self._write_batch()
        self._parquet.close()

    def _write_batch(self) -> None:
        rows = self._rows
        self._rows = []
        self._parquet.write_batch(record_batch(rows, self._writer.schema, self._writer.inspect))


def record_batch(rows: list[Row], schema: Schema, inspect: Inspect) -> RecordBatch:
    """Converts the rows, which it may change, to Arrow, after ``inspect`` has seen them."""
    import pyarrow as pa

    for field in filter(lambda field: has_other_form(field.type), schema):
        for row in rows:
            row[field.name] = for_arrow(row.get(field.name), field.type)
    inspect(rows)
    return pa.RecordBatch.from_pylist(rows, schema=schema)


class _BatchWriter(ParquetWriter):  # type: ignore[misc]
    inspect: Inspect
    dictionary: bool

    def _write(self, document: Row, file_handler: OutputStream, filename: str) -> None:
        if file_handler.table is None:
            file_handler.table = _Table(file_handler, self)
        file_handler.table.add(document)

    def close_file(self, filename: str) -> None:
        DiskWriter.close_file(self, filename)  # ParquetWriter has no batch of the file

    def close(self) -> None:
        for filename in list(self.output_mg.get_open_files()):
            self.close_file(filename)


def write_in_batches(writer: DiskWriter, inspect: Inspect, plain_vectors: bool) -> None:
    """Makes a copied ParquetWriter, which has a schema and a file manager of ours, write its rows
    here.

    Args:
        inspect: gets the rows of each batch before they are written.
        plain_vectors: whether files with vectors have no dictionaries.
    """
    kind = type(writer)
    # A user's class takes precedence over ours.
    ours: type = _BatchWriter
    if kind is not ParquetWriter:
        ours = type(kind.__name__, (kind, _BatchWriter), {})
    writer.__class__ = ours
    writer.inspect = inspect
    writer.dictionary = not plain_vectors or "fixed_size_list" not in str(writer.schema)


def prepare_arrow(writer: DiskWriter) -> None:
    """Chooses Arrow's allocator for a ParquetWriter, unless the user has chosen one. Call it before
    the loop runs.

    Arrow converts a batch with the GIL held. With the default allocator, mimalloc, 1000 documents
    of 2 kB may block the event loop for 20 to 50 ms, with the system's for 1 to 4 ms (measured,
    Arrow 26).
    """
    if not isinstance(writer, ParquetWriter):
        return
    import pyarrow as pa

    if (
        pa.default_memory_pool().backend_name == "mimalloc"
        and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ
    ):
        pa.set_memory_pool(pa.system_memory_pool())
    pa.array([""])  # imports pandas, if it is installed
