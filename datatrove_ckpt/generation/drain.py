"""The drain of an early stop: decides when no more document can finish.

During a drain no new request is sent. A document that needs another request cannot finish now; its answers so far are
kept. The drain is over when no request is in flight and every document in work waits for one that is not sent. If a
rollout does something else then (computes, sleeps, calls another service), it has ``_GRACE_SECONDS`` more.
"""

from __future__ import annotations

import asyncio

from datatrove_ckpt.inference.client.client import CompletionClient

_GRACE_SECONDS = 2.0


class Drain:
    """Counts the documents in work, and how many of them wait for an answer.

    Attributes:
        documents: documents in work.
    """

    def __init__(self) -> None:
        self.documents = 0
        self._active = False
        self._waiting = 0
        self._client: CompletionClient | None = None
        self._over = asyncio.Event()
        self._grace_started = False

    def document_started(self) -> None:
        self.documents += 1

    def document_finished(self) -> None:
        self.documents -= 1
        self._schedule_check()

    def request_started(self) -> None:
        """A document has started to wait for answers, for one or for several at once."""
        self._waiting += 1
        self._schedule_check()

    def request_finished(self) -> None:
        """A document has stopped waiting: its rollouts have all answers that they have requested."""
        self._waiting -= 1

    async def until_over(self, client: CompletionClient | None) -> None:
        """Returns when no more document can finish, now that a stop is requested. None: no server is ready."""
        self._active, self._client = True, client
        if client is not None:
            client.router.on_release = self._schedule_check
        self._schedule_check()
        await self._over.wait()

    def _schedule_check(self) -> None:
        if self._active:
            # Not at once: a request whose last attempt has just ended still has to pass its answer to the rollout.
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        in_flight = self._client.router.in_flight if self._client is not None else 0
        if in_flight:
            return
        if self._waiting == self.documents:
            self._over.set()
        elif not self._grace_started:
            self._grace_started = True
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._over.set)
