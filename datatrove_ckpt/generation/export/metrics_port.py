"""One port for all ranks of a user on a node: Prometheus is told one address, however many processes work there.

    one process         holds the name ``@datatrove-ckpt-metrics-UID-HOST-PORT`` and the port; it is the server
    the others          are connected to that name, and send their ranks' metrics every two seconds
    the server ends     its connections break; one of the others gets the name, and the port a moment later

The name is that of an abstract Unix socket. Of all that could decide who is the server, it alone needs no file, is free
as soon as its process is dead, however that died, and reaches exactly as far as the port: not into another container
with a network of its own. Only Linux has it. Elsewhere the process that gets the port serves its own ranks only.

Anybody on the node may use that name. So both sides ask the kernel whether the other one belongs to the same user.

A rank that has ended is shown for two more minutes, if its process still runs: Prometheus may look every minute only.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import StreamRequestHandler, TCPServer, ThreadingMixIn
from typing import Any

import orjson
from loguru import logger

from datatrove_ckpt.generation.export.metrics import Snapshot
from datatrove_ckpt.generation.export.prometheus import encoded

_KEEP_ENDED_SECONDS = 120.0
_SEND_SECONDS = 2.0  # between two messages to the server, and between two attempts to become the server
_SILENT_SECONDS = 8.0  # after which a process that hangs is left out
_MAX_MESSAGE = 64 << 20  # bytes

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
        self._wake = threading.Event()
        self.heard: dict[socket.socket, list[Snapshot]] = {}
        """What the other processes have sent."""
        self.sockets: set[socket.socket] = set()
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
        self._wake.set()
        if thread is not None:
            thread.join()

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
            with suppress(OSError):
                try:
                    peers = _Server(self, socket.AF_UNIX, self._name, _Peer) if sys.platform == "linux" else None
                except OSError:  # another process has the name
                    self._report()
                else:
                    self._serve(peers)
            self._wake.wait(_SEND_SECONDS)

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

    def _report(self) -> None:
        """Sends this process's metrics to the server. Returns when there is nothing left to show."""
        with socket.socket(socket.AF_UNIX) as connection, self.owned(connection):
            connection.settimeout(_SILENT_SECONDS)
            connection.connect(self._name)
            if _user(connection) != os.getuid():
                self._warn("another user has a program there")
                return
            while not self._is_idle():
                connection.sendall(orjson.dumps(self.snapshots()) + b"\n")
                self._wake.wait(_SEND_SECONDS)

    def _serve(self, peers: _Server | None) -> None:
        http: _Server | None = None
        try:
            while not self._is_idle():
                http = http or self._listen()
                self._wake.wait(_SEND_SECONDS)
        finally:
            # First the port, then the name: who gets the name wants the port.
            for server in (http, peers):
                if server is not None:
                    server.end()

    def _listen(self) -> _Server | None:
        """None: another program has the port."""
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        try:
            http = _Server(self, family, self.address, _Scrape)
        except (OSError, OverflowError) as error:
            self._warn(getattr(error, "strerror", None) or str(error))
            return None
        if self._warned:
            logger.info(f"metrics_port: {self._where()} is free now; the metrics are there.")
            self._warned = False
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
    def owned(self, one: socket.socket) -> Iterator[None]:
        self.sockets.add(one)
        try:
            yield
        finally:
            self.sockets.discard(one)


class _Server(ThreadingMixIn, TCPServer):
    """Listens, and answers in threads, until ``end``.

    Raises:
        OSError: it cannot listen.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: MetricsPort, family: int, address: Any, handler: type[StreamRequestHandler]) -> None:
        self.address_family = family
        self.port = port
        self.has_ended = False
        super().__init__(address, handler)
        port.sockets.add(self.socket)
        threading.Thread(target=self.serve_forever, name="datatrove-ckpt metrics port", daemon=True).start()

    def end(self) -> None:
        """Returns when the port is free."""
        self.has_ended = True
        self.shutdown()
        self.server_close()
        self.port.sockets.discard(self.socket)
        for connection in list(self.port.heard):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up is nobody's problem."""


class _Peer(StreamRequestHandler):
    """Hears another process that shows ranks at the same port."""

    server: _Server

    def handle(self) -> None:
        connection, port = self.connection, self.server.port
        with port.owned(connection), suppress(OSError, ValueError):
            if _user(connection) != os.getuid():
                return
            try:
                port.heard[connection] = []
                while not self.server.has_ended:
                    connection.settimeout(_SILENT_SECONDS)
                    port.heard[connection] = orjson.loads(self.rfile.readline(_MAX_MESSAGE))
            finally:
                del port.heard[connection]


class _Scrape(BaseHTTPRequestHandler):
    server: _Server
    server_version = "datatrove-ckpt"
    sys_version = ""
    timeout = 10.0  # seconds for a request to come in

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            port = self.server.port
            heard = [one for found in list(port.heard.values()) for one in found]  # the other processes of the node
            self._answer(200, *encoded([*port.snapshots(), *heard], self.headers.get("Accept", "")))
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


def _user(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


_ports: dict[tuple[str, int], MetricsPort] = {}
_guard = threading.Lock()


def metrics_port(host: str, port: int) -> MetricsPort:
    """The one of this process."""
    with _guard:
        if (host, port) not in _ports:
            _ports[host, port] = MetricsPort(host, port)
        return _ports[host, port]


def _forget_ports() -> None:
    """In a fork, whose copies of the sockets would keep the port and answer nobody."""
    global _guard
    _guard = threading.Lock()
    for port in _ports.values():
        for one in list(port.sockets):
            one.close()
    _ports.clear()


os.register_at_fork(after_in_child=_forget_ports)
