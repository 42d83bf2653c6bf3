"""What is still worth waiting for, once a rank is told to end: documents whose last requests are in flight.

No further request is sent. So a document that asks for one more cannot finish in this life; what it was answered so far
is kept. The drain is over when every document in work waits for such a request, and none is in flight any more. A
rollout that does something else meanwhile (computes, sleeps, asks others) has ``_PATIENCE`` seconds from then on.
"""

from __future__ import annotations

import asyncio

from datatrove_ckpt.inference.client.client import CompletionClient

_PATIENCE = 2.0


class Drain:
    """Counts the documents in work, and those of them that wait for an answer.

    Attributes:
        on: nothing new is begun.
        documents: in work.
    """

    def __init__(self) -> None:
        self.on = False
        self.documents = 0
        self._asking = 0
        self._client: CompletionClient | None = None
        self._over = asyncio.Event()
        self._ending = False

    def document_started(self) -> None:
        """A document is in work."""
        self.documents += 1

    def document_finished(self) -> None:
        """It is in work no more."""
        self.documents -= 1
        self._changed()

    def request_started(self) -> None:
        """A document waits for an answer, or for several."""
        self._asking += 1
        self._changed()

    def request_finished(self) -> None:
        """It waits for none any more."""
        self._asking -= 1

    async def until_over(self, client: CompletionClient | None) -> None:
        """Closes the client, and waits until no document can finish any more. None: there is no server yet."""
        self.on, self._client = True, client
        if client is not None:
            client.router.close(self._changed)
        self._changed()
        await self._over.wait()

    def _changed(self) -> None:
        if self.on:
            # Not at once: whose last attempt just ended is about to go on with its answer.
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        in_flight = self._client.router.in_flight if self._client is not None else 0
        if in_flight:
            return
        if self._asking == self.documents:
            self._over.set()
        elif not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(_PATIENCE, self._over.set)
