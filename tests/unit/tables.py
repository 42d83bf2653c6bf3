"""Tables as files of each format that readers read."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader
from datatrove_ckpt.torch.dataset import batch_rows

_COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}


def write_table(path, table, rows=None, stream=False, **options):
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


def reader_of(folder, kind):
    """The reader of files whose names end in ``kind``."""
    readers = {
        "parquet": ParquetReader,
        "arrow": IpcReader,
    }
    return readers.get(kind, JsonlReader)(folder.as_posix())


def table_rows(table):
    """All rows, as samples of a training."""
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    return [row for batch in batches for row in batch_rows(batch, np.arange(batch.num_rows))]
