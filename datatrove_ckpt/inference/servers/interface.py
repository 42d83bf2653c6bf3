"""Server: the interface of a model server, whether this process launched it or not."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import NoReturn, Self

from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.redaction import Key


class Server(ABC):
    """A server, or several, that requests can be sent to. ``async with`` starts and stops it.

    Attributes:
        urls: base URLs.
        api_key: bearer token for all of them, or None.
    """

    urls: list[str] | list[HiddenUrl]
    api_key: Key | None

    @abstractmethod
    async def start(self) -> None:
        """Returns when requests can be sent.

        Raises:
            ServerStartFailed: the server did not become ready.
            ServerRefused: it runs, and refuses our key.
            ConfigError: the config names something that does not exist.
        """

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait until the server ends. After ``stop``, wait until this call is cancelled.

        Raises:
            ServerDied: the server ended without a call of ``stop``.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the server and release its resources. May be called twice, and after a ``start`` that was cancelled."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


async def wait_until_cancelled() -> NoReturn:
    """Never returns: ends only by cancellation."""
    never = asyncio.Event()
    while True:
        await never.wait()
