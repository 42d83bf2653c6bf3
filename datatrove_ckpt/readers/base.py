"""SeekingReader, the base of all readers: it chooses files, resumes, and gives documents positions.

A format implements ``blocks``, which reads the rows of a file from a place in it. Only this module
makes documents of them. Files, order, ``limit``, ``skip`` and stats are as in datatrove's
``BaseDiskReader.run``.

A step holds plain data only, because datatrove copies and pickles it. It may run several ranks, so
each run forgets where the previous run ended.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Protocol, runtime_checkable

from datatrove.data import Document, DocumentsPipeline, Media
from datatrove.io import DataFolderLike
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.utils.stats import MetricStats, Stats
from loguru import logger
from tqdm import tqdm

from datatrove_ckpt.common.counts import DAMAGED, WITHOUT_TEXT, SkippedLines
from datatrove_ckpt.common.redaction import check_no_secrets, check_options, refuse_variables
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import ConfigError, DocumentError, DocumentNotSerializable, InputError
from datatrove_ckpt.readers.compressed import (
    WHOLE,
    codec_of,
    open_content,
    refuse_partial_files,
    whole_option,
)
from datatrove_ckpt.readers.declared_types import DeclaredTypes
from datatrove_ckpt.readers.empty_input import refuse_file_without_documents
from datatrove_ckpt.readers.inputs import (
    ALL_ROWS,
    BadRow,
    FilePosition,
    FileProgress,
    FileRead,
    FileState,
    InputDigest,
    InputFiles,
    InputProgress,
    Position,
    PositionedDocument,
    ReaderStart,
    ReaderState,
    Row,
    RowBlock,
    list_input,
    metadata_hash,
    path_columns,
    path_of,
    position_mismatch,
    record_reader,
    shorten,
    shuffled_names,
    start_reader,
)

READER_VERSION = 1
_MAX_LOGGED = 5

USUAL_KEYS = {"text_key": "text", "id_key": "id"}
"""The options that decide how a row becomes a document, and their defaults.

A state has the options that differ from these defaults.
"""


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> ReaderState: ...

    def load_state_dict(self, state_dict: ReaderState) -> None: ...


class DamagedLine(DocumentError):
    """A line or row of an input file cannot be read, and ``max_skipped`` allows no more of them."""


class SeekingReader(BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """A subclass lists this base before datatrove's reader of the format."""

    compression: str | None = None
    encoding: str | None = None
    shuffle_seed: int | None = None
    path_columns = False
    max_skipped: int | None = None
    stop_on_bad_line: bool | None = None
    format: str
    """The format's name in states.

    A class that sets it promises that each document depends on its row alone, so that a resume may
    seek. A subclass that does not set it may keep state.
    """
    suffixes = ""
    """The suffixes of the format's files, for the short form."""
    has_rows = True
    """Whether a file has rows or lines. Otherwise it is a document, or pages."""
    grows = False
    """Whether a file may get more lines while it is read, and later."""
    has_types = False
    """Whether the format gives columns types."""
    _order_options: tuple[str, ...] = (
        "shuffle_seed",
        "skip",
        "glob_pattern",
        "recursive",
    )
    """The options that decide which documents come before a position. A state keeps them."""

    _empty_warning: bool
    _next_state: ReaderState | None = None
    _start_state: ReaderState | None = None
    _position: Position | None = None
    _file_extent = FileProgress()
    _resolved: dict[str, str] | None = None
    types: DeclaredTypes | None = None
    _damaged_rows = 0
    _has_read_row = False
    _lengths: list[int] = []  # noqa: RUF012 (a run replaces it, and never changes it)

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        shuffle_seed: int | None = None,
        path_columns: bool = False,
        max_skipped: int | None = 0,
        **options: object,
    ) -> None:
        super().__init__(data_folder, *arguments, **options)
        check_no_secrets(self.data_folder, "data_folder")
        refuse_variables("data_folder", self.data_folder.path)
        if isinstance(self.paths_file, str):
            refuse_variables("paths_file", self.paths_file)
        if isinstance(self.paths_file, tuple):
            check_options(self.paths_file[1], self.paths_file[0], "paths_file")
        if self.shuffle_files:
            raise ConfigError(
                "shuffle_files=True gives another order at each start, and no run could resume. "
                "Use shuffle_seed=<any integer>."
            )
        self.shuffle_seed = shuffle_seed
        self.path_columns = path_columns
        self.max_skipped = max_skipped

    @property
    def stats(self) -> Stats:
        """The statistics of ``update_doc_stats``. The lengths of texts are added here, because one
        by one they would cost as much as reading their lines.
        """
        stats = self.__dict__["stats"]
        lengths = self._lengths
        if lengths:
            self._lengths = []
            mean = sum(lengths) / len(lengths)
            stats["doc_len"] += MetricStats(
                sum(lengths),
                len(lengths),
                mean,
                min(lengths),
                max(lengths),
                sum((length - mean) ** 2 for length in lengths),
            )
        return stats

    @stats.setter
    def stats(self, stats: Stats) -> None:
        self.__dict__["stats"] = stats
        self._lengths = []

    def state_dict(self) -> ReaderState:
        """Returns the position after the last yielded document."""
        if self._next_state is not None:
            return self._next_state
        if self._position is not None:
            return self._position[2].state(self._position)
        return self._start_state or self._reader_state(0)

    def load_state_dict(self, state_dict: ReaderState) -> None:
        """Sets the position after which the next run resumes."""
        self._next_state = state_dict

    def may_keep_state(self) -> list[str]:
        """Returns the user's classes and adapters that may keep state between documents."""
        kind = type(self)
        if "format" not in vars(kind):
            return [kind.__name__]
        if self.has_default_adapter():
            return []
        adapter = getattr(self.adapter, "__func__", self.adapter)
        name = getattr(adapter, "__qualname__", type(adapter).__name__)
        return [f"the adapter {name} of {kind.__name__}"]

    def has_default_adapter(self) -> bool:
        # datatrove binds an adapter to its reader.
        return getattr(self.adapter, "__func__", None) is BaseDiskReader._default_adapter

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Yields the documents of the steps before this reader, then the documents of this rank.

        Raises:
            CheckpointMismatch: the input does not continue the input of the saved state.
            InputError: a file is damaged or cut off, or no row of any file is a document.
        """
        if data:
            yield from data
        self._position = None
        self._lengths = []
        self._file_extent = FileProgress()
        start = start_reader(self._next_state)
        self._start_state = start.state
        self._next_state = None
        self._damaged_rows = start.skipped.damaged
        if rank == 0 and world_size > 1 and self.limit != -1:
            logger.info(
                f"limit={self.limit} applies to each of {world_size} tasks: up to "
                f"{self.limit * world_size} documents."
            )
        inputs = self.list_inputs(rank, world_size, start.state)
        if start.finished_digest is not None:
            count = int(start.finished_digest.partition(":")[0] or 0)
            if count > len(inputs.names) or str(inputs.digest(count)) != start.finished_digest:
                raise position_mismatch(
                    f"One of the first {count} input files of {self.data_folder.path}, which "
                    "were read, is gone, new, renamed or resized."
                )
            start.earlier.append(start.finished_digest)
            start.record = partial(record_reader, self, inputs, count)
        else:
            input_pass = _InputPass(self, inputs, start, [rank, world_size])
            with input_pass.documents_bar, input_pass.files_bar:
                for index in input_pass.unread_files():
                    yield from input_pass.documents_in(index)
            input_pass.record_files()

    def get_document_from_dict(
        self, data: Row, source_file: str, id_in_file: int | str
    ) -> Document | None:
        self._prepare(data, source_file)
        fields = self.adapter(data, source_file, id_in_file)
        text = fields.get("text")
        if self.text_key is None and not text:
            metadata = fields.get("metadata", {})
            fields["text"] = ""
            if isinstance(metadata.get("text"), str | None):
                fields["text"] = metadata.pop("text", None) or ""
        elif not text:
            if not self._empty_warning:
                self._empty_warning = True
                logger.warning(
                    "Found document without text, skipping. Is your `text_key` "
                    f"({self.text_key!r}) correct? Available keys: {list(data)}"
                )
            return None
        # datatrove's Document and its statistics need a text with a length that is not bytes.
        elif not hasattr(text, "__len__") or isinstance(text, bytes):
            raise DocumentNotSerializable(
                f"The document {fields.get('id')!r} of the input file {source_file!r} has a text "
                f"of type {type(text).__name__}, not str. Write it as a string, set "
                f"types: {{{self.text_key}: string}} (JSON lines), or write an adapter."
            )
        media = fields.get("media")
        if media:
            try:
                fields["media"] = [Media(**part) for part in media]
            except TypeError:
                raise DocumentNotSerializable(
                    f"The document {fields.get('id')!r} of the input file {source_file!r} has a "
                    "'media' that is not datatrove's. Rename the column, or write an adapter."
                ) from None
        elif media is not None:
            fields["media"] = []
        document = PositionedDocument(**fields)
        if self.default_metadata:
            document.metadata = self.default_metadata | document.metadata
        if self.add_file_path:
            if self._resolved is None:
                self._resolved = {}
            path = self._resolved.get(source_file)
            if path is None:
                path = self._resolved[source_file] = path_of(self.data_folder, source_file)
            document.metadata.setdefault("file_path", path)
        return document

    def _prepare(self, row: Row, source_file: str) -> None:
        if self.path_columns:
            for name, value in path_columns(source_file).items():
                row.setdefault(name, value)
        if not self._has_read_row:
            self._has_read_row = True
            self._warn_of_absent(row)
        if self.types is not None:
            self.types.convert(row)

    def _warn_of_absent(self, row: Row) -> None:
        columns = [("types", name) for name in getattr(self.types, "names", ())]
        if self.id_key != "id" and self.has_default_adapter():
            columns.append(("id_key", self.id_key))
        for setting, name in columns:
            if name not in row:
                warn_once(
                    f"{setting}: the first row has no column {name!r}; its columns: "
                    f"{', '.join(row)}. Correct the name, unless other rows have it."
                )

    def documents_of(
        self, name: str, blocks: Iterable[RowBlock], number: int = 0, task: str = ""
    ) -> FileRead:
        """Yields a document of each row, with the position after it.

        Args:
            number: documents of the file so far: the next default id.
            task: begins the default ids of a dataset, which number the documents of all its shards.
                Positions then lack the number.
        """
        make = self.get_document_from_dict
        seconds = 0.0
        began = time.perf_counter()
        for template, rows in blocks:
            try:
                for row, default_id, file_position, row_number in rows:
                    id_in_file: int | str = number
                    if default_id is not None:
                        id_in_file = default_id
                    elif task:
                        id_in_file = f"{task}{number}"
                    document = WITHOUT_TEXT
                    try:
                        if isinstance(row, dict):
                            document = make(row, name, id_in_file) or WITHOUT_TEXT
                        elif row is not None:
                            document = self.skip_damaged(name, template.format(row_number), row)
                    except DocumentNotSerializable as error:
                        document = self.skip_damaged(
                            name, template.format(row_number), BadRow(error)
                        )
                    if default_id is None:
                        number += not isinstance(document, SkippedLines)
                        if not task:
                            file_position = (*file_position, number)
                    # Timing each row by stats would cost too much.
                    seconds += time.perf_counter() - began
                    yield document, file_position
                    began = time.perf_counter()
            finally:
                self.stats.time_stats.update(seconds, "batch")
                seconds = 0.0

    def skip_damaged(
        self, file: str, location: str, bad_row: BadRow, in_training: bool = False
    ) -> Document | SkippedLines:
        """Counts a bad line, and returns its substitute.

        Raises:
            DamagedLine: ``max_skipped`` allows no more damaged rows.
        """
        self._damaged_rows += 1
        allowed = self.max_skipped
        if in_training:
            allowed = None
        if self.stop_on_bad_line:
            allowed = 0
        error, begin = bad_row
        if allowed is not None and self._damaged_rows > allowed:
            if begin:
                begin = f", in {begin!r}"
            problem = str(error).removesuffix(".")
            raise DamagedLine(
                f"`{file}`, {location}: {problem}{begin}. Correct or remove it, or set "
                "max_skipped (null: any number)."
            )
        self.stat_update("damaged_lines")
        count = self.stats["damaged_lines"].total
        advice = ""
        if count == _MAX_LOGGED:
            advice = "; others are only counted"
        if count <= _MAX_LOGGED:
            logger.warning(f"Error when reading `{file}`, {location}: {error}{advice}")
        return DAMAGED

    def read_file(self, filepath: str) -> Iterator[Document]:
        for document, _ in self.documents_of(filepath, self.blocks(filepath, ())):
            if not isinstance(document, SkippedLines):
                yield document

    def schemas(self) -> Iterable[tuple[str, object]]:
        """Yields the name and Arrow schema of each input file, if the format has schemas; otherwise
        the schema that ``types`` declares.
        """
        if self.types is None:
            return ()
        return [("types", self.types.schema())]

    def list_inputs(self, rank: int, world_size: int, state: ReaderState | None) -> InputFiles:
        names = list_input(self, afresh=state is not None, of_rank=True).names
        if not names and not self.paths_file:
            raise InputError(
                f"The input {self.data_folder.resolve_paths('')!r} holds no files for this "
                "reader. Correct the path, or glob_pattern."
            )
        tasks = min(len(names), world_size)
        names = names[rank::world_size]
        if self.shuffle_seed is not None:
            names = shuffled_names(names, self.shuffle_seed)
        # The listing is kept, because a file may change before it is read.
        inputs = InputFiles(self.data_folder, names)
        inputs.tasks = tasks
        return inputs

    def _reader_state(self, number: int) -> ReaderState:
        return {
            "version": READER_VERSION,
            "reader": self.format,
            "number": number,
            "options": self._options(),
        }

    def _checked_state(self, state: ReaderState | None, shard: list[int]) -> ReaderState | None:
        if state is None:
            return None
        position = f"The saved position in {self.data_folder.path}"
        made_by = f"{state.get('reader')!r} (version {state.get('version')})"
        this_reader = f"{self.format!r} (version {READER_VERSION})"
        if made_by != this_reader:
            raise position_mismatch(
                f"{position} was made by reader {made_by}, and this is {this_reader}."
            )
        recorded = {key: value for key, value in state["options"].items() if key != WHOLE}
        current = self._options()
        if "shard" in state:
            recorded["shard"] = state["shard"]
            current["shard"] = shard
        for key in recorded | current:
            old = recorded.get(key, USUAL_KEYS.get(key))
            new = current.get(key, USUAL_KEYS.get(key))
            if old == new:
                continue
            if key in ("default_metadata", "types"):
                raise position_mismatch(f"{position} was made with other {key}.")
            raise position_mismatch(f"{position} was made with {key}={old!r}, now {new!r}.")
        documents = state.get("documents", 0)
        if 0 <= self.limit < documents:
            raise position_mismatch(
                f"{position} comes after {documents} documents, and limit is now {self.limit}.",
                f"Set limit to at least {documents}",
            )
        return state if "file" in state else None

    def _options(self) -> ReaderState:
        options = {key: getattr(self, key) for key in self._order_options}
        options |= {
            key: getattr(self, key)
            for key, default in USUAL_KEYS.items()
            if getattr(self, key) != default
        }
        options["default_metadata"] = metadata_hash(self.default_metadata)
        if self.types is not None:
            options["types"] = metadata_hash(self.types.names)
        if self.path_columns:
            options["path_columns"] = True
        if self.shuffle_seed is not None:
            options["shuffled"] = "files"  # earlier releases also shuffled the rows of each file
        for key, value in options.items():
            if isinstance(value, str):
                options[key] = shorten(value)
        return {
            key: value for key, value in options.items() if value is not None or key == "text_key"
        }

    def _refuse_without_documents(self, name: str, damaged: bool) -> None:
        refuse_file_without_documents(self, name, damaged)

    def _read_input(
        self, inputs: InputFiles, index: int, file_position: FilePosition, number: tuple[int, int]
    ) -> FileRead:
        name = inputs.names[index]
        documents = file_position[-1] if file_position else 0
        return self.documents_of(name, self.blocks(name, file_position), documents)

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        raise NotImplementedError

    def _may_grow(self, name: str) -> bool:
        # Compressed data does not end at a line's end, nor may a text that is converted.
        return self.grows and self.encoding is None and codec_of(name, self.compression) is None

    def _check_read_part(self, name: str, file_position: FilePosition) -> None:
        """Raises CheckpointMismatch if the content before ``file_position`` has changed.

        Called for files that may grow; others must be the same as a whole.
        """


class TextFilesReader(SeekingReader):
    _order_options = (*SeekingReader._order_options, "compression", "encoding")

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        encoding: str | None = None,
        types: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, **options)
        self.types = DeclaredTypes(types) if types else None
        try:
            "".encode(encoding or "utf-8")
        except LookupError as error:
            raise ConfigError(f"encoding: {error}. Write one such as windows-1252.") from None
        self.encoding = encoding

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return open_content(self.data_folder, name, self.compression, self.encoding)


@dataclass(eq=False)
class _InputPass:
    """Reads the input files of one rank in order.

    Attributes:
        yielded_before: number of documents, in all attempts, before the current file.
        file_position: the place in the current file where an earlier attempt ended, or ().
    """

    reader: SeekingReader
    inputs: InputFiles
    start: ReaderStart
    shard: list[int]
    digest: InputDigest = field(default_factory=InputDigest)
    yielded: int = 0
    yielded_before: int = 0
    omitted: int = 0
    file_position: FilePosition = ()

    def __post_init__(self) -> None:
        reader = self.reader
        state = reader._checked_state(self.start.state, self.shard)
        if state is not None:
            self._resume(state)
        self._whole = whole_option(self.inputs.names, reader.compression)
        self.extent = InputProgress(self.inputs, reader.limit, reader.data_folder.is_local())
        self.documents_bar = tqdm(
            total=None if reader.limit == -1 else reader.limit,
            desc="Document progress",
            unit="doc",
            disable=not reader.doc_progress,
        )
        self.files_bar = tqdm(
            total=len(self.inputs.names),
            desc="File progress",
            unit="file",
            disable=not reader.file_progress,
        )

    def _resume(self, state: ReaderState) -> None:
        self.digest = self.inputs.check_before(state)
        names = self.inputs.names[: self.digest.files + 1]
        refuse_partial_files(self.inputs.folder, names, self.reader.compression, state["options"])
        self.file_position = tuple(state["at"])
        self._check_current_file(state["file"])
        self.yielded = state["documents"]
        self.yielded_before = int(state["file"].get("first", self.yielded))
        self.omitted = self.reader.skip

    def _check_current_file(self, recorded: ReaderState) -> None:
        index = self.digest.files
        name = self.inputs.names[index]
        size = self.inputs.known_size(index)
        has_same_size = size == recorded["size"]
        has_hash = has_same_size and not self.reader._may_grow(name)
        if has_hash and self.inputs.fingerprint(index) == recorded["hash"]:
            return
        if self.reader.grows:
            self.reader._check_read_part(name, self.file_position)
            return
        if has_same_size:
            raise position_mismatch(f"The input file {name!r} has changed.")
        raise position_mismatch(
            f"The input file {name!r} had {recorded['size']} bytes, and has {size}."
        )

    def unread_files(self) -> Iterator[int]:
        for index in range(self.digest.files, len(self.inputs.names)):
            if self._is_at_limit():
                if self.file_position:
                    self._end_file(index)
                return
            yield index

    def documents_in(self, index: int) -> Iterator[Document]:
        reader = self.reader
        start = self.start
        file = self._begin_file(index)
        skipped_before = start.skipped
        read_before = self.yielded + self.omitted
        number = (self.shard[0], read_before)
        for document, file_position in reader._read_input(
            self.inputs, index, self.file_position, number
        ):
            if isinstance(document, SkippedLines):
                start.skipped = start.skipped + document
            elif self.omitted < reader.skip:
                self.omitted += 1
            else:
                self.yielded += 1
                position = (start.number, self.yielded, file, file_position, start.skipped)
                document.position = reader._position = position
                reader._lengths.append(len(document.text))
                if token_count := document.metadata.get("token_count"):
                    reader.stat_update("doc_len_tokens", value=token_count, unit="doc")
                yield document
                if reader.doc_progress:
                    self.documents_bar.update()
                if self.yielded == reader.limit:
                    break
        has_documents = (
            bool(self.file_position)
            or self.yielded + self.omitted > read_before
            or self.inputs.row_shard != ALL_ROWS  # other ranks read its other rows
        )
        start.note_skipped(self.inputs.names[index], skipped_before, has_documents)
        self.files_bar.update()
        self._end_file(index)
        self.file_position = ()

    def _begin_file(self, index: int) -> FileState:
        if not self.file_position:  # else an earlier attempt has counted it
            self.yielded_before = self.yielded
            self.reader.stat_update("input_files")
        name = self.inputs.names[index]
        logger.info(f"Reading input file {name}, {index + 1}/{len(self.inputs.names)}")
        size = self.inputs.size(index)
        recorded = {"name": shorten(name), "size": size, "first": self.yielded_before}
        # Otherwise the position has hashes of the content, see ``_check_read_part``.
        if not self.reader._may_grow(name):
            recorded["hash"] = self.inputs.fingerprint(index)
        state = self.reader._reader_state(self.start.number)
        state["options"] |= self._whole
        state |= {
            "shard": list(self.shard),
            "earlier": list(self.start.earlier),
            "before": self.digest.state(),
            "file": recorded,
        }
        if self.inputs.commit:
            state["commit"] = self.inputs.commit
        extent = FileProgress(before=self.digest.bytes, size=size)
        self.reader._file_extent = extent
        return FileState(state, self.extent, extent)

    def _end_file(self, index: int) -> None:
        documents = self.yielded - self.yielded_before
        self.reader.stat_update("documents", value=documents, unit="input_file")
        name = self.inputs.names[index]
        if self.reader._may_grow(name):
            self.inputs.note_size(index, self.reader._file_extent.end)
        self.digest.add(name, self.inputs.size(index))

    def record_files(self) -> None:
        """Records the finished files.

        Raises:
            NoDocuments: no row of any file is a document.
        """
        self.start.earlier.append(str(self.digest))
        self.start.record = partial(
            record_reader,
            self.reader,
            self.inputs,
            self.digest.files,
            self._is_at_limit(),
            self._whole,
        )
        if not self.yielded + self.omitted and self.inputs.row_shard == ALL_ROWS:
            for name, damaged in self.start.skipped_in.items():
                self.reader._refuse_without_documents(name, damaged)

    def _is_at_limit(self) -> bool:
        return bool(self.reader.limit != -1 and self.yielded >= self.reader.limit)
