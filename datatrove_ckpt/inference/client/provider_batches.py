"""Sends and receives batches: ``BatchProvider`` in OpenAI's form, ``MessageBatches`` in
Anthropic's.

The classes save nothing: ``generation/provider_passes.py`` has the order of effects.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, NamedTuple, NoReturn, Protocol
from urllib.parse import quote

import aiohttp
from loguru import logger

from datatrove_ckpt.common import CUSTOM_ID, MESSAGES, JsonObject, retrying
from datatrove_ckpt.common.redaction import Secret, excerpt, redact, remember
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.responses import RetryableError, parse_json
from datatrove_ckpt.inference.client.urls import HiddenUrl, proxy_of

_BLOCK = 1 << 16
_SHOWN = 2000
UNSENT = frozenset({"expired", "cancelled", "canceled"})
"""The states of an ended batch with unsent requests."""
ENDED = UNSENT | {"completed", "failed", "ended"}
TAG_DIGITS = 6
_NEVER_SENT = ("batch_expired", "batch_cancelled", "canceled", "expired")
_REJECTIONS = {"invalid_request_error": 400, "request_too_large": 413}


@dataclass(frozen=True)
class RemoteBatch:
    """The provider's description of a batch.

    Attributes:
        status: state in lower case, which may be unknown to this package.
        lines: number of lines of its files; if the provider gives no counts, a number above any
            number of requests.
    """

    id: str
    status: str
    files: tuple[str, ...] = ()
    errors: str = ""
    lines: int = 0


class BatchAnswer(NamedTuple):
    """The answer to one request of a batch, not cleaned.

    Attributes:
        status: HTTP status; 0: the request was not sent.
    """

    custom_id: object
    status: int
    body: object


class RequestedBatch(Protocol):
    """The fields of a ``batch_log.Batch`` that are needed here."""

    path: str
    requests: int
    tag: str
    file: str


class ProviderObjectMissing(Exception):
    """Reports that the provider does not have a file, or a batch."""


class CreationUnknown(Exception):
    """Reports that a batch may exist. Another batch, which is named, must end first."""


class BatchProvider:
    """A client for batches in OpenAI's form.

    Each method raises ``RetryableError`` if another attempt may succeed, and ``ServerRefused`` if
    no attempt will. The provider's values may have any type. All texts except answers are cleaned.
    """

    takes_files = True
    _path = "batches"
    _after = "after"

    def __init__(self, url: HiddenUrl, api_key: Secret | None) -> None:
        headers = {} if api_key is None else api_key.headers(self._path)
        self.url = url
        remember(*url.secrets)
        self._session = aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # The total is for an upload of 200 MB over a slow line.
            timeout=aiohttp.ClientTimeout(total=3600.0, sock_connect=30.0, sock_read=300.0),
            # Without a proxy, aiohttp would add the host's credentials of ~/.netrc.
            trust_env=proxy_of(url) is not None,
        )

    async def close(self) -> None:
        await self._session.close()

    def clean(self, value: object) -> str:
        return " ".join(redact(str(value)).split())[:_SHOWN]

    async def upload(self, lines: IO[bytes], name: str) -> str:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", lines, filename=name, content_type="application/jsonl")
        return self._id(await self._ask("POST", "files", data=form))

    async def delete(self, file: str) -> None:
        """Deletes a file, so that a batch can no longer be created with it."""
        with suppress(ProviderObjectMissing):
            await self._ask("DELETE", f"files/{file}")

    async def create(self, batch: RequestedBatch, lines: IO[bytes] | None) -> RemoteBatch:
        """Creates a batch, which costs money from here on.

        After a ``RetryableError`` the batch may exist: find it before it is created again.
        """
        body = {
            "input_file_id": batch.file,
            "endpoint": batch.path,
            "completion_window": "24h",
            "metadata": {"datatrove_ckpt": batch.tag},
        }
        return self._batch(await self._ask("POST", self._path, json=body))

    async def find(self, batch: RequestedBatch, known_ids: Set[str]) -> RemoteBatch | None:
        """Searches for a batch in the provider's list of all batches.

        Raises:
            CreationUnknown: another batch must end first.
        """
        query = {"limit": "100"}
        seen = set()
        while True:
            page = await self._ask("GET", self._path, params=query)
            data = page.get("data")
            if not isinstance(data, list):
                return None
            listed = [entry for entry in map(_object, data) if entry.get("id")]
            # A provider may ignore the query, and return one page for ever.
            new = [entry for entry in listed if str(entry["id"]) not in seen]
            for entry in new:
                if await self._is(entry, batch, known_ids):
                    return self._batch(entry)
                seen.add(str(entry["id"]))
            if not new or page.get("has_more") is False:
                return None
            query[self._after] = str(new[-1]["id"])

    async def _is(self, listed: JsonObject, batch: RequestedBatch, known_ids: Set[str]) -> bool:
        metadata = _object(listed.get("metadata"))
        is_named = metadata.get("datatrove_ckpt") == batch.tag
        return is_named or listed.get("input_file_id") == batch.file

    async def retrieve(self, batch: str) -> RemoteBatch:
        return self._batch(await self._ask("GET", f"{self._path}/{batch}"))

    async def cancel(self, batch: str) -> None:
        await self._ask("POST", f"{self._path}/{batch}/cancel")

    async def answers(self, file: str) -> AsyncGenerator[BatchAnswer]:
        """Yields the answers of a file.

        Raises:
            ProviderObjectMissing: the provider does not have the file.
            RetryableError: also if the file is cut off.
        """
        async with aclosing(self._lines(file)) as lines:
            async for line in lines:
                parsed = _loads(line)
                if isinstance(parsed, dict):
                    yield self._answer(parsed)
                elif line.strip():
                    logger.warning(
                        "A line of a batch's answers is not JSON, and counts as missing."
                    )

    def _answer(self, line: JsonObject) -> BatchAnswer:
        response = _object(line.get("response"))
        error = line.get("error")
        body = response.get("body", response)
        status = _number(response.get("status_code"))
        if _object(error).get("code") in _NEVER_SENT:
            status = 0
        elif status is None:
            status = 200 if body else 500
        return BatchAnswer(line.get("custom_id"), status, body or error)

    def _batch(self, answer: JsonObject) -> RemoteBatch:
        files = [self.clean(answer.get(name) or "") for name in ("output_file_id", "error_file_id")]
        errors = answer.get("errors") or answer.get("error") or "it names no cause"
        return RemoteBatch(
            self._id(answer),
            self.clean(answer.get("status")).lower(),
            tuple(f"files/{file}/content" for file in files if file),
            self.clean(_object(errors).get("data", errors)),
            _total(answer, "completed", "failed"),
        )

    def _id(self, answer: JsonObject) -> str:
        if not answer.get("id"):
            raise RetryableError("the answer has no id")
        return self.clean(answer["id"])

    async def _lines(self, file: str) -> AsyncGenerator[bytes]:
        partial = bytearray()
        async with self._exchange("GET", file, allow_redirects=True) as response:
            if response.status != 200:
                raise RetryableError(f"HTTP {response.status} in place of a file")
            async for block in response.content.iter_chunked(_BLOCK):
                *lines, last = block.split(b"\n")
                for line in lines:
                    partial += line
                    yield bytes(partial)
                    partial.clear()
                partial += last
        if partial:
            yield bytes(partial)

    async def _ask(self, method: str, path: str, **options: object) -> JsonObject:
        async with self._exchange(method, path, allow_redirects=False, **options) as response:
            answer = _loads(await response.read())
        if not isinstance(answer, dict):
            raise RetryableError(f"the answer of {self.url.api(path)} is no JSON object")
        return answer

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, **options: object
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = self.url.api(quote(path))
        try:
            async with self._session.request(
                method,
                url.reveal(),
                **options,  # type: ignore[arg-type]
            ) as response:
                if not 200 <= response.status < 300:
                    await self._refuse(response, url, path)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            text = self.clean(str(error).replace(str(url.reveal()), str(url)))
            raise RetryableError(
                f"{type(error).__name__} from {url}: {text}", unreachable=True
            ) from None

    async def _refuse(
        self, response: aiohttp.ClientResponse, url: HiddenUrl, path: str
    ) -> NoReturn:
        status = response.status
        text = self.clean(excerpt((await response.read()).decode(errors="replace"), _SHOWN))
        if status in (404, 410) and path not in ("files", self._path):
            raise ProviderObjectMissing(f"HTTP {status}: {text}")
        if status in retrying.SERVER.retried:
            raise RetryableError(
                f"HTTP {status} from {url}: {text}",
                retry_after=retrying.retry_after(response.headers),
                status=status,
            )
        refused = ServerRefused(
            f"{url} answered HTTP {status}: {text or '(empty)'} Check that this key may use "
            "batches here, or set provider_batches to false."
        )
        refused.status = status
        raise refused


class MessageBatches(BatchProvider):
    """A client for batches in Anthropic's form: the requests are sent with the batch, which has no
    name.

    So a batch is found by the tag in its custom ids, which are readable once it has ended. Until
    then, any batch of the same size may be that batch.
    """

    takes_files = False
    _path = MESSAGES.removeprefix("/v1/") + "/batches"
    _after = "after_id"
    _undecided = ""

    async def delete(self, file: str) -> None:
        """Does nothing: there is no file, so a late request to create a batch is not stopped."""

    async def create(self, batch: RequestedBatch, lines: IO[bytes] | None) -> RemoteBatch:
        assert lines is not None
        requests = _tagged(lines, batch.tag[:TAG_DIGITS].encode())
        headers = {"Content-Type": "application/json"}
        return self._batch(await self._ask("POST", self._path, data=requests, headers=headers))

    async def find(self, batch: RequestedBatch, known_ids: Set[str]) -> RemoteBatch | None:
        self._undecided = ""
        remote = await super().find(batch, known_ids)
        if remote is None and self._undecided:
            raise CreationUnknown(self._undecided)
        return remote

    async def _is(self, listed: JsonObject, batch: RequestedBatch, known_ids: Set[str]) -> bool:
        remote = self._batch(listed)
        requests = remote.lines + _total(listed, "processing")
        if remote.id in known_ids or requests != batch.requests:
            return False
        if listed.get("archived_at"):
            return False
        if remote.status in ENDED:
            with suppress(ProviderObjectMissing):
                async with aclosing(self.answers(*remote.files)) as answers:
                    async for answer in answers:
                        return str(answer.custom_id).startswith(batch.tag[:TAG_DIGITS])
        self._undecided = remote.id
        return False

    def _answer(self, line: JsonObject) -> BatchAnswer:
        result = _object(line.get("result"))
        kind = result.get("type")
        error = _object(result.get("error"))
        error = _object(error.get("error")) or error
        status = _REJECTIONS.get(str(error.get("type")), 500)
        if kind == "succeeded":
            status = 200
        elif kind in _NEVER_SENT:
            status = 0
        return BatchAnswer(line.get("custom_id"), status, result.get("message") or error)

    def _batch(self, answer: JsonObject) -> RemoteBatch:
        # Not ``results_url``: the key must not go to another host.
        name = self._id(answer)
        lines = _total(answer, "succeeded", "errored", "canceled", "expired")
        status = self.clean(answer.get("processing_status")).lower()
        return RemoteBatch(name, status, (f"{self._path}/{name}/results",), lines=lines)


async def _tagged(file: IO[bytes], tag: bytes) -> AsyncGenerator[bytes]:
    before = b'{"requests":['
    while lines := await asyncio.to_thread(file.readlines, _BLOCK):
        for line in lines:
            yield b"%s%s%s-%s" % (before, CUSTOM_ID, tag, line[len(CUSTOM_ID) : -1])
            before = b","
    yield b"]}"


def _loads(raw: bytes) -> object:
    with suppress(ValueError, RecursionError):
        return parse_json(raw)
    return None


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    with suppress(ValueError, OverflowError):
        return int(float(str(value)))
    return None


def _total(answer: JsonObject, *kinds: str) -> int:
    counts = _object(answer.get("request_counts"))
    if not counts:
        return 1 << 40
    return sum(_number(counts.get(kind)) or 0 for kind in kinds)
