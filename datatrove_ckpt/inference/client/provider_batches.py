"""BatchProvider: the files and batches of a provider, as in OpenAI's API.

It sends and receives, and keeps nothing: ``generation/provider_passes.py`` has the order of
effects. Files are streamed in both directions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, NoReturn

import aiohttp
import orjson

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.common.redaction import HiddenDict, Key, frames_cut
from datatrove_ckpt.common.retrying import asked_wait
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.answers import RetryableError
from datatrove_ckpt.inference.client.urls import HiddenUrl

_SECONDS = 3600.0  # an upload of 200 MB over a slow line
_SILENT_SECONDS = 300.0
_CONNECT_SECONDS = 30.0
_BLOCK = 1 << 16
_PAGE = 100
_SHOWN = 2000
_EARLIER_SECONDS = 3600  # how far the clocks of this machine and the provider may differ
_NOT_FOUND = 404
ENDED = frozenset({"completed", "expired", "cancelled", "failed"})


@dataclass(frozen=True)
class RemoteBatch:
    """A batch, as the provider describes it.

    Attributes:
        files: of its answers and of its errors, as far as there are any.
        errors: why it has failed, with codes.
    """

    id: str
    status: str
    files: tuple[str, ...] = ()
    errors: tuple[tuple[str, str], ...] = ()


class FileGone(Exception):
    """The provider no longer has a file."""


class BatchProvider:
    """Use it as an asynchronous context manager.

    Each method raises ``RetryableError`` if another attempt may succeed, and ``ServerRefused`` if
    none will.
    """

    def __init__(self, url: HiddenUrl, api_key: Key | None, proxied: bool) -> None:
        headers = HiddenDict() if api_key is None else api_key.headers()
        self.url = url
        self._redact = url.redactor(headers)
        self._session = aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=_SECONDS, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            ),
            trust_env=proxied,
        )

    async def close(self) -> None:
        await self._session.close()

    async def upload(self, content: IO[bytes], name: str) -> str:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", content, filename=name, content_type="application/jsonl")
        answer = await self._ask("POST", "files", data=form)
        return str(answer["id"])

    async def delete(self, file: str) -> None:
        """Deletes a file. A batch that is created with it later fails."""
        try:
            await self._ask("DELETE", f"files/{file}")
        except FileGone:
            return

    async def create(self, file: str, path: str, tag: str) -> RemoteBatch:
        """Creates a batch: from here on it costs money.

        After a ``RetryableError`` whose status is not 429, the batch may exist: find it before it
        is created again.
        """
        body = {
            "input_file_id": file,
            "endpoint": path,
            "completion_window": "24h",
            "metadata": {"datatrove_ckpt": tag},
        }
        return _batch(await self._ask("POST", "batches", json=body))

    async def find(self, tag: str, file: str, since: float) -> RemoteBatch | None:
        """Looks for a batch in the list of all batches.

        Args:
            since: no batch from long before this time is looked at.
        """
        after = ""
        while True:
            query = {"limit": str(_PAGE)}
            if after:
                query["after"] = after
            page = await self._ask("GET", "batches", params=query)
            found = [batch for batch in page.get("data") or () if isinstance(batch, dict)]
            for batch in found:
                metadata = batch.get("metadata") or {}
                if batch.get("input_file_id") == file or metadata.get("datatrove_ckpt") == tag:
                    return _batch(batch)
            if not found or not page.get("has_more"):
                return None
            if found[-1].get("created_at", since) < since - _EARLIER_SECONDS:
                return None
            after = str(found[-1]["id"])

    async def retrieve(self, batch: str) -> RemoteBatch:
        return _batch(await self._ask("GET", f"batches/{batch}"))

    async def lines(self, file: str) -> AsyncIterator[bytes]:
        """Yields the lines of a file.

        Raises:
            FileGone: the provider no longer has it.
            RetryableError: also if it is cut off.
        """
        url = self.url.api(f"files/{file}/content")
        rest = bytearray()
        try:
            async with self._session.get(url.reveal()) as response:
                if response.status != 200:
                    await self._refuse(response, url)
                async for block in response.content.iter_chunked(_BLOCK):
                    *lines, last = block.split(b"\n")
                    for line in lines:
                        rest += line
                        yield bytes(rest)
                        rest.clear()
                    rest += last
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error, url) from None
        if rest:
            yield bytes(rest)

    async def _ask(self, method: str, path: str, **content: object) -> JsonObject:
        url = self.url.api(path)
        try:
            with frames_cut():
                async with self._session.request(
                    method,
                    url.reveal(),
                    allow_redirects=False,
                    **content,  # type: ignore[arg-type]
                ) as response:
                    if not 200 <= response.status < 300:
                        await self._refuse(response, url)
                    answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error, url) from None
        except orjson.JSONDecodeError:
            raise RetryableError(f"the answer of {url} is not JSON") from None
        if not isinstance(answer, dict):
            raise RetryableError(f"the answer of {url} is no JSON object")
        return answer

    def _lost(self, error: Exception, url: HiddenUrl) -> RetryableError:
        text = self._redact(str(error).replace(str(url.reveal()), str(url)))
        return RetryableError(f"{type(error).__name__} from {url}: {text}", unreachable=True)

    async def _refuse(self, response: aiohttp.ClientResponse, url: HiddenUrl) -> NoReturn:
        status = response.status
        text = self._redact((await response.read())[: 8 * _SHOWN].decode(errors="replace"))
        text = " ".join(text.split())[:_SHOWN]
        is_missing = status == _NOT_FOUND
        if is_missing and "/files/" in str(url):
            raise FileGone(text)
        # A new batch may be missing for a while.
        if status in retrying.SERVER.retried or (is_missing and "/batches/" in str(url)):
            raise RetryableError(
                f"HTTP {status} from {url}: {text}",
                asked_wait=asked_wait(response.headers),
                status=status,
            )
        refused = ServerRefused(
            f"{url} answered HTTP {status}: {text or '(empty)'} Check that this provider has "
            "batches, and that the key may use them; or set provider_batches to false."
        )
        refused.status = status
        raise refused


def _batch(answer: JsonObject) -> RemoteBatch:
    if "id" not in answer:
        raise RetryableError("the answer has no id")
    errors = (answer.get("errors") or {}).get("data") or ()
    files = [answer.get(name) for name in ("output_file_id", "error_file_id")]
    return RemoteBatch(
        str(answer["id"]),
        str(answer.get("status")),
        tuple(str(file) for file in files if file),
        tuple((str(one.get("code")), str(one.get("message"))) for one in errors),
    )
