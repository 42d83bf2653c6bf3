"""HTTP over aiohttp: TLS, proxies, credentials in the URL.

Imported when needed, as it takes a while.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from datatrove_ckpt.common.redaction import Secret, redact
from datatrove_ckpt.common.retrying import asked_wait, quotas
from datatrove_ckpt.inference.client import plain
from datatrove_ckpt.inference.client.body import AnyBody, Body, LargeAnswer
from datatrove_ckpt.inference.client.plain import (
    ConnectTimeout,
    RemoteProtocolError,
    Response,
    UnaskedBytes,
    UnaskedCounter,
    is_silent,
)
from datatrove_ckpt.inference.client.urls import Extras, HiddenUrl, beside, headers_for

_READ_BUFFER = 1 << 18
# aiohttp warns about plain bytes above this size, in bytes.
_STREAMED_SIZE = 1 << 20


class _WatchedConnection(ResponseHandler):
    """A connection of aiohttp that is not used again after bytes came unasked, see ``plain.py``.

    aiohttp takes a late response for the next request's, and only a replaced class of connections
    can watch for it.
    """

    def __init__(self, owner: AiohttpTransport) -> None:
        super().__init__(asyncio.get_running_loop())
        self._owner = owner
        self._is_asked = False
        self.unasked = False
        self.last: tuple[object, int] = (None, 0)

    @property
    def upgraded(self) -> bool:
        """True: aiohttp then keeps a connection for its response until ``send`` has left it."""
        return True

    def set_response_params(self, **params: Any) -> None:
        self._is_asked = True
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        status = data[0].code
        if not self._is_asked:
            self.close()
            if status != 408:
                self.unasked = True
                self._owner.note_unasked()
            return
        self._is_asked = status < 200
        if status >= 300:
            self.force_close()
        super().feed_data(data, size)

    def is_connected(self) -> bool:
        if self._owner.unasked:
            return False
        if not super().is_connected() or self.transport is None:
            return False
        return is_silent(self.transport.get_extra_info("socket").fileno())


class AiohttpTransport(UnaskedCounter):
    """Like ``PlainTransport``. ``proxied``: the environment names a proxy for this URL."""

    errors = (aiohttp.ClientError, OSError)

    def __init__(
        self,
        url: HiddenUrl,
        api_key: Secret | None,
        timeout: float,
        connect_timeout: float,
        keepalive: float,
        method: str,
        proxied: bool,
    ) -> None:
        self.url = url
        self.api_key = api_key
        # The session would show them among its attributes.
        fields = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers = {**fields, **headers_for(url, api_key)}
        self._method = method
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive)
        connector._factory = partial(_WatchedConnection, self)  # type: ignore[assignment]
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=timeout, connect=connect_timeout, sock_connect=connect_timeout
            ),
            read_bufsize=_READ_BUFFER,
            auto_decompress=False,
            # Our servers on 127.0.0.1 use no proxy. With a proxy, aiohttp reads the environment in
            # a thread per request.
            trust_env=proxied,
        )

    async def send(self, body: AnyBody = b"", extras: Extras | None = None) -> Response:
        url = self.url
        headers = self._headers
        if extras:
            url, headers = beside(url, headers, extras)
        data: bytes | io.BytesIO | AsyncIterator[bytes]
        if isinstance(body, Body):
            headers = {**headers, "Content-Length": str(len(body))}
            data = _pieces(body)
        else:
            if len(body) <= _STREAMED_SIZE:
                data = body
            else:
                data = io.BytesIO(body)
        began_at = time.monotonic()
        try:
            async with self._session.request(
                self._method,
                url.reveal(),
                data=data or None,
                headers=headers,
                allow_redirects=False,
            ) as response:
                connection = response.connection.protocol  # type: ignore[union-attr]
                assert isinstance(connection, _WatchedConnection)
                coding = response.headers.get("Content-Encoding", "")
                try:
                    answer = await _read_body(response, coding)
                except (aiohttp.ClientError, OSError):
                    if response.status < 300:
                        raise
                    answer = b""  # the status alone decides, and it is known
                if time.monotonic() - began_at >= plain.SHORT:
                    await asyncio.sleep(plain.QUIET)
                if connection.unasked:
                    raise UnaskedBytes
                if response.status == 200:
                    self.refuse_late(connection, body, answer)
                    form = f"{response.headers.get('Content-Type', '')} {coding}"
                    shown = quotas(response.headers)
                    return Response(200, answer, form=form.strip(), quotas=shown)
                return Response(response.status, answer, asked_wait(response.headers))
        except aiohttp.ConnectionTimeoutError:
            raise ConnectTimeout from None

    def explain(self, error: Exception) -> str:
        # As yarl writes it.
        return redact(str(error).replace(str(self.url.reveal()), str(self.url)))

    async def close(self) -> None:
        await self._session.close()


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


async def _read_body(response: aiohttp.ClientResponse, coding: str) -> bytes:
    """Returns the content of a response.

    Raises:
        RemoteProtocolError: it is too long.
    """
    body = bytearray()
    large = LargeAnswer(coding)
    async for data in response.content.iter_any():
        if refusal := large.append(body, data):
            raise RemoteProtocolError(refusal)
    return bytes(body)
