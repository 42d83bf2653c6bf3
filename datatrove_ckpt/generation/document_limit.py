"""Decides how many documents may be in work together.

The limit covers the requests that the servers take, and a few more, so that each server has a
choice. Rollouts that do other work between requests need more documents, so the limit grows by one
whenever a request could be sent, none waits, and no document may start, as in TCP's slow start.
Large documents also share a budget of bytes.
"""

import asyncio

from datatrove_ckpt.common.memory import ByteBudget
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import FIRST_LIMIT
from datatrove_ckpt.inference.client.routing import WINDOW, Router, Sender
from datatrove_ckpt.process.open_files import requests_at_once

_SMALL = 1 << 16  # bytes of a document that are not counted
_IDLE_SECONDS = 1.0
_MOST_UNDECIDED = 1000


def most_documents(configs: list[InferenceConfig]) -> int:
    config = configs[0]
    if config.limits_documents and config.max_concurrent_documents is not None:
        return config.max_concurrent_documents
    texts = [
        model_config.texts_for(
            requests_at_once(model_config.max_concurrent_generations, model_config.servers)
        )
        for model_config in configs
    ]
    documents = max(1, sum(texts) // config.rollouts_per_document)
    if any(model_config.servers > 1 for model_config in configs):
        documents += WINDOW
    return documents


class DocumentLimit:
    """Call ``acquire`` before each document, in one task, and ``release`` after it."""

    def __init__(self, configs: list[InferenceConfig], media: ByteBudget) -> None:
        config = configs[0]
        self._max_documents = most_documents(configs)
        self._rollouts = config.rollouts_per_document
        self._models: dict[Sender, tuple[InferenceConfig, Router]] = {}
        self._size = self._max_documents
        self._is_fixed = config.limits_documents
        self._elsewhere = 0  # documents that do other work than requests
        if not self._is_fixed:
            self._size = min(self._max_documents, max(1, FIRST_LIMIT // self._rollouts))
        self._in_work = 0
        self._room: asyncio.Future[None] | None = None
        self._bytes = media

    def admits(self, size: int) -> bool:
        """Returns False if ``acquire`` must be awaited."""
        if size > _SMALL or (self._in_work >= self._size and self._is_full):
            return False
        self._in_work += 1
        return True

    async def acquire(self, size: int) -> None:
        if size > _SMALL:
            await self._bytes.acquire(size)
        while self._is_full:
            # One wake-up for each turn of the event loop: a semaphore has one for each document.
            self._room = asyncio.get_running_loop().create_future()
            if self._is_idle():
                # Rollouts may wait for more documents, to send their requests together.
                ended, _ = await asyncio.wait([self._room], timeout=_IDLE_SECONDS)
                if not ended and self._is_idle():
                    self._elsewhere += self._size
                    self._size = min(self._max_documents, 2 * self._size)
            else:
                await self._room
        self._room = None
        self._in_work += 1

    def release(self, size: int) -> None:
        if size > _SMALL:
            self._bytes.release(size)
        self._in_work -= 1
        self._wake()

    def follow(self, config: InferenceConfig, router: Router, sender: Sender) -> None:
        self._models[sender] = config, router
        self.changed(sender)

    def _is_idle(self) -> bool:
        routers = [router for _, router in self._models.values()]
        busy = any(router.in_flight or router.waiting for router in routers)
        return bool(routers) and not self._is_fixed and not busy

    @property
    def _is_full(self) -> bool:
        if self._in_work < self._size:
            return False
        undecided = sum(sender.undecided for sender in self._models)
        return self._in_work - min(undecided, _MOST_UNDECIDED) >= self._size

    def changed(self, sender: Sender) -> None:
        if sender in self._models:
            if not self._is_fixed:
                self._resize(sender)
            if not self._is_full:
                self._wake()

    def _resize(self, sender: Sender) -> None:
        _, router = self._models[sender]
        is_full = self._is_full or self._room is not None
        if is_full and not router.waiting and router.in_flight < router.capacity:
            self._elsewhere += 1
        texts = sum(config.texts_for(each.capacity) for config, each in self._models.values())
        capacity = texts // self._rollouts
        if any(len(each.targets) > 1 for _, each in self._models.values()):
            capacity += WINDOW
        self._size = min(self._max_documents, max(1, capacity) + self._elsewhere)
        sender.may_grow = self._size < self._max_documents

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
