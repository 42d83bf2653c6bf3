"""Explains an input that has content but no document: its first row, and the setting to change."""

import codecs
import csv
from contextlib import closing, suppress
from typing import IO, NoReturn, cast

import orjson
from datatrove.pipeline.readers import CSVReader, IpcReader, ParquetReader
from datatrove.pipeline.readers.base import BaseDiskReader
from fsspec.spec import AbstractBufferedFile

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import DocumentNotSerializable, InputError
from datatrove_ckpt.readers.block_file import ArrowBlocks, ParquetBlocks, TableFile
from datatrove_ckpt.readers.compressed import open_content
from datatrove_ckpt.readers.inputs import FileProgress

MAX_LINE_BYTES = 2**28
"""Limit of a JSONL line or CSV field, in bytes. A small compressed file of zeros is a huge line."""
# Python's own limit, for the whole process, is 128 kB.
csv.field_size_limit(MAX_LINE_BYTES)
_ARRAY_ADVICE = "Write one object per line (jq -c '.[]' FILE), or move the file away."
_RUN_AGAIN = "Correct that, and run again."


class NoDocuments(InputError):
    """No row of a file is a document, and the content shows why."""


def refuse_file_without_documents(reader: BaseDiskReader, name: str, damaged: bool) -> None:
    """Refuses a file that is not empty, of a reader that found no document at all.

    Raises:
        NoDocuments: always, except for a file without rows, or whose rows have an empty text.
    """
    folder = reader.data_folder.path
    text = explain(reader, name, damaged)
    if text:
        raise NoDocuments(
            f"This task's input holds no document, although {name!r} in {folder} is not empty. "
            f"{text}"
        )


def read_line(file: IO[bytes], size: int = MAX_LINE_BYTES) -> bytes:
    """Reads a line, or its first ``size`` bytes; fsspec's buffered files ignore ``size``."""
    if isinstance(file, AbstractBufferedFile):
        return bytes(file.readline())
    return bytes(file.readline(size))


def refuse_array(reader: BaseDiskReader, name: str) -> NoReturn:
    raise InputError(
        f"The input file {name!r} in {reader.data_folder.path} holds a JSON array. {_ARRAY_ADVICE}"
    )


def explain(reader: BaseDiskReader, name: str, damaged: bool = False) -> str:
    """Describes a file without documents, with advice; "" if it has no rows, or only empty
    texts.
    """
    if isinstance(reader, IpcReader | ParquetReader):
        file: TableFile
        if isinstance(reader, ParquetReader):
            file = ParquetBlocks(reader.data_folder, name)
        else:
            file = ArrowBlocks(reader.data_folder, name)
        with closing(file):
            for block in file.blocks((), FileProgress(), max_rows=1):
                for row, _, _, _ in block.rows:
                    return _explain_row(reader, name, cast("JsonObject", row), damaged)
        return ""
    compression = getattr(reader, "compression", "infer")
    encoding = getattr(reader, "encoding", None)
    with open_content(reader.data_folder, name, compression, encoding) as content:
        return _explain_text(content, reader, name, damaged)


def _explain_row(reader: BaseDiskReader, name: str, row: JsonObject | None, damaged: bool) -> str:
    if row is None:
        return ""
    keys = ", ".join(map(repr, list(row)[:20]))
    if damaged:
        try:
            reader.get_document_from_dict(dict(row), name, 0)
        except DocumentNotSerializable as error:
            return f"{error} {_RUN_AGAIN}"
    if reader.adapter != reader._default_adapter:
        return (
            f"The adapter found no text in any row. The first row has the keys {keys}. {_RUN_AGAIN}"
        )
    if not damaged and reader.text_key in row and not row[reader.text_key]:
        return ""
    advice = "Set text_key to the one with the text, or to null if the rollout needs none"
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
            advice = f"{key!r} holds chats: set prompt_column to it, leave prompt out"
    return (
        f"No row has a text under text_key={reader.text_key!r}. The first row has the keys "
        f"{keys}. {advice}, and run again."
    )


def _explain_text(file: IO[bytes], reader: BaseDiskReader, name: str, damaged: bool) -> str:
    if isinstance(reader, CSVReader):
        lines = codecs.iterdecode(file, "utf-8-sig", "replace")
        return _explain_row(reader, name, next(csv.DictReader(lines), None), damaged)
    while line := read_line(file, 2**16):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            break
    with suppress(orjson.JSONDecodeError):
        row = orjson.loads(line)
        if isinstance(row, dict):
            return _explain_row(reader, name, row, damaged)
    text = line.decode(errors="replace").strip()
    advice = (
        f"Write UTF-8 in a format that {type(reader).__name__} reads, choose another reader or "
        "compression, or move the file away."
    )
    if text.startswith("["):
        advice = f"It seems to be a JSON array. {_ARRAY_ADVICE}"
    return text and f"It begins with {text[:60]!r}. {advice}"
