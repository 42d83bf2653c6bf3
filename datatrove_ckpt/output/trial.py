"""A trial: can the user's writer write this document?

The journal keeps more than a writer can write: a set, an integer beyond 64 bits, keys that are no strings. If that
showed only when a chunk is published, its rank could never end. So a document with anything but plain JSON in it is
written to memory first, while it can still become a dead letter.
"""

from __future__ import annotations

import copy
import io
from typing import Any

from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.pipeline.writers.parquet import ParquetWriter

from datatrove_ckpt.documents import decode
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.formatting import safe_repr, safe_text
from datatrove_ckpt.output.adapter import use_shallow_adapter
from datatrove_ckpt.output.column_types import infers_schema, trial_schema


class _InMemory:
    """In place of a writer's file manager: one file, which is thrown away. ``Any``, as datatrove's has no types."""

    def __init__(self, mode: str) -> None:
        self._file = io.BytesIO() if "b" in mode else io.StringIO()

    def get_file(self, filename: str) -> Any:
        return self._file

    def get_open_files(self) -> dict[str, Any]:
        return {}

    def pop(self, filename: str) -> Any:
        return self._file

    def close(self) -> None:
        pass


class Trial:
    """Writes documents to memory with a copy of the user's writer, which must never have been opened."""

    def __init__(self, writer: DiskWriter, rank: int) -> None:
        self._writer = writer
        self._rank = rank

    def check(self, data: bytes, doc_id: str) -> None:
        """Args: ``data``: an encoded document.

        Raises:
            DocumentNotSerializable: the writer cannot write the document.
        """
        try:
            files = self._writer.output_mg
            writer = copy.deepcopy(self._writer, {id(files): _InMemory(files.mode)})
            use_shallow_adapter(writer)
            document = decode(data)
            if infers_schema(writer):
                writer.schema = trial_schema(writer, document)
            writer.write(document, rank=self._rank, chunk_index="00000")
            if type(writer) is ParquetWriter:  # it writes at the end; another writer's end may be a commit on the hub
                writer.close()
        except Exception as error:
            raise DocumentNotSerializable(
                f"Document {safe_repr(doc_id)} holds a value that {type(self._writer).__name__} cannot write: "
                f"{type(error).__name__}: {safe_text(error)}. Let the rollout return and set JSON values, or give the "
                "writer an adapter."
            ) from error
