"""Lets copies of datatrove's ParquetWriter write rows with a schema that is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.arrow_types import Row, for_arrow, has_other_form

_BATCH = 1000
"""Rows. A writer with huge documents has a smaller ``batch_size``."""


class ShownRows:
    """The adapter of a ParquetWriter's copy: shows its rows, and returns them for Arrow.

    Args:
        show: gets the rows in batches, perhaps after they are written to the staged file.
    """

    def __init__(self, writer: DiskWriter, show: Callable[[list[Row]], object] | None) -> None:
        self._adapter = writer.adapter
        self._show = show
        self._rows: list[Row] = []
        self._size = min(_BATCH, max(1, writer.batch_size))
        self._other_forms = {
            field.name: field.type for field in writer.schema or () if has_other_form(field.type)
        }

    def __call__(self, document: Document) -> Row:
        row: Row = self._adapter(document)
        if self._show is not None:
            self._rows.append(row)
            if len(self._rows) == self._size:
                self.end()
        if not self._other_forms:
            return row
        return row | {
            name: for_arrow(row.get(name), kind) for name, kind in self._other_forms.items()
        }

    def end(self) -> None:
        """Shows the last rows."""
        rows = self._rows
        self._rows = []
        if self._show is not None and rows:
            self._show(rows)


def omit_dictionaries(writer: DiskWriter) -> None:
    """Makes a copied ParquetWriter, which has a schema, open files without dictionaries.

    A dictionary of vectors costs 52 us and 580 bytes for 1024 floats (measured), and vectors
    outweigh other columns.
    """
    import pyarrow.parquet as pq

    write = writer._write

    def write_row(row: Row, file: Any, filename: str) -> None:
        name = filename
        if writer.max_file_size > 0:
            name = writer._get_filename_with_file_id(filename)
        if name not in writer._writers:
            writer._writers[name] = pq.ParquetWriter(
                file,
                schema=writer.schema,
                compression=writer.compression,
                use_content_defined_chunking=writer.use_content_defined_chunking,
                write_page_index=writer.write_page_index,
                use_dictionary=False,
            )
        write(row, file, filename)

    writer._write = write_row


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
