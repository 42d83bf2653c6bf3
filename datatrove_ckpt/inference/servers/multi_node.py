"""The line between the first node of a task and its other nodes, when several nodes serve one model together.

The first node reads documents, asks and writes. The others run the engine's other part without an HTTP server
(``follow``), start it anew when the first one does, and end when the first one ends, however that happens: they hold a
TCP connection to it (port ``master_port + 1``), and a connection closes whatever ended its process.

    to the others      "start": (re)start your part of the engine now;   closed: the first node has ended, or failed
    to the first       "died": my part of the engine ended;              closed: this node is gone

A part that dies counts as a death of the server, which is then started again on all nodes. A node that is gone ends the
run: nobody here can bring it back.

Nothing secret passes here, but who speaks here can end the run. So the first node listens only where its way to the
other nodes begins, and only to their addresses. Other users of those hosts have the same addresses: where the
environment variable DATATROVE_CKPT_LINK_KEY has one value on all nodes, both ends prove that they know it (HMAC-SHA256
of a number that the other end drew), before anything else is said. Without it the same proof is made of an empty key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError, ServerDied, ServerStartFailed
from datatrove_ckpt.inference.servers.gpu_slots import slots
from datatrove_ckpt.inference.servers.nodes import Nodes
from datatrove_ckpt.inference.servers.server import InferenceServer

KEY_VARIABLE = "DATATROVE_CKPT_LINK_KEY"
_PROOF_TIMEOUT = 10.0
_START, _DIED = b"start\n", b"died\n"
_RETRY_DELAY = 0.5
# Seconds of silence, probes, and seconds between them, after which a host that vanished without a word counts as gone.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Leader:
    """The first node's end of the line.

    Attributes:
        on_death: called with what happened when another node's part of the engine died.
    """

    def __init__(self, config: InferenceConfig, nodes: Nodes) -> None:
        if config.replicas > 1:
            raise ConfigError("replicas: one server over several nodes cannot have replicas; use more tasks instead.")
        self.nodes = nodes
        self.on_death: Callable[[str], None] = lambda cause: None
        self._port = config.master_port + 1
        self._started = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        try:
            self._listener = await asyncio.start_server(self._listen, await _ways_to(self.nodes.hosts[1:]), self._port)
        except OSError as error:
            raise ServerStartFailed(
                f"The other nodes of this task cannot reach this one: port {self._port} (master_port + 1): {error}. "
                "Choose another master_port."
            ) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.cancel()
        self._listener.close()
        # Which ends their handlers, too. One that is cancelled is an error to asyncio's log (in 3.11).
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._handlers)

    def start(self) -> None:
        """Every node is to start its part of the engine now; who comes later is told then."""
        self._started = True
        for writer in self._writers:
            writer.write(_START)

    async def watch(self) -> None:
        """Wait for as long as all nodes are there.

        Raises:
            ServerDied: one is gone.
        """
        raise ServerDied(await asyncio.shield(self._gone))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        host = writer.get_extra_info("peername")[0]
        if host not in await _addresses(self.nodes.hosts):
            writer.close()
            return
        self._handlers.add(task)
        if not await _agree(reader, writer, b"first node", b"other node"):
            logger.warning(f"Somebody on {host} who does not know this task's {KEY_VARIABLE} was turned away.")
            writer.close()
            self._handlers.discard(task)
            return
        self._writers.add(writer)
        _keep_alive(writer)
        if self._started:
            writer.write(_START)
        while await _line(reader) == _DIED:
            self.on_death(f"lost its part on node {host}: that ended by itself; see that node's log")
        self._writers.discard(writer)
        if not self._gone.done():
            self._gone.set_result(f"Node {host}, which serves a part of the model, is gone. See that node's log.")


async def follow(config: InferenceConfig, rank: int, nodes: Nodes) -> None:
    """Serve this node's part of the model until the first node ends.

    Raises:
        ServerStartFailed: who listens there does not know our key, or we do not know its.
    """
    connection = await _connect(config, nodes)
    if connection is None:
        return
    reader, writer = connection
    if not await _agree(reader, writer, b"other node", b"first node"):
        writer.close()
        raise ServerStartFailed(
            f"The first node, {nodes.first_host}, and this one have different values of {KEY_VARIABLE}. Export one "
            "value, or none, to all nodes of the task."
        )
    async with slots(config) as (slot,):
        server = InferenceServer(config, rank, 0, slot, nodes=nodes)
        try:
            await _obey(reader, writer, server)
        finally:
            writer.close()
            await server.kill()


async def _obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: InferenceServer) -> None:
    death: asyncio.Task[None] | None = None
    order = asyncio.create_task(_line(reader))
    try:
        while True:
            await asyncio.wait([task for task in (order, death) if task], return_when=asyncio.FIRST_COMPLETED)
            if death is not None and death.done():
                logger.warning(str(death.exception()))
                writer.write(_DIED)
                death = None
            if not order.done():
                continue
            if order.result() != _START:
                logger.info("The first node has ended: so does this one.")
                return
            if death is not None:
                death.cancel()
            await server.kill()
            await server.launch()
            death = asyncio.create_task(server.watch())
            order = asyncio.create_task(_line(reader))
    finally:
        for task in (order, death):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (order, death) if task), return_exceptions=True)


async def _connect(config: InferenceConfig, nodes: Nodes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """The line to the first node; None when it never came: it failed, or had no document left to ask about."""
    window = config.server_ready_max_attempts * config.server_ready_delay_sec
    port = config.master_port + 1
    try:
        async with asyncio.timeout(window):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(nodes.first_host, port)
                    _keep_alive(writer)
                    return reader, writer
                await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        where = f"{nodes.first_host} on port {port} (master_port + 1)"
        logger.warning(f"The first node did not listen at {where} within {window:g} s: this one ends.")
        return None


async def _agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: bytes, peer: bytes) -> bool:
    """Whether the other end knows our key. Tells it that we know it, too."""
    mine = secrets.token_hex(16).encode()
    try:
        async with asyncio.timeout(_PROOF_TIMEOUT):
            writer.write(mine + b"\n")
            theirs = (await _line(reader)).strip()
            writer.write(_proof(me, theirs) + b"\n")
            return hmac.compare_digest((await _line(reader)).strip(), _proof(peer, mine))
    except TimeoutError:
        return False


def _proof(who: bytes, number: bytes) -> bytes:
    return hmac.digest(os.environ.get(KEY_VARIABLE, "").encode(), who + b" " + number, "sha256").hex().encode()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except (OSError, ValueError):  # ValueError: a line without end
        return b""


async def _ways_to(hosts: tuple[str, ...]) -> list[str]:
    """This node's own addresses on its ways to the hosts.

    Not the address of its own name: many a node knows itself as 127.0.1.1.

    Raises:
        OSError: there is no way to any of them.
    """
    loop = asyncio.get_running_loop()
    found: set[str] = set()
    failure: OSError = OSError("there are no other nodes")
    for host in hosts:
        try:
            for family, kind, _, _, address in await loop.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing: it asks the system for the way
                    found.add(probe.getsockname()[0])
        except OSError as error:
            failure = OSError(f"{host}: {error}")
    if not found:
        raise failure
    return sorted(found)


async def _addresses(hosts: tuple[str, ...]) -> set[str]:
    """All addresses of the hosts, and those by which a host knows itself."""
    loop = asyncio.get_running_loop()
    found = {"127.0.0.1", "::1"}
    for host in hosts:
        with contextlib.suppress(OSError):
            found |= {str(info[4][0]) for info in await loop.getaddrinfo(host, None)}
    return found | {f"::ffff:{address}" for address in found}


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
