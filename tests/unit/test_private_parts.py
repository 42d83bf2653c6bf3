"""Private parts of other packages that the code relies on. Each test names the code to correct when a part changes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

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


def test_an_abandoned_database_is_left_open_until_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite3"
    code = "import sys, pathlib; from datatrove_ckpt.checkpoint.request_cache import RequestCache"
    code += "; cache = RequestCache(pathlib.Path(sys.argv[1])); cache.abandon(); del cache"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert path.with_name("replay.sqlite3-wal").exists(), (
        "Python's exit has closed the connection, and the log was deleted. Another process may use it: correct "
        "RequestCache.abandon in checkpoint/request_cache.py."
    )
