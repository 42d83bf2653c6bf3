"""Server: what the generation room sees of a server, whoever launched it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self

from datatrove_ckpt.redaction import Key


class Server(ABC):
    """Where requests go. ``async with`` starts and stops it.

    Attributes:
        urls: base URLs, without /v1.
        api_key: bearer token for them, or None.
    """

    urls: list[str]
    api_key: Key | None

    @abstractmethod
    async def start(self) -> None:
        """Return when requests can be sent.

        Raises:
            ServerStartFailed: it never became ready.
            ServerRefused: it runs and refuses our key.
            ConfigError: the config names something that does not exist.
        """

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait for as long as the server lives. After ``stop`` it waits until it is cancelled.

        Raises:
            ServerDied: the server ended and nobody had asked it to.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the server and release what it held. Harmless when repeated, or when start was cancelled halfway."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def wait_until_cancelled() -> NoReturn:
    """Never returns."""
    never = asyncio.Event()
    while True:
        await never.wait()
