"""How many documents may be in work at once.

Under ``max_concurrent_generations: auto`` nobody knows the number beforehand: it follows the requests that may be in
flight. That alone is too few for rollouts that do other work between their requests. So whenever a request could be
sent, none waits, and no further document may start, one more may: like TCP's slow start, the number doubles in the time
of a request, until some requests wait for a place in flight. It is not lowered: documents that wait cost memory only.
"""

from __future__ import annotations

import asyncio
from functools import partial

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.routing import FIRST_LIMIT, Router
from datatrove_ckpt.process.open_files import requests_at_once


def most_documents(config: InferenceConfig) -> int:
    """How many documents may be in work at most."""
    if config.max_concurrent_documents is not None:
        return config.max_concurrent_documents
    requests = requests_at_once(config.max_concurrent_generations, config.servers)
    return max(1, requests // config.rollouts_per_document)


class DocumentLimit(asyncio.Semaphore):
    """Holds back documents. ``acquire`` before each, ``release`` after each."""

    def __init__(self, config: InferenceConfig) -> None:
        self._most = most_documents(config)
        self._rollouts = config.rollouts_per_document
        grows = config.max_concurrent_documents is None
        self._size = min(self._most, max(1, FIRST_LIMIT // self._rollouts)) if grows else self._most
        super().__init__(self._size)

    def follow(self, router: Router) -> None:
        """Grow with the requests that the router lets through, from now on."""
        if self._size < self._most:
            router.on_free = partial(self._grow, router)
            self._grow(router)

    def _grow(self, router: Router) -> None:
        starved = self.locked() and router.in_flight < router.capacity
        wanted = max(router.capacity // self._rollouts, self._size + starved)
        while self._size < min(wanted, self._most):
            self._size += 1
            self.release()
