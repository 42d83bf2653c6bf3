"""Sends HTTP/1.1 requests to one URL, also over TLS and through a proxy, and follows no redirects.

A request costs a third of the CPU time of aiohttp's. Each connection carries one request at a time.
No request is sent twice: ``client.py`` decides about retries. After any error or non-2xx answer, a
connection is closed: a gateway that has sent a 504 may pass on the real answer later.

HTTP/1.1 cannot separate a late response from the response to the next request. So a connection
rests for ``QUIET`` seconds after each response that took ``SHORT`` seconds or longer. If more bytes
arrive by then, the response is dropped, and from then on no connection carries a second request. A
response that comes even later is noticed if each answer has its own ``id``: it equals the response
before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser
from loguru import logger
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import Secret, remember
from datatrove_ckpt.common.retrying import WAIT_FIELDS, Quota, quotas, retry_after
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.body import AnyBody, LargeAnswer, RequestBody
from datatrove_ckpt.inference.client.urls import (
    Extras,
    HiddenUrl,
    basic_authorization,
    beside,
    headers_for,
    proxy_of,
)

QUIET = 0.01  # seconds
SHORT = 0.1  # seconds
# A short id, or a short number, may be a counter, the time, or Ollama's 999.
_ID = re.compile(rb'"id": ?"(?![^"\d]*\d{1,15}")[^"]{16,}"')
_MAX_SEARCHES = 100  # each costs 1 us per kB
_BLANK = b"\r\n"  # not an answer
# Everything but the body: header, trailer, sizes of chunks. llhttp keeps a field until its end.
_MAX_FRAMING_BYTES = 1 << 24

_WAIT_FIELDS = frozenset(name.encode() for name in WAIT_FIELDS)
_FIELDS = _WAIT_FIELDS | {
    b"content-encoding",
    b"content-length",
    b"transfer-encoding",
}

_ONE_LENGTH = 1 << 32  # more than a length: the sum shows their number
_USUAL_STATUS = (b"HTTP/1.1 200 OK", b"HTTP/1.1 200 ", b"HTTP/1.1 200")
# A length, or a header field that is not read.
_USUAL_FIELD = re.compile(
    rb"content-length:[\t ]*(\d{1,8})|connection:[\t ]*keep-alive|(?!(?:proxy-)?connection:"
    rb"|content-(?:encoding|length):|transfer-encoding:|upgrade:|x-ratelimit-)"
    rb"[!#$%&'*+.^_`|~0-9a-z-]+:[\t -~\x80-\xff]*",
    re.IGNORECASE,
)


@dataclass(slots=True)  # half of a NamedTuple's CPU time
class Response:
    """A response. If the connection broke, ``body`` is a part, and ``status`` is an error.

    The body is hidden from tracebacks: a server may quote the key.

    Attributes:
        wait: seconds of an error's Retry-After.
    """

    status: int
    body: bytes
    wait: float | None = None
    quotas: tuple[Quota, ...] = ()


class RemoteProtocolError(ConnectionError):
    """The bytes are no whole HTTP/1.1 response."""


class UnreadableResponse(RemoteProtocolError):
    """Not HTTP/1.1, or a form that this client does not support."""


class _TunnelRefused(ConnectionError):
    """A proxy answered CONNECT with 403 or 407, the first argument."""


class UnaskedBytes(RemoteProtocolError):
    """Bytes without a request: the response may belong to another request."""

    def __str__(self) -> str:
        return "the server sent more than one answer to a request"


@lru_cache(1024)
def _length_in(field: bytes) -> float:
    usual = _USUAL_FIELD.fullmatch(field)
    if usual is None:
        return math.inf
    return _ONE_LENGTH + int(usual[1]) if usual[1] else 0


@lru_cache(1024)  # many answers of a second have the same head
def _length_after(head: bytes) -> float:
    """Returns the length of the body after a usual head; less than 0, or infinity, after others."""
    status, *fields = head.split(b"\r\n")
    if status in _USUAL_STATUS:
        return sum(map(_length_in, fields)) - _ONE_LENGTH
    return math.inf


def usual_response(data: bytes) -> Response | None:
    head, end, body = data.partition(b"\r\n\r\n")
    if end and _length_after(head) == len(body) and body[:1] in b"{[":
        return Response(200, body)
    return None


class ResponseParser:
    """Parses one response, in pieces of any size. llhttp calls all methods but ``feed``, ``end``,
    ``response`` and ``close``.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        self._wait: float | None = None
        self._quotas: tuple[Quota, ...] = ()
        self._body = bytearray()
        self._framing_bytes = 0
        self._ends_at_close = False
        self._complete = False
        self._refusal = RemoteProtocolError()
        self._fields: dict[bytes, bytes] = {}
        self._llhttp = HttpResponseParser(self)
        # RFC 9112 allows both: Transfer-Encoding overrides Content-Length (section 6.3), and spaces
        # may follow the size of a chunk (section 7.1.1).
        self._llhttp.set_dangerous_leniencies(
            lenient_chunked_length=True, lenient_spaces_after_chunk_size=True
        )

    def response(self) -> Response:
        return Response(self.status, bytes(self._body), self._wait, self._quotas)

    def take_body(self) -> bytes:
        body = bytes(self._body)
        self._body.clear()
        return body

    def feed(self, data: bytes) -> bool:
        """Returns whether the response is complete.

        Raises:
            UnaskedBytes: more bytes follow the response.
            RemoteProtocolError: the bytes are not a response, or the response exceeds a limit.
        """
        if self._complete:
            raise UnaskedBytes
        self._framing_bytes += len(data)
        try:
            self._llhttp.feed_data(data)
        except HttpParserError as error:
            if self._complete:
                raise UnaskedBytes from None
            if self._refusal.args:
                raise self._refusal from None
            if isinstance(error, HttpParserCallbackError):
                raise  # a bug in our callback
            raise UnreadableResponse(f"not HTTP/1.1 ({error}): {data[:200]!r}") from None
        if self._framing_bytes > _MAX_FRAMING_BYTES and not self._complete:
            raise RemoteProtocolError("header and trailer are too long")
        return self._complete

    def end(self, properly: bool = True) -> bool:
        """Returns whether the response is complete when the connection ends. ``properly``: the
        server closed it.
        """
        return self._complete or (properly and self._ends_at_close)

    def close(self) -> None:
        """Breaks the reference cycle: llhttp holds the bound methods."""
        del self._llhttp

    def on_message_begin(self) -> None:
        if self._complete:
            self._refuse("bytes after the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) not in _FIELDS:
            return
        # Tabs stay: llhttp does not recognise "chunked" before a tab.
        value = value.strip(b" ")
        self._fields[name] = self._fields[name] + b", " + value if name in self._fields else value

    def on_headers_complete(self) -> None:
        llhttp = self._llhttp
        status = llhttp.get_status_code()
        version = llhttp.get_http_version()
        fields = self._fields
        if status == 101:
            self._refuse("the server wants to switch to another protocol")
        is_interim = status in (100, 102, 103)  # these come before the answer, and have no body
        if version not in ("1.1", "1.0") or (status < 200 and not is_interim):
            self._refuse(f"not HTTP/1.1: version {version}, status {status}")
        if is_interim:
            return
        self._large = LargeAnswer(fields.get(b"content-encoding", b""))
        coding = fields.get(b"transfer-encoding")
        length = fields.get(b"content-length")
        if status in (204, 304):
            pass  # neither has a body
        elif coding is not None:
            if coding.lower() != b"chunked" or version == "1.0":
                self._refuse(
                    f"Transfer-Encoding {coding!r} is not supported, only b'chunked' in HTTP/1.1"
                )
        elif length is not None:
            # llhttp has checked that these are digits.
            if refusal := self._large.refusal(int(length)):
                self._stop(RemoteProtocolError(refusal))
        else:
            self._ends_at_close = True
        # A proxy may disagree with us about where such a response ends.
        ambiguous = coding is not None and length is not None
        self.reusable = llhttp.should_keep_alive() and not ambiguous
        if not _WAIT_FIELDS.isdisjoint(fields):
            texts = {name.decode(): value.decode("latin-1") for name, value in fields.items()}
            self._quotas = quotas(texts)
            if status >= 300:
                self._wait = retry_after(texts)
        self.status = status

    def on_body(self, data: bytes) -> None:
        self._framing_bytes -= len(data)
        if refusal := self._large.append(self._body, data):
            self._stop(RemoteProtocolError(refusal))

    def on_message_complete(self) -> None:
        self._complete = self.status > 0
        self._fields.clear()

    def _refuse(self, reason: str) -> NoReturn:
        self._stop(UnreadableResponse(reason))

    def _stop(self, error: RemoteProtocolError) -> NoReturn:
        self._refusal = error
        raise _StopParsing


class _StopParsing(Exception):
    """Stops llhttp inside a callback."""


# Up to this size, one ``send`` of a copy is cheaper than two.
_MAX_COPIED_BYTES = 1 << 16
# Thousands of connections are opened, and each lookup takes a thread.
_ADDRESS_CACHE_SECONDS = 10.0
_CONNECT_SECONDS = 30.0
# An idle connection is then closed instead of used again: uvicorn closes it after 5 s, and a
# request sent then fails.
_KEEPALIVE_SECONDS = 4.0
# No response to a request: the server closes an idle connection.
_REQUEST_TIMEOUT = (b"HTTP/1.1 408", b"HTTP/1.0 408")
# Unlike ``socket.recv``, this keeps the GIL, which a busy thread would return after 150 us.
_recv = ctypes.PyDLL(None).recv
_BYTE = ctypes.create_string_buffer(1)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def is_silent(descriptor: int) -> bool:
    return bool(_recv(descriptor, _BYTE, 1, _LOOK) < 0)


class Stream(Protocol):
    """Receives the body of a 200 while it arrives."""

    def feed(self, data: bytes) -> bool:
        """Returns whether the answer has grown, so that the request's time begins again: a gateway
        may send comments while its server hangs.

        An error ends the request, and is raised to its sender.
        """


class ConnectTimeout(TimeoutError):
    """Reports that no connection was established in time."""


class _Connection(asyncio.Protocol):
    """A connection that sent its request at loop time ``sent_at``."""

    def __init__(self, owner: Transport) -> None:
        self.usable = True
        self.sent_at = 0.0
        self.idle_since = 0.0
        self.last: tuple[object, int] = (None, 0)
        self.owner = owner
        self._loop = asyncio.get_running_loop()
        self._response: asyncio.Future[Response] | None = None
        self._stream: Stream | None = None
        self._unsent: Iterator[bytes] = iter(())
        self._paused = False
        self._parser: ResponseParser | None = None
        self._complete: Response | None = None

    def request(
        self, head: bytes, body: AnyBody, stream: Stream | None = None
    ) -> asyncio.Future[Response]:
        self._response = response = self._loop.create_future()
        self._stream = stream
        if isinstance(body, bytes) and len(body) <= _MAX_COPIED_BYTES:
            self.transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        else:
            self.transport.write(b"%s%d\r\n\r\n" % (head, len(body)))
            if isinstance(body, bytes):
                self.transport.write(body)
            else:
                self._unsent = iter(body)
                self._send_pieces()
        return response

    def _send_pieces(self) -> None:
        while not self._paused:
            piece = next(self._unsent, None)
            if piece is None:
                return
            self.transport.write(piece)

    def abort(self, error: Exception | None = None) -> None:
        self.usable = False
        self._unsent = iter(())
        self.transport.abort()
        parser = self._parser
        if parser is not None:
            parser.close()
            self._parser = None
        response = self._response
        self._response = None
        if response is None or response.done():
            return
        # Only the status decides: the body may be incomplete.
        if parser is not None and parser.status >= 300:
            response.set_result(parser.response())
        elif error is not None:
            response.set_exception(error)

    def connection_made(self, transport: Any) -> None:
        self.transport: Any = transport
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
        if self._complete is not None and not data.strip(_BLANK):
            return
        try:
            if self._response is None or self._complete is not None:
                raise UnaskedBytes
            if self._parser is None:
                usual = usual_response(data)
                if usual is not None and self._stream is None:
                    self._finish(usual, True)
                    return
                self._parser = ResponseParser()
            is_complete = self._parser.feed(data)
            stream = self._stream if self._parser.status == 200 else None
            if stream is not None and stream.feed(self._parser.take_body()):
                self.owner.extend(self)
            if is_complete:
                self._finish(self._parser.response(), self._parser.reusable)
        except Exception as error:
            is_answer = data.strip(_BLANK) and not data.startswith(_REQUEST_TIMEOUT)
            if isinstance(error, UnaskedBytes) and is_answer:
                self.owner.report_unexpected_bytes("an answer without a request")
            self.abort(error)

    def _finish(self, response: Response, reusable: bool) -> None:
        self._complete = response
        # A server may refuse a request before reading all of it; the write buffer holds the rest.
        if response.status >= 300 or not reusable or self.transport.get_write_buffer_size():
            self._deliver()
            self.abort()
        elif self._loop.time() - self.sent_at < SHORT:
            self._deliver()
        else:
            self._loop.call_later(QUIET, self._deliver)

    def _deliver(self) -> None:
        response = self._response
        complete = self._complete
        self._response = None
        self._complete = None
        if self._parser is not None:
            self._parser.close()
            self._parser = None
        if response is not None and complete is not None and not response.done():
            response.set_result(complete)

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        parser = self._parser
        if self._complete is None and parser is not None and parser.end(error is None):
            self._complete = parser.response()
        if self._complete is not None:
            self._deliver()
        when = "before"
        if parser is not None and parser.status:
            when = "inside"
        cause = f"the connection was closed {when} the response"
        self.abort(RemoteProtocolError(f"{cause}: {error}" if error else cause))


class _Tunnel(asyncio.Protocol):
    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parser = ResponseParser()

    def data_received(self, data: bytes) -> None:
        if self.status.done():
            return
        try:
            self._parser.feed(data)
        except RemoteProtocolError as error:
            self.connection_lost(error)
        else:
            if self._parser.status:  # the rest may quote the password
                self.status.set_result(self._parser.status)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_exception(error or ConnectionResetError("the proxy has hung up"))


def _id_of(answer: bytes) -> bytes:
    match = _ID.search(answer)
    return match[0] if match else b""


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Transport:
    """Sends requests to one URL, each on a separate connection while it is in flight.

    Args:
        timeout: seconds from sending a request to the end of its response.
        beside: has another URL of the same server. Both share their idle connections.

    Attributes:
        unasked: number of times that bytes arrived without a request.
        unread: number of answers in a row that cannot be read.
    """

    def __init__(
        self,
        url: HiddenUrl,
        api_key: Secret | None,
        timeout: float,
        proxied: bool = False,
        method: str = "POST",
        beside: Transport | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.url = url
        self.api_key = api_key
        self.unasked = 0
        self.unread = 0
        self._unread_since = 0.0
        self.is_read = False
        self._refusal = ""
        self._first_id = b""
        self._searches = 0
        self._was_first_repeated = False
        self._timeout = timeout
        self._connect_timeout = min(_CONNECT_SECONDS, timeout)
        self._method = method
        self.proxy = proxy_of(url) if proxied else None
        self._peer = self.proxy or url
        self.through = f" (through the proxy {self.proxy})" if self.proxy else ""
        for address in (url, self._peer):
            remember(*address.secrets)
        self._headers = headers_for(url, api_key) | (headers or {})
        self._head = self._head_for(url, self._headers)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._idle: list[_Connection] = [] if beside is None else beside._idle
        # Deadlines are in order, because all have the same timeout: a single timer is enough.
        self._in_flight: dict[_Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        # uvicorn's socket queues 2048 connections; the kernel retries others after 1 s.
        self._connecting = asyncio.Semaphore(1000)
        self._lookup: asyncio.Future[list[Any]] | None = None
        self._lookup_started_at = 0.0
        self._last_connected: object = ()

    async def send(
        self, body: AnyBody = b"", extras: Extras | None = None, stream: Stream | None = None
    ) -> Response:
        """Returns the response, whatever its status.

        Args:
            stream: receives the body; then ``timeout`` is the longest time without growth.

        Raises:
            ConnectTimeout: there is no connection in time.
            TimeoutError: there is no response within ``timeout``.
            OSError: the connection was refused or broke, the response was malformed, or the client
                was closed.
        """
        head = self._head
        if extras:
            head = self._head_for(*beside(self.url, self._headers, extras))
        try:
            connection = self._take_idle() or await self._connect()
        except _TunnelRefused as refusal:
            return Response(refusal.args[0], b"")
        if self._closed:
            connection.abort()
            raise ConnectionAbortedError("the client is closed")
        connection.sent_at = self._loop.time()
        self._in_flight[connection] = deadline = connection.sent_at + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._expire)
        try:
            response = await connection.request(head, body, stream)
            if response.status == 200 and stream is None:
                self._refuse_late(connection, body, response.body)
        except BaseException:
            connection.abort()
            raise
        finally:
            del self._in_flight[connection]
        if connection.usable and not self._closed:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        return response

    def extend(self, connection: _Connection) -> None:
        if self._in_flight.pop(connection, None) is not None:
            self._in_flight[connection] = self._loop.time() + self._timeout

    async def close(self) -> None:
        """Requests in flight fail with ``ConnectionAbortedError``."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._idle, *self._in_flight):
            connection.abort(ConnectionAbortedError("the client was closed"))
        self._idle.clear()
        await asyncio.sleep(0)

    def explain(self, error: Exception) -> str:
        number = getattr(error, "errno", None)
        if isinstance(error, socket.gaierror):
            text = f"the host was not found (DNS): {error.strerror}"
        elif number and not isinstance(error, ssl.SSLError):
            text = os.strerror(number)
        else:
            text = str(error)
        return f"{text}{self.through}"

    # refusals ------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._refusal:
            raise ServerRefused(self._refusal)

    def note_unread(self, now: float, cause: Exception, seconds: float) -> None:
        """Counts an answer that cannot be read.

        Raises:
            ServerRefused: the server has sent no other answer for ``seconds``.
        """
        if self.is_read:
            return  # a proxy answers while the server is away
        if not self.unread:
            self._unread_since = now
        self.unread += 1
        lasts = now - self._unread_since
        if self.unread >= 3 and lasts >= seconds:
            self._refusal = (
                f"{self.url} has sent {self.unread} unusable answers in a row, for {lasts:.0f} "
                "s. If a login page or a proxy answers there, correct the endpoint's URL or the "
                f"proxy, and run again. Last cause: {cause}"
            )
        self.check()

    def report_unexpected_bytes(self, description: str) -> None:
        if not self.unasked:
            logger.warning(
                f"{self.url} has sent {description}. The last answer on that connection is "
                "requested again, and each further request gets its own connection."
            )
        self.unasked += 1
        if self.unasked >= 3:
            self._refusal = (
                f"{self.url} has sent an answer without a request {self.unasked} times. Late "
                "answers may be taken for answers to other requests. Use a URL past the gateway, "
                "or raise its timeout, and run again."
            )

    def _refuse_late(self, connection: _Connection, request: AnyBody, answer: bytes) -> None:
        if not self._first_id and self._searches < _MAX_SEARCHES:
            self._searches += 1
            self._first_id = _id_of(answer)
        before = connection.last
        # Requests with media are not hashed, and count as different.
        if isinstance(request, RequestBody):
            sent = object()
        else:
            sent = xxh3_64_intdigest(request)
        connection.last = (sent, xxh3_64_intdigest(answer))
        if before[1] != connection.last[1] or before[0] == sent:
            return
        name = _id_of(answer)
        if not name:
            return  # answers of this server have no id of their own
        if name == self._first_id:
            # The first answer once more, or a server whose answers all have one id: then the next
            # answer also has it.
            if self._was_first_repeated:
                return
            self._was_first_repeated = True
            raise UnaskedBytes
        if not self.unasked:  # equal answers and ids by chance are never refused
            self.report_unexpected_bytes("one answer, with its id, to two requests")
        raise UnaskedBytes

    # connections ---------------------------------------------------------------------------------

    def _take_idle(self) -> _Connection | None:
        """Prefers the newest, so that spare connections reach their idle limit."""
        oldest = self._loop.time() - _KEEPALIVE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if self.unasked or not connection.usable or connection.idle_since <= oldest:
                connection.abort()
            elif is_silent(connection.descriptor):
                connection.owner = self
                return connection
            # else the event loop reads the bytes, and closes the connection
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout), self._connecting:
                # The address that accepted the last connection goes first; each gets a share of the
                # time.
                *first, last = sorted(
                    await self._resolve(), key=lambda address: address != self._last_connected
                )
                for address in first:
                    with contextlib.suppress(OSError):
                        async with asyncio.timeout(self._connect_timeout / (1 + len(first))):
                            return await self._connect_to(address)
                return await self._connect_to(last)
        except TimeoutError:
            raise ConnectTimeout from None

    async def _connect_to(self, address: Any) -> _Connection:
        family, *_, (host, port, *_) = address
        peer = self._peer.reveal()
        tls: JsonObject = {}
        if peer.scheme == "https":
            tls = {"ssl": _tls(), "server_hostname": peer.raw_host}
        create = partial(self._loop.create_connection, host=host, port=port, family=family, **tls)
        if self.proxy is not None and self.url.reveal().scheme == "https":
            connection = await self._through_tunnel(create)
        else:
            _, connection = await create(partial(_Connection, self))
        self._last_connected = address
        return connection

    async def _through_tunnel(self, create: Callable[..., Any]) -> _Connection:
        url = self.url.reveal()
        transport, tunnel = await create(_Tunnel)
        try:
            host = f"{url.host_subcomponent}:{url.port}"
            fields = _lines({"Host": host, **self._proxy_headers()})
            transport.write(f"CONNECT {host} HTTP/1.1\r\n{fields}\r\n".encode())
            status = await tunnel.status
            if status in (403, 407):
                raise _TunnelRefused(status)
            if status != 200:
                raise ConnectionError(f"the proxy answered HTTP {status}")
            connection = _Connection(self)
            connection.connection_made(transport)  # it may be lost in the handshake
            connection.transport = await self._loop.start_tls(
                transport, connection, _tls(), server_hostname=url.raw_host
            )
        except BaseException:
            transport.abort()
            raise
        return connection

    async def _resolve(self) -> list[Any]:
        peer = self._peer.reveal()
        with contextlib.suppress(socket.gaierror):  # raised unless the host is an IP address
            return socket.getaddrinfo(
                peer.raw_host,
                peer.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        now = self._loop.time()
        lookup = self._lookup
        expired = now - self._lookup_started_at > _ADDRESS_CACHE_SECONDS
        if lookup is None or (lookup.done() and (lookup.exception() or expired)):
            coroutine = self._loop.getaddrinfo(peer.raw_host, peer.port, type=socket.SOCK_STREAM)
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

    def _proxy_headers(self) -> dict[str, str]:
        if self.proxy is None or not self.proxy.has_credentials:
            return {}
        return {"Proxy-Authorization": basic_authorization(self.proxy)}

    def _head_for(self, url: HiddenUrl, headers: dict[str, str]) -> bytes:
        if any(character in value for value in headers.values() for character in "\r\n\0"):
            raise ValueError(f"a line break in a header field (one of {', '.join(headers)})")
        revealed = url.reveal()
        host = str(revealed.host_subcomponent)
        if not revealed.is_default_port():
            host = f"{host}:{revealed.port}"
        fields = {
            "Host": host,
            "User-Agent": "datatrove-ckpt",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        target = revealed.raw_path_qs
        if self.proxy is not None and revealed.scheme == "http":
            target = f"http://{host}{target}"
            fields |= self._proxy_headers()
        lines = _lines({**fields, **headers})
        return f"{self._method} {target} HTTP/1.1\r\n{lines}Content-Length: ".encode()


def _lines(fields: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items())
