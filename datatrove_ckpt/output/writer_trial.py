"""Checks whether the user's writer can write a document.

The journal keeps more than a writer can write: a set, an integer beyond 64 bits, keys that are no
strings. So a document with such values is first written to memory, or checked against a schema,
while it can still become a dead letter.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from string import Template

from datatrove.data import Document
from datatrove.io import OutputFileManager
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.common.formatting import safe_repr, safe_text
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.output import arrow_types, formats
from datatrove_ckpt.output.chunk_writing import ColumnTypes, check_rows, infers_schema
from datatrove_ckpt.output.csv_writer import line
from datatrove_ckpt.output.document_codec import RowsOf, decode_for, is_plain, is_usual, one_row


class _InMemory(OutputFileManager):  # type: ignore[misc]
    """Replaces a writer's file manager, and discards all data."""

    def get_file(self, filename: str) -> io.IOBase:
        file = io.BytesIO() if "b" in self.mode else io.StringIO()
        self._output_files[filename] = file
        return file


@dataclass(eq=False)
class WriterTrial:
    """Checks whether the user's writer, which must never have been opened, can write a document.

    A writer with the rows of datatrove's class makes only the row.

    Attributes:
        is_quick: whether a trial may run in the event loop.
    """

    _writer: DiskWriter
    _input_types: arrow_types.Types
    _rows: RowsOf = one_row

    def __post_init__(self) -> None:
        self._takes_usual = False
        self.is_quick = is_usual(self._writer) and any(
            output_format.is_written_by(self._writer) for output_format in formats.FORMATS
        )
        self._copied = self._copy()

    def is_needed(self, data: bytes) -> bool:
        return not is_plain(data, self._takes_usual)

    def __call__(self, data: bytes, doc_id: str) -> None:
        """Tries an encoded document.

        Raises:
            DocumentNotSerializable: the writer cannot write the document.
        """
        writer = self._writer
        try:
            self._try(data)
        except Exception as error:
            raise DocumentNotSerializable(
                f"Document {safe_repr(doc_id)} holds a value that {type(writer).__name__} cannot "
                f"write: {type(error).__name__}: {safe_text(error)}. Let the rollout return and "
                "set JSON values, or give the writer an adapter."
            ) from error
        self._takes_usual = formats.JSONL.is_written_by(writer) or infers_schema(writer)

    def _copy(self) -> tuple[DiskWriter, Callable[[bytes], Document]]:
        files = self._writer.output_mg
        copied: DiskWriter = copy.deepcopy(
            self._writer, {id(files): _InMemory(files.fs, files.mode)}
        )
        copied.output_filename = Template("")  # the documents of doctor may lack its fields
        return copied, decode_for(copied)

    def _try(self, data: bytes) -> None:
        copied, decode = self._copied
        if not self.is_quick:
            copied, decode = self._copy()
        for document in self._rows(decode(data)):
            if infers_schema(copied):
                row = copied.adapter(document)
                columns = ColumnTypes(self._input_types)
                columns.add([row])
                for name, kind in columns.types.items():
                    arrow_types.to_arrow(kind, [row[name]])
            elif formats.PARQUET.is_written_by(copied):
                check_rows([copied.adapter(document)], copied.schema)
            elif formats.CSV.is_written_by(copied):
                line([*copied.adapter(document).values()])
            else:
                copied.write(document, rank=0, chunk_index="00000")
