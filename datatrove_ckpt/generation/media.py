"""What a rank does with large bytes in documents: a payload lives once, and is not written where nobody wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datatrove.data import Document, Media
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.writers import writes_media
from datatrove_ckpt.rollouts import Rollout

_SHARED = frozenset({str, bytes, int, float, bool, type(None)})


def shared_copy(document: Document) -> Document | None:
    """A copy with containers of its own, which shares texts and bytes. None: it holds something else."""
    try:
        return Document(document.text, document.id, _copied(document.media), _copied(document.metadata))
    except (TypeError, RecursionError):
        return None


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _SHARED:
        return value
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind is Media:
        return Media(*(_copied(getattr(value, name)) for name in Media.__slots__))
    raise TypeError(kind)


def media_dropper(rollout_fn: Rollout, writer: DiskWriter) -> Callable[[Document], None] | None:
    """What removes the bytes of media from a finished document, whose other fields stay; None: its writer saves them.

    They would be in the journal, 13 MB in JSON for a picture of 10 MB, and then be left out by the writer.
    """
    if writes_media(writer):
        return None
    column: Callable[[Document], None] | None = getattr(rollout_fn, "drop_sent", None)

    def drop(document: Document) -> None:
        for one in document.media or ():
            if isinstance(one, Media):
                one.media_bytes = None
            elif isinstance(one, dict) and one.get("media_bytes") is not None:
                one["media_bytes"] = None
        if column is not None:
            column(document)

    return drop
