"""Files that are one JSON object, replaced as a whole, with a checksum of their own: damage is no other setting.

``run.json``, ``job.json``, ``shard.json`` and ``shares.json``. The checksum is that of a line (see ``lines``), so it
comes first in the file. Earlier releases wrote none.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.lines import PREFIX, Json, seal, unseal
from datatrove_ckpt.errors import CheckpointCorrupt

SHARD_VERSION = 2
"""``version`` in ``shard.json``. 1 has no checksum."""


def sealed_json(content: Json, indent: bool = True) -> bytes:
    """A file's bytes. ``indent``: people read it, too."""
    return seal(orjson.dumps(content, option=orjson.OPT_INDENT_2 if indent else None))


def read_sealed(data: bytes, sealed: Collection[int]) -> Json:
    """The JSON object in a file's bytes.

    Args:
        sealed: the values of its ``format`` or ``version`` that have a checksum.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    body = unseal(data)
    if body is None and data.startswith(PREFIX):
        raise ValueError("its checksum is wrong: it is damaged, or was edited")
    content = orjson.loads(data if body is None else body)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if body is None and content.get("format", content.get("version")) in sealed:
        raise ValueError("its checksum is missing: it is damaged, or was edited")
    return content


def sealed_shard(content: Json) -> bytes:
    """The bytes of a ``shard.json``."""
    return sealed_json({"version": SHARD_VERSION, **content}, indent=False)


def read_shard(path: Path) -> Json:
    """The content of ``shard.json``; empty if there is none.

    Raises:
        CheckpointCorrupt: it is damaged, or holds something else.
        StorageFailed: it cannot be read.
    """
    try:
        with explained("read", path):
            return read_sealed(path.read_bytes(), (SHARD_VERSION,)) if path.exists() else {}
    except ValueError as error:
        raise CheckpointCorrupt(
            f"{path} cannot be read ({error}). Restore it from a copy, or remove it: then nothing shows whether the "
            "input of this finished rank changes."
        ) from error
