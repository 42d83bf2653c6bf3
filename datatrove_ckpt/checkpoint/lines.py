"""Lines that show whether they are whole: JSON objects whose first key is a checksum of the rest.

A crash tears what was written last: the end of a file may be a part of a line or, after power loss, any bytes. So bad
bytes at the end of a file are a torn tail, which the next attempt cuts off before it appends anything. A bad line with
a good line after it is damage that no crash explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from datatrove_ckpt.errors import CheckpointCorrupt

Json: TypeAlias = dict[str, Any]
"""A JSON object. Its values are ``Any`` because the checkpoint only stores, compares and prints them: a position is
defined by the reader, and an identity by the caller."""

_PREFIX = b'{"xxh":"'
_BODY = len(_PREFIX) + 16 + len(b'",')


def seal(body: bytes) -> bytes:
    """Returns a JSON object's bytes as a line with a checksum."""
    rest = body[1:]
    return b'%s%s",%s\n' % (_PREFIX, xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def unseal(line: bytes) -> bytes | None:
    """Returns the JSON object's bytes without the checksum; None if the line is not whole."""
    if not line.endswith(b"\n") or not line.startswith(_PREFIX):
        return None
    rest = line[_BODY:-1]
    if line[len(_PREFIX) : _BODY] != b'%s",' % xxhash.xxh3_64_hexdigest(rest).encode():
        return None
    return b"{" + rest


@dataclass(slots=True)
class Line:
    """A whole line: its offset and length in bytes (with the newline), and its JSON object."""

    offset: int
    length: int
    body: bytes


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the file's whole lines, up to a torn tail. A missing file has none.

    Raises:
        CheckpointCorrupt: a bad line with a good line after it.
    """
    if not path.exists():
        return
    offset, torn_at = 0, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            body = unseal(raw)
            if body is None:
                torn_at = torn_at or number
            elif torn_at:
                raise CheckpointCorrupt(
                    f"{path}, line {torn_at}: the line is damaged, and whole lines follow it, so no crash did this. "
                    "Restore the file from a copy, or remove the rank's folder to start this rank over."
                )
            else:
                yield Line(offset, len(raw), body)
            offset += len(raw)


def whole_size(lines: list[Line]) -> int:
    """Returns the size of the whole lines in bytes, which is the offset of a torn tail."""
    return lines[-1].offset + lines[-1].length if lines else 0
