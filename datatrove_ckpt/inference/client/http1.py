"""Parses one HTTP/1.1 response from bytes that arrive in pieces of any size. No sockets here: see ``plain.py``.

httptools does the parsing. It wraps llhttp, the parser of Node.js and uvicorn. This module adds limits on size, and
rejects responses that we did not ask for: compressed ones, protocol upgrades, transfer codings other than ``chunked``.
llhttp rejects more: control characters in a header value, except for the tab, and lines that only a line feed ends.

An answer of the usual form that arrives in one piece needs none of that: a regular expression recognises it, for a
fifth of the cost.

This module skips interim responses (1xx) itself. They never have a body (RFC 9112, section 6.3), but llhttp knows this
only of 100, 102 and 103: of any other, it would take Content-Length bytes of the final response for the body. httptools
gives a callback no way to say that no body follows.
"""

from __future__ import annotations

import re
import weakref
from typing import NamedTuple, NoReturn

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from datatrove_ckpt.redaction import HiddenBytes

MAX_BODY_BYTES = 1 << 28
COMPRESSED = "the response is compressed, which was not requested"
# Framing is all that is not body: status line, header, trailer, size lines of chunks. llhttp itself sets no limit.
_MAX_FRAMING_BYTES = 1 << 16
# A size line takes 5 to 20 bytes without an extension, and servers do not send extensions.
_MAX_FRAMING_BYTES_PER_CHUNK = 32

# Those that say something to us.
_FIELDS = frozenset((b"connection", b"content-encoding", b"content-length", b"retry-after", b"transfer-encoding"))

_VERSION = b"HTTP/1."  # llhttp takes RTSP and ICE too
_STATUS_END = len("HTTP/1.1 200")
_INTERIM_START = re.compile(rb"HTTP/1\.[01] 1(?!01)")  # 101 is final: another protocol follows
_INTERIM_HEAD = re.compile(rb"HTTP/1\.[01] 1\d\d(?: [^\r\n\0]*)?(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*)*")
# 200, header fields that say nothing to llhttp or to us, and one length.
_SILENT = (
    rb"(?:(?!(?:proxy-)?connection:|content-(?:encoding|length):|retry-after:|transfer-encoding:|upgrade:)"
    rb"[!#$%&'*+.^_`|~0-9a-z-]+:[\t -~\x80-\xff]*\r\n|connection:[\t ]*keep-alive\r\n)*"
)
_USUAL_HEAD = re.compile(
    rb"(?-i:HTTP/1\.1) 200(?: [\t -~\x80-\xff]*)?\r\n%bcontent-length:[\t ]*(\d{1,8})\r\n%b\r\n" % (_SILENT, _SILENT),
    re.IGNORECASE,
)


def too_long() -> str:
    return f"the body is longer than {MAX_BODY_BYTES} bytes"


class Response(NamedTuple):
    """A response. If the connection broke, ``body`` is a part, and ``status`` is an error.

    The body is hidden from tracebacks, because a server may quote the key that it was sent.
    """

    status: int
    body: HiddenBytes
    retry_after: str


class RemoteProtocolError(ConnectionError):
    """The server sent something that is not an HTTP/1.1 response, or only a part of one."""


class ResponseParser:
    """Parses one response, in pieces of any size.

    The result does not depend on how the bytes are split, with one exception: the limit on framing is checked after
    each piece, and not for the piece that completes the response.
    """

    def __init__(self) -> None:
        self._builder = _ResponseBuilder()
        self._llhttp: _LlhttpParser | None = None
        self._received_bytes = 0
        # The bytes before the status of the final response is known; None from then on.
        self._start: bytearray | None = bytearray()

    @property
    def status(self) -> int:
        """The status code; 0 until the header is complete."""
        return self._builder.status

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request. Valid once the response is complete."""
        return self._builder.reusable

    def response(self) -> Response:
        """The response, as far as it has arrived."""
        builder = self._builder
        return Response(builder.status, HiddenBytes(builder.body), builder.retry_after)

    def feed(self, data: bytes) -> bool:
        """Parses the next bytes. Returns whether the response is complete.

        Raises:
            RemoteProtocolError: the bytes are not a response, or the response exceeds a limit.
        """
        builder = self._builder
        if not self._received_bytes and (head := _USUAL_HEAD.match(data)):
            size = int(head[1])
            if size <= MAX_BODY_BYTES and head.end() + size == len(data):
                builder.status, builder.body, builder.reusable = 200, data[head.end() :], True
                return True
        self._received_bytes += len(data)
        if self._start is not None:
            data = self._skip_interim(self._start, data)
        self._parse(data)
        if builder.complete:  # a long rest is of no interest: the connection is not used again
            return True
        framing = self._received_bytes - len(builder.body)
        if framing > _MAX_FRAMING_BYTES + _MAX_FRAMING_BYTES_PER_CHUNK * builder.chunks:
            raise RemoteProtocolError(f"header and trailer are longer than {_MAX_FRAMING_BYTES} bytes")
        return False

    def end(self) -> bool:
        """The server has closed the connection. Returns whether the response is complete."""
        return self._builder.ends_at_close

    def _skip_interim(self, start: bytearray, data: bytes) -> bytes:
        """Drops interim responses. Returns the bytes of the final response, none before its status has arrived."""
        start += data
        while True:
            if not _VERSION.startswith(start[: len(_VERSION)]):
                raise RemoteProtocolError(f"not HTTP/1.1: {bytes(start[:100])!r}")
            if len(start) < _STATUS_END:
                return b""
            if not _INTERIM_START.match(start):
                self._start = None
                return bytes(start)
            end = start.find(b"\r\n\r\n")
            if end < 0:
                return b""
            if not _INTERIM_HEAD.fullmatch(start, 0, end):
                raise RemoteProtocolError(f"not HTTP/1.1 (interim response): {bytes(start[:end][:100])!r}")
            del start[: end + 4]

    def _parse(self, data: bytes) -> None:
        builder = self._builder
        if self._llhttp is None:
            self._llhttp = llhttp = _LlhttpParser(builder)
            # RFC 9112 allows both: Content-Length together with Transfer-Encoding, which overrides it (section 6.3),
            # and spaces between the size and the extension of a chunk (section 7.1.1).
            llhttp.set_dangerous_leniencies(lenient_chunked_length=True, lenient_spaces_after_chunk_size=True)
            builder.llhttp = weakref.ref(llhttp)
        try:
            self._llhttp.feed_data(data)
        except HttpParserError as error:
            if builder.complete:  # the error is in bytes after the end
                builder.reusable = False
            elif builder.refusal:
                raise RemoteProtocolError(builder.refusal) from None
            elif isinstance(error, HttpParserCallbackError):
                raise  # a bug in a callback of ours
            else:
                raise RemoteProtocolError(f"not HTTP/1.1 ({error}): {data[:100]!r}") from None


class _LlhttpParser(HttpResponseParser):
    """Supports weak references, which the base class does not."""

    __slots__ = ("__weakref__",)


class _StopParsing(Exception):
    """Makes llhttp stop."""


class _ResponseBuilder:
    """Builds the response in the callbacks of llhttp.

    llhttp holds the bound methods. The reference in the other direction is weak: a strong one would close a cycle, and
    only the garbage collector would free the two, for each response.
    """

    def __init__(self) -> None:
        self.llhttp: weakref.ref[_LlhttpParser]
        self.status = 0
        self.retry_after = ""
        self.body: bytes | bytearray = bytearray()
        self.chunks = 0
        self.reusable = False
        self.ends_at_close = False
        self.complete = False
        self.refusal = ""
        self._fields: dict[bytes, bytes] = {}

    def on_message_begin(self) -> None:
        if self.complete:
            self._refuse("bytes after the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) not in _FIELDS:
            return
        # Tabs stay: llhttp does not recognise "chunked" before a tab, so on_headers_complete must not either.
        value = value.strip(b" ")
        self._fields[name] = self._fields[name] + b", " + value if name in self._fields else value

    def on_headers_complete(self) -> None:
        llhttp = self.llhttp()
        assert llhttp is not None  # it calls us
        status, version, fields = llhttp.get_status_code(), llhttp.get_http_version(), self._fields
        if status == 101:
            self._refuse("the server wants to switch to another protocol")
        if version not in ("1.1", "1.0") or status < 200:
            self._refuse(f"not HTTP/1.1: version {version}, status {status}")
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            self._refuse(COMPRESSED)
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if status in (204, 304):
            pass  # neither has a body, whatever the fields say
        elif coding is not None:
            if coding.lower() != b"chunked" or version == "1.0":
                self._refuse(f"Transfer-Encoding {coding!r} is not supported, only b'chunked' in HTTP/1.1")
        elif length is not None:
            if int(length) > MAX_BODY_BYTES:  # llhttp has checked that these are digits
                self._refuse_size()
        else:
            self.ends_at_close = True
        # With both fields, the server or a proxy may disagree with us about where the next response begins.
        ambiguous = coding is not None and length is not None
        # llhttp checks for "close" in HTTP/1.1 only.
        options = [option.strip() for option in fields.get(b"connection", b"").lower().split(b",")]
        self.reusable = llhttp.should_keep_alive() and b"close" not in options and not ambiguous
        self.retry_after = fields.get(b"retry-after", b"").strip(b" \t").decode("latin-1")
        self.status = status

    def on_chunk_header(self) -> None:
        self.chunks += 1

    def on_body(self, data: bytes) -> None:
        self.body += data
        # For chunks, this is the only check: httptools does not report their sizes.
        if len(self.body) > MAX_BODY_BYTES:
            self._refuse_size()

    def on_message_complete(self) -> None:
        self.complete = True

    def _refuse_size(self) -> NoReturn:
        self._refuse(too_long())

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = reason
        raise _StopParsing
