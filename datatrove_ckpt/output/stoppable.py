"""Calls into libraries that cannot be told to give up: made in threads that a rank which stops leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from datatrove_ckpt.checkpoint.placement import Stopping
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.retrying import failure_line, file_system_call, http_status, lacks_credentials
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.errors.doors import written

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Calls in a daemon thread, which keeps no process alive. Returns its result, to be waited for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


class StoppableCalls:
    """Calls and pauses that end when ``stop`` is called, from any thread."""

    def __init__(self) -> None:
        self._stopped: Future[Any] = Future()  # Any, so that it can be waited for together with a result of any type

    @property
    def stopped(self) -> bool:
        return self._stopped.done()

    def stop(self) -> None:
        """Ends all waiting, from now on. A request under way ends by itself, or with the process."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def sleep(self, seconds: float) -> None:
        """Returns after that time, or earlier when ``stop`` is called."""
        wait([self._stopped], timeout=seconds)

    def run(self, call: Callable[[], T], at_most_seconds: float | None = None) -> T:
        """Calls in a thread of its own.

        Raises:
            Stopping: ``stop`` was called before the call returned.
            TimeoutError: the call took longer than ``at_most_seconds``. What it does may still happen.
            OSError: whatever the library raised.
        """

        def run() -> T:
            with file_system_call():
                return call()

        if self.stopped:
            raise Stopping
        result = in_thread(run, "datatrove-ckpt upload")
        wait([result, self._stopped], timeout=at_most_seconds, return_when=FIRST_COMPLETED)
        if not result.done():
            if self.stopped:
                raise Stopping
            raise TimeoutError(f"no answer within {at_most_seconds:.0f} s")
        return result.result()


class StorageCalls(StoppableCalls):
    """Calls to a storage, each made again while its failures pass."""

    def retry(self, what: str, call: Callable[[], T], sleep: Callable[[float], None] | None = None) -> T:
        """Calls until it works, fails permanently, or has failed for too long. ``what`` starts the messages.

        Raises:
            OutputFailed: its cause is the last error.
        """
        try:
            return retrying.STORAGE.run(partial(self.run, call), what, sleep=sleep or self.sleep)
        except OSError as error:
            raise OutputFailed(f"{what}: {failure_line(error)}. {_advice(error)}") from error


def _advice(error: BaseException) -> str:
    """What the user can do about a failed upload."""
    kept = "Nothing that was saved is lost: run the same command again"
    if lacks_credentials(error):
        return f"Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE. {kept}."
    if isinstance(error, PermissionError) or http_status(error) in (401, 403):
        needs = (
            "On S3 they need s3:PutObject, s3:GetObject, s3:ListBucket, s3:AbortMultipartUpload, "
            "s3:ListBucketMultipartUploads"
        )
        return f"Check the credentials, and what they allow. {needs}. {kept}."
    if isinstance(error, FileNotFoundError) or http_status(error) == 404:
        return f"Make the bucket, or correct {written.output_folder} (on S3 also AWS_ENDPOINT_URL). {kept}."
    return f"Check the network and the server. {kept}."
