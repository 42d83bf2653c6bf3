"""Tables as files of each format that readers read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader, SeekingReader

_COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


def write_table(
    path: Path, table: pa.Table, rows: int | None = None, stream: bool = False, **options: Any
) -> None:
    """In the format that the name's end says, in groups of so many rows.

    Args:
        options: those of pyarrow's writer.
    """
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    elif path.suffix == ".arrow":
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(
            path, table.schema, **options
        ) as writer:
            writer.write_table(table, max_chunksize=rows)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist()).encode()
        path.write_bytes(_COMPRESS.get(path.suffix, bytes)(lines))


def reader_of(folder: Path, kind: str, **options: Any) -> SeekingReader:
    """The reader of files whose names end in ``kind``."""
    readers: dict[str, Callable[..., SeekingReader]] = {
        "parquet": ParquetReader,
        "arrow": IpcReader,
    }
    return readers.get(kind, JsonlReader)(folder.as_posix(), **options)
