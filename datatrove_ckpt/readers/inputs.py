"""Lists the files of an input, and checks that they are still the input of a position.

A state is too small for ten thousand names and sizes. It holds an ``InputDigest`` of finished
files, and name, size and a hash of the first (and last) 64 kB of the current file. Finished files
are not read again, because this would take the time that seeking saves.

A document carries its position in a slot that is no dataclass field: filters pass it on, and
writers do not see it.

The readers of a pipeline start lazily, at the first ``next``, and find a ``Reading`` in their
thread. A state has the number of its reader, in the order of starting. An attribute of the step
would not do, because a step may run several ranks.

The part of a rank's input before a document is measured for percentages and the remaining time. The
unit is stored bytes, because a listing has them; each format converts its positions to bytes.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import orjson
from datatrove.data import Document
from datatrove.io import DataFolder, get_shard_from_paths_file
from datatrove.pipeline.readers.base import BaseDiskReader
from fsspec.utils import glob_translate
from loguru import logger
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.common.counts import InputPosition, SkippedLines
from datatrove_ckpt.common.retrying import hub_refusal, library_line
from datatrove_ckpt.common.threads import context_thread, in_threads
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, CkptError, InputError
from datatrove_ckpt.readers.shard_record import FileRecord, ReaderRecord, plain_settings

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str | None) -> bool:
    return revision is not None and _COMMIT.fullmatch(revision) is not None


@dataclass
class Revisions:
    _folder: Path

    def commit(self, dataset: str, revision: str, resolve: Callable[[], str | None]) -> str | None:
        """Returns the commit that this job reads as ``revision`` of the dataset.

        Args:
            resolve: requests the commit from the hub, once per job. Returns None if the hub is
                offline.

        Raises:
            CheckpointCorrupt: the recorded commit cannot be read.
        """
        path = self._folder / f"dataset_{xxh3_64_hexdigest(f'{dataset}@{revision}'.encode())}.json"
        recorded = self._read(path)
        if recorded is not None:
            return recorded
        commit = resolve()
        if commit is None:
            return None
        fields = {"dataset": dataset, "revision": revision, "commit": commit}
        files.keep_first(
            path, orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        return self._read(path)

    def _read(self, path: Path) -> str | None:
        try:
            fields = orjson.loads(path.read_bytes())
            commit = fields["commit"]
            if is_commit(commit):
                return str(commit)
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass
        raise CheckpointCorrupt(
            path,
            " should name the dataset's commit. Restore it, or remove it and write the commit as "
            "`revision` into dataset_options.",
        )


ReaderState = JsonObject
"""The state of a reader."""

PLAIN_INTEGER = 2**53 - 1  # exact in every JSON reader

FilePosition = tuple[int, ...]
"""A position in a file, right after a document; () is the file's beginning.

Each format defines its numbers.
"""


@dataclass(slots=True, eq=False)
class FileState:
    """The part of a state that all documents of one file share."""

    shared: ReaderState
    input: InputProgress | None = None
    file: FileProgress | None = None

    def state(self, position: Position) -> ReaderState:
        _, documents, _, file_position, skipped = position
        at = [number & PLAIN_INTEGER for number in file_position]
        return self.shared | {"documents": documents, "at": at, "skipped": skipped.numbers()}

    def progress(self, position: Position) -> InputPosition:
        if self.input is None or self.file is None:
            return InputPosition()
        reached = self.input.progress(self.file, position[3], position[1])
        return reached._replace(tasks=self.input.inputs.tasks)

    def __deepcopy__(self, memo: dict[int, object]) -> FileState:
        return self

    def __reduce__(self) -> tuple[type[FileState], tuple[ReaderState]]:
        return FileState, (self.shared,)


Position = tuple[int, int, FileState, FilePosition, SkippedLines]
"""Number of the reader, number of documents it has yielded, file, position in the file, lines
skipped so far.

Within one run, the first two numbers order positions as they were read. ``<`` of whole positions
raises TypeError for copies that were pickled.
"""


class PositionedDocument(Document):  # type: ignore[misc, unused-ignore]
    """A document with the position right after it. Equal to a ``Document`` with the same fields."""

    __slots__ = ("position",)
    __hash__ = None  # type: ignore[assignment]
    position: Position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.text, self.id, self.media, self.metadata) == (
            other.text,
            other.id,
            other.media,
            other.metadata,
        )


def position_of(document: Document) -> Position | None:
    return getattr(document, "position", None)


def position_state(document: Document) -> ReaderState | None:
    position = position_of(document)
    return position and position[2].state(position)


@dataclass(eq=False, repr=False)
class Reading:
    """One run of a pipeline, for its readers. Enter it in the thread that reads, around every
    ``next``.

    Args:
        state: position at which to resume, from ``position_state``; None: the beginning.
        revisions: the commits of datasets that the job reads; None outside of a job.
    """

    state: ReaderState | None = None
    revisions: Revisions | None = None
    starts: list[ReaderStart] = field(default_factory=list)
    _skipped_a_reader: bool = False
    _resumed: bool = False
    _earlier: list[str] = field(default_factory=list)

    @property
    def resumed(self) -> bool:
        """Whether the readers resumed from the state, after the first ``next``. False if no reader
        can seek.

        Raises:
            CheckpointMismatch: a reader yielded nothing because a later reader should resume, but
                there is no later reader.
        """
        if self._skipped_a_reader and not self._resumed:
            raise CheckpointMismatch(
                f"The saved position belongs to reader {(self.state or {})['number']} (counted "
                f"from 0), but only {len(self.starts)} of the pipeline's readers can seek. "
                "Restore the pipeline.",
                starts_over="anew",
            )
        return self._resumed

    def start_reader(self) -> ReaderStart:
        number = len(self.starts)
        start = ReaderStart(number, None, self._earlier, skipped=self.skipped)
        self.starts.append(start)
        if self.state is None:
            return start
        resuming = int(self.state.get("number", 0))
        if number == resuming:
            self._resumed = True
            start.state = self.state
            start.skipped = saved_skipped(self.state)
        elif number < resuming:
            self._skipped_a_reader = True
            start.finished_digest = ""
            earlier = self.state.get("earlier", [])
            if number < len(earlier):
                start.finished_digest = str(earlier[number])
        return start

    @property
    def skipped(self) -> SkippedLines:
        if not self.starts:
            return SkippedLines()
        return self.starts[-1].skipped

    def __enter__(self) -> Reading:
        _thread.readings.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.readings.pop()


@dataclass(slots=True)
class ReaderStart:
    """The start of one reader.

    Attributes:
        earlier: digest of each finished reader's input, in order.
        finished_digest: digest of this reader's input, if it finished before the save; else None.
        skipped: lines skipped so far by this reader and earlier readers.
        skipped_in: files with skipped lines, and whether a line was damaged.
    """

    number: int = 0
    state: ReaderState | None = None
    earlier: list[str] = field(default_factory=list)
    finished_digest: str | None = None
    skipped: SkippedLines = SkippedLines()
    skipped_in: dict[str, bool] = field(default_factory=dict)
    record: Callable[[], ReaderRecord] | None = None

    def note_skipped(self, name: str, before: SkippedLines, has_documents: bool) -> None:
        if self.skipped == before:
            return
        self.skipped_in[name] = self.skipped.damaged > before.damaged
        if not has_documents:
            advice = ""
            if self.skipped.without_text > before.without_text:
                advice = " Is text_key correct for this file?"
            logger.warning(f"The input file {name!r} gave no document.{advice}")


def start_reader(loaded: ReaderState | None) -> ReaderStart:
    if not _thread.readings:
        return ReaderStart(state=loaded, skipped=saved_skipped(loaded))
    start = _thread.readings[-1].start_reader()
    if loaded is not None and start.state is None and start.finished_digest is None:
        start.state = loaded
        start.skipped = saved_skipped(loaded)
    return start


def job_revisions() -> Revisions | None:
    if not _thread.readings:
        return None
    return _thread.readings[-1].revisions


def saved_skipped(state: ReaderState | None) -> SkippedLines:
    if state is None or "file" not in state:
        return SkippedLines()
    return SkippedLines.of_numbers(state.get("skipped", ()))


class _ThreadReadings(threading.local):
    def __init__(self) -> None:
        self.readings: list[Reading] = []


_thread = _ThreadReadings()


Row = JsonObject
"""A row of the input, from JSON or Arrow: values of any type."""


class BadRow(NamedTuple):
    """An unreadable line or row: the error, and the beginning of its text."""

    error: object
    begin: str = ""


ReadRow = tuple[Row | BadRow | None, int | None, FilePosition, int]
"""A row, the default id of its document, the position right after it, and its number for people.

A row that is None is an empty text. An id that is None becomes the number of documents before, if
positions of the file do not have this number.
"""


class RowBlock(NamedTuple):
    """Consecutive rows of one file, which are read before the next block.

    ``where`` names a row for people, with {} for its number.
    """

    where: str
    rows: Iterable[ReadRow]


FileRead = Iterator[tuple[Document | SkippedLines, FilePosition]]
"""The documents or skipped lines of one file, each with the position right after it."""

ALL_ROWS = (0, 1)
"""The share of rows that is all rows: every first row, from row 0 on."""


def explain_hub_error(subject: str, error: BaseException, commit: str | None = None) -> str:
    if commit and type(error).__name__ == "RevisionNotFoundError":
        return (
            f"{subject} no longer has the commit {commit} of this run. Restore it (by a branch "
            "or tag), or start over in other folders."
        )
    refused = hub_refusal(error)
    if refused:
        return f"{subject} cannot be read: {refused}."
    return (
        f"{subject} cannot be read: {one_line(error)}. Correct its name or URL, the revision, "
        "and dataset_options; check the network and HF_ENDPOINT; for a private or gated "
        "repository, set HF_TOKEN."
    )


def one_line(error: BaseException) -> str:
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        return library_line(error.__cause__)
    return library_line(error)


def file_error(name: str, problem: str, advice: str) -> InputError:
    return InputError(f"The input file {name!r} {problem}. {advice}, and run again.")


def is_on_hub(folder: DataFolder) -> bool:
    return "hf" in getattr(folder.fs, "protocol", ())


@contextmanager
def naming_hub_input(folder: DataFolder, name: str = "", missing: bool = True) -> Iterator[None]:
    """Turns errors of the hub or S3 about files of an input into an ``InputError`` with advice.

    Args:
        name: the file that is read; "": the folder is listed.
        missing: whether ``FileNotFoundError`` and ``PermissionError`` count, which the client
            raises for a folder.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        is_denied = (
            missing
            and isinstance(error, PermissionError)
            and "s3" in getattr(folder.fs, "protocol", ())
        )
        if is_denied or (
            type(error).__module__.startswith(("botocore", "aiobotocore"))
            and not isinstance(error, OSError)
        ):
            raise InputError(
                f"{_described(folder, name)} cannot be read: {library_line(error)}. Check the "
                "credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), the "
                "endpoint and the network."
            ) from error
        of_the_client = type(error).__module__.startswith(("huggingface_hub", "httpx"))
        is_missing = missing and isinstance(error, FileNotFoundError | PermissionError)
        if not is_on_hub(folder) or not (of_the_client or is_missing):
            raise
        raise InputError(explain_hub_error(_described(folder, name), error)) from error


def refuse_equal_names(names: Sequence[str], file: str) -> None:
    if len({*names}) == len(names):
        return
    name = next(other for other in names if names.count(other) > 1)
    numbers = ", ".join(str(number) for number, other in enumerate(names, 1) if other == name)
    raise file_error(
        file,
        f"has several columns named {name!r}: numbers {numbers}",
        "Rename or remove all but one",
    )


def _described(folder: DataFolder, name: str) -> str:
    folder_url = folder.resolve_paths("")
    if name:
        return f"The input file {name!r} in {folder_url}"
    return f"The input {folder_url!r}"


_SAMPLE = 2**16
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "sha256",
    "checksum",
    "generation",
    "xet_hash",
)


def position_mismatch(problem: str, advice: str = "Restore it") -> CheckpointMismatch:
    """The remedy is other folders in a pipeline, and to drop the state in a training."""
    if _thread.readings:
        return CheckpointMismatch(f"{problem} {advice}.", starts_over="with old results")
    return CheckpointMismatch(f"{problem} {advice}, or start without the saved state.")


class InputFiles:
    """The files that a reader reads, in order. Their ``infos`` are looked up once."""

    row_shard = ALL_ROWS
    """Index and count: the rank reads every ``count``-th row of these files, from ``index`` on."""
    commit: str | None = None
    """The commit of a dataset on the hub."""
    tasks: int | None = None
    """Number of the first rank without files. None: unknown."""

    def __init__(
        self, folder: DataFolder, names: Sequence[str], infos: dict[str, JsonObject] | None = None
    ) -> None:
        self.folder = folder
        self.names = names
        self._infos = infos or {}

    def info(self, index: int) -> JsonObject:
        """Returns size, time of change, ETag and other values, depending on the file system.

        Raises:
            InputError: the file is a FIFO, a socket or a device.
        """
        name = self.names[index]
        if name not in self._infos:
            self._infos[name] = info = self._remote(self.folder.info, name)
            if info.get("type") == "other":
                problem = f"in {self.folder.path} is a FIFO, a socket or a device"
                raise file_error(name, problem, "Write its content into a file")
        return self._infos[name]

    def size(self, index: int) -> int:
        return int(self.info(index)["size"] or 0)

    def size_for_people(self, index: int) -> int:
        """Stores nothing, so any thread may call this."""
        name = self.names[index]
        info = self._infos.get(name) or self._remote(self.folder.info, name)
        return int(info["size"] or 0)

    def note_size(self, index: int, size: int | None) -> None:
        """Replaces the size with the number of bytes read; after a limit (None), with the current
        size.
        """
        if size != self.size(index):
            info = self.folder.info(self.names[index])
            if size is not None:
                info = info | {"size": size}
            self._infos[self.names[index]] = info

    def fingerprint(self, index: int) -> str:
        """Prefers the hub's own hash, which costs no download."""
        if is_on_hub(self.folder):
            hub_hash = self.info(index).get("blob_id")
            if hub_hash:
                return str(hub_hash)
        size = self.size(index)
        return str(self._remote(fingerprint, self.folder, self.names[index], size))

    def _remote(self, call: Callable[..., T], *arguments: object) -> T:
        with naming_hub_input(self.folder, missing=False):
            return retrying.READING.run(partial(call, *arguments), self.folder.path)

    def sample(self, index: int) -> str:
        """Returns a value that changes with the content; "" if there is no such value or file."""
        info = self.info(index)
        if not self.folder.is_local():
            return next((str(info[tag]) for tag in _TAGS if info.get(tag)), "")
        with suppress(FileNotFoundError):
            return self.fingerprint(index)
        return ""

    def shard(self, rank: int, world_size: int) -> InputFiles:
        names = self.names[rank::world_size]
        infos = {name: self._infos[name] for name in names if name in self._infos}
        return InputFiles(self.folder, names, infos)

    def digest(self, count: int) -> InputDigest:
        digest = InputDigest()
        for index in range(count):
            digest.add(self.names[index], self.known_size(index))
        return digest

    def check_all(self, before: ReaderState) -> None:
        current = self.digest(len(self.names))
        if not current.is_of(before):
            raise position_mismatch(
                f"The input has changed from {before['files']} files of {before['bytes']} bytes "
                f"to {current.files} of {current.bytes} bytes."
            )

    def known_size(self, index: int) -> int:
        try:
            return self.size(index)
        except FileNotFoundError as error:
            raise position_mismatch(f"The input file {self.names[index]!r} is missing.") from error

    def check_before(self, state: ReaderState) -> InputDigest:
        """Returns the digest of the files before the state's current file.

        Raises:
            CheckpointMismatch: a file before it has changed, or the current file is missing.
        """
        before = state["before"]
        current = state["file"]["name"]
        count = before["files"]
        if count < len(self.names) and shorten(self.names[count]) == current:
            digest = self.digest(count)
            if digest.is_of(before):
                return digest
        if current not in map(shorten, self.names):
            raise position_mismatch(
                f"The input has changed: the file {current!r} of the position is missing or "
                "renamed."
            )
        raise position_mismatch(
            f"The input has changed: the {before['files']} files of {before['bytes']} bytes "
            f"before {current!r} are not the same now."
        )


def path_of(folder: DataFolder, name: str) -> str:
    """For rows that a run keeps, this is the path when the run began."""
    resolved: str = folder.resolve_paths(name)
    path = Path(resolved)
    if folder.is_local() and path.parent.name == layout.KEPT_INPUT:
        with suppress(OSError):
            began_in = os.fsdecode(path.with_name(layout.BEGAN_IN).read_bytes())
            return str(Path(began_in, path.name))
    return resolved


class InputDigest:
    """Number, total size and XOR of hashes of the finished files."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0
        self.all = 0

    def add(self, name: str, size: int) -> None:
        # The index makes the order count, which XOR ignores.
        self.all ^= xxh3_64_intdigest(f"{self.files}/{size}/{name}".encode())
        self.bytes += size
        self.files += 1

    def state(self) -> ReaderState:
        return {"files": self.files, "bytes": self.bytes, "all": f"{self.all:016x}"}

    def is_of(self, state: ReaderState) -> bool:
        """States of earlier releases hold more keys."""
        return self.state().items() <= state.items()

    def __str__(self) -> str:
        return f"{self.files}:{self.all:016x}"


def fingerprint(folder: DataFolder, name: str, size: int) -> str:
    """Hashes a file's first and last 64 kB, in which gzip and Parquet describe the content."""
    sample = b""
    if size:
        sample = folder.cat_file(name, start=0, end=min(size, _SAMPLE))
    if size > _SAMPLE:
        sample += folder.cat_file(name, start=max(_SAMPLE, size - _SAMPLE), end=size)
    return xxh3_64_hexdigest(sample)


def shuffled_names(names: Iterable[str], seed: int) -> list[str]:
    """Orders files so that an added file moves no other file."""
    return sorted(names, key=lambda name: (xxh3_64_intdigest(f"{seed}/{name}".encode()), name))


def shorten(name: str) -> str:
    encoded = name.encode()
    if len(encoded) <= 200:
        return name
    return f"{xxh3_64_hexdigest(encoded)}...{encoded[-160:].decode(errors='ignore')}"


def metadata_hash(metadata: JsonObject | None) -> str:
    text = orjson.dumps(
        metadata or {}, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    )
    return xxh3_64_hexdigest(text)[:8]


MISSING = -1
"""Size of a file that a list names, but that does not exist."""
_OPTIONS = ("text_key", "id_key", "limit", "skip")


def options_of(reader: BaseDiskReader) -> JsonObject:
    options = {
        name: getattr(reader, name)
        for name in (*_OPTIONS, *getattr(reader, "dataset_settings", ()))
    }
    if getattr(reader, "path_columns", False):
        options["path_columns"] = True
    if getattr(reader, "delimiter", ",") != ",":
        options["delimiter"] = reader.delimiter
    if getattr(reader, "encoding", None):
        options["encoding"] = reader.encoding
    return options | {"default_metadata": plain_settings(reader.default_metadata or {})}


def path_columns(name: str) -> dict[str, str | None]:
    """Returns the columns that a file's folders name, as ``lang=en/year=2026/``, as text."""
    pairs = (folder.split("=", 1) for folder in name.split("/")[:-1] if "=" in folder)
    columns = {unquote(key): unquote(value) for key, value in pairs}
    return {
        key: None if value == "__HIVE_DEFAULT_PARTITION__" else value
        for key, value in columns.items()
    }


def record_reader(
    reader: BaseDiskReader,
    inputs: InputFiles,
    count: int,
    limited: bool = False,
    whole: JsonObject | None = None,
) -> ReaderRecord:
    options = options_of(reader) | (whole or {})
    return ReaderRecord(options, sample_files(inputs, range(count)), limited)


def sample_files(inputs: InputFiles, indices: Sequence[int]) -> list[FileRecord]:
    return in_threads(partial(_record, inputs), indices)


def _record(inputs: InputFiles, index: int) -> FileRecord:
    name = inputs.names[index]
    try:
        modified = inputs.info(index).get("mtime")
    except FileNotFoundError:
        return FileRecord(name, MISSING, "", 0.0)
    if not isinstance(modified, int | float):
        modified = 0
    return FileRecord(name, inputs.size(index), inputs.sample(index), float(modified))


def check_reachable(folder: DataFolder) -> None:
    """Contacts a remote input. Ignores errors that no retry can fix: the listing raises them.

    Raises:
        InputError, OSError: the input could not be reached for a minute.
    """
    with naming_hub_input(folder):
        try:
            retrying.OPENING.run(
                partial(folder.info, ""), f"The input {folder.resolve_paths('')} cannot be reached"
            )
        except Exception as error:
            if retrying.OPENING.is_transient(error):
                raise


class InputFolder(DataFolder):  # type: ignore[misc]  # datatrove has no types
    """Lists no internal and hidden files."""

    cachable = False

    @classmethod
    def give(cls, reader: BaseDiskReader) -> None:
        reader.data_folder = cls(reader.data_folder.path, reader.data_folder.fs)

    def glob(self, path: str, **options: object) -> dict[str, JsonObject]:
        """Takes special characters in the folder's own name literally."""
        if not has_magic(self.path):
            return dict(super().glob(path, **options))
        matches = re.compile(glob_translate(path)).match
        infos = self.find("", **options | {"maxdepth": None}).items()
        return {name: info for name, info in infos if matches(name)}

    def list_files(self, *arguments: object, **options: str | None) -> list[str]:
        names = super().list_files(*arguments, **options)
        return [name for name in names if layout.is_input(name, options.get("glob_pattern"))]


def refuse_pointer(begin: bytes, name: str) -> None:
    if begin.startswith(b"version https://git-lfs.github.com/spec/"):
        problem = "is a pointer of Git LFS, and not the file itself"
        raise file_error(name, problem, "Run `git lfs pull` in its repository")


def refuse_pointers(inputs: InputFiles) -> None:
    """Raises InputError if one of the first 10,000 files of a folder is a pointer of Git LFS."""
    for index, name in enumerate(inputs.names[:10_000]):
        if 0 < inputs.size(index) <= 1024:  # Git LFS accepts no larger pointer
            refuse_pointer(inputs.folder.cat_file(name), name)


def list_input(reader: BaseDiskReader, afresh: bool = True, of_rank: bool = False) -> InputFiles:
    """Lists all files of a reader's input, in datatrove's order.

    Args:
        of_rank: whether to accept special files, which may be another rank's.

    Raises:
        InputError: a file in the folder is a FIFO, a socket or a device, or its name is not UTF-8.
        OSError: the folder or the list cannot be read.
    """
    folder = reader.data_folder
    pattern = reader.glob_pattern
    if hasattr(reader, "list_dataset"):
        dataset_inputs: InputFiles = reader.list_dataset()
        return dataset_inputs
    if reader.paths_file:
        return InputFiles(folder, list(get_shard_from_paths_file(reader.paths_file, 0, 1)))
    if afresh:
        folder.invalidate_cache()
    options = {"maxdepth": None if reader.recursive else 1, "detail": True}
    if is_on_hub(folder):
        # As in DataFolder.list_files: one request in all.
        options["expand_info"] = False
    if not pattern:
        list_folder = partial(folder.find, "", **options)
    else:
        if not has_magic(pattern):
            pattern = f"*{pattern}"
        list_folder = partial(InputFolder(folder.path, folder.fs).glob, pattern, **options)
    with naming_hub_input(folder):
        listed = retrying.READING.run(
            list_folder, f"The input {folder.resolve_paths('')} cannot be listed"
        )
    files = (name for name, info in listed.items() if info["type"] != "directory")
    names = sorted(name for name in files if layout.is_input(name, pattern))
    for name in names:
        if name.encode(errors="replace").decode() != name:
            raise InputError(
                f"The name of the input file {os.fsencode(name)!r} in {folder.path} is not "
                "UTF-8. Rename the file."
            )
    # Listings show symbolic links as "other".
    infos = {name: listed[name] for name in names if listed[name]["type"] != "other"}
    inputs = InputFiles(folder, names, infos)
    for index, name in enumerate(names):
        if name not in infos and not of_rank:
            with suppress(FileNotFoundError):
                inputs.info(index)
    return inputs


# progress -----------------------------------------------------------------------------------------


# More files are measured in a thread, because a stat may take 1 ms and a request 50. Beyond
# _MEASURED, a sample is measured, because the hub limits requests.
_AT_ONCE = 64
_MEASURED = 1000


@dataclass(slots=True, eq=False)
class FileProgress:
    """Converts positions in one file of an input to bytes.

    Attributes:
        per: bytes per unit of a position's first number; None: unknown.
        starts: share of the file before each group, from 0 to 1, with a last 1, if positions are
            group and row.
        lengths: rows of each group, as far as they are known.
        end: offset at which the reading of a file that may grow ended; None before the end.
    """

    before: float = 0.0
    size: float = 0.0
    per: float | None = None
    starts: list[float] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def progress(self, position: tuple[int, ...]) -> float:
        if not position:
            return self.before
        number = position[0]
        inside = 0.0
        if 0 <= number < len(self.starts) - 1:
            start, end = self.starts[number : number + 2]
            part = position[1] / max(1, self.lengths.get(number, position[1]))
            inside = self.size * (start + (end - start) * min(1.0, part))
        elif self.per is not None:
            inside = number * self.per
        return self.before + max(0.0, min(float(self.size), inside))


@dataclass(eq=False)
class InputProgress:
    """The size of the input of one reader in one rank, and the progress in it.

    Args:
        is_near: whether a size costs no request.
    """

    inputs: InputFiles
    _limit: int
    _is_near: bool
    total: float | None = None
    """Size in bytes; None: unknown, or not measured yet (``measure``)."""
    _is_measured: bool = False

    def measure(self) -> None:
        if self._is_measured:
            return
        self._is_measured = True
        if self._is_near and len(self.inputs.names) <= _AT_ONCE:
            self._measure()
        else:
            context_thread(self._measure, "datatrove-ckpt sizes")

    def _measure(self) -> None:
        # The reader raises a better error.
        with suppress(Exception):
            count = len(self.inputs.names)
            max_measured = _MEASURED if self._is_near else 50
            chosen = range(0, count, max(1, -(-count // max_measured)))
            sizes = [self.inputs.size_for_people(index) for index in chosen]
            if not count or any(sizes):
                self.total = sum(sizes) * count / max(1, len(sizes))

    def progress(
        self, file: FileProgress, position: tuple[int, ...], documents: int
    ) -> InputPosition:
        self.measure()
        done = file.progress(position)
        coarse = file.per is None and not file.starts
        total = self.total
        if coarse and len(self.inputs.names) < 20:
            total = None
        if self._limit > 0 and documents / self._limit >= done / (total or math.inf):
            return InputPosition(min(documents, self._limit), self._limit, "rows")
        if total is not None:
            return InputPosition(min(int(done), int(total)), int(total), "bytes")
        if done:
            return InputPosition(int(done), None, "bytes")
        return InputPosition()
