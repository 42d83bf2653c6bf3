"""POST to a plain http:// URL: all that a server on this node, or in this cluster, asks for.

aiohttp serves every case (TLS, proxies, redirects, compression), and costs 60 to 77 us of CPU per request for it, half
of what a document costs as a whole; this costs 20 (measured). One request at a time per connection, nothing is ever
sent twice: whether to try again is ``client.py``'s business. A connection on which anything was wrong
is not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from yarl import URL

from datatrove_ckpt.inference.client.http1 import RemoteProtocolError, Response, ResponseParser
from datatrove_ckpt.redaction import HiddenBytes, HiddenDict

# Below this size one ``send`` of header and body is cheaper than two without a copy.
_JOINED = 1 << 16
# uvicorn's socket queues 2048 connections; one that is turned away tries again after a whole second.
_CONNECTING_AT_ONCE = 1000
# Seconds a host's addresses are kept: connections come in thousands, and a lookup takes a thread each.
_ADDRESS_LIFE = 10.0


class ConnectTimeout(TimeoutError):
    """No connection in time."""


class _Connection(asyncio.Protocol):
    """One connection. ``usable`` until it closes, or something was wrong with it."""

    def __init__(self) -> None:
        self.usable = True
        self.idle_since = 0.0
        self._answer: asyncio.Future[Response] | None = None
        self._parser: ResponseParser

    def ask(self, head: HiddenBytes, body: bytes) -> asyncio.Future[Response]:
        self._parser = ResponseParser()
        self._answer = answer = asyncio.get_running_loop().create_future()
        if len(body) <= _JOINED:
            self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        else:
            self._transport.write(b"%s%d\r\n\r\n" % (head, len(body)))
            self._transport.write(body)
        return answer

    def fail(self, error: Exception | None = None) -> None:
        """Nothing more is sent or received; the request under way, if there is one, ends with the error."""
        self.usable = False
        self._transport.abort()
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if self._parser.status >= 300:  # the status alone decides, however little of its text has come
            answer.set_result(self._parser.response())
        elif error is not None:
            answer.set_exception(error)

    # what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        # An answer may take an hour; a host that vanishes without a word is noticed by this alone.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.fail()  # nobody has asked
            return
        try:
            if self._parser.feed(data):
                self._answered()
        except RemoteProtocolError as error:
            self.fail(error)

    def _answered(self) -> None:
        answer, self._answer = self._answer, None
        # An answer that comes before the request is sent refuses it: what is left of it is nothing to go on after.
        if not self._parser.reusable or self._transport.get_write_buffer_size():
            self.fail()
        if answer is not None and not answer.done():
            answer.set_result(self._parser.response())
        del self._parser

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and error is None and self._parser.end():
            self._answered()
        elif self._answer is not None:
            when = "inside the answer" if self._parser.status else "before the answer"
            self.fail(RemoteProtocolError(f"the connection was closed {when}" + (f": {error}" if error else "")))
        else:
            self.fail()


class PlainTransport:
    """Sends requests to one http:// URL, over as many connections as there are requests at once.

    Args:
        headers: further header fields, such as the API key's.
        timeout: seconds from a request's sending to the end of its answer.
        connect_timeout: seconds until there is a connection.
        keepalive: seconds after which a connection that nobody used is not used any more.
    """

    def __init__(
        self, url: URL, headers: HiddenDict | None, timeout: float, connect_timeout: float, keepalive: float
    ) -> None:
        assert url.raw_host is not None
        self._host, self._port = url.raw_host, url.port or 80
        self._timeout = timeout
        self._connect_timeout = min(connect_timeout, timeout)
        self._keepalive = keepalive
        self._head = _head(url, headers or HiddenDict())
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._idle: list[_Connection] = []
        # In order of their deadlines, as all have the same timeout. One timer, for the first of them, serves all.
        self._asked: dict[_Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._connecting = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._lookup: asyncio.Future[list[Any]] | None = None
        self._looked_up_at = 0.0
        self._reached: Any = None

    async def post(self, body: bytes) -> Response:
        """The answer, whatever its status.

        Raises:
            ConnectTimeout, TimeoutError: there was no connection, or no answer, in time.
            OSError: connection refused, broken, or something else than an answer.
        """
        connection = self._take_idle() or await self._connect()
        if self._closed:
            connection.fail()
            raise ConnectionAbortedError("the client is closed")
        self._asked[connection] = deadline = self._loop.time() + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._expire)
        try:
            answer = await connection.ask(self._head, body)
        except BaseException:
            connection.fail()
            raise
        finally:
            del self._asked[connection]
        if connection.usable and not self._closed:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        return answer

    async def close(self) -> None:
        """Closes every connection; requests under way fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._idle, *self._asked):
            connection.fail(ConnectionAbortedError("the client was closed"))
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes their sockets in its next turn

    def _take_idle(self) -> _Connection | None:
        """The connection that was used last: the others may close meanwhile."""
        oldest = self._loop.time() - self._keepalive
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.fail()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout), self._connecting:
                # One that has answered before goes first, and one that is silent leaves time for the others.
                *others, last = sorted(await self._resolve(), key=lambda address: address != self._reached)
                for address in others:
                    with contextlib.suppress(OSError):  # which a TimeoutError is
                        async with asyncio.timeout(self._connect_timeout / (1 + len(others))):
                            return await self._connect_to(address)
                return await self._connect_to(last)
        except TimeoutError:
            raise ConnectTimeout from None

    async def _connect_to(self, address: Any) -> _Connection:
        family, *_, (host, port, *_) = address
        _, connection = await self._loop.create_connection(_Connection, host, port, family=family)
        self._reached = address
        return connection

    async def _resolve(self) -> list[Any]:
        """The host's addresses. Whoever asks while a lookup is under way waits for that one."""
        with contextlib.suppress(socket.gaierror):  # it is an address already
            return socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            )
        now, lookup = self._loop.time(), self._lookup
        if lookup is None or (lookup.done() and (lookup.exception() or now - self._looked_up_at > _ADDRESS_LIFE)):
            coroutine = self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            lookup = self._lookup = asyncio.ensure_future(coroutine)
            self._looked_up_at = now
        return await asyncio.shield(lookup)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        late = []
        for connection, deadline in self._asked.items():
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._expire)
                break
            late.append(connection)
        for connection in late:
            connection.fail(TimeoutError())


def _head(url: URL, headers: HiddenDict) -> HiddenBytes:
    """Everything up to the value of Content-Length.

    Raises:
        ValueError: a line break where none may be.
    """
    if any(character in value for value in headers.values() for character in "\r\n\0"):
        raise ValueError(f"a line break in a header field (one of {', '.join(headers)})")
    host = f"[{url.raw_host}]" if ":" in (url.raw_host or "") else url.raw_host
    start = (
        f"POST {url.raw_path_qs} HTTP/1.1\r\n"
        f"Host: {host}{f':{url.port}' if url.port != 80 else ''}\r\n"
        "User-Agent: datatrove-ckpt\r\n"
        "Accept: application/json\r\n"
        "Accept-Encoding: identity\r\n"
        "Content-Type: application/json\r\n"
    )
    return HiddenBytes(
        (start + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "Content-Length: ").encode()
    )
