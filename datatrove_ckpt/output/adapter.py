"""What datatrove's default adapter and ``DiskWriter.write`` do, without a deep copy, and without stats.

``dataclasses.asdict`` copies everything down to the last string (half of the cost of publishing, measured), so that a
writer may change the dict it gets. A document that comes out of a journal has no other owner, and is read from there
with dicts in place of dataclasses. The result is the same, value for value and key for key; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.pipeline.writers.jsonl import JsonlWriter

from datatrove_ckpt.output.documents import decode, decode_plain, field_names, line_of

_DEFAULT = DiskWriter._default_adapter
_WRITE_LINE = JsonlWriter._write
_NAMES = field_names(Document)


def decode_for(writer: DiskWriter) -> Callable[[bytes], Document]:
    """How to read the documents that this writer gets. Replaces its adapter if it is datatrove's default one."""
    if _is(writer.adapter, _DEFAULT) and _is(writer.write, DiskWriter.write):
        writer.adapter = MethodType(_plain_adapter, writer)
        return decode_plain
    return decode


def write_for(writer: DiskWriter, decode: Callable[[bytes], Document], **fields: object) -> Callable[[bytes], None]:
    """What writes an encoded document, in the cheapest way that gives the same bytes as ``DiskWriter.write``.

    Args:
        writer: a copy, whose stats end with it: they cost as much as the rest.
        decode: what ``decode_for`` has returned for it.
        fields: for ``output_filename``.
    """
    fill, get_file, put, adapt = writer._get_output_filename, writer.output_mg.get_file, writer._write, writer.adapter

    def write(data: bytes) -> None:
        document = decode(data)
        name = fill(document, **fields)
        put(adapt(document), get_file(name), name)

    def write_line(data: bytes) -> None:
        if (line := line_of(data)) is None:
            write(data)
        else:
            get_file(name).write(line)

    if not _is(writer.write, DiskWriter.write) or writer.max_file_size > 0:
        return lambda data: writer.write(decode(data), **fields)
    one_name = getattr(fill, "one_name", False)
    if not (one_name and _is(put, _WRITE_LINE) and _is(adapt, _plain_adapter)) or writer.expand_metadata:
        return write
    name = fill(Document("", ""), **fields)
    return write_line


def _is(method: object, function: object) -> bool:
    return getattr(method, "__func__", None) is function


def _plain_adapter(writer: DiskWriter, document: Document) -> dict[str, Any]:  # Any: what a reader or a rollout gives
    data = {name: value for name in _NAMES if (value := getattr(document, name))}
    if writer.expand_metadata and "metadata" in data:
        data |= data.pop("metadata")
    if not writer.save_media_bytes and "media" in data:
        data["media"] = [{**media, "media_bytes": None} for media in data["media"]]
    return data
