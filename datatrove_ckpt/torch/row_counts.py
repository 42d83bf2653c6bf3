"""Keeps the numbers of rows of files, so that the next process need not read the files again.

Counting JSONL reads all of it. The counts of each file are a small file in the folder
``$DATATROVE_CKPT_CACHE`` (empty: none are kept), or else ``datatrove-ckpt/rows`` in the user's
cache folder. If nodes share the folder, the first node counts. Its name changes with size, time of
change and sample of the counted file (``Inputs.sample``). Reading notices a wrong count. The files
may be deleted at any time.
"""

import fcntl
import os
import uuid
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson
from loguru import logger
from xxhash import xxh3_128_hexdigest

from datatrove_ckpt.readers import block_file
from datatrove_ckpt.readers.inputs import Inputs

_VERSION = 3
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
        self._source = f"{_VERSION}/{kind}/{inputs.folder.resolve_paths('')}"
        self._folder = cache_folder()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Lets one process at a time count, if the file system can lock."""
        if self._folder is None:
            yield
            return
        name = xxh3_128_hexdigest(self._source.encode())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / f"{name}.lock").open("a")
        except OSError as error:
            logger.warning(
                f"The rows that are counted cannot be kept, so the next start counts again: {error}"
            )
            self._folder = None
            yield
            return
        with lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def get(self, number: int) -> block_file.FileIndex | None:
        path = self._path(number)
        if path is None:
            return None
        with suppress(OSError, KeyError, TypeError, ValueError):
            found = orjson.loads(path.read_bytes())
            groups = tuple(block_file.Group(*group) for group in found["groups"])
            return block_file.FileIndex(groups, found["sequential"], b64decode(found["schema"]))
        return None

    def put(self, number: int, index: block_file.FileIndex) -> None:
        path = self._path(number)
        if path is None:
            return
        schema = b64encode(index.schema).decode()
        groups = [list(group) for group in index.groups]
        content = {"groups": groups, "sequential": index.sequential, "schema": schema}
        # Nodes may share the folder, and process ids.
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        with suppress(OSError):
            part.write_bytes(orjson.dumps(content))
            part.replace(path)

    def _path(self, number: int) -> Path | None:
        """Returns the file of the counts; None if the file system tells nothing that changes with
        the content.
        """
        info = self._inputs.info(number)
        changed = next((str(info[name]) for name in _TIMES if info.get(name)), "")
        sample = self._inputs.sample(number)
        if self._folder is None or not (changed or sample):
            return None
        known = (self._inputs.names[number], str(self._inputs.size(number)), changed, sample)
        return (
            self._folder / f"{xxh3_128_hexdigest('/'.join((self._source, *known)).encode())}.json"
        )
