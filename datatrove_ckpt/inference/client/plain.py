"""An HTTP client for one http:// URL: no TLS, no proxies, no redirects.

It costs 20 us of CPU per request, aiohttp 60 to 77 us, half of a document's whole cost (measured).

Each connection carries one request at a time. No request is sent twice: ``client.py`` decides about
retries. After any error or non-2xx answer, a connection is closed: a gateway sends a 504, and may
pass on the real answer later.

HTTP/1.1 cannot separate a late response from the response to the next request. So a connection
rests for ``QUIET`` seconds after each response that took ``SHORT`` seconds or longer. If more bytes
arrive by then, the response is dropped, and from then on no connection carries a second request. A
response that comes later still is noticed if each answer has its own ``id``: it equals the response
before it.

httptools (llhttp) parses the responses; a regular expression the usual answer that arrives in one
piece, for a fifth of the cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import socket
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser
from loguru import logger
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.common.retrying import WAIT_FIELDS, Quota, asked_wait, quotas
from datatrove_ckpt.inference.client.body import AnyBody, Body, LargeAnswer
from datatrove_ckpt.inference.client.urls import Extras, HiddenUrl, beside, headers_for

QUIET = 0.01  # seconds
SHORT = 0.1  # seconds
# A short one, or a number, may be a counter, the second, or Ollama's 999.
_ID = re.compile(rb'"id": ?"(?![^"\d]*\d+")[^"]{16,}"')
_MAX_SEARCHES = 100  # each costs 1 us per kB
_BLANK = b"\r\n"  # no answer
# Framing is everything except the body: status line, header, trailer, chunk sizes.
_MAX_FRAMING_BYTES = 1 << 16
# A size line takes 5 to 20 bytes; servers do not send extensions.
_MAX_FRAMING_BYTES_PER_CHUNK = 32

_WAIT_FIELDS = frozenset(name.encode() for name in WAIT_FIELDS)
_FORM = (b"content-type", b"content-encoding")
_FIELDS = frozenset((b"connection", b"content-length", b"transfer-encoding", *_FORM, *_WAIT_FIELDS))

_INTERIM = (100, 102, 103)  # come before the answer, and have no body
# 200, header fields that are not read, and one length.
_SILENT = (
    rb"(?:(?!(?:proxy-)?connection:|content-(?:encoding|length):|transfer-encoding:|upgrade:|x-ratelimit-)"
    rb"[!#$%&'*+.^_`|~0-9a-z-]+:[\t -~\x80-\xff]*\r\n|connection:[\t ]*keep-alive\r\n)*"
)
_USUAL_HEAD = re.compile(
    rb"(?-i:HTTP/1\.1) 200(?: [\t -~\x80-\xff]*)?\r\n%bcontent-length:[\t ]*(\d{1,8})\r\n%b\r\n"
    % (_SILENT, _SILENT),
    re.IGNORECASE,
)


class Response(NamedTuple):
    """A response. If the connection broke, ``body`` is a part, and ``status`` is an error.

    The body is hidden from tracebacks: a server may quote the key.

    Attributes:
        wait: the seconds that an error asks to wait.
        form: content type and coding; "" for an answer that is probably JSON.
        quotas: what is left of the server's limits.
    """

    status: int
    body: bytes
    wait: float | None = None
    form: str = ""
    quotas: tuple[Quota, ...] = ()


class RemoteProtocolError(ConnectionError):
    """The bytes are no whole HTTP/1.1 response."""


class UnaskedBytes(RemoteProtocolError):
    """Bytes came without a request: the response may belong to another one."""

    def __str__(self) -> str:
        return "the server sent more than one answer to a request"


def usual_response(data: bytes) -> Response | None:
    head = _USUAL_HEAD.match(data)
    if head is None or head.end() + int(head[1]) != len(data):
        return None
    if data[head.end() : head.end() + 1] not in b"{[":
        return None
    return Response(200, bytes(memoryview(data)[head.end() :]))


class ResponseParser:
    """Parses one response, in pieces of any size.

    Only the limit on framing depends on how the bytes are split.
    """

    def __init__(self) -> None:
        self._builder = _ResponseBuilder()
        self._llhttp: _LlhttpParser | None = None
        self._received_bytes = 0

    @property
    def status(self) -> int:
        return self._builder.status

    @property
    def reusable(self) -> bool:
        return self._builder.reusable

    def response(self) -> Response:
        builder = self._builder
        return Response(
            builder.status,
            bytes(builder.body),
            builder.wait,
            builder.form,
            builder.quotas,
        )

    def feed(self, data: bytes) -> bool:
        """Whether the response is complete with these bytes.

        Raises:
            UnaskedBytes: more bytes follow the response.
            RemoteProtocolError: the bytes are not a response, or the response exceeds a limit.
        """
        builder = self._builder
        if builder.complete:
            raise UnaskedBytes
        self._received_bytes += len(data)
        self._parse(data)
        if builder.complete:
            return True
        framing = self._received_bytes - len(builder.body)
        if framing > _MAX_FRAMING_BYTES + _MAX_FRAMING_BYTES_PER_CHUNK * builder.chunks:
            raise RemoteProtocolError(
                f"header and trailer are longer than {_MAX_FRAMING_BYTES} bytes"
            )
        return False

    def end(self, properly: bool = True) -> bool:
        """Whether the response is complete at the connection's end, ``properly`` if the server
        closed it.
        """
        return self._builder.complete or (properly and self._builder.ends_at_close)

    def _parse(self, data: bytes) -> None:
        builder = self._builder
        if self._llhttp is None:
            self._llhttp = llhttp = _LlhttpParser(builder)
            # RFC 9112 allows both: Transfer-Encoding overrides Content-Length (section 6.3), and
            # spaces may follow the size of a chunk (section 7.1.1).
            llhttp.set_dangerous_leniencies(
                lenient_chunked_length=True, lenient_spaces_after_chunk_size=True
            )
            builder.llhttp = weakref.ref(llhttp)
        try:
            self._llhttp.feed_data(data)
        except HttpParserError as error:
            if builder.complete:
                raise UnaskedBytes from None
            if builder.refusal:
                raise RemoteProtocolError(builder.refusal) from None
            if isinstance(error, HttpParserCallbackError):
                raise  # a bug in a callback of ours
            raise RemoteProtocolError(f"not HTTP/1.1 ({error}): {data[:100]!r}") from None


class _LlhttpParser(HttpResponseParser):
    __slots__ = ("__weakref__",)


class _StopParsing(Exception):
    """Makes llhttp stop."""


class _ResponseBuilder:
    """The callbacks of llhttp.

    llhttp holds the bound methods; a weak reference back avoids a reference cycle per response.
    """

    def __init__(self) -> None:
        self.llhttp: weakref.ref[_LlhttpParser]
        self._large: LargeAnswer
        self.status = 0
        self.wait: float | None = None
        self.form = ""
        self.quotas: tuple[Quota, ...] = ()
        self.body = bytearray()
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
        # Tabs stay: llhttp does not recognise "chunked" before a tab.
        value = value.strip(b" ")
        self._fields[name] = self._fields[name] + b", " + value if name in self._fields else value

    def on_headers_complete(self) -> None:
        llhttp = self.llhttp()
        assert llhttp is not None
        status = llhttp.get_status_code()
        version = llhttp.get_http_version()
        fields = self._fields
        if status == 101:
            self._refuse("the server wants to switch to another protocol")
        if version in ("1.1", "1.0") and status in _INTERIM:
            return
        if version not in ("1.1", "1.0") or status < 200:
            self._refuse(f"not HTTP/1.1: version {version}, status {status}")
        kinds = [fields.get(name, b"").decode("latin-1") for name in _FORM]
        self.form = " ".join(kinds).strip()
        self._large = LargeAnswer(kinds[1])
        coding = fields.get(b"transfer-encoding")
        length = fields.get(b"content-length")
        if status in (204, 304):
            pass  # neither has a body, whatever the fields say
        elif coding is not None:
            if coding.lower() != b"chunked" or version == "1.0":
                self._refuse(
                    f"Transfer-Encoding {coding!r} is not supported, only b'chunked' in HTTP/1.1"
                )
        elif length is not None:
            # llhttp has checked that these are digits.
            if refusal := self._large.refusal(int(length)):
                self._refuse(refusal)
        else:
            self.ends_at_close = True
        # A proxy may disagree with us about where such a response ends.
        ambiguous = coding is not None and length is not None
        # llhttp checks for "close" in HTTP/1.1 only.
        options = [option.strip() for option in fields.get(b"connection", b"").lower().split(b",")]
        self.reusable = llhttp.should_keep_alive() and b"close" not in options and not ambiguous
        if not _WAIT_FIELDS.isdisjoint(fields):
            texts = {name.decode(): value.decode("latin-1") for name, value in fields.items()}
            self.quotas = quotas(texts)
            if status >= 300:
                self.wait = asked_wait(texts)
        self.status = status

    def on_chunk_header(self) -> None:
        self.chunks += 1

    def on_body(self, data: bytes) -> None:
        if refusal := self._large.append(self.body, data):
            self._refuse(refusal)

    def on_message_complete(self) -> None:
        self.complete = self.status > 0
        self._fields.clear()

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = reason
        raise _StopParsing


# Up to this size, one ``send`` of a copy is cheaper than two.
_MAX_COPIED_BYTES = 1 << 16
# uvicorn's socket queues 2048 connections; the kernel retries others after 1 s.
_MAX_CONCURRENT_CONNECTS = 1000
# Thousands of connections are opened, and each lookup takes a thread.
_ADDRESS_CACHE_SECONDS = 10.0
# No response to a request: the server closes an idle connection.
_REQUEST_TIMEOUT = (b"HTTP/1.1 408", b"HTTP/1.0 408")
# Unlike ``socket.recv``, this keeps the GIL, which a busy thread would return after 150 us.
_recv = ctypes.PyDLL(None).recv
_BYTE = ctypes.create_string_buffer(1)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def is_silent(descriptor: int) -> bool:
    """Whether a socket has nothing to read, not even the connection's end."""
    return bool(_recv(descriptor, _BYTE, 1, _LOOK) < 0)


class ConnectTimeout(TimeoutError):
    """The connection was not established in time."""


class _Connection(asyncio.Protocol):
    def __init__(self, owner: PlainTransport) -> None:
        self.usable = True
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.idle_since = 0.0
        self._response: asyncio.Future[Response] | None = None
        self.last: tuple[object, int] = (None, 0)
        self._unsent: Iterator[bytes] | None = None
        self._paused = False
        self._parser: ResponseParser | None = None
        self._complete: Response | None = None

    def request(self, head: bytes, body: AnyBody) -> asyncio.Future[Response]:
        self._response = response = self._loop.create_future()
        if isinstance(body, bytes) and len(body) <= _MAX_COPIED_BYTES:
            self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        else:
            self._transport.write(b"%s%d\r\n\r\n" % (head, len(body)))
            if isinstance(body, bytes):
                self._transport.write(body)
            else:
                self._unsent = iter(body)
                self._send_pieces()
        return response

    def _send_pieces(self) -> None:
        while self._unsent is not None and not self._paused:
            if (piece := next(self._unsent, None)) is None:
                self._unsent = None
            else:
                self._transport.write(piece)

    def abort(self, error: Exception | None = None) -> None:
        self.usable = False
        self._unsent = None
        self._transport.abort()
        response = self._response
        self._response = None
        if response is None or response.done():
            return
        # The status alone decides; the body, only shown, may be incomplete.
        if self._status >= 300:
            assert self._parser is not None
            response.set_result(self._parser.response())
        elif error is not None:
            response.set_exception(error)

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        # A response may take an hour, in which the host may disappear.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.descriptor: int = sock.fileno()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_pieces()

    def data_received(self, data: bytes) -> None:
        try:
            if self._complete is not None and not data.strip(_BLANK):
                return
            if self._response is None or self._complete is not None:
                raise UnaskedBytes
            if self._parser is None:
                self._complete = usual_response(data)
                if self._complete is not None:
                    self._finish(True)
                    return
                self._parser = ResponseParser()
            if self._parser.feed(data):
                self._complete = self._parser.response()
                self._finish(self._parser.reusable)
        except RemoteProtocolError as error:
            is_answer = data.strip(_BLANK) and not data.startswith(_REQUEST_TIMEOUT)
            if isinstance(error, UnaskedBytes) and is_answer:
                self._owner.note_unasked()
            self.abort(error)

    @property
    def _status(self) -> int:
        if self._parser is None:
            return 0
        return self._parser.status

    def _finish(self, reusable: bool) -> None:
        # A server may refuse a request before reading all of it; the write buffer holds the rest.
        if self._status >= 300 or not reusable or self._transport.get_write_buffer_size():
            self.deliver()
            self.abort()
        else:
            self._owner.deliver_later(self)

    def deliver(self) -> None:
        response = self._response
        self._response = None
        complete = self._complete
        self._complete = None
        self._parser = None
        if response is not None and complete is not None and not response.done():
            response.set_result(complete)

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._complete is None and self._parser is not None and self._parser.end(error is None):
            self._complete = self._parser.response()
        if self._complete is not None:
            self.deliver()
        if self._response is not None:
            if self._status:
                when = "inside the response"
            else:
                when = "before the response"
            self.abort(
                RemoteProtocolError(
                    f"the connection was closed {when}" + (f": {error}" if error else "")
                )
            )
        else:
            self.abort()


class Carrier(Protocol):
    """A connection. ``last``: the hashes of the request and the answer that it carried last."""

    last: tuple[object, int]


def _id_of(answer: bytes | bytearray) -> bytes | None:
    found = _ID.search(answer)
    if found is None:
        return None
    return found[0]


class UnaskedCounter:
    """A transport that counts what should not come.

    Attributes:
        unasked: how often bytes arrived without a request.
        unread: answers in a row that cannot be read, since ``unread_since``.
        is_read: an answer could be read.
        refusal: why nothing more is sent.
    """

    url: HiddenUrl
    api_key: Secret | None
    errors: tuple[type[Exception], ...]
    unasked = unread = 0
    unread_since = 0.0
    is_read = False
    refusal = ""
    _first_id: bytes | None = None
    _searches = 0

    def refuse_late(self, connection: Carrier, request: AnyBody, answer: bytes | bytearray) -> None:
        """Raises UnaskedBytes if the answer equals the one before it, which answered another
        request.
        """
        if self._first_id is None and self._searches < _MAX_SEARCHES:
            self._searches += 1
            self._first_id = _id_of(answer)
        before = connection.last
        # Requests with media are not hashed, and count as different.
        if isinstance(request, Body):
            sent = object()
        else:
            sent = xxh3_64_intdigest(request)
        connection.last = (sent, xxh3_64_intdigest(answer))
        if before[1] != connection.last[1] or before[0] == sent:
            return
        if _id_of(answer) in (None, self._first_id):
            return  # answers of this server have no id of their own
        if not self.unasked:  # equal answers and ids by chance are never refused
            self.note_unasked("one answer, with its id, to two requests")
        raise UnaskedBytes

    def note_unasked(self, what: str = "an answer without a request") -> None:
        if not self.unasked:
            logger.warning(
                f"{self.url} has sent {what}. The last answer on that "
                "connection is dropped and requested again, unless a document has it already. "
                "From now on, each request to this server has a connection of its own."
            )
        self.unasked += 1


class PlainTransport(UnaskedCounter):
    """Sends requests to one http:// URL, each on a connection of its own while it is in flight.

    Args:
        timeout: seconds from sending a request to the end of its response.
        connect_timeout: seconds to establish a connection.
        keepalive: seconds after which an idle connection is closed instead of used again.

    Attributes:
        errors: what ``send`` raises besides TimeoutError.
    """

    errors = (OSError,)

    def __init__(
        self,
        url: HiddenUrl,
        api_key: Secret | None,
        timeout: float,
        connect_timeout: float,
        keepalive: float,
        method: str = "POST",
    ) -> None:
        self.url = url
        self._host = url.reveal().raw_host or ""
        self._port = url.reveal().port or 80
        self._timeout = timeout
        self._connect_timeout = min(connect_timeout, timeout)
        self._keepalive = keepalive
        self._method = method
        self.api_key = api_key
        self._headers = headers_for(url, api_key)
        self._head = _head(method, url, self._headers)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._idle: list[_Connection] = []
        # Deadlines by connection. They are in order, because all have the same timeout, so one
        # timer is enough.
        self._in_flight: dict[_Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._connecting = asyncio.Semaphore(_MAX_CONCURRENT_CONNECTS)
        self._lookup: asyncio.Future[list[Any]] | None = None
        self._lookup_started_at = 0.0
        self._last_connected: object = None

    async def send(self, body: AnyBody = b"", extras: Extras | None = None) -> Response:
        """Returns the response, whatever its status.

        Raises:
            ConnectTimeout: no connection within ``connect_timeout``.
            TimeoutError: no response within ``timeout``.
            OSError: the connection was refused or broke, the response was malformed, or the client
                was closed.
        """
        head = self._head
        if extras:
            head = _head(self._method, *beside(self.url, self._headers, extras))
        connection = self._take_idle() or await self._connect()
        if self._closed:
            connection.abort()
            raise ConnectionAbortedError("the client is closed")
        self._in_flight[connection] = deadline = self._loop.time() + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._expire)
        try:
            response = await connection.request(head, body)
            if response.status == 200:
                self.refuse_late(connection, body, response.body)
        except BaseException:
            connection.abort()
            raise
        finally:
            del self._in_flight[connection]
        if connection.usable and not self._closed:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        return response

    async def close(self) -> None:
        """Closes every connection. Requests in flight fail with ``ConnectionAbortedError``."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._idle, *self._in_flight):
            connection.abort(ConnectionAbortedError("the client was closed"))
        self._idle.clear()
        await asyncio.sleep(0)

    def deliver_later(self, connection: _Connection) -> None:
        seconds = self._loop.time() + self._timeout - self._in_flight[connection]
        if seconds < SHORT:
            connection.deliver()
        else:
            self._loop.call_later(QUIET, connection.deliver)

    def explain(self, error: Exception) -> str:
        if isinstance(error, socket.gaierror):
            if error.errno == socket.EAI_NONAME:
                return "no host of this name (DNS)"
            return f"the name of the host was not found (DNS): {error.strerror}"
        number = getattr(error, "errno", None)
        return os.strerror(number) if number else str(error)

    def _take_idle(self) -> _Connection | None:
        """Returns the most recently used connection, so that spare ones reach their idle limit."""
        oldest = self._loop.time() - self._keepalive
        while self._idle:
            connection = self._idle.pop()
            if self.unasked or not connection.usable or connection.idle_since <= oldest:
                connection.abort()
            elif is_silent(connection.descriptor):
                return connection
            # else the event loop reads what has arrived, and closes the connection
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout), self._connecting:
                # The address that accepted the last connection goes first; each gets a share of the
                # time.
                *others, last = sorted(
                    await self._resolve(), key=lambda address: address != self._last_connected
                )
                for address in others:
                    with contextlib.suppress(OSError):
                        async with asyncio.timeout(self._connect_timeout / (1 + len(others))):
                            return await self._connect_to(address)
                return await self._connect_to(last)
        except TimeoutError:
            raise ConnectTimeout from None

    async def _connect_to(self, address: Any) -> _Connection:
        family, *_, (host, port, *_) = address
        _, connection = await self._loop.create_connection(
            partial(_Connection, self), host, port, family=family
        )
        self._last_connected = address
        return connection

    async def _resolve(self) -> list[Any]:
        with contextlib.suppress(socket.gaierror):  # raised unless the host is an IP address
            return socket.getaddrinfo(
                self._host,
                self._port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        now = self._loop.time()
        lookup = self._lookup
        expired = now - self._lookup_started_at > _ADDRESS_CACHE_SECONDS
        if lookup is None or (lookup.done() and (lookup.exception() or expired)):
            coroutine = self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            lookup = self._lookup = asyncio.ensure_future(coroutine)
            self._lookup_started_at = now
        return await asyncio.shield(lookup)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        expired = []
        for connection, deadline in self._in_flight.items():
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._expire)
                break
            expired.append(connection)
        for connection in expired:
            connection.abort(TimeoutError())


def _head(method: str, url: HiddenUrl, headers: dict[str, str]) -> bytes:
    """Returns the head of every request, up to the value of Content-Length.

    Raises:
        ValueError: a header value holds a line break or a NUL.
    """
    if any(character in value for value in headers.values() for character in "\r\n\0"):
        raise ValueError(f"a line break in a header field (one of {', '.join(headers)})")
    raw_host = url.reveal().raw_host or ""
    port = url.reveal().port
    host = f"[{raw_host}]" if ":" in raw_host else raw_host
    own = {
        "Host": f"{host}{f':{port}' if port != 80 else ''}",
        "User-Agent": "datatrove-ckpt",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    fields = {**own, **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {url.reveal().raw_path_qs} HTTP/1.1\r\n{lines}Content-Length: ".encode()
