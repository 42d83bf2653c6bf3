"""How many documents may be in work at once.

Under ``max_concurrent_generations: auto`` nobody knows the number beforehand: it follows the requests that may be in
flight. That alone is too few for rollouts that do other work between their requests. So whenever a request could be
sent, none waits, and no further document may start, one more may: like TCP's slow start, the number doubles in the time
of a request, until some requests wait for a place in flight. It is not lowered: documents that wait cost memory only.

Documents with pictures of 10 MB cost much of it, so the large ones share a budget of bytes, too.
"""

from __future__ import annotations

import asyncio
from functools import partial

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.routing import FIRST_LIMIT, Router
from datatrove_ckpt.process.memory import ByteBudget, media_bytes
from datatrove_ckpt.process.open_files import requests_at_once

_SMALL = 1 << 16  # bytes of a document that count for nothing


def most_documents(config: InferenceConfig, *others: InferenceConfig) -> int:
    """How many documents may be in work at most.

    Of several models, as many as all of them together have room for: those that wait for one hold back no other.
    """
    if config.max_concurrent_documents is not None and (config.limits_documents or not others):
        return config.max_concurrent_documents
    texts = [one.texts_for(requests_at_once(one.max_concurrent_generations, one.servers)) for one in (config, *others)]
    return max(1, sum(texts) // config.rollouts_per_document)


class DocumentLimit:
    """Holds back documents: ``acquire`` before each, in one task; ``release`` after each. On the event loop."""

    def __init__(self, config: InferenceConfig, *others: InferenceConfig) -> None:
        self._most = most_documents(config, *others)
        self._rollouts = config.rollouts_per_document
        self._routers: list[Router] = []
        grows = config.max_concurrent_documents is None
        self._size = min(self._most, max(1, FIRST_LIMIT // self._rollouts)) if grows else self._most
        self._in_work = 0
        self._room: asyncio.Future[None] | None = None
        self._bytes = ByteBudget(media_bytes())

    async def acquire(self, size: int) -> None:
        """Returns when there is room for a document of ``size`` bytes, and takes it."""
        if size > _SMALL:
            await self._bytes.acquire(size)
        while self._in_work >= self._size:
            # One wake-up for all that end in one turn of the event loop: a semaphore has one for each.
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._room = None
        self._in_work += 1

    def release(self, size: int) -> None:
        if size > _SMALL:
            self._bytes.release(size)
        self._in_work -= 1
        self._wake()

    def follow(self, router: Router) -> None:
        """Grow with the requests that the router lets through, from now on. Several models have one each."""
        self._routers.append(router)
        if self._size < self._most:
            router.on_free = partial(self._grow, router)
            self._grow(router)

    def _grow(self, router: Router) -> None:
        is_full = self._in_work >= self._size or self._room is not None
        starved = is_full and router.in_flight < router.capacity
        wanted = max(sum(each.capacity for each in self._routers) // self._rollouts, self._size + starved)
        if self._size < min(wanted, self._most):
            self._size = min(wanted, self._most)
            self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
