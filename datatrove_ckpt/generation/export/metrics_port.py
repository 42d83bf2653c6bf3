"""One port for all ranks of a user on a node: Prometheus is told one address, however many processes work there.

    one process         holds the name ``@datatrove-ckpt-metrics-UID-HOST-PORT`` and the port; it is the server
    the others          are connected to that name, and send their ranks' metrics when the server asks for them
    the server ends     its connections break; one of the others gets the name, and the port a moment later

The name is that of an abstract Unix socket. Of all that could decide who is the server, it alone needs no file, is free
as soon as its process is dead, however that died, and reaches exactly as far as the port: not into another container
with a network of its own. Only Linux has it. Elsewhere the process that gets the port serves its own ranks only.

Anybody on the node may use that name. So both sides ask the kernel whether the other one belongs to the same user.

A rank that has ended is shown for two more minutes, if its process still runs: Prometheus may look every minute only.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
from loguru import logger

from datatrove_ckpt.generation.export.metrics import Snapshot
from datatrove_ckpt.generation.export.prometheus import encoded

_KEEP_ENDED_SECONDS = 120.0
_ANSWER_SECONDS = 3.0  # that another process may take for one message
_RETRY_SECONDS = 2.0  # between two attempts to get the port, or a connection
_MAX_ANSWER = 64 << 20  # bytes
_HELLO, _ASK, _END = b"datatrove-ckpt 1\n", b"?", b"\n"

GetSnapshot = Callable[[], Snapshot]


class MetricsPort:
    """The ranks of this process, and what shows them: as the server of the node, or through it.

    It works while there are ranks, and until those that have ended need not be shown any more.
    """

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port
        self._name = f"\0datatrove-ckpt-metrics-{os.getuid()}-{host[:50]}-{port}"
        self._lock = threading.Lock()
        self._ranks: dict[object, GetSnapshot] = {}
        self._ended: list[tuple[float, Snapshot]] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._warned = False
        self._wake, self._waker = socket.socketpair()
        self.sockets = {self._wake, self._waker}
        """A fork of this process closes them: it would keep the port, and answer nobody."""

    @contextmanager
    def shows(self, snapshot: GetSnapshot) -> Iterator[None]:
        """Shows a rank inside the block, and its last values for a while after it."""
        key = object()
        with self._lock:
            self._ranks[key] = snapshot
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datatrove-ckpt metrics", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            last = snapshot()
            with self._lock:
                del self._ranks[key]
                self._ended = [(until, one) for until, one in self._ended if one["labels"] != last["labels"]]
                self._ended.append((time.monotonic() + _KEEP_ENDED_SECONDS, last))

    def close(self) -> None:
        """Shows nothing more, for good. Returns when the port is free."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._waker.close()
        if thread is not None:
            thread.join()
        self._wake.close()

    def snapshots(self) -> list[Snapshot]:
        """Of this process's ranks. One that has ended and started again is shown once."""
        with self._lock:
            running = list(self._ranks.values())
            ended = [last for until, last in self._ended if until > time.monotonic()]
        found = [snapshot() for snapshot in running]
        labels = [one["labels"] for one in found]
        return found + [one for one in ended if one["labels"] not in labels]

    # the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_done():
            try:
                name = self._take_name()
                if name is None:
                    self._report()
                else:
                    self._serve(name)
            except OSError:
                _ready([self._wake], _RETRY_SECONDS)

    def _is_done(self) -> bool:
        """Whether the thread ends. The next rank starts another one."""
        with self._lock:
            if not self._is_idle():
                return False
            self._thread = None
            return True

    def _is_idle(self) -> bool:
        """Whether nothing is left to show."""
        now = time.monotonic()
        return self._closed or not (self._ranks or any(until > now for until, _ in self._ended))

    def _take_name(self) -> socket.socket | None:
        """The listening socket of the name; None if another process has it."""
        if sys.platform != "linux":
            return socket.socket(socket.AF_UNIX)  # without a name: nobody can connect to it
        found = socket.socket(socket.AF_UNIX)
        try:
            found.bind(self._name)
            found.listen(128)
        except OSError:
            found.close()
            return None
        return found

    # as one of the others ---------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Sends this process's metrics to the server whenever it asks. Returns when the server is gone."""
        with self._owned(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(self._name)
            if _user(connection) != os.getuid():
                self._warn("another user has a program there")
                raise PermissionError
            if _received(connection, len(_HELLO)) != _HELLO:  # it ends just now
                raise ConnectionError
            while not self._is_idle():
                if connection in _ready([self._wake, connection], _RETRY_SECONDS):
                    if connection.recv(1) != _ASK:
                        return
                    connection.sendall(orjson.dumps(self.snapshots()) + _END)

    # as the server ----------------------------------------------------------------------------------------------------

    def _serve(self, name: socket.socket) -> None:
        with self._owned(name):
            peers = _Peers(self)
            http: _Http | None = None
            try:
                while not self._is_idle():
                    if http is None:
                        http = self._listen(peers)
                    if name in _ready([self._wake, name], _RETRY_SECONDS):
                        peers.accept(name)
            finally:
                # First the port, then the name: who gets the name wants the port.
                if http is not None:
                    http.end()
                peers.close()

    def _listen(self, peers: _Peers) -> _Http | None:
        """None: another program has the port."""
        try:
            http = _Http(self.address, lambda: [*self.snapshots(), *peers.snapshots()])
        except (OSError, OverflowError) as error:
            self._warn(getattr(error, "strerror", None) or str(error))
            return None
        if self._warned:
            logger.info(f"metrics_port: {self._where()} is free now; the metrics are there.")
            self._warned = False
        self.sockets.add(http.socket)
        http.start()
        return http

    def _warn(self, why: str) -> None:
        """Once: the run must not end for it."""
        if not self._warned:
            logger.warning(
                f"metrics_port: {self._where()} cannot be used: {why}. The run goes on without metrics there, and "
                "tries again every few seconds. Choose another metrics_port, or end the program that has it."
            )
        self._warned = True

    def _where(self) -> str:
        return "{}:{}".format(*self.address)

    @contextmanager
    def _owned(self, one: socket.socket) -> Iterator[socket.socket]:
        self.sockets.add(one)
        try:
            yield one
        finally:
            self.sockets.discard(one)
            one.close()


class _Peers:
    """The other processes of this user that show ranks at the same port."""

    def __init__(self, port: MetricsPort) -> None:
        self._port = port
        self._connections: list[socket.socket] = []
        self._asking = threading.Lock()

    def accept(self, name: socket.socket) -> None:
        connection, _ = name.accept()
        connection.settimeout(_ANSWER_SECONDS)
        try:
            if _user(connection) != os.getuid():
                raise PermissionError
            connection.sendall(_HELLO)
        except OSError:
            connection.close()
            return
        self._port.sockets.add(connection)
        with self._asking:
            self._connections.append(connection)

    def snapshots(self) -> list[Snapshot]:
        """Of all peers. One that does not answer in time, or is gone, is dropped; it may connect again."""
        found: list[Snapshot] = []
        with self._asking:
            deadline = time.monotonic() + _ANSWER_SECONDS
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.sendall(_ASK)
            for connection in list(self._connections):
                try:
                    found += orjson.loads(_line(connection, deadline))
                except (OSError, ValueError):
                    self._drop(connection)
        return found

    def _drop(self, connection: socket.socket) -> None:
        self._connections.remove(connection)
        self._port.sockets.discard(connection)
        connection.close()

    def close(self) -> None:
        with self._asking:
            for connection in list(self._connections):
                self._drop(connection)


class _Http(ThreadingHTTPServer):
    """Answers ``GET /metrics``. Its socket listens once this is made.

    Raises:
        OSError: it cannot listen.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], snapshots: Callable[[], list[Snapshot]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.snapshots = snapshots
        super().__init__(address, _Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="datatrove-ckpt metrics port", daemon=True)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for its host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Returns when the port is free."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up is nobody's problem."""


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version = "datatrove-ckpt"
    sys_version = ""
    timeout = 10.0  # seconds for a request to come in

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, *encoded(self.server.snapshots(), self.headers.get("Accept", "")))
        elif path == "/":
            self._answer(200, b"datatrove-ckpt: the metrics are at /metrics\n", "text/plain; charset=utf-8")
        else:
            self._answer(404, b"not found\n", "text/plain; charset=utf-8")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""


def _ready(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that can be read, or have ended; none after ``seconds``."""
    poll = select.poll()  # select refuses descriptors above 1023
    for one in sockets:
        poll.register(one, select.POLLIN)
    numbers = {number for number, _ in poll.poll(seconds * 1000)}
    return [one for one in sockets if one.fileno() in numbers]


def _user(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def _line(connection: socket.socket, deadline: float) -> bytes:
    """Raises OSError if it does not come in time."""
    data = bytearray()
    while not data.endswith(_END):
        if not _ready([connection], max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        if not (part := connection.recv(1 << 16)) or len(data) > _MAX_ANSWER:
            raise ConnectionResetError
        data += part
    return bytes(data)


_ports: dict[tuple[str, int], MetricsPort] = {}
_guard = threading.Lock()


def metrics_port(host: str, port: int) -> MetricsPort:
    """The one of this process."""
    with _guard:
        if (host, port) not in _ports:
            _ports[host, port] = MetricsPort(host, port)
        return _ports[host, port]


def close_metrics_ports() -> None:
    """Ends all of this process."""
    with _guard:
        for port in _ports.values():
            port.close()
        _ports.clear()


def _forget_ports() -> None:
    """In a fork, whose copies of the sockets would keep the port and answer nobody."""
    global _guard
    _guard = threading.Lock()
    for port in _ports.values():
        for one in list(port.sockets):
            one.close()
    _ports.clear()


os.register_at_fork(after_in_child=_forget_ports)
