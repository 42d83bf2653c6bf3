"""Private parts of other packages that the code relies on. Each test names the code to correct when a part changes."""

from __future__ import annotations

import inspect

from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter


def test_datatroves_writers_write_a_row_in_write() -> None:
    sentence = (
        "datatrove's writers no longer hand a row to _write(document, file_handler, filename), or a batch to "
        "_write_batch. Correct Format.is_written_by in output/formats.py, and _BatchWriter in output/parquet.py."
    )
    assert [*inspect.signature(DiskWriter._write).parameters] == ["self", "document", "file_handler", "filename"], (
        sentence
    )
    assert "_write" in vars(JsonlWriter), sentence
    assert {"_write", "_write_batch"} <= vars(ParquetWriter).keys(), sentence
