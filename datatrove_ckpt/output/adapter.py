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

from datatrove_ckpt.documents import decode, decode_plain, field_names

_DEFAULT = DiskWriter._default_adapter
_NAMES = field_names(Document)


def decode_for(writer: DiskWriter) -> Callable[[bytes], Document]:
    """How to read the documents that this writer gets. Replaces its adapter if it is datatrove's default one."""
    if getattr(writer.adapter, "__func__", None) is _DEFAULT and type(writer).write is DiskWriter.write:
        writer.adapter = MethodType(_plain_adapter, writer)
        return decode_plain
    return decode


def write_for(writer: DiskWriter) -> Callable[..., None]:
    """The writer's ``write``; without its stats, if it is datatrove's own and files are not split by size.

    The stats of a copy of a writer end with it, and cost as much as the rest.
    """
    if getattr(writer.write, "__func__", None) is not DiskWriter.write or writer.max_file_size > 0:
        write: Callable[..., None] = writer.write
        return write
    fill, get_file, put, adapt = writer._get_output_filename, writer.output_mg.get_file, writer._write, writer.adapter

    def plain_write(document: Document, **fields: object) -> None:
        name = fill(document, **fields)
        put(adapt(document), get_file(name), name)

    return plain_write


def _plain_adapter(writer: DiskWriter, document: Document) -> dict[str, Any]:  # Any: what a reader or a rollout gives
    data = {name: value for name in _NAMES if (value := getattr(document, name))}
    if writer.expand_metadata and "metadata" in data:
        data |= data.pop("metadata")
    if not writer.save_media_bytes and "media" in data:
        data["media"] = [{**media, "media_bytes": None} for media in data["media"]]
    return data
