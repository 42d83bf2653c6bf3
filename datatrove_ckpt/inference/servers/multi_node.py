"""Connects the head node of a task with its worker nodes, if several nodes serve a model together.

The workers run the engine's other parts, without an HTTP server (``run_worker_node``). Each worker
holds a TCP connection to the head node (port ``master_port + 1``), which closes at the end of
either process, however it ends.

    to the workers     "start": (re)start your part of the engine    closed: the head node has ended
    to the head node   nothing

The head node trusts no connection, so the port needs no key. If a part of the engine ends, the head
node's own part fails, and the head node restarts the server on all nodes. When a worker's process
ends, ``srun --kill-on-bad-exit`` ends the others, and the same command resumes.
"""

import asyncio
import contextlib
import socket
from typing import Self

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import NodeGroup
from datatrove_ckpt.errors import ConfigError, ServerStartFailed
from datatrove_ckpt.inference.servers.server import InferenceServer, lease_gpus
from datatrove_ckpt.process.shutdown import Shutdown

_START = b"s"
# Seconds of silence, seconds between probes, and failed probes: a host that loses power closes no
# connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class HeadNode:
    def __init__(self, config: InferenceConfig) -> None:
        if config.replicas > 1:
            raise ConfigError(
                "replicas: a server on several nodes cannot have replicas; use more tasks instead."
            )
        self._port = config.master_port + 1
        self._started = False
        self._workers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        try:
            self._listener = await asyncio.start_server(self._serve, None, self._port)
        except OSError as error:
            raise ServerStartFailed(
                f"The worker nodes of this task cannot reach its head node: port {self._port} "
                f"(master_port + 1): {error}. Choose another master_port."
            ) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        self._listener.close()
        for worker in self._workers:
            worker.transport.abort()

    def start_workers(self) -> None:
        """Makes every worker start its part of the engine now.

        Workers that connect later start immediately.
        """
        self._started = True
        for worker in self._workers:
            worker.write(_START)

    async def _serve(self, reader: asyncio.StreamReader, worker: asyncio.StreamWriter) -> None:
        self._workers.add(worker)
        if self._started:
            worker.write(_START)
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        self._workers.discard(worker)
        worker.close()


async def follow_head(
    config: InferenceConfig, rank: int, nodes: NodeGroup, shutdown: Shutdown
) -> None:
    """Serves this node's part of the model until the head node ends, also during a drain."""
    serving = asyncio.create_task(run_worker_node(config, rank, nodes))
    stopping = asyncio.create_task(shutdown.requested())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        await shutdown.wait_for(asyncio.wait([serving]))
        serving.cancel()
    stopping.cancel()
    await asyncio.gather(serving, return_exceptions=shutdown.is_requested)


async def run_worker_node(config: InferenceConfig, rank: int, nodes: NodeGroup) -> None:
    connection = await _connect(config, nodes)
    if connection is None:
        return
    reader, writer = connection
    ((lease,),) = (await lease_gpus([config])).values()
    with contextlib.closing(lease):
        server = InferenceServer(config, rank, 0, lease, nodes=nodes)
        watch: asyncio.Task[None] | None = None
        try:
            while await _is_start(reader):
                if watch is not None:
                    watch.cancel()
                await server.kill()
                await server.launch()
                watch = asyncio.create_task(_report_death(server))
        finally:
            if watch is not None:
                watch.cancel()
            writer.close()
            await server.kill()


async def _is_start(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == _START
    except OSError:
        return False


async def _report_death(server: InferenceServer) -> None:
    code = await server.watch()
    logger.warning(
        f"{await server.report(f'died with exit code {code}', code)}\nThe head node restarts it on "
        "all nodes."
    )


async def _connect(
    config: InferenceConfig, nodes: NodeGroup
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    window = config.server_ready_max_attempts * config.server_ready_delay_sec
    head = nodes.hosts[0]
    port = config.master_port + 1
    try:
        async with asyncio.timeout(window):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(head, port)
                    connection = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for name, value in _KEEPALIVE.items():
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                    return reader, writer
                await asyncio.sleep(0.5)
    except TimeoutError:
        logger.warning(
            f"The head node did not listen at {head} on port {port} (master_port + 1) within "
            f"{window:g} s. This node stops."
        )
        return None
