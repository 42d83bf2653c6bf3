"""Passes documents to a user's writer without copying them.

datatrove's default adapter copies everything with ``dataclasses.asdict`` (half of the cost of
publishing, measured). A document from a journal has no other owner, and is read with dicts in place
of dataclasses.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from types import MethodType

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.pipeline.writers.jsonl import JsonlWriter

from datatrove_ckpt.output.arrow_types import Row
from datatrove_ckpt.output.documents import (
    as_json,
    decode,
    decode_json,
    decode_plain,
    decode_rows,
    field_names,
    line_of,
)
from datatrove_ckpt.output.formats import JSONL, PARQUET
from datatrove_ckpt.output.names import FileNames, OurTemplate

_DEFAULT = JsonlWriter(".", "${rank}").adapter.__func__
"""The adapter of a writer that was given none."""
_NAMES = field_names(Document)


def has_default_adapter(writer: DiskWriter) -> bool:
    return getattr(writer.adapter, "__func__", None) is _DEFAULT


def is_usual(writer: DiskWriter) -> bool:
    """Whether the writer makes rows of documents as datatrove's do."""
    return has_default_adapter(writer) and _has_default_write(writer)


def _has_default_write(writer: DiskWriter) -> bool:
    return type(writer).write is DiskWriter.write


def decode_for(writer: DiskWriter) -> Callable[[bytes], Document]:
    """Returns how to read the documents that this writer gets. Replaces datatrove's default
    adapter.

    datatrove's JsonlWriter takes no arrays, and gets them as JSON; its ParquetWriter takes those of
    one dimension.
    """
    is_json = JSONL.is_written_by(writer)
    if is_json:
        writer._write = partial(_write_row, writer._write)
    if is_usual(writer):
        writer.adapter = MethodType(_plain_adapter, writer)
        if is_json:
            return decode_json
        if PARQUET.is_written_by(writer):
            return decode_rows
        return decode_plain
    if is_json:
        adapt: Callable[[Document], object] = writer.adapter
        writer.adapter = lambda document: _for_orjson(adapt(document))
    return decode


def _write_row(write: Callable[..., None], row: Row, *place: object) -> None:
    try:
        write(row, *place)
    except TypeError:  # perhaps an integer beyond 64 bits, or a value of a table
        write(_for_orjson(row), *place)


def _for_orjson(value: object) -> object:
    if isinstance(value, dict):
        return {key: _for_orjson(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_orjson(item) for item in value]
    if isinstance(value, np.ndarray):
        return as_json(value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if type(value) is int:
        return orjson.Fragment(str(value))
    return value


def write_for(
    writer: DiskWriter, decode: Callable[[bytes], Document], names: FileNames, chunk_index: int
) -> Callable[[bytes], object]:
    """Returns what writes an encoded document, in the cheapest way that gives the same bytes as
    ``DiskWriter.write``.

    Args:
        writer: a copy, whose stats end with it: they cost as much as the rest.
    """
    writer.output_filename = OurTemplate(names)
    writer.stat_update = _count_nothing
    writer.update_doc_stats = _count_nothing

    def write(data: bytes) -> None:
        document = decode(data)
        writer.write(document, names.rank, **names.keywords(document, chunk_index))

    def write_line(data: bytes) -> None:
        line = line_of(data, writer.expand_metadata)
        if line is None:
            write(data)
        else:
            writer.output_mg.get_file(name).write(line)

    has_lines = type(writer) is JsonlWriter and decode is decode_json
    if not has_lines or names.fields or writer.max_file_size > 0:
        return write
    name = names.fill({"chunk_index": names.chunk_field(chunk_index)})
    return write_line


def _count_nothing(*numbers: object) -> None:
    pass


def writes_media(writer: DiskWriter) -> bool:
    """Whether the writer may save the bytes of media: by its setting, or by code of its own."""
    return not is_usual(writer) or bool(getattr(writer, "save_media_bytes", True))


def _plain_adapter(writer: DiskWriter, document: Document) -> Row:
    data = {}
    for name in _NAMES:
        value = getattr(document, name)
        if value or (name == "id" and value == 0):  # datatrove's leaves out an id of 0, too
            data[name] = value
    if writer.expand_metadata and "metadata" in data:
        data |= data.pop("metadata")
    if not writer.save_media_bytes and "media" in data:
        data["media"] = [{**media, "media_bytes": None} for media in data["media"]]
    return data
