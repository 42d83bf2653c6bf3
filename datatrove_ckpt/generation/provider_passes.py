"""Sends a rank's parked requests in batches of the provider (``provider_batches``).

A pass over the input parks requests without an answer in files (``BatchLog``). After it,
``ProviderPasses.settle`` uploads the files, creates batches, waits, and puts the answers into the
request cache, where the next pass finds them.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import IO, TypeVar

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint.batch_log import ANSWER, FAILURE, Batch, RequestId, fields_of_batch
from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, RankFiles
from datatrove_ckpt.checkpoint.request_cache import CachedAnswer, CachedRequest
from datatrove_ckpt.common import MESSAGES, retrying
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CheckpointMismatch, ServerRefused, WaitsForBatches
from datatrove_ckpt.inference.client.client import Outage
from datatrove_ckpt.inference.client.provider_batches import (
    ENDED,
    UNSENT,
    BatchAnswer,
    BatchProvider,
    CreationUnknown,
    MessageBatches,
    ProviderObjectMissing,
    RemoteBatch,
)
from datatrove_ckpt.inference.client.responses import RetryableError
from datatrove_ckpt.inference.servers.host import ready_endpoints
from datatrove_ckpt.process.shutdown import Shutdown

T = TypeVar("T")

POLL_SECONDS = 60.0
LIST_LAG_SECONDS = 60.0
"""Longest delay before a new batch is in the provider's list, and before a new file is found."""
LOOK_SECONDS = 5.0


async def open_provider(config: InferenceConfig, path: str) -> BatchProvider:
    endpoint, *_ = await ready_endpoints(config, Outage(config.server_patience_seconds))
    kind = MessageBatches if path == MESSAGES else BatchProvider
    return kind(endpoint.url, endpoint.api_key)


async def cancel(batch: Batch) -> str | None:
    """Cancels a batch without a run. Returns the reason for a failure; "" after success; None if
    the provider no longer has the batch, as a run has also found.

    Raises:
        CkptError: the provider cannot be reached.
    """
    if not batch.id:
        return f"Batch number {batch.number} has no id yet. The next run finds it."
    config = InferenceConfig(
        "endpoint", batch.model or "-", endpoint_url=batch.url, api_key_env=batch.key_env or None
    )
    provider = await open_provider(config, batch.path)
    try:
        with suppress(ProviderObjectMissing):
            await provider.cancel(batch.id)
            return ""
        remote = await provider.retrieve(batch.id)
        return f"{batch.id} is not canceled: it cannot be, and is {remote.status}."
    except ProviderObjectMissing as error:
        if batch.state == "incomplete":
            return None
        return f"{batch.id} is not canceled: {error}. Run again first."
    except (RetryableError, ServerRefused) as error:
        return f"{batch.id} is not canceled: {error}"
    finally:
        await provider.close()


@dataclass(eq=False)
class ProviderPasses:
    _configs: dict[str, InferenceConfig]
    _checkpoint: OpenCheckpoint
    _shutdown: Shutdown

    def __post_init__(self) -> None:
        self._providers: dict[tuple[str, bool], BatchProvider] = {}
        self._unknown_since: dict[int, float] = {}
        self._undecided: set[int] = set()
        self._outage: Outage | None = None

    async def settle(self, no_wait: bool) -> None:
        """Sends the requests that are parked. Returns when no batch is open.

        Raises, in a group:
            Preempted: a stop was requested. Batches stay at the provider.
            WaitsForBatches: all batches are created, with ``no_wait``.
            ServerRefused, ServerUnavailable: the provider fails.
        """
        await self._change(lambda rank: rank.batches.filled())
        if not await self._open():
            return
        try:
            async with asyncio.TaskGroup() as group:
                stop = group.create_task(self._stop_when_requested())
                await self._settle(no_wait)
                stop.cancel()
        finally:
            for provider in self._providers.values():
                await provider.close()
            self._providers.clear()

    async def _stop_when_requested(self) -> None:
        await self._shutdown.requested()
        batches = _open_text(await self._open())
        logger.warning(f"{batches} The same command collects the answers.")
        self._shutdown.raise_preempted()

    async def _settle(self, no_wait: bool) -> None:
        logger.info(_open_text(await self._open()))
        while batches := await self._open():
            has_advanced = False
            for batch in batches:
                try:
                    has_advanced |= await self._advance(batch)
                    self._outage = None
                except RetryableError as error:
                    if self._outage is None:
                        patience = self._configs[batch.model].server_patience_seconds
                        self._outage = Outage(patience, model=batch.model)
                    # A provider that takes no more batches takes them when others have ended.
                    self._outage.failed(error, lambda: math.inf)
                    # The wait after five failures.
                    await asyncio.sleep(retrying.SERVER.wait(5, error.retry_after))
            if has_advanced:
                continue
            created = all(batch.id or batch.number in self._undecided for batch in batches)
            if no_wait and created:
                raise WaitsForBatches(
                    f"{_open_text(batches)} The same command collects the answers."
                )
            await asyncio.sleep(POLL_SECONDS if created else min(POLL_SECONDS, LOOK_SECONDS))

    async def _provider(self, batch: Batch) -> BatchProvider:
        form = batch.model, batch.path == MESSAGES
        provider = self._providers.get(form)
        if provider is None:
            config = self._configs.get(batch.model)
            if config is None or config.server_type != "endpoint":
                raise CheckpointMismatch(
                    f"Batch {batch.id or batch.number} has no endpoint in the config. Restore "
                    "it, and run again."
                )
            provider = self._providers[form] = await open_provider(config, batch.path)
        return provider

    # one batch -----------------------------------------------------------------------------------

    async def _advance(self, batch: Batch) -> bool:
        config = self._configs.get(batch.model)
        parks = config is not None and config.provider_batches
        if batch.state in ("filled", "uploaded") and not parks:
            await self._note(batch, "dropped")  # settings have changed since
            return True
        provider = await self._provider(batch)
        if batch.state == "filled":
            return await self._send(provider, batch)
        if batch.state == "uploaded":
            return await self._create(provider, batch)
        if batch.state == "creating":
            return await self._find(provider, batch)
        try:
            remote = await provider.retrieve(batch.id)
        except ProviderObjectMissing as error:
            gone = f"The provider has no batch {batch.id} ({error}). "
            if await self._is_awaited(batch, gone):
                return False
            # It may have been paid for: the user decides.
            raise ServerRefused(
                f"{gone}Check the endpoint and the key. Its {plural(batch.requests, 'request')} "
                "may have been paid for. To send them again: datatrove-ckpt batches cancel "
                f"{self._checkpoint.lease.files.folder.parent}, then run again."
            ) from None
        if remote.status not in ENDED:
            if batch.state == "incomplete":  # it was only missing for a while
                await self._note(batch, "created")
            # An unknown state may also be an end.
            if remote.lines < batch.requests:
                return False
        if remote.status == "failed" and not (remote.files and remote.lines):
            return await self._refused(batch, remote)
        return await self._collect(provider, batch, remote)

    async def _send(self, provider: BatchProvider, batch: Batch) -> bool:
        path = await self._change(lambda rank: rank.batches.path(batch.number))
        if not path.exists():  # another node has it
            await self._note(batch, "dropped")
            return True
        with await asyncio.to_thread(path.open, "rb") as lines:
            if not provider.takes_files:
                return await self._create(provider, batch, lines)
            file = await provider.upload(lines, f"{batch.tag}.jsonl")
        await self._note(batch, "uploaded", file=file)
        return True

    async def _create(
        self, provider: BatchProvider, batch: Batch, lines: IO[bytes] | None = None
    ) -> bool:
        await self._note(batch, "creating")
        until = time.monotonic() + LIST_LAG_SECONDS * provider.takes_files
        remote: RemoteBatch | None = None
        while remote is None:
            await asyncio.to_thread(self._checkpoint.lease.check_spending)
            try:
                try:
                    remote = await provider.create(batch, lines)
                except ServerRefused as refused:
                    # A new file may not be found yet; later, it may be gone.
                    if refused.status not in (400, 404) or time.monotonic() > until:
                        await self._note(batch, "filled")
                        raise
                    await asyncio.sleep(LOOK_SECONDS)
                    # A gateway may refuse what its provider has created.
                    remote = await provider.find(batch, await self._known_ids())
            except RetryableError as error:  # even a gateway's 429 may follow a created batch
                logger.warning(f"Whether batch {batch.number} was created is looked up: {error}")
                return False
        await self._created(batch, remote)
        return True

    async def _known_ids(self) -> set[str]:
        return await self._change(lambda rank: {each.id for each in rank.batches.batches.values()})

    async def _created(self, batch: Batch, remote: RemoteBatch) -> None:
        config = self._configs[batch.model]
        url = next(iter(config.endpoints_by_name.values())).url
        await self._note(batch, "created", id=remote.id, url=url, key_env=config.api_key_env or "")
        logger.info(f"Batch {remote.id} has {plural(batch.requests, 'request')} of this task.")

    async def _find(self, provider: BatchProvider, batch: Batch) -> bool:
        checked_at = time.monotonic()
        since = self._unknown_since.setdefault(batch.number, checked_at)
        try:
            remote = await provider.find(batch, await self._known_ids())
        except CreationUnknown as other:
            if batch.number not in self._undecided:
                logger.info(
                    f"Whether batch {batch.number} was created is known once {other} has ended."
                )
            self._undecided.add(batch.number)
            return False
        self._undecided.discard(batch.number)
        if remote is not None:
            del self._unknown_since[batch.number]
            await self._created(batch, remote)
            return True
        if checked_at - since < LIST_LAG_SECONDS:
            return False
        # Without its file, a late request to create the batch fails.
        await provider.delete(batch.file)
        del self._unknown_since[batch.number]
        await self._note(batch, "filled")
        return True

    async def _is_awaited(self, batch: Batch, missing: str) -> bool:
        if batch.state != "incomplete":
            logger.warning(f"{missing}The run waits for the rest.")
            await self._note(batch, "incomplete")
        patience = self._configs[batch.model].server_patience_seconds
        return unix_seconds() - batch.at < patience

    async def _refused(self, batch: Batch, remote: RemoteBatch) -> bool:
        """Handles a batch that failed as a whole, which costs nothing. Returns False if it is
        retried.
        """
        open_batches = [other for other in await self._open() if other.id]
        if len(open_batches) > 1 and "token_limit_exceeded" in remote.errors:
            await self._note(batch, "uploaded", id="")
            return False
        await self._note(batch, "dropped")
        raise ServerRefused(
            f"The provider refused batch {remote.id}: {remote.errors}. Correct the cause, and "
            "run again."
        )

    async def _collect(self, provider: BatchProvider, batch: Batch, remote: RemoteBatch) -> bool:
        """Reads the answers. Returns False if a file is missing, or has fewer lines than the
        provider has counted: the rest may still arrive.

        A request without a line counts as failed, unless the batch expired or was canceled.
        """
        rows = []
        answered = set()
        strange = ""
        gone = ""
        for file in remote.files:
            try:
                async with aclosing(provider.answers(file)) as answers:
                    async for answer in answers:
                        request = RequestId.parse(answer.custom_id)
                        if request is None:
                            strange = provider.clean(answer.custom_id)[:100]
                        elif (
                            request not in answered or answer.status == 200
                        ):  # a failure does not replace an answer
                            answered.add(request)
                            rows += _rows(provider, request, answer, batch)
                        if len(rows) >= 500:
                            await self._change(RankFiles.write_batch, rows)
                            rows = []
                await self._change(RankFiles.write_batch, rows)
                rows = []
            except ProviderObjectMissing as error:
                gone = f"It has no file {file} ({error}). "
        await self._change(RankFiles.sync)
        if strange:
            logger.warning(f"Batch {remote.id} has answers that are not of this run: {strange}")
        config = self._configs[batch.model]
        is_strange = strange != "" and not answered
        if is_strange and config.provider_batches:
            raise ServerRefused(
                f"Batch {remote.id}: no answer has the custom_id of a request, but others like "
                f"{strange}, perhaps of a gateway. Correct that, and run again. With "
                "provider_batches: false, its requests are paid for again."
            )
        lines = min(remote.lines, batch.requests)
        is_short = bool(gone) or (len(answered) < lines and not is_strange)
        if is_short:
            missing = (
                f"Batch {remote.id} is {remote.status}, and the provider gives {len(answered)} of "
                f"{plural(lines, 'line')} of its answers, which were paid for. {gone}"
            )
            if remote.status not in ENDED or await self._is_awaited(batch, missing):
                return False
        if len(answered) < batch.requests and (is_short or remote.status not in UNSENT):
            await self._change(_fail_others, batch, answered)
        await self._note(batch, "read")
        if is_short:
            raise ServerRefused(f"{missing}If you run again, the other requests are sent again.")
        logger.info(
            f"Batch {remote.id} is {remote.status}. Requests without an answer are sent again."
        )
        return True

    # the storage thread --------------------------------------------------------------------------

    async def _change(self, change: Callable[..., T], *arguments: object) -> T:
        return await asyncio.to_thread(self._checkpoint.change, change, *arguments)

    async def _note(self, batch: Batch, state: str, **fields: object) -> None:
        await self._change(lambda rank: rank.batches.note(batch.number, state, **fields))

    async def _open(self) -> list[Batch]:
        return await self._change(lambda rank: rank.batches.open())


def _fail_others(rank: RankFiles, batch: Batch, answered: set[RequestId]) -> None:
    rows = []
    for request in rank.batches.requests(batch.number):
        if request in answered:
            continue
        # An earlier poll may have saved its answer.
        answer = rank.cache.answers(request.ordinal).get(request.key)
        if answer is None or fields_of_batch(answer).get("attempt", math.inf) < request.attempt:
            rows.append(batch.row(request, FAILURE, "the batch has no line for this request"))
    rank.write_batch(rows)
    rank.sync()


def _rows(
    provider: BatchProvider, request: RequestId, answer: BatchAnswer, batch: Batch
) -> list[CachedRequest]:
    status = answer.status
    if status == 0:
        return []
    if status == 200 and isinstance(answer.body, dict):
        return [batch.row(request, ANSWER, answer.body)]
    text = provider.clean(orjson.dumps(answer.body).decode())
    if status in retrying.REJECTED:
        return [request.row(CachedAnswer(None, f"{status} {text}"))]
    return [batch.row(request, FAILURE, f"HTTP {status}: {text}")]


def _open_text(batches: list[Batch]) -> str:
    requests = sum(batch.requests for batch in batches)
    names = ", ".join(batch.id or f"number {batch.number}" for batch in batches[:5])
    return f"Batches are open, with {plural(requests, 'request')} of this task: {names}."
