"""An HTTP/1.1 answer, from bytes as they come, in whatever pieces. No sockets here: see ``plain.py``.

Only what it is sure of is an answer: what does not follow RFC 9112 to the letter is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_MAX_HEAD = 1 << 16  # bytes of status line and header, and of a chunk's size line
_MAX_BODY = 1 << 28

_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n\0]*)?(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*)*")
_FIELD = re.compile(
    rb"\r\n(content-length|transfer-encoding|content-encoding|connection|retry-after):[ \t]*([^\r]*)", re.IGNORECASE
)
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


class Response(NamedTuple):
    """An answer. ``body`` is what came of it if the connection broke after a status that is an error anyway."""

    status: int
    body: bytes
    retry_after: str


class BadAnswer(ConnectionError):
    """The server sent something that is no HTTP, or only a part of an answer."""


class AnswerParser:
    """One answer, from bytes as they come, in whatever pieces.

    Attributes:
        status: 0 until the header is there.
        reusable: the connection may be used for another request once the answer is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        self.retry_after = ""
        self._received = bytearray()
        self._body = bytearray()
        self._missing = 0
        # A function, not a method: an object that holds its own method is garbage that only the collector finds.
        self._parse: Callable[[AnswerParser], bool] = AnswerParser._parse_head

    def feed(self, data: bytes) -> bool:
        """Whether the answer is complete.

        Raises:
            BadAnswer: it will never be.
        """
        self._received += data
        return self._parse(self)

    def end(self) -> bool:
        """The server has closed the connection; whether the answer is complete."""
        if self._parse is not AnswerParser._parse_until_close:
            return False
        self._body, self._received = self._received, self._body
        return True

    def response(self) -> Response:
        return Response(self.status, bytes(self._body), self.retry_after)

    def _parse_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end > _MAX_HEAD or (end < 0 and len(self._received) > _MAX_HEAD):
            raise BadAnswer(f"its header is longer than {_MAX_HEAD} bytes")
        if end < 0:
            if not b"HTTP/1.".startswith(self._received[:7]):
                raise BadAnswer(f"this is no HTTP/1.1: {bytes(self._received[:100])!r}")
            return False
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        match = _HEAD.fullmatch(head)
        if match is None:
            raise BadAnswer(f"its header is no HTTP/1.1: {head[:200]!r}")
        status = int(match[2])
        if 100 <= status < 200 and status != 101:  # more is to come
            return self._parse_head()
        fields: dict[bytes, bytes] = {}
        for name, value in _FIELD.findall(head):
            name, value = name.lower(), value.rstrip(b" \t")
            fields[name] = fields[name] + b", " + value if name in fields else value
        self._frame(fields, status, is_old=match[1] == b"0")
        self.status = status
        return self._parse(self)

    def _frame(self, fields: dict[bytes, bytes], status: int, is_old: bool) -> None:
        """How the body ends, and whether the connection can be used again."""
        self.retry_after = fields.get(b"retry-after", b"").decode("latin-1")
        options = [option.strip() for option in fields.get(b"connection", b"").lower().split(b",")]
        self.reusable = b"close" not in options and (not is_old or b"keep-alive" in options)
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise BadAnswer("it is compressed, which was not asked for")
        if status == 101:
            raise BadAnswer("the server wants to speak another protocol")
        encoding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if status in (204, 304):
            self._parse = AnswerParser._parse_body
        elif encoding is not None:
            if encoding.lower() != b"chunked" or is_old:
                raise BadAnswer(f"its Transfer-Encoding is {encoding!r}")
            self.reusable = self.reusable and length is None  # both: somebody on the way is confused
            self._parse = AnswerParser._parse_chunks
        elif length is not None:
            if not (length.isdigit() and length.isascii()) or len(length) > 15:
                raise BadAnswer(f"its Content-Length is {length!r}")
            self._missing = int(length)
            self._limit(self._missing)
            self._parse = AnswerParser._parse_body
        else:
            self.reusable = False
            self._parse = AnswerParser._parse_until_close

    def _parse_body(self) -> bool:
        if len(self._received) < self._missing:
            return False
        if len(self._received) > self._missing:
            self.reusable = False  # whatever that is
            del self._received[self._missing :]
        self._body, self._received = self._received, self._body
        return True

    def _parse_until_close(self) -> bool:
        self._limit(len(self._received))
        return False

    def _parse_chunks(self) -> bool:
        received, start = self._received, 0
        while (end := received.find(b"\r\n", start, start + _MAX_HEAD)) >= 0:
            match = _CHUNK_SIZE.fullmatch(received, start, end)
            if match is None:
                raise BadAnswer(f"no size of a chunk: {bytes(received[start:end][:100])!r}")
            size = int(match[1], 16)
            self._limit(len(self._body) + size)
            if not size:
                self._parse = AnswerParser._parse_trailers
                start = end
                break
            if len(received) < end + 2 + size + 2:
                break
            if received[end + 2 + size : end + 4 + size] != b"\r\n":
                raise BadAnswer("a chunk is longer than its size")
            self._body += received[end + 2 : end + 2 + size]
            start = end + 2 + size + 2
        if end < 0 and len(received) - start >= _MAX_HEAD:
            raise BadAnswer("a chunk without a size")
        del received[:start]
        return self._parse_trailers() if self._parse is AnswerParser._parse_trailers else False

    def _parse_trailers(self) -> bool:
        """After the last chunk's size: its line's end, lines that nobody needs, and an empty one."""
        end = self._received.find(b"\r\n\r\n")
        if end > _MAX_HEAD or (end < 0 and len(self._received) > _MAX_HEAD):
            raise BadAnswer(f"its trailer is longer than {_MAX_HEAD} bytes")
        if end >= 0:
            self.reusable = self.reusable and len(self._received) == end + 4
        return end >= 0

    def _limit(self, size: int) -> None:
        if size > _MAX_BODY:
            raise BadAnswer(f"it is longer than {_MAX_BODY} bytes")
