"""Tables as files of each format that readers read."""

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

from datatrove_ckpt.readers import (
    HuggingFaceDatasetReader,
    IpcReader,
    JsonlReader,
    ParquetReader,
    position_state,
)
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


def parquet(first, count, size=10):
    chance = np.random.default_rng(first)
    rows = [
        {"id": str(i), "text": f"{i} {chance.bytes(size).hex()}", "n": i}
        for i in range(first, first + count)
    ]
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(rows),
        buffer,
        row_group_size=4,
        compression="none",
        use_dictionary=False,
    )
    return buffer.getvalue()


def resume(options, document, rank=0, tasks=1):
    reader = HuggingFaceDatasetReader(**options)
    reader.load_state_dict(position_state(document))
    return list(reader.run(None, rank, tasks))


ODD_LINES = [
    b'{"text": "plain", "id": "own id", "lang": "en"}\n',
    b'{"text": "carriage return and line feed"}\r\n',
    b"\n",
    b"   \t\x0b \r\n",
    b'{"text": "", "id": "empty text"}\n',
    b'{"id": "no text"}\n',
    b'{"text": "torn\n',
    b"not json at all\n",
    '{"text": "line\u2028separator, next\u0085line, form feed \\f, \\u2028"}\n'.encode(),
    b'{"text": "old mac"}\r{"text": "second of one byte line"}\r\r\n',
    b'{"text":\r "two lines for datatrove"}\n',
    b'{"text": "metadata", "metadata": {"a": [1, null], "file_path": "mine"}, "b": {"c": 1.5}}\n',
    b'{"text": "metadata as text", "metadata": "{\\"a\\": 1}"}\n',
    b'{"text": "metadata of another kind", "metadata": 3}\n',
    b'{"text": "media", "media": [{"id": "m", "type": 0, "url": "u", "media_bytes": "AAEC"},'
    b' {"id": "n", "type": 1, "url": "v", "media_bytes": null}]}\n',
    b'{"text": "\\ud83d\\ude00", "id": 7}\n',
    b'{"text": "no final line feed"}',
]


def rows(count, first=0):
    """Every seventh row has no text. No row has an id, so the default ids are compared."""
    return [
        {"text": f"text {i}" if i % 7 else "", "name": f"n{i}", "number": i}
        for i in range(first, first + count)
    ]


# That of a codec is tried for each character there is: three seconds.
texts = st.text(st.characters(exclude_categories=["Cs"]))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts | st.just("$py"), inner),
    max_leaves=8,
)
