"""Builds request bodies with media, and limits the bodies of answers.

A thousand requests with pictures of 10 MB may be in flight. So a body refers to the bytes, and
encodes them piece by piece, as fast as the server takes them.
"""

from __future__ import annotations

import zlib
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import ClassVar

import orjson
import xxhash

from datatrove_ckpt.common.memory import media_bytes

_PIECE = 3 << 14  # bytes; a multiple of three, so that the pieces join


class RequestBody:
    """A body in JSON.

    Args:
        texts: the JSON before, between and after the media.
        media: bytes that become base64 between the texts.
    """

    __slots__ = ("_media", "_size", "_texts")

    def __init__(self, texts: Sequence[bytes], media: Sequence[bytes]) -> None:
        self._texts = texts
        self._media = media
        self._size = sum(map(len, texts)) + sum(-(-len(data) // 3) * 4 for data in media)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        for text, data in zip_longest(self._texts, self._media, fillvalue=b""):
            yield text
            for start in range(0, len(data), _PIECE):
                yield b2a_base64(data[start : start + _PIECE], newline=False)

    @property
    def text(self) -> bytes:
        return b"".join(self._texts)

    def with_media_hashed(self) -> bytes:
        hashes = [xxhash.xxh3_64_digest(data) for data in self._media]
        pieces = zip_longest(self._texts, hashes, fillvalue=b"")
        return b"".join(piece for pair in pieces for piece in pair)

    def ended(self, end: bytes) -> RequestBody:
        return RequestBody([*self._texts[:-1], self._texts[-1][:-1] + end], self._media)


AnyBody = bytes | RequestBody


def with_field(body: AnyBody, name: bytes, value: str) -> AnyBody:
    """Adds a field to a body that has fields."""
    end = b',"%b":%b}' % (name, orjson.dumps(value))
    if isinstance(body, RequestBody):
        return body.ended(end)
    return body[:-1] + end


MAX_ANSWER_BYTES = 1 << 28
LARGE_ANSWER_BYTES = 1 << 20


class LargeAnswer:
    """An answer that is arriving.

    All answers of more than 1 MiB in this process share an eighth of its memory.

    Args:
        coding: Content-Encoding; gzip and deflate are decompressed.
    """

    _sizes: ClassVar[dict[int, int]] = {}

    def __init__(self, coding: bytes = b"") -> None:
        is_compressed = coding.lower() in (b"gzip", b"x-gzip", b"deflate")
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32) if is_compressed else None

    def __del__(self) -> None:
        self._sizes.pop(id(self), None)

    def append(self, body: bytearray, data: bytes) -> str:
        for start in range(0, len(data), _PIECE):  # 1 MB may become a gigabyte
            piece = data[start : start + _PIECE]
            body += self._decompressed(piece)
            if reason := self.refusal(len(body)):
                return reason
        return ""

    def _decompressed(self, data: bytes) -> bytes:
        if self._stream is None:
            return data
        try:
            return self._stream.decompress(data)
        except zlib.error:  # it is not compressed
            return data

    def refusal(self, size: int) -> str:
        """Returns the reason if an answer of ``size`` bytes is refused, else "". The oldest answer
        may use the whole budget, so it always completes.
        """
        if size <= LARGE_ANSWER_BYTES:
            return ""
        self._sizes[id(self)] = size
        reason = ""
        if size > MAX_ANSWER_BYTES:
            reason = f"the body is longer than {MAX_ANSWER_BYTES} bytes"
        elif sum(self._sizes.values()) > media_bytes() // 2 and next(iter(self._sizes)) != id(self):
            reason = (
                f"{len(self._sizes)} large answers at one time need over an eighth of the memory"
            )
        if reason:
            del self._sizes[id(self)]
        return reason
