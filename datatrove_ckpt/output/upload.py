"""Finished local files into a remote folder: S3, and whatever else fsspec knows. Each appears whole or not at all.

A chunk's files lie complete on the local disk before their first byte leaves. A single PUT shows up when all of it has
arrived, a multipart upload when it is completed, and nobody completes one but the attempt that sent all its parts: not
an error path, not a destructor, not the next life.

    what goes wrong                              what is done
    reset, timeout, 5xx, SlowDown, no server     s3fs and botocore send the request again, for seconds; then the whole
                                                 file is tried again, with jittered backoff, for PATIENCE
    401, 403, no such bucket, no credentials     the rank stops, at its start if it can be known by then
    killed in the middle                         S3 keeps the parts, and bills them, until somebody aborts the upload:
                                                 the next life of the rank does, for the names that lie staged

Only S3 (s3fs) has open uploads that can be listed, and can say without leaving a trace whether it may be written to.
Other file systems are asked for ``put_file`` and ``info`` alone, and whether a name of theirs can be seen half-written
is up to them: those of object stores can't.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.checkpoint.publishing import Stopping
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.remote_errors import http_status, io_errors, is_permanent, lacks_credentials, s3_code

PATIENCE = 300.0
"""Seconds from a file's first failure on in which it is tried again. Generation goes on meanwhile, until
``MAX_PUBLISHING`` chunks wait."""

PART = 8 << 20
"""Bytes of a part of a multipart upload, which files of twice this size and more are sent by. s3fs's own 50 MiB would
send so much again for each reset, and hold ten of them in memory."""

_FIRST_DELAY = 0.5  # seconds
_LONGEST_DELAY = 20.0
_MAX_PARTS = 10_000

T = TypeVar("T")


class RemoteFolder:
    """Puts files into a remote folder.

    Args:
        folder: a datatrove ``DataFolder``.
        probe: a name in it, of this rank's own, that never comes to exist.
    """

    def __init__(self, folder: Any, probe: str) -> None:
        self._where = folder.resolve_paths("")
        self._probe = probe
        self._store = _S3(folder) if hasattr(folder.fs, "call_s3") else _Store(folder)
        self._stopped: Future[None] = Future()

    def prepare(self, interrupted: Iterable[str] | None) -> None:
        """Finds out whether files can be written, and aborts the uploads that earlier lives left open.

        Args:
            interrupted: names that an earlier life may have been uploading when it ended; None if it ended well.

        Raises:
            OutputFailed: nothing can be written, which is better known before anything is paid for.
        """
        upload = self._persist(f"{self._where} cannot be written to", lambda: self._store.begin(self._probe))
        with self._unless_forbidden():
            what = f"{self._where}: an open upload could not be aborted"
            self._persist(what, lambda: self._store.abort(self._probe, upload))
        if interrupted is not None and (left := self._abort_open({self._probe, *interrupted})):
            logger.info(f"{self._where}: aborted {left} uploads that an earlier run of this rank left open.")

    def upload(self, local: Path, name: str) -> None:
        """Returns once there is a remote file of the local one's size.

        Raises:
            OutputFailed: it could not be uploaded, or has another size.
            Stopping: ``stop`` was called meanwhile.
        """
        size, remote = local.stat().st_size, self._store.full_name(name)
        arrived = self._persist(f"{remote} could not be uploaded", lambda: self._store.put(local, name))
        if arrived != size:
            raise OutputFailed(
                f"{remote} has {arrived} bytes after its upload instead of {size}. Its chunk's journal is kept: find "
                "out who else writes there, and run the same command again."
            )
        if size >= 2 * PART:
            self._abort_open({name})  # of attempts that failed, or were begun twice because an answer got lost

    def stop(self) -> None:
        """Ends all waiting in ``upload``, for good. A request that is under way ends by itself, or with the process."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _abort_open(self, names: set[str]) -> int:
        """Returns how many uploads of these names were open."""
        with self._unless_forbidden():
            what = f"{self._where}: the open uploads could not be listed"
            found = self._persist(what, lambda: self._store.open_uploads(names))
            for name, upload in found:
                what = f"{self._store.full_name(name)}: an open upload could not be aborted"
                self._persist(what, lambda name=name, upload=upload: self._store.abort(name, upload))  # type: ignore[misc]
            return len(found)
        return 0

    @contextmanager
    def _unless_forbidden(self) -> Iterator[None]:
        """Aborting needs permissions that writing does not. Uploads that stay open cost storage, never a document."""
        try:
            yield
        except OutputFailed as error:
            if not is_permanent(error.__cause__):
                raise
            logger.warning(
                f"{self._where}: uploads that were interrupted stay open ({error_text(error.__cause__ or error)}). "
                "Allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or give the bucket a lifecycle rule."
            )

    def _persist(self, what: str, attempt: Callable[[], T]) -> T:
        """Attempts it until it works, is hopeless, or PATIENCE ends.

        Raises:
            OutputFailed: caused by what went wrong last.
        """
        deadline, failures = None, 0
        while True:
            try:
                return self._unless_stopped(attempt)
            except io_errors() as error:
                now = time.monotonic()
                deadline = deadline or now + PATIENCE
                if is_permanent(error) or now >= deadline:
                    raise OutputFailed(f"{what}: {error_text(error)}. {_advice(error)}") from error
                failures += 1
                pause = min(backoff_seconds(failures, _FIRST_DELAY, _LONGEST_DELAY, jitter=0.5), deadline - now)
                logger.warning(f"{what}: {error_text(error)}. Trying again, for {deadline - now:.0f} s at most.")
            wait([self._stopped], timeout=pause)

    def _unless_stopped(self, call: Callable[[], T]) -> T:
        """In a thread that nobody need wait for: a file system can't be told to give up an upload of minutes."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        if not self._stopped.done():
            threading.Thread(target=run, name="datatrove-ckpt upload", daemon=True).start()
            either: list[Future[Any]] = [result, self._stopped]
            wait(either, return_when=FIRST_COMPLETED)
        if not result.done():
            raise Stopping
        return result.result()


class _Store:
    """Any file system of fsspec."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def full_name(self, name: str) -> str:
        return str(self.folder.resolve_paths(name))

    def begin(self, name: str) -> str:
        """An upload that is not meant to be completed."""
        return ""

    def open_uploads(self, names: set[str]) -> list[tuple[str, str]]:
        """Name and id of every upload of these names that was neither completed nor aborted."""
        return []

    def abort(self, name: str, upload: str) -> None:
        """One that is gone already is fine."""

    def put(self, local: Path, name: str) -> int:
        """Returns the size of what is there afterwards."""
        self.folder.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH120 (a remote path)
        self.folder.put_file(str(local), name)
        self.folder.invalidate_cache(name)
        return int(self.folder.info(name)["size"])


class _S3(_Store):
    """s3fs. Folders are not made: there are none, and s3fs would make a bucket of a misspelt name."""

    def begin(self, name: str) -> str:
        return str(self._call("create_multipart_upload", name)["UploadId"])

    def open_uploads(self, names: set[str]) -> list[tuple[str, str]]:
        keys = {self._place(name)[1]: name for name in names}
        bucket, _ = self._place("")
        prefix = os.path.commonprefix(list(keys))  # noqa: RUF071 (of characters: keys have no folders)
        found: list[tuple[str, str]] = []
        markers: dict[str, str] = {}
        while True:
            page = self.folder.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
            listed = page.get("Uploads", [])
            found += [(keys[one["Key"]], one["UploadId"]) for one in listed if one["Key"] in keys]
            if not page.get("IsTruncated"):
                return found
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, name: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", name, UploadId=upload)
        except FileNotFoundError as error:
            if s3_code(error) != "NoSuchUpload":
                raise

    def put(self, local: Path, name: str) -> int:
        part = max(PART, -(-local.stat().st_size // _MAX_PARTS))
        self.folder.put_file(str(local), name, chunksize=part)
        return int(self._call("head_object", name)["ContentLength"])  # ``info`` may answer from a listing

    def _call(self, method: str, name: str, **arguments: Any) -> Any:
        bucket, key = self._place(name)
        return self.folder.fs.call_s3(method, Bucket=bucket, Key=key, **arguments)

    def _place(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self.folder.fs.split_path(self.full_name(name))
        return bucket, key


# What errors mean -----------------------------------------------------------------------------------------------------


def _advice(error: BaseException) -> str:
    kept = "Nothing that was saved is lost: run the same command again"
    if lacks_credentials(error):
        return f"Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE. {kept}."
    if isinstance(error, PermissionError) or http_status(error) in (401, 403):
        needs = "On S3 they need s3:PutObject, s3:GetObject, s3:AbortMultipartUpload, s3:ListBucketMultipartUploads"
        return f"Check the credentials, and what they allow. {needs}. {kept}."
    if isinstance(error, FileNotFoundError) or http_status(error) == 404:
        return f"Make the bucket, or correct output_folder (on S3 also AWS_ENDPOINT_URL). {kept}."
    return f"Mend the connection. {kept}."
