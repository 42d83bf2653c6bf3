"""The output of datatrove's default adapter, made without its deep copy.

``dataclasses.asdict`` copies everything down to the last string (half of the cost of publishing, measured), so that a
writer may change the dict it gets. A document that comes out of a journal has no other owner, so new containers are
enough. The result is the same, value for value and key for key; a test compares them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.documents import field_names

_SCALARS = (str, int)
_DEFAULT = DiskWriter._default_adapter


def use_shallow_adapter(writer: DiskWriter) -> None:
    """Replaces the writer's adapter if it is datatrove's default one."""
    if getattr(writer.adapter, "__func__", None) is _DEFAULT:
        writer.adapter = MethodType(_shallow_adapter, writer)


# ``Any`` below: a document's metadata holds whatever a reader or a rollout puts there.


def _shallow_adapter(writer: DiskWriter, document: Document) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if document.text:
        data["text"] = document.text
    if document.id:
        data["id"] = document.id
    if document.media:
        data["media"] = [_copy_containers(media) for media in document.media]
        if not writer.save_media_bytes:
            for media in data["media"]:
                media["media_bytes"] = None
    if document.metadata:
        metadata = _copy_containers(document.metadata)
        if writer.expand_metadata:
            data |= metadata
        else:
            data["metadata"] = metadata
    return data


def _copy_containers(value: Any) -> Any:
    """The value with new containers, and with dicts instead of the two dataclasses that ``documents.decode`` makes."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _SCALARS else _copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [_copy_containers(item) for item in value]
    if kind is InferenceResult or kind is Media:
        return {name: _copy_containers(getattr(value, name)) for name in field_names(kind)}
    return value
