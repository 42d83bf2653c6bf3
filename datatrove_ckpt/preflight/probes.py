"""What writes, syncs and uploads cost here, each with its spread; and the probes in which that is found out.

Nothing outlives a probe: what it writes lies in a hidden folder (or a hidden object) of its own, never in a rank's
folder, and is removed at the end, also after an error. A run may be on meanwhile.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest, RequestCache
from datatrove_ckpt.errors import CkptError, StorageFailed
from datatrove_ckpt.formatting import duration, error_text
from datatrove_ckpt.remote_errors import io_errors

PROBE = ".datatrove-ckpt-probe-"

_ANSWER_BYTES = 4096
SMALL_GROUP = 64 * 1024
LARGE_GROUP = 1024 * 1024
SMALL_OBJECT = 4 * 1024
LARGE_OBJECT = 8 * 1024 * 1024

REMOTE_SECONDS = 60.0
"""How long a remote folder may take to answer."""


@dataclass(frozen=True)
class Quantiles:
    """Several measurements of one thing, in seconds; ``low`` and ``high`` are the first and last tenth's borders."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Of one sample at least."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered))

    def __str__(self) -> str:
        return f"{duration(self.median)} ({duration(self.low)} to {duration(self.high)}, {self.number} times)"


@dataclass(frozen=True)
class DiskCost:
    """Of a group of answers and finished documents: to write it, and to sync it."""

    size: int
    write: Quantiles
    sync: Quantiles


@dataclass(frozen=True)
class UploadCost:
    """Of an object of ``size`` bytes: to upload it, and to ask for its size."""

    size: int
    upload: Quantiles


# The local disk ------------------------------------------------------------------------------------------------------


def existing_part(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


@contextmanager
def probe_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder inside ``folder``, or inside what there is of its path; gone at the end.

    Raises:
        StorageFailed: it cannot be made or removed.
    """
    blocking = [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]
    if blocking:
        raise StorageFailed(f"{blocking[0]} is a file, and should be a folder. Move it, or choose another folder.")
    probe = existing_part(folder) / f"{PROBE}{secrets.token_hex(4)}"
    try:
        files.disk.make_dir(probe)
        yield probe
    except BaseException:
        with suppress(StorageFailed):
            _remove(probe)
        raise
    _remove(probe)


def _remove(probe: Path) -> None:
    files.disk.close(probe)
    files.disk.remove_tree(probe)


def measure_disk(probe: Path, size: int, seconds: float, at_most: int = 25) -> DiskCost:
    """Writes and syncs groups of ``size`` bytes as the storage thread does, for some seconds and three times at least.

    Raises:
        StorageFailed: the disk refused.
    """
    answers = [_answer(number) for number in range(max(1, size // _ANSWER_BYTES))]
    lines = b"\n".join(answer.answer.result or b"" for answer in answers)
    journal = files.AppendFile(probe / f"journal-{size}")
    cache = RequestCache(probe / f"cache-{size}.sqlite3")

    def write() -> None:
        cache.put(answers)
        journal.append(lines)

    def sync() -> None:
        journal.sync()
        cache.sync()

    try:
        write()
        sync()  # the first one syncs names, too
        writes, syncs = [], []
        for _ in _repeats(seconds, at_most):
            writes.append(_timed(write))
            syncs.append(_timed(sync))
    finally:
        cache.close()
    return DiskCost(size, Quantiles.of(writes), Quantiles.of(syncs))


def _answer(number: int) -> CachedRequest:
    # Random: a file system that compresses must not look faster than it is.
    return CachedRequest(
        0, number, "", AnswerKey(0, "", 0), Answer(secrets.token_hex(_ANSWER_BYTES // 2).encode(), None)
    )


# A remote folder -----------------------------------------------------------------------------------------------------


class RemoteFailed(CkptError):
    """A remote folder refused a probe."""


class NotDeleted(RemoteFailed):
    """A remote folder takes objects, and keeps them."""


@contextmanager
def probe_object(folder: Any) -> Iterator[Callable[[bytes], float]]:
    """Gives a function that uploads bytes into datatrove's ``DataFolder`` and returns the seconds; cleans up after it.

    Every upload replaces the one before. Its size is asked for, as a run does.

    Raises:
        RemoteFailed: something was refused, or the object has another size than it should.
        NotDeleted: only that the object be deleted was refused.
    """
    name = f"{PROBE}{secrets.token_hex(4)}"
    remote = folder.resolve_paths(name)
    made: list[str] = []

    def upload(content: bytes) -> float:
        with _told(f"{remote} could not be written"):
            start = time.monotonic()
            _pipe(folder, name, content, made)
            folder.invalidate_cache(name)
            arrived = folder.info(name)["size"]
            seconds = time.monotonic() - start
        if arrived != len(content):
            raise RemoteFailed(f"{remote} has {arrived} bytes after its upload instead of {len(content)}.")
        return seconds

    try:
        yield upload
    except BaseException:
        with suppress(Exception):
            folder.rm_file(name)
        _remove_made(folder, made)
        raise
    try:
        with _told(f"{remote} was written and could not be deleted (delete it by hand)", NotDeleted):
            folder.rm_file(name)
    finally:
        _remove_made(folder, made)


def _pipe(folder: Any, name: str, content: bytes, made: list[str]) -> None:
    try:
        folder.pipe_file(name, content)
    except FileNotFoundError:  # folders are real things here, and this one is missing; a run makes it
        missing = _missing(folder.fs, folder.path)
        if not missing or (not folder.is_local() and folder.fs._parent(missing[-1]) in ("", "/")):
            raise  # a missing bucket is somebody's mistake, and not ours to make
        made += missing
        folder.fs.makedirs(folder.path, exist_ok=True)
        folder.pipe_file(name, content)


def _missing(fs: Any, path: str) -> list[str]:
    """The folder and those above it that are not there, the deepest first."""
    missing = []
    while path and path != fs._parent(path) and not fs.exists(path):
        missing.append(path)
        path = fs._parent(path)
    return missing


def _remove_made(folder: Any, made: list[str]) -> None:
    for path in made:
        with suppress(Exception):  # somebody else may have put something into it meanwhile
            folder.fs.rmdir(path)


@contextmanager
def _told(what: str, kind: type[RemoteFailed] = RemoteFailed) -> Iterator[None]:
    try:
        yield
    except io_errors() as error:
        raise kind(f"{what}: {error_text(error)}.") from error


def measure_upload(folder: Any, size: int, seconds: float, at_most: int = 10) -> UploadCost:
    """Uploads an object of ``size`` bytes for some seconds, and three times at least.

    Raises:
        RemoteFailed: see ``probe_object``.
    """
    content = os.urandom(size)
    with probe_object(folder) as upload:
        upload(content[:1])  # connections are made, credentials fetched
        return UploadCost(size, Quantiles.of([upload(content) for _ in _repeats(seconds, at_most)]))


# In general ----------------------------------------------------------------------------------------------------------


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
