"""The body of a request that has media in it.

Base64 makes 13 MB of a picture of 10 MB, and a thousand of them are in flight. So such a body is never in memory as a
whole: it holds references to the bytes, and becomes base64 piece by piece, as fast as the server takes it.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

_PIECE = 3 << 14  # bytes: a multiple of three, so that the pieces of base64 are those of the whole


class Body:
    """A body in JSON.

    Args:
        texts: the JSON before, between and after the media, one more than there are media.
        media: what becomes base64 between them.
    """

    __slots__ = ("_media", "_size", "_texts")

    def __init__(self, texts: Sequence[bytes], media: Sequence[bytes]) -> None:
        self._texts, self._media = texts, media
        self._size = sum(map(len, texts)) + sum(-(-len(data) // 3) * 4 for data in media)

    def __len__(self) -> int:
        """Its bytes, as they are sent."""
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        """Its bytes in pieces of up to 64 KiB, and those of the texts."""
        for text, data in zip_longest(self._texts, self._media, fillvalue=b""):
            yield text
            for start in range(0, len(data), _PIECE):
                yield b2a_base64(data[start : start + _PIECE], newline=False)

    @property
    def text(self) -> bytes:
        """The JSON without the media."""
        return b"".join(self._texts)


AnyBody: TypeAlias = bytes | Body
