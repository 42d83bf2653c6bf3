"""Checks whether the user's writer can write a document.

The journal keeps more than a writer can write: a set, an integer beyond 64 bits, keys that are no
strings. So a document that is not plain JSON is first written to memory, while it can still become
a dead letter.
"""

from __future__ import annotations

import copy
import io

from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.pipeline.writers.parquet import ParquetWriter

from datatrove_ckpt.common.formatting import safe_repr, safe_text
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.output.chunk_writing import ColumnTypes, infers_schema
from datatrove_ckpt.output.documents import decode_for
from datatrove_ckpt.output.formats import JSONL


class _InMemory:
    """Stands for a writer's file manager, and keeps nothing."""

    def __init__(self, mode: str) -> None:
        self._file: io.IOBase = io.StringIO()
        if "b" in mode:
            self._file = io.BytesIO()

    def get_file(self, filename: str) -> io.IOBase:
        return self._file

    pop = get_file

    def get_open_files(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


def check_writable(writer: DiskWriter, data: bytes, doc_id: str) -> bool:
    """Writes a document to memory with a copy of the user's writer, which must never have been
    opened.

    Args:
        data: an encoded document.

    Returns:
        Whether the writer can write all documents with float32 arrays, so that these need no trial.

    Raises:
        DocumentNotSerializable: the writer cannot write the document.
    """
    try:
        files = writer.output_mg
        copied = copy.deepcopy(writer, {id(files): _InMemory(files.mode)})
        document = decode_for(copied)(data)
        if infers_schema(copied):
            types = ColumnTypes()
            types.add([copied.adapter(document)])
            copied.schema = types.schema()
        copied.write(document, rank=0, chunk_index="00000")
        if type(copied) is ParquetWriter:  # another writer's end may be a commit on the hub
            copied.close()
        return JSONL.is_written_by(writer) or (
            type(writer) is ParquetWriter and writer.schema is None
        )
    except Exception as error:
        raise DocumentNotSerializable(
            f"Document {safe_repr(doc_id)} holds a value that {type(writer).__name__} cannot "
            f"write: {type(error).__name__}: {safe_text(error)}. Let the rollout return and set "
            "JSON values, or give the writer an adapter."
        ) from error
