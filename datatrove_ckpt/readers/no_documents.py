"""Explains an input that has content but no document: what its first row looks like, and which setting to change.

Used when nothing was found, so the file is opened once more and as little as possible is assumed about it.
"""

from __future__ import annotations

import codecs
import csv
import io
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from datatrove.io import DataFolder
from datatrove.pipeline.readers import CSVReader, IpcReader, ParquetReader
from fsspec.spec import AbstractBufferedFile

from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.compressed import codec_of, decompressed

if TYPE_CHECKING:
    from datatrove.pipeline.readers.base import BaseDiskReader

_BLOCK = 2**16
_SHOWN_CHARACTERS = 60
_SHOWN_KEYS = 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "bz2": ".bz2", "xz": ".xz", "zip": ".zip"}
_ARRAY_ADVICE = "Write one object per line (jq -c '.[]' FILE), or move the file out of the folder."
_RUN_AGAIN = "Correct that, and run the same command again."


class NoDocument(InputError):
    """No row of a file is a document, and its content tells why."""


@dataclass(frozen=True)
class FirstRow:
    """The first row of a file, or the beginning of what is no row.

    Attributes:
        row: the row, if it is one.
        text: the first characters that are not blank.
        compression: the compression that the bytes show, although the reader did not decompress them.
        table: "Parquet" or "Arrow" if the bytes show such a file, and the reader reads another format.
    """

    row: dict[str, Any] | None = None
    text: str = ""
    compression: str | None = None
    table: str | None = None


def refuse_file_without_documents(reader: BaseDiskReader, name: str, damaged: bool) -> None:
    """For a reader that found no document at all, and a file of its input that is not empty.

    A file without rows is accepted, and so is one whose rows have an empty text: nothing is wrong with the settings.

    Args:
        damaged: one of its lines was no JSON object.

    Raises:
        NoDocument: always, but for such a file.
    """
    first = first_row(reader, name)
    if first == FirstRow():
        return
    has_own_adapter = reader.adapter != reader._default_adapter
    row = first.row or {}
    if not (damaged or has_own_adapter) and reader.text_key in row and not row[reader.text_key]:
        return
    raise NoDocument(
        f"This task's input holds no document, although {name!r} in {reader.data_folder.path} is not empty. "
        f"{explain(reader, first)}"
    )


def refuse_array(reader: BaseDiskReader, name: str) -> NoReturn:
    """For a file with a line that is, or begins, a JSON array of objects.

    Raises:
        InputError: always.
    """
    raise InputError(f"The input file {name!r} in {reader.data_folder.path} holds a JSON array. {_ARRAY_ADVICE}")


def explain(reader: BaseDiskReader, first: FirstRow) -> str:
    """What the file looks like, and what to do."""
    kind = type(reader).__name__
    if first.compression is not None:
        return (
            f"It is compressed with {first.compression}, and was read without decompressing it: its name should end in "
            f"{_SUFFIXES[first.compression]}, or set compression. {_RUN_AGAIN}"
        )
    if first.table is not None:
        use = "ParquetReader" if first.table == "Parquet" else "IpcReader"
        return f"This is a file in the format {first.table}: use {use}, or move the file out of the folder."
    if first.row is not None:
        keys = ", ".join(map(repr, list(first.row)[:_SHOWN_KEYS]))
        if reader.adapter != reader._default_adapter:
            return f"The adapter found no text in any row. The first row has the keys {keys}. {_RUN_AGAIN}"
        return f"No row has a text under text_key={reader.text_key!r}. The first row has the keys {keys}. {_RUN_AGAIN}"
    advice = f"Write a format that {kind} reads, choose another reader, or move the file out of the folder."
    if first.text.startswith("["):
        advice = f"It seems to be a JSON array. {_ARRAY_ADVICE}"
    return f"It begins with {first.text[:_SHOWN_CHARACTERS]!r}. {advice}"


def first_row(reader: BaseDiskReader, name: str) -> FirstRow:
    """Looks at the beginning of a file. Empty if all of it is blank, or if it is a table without rows."""
    folder: DataFolder = reader.data_folder
    with folder.open(name, "rb", compression=None) as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):  # the last one: a stream of Arrow
            is_parquet = magic.startswith(b"PAR1")
            if not isinstance(reader, ParquetReader if is_parquet else IpcReader):
                return FirstRow(table="Parquet" if is_parquet else "Arrow")
            return FirstRow(row=_first_table_row(file, magic))
        codec = codec_of(name, getattr(reader, "compression", "infer"))
        if codec is None or not magic:
            found = next((found for start, found in _MAGIC.items() if magic.startswith(start)), None)
            return FirstRow(compression=found) if found else _first_text_row(file, reader)
        return _first_text_row(io.BufferedReader(decompressed(file, codec, name), _BLOCK), reader)


def _first_text_row(file: Any, reader: BaseDiskReader) -> FirstRow:
    if isinstance(reader, CSVReader):
        return FirstRow(row=next(csv.DictReader(codecs.iterdecode(file, "utf-8", "replace")), None))
    at_most = () if isinstance(file, AbstractBufferedFile) else (_BLOCK,)  # fsspec's readline takes no size
    while line := file.readline(*at_most):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            break
    with suppress(orjson.JSONDecodeError):
        row = orjson.loads(line)
        if isinstance(row, dict):
            return FirstRow(row=row)
    return FirstRow(text=line.decode(errors="replace").strip())


def _first_table_row(file: Any, magic: bytes) -> dict[str, Any] | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    batches: Any
    if magic.startswith(b"PAR1"):
        batches = pq.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=1)
    elif magic.startswith(b"\xff"):
        batches = pa.ipc.open_stream(file)
    else:
        table = pa.ipc.open_file(file)
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    for batch in batches:
        if batch.num_rows:
            row: dict[str, Any] = batch.slice(0, 1).to_pylist()[0]
            return row
    return None
