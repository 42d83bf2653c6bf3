"""Connects the head node of a task with its worker nodes, if several nodes serve a model together.

The workers run the engine's other parts, without an HTTP server (``run_worker_node``). Each worker
holds a TCP connection to the head node (port ``master_port + 1``), which closes at the end of
either process, however it ends.

    to the workers     "start": (re)start your part of the engine    closed: the head node has ended
    to the head node   "died": my part of the engine ended           closed: this worker is lost

The death of a part is a death of the server, which restarts on all nodes. A lost worker node ends
the run. Because messages can end the run, both ends authenticate first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from typing import Self

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import LINK_KEY_VARIABLE, Nodes
from datatrove_ckpt.errors import ConfigError, ServerDied, ServerStartFailed
from datatrove_ckpt.inference.servers.node import lease_gpus
from datatrove_ckpt.inference.servers.server import InferenceServer
from datatrove_ckpt.process.shutdown import Shutdown

_START = b"start\n"
_DIED = b"died\n"
_RETRY_DELAY = 0.5  # seconds
# Seconds of silence, seconds between probes, failed probes: a host that loses power closes no
# connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class HeadNode:
    """The head node's end of the connections.

    Attributes:
        on_worker_death: called with the cause when a worker's part of the engine died.
    """

    def __init__(self, config: InferenceConfig, nodes: Nodes) -> None:
        if config.replicas > 1:
            raise ConfigError(
                "replicas: a server on several nodes cannot have replicas; use more tasks instead."
            )
        self.nodes = nodes
        self.on_worker_death: Callable[[str], None] = lambda cause: None
        self._port = config.master_port + 1
        self._started = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._lost_node: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        require_link_key()
        try:
            self._listener = await asyncio.start_server(
                self._handle, None, self._port, limit=MAX_LINE
            )
        except OSError as error:
            raise ServerStartFailed(
                f"The worker nodes of this task cannot reach its head node: port {self._port} "
                f"(master_port + 1): {error}. Choose another master_port."
            ) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        self._lost_node.cancel()
        self._listener.close()
        # This ends the handlers; cancelling them would log an error (asyncio in 3.11).
        for writer in self._handlers.values():
            writer.transport.abort()
        await asyncio.gather(*self._handlers)

    def start_workers(self) -> None:
        """Makes every worker start its part of the engine now.

        Workers that connect later start immediately.
        """
        self._started = True
        for writer in self._writers:
            writer.write(_START)

    async def watch(self) -> None:
        """Raises ServerDied once a worker node is lost."""
        raise ServerDied(await asyncio.shield(self._lost_node))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = writer
        host = writer.get_extra_info("peername")[0]
        if await authenticate(reader, writer, HEAD, WORKER):
            await self._follow(reader, writer, host)
        elif self._listener.is_serving():
            logger.warning(
                f"Refused a connection from {host} to port {self._port}: its other end is no node "
                f"of this task, or did not prove that it knows this task's {LINK_KEY_VARIABLE}."
            )
        writer.close()
        del self._handlers[task]

    async def _follow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._writers.add(writer)
        _enable_keepalive(writer)
        if self._started:
            writer.write(_START)
        while await read_line(reader) == _DIED:
            self.on_worker_death(
                f"lost its part on node {host}, which ended by itself; see that node's log"
            )
        self._writers.discard(writer)
        if not self._lost_node.done():
            self._lost_node.set_result(
                f"Node {host}, which serves a part of the model, is lost. See that node's log."
            )


async def follow_head(config: InferenceConfig, rank: int, nodes: Nodes, shutdown: Shutdown) -> None:
    """Serves until the head node ends, also during its drain.

    Raises:
        ServerStartFailed: see ``run_worker_node``.
    """
    serving = asyncio.create_task(run_worker_node(config, rank, nodes))
    stopping = asyncio.create_task(shutdown.requested())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        await shutdown.wait_for(asyncio.wait([serving]))
        serving.cancel()
    stopping.cancel()
    await asyncio.gather(serving, return_exceptions=shutdown.is_requested)


async def run_worker_node(config: InferenceConfig, rank: int, nodes: Nodes) -> None:
    """Serves this node's part of the model until the head node ends.

    Raises:
        ServerStartFailed: the head node has another link key than this one, or this one has none.
    """
    require_link_key()
    connection = await _connect(config, nodes)
    if connection is None:
        return
    reader, writer = connection
    ((lease,),) = (await lease_gpus([config])).values()
    with contextlib.closing(lease):
        server = InferenceServer(config, rank, 0, lease, nodes=nodes)
        watch: asyncio.Task[None] | None = None
        try:
            while await read_line(reader) == _START:
                if watch is not None:
                    watch.cancel()
                await server.kill()
                await server.launch()
                watch = asyncio.create_task(_report_death(server, writer))
            logger.info("The head node has ended, so this node stops, too.")
        finally:
            if watch is not None:
                watch.cancel()
            writer.close()
            await server.kill()


async def _report_death(server: InferenceServer, writer: asyncio.StreamWriter) -> None:
    code = await server.watch()
    logger.warning(await server.report(f"died with exit code {code}", code))
    writer.write(_DIED)


async def _connect(
    config: InferenceConfig, nodes: Nodes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Returns the connection to the head node. None if the head node failed, or has no document
    left.

    Raises:
        ServerStartFailed: the head node has another link key than this one.
    """
    window = config.server_ready_max_attempts * config.server_ready_delay_sec
    head = nodes.hosts[0]
    port = config.master_port + 1
    try:
        async with asyncio.timeout(window):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(head, port, limit=MAX_LINE)
                    _enable_keepalive(writer)
                    proven = await authenticate(reader, writer, WORKER, HEAD)
                    if proven:
                        return reader, writer
                    writer.close()
                    if proven is False:
                        raise ServerStartFailed(
                            f"The head node, {head}, and this one have different values of "
                            f"{LINK_KEY_VARIABLE} (or another program answers on port {port}, "
                            "master_port + 1). Submit the run again; or, if you start the nodes "
                            "yourself, export one random value to all of them."
                        )
                await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        where = f"{head} on port {port} (master_port + 1)"
        logger.warning(
            f"The head node did not listen at {where} within {window:g} s, so this node stops."
        )
        return None


def _enable_keepalive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# The nodes of one task prove that they know DATATROVE_CKPT_LINK_KEY by HMAC-SHA256 of a random
# number that the other end chose. ``InferenceConfig`` makes the key where a run is submitted;
# others can read argv and the pickled step.


HEAD = b"head"
WORKER = b"worker"
"""The role of the node that makes a proof.

It is part of the proof, so that no proof can be sent back to its maker.
"""

MAX_LINE = 1024
"""Bytes of a line; what is longer is not ours."""

_PROOF_TIMEOUT = 10.0  # seconds


def require_link_key() -> None:
    """Raises ServerStartFailed if this node has no key."""
    if not os.environ.get(LINK_KEY_VARIABLE):
        raise ServerStartFailed(
            f"{LINK_KEY_VARIABLE} is not set on this node, so the nodes of this task cannot prove "
            "that they belong together. A run makes the key when it is submitted, and sbatch "
            "passes it on (--export=ALL, its default). Submit the run again; or, if you start the "
            "nodes yourself, export one random value to all of them."
        )


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: bytes, peer: bytes
) -> bool | None:
    """Whether the other end knows our key; None if it ended, or proved nothing in time.

    It gets our proof, too.
    """
    challenge = secrets.token_hex(16).encode()
    try:
        async with asyncio.timeout(_PROOF_TIMEOUT):
            writer.write(challenge + b"\n")
            peer_challenge = await read_line(reader)
            if not peer_challenge:
                return None
            writer.write(_proof(own, peer_challenge.strip()) + b"\n")
            proof = await read_line(reader)
            if proof:
                return hmac.compare_digest(proof.strip(), _proof(peer, challenge))
            return None
    except TimeoutError:
        return None


def _proof(role: bytes, challenge: bytes) -> bytes:
    # Without a name: tracebacks show the values of names.
    digest = hmac.digest(
        os.environ.get(LINK_KEY_VARIABLE, "").encode(), role + b" " + challenge, "sha256"
    )
    return digest.hex().encode()


async def read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except (OSError, ValueError):  # a line that is too long
        return b""
