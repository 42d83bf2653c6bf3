"""Keeps the numbers of rows of files, so that the next process need not read the files again.

Counting JSONL reads all of it. The counts of an input are a small file in the folder
``$DATATROVE_CKPT_CACHE`` (empty: none are kept), or else ``datatrove-ckpt/rows`` in the user's
cache folder. If nodes share the folder, the first node counts. A count is used while size, time of
change and sample of the file are unchanged (``Inputs.sample``). Reading notices a wrong count. The
file may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import orjson
from loguru import logger
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.readers.block_file import FileIndex, Group
from datatrove_ckpt.readers.inputs import Inputs

_VERSION = 3
_SAVE_SECONDS = 30.0
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Names that file systems have for the time of the last change."""


def cache_folder() -> Path | None:
    """Returns the folder of the counts; None: they are not kept."""
    own = os.environ.get("DATATROVE_CKPT_CACHE")
    if own == "":
        return None
    if own is not None:
        return Path(own)
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "datatrove-ckpt" / "rows"
    )


class RowCounts:
    """The counts of one input.

    ``kind``: what they depend on beside the files, such as the format.
    """

    def __init__(self, inputs: Inputs, kind: str) -> None:
        self._inputs = inputs
        source = f"{_VERSION}/{kind}/{inputs.folder.resolve_paths('')}"
        folder = cache_folder()
        self._path: Path | None = None
        if folder is not None:
            self._path = folder / f"{xxh3_128_hexdigest(source.encode())}.json"
        self._files: JsonObject = {}
        self._lock = threading.Lock()  # files are counted in several threads
        self._saved = time.monotonic()

    def load(self) -> None:
        if self._path is None:
            return
        with suppress(OSError, ValueError, TypeError, KeyError):
            self._files = orjson.loads(self._path.read_bytes())["files"] | self._files

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Lets one process at a time count, if the file system can lock, and keeps the counts at
        the end.
        """
        with ExitStack() as stack:
            if self._path is not None:
                # A folder that cannot be written, or a file system without locks.
                with suppress(OSError):
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(self._path.with_suffix(".lock").open("a"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    self.load()
            stack.callback(self._save)
            yield

    def key(self, number: int) -> str:
        """Returns a hash that changes with a file's content; empty if the file system has none."""
        info = self._inputs.info(number)
        changed = next((str(info[name]) for name in _TIMES if info.get(name)), "")
        known = (str(self._inputs.size(number)), changed, self._inputs.sample(number))
        if any(known[1:]):
            return xxh3_64_hexdigest("/".join(known).encode())
        return ""

    def get(self, number: int) -> FileIndex | None:
        found = self._files.get(self._inputs.names[number])
        with suppress(KeyError, TypeError, ValueError):
            if found and found["key"] == self.key(number):
                groups = tuple(Group(*group) for group in found["groups"])
                return FileIndex(groups, found["sequential"], b64decode(found["schema"]))
        return None

    def put(self, number: int, index: FileIndex) -> None:
        key = self.key(number)
        if not key:
            return
        entry = {
            "key": key,
            "groups": [list(group) for group in index.groups],
            "sequential": index.sequential,
            "schema": b64encode(index.schema).decode(),
        }
        with self._lock:
            self._files[self._inputs.names[number]] = entry
            is_due = time.monotonic() - self._saved > _SAVE_SECONDS
        if is_due:
            self._save()

    def _save(self) -> None:
        with self._lock:
            if self._path is None:
                return
            self._saved = time.monotonic()
            content = orjson.dumps({"files": self._files})
            # Nodes may share the folder, and process ids.
            part = self._path.with_suffix(f".{uuid.uuid4().hex}")
            try:
                part.write_bytes(content)
                part.replace(self._path)
            except OSError as error:
                logger.warning(
                    "The rows that were counted cannot be kept, so the next start counts again: "
                    f"{error}"
                )
                with suppress(OSError):
                    part.unlink()
