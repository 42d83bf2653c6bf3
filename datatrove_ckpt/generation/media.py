"""Large bytes in documents are not written where nobody wants them."""

from __future__ import annotations

from collections.abc import Callable

from datatrove.data import Document, Media
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.writers import writes_media
from datatrove_ckpt.rollouts import Rollout


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
