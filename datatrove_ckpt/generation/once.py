"""Makes the calls of a rollout besides its requests: each once, and saved like an answer."""

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from datatrove_ckpt.checkpoint.rank_summary import OTHERS
from datatrove_ckpt.checkpoint.request_cache import CachedAnswer, payload_hash
from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.formatting import safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config.generation_params import PAYLOAD_JSON
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.generation.side_effects import OURS, watched
from datatrove_ckpt.output.document_codec import has_nan
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled
from datatrove_ckpt.rollouts import CallFailed

_THREADS = 64
_MOST_BYTES = 100_000_000
_RESULT = "once"


@dataclass(frozen=True)
class OnceCall:
    name: str
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    time_limit: float | None
    keep_errors: type[Exception] | tuple[type[Exception], ...]

    def digest(self, code: str) -> str:
        """Hashes the call.

        Args:
            code: hash of the run's code, which may change the result of equal arguments.
        """
        arguments = [_RESULT, self.name, self.args, self.kwargs, code]
        return payload_hash(_as_json(arguments, PAYLOAD_JSON | orjson.OPT_SORT_KEYS))


@dataclass(eq=False)
class OnceCalls:
    """The calls of a rank. Must be created on the rank's event loop.

    Attributes:
        running: number of calls that have begun and not ended; a drain waits for them.
    """

    _counts: WorkCounts
    _shutdown: Shutdown

    def __post_init__(self) -> None:
        self.running = 0
        self._threads = asyncio.Semaphore(_THREADS)

    async def make(self, call: OnceCall) -> CachedAnswer:
        """Returns the row for the request cache.

        Raises:
            DocumentNotSerializable: the result cannot be saved.
            Exception: the function's error, or a TimeoutError, unless ``keep_errors`` saves it.
        """
        counts = self._counts
        is_plain = not inspect.iscoroutinefunction(call.function)
        if is_plain:
            await self._threads.acquire()  # before the time limit begins
        if self._shutdown.is_stopping:
            await wait_until_cancelled()
        name = redact(call.name)
        if (
            name not in counts.calls and len(counts.calls) >= 20
        ):  # the name may contain text of the document
            name = OTHERS
        counts.calls[name] += 1
        self.running += 1
        started = time.monotonic()
        try:
            with watched(OURS):
                result = await self._result(call, is_plain)
        except Exception as error:
            counts.failed_calls[name] += 1
            if not isinstance(error, call.keep_errors):
                raise
            fields = [type(error).__name__, redact(safe_text(error))]
            return CachedAnswer(None, orjson.dumps(fields).decode())
        finally:
            self.running -= 1
            counts.call_milliseconds[name] += round(1000 * (time.monotonic() - started))
        return CachedAnswer(_saved(call.name, result), None)

    async def _result(self, call: OnceCall, is_plain: bool) -> object:
        try:
            async with asyncio.timeout(call.time_limit) as limit:
                if is_plain:
                    result = await self._in_thread(call)
                else:
                    result = call.function(*call.args, **call.kwargs)
                if inspect.isawaitable(result):
                    return await result
                return result
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"generate.once({call.name!r}) took longer than {call.time_limit:g} s"
            raise TimeoutError(text) from error

    async def _in_thread(self, call: OnceCall) -> object:
        def work() -> tuple[object, BaseException | None]:
            try:
                return call.function(*call.args, **call.kwargs), None
            except BaseException as error:  # no future can hold a StopIteration
                return None, error

        try:
            result, error = await in_own_thread(work)
        finally:
            # Also if the thread runs on after its time limit: otherwise all calls would wait for
            # threads that hang.
            self._threads.release()
        if error is not None:
            raise error
        return result


def _as_json(value: object, option: int) -> bytes:
    data = orjson.dumps(value, option=option)
    if b"null" in data and has_nan(value):  # orjson writes null for NaN
        raise TypeError("NaN and infinity are none")
    return data


def _saved(name: str, result: object) -> bytes:
    try:
        saved = _as_json({_RESULT: result}, PAYLOAD_JSON)
    except TypeError as error:
        raise DocumentNotSerializable(
            f"generate.once({name!r}) cannot save a result that is no JSON: {error}. Return "
            "texts, numbers, lists and dictionaries, such as base64 and model_dump()."
        ) from error
    if len(saved) > _MOST_BYTES:
        raise DocumentNotSerializable(
            f"generate.once({name!r}) has a result of {len(saved) / 1e6:,.0f} MB, and the limit is "
            f"{_MOST_BYTES / 1e6:.0f} MB. Write it to a file, and return its path."
        )
    return saved


def result_of(saved: CachedAnswer) -> object:
    """Raises CallFailed if the call's error was saved."""
    if saved.result is None:
        raise CallFailed(*orjson.loads(saved.error_message or ""))
    return orjson.loads(saved.result)[_RESULT]
