"""One server through all its lives: started, watched, and when it dies or hangs killed and started again.

Each life has another port and another key. What was in flight when it ended is sent again, to the other replicas if
there are any, and what waits waits. A server counts as dead when

- its process ends;
- its health address answers 5xx or refuses connections: vLLM's HTTP process may outlive its engine, and after a
  SIGTERM it can leave open requests without an answer for ever. It is asked after every failure that may be the
  server's, and every few seconds while requests are in flight;
- it hangs: it has requests, and for ``hang_timeout`` seconds it answered none and counted no tokens.

It may be started again ``server_max_restarts`` times within ``server_restart_window_sec``, so that a week is not ended
by a crash a day. The death that proves a request poisonous does not count: that request will not come again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, NoReturn

import aiohttp
from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ServerDied, ServerStartFailed
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.client.routing import Death
from datatrove_ckpt.inference.servers.gpu_slots import GpuLease
from datatrove_ckpt.inference.servers.interface import wait_until_cancelled
from datatrove_ckpt.inference.servers.metrics import Metrics, read_metrics
from datatrove_ckpt.inference.servers.multi_node import Leader
from datatrove_ckpt.inference.servers.server import InferenceServer

_PROBE_INTERVAL = 5.0
_PROBE_TIMEOUT = 10.0
_PROBES = 3  # a server is asked this often before it counts as dead
_PROBE_PAUSE = 0.3
_DRAIN_MARGIN = 5.0
_SILENT = "does not answer"
_NEVER = -1.0
_LOOKS_PER_HANG = 4
_MAX_LOOK_INTERVAL = 30.0
_METRICS_TIMEOUT = 5.0
_ADMISSION_INTERVAL = 1.0
_FIRST_ADMISSION = 16
# Seconds before the first restart; doubled for each further one within the window.
_FIRST_BACKOFF = 1.0
_MAX_BACKOFF = 60.0


class Replica:
    """One server through all its lives."""

    def __init__(
        self,
        config: InferenceConfig,
        rank: int,
        index: int,
        slot: GpuLease,
        client: CompletionClient,
        leader: Leader | None = None,
    ) -> None:
        self.config = config
        self.client = client
        if leader is None:
            self.server = InferenceServer(config, rank, index, slot)
        else:
            self.server = InferenceServer(config, rank, index, slot, nodes=leader.nodes, on_launch=leader.start)
            leader.on_death = self._declare_dead
        self.target = client.add(self.check)
        self.restarts = 0
        self._death = Death("")
        self._since = _NEVER
        self._name = f"Server {index} of rank {rank}" if config.replicas > 1 else f"The server of rank {rank}"
        self._recent: deque[float] = deque()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._examination: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        await self.server.start()
        self._end = asyncio.get_running_loop().create_future()
        if self.config.target_waiting is not None:
            self.target.limit = _FIRST_ADMISSION
        self.client.up(self.target, self.server.url, self.server.api_key)

    async def stop(self) -> None:
        await self.client.disconnect(self.target)
        await (self.server.kill() if self.client.fast_stop else self.server.stop())

    async def keep_alive(self) -> NoReturn:
        """Start the server again whenever it ends.

        Raises:
            ServerDied: it may not be started again.
        """
        while True:
            cause = await self._live()
            await self.client.disconnect(self.target)
            if self.client.router.closed:
                # Clusters signal the server, too: it may well end before us.
                logger.info(f"{self._name} has ended. It is not started again, because the run ends, too.")
                await wait_until_cancelled()
            logger.warning(f"{self._name} is given up: {cause}\n{self._death.lost} requests are sent again.")
            await self.server.kill()
            await self._start_again(cause)

    async def _live(self) -> str:
        """One life of the server; the cause of its end."""
        api_key = self.server.api_key
        async with aiohttp.ClientSession(headers=api_key.headers() if api_key else None) as self._session:
            watchers = [self._watch_process(), self._watch_health(), self._watch_progress()]
            if self.config.target_waiting is not None:
                watchers.append(self._adapt_admission(self.config.target_waiting))
            tasks: list[asyncio.Future[Any]] = [asyncio.create_task(watcher) for watcher in watchers]
            try:
                await asyncio.wait([self._end, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # a watcher only ends with a mistake of ours, or once the end is declared
                cause = await self._end
            finally:
                for task in [*tasks, *([self._examination] if self._examination else [])]:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return cause if "\n" in cause else await self.server.report(cause)

    def _declare_dead(self, cause: str) -> None:
        if not self._end.done():
            self._death = self.client.died(self.target, cause.partition("\n")[0])
            self._end.set_result(cause)

    async def _start_again(self, cause: str) -> None:
        while True:
            await asyncio.sleep(self._next_backoff(cause))
            if self.client.router.closed:
                await wait_until_cancelled()
            self.restarts += 1
            try:
                await self.start()
            except ServerStartFailed as error:
                cause = str(error)
                logger.warning(f"{self._name} could not be started again: {cause}")
            else:
                logger.info(f"{self._name} is back (restart {len(self._recent)} of {self.config.server_max_restarts}).")
                return

    def _next_backoff(self, cause: str) -> float:
        """Seconds to wait before the next restart.

        Raises:
            ServerDied: there have been enough.
        """
        now = time.monotonic()
        window, allowed = self.config.server_restart_window_sec, self.config.server_max_restarts
        while self._recent and self._recent[0] < now - window:
            self._recent.popleft()
        if self._death.explained:  # by one request, which is a dead letter now: no sign that the next start will fail
            self._death = Death("")
            return _FIRST_BACKOFF
        if len(self._recent) >= allowed:
            raise ServerDied(
                f"{self._name} was started again {len(self._recent)} times within {window:g} s, and died again "
                f"(server_max_restarts={allowed}). The last time: {cause}"
            )
        self._recent.append(now)
        return backoff_seconds(len(self._recent), _FIRST_BACKOFF, _MAX_BACKOFF)

    # the four watchers -------------------------------------------------------------------------------------------

    async def _watch_process(self) -> None:
        try:
            await self.server.watch()
        except ServerDied as error:
            self._declare_dead(str(error))

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL)
            if self.target.attempts:
                await self.check(_NEVER, False)

    async def _watch_progress(self) -> None:
        interval = min(self.config.hang_timeout / _LOOKS_PER_HANG, _MAX_LOOK_INTERVAL)
        tokens: float | None = None
        while True:
            await asyncio.sleep(interval)
            tokens = await self._look_for_progress(tokens, min(interval, _METRICS_TIMEOUT))

    async def _look_for_progress(self, tokens: float | None, seconds: float) -> float | None:
        """Declares the server dead when it hangs.

        Args:
            tokens: what the last look returned.
            seconds: the engine's metrics may take.

        Returns:
            The tokens that the engine has counted; None where it does not say, or has no requests.
        """
        metrics = await self._metrics(seconds) if self.target.attempts else None
        if metrics is not None and tokens is not None and metrics.tokens != tokens:
            self.target.alive()
        in_flight, timeout = len(self.target.attempts), self.config.hang_timeout
        if in_flight and time.monotonic() - self.target.alive_at >= timeout:
            self._declare_dead(
                f"hangs: it has {in_flight} requests, and answered none, nor counted a token, for {timeout:g} s "
                "(hang_timeout)"
            )
        return metrics.tokens if metrics is not None else None

    async def _adapt_admission(self, target_waiting: int) -> None:
        """Keep ``target_waiting`` requests in the engine's queue: never empty, or it may idle; never long, or a death
        of the server loses more than it must.

        Whatever its queue has too many or too few is taken from, or added to, what is in flight. That counts what is
        on its way, too, which the engine does not: its text is still being tokenized, or its answer read. Where
        nothing waits, more than that may be missing: at each further look the addition is twice as large.
        """
        missing = target_waiting
        while True:
            await asyncio.sleep(_ADMISSION_INTERVAL)
            metrics = await self._metrics(_METRICS_TIMEOUT)
            if metrics is None:
                continue
            target = self.target
            if metrics.waiting >= 1:
                missing = target_waiting
                target.limit = max(target_waiting, target.in_flight + target_waiting - metrics.waiting)
            elif target.in_flight >= target.limit:
                target.limit = min(target.in_flight + missing, self.config.max_concurrent_generations)
                missing *= 2
            self.client.router.admit()

    async def _metrics(self, seconds: float) -> Metrics | None:
        assert self._session is not None
        return await read_metrics(self._session, self.server.url, self.config.server_type, seconds)

    # is it dead? -------------------------------------------------------------------------------------------------

    async def check(self, since: float, until_proof: bool) -> None:
        """Returns when the server turns out to live. If it does not, whoever waits is aborted meanwhile.

        A vLLM that was told to stop ends what it has begun, answers 500 to everything new, and calls itself healthy.
        So it is proof when a request that began later is answered, or when the time is over that it has for its end.

        Args:
            since: when the attempt began whose failure is the reason to ask.
            until_proof: wait for that.
        """
        if self._session is None or self._end.done():
            return
        await self._join_examination(since)
        if self.client.router.closed:
            return  # nothing is sent again, so it does not matter what it takes
        deadline = time.monotonic() + self.config.server_drain_sec + _DRAIN_MARGIN
        while until_proof and self.target.accepted_at <= since and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_PROBE_PAUSE)  # rare, and an event would cost every answer a look at who waits for it

    async def _join_examination(self, since: float) -> None:
        if self._examination is None or self._examination.done():
            self._since = _NEVER
            self._examination = asyncio.create_task(self._examine())
        self._since = max(self._since, since)
        await asyncio.wait([self._examination])

    async def _examine(self) -> None:
        complaint: str | None = None
        for probe in range(_PROBES):
            if probe:
                await asyncio.sleep(_PROBE_PAUSE)
            complaint = await self._ask_health()
            if complaint is None:
                return
        # Too busy to answer in time is not dead: then a request must have waited in vain, too, and all others with it.
        if complaint != _SILENT or self.target.alive_at <= self._since:
            self._declare_dead(f"is dead, though its process lives: its health address {complaint}")

    async def _ask_health(self) -> str | None:
        """None when the server says that it is well; else what is wrong."""
        assert self._session is not None
        # A custom server need not have /health; it has /v1/models, or would never have counted as ready.
        path = "v1/models" if self.config.server_type == "custom" else "health"
        try:
            timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
            async with self._session.get(f"{self.server.url}/{path}", timeout=timeout) as response:
                return f"answers HTTP {response.status}" if response.status >= 500 else None
        except TimeoutError:
            return _SILENT
        except (aiohttp.ClientError, OSError) as error:
            return f"gives {type(error).__name__}"
