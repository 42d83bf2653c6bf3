"""A client of servers that run already, without the check that they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from datatrove_ckpt.common.redaction import Key
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers
from datatrove_ckpt.inference.client.urls import HiddenUrl


@asynccontextmanager
async def client_of(
    config: InferenceConfig,
    urls: Sequence[str | HiddenUrl] = (),
    api_key: Key | str | None = None,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[CompletionClient]:
    servers = ModelServers(config, clock)
    servers.add_endpoints(urls, api_key)
    try:
        yield CompletionClient(servers, sleep=sleep)
    finally:
        await servers.close()
