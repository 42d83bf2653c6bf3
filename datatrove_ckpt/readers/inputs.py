"""Checks that an input is still the one that a position was made for.

A state is too small for ten thousand names and sizes. Of the files that were read to their end it keeps a ``Digest``:
their number and total size, and the XOR of their hashes. It shows *that* something differs.

Of the current file a state keeps name, size and a hash of its first (and last) 64 kB. Files that were read to their end
are not read again: on resume that would cost what seeking saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from glob import has_magic
from typing import Any, TypeVar

import orjson
from datatrove.io import DataFolder, get_shard_from_paths_file
from datatrove.pipeline.readers.base import BaseDiskReader
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from datatrove_ckpt.checkpoint.layout import is_ours
from datatrove_ckpt.common import retrying
from datatrove_ckpt.errors import CheckpointMismatch, InputError
from datatrove_ckpt.errors.doors import StartOver, written
from datatrove_ckpt.readers.input_errors import is_on_hub, naming_hub_input
from datatrove_ckpt.readers.positions import ALL_ROWS, RowShard, State, in_pipeline
from datatrove_ckpt.readers.shard import FileRecord, ReaderRecord
from datatrove_ckpt.readers.step_records import plain_settings

_SAMPLE = 2**16
# What file systems call a value that changes with a file's content.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id", "sha256", "checksum", "generation", "xet_hash")


_Result = TypeVar("_Result")


def remedy(verb: str = "Restore it") -> StartOver | str:
    """What to do about an input that a position does not fit. A pipeline has folders, a training loop has a state."""
    start = f"{verb}, or start from the beginning"
    if in_pipeline():
        return StartOver(f"{start}: with ", f"{written.old_results}.")
    return f"{start}, without the saved state."


class Inputs:
    """The files that a reader reads, in order. What fsspec tells of a file is looked up once, when it is needed first.

    Args:
        infos: what a listing has told, by the index of the name.
    """

    row_shard: RowShard = ALL_ROWS
    """(index, count): the reader's rank reads every ``count``-th row of these files, from ``index`` on."""
    commit: str | None = None
    """Of a dataset on the hub."""

    def __init__(
        self, folder: DataFolder, names: Sequence[str], infos: dict[int, dict[str, Any]] | None = None
    ) -> None:
        self.folder = folder
        self.names = names
        self._infos = infos or {}

    def info(self, index: int) -> dict[str, Any]:
        """What fsspec tells of the file: size, time of change, ETag..., depending on the file system.

        Raises:
            InputError: it is a FIFO, a socket or a device.
        """
        if index not in self._infos:
            self._infos[index] = info = self._remote(lambda: self.folder.info(self.names[index]))
            if info.get("type") == "other":
                raise InputError(
                    f"The input file {self.names[index]!r} in {self.folder.path} is a FIFO, a socket or a device, "
                    "which cannot be read twice. Write its content into a file, or move it out of the folder."
                )
        return self._infos[index]

    def size(self, index: int) -> int:
        return int(self.info(index)["size"] or 0)

    def size_for_people(self, index: int) -> int:
        """The size, in any thread and at any time: what is looked up for this is not kept."""
        info = self._infos.get(index) or self._remote(lambda: self.folder.info(self.names[index]))
        return int(info["size"] or 0)

    def note_size(self, index: int, size: int | None) -> None:
        """Takes the size of what was read instead of the one before, for a file that grew while it was read.

        None: the reader stopped at its limit, so what comes after is not its input. Then it is the size of now.
        """
        if size != self.size(index):
            self._infos[index] = self.folder.info(self.names[index])
            if size is not None:
                self._infos[index] = {**self._infos[index], "size": size}

    def fingerprint(self, index: int, size: int, whole: bool) -> str:
        """``fingerprint`` of the file, or what the hub calls its content, which costs no download."""
        if is_on_hub(self.folder):
            known = self.info(index).get("blob_id")
            if known:
                return str(known)
        return self._content_fingerprint(index, size, whole)

    def is_same(self, index: int, size: int, whole: bool, kept: str) -> bool:
        """Whether a fingerprint is that of the file. Earlier releases took it from the content on the hub, too."""
        if kept == self.fingerprint(index, size, whole):
            return True
        return is_on_hub(self.folder) and kept == self._content_fingerprint(index, size, whole)

    def _content_fingerprint(self, index: int, size: int, whole: bool) -> str:
        return self._remote(lambda: fingerprint(self.folder, self.names[index], size, whole))

    def _remote(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call that may ask a server."""
        with naming_hub_input(self.folder, missing=False):
            return retrying.READING.run(call, self.folder.path)

    def sample(self, index: int) -> str:
        """A value that changes with the file's content; empty if the file system tells none, or if it is gone."""
        info = self.info(index)
        if not self.folder.is_local():
            return next((str(info[tag]) for tag in _TAGS if info.get(tag)), "")
        with suppress(FileNotFoundError):  # removed since it was read
            return self.fingerprint(index, self.size(index), whole=True)
        return ""

    def of_rank(self, rank: int, world_size: int) -> Inputs:
        """What datatrove's reader reads of this input in one rank."""
        return self.shard(rank, world_size)

    def shard(self, rank: int, world_size: int) -> Inputs:
        """Every ``world_size``-th file, from ``rank`` on."""
        indices = range(len(self.names))[rank::world_size]
        infos = {new: self._infos[old] for new, old in enumerate(indices) if old in self._infos}
        return Inputs(self.folder, self.names[rank::world_size], infos)

    def digest(self, count: int) -> Digest:
        """The digest of the first ``count`` files."""
        digest = Digest()
        for index in range(count):
            digest.add(self.names[index], self.known_size(index))
        return digest

    def check_all(self, before: State) -> None:
        """Checks that these are exactly the files of a digest's state, also those that were not read yet.

        Raises:
            CheckpointMismatch: some are gone, new, renamed or resized.
        """
        now = self.digest(len(self.names))
        if not now.is_of(before):
            raise CheckpointMismatch(
                f"The input has changed: there were {before['files']} files of {before['bytes']} bytes, and there are "
                f"{now.files} of {now.bytes} bytes. ",
                remedy(),
            )

    def known_size(self, index: int) -> int:
        """The size of a file that existed when the state was made.

        Raises:
            CheckpointMismatch: it is gone.
        """
        try:
            return self.size(index)
        except FileNotFoundError as error:
            raise CheckpointMismatch(f"The input file {self.names[index]!r} is gone. ", remedy()) from error

    def check_before(self, state: State) -> Digest:
        """Checks that the files before the state's current one are the same, and returns their digest.

        Raises:
            CheckpointMismatch: one of them has changed, or the current one is gone.
        """
        before = state["before"]
        current = state["file"]["name"]
        count = before["files"]
        if count < len(self.names) and shorten(self.names[count]) == current:
            digest = self.digest(count)
            if digest.is_of(before):
                return digest
        if current not in map(shorten, self.names):
            raise CheckpointMismatch(
                f"The input has changed: the file {current!r}, which the position is in, is gone or has another name. ",
                remedy(),
            )
        raise CheckpointMismatch(
            f"The input has changed: {before['files']} files of {before['bytes']} bytes were read before {current!r}, "
            f"and the files before it now are not the same. ",
            remedy(),
        )


class Digest:
    """The digest of the files that were read to their end. Adding a file costs the same however many there are."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0
        self.all = 0

    def add(self, name: str, size: int) -> None:
        self.all ^= _entry(self.files, name, size)
        self.bytes += size
        self.files += 1

    def state(self) -> State:
        return {"files": self.files, "bytes": self.bytes, "all": f"{self.all:016x}"}

    def is_of(self, state: State) -> bool:
        """Whether the state is of these files. States of earlier releases hold more."""
        return self.state().items() <= state.items()

    def __str__(self) -> str:
        return f"{self.files}:{self.all:016x}"


def fingerprint(folder: DataFolder, name: str, size: int, whole: bool) -> str:
    """The hash of a file's first 64 kB, and with ``whole`` of its last 64 kB, too.

    The last bytes of a gzip file hold a checksum of its content, those of a Parquet file its table of contents.
    """
    sample = b""
    if size:
        sample = folder.cat_file(name, start=0, end=min(size, _SAMPLE))
    if whole and size > _SAMPLE:
        sample += folder.cat_file(name, start=max(_SAMPLE, size - _SAMPLE), end=size)
    return str(xxh3_64_hexdigest(sample))


def shuffled_names(names: Iterable[str], seed: int) -> list[str]:
    """In an order in which files that are added move no other file."""
    return sorted(names, key=lambda name: (xxh3_64_intdigest(f"{seed}/{name}".encode()), name))


def shorten(name: str) -> str:
    """The name, or a hash and the end of the name if it is very long."""
    encoded = name.encode()
    if len(encoded) <= 200:
        return name
    return f"{xxh3_64_hexdigest(encoded)}...{encoded[-160:].decode(errors='ignore')}"


def metadata_hash(metadata: dict[str, Any] | None) -> str:
    """A short hash of a reader's ``default_metadata``, for its state."""
    text = orjson.dumps(metadata or {}, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return str(xxh3_64_hexdigest(text)[:8])


def _entry(index: int, name: str, size: int) -> int:
    # The index makes the order count, which XOR ignores.
    return int(xxh3_64_intdigest(f"{index}/{size}/{name}".encode()))


# Records of what was read -----------------------------------------------------------------------------------------

MISSING = -1
"""The size of a file that a list names and that does not exist."""
_THREADS = 16
_OPTIONS = ("text_key", "id_key", "limit", "skip")


def options_of(reader: BaseDiskReader) -> dict[str, Any]:
    """The arguments of a reader that decide what it makes of its files."""
    options = {name: getattr(reader, name) for name in (*_OPTIONS, *getattr(reader, "dataset_settings", ()))}
    return options | {"default_metadata": plain_settings(reader.default_metadata or {})}


def record_reader(reader: BaseDiskReader, inputs: Inputs, count: int, limited: bool = False) -> ReaderRecord:
    """Records the first ``count`` files of the input, and samples them."""
    return ReaderRecord(options_of(reader), sample_files(inputs, range(count)), limited)


def sample_files(inputs: Inputs, indices: Sequence[int]) -> list[FileRecord]:
    """The files as records, with the sizes that ``inputs`` knows, and with samples of now."""
    if len(indices) < _THREADS:
        return [_record(inputs, index) for index in indices]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="datatrove-ckpt sample") as threads:
        return list(threads.map(partial(_record, inputs), indices))


def _record(inputs: Inputs, index: int) -> FileRecord:
    name = inputs.names[index]
    try:
        modified = inputs.info(index).get("mtime")
    except FileNotFoundError:
        return FileRecord(name, MISSING, "", 0.0)
    if not isinstance(modified, int | float):
        modified = 0
    return FileRecord(name, inputs.size(index), inputs.sample(index), float(modified))


# The whole input ---------------------------------------------------------------------------------------------------


def check_reachable(folder: DataFolder) -> None:
    """The first contact with an input elsewhere. What another attempt cannot change is said by who lists it.

    Raises:
        InputError, OSError: it could not be reached for a minute.
    """
    with naming_hub_input(folder):
        try:
            retrying.OPENING.run(partial(folder.info, ""), f"The input {folder.resolve_paths('')} cannot be reached")
        except Exception as error:  # whatever the file systems' libraries raise
            if retrying.OPENING.passes(error):
                raise


def list_input(reader: BaseDiskReader) -> Inputs:
    """All files of a reader's input, in the order in which datatrove deals them out to the ranks.

    Raises:
        InputError: one of the files in the folder is a FIFO, a socket or a device.
        OSError: the folder or the list cannot be read.
    """
    folder = reader.data_folder
    pattern = reader.glob_pattern
    if hasattr(reader, "list_dataset"):  # HuggingFaceDatasetReader
        found: Inputs = reader.list_dataset()
        return found
    if reader.paths_file:
        return Inputs(folder, list(get_shard_from_paths_file(reader.paths_file, 0, 1)))
    folder.invalidate_cache()
    options: dict[str, Any] = {"maxdepth": None if reader.recursive else 1, "detail": True}
    if is_on_hub(folder):
        options["expand_info"] = False  # as DataFolder.list_files: one request instead of one per file
    with naming_hub_input(folder):
        if not pattern:
            listed = folder.find("", **options)
        elif has_magic(pattern):
            listed = folder.glob(pattern, **options)
        else:
            listed = folder.glob(f"*{pattern}", **options)
    files = (name for name, info in listed.items() if info["type"] != "directory")
    names = sorted(name for name in files if not is_ours(name))
    # A listing does not follow symbolic links: to it they are "other", too.
    known = {index: listed[name] for index, name in enumerate(names) if listed[name]["type"] != "other"}
    inputs = Inputs(folder, names, known)
    for index in set(range(len(names))) - known.keys():
        with suppress(FileNotFoundError):
            inputs.info(index)
    return inputs
