"""Measures how long writes, syncs and uploads take here, in probes that leave nothing behind.

A probe writes to a hidden folder (or a hidden object) of its own, never to a rank's folder, and removes it at the end,
also after an error. A run may be active meanwhile.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from datatrove.io import DataFolder
from fsspec import AbstractFileSystem

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest, RequestCache
from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import CkptError, StorageFailed, TooManyOpenFiles
from datatrove_ckpt.formatting import duration
from datatrove_ckpt.retrying import failure_line, file_system_call

PROBE = ".datatrove-ckpt-probe-"

_ANSWER_BYTES = 4096
SMALL_GROUP = 64 * 1024
LARGE_GROUP = 1024 * 1024
SMALL_OBJECT = 4 * 1024
LARGE_OBJECT = 8 * 1024 * 1024

REMOTE_SECONDS = 60.0
"""Seconds that a remote folder may take to answer."""


@dataclass(frozen=True)
class Quantiles:
    """Several measurements in seconds. ``low`` and ``high`` are the 10th and 90th percentiles."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """The quantiles of at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered))

    def __str__(self) -> str:
        return f"{duration(self.median)} ({duration(self.low)} to {duration(self.high)}, {self.number} times)"


@dataclass(frozen=True)
class DiskCost:
    """What it takes to write and to sync a group of answers and finished documents of ``size`` bytes."""

    size: int
    write: Quantiles
    sync: Quantiles


@dataclass(frozen=True)
class UploadCost:
    """What it takes to upload an object of ``size`` bytes and to ask for its size."""

    size: int
    upload: Quantiles


# The local disk ------------------------------------------------------------------------------------------------------


@contextmanager
def probe_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder inside ``folder``, or inside its nearest parent that exists. Removed at the end.

    Raises:
        StorageFailed: it cannot be created or removed.
    """
    blocking = [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]
    if blocking:
        raise StorageFailed(f"{blocking[0]} is a file where a folder is needed. Move it, or choose another folder.")
    probe = existing_part(folder) / f"{PROBE}{secrets.token_hex(4)}"
    try:
        files.disk.make_dir(probe)
        yield probe
    except BaseException:
        with suppress(StorageFailed, TooManyOpenFiles):
            _remove(probe)
        raise
    _remove(probe)


def _remove(probe: Path) -> None:
    files.disk.close(probe)
    files.disk.remove_tree(probe)


def measure_disk(probe: Path, size: int, seconds: float, at_most: int = 25) -> DiskCost:
    """Writes and syncs groups of ``size`` bytes as the storage thread does, for ``seconds``, but at least three times.

    Raises:
        StorageFailed: the disk reported an error.
    """
    answers = [_answer(number) for number in range(max(1, size // _ANSWER_BYTES))]
    lines = b"\n".join(answer.answer.result or b"" for answer in answers)
    journal = files.AppendFile(probe / f"journal-{size}")
    with closing(RequestCache(probe / f"cache-{size}.sqlite3")) as cache:

        def write() -> None:
            cache.put(answers)
            journal.append(lines)

        def sync() -> None:
            journal.sync()
            cache.sync()

        write()
        sync()  # the first sync includes the new file names
        writes, syncs = [], []
        for _ in _repeats(seconds, at_most):
            writes.append(_timed(write))
            syncs.append(_timed(sync))
    return DiskCost(size, Quantiles.of(writes), Quantiles.of(syncs))


def _answer(number: int) -> CachedRequest:
    # Random bytes: a file system that compresses must not look faster than it is.
    text = secrets.token_hex(_ANSWER_BYTES // 2).encode()
    return CachedRequest(0, number, "", AnswerKey(0, "", 0), Answer(text, None))


# A remote folder -----------------------------------------------------------------------------------------------------


class RemoteFailed(CkptError):
    """A remote folder did not do what a run needs."""


class NotDeleted(RemoteFailed):
    """A remote folder accepts objects but does not delete them."""


@contextmanager
def probe_object(folder: DataFolder) -> Iterator[Callable[[bytes], float]]:
    """Yields a function that uploads bytes to a datatrove ``DataFolder`` and returns the seconds it took.

    Each upload replaces the one before. The function also asks for the object's size, as a run does.

    Raises:
        RemoteFailed: an operation failed, or the object has a wrong size.
        NotDeleted: only the deletion failed.
    """
    name = f"{PROBE}{secrets.token_hex(4)}"
    remote = folder.resolve_paths(name)
    made: list[str] = []

    def upload(content: bytes) -> float:
        with _explained(f"{remote} could not be written"):
            start = time.monotonic()
            _pipe(folder, name, content, made)
            folder.invalidate_cache(name)
            arrived = folder.info(name)["size"]
            seconds = time.monotonic() - start
        if arrived != len(content):
            raise RemoteFailed(f"{remote} has {arrived} bytes after its upload instead of {len(content)}.")
        return seconds

    try:
        try:
            yield upload
        except BaseException:
            with suppress(Exception):
                folder.rm_file(name)
            raise
        with _explained(f"{remote} was written but could not be deleted (delete it by hand)", NotDeleted):
            folder.rm_file(name)
    finally:
        for path in made:
            with suppress(Exception):  # another process may have put something into it meanwhile
                folder.fs.rmdir(path)


def _pipe(folder: DataFolder, name: str, content: bytes, made: list[str]) -> None:
    try:
        folder.pipe_file(name, content)
    except FileNotFoundError:  # this file system has real folders, and this one is missing; a run creates it
        missing = _missing(folder.fs, folder.path)
        if not missing or (not folder.is_local() and folder.fs._parent(missing[-1]) in ("", "/")):
            raise  # a missing bucket is a user's mistake; it must not be created here
        made += missing
        folder.fs.makedirs(folder.path, exist_ok=True)
        folder.pipe_file(name, content)


def _missing(fs: AbstractFileSystem, path: str) -> list[str]:
    """The folder and its parents that do not exist, the deepest first."""
    missing = []
    while path and path != fs._parent(path) and not fs.exists(path):
        missing.append(path)
        path = fs._parent(path)
    return missing


@contextmanager
def _explained(what: str, kind: type[RemoteFailed] = RemoteFailed) -> Iterator[None]:
    try:
        with file_system_call():
            yield
    except OSError as error:
        raise kind(f"{what}: {failure_line(error)}.") from error


def measure_upload(folder: DataFolder, size: int, seconds: float) -> UploadCost:
    """Uploads an object of ``size`` bytes for ``seconds``, but at least three times.

    Raises:
        RemoteFailed: see ``probe_object``.
    """
    content = os.urandom(size)
    with probe_object(folder) as upload:
        upload(content[:1])  # opens connections, fetches credentials
        return UploadCost(size, Quantiles.of([upload(content) for _ in _repeats(seconds, 10)]))


# Timing --------------------------------------------------------------------------------------------------------------


def _repeats(seconds: float, at_most: int) -> Iterator[int]:
    deadline = time.monotonic() + seconds
    for number in range(at_most):
        if number >= 3 and time.monotonic() > deadline:
            return
        yield number


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
