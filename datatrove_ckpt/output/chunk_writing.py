"""Writes a finished chunk's documents to staged files, and publishes the files.

A Parquet chunk has the schema of all its documents, so that chunks load as one dataset. datatrove's
ParquetWriter takes the schema of a file's first document, and the columns of each batch's first
document: a column that is None at first fails later, and a new column is dropped silently. Here a
chunk's schema is the union over all its documents: null with any type is that type, integers with
floats are float64, dicts have the keys of all. Loaders (``pyarrow.dataset``, ``datasets``) take the
columns of the first file, and convert other files:

- A column without any value is written as text, also inside lists and dicts: only null could follow
  Arrow's null type. Text without a value converts to numbers, dates, booleans and bytes. The
  field's metadata marks it.
- A later file may lack columns, or keys of dicts, and may hold integers where the first has floats.
- The opposite order cannot be known when the first file is written. Only a writer with a ``schema``
  avoids it. Such a chunk causes a warning, and ``verify --full`` names both files.
- Types that cannot be united, such as text and integers, stop the rank before the second type is
  published.

A chunk is first written with the schema of the chunk before. If its own schema proves different,
the chunk is written again.

Rows must fit, unchanged, a schema that the writer was given. A value is accepted if Arrow returns
an equal value (2.0 as an integer, midnight as a date), or a shorter float.

The journal keeps more than a writer can write: a set, an integer beyond 64 bits, keys that are no
strings. So a document with such values is first written to memory, or checked against a schema
(``WriterTrial``), while it can still become a dead letter.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import NamedTuple

from datatrove.data import Document
from datatrove.io import DataFolder, OutputFileManager
from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.journal import WrittenDocument
from datatrove_ckpt.checkpoint.open_checkpoint import RankLease
from datatrove_ckpt.checkpoint.publish_intents import Placement, PublishIntents
from datatrove_ckpt.common.formatting import safe_repr, safe_text
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.errors import CkptError, DocumentNotSerializable, OutputFailed, OutputMismatch
from datatrove_ckpt.output import formats
from datatrove_ckpt.output.arrow_types import (
    NO_TYPES,
    DataType,
    Field,
    Row,
    Schema,
    TypeConflict,
    Types,
    altered_values,
    for_arrow,
    has_other_form,
    to_arrow,
    type_of,
    unify_types,
)
from datatrove_ckpt.output.csv_writer import line
from datatrove_ckpt.output.document_codec import (
    RowsOf,
    decode,
    decode_for,
    is_plain,
    is_usual,
    one_row,
    write_for,
)
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.file_names import FileNames, plain
from datatrove_ckpt.output.hub import CommitPace
from datatrove_ckpt.output.output_folder import (
    CommittedFile,
    OutputFolder,
    OutputListing,
    RankCommits,
    other_content,
)
from datatrove_ckpt.output.targets import make_target, remove_output


@dataclass(eq=False)
class ChunkWriter:
    _writer: DiskWriter
    _rank: int
    _names: FileNames
    _rows_of: RowsOf = one_row

    def __post_init__(self) -> None:
        self.columns = RankColumns()
        self._input_types = NO_TYPES
        self._decode: Callable[[bytes], Document] = decode

    def resume(self, committed: Iterable[CommittedFile], input_types: Types) -> None:
        self._input_types = input_types
        folder = self._writer.output_folder
        if not infers_schema(self._writer) or not folder.is_local():
            return
        first = min(committed, key=lambda file: (file.root, file.chunk_index), default=None)
        if first is None:
            return
        schema = read_schema(folder, first.path)
        if schema is not None:
            self.columns.start(first.chunk_index, schema)

    def write(
        self, staged: StagedFiles, chunk_index: int, documents: Iterable[WrittenDocument]
    ) -> None:
        """Writes and closes the files. Iterates ``documents`` several times if their schema is
        unknown.

        Raises:
            OutputFailed: a document cannot be written, or its types cannot be united with the types
                of other documents.
            StorageFailed: the disk refused a write.
        """
        before = self.columns.types
        try:
            if formats.CSV.is_written_by(self._writer):
                self._write_csv(staged, chunk_index, documents)
            elif infers_schema(self._writer):
                self._write_united(staged, chunk_index, documents)
            else:
                self._write(staged, chunk_index, documents, self._copy(staged))
        except _NotWritten as error:
            raise self._failure(chunk_index, documents, error, before) from error.__cause__

    def _write_csv(
        self, staged: StagedFiles, chunk_index: int, documents: Iterable[WrittenDocument]
    ) -> None:
        writer = self._copy(staged)
        columns = dict.fromkeys(self._input_types)
        for row in self._rows(writer, documents):
            columns |= dict.fromkeys(row)
        writer.columns = [*columns]
        self._write(staged, chunk_index, documents, writer)

    def _write_united(
        self, staged: StagedFiles, chunk_index: int, documents: Iterable[WrittenDocument]
    ) -> None:
        schema = self.columns.guess
        is_written = schema is not None and self._fits(schema, staged, chunk_index, documents)
        if not is_written:
            types = ColumnTypes(self._input_types)
            writer = self._copy(staged)
            writer.adapter = ArrowRowAdapter(writer, types.add)
            for _ in self._rows(writer, documents):
                pass
            schema = types.schema()
        try:
            mismatches = self.columns.add(chunk_index, schema)
        except TypeConflict as error:
            raise _NotWritten from error
        if mismatches:
            columns = "; ".join(
                f"column {mismatch.column!r} is {mismatch.first} in one file, and {mismatch.later} "
                "in a later one"
                for mismatch in mismatches
            )
            logger.warning(
                f"{columns} (chunk {chunk_index} of task {self._rank}). Loaders take the first "
                f"file's types, so the dataset may not load as one. {ONE_TYPE}."
            )
        if not is_written:
            self._write(staged, chunk_index, documents, self._copy(staged, schema))

    def _fits(
        self,
        schema: Schema,
        staged: StagedFiles,
        chunk_index: int,
        documents: Iterable[WrittenDocument],
    ) -> bool:
        types = ColumnTypes(self._input_types)
        writer = self._copy(staged, schema, types.add)
        with suppress(_NotWritten):
            self._write(staged, chunk_index, documents, writer)
            if types.schema().equals(schema, check_metadata=True):
                return True
        staged.discard()
        return False

    def _rows(self, writer: DiskWriter, documents: Iterable[WrittenDocument]) -> Iterator[Row]:
        try:
            for _, document in documents:
                for row in self._rows_of(self._decode(document)):
                    yield writer.adapter(row)
            if isinstance(writer.adapter, ArrowRowAdapter):
                writer.adapter.end()
        except CkptError:
            raise
        except Exception as error:
            raise _NotWritten from error

    def _write(
        self,
        staged: StagedFiles,
        chunk_index: int,
        documents: Iterable[WrittenDocument],
        writer: DiskWriter,
    ) -> None:
        write = write_for(writer, self._decode, self._names, chunk_index, self._rows_of)
        written = None
        try:
            for written in documents:
                write(written[1])
            written = None
            if isinstance(writer.adapter, ArrowRowAdapter):
                writer.adapter.end()
            writer.close()
            staged.close()
        except CkptError:
            raise
        except Exception as error:
            raise _NotWritten(written) from error

    def _failure(
        self,
        chunk_index: int,
        documents: Iterable[WrittenDocument],
        error: _NotWritten,
        types_before: dict[str, DataType],
    ) -> OutputFailed:
        cause = error.__cause__
        subject = f"Chunk {chunk_index}"
        reason = f"{type(cause).__name__}: {cause}"
        advice = "Fix the writer (adapter, schema; its new code needs accept_changes=True)"
        writer = self._copy(None)
        culprit = None
        with suppress(Exception):  # of a user's adapter; other writers have no schema
            culprit = self._name_culprit(writer, documents, types_before)
        if culprit is not None:
            reason = culprit
            advice = ONE_TYPE
        elif error.written is not None:
            ordinal, document = error.written
            name = "(unreadable)"
            with suppress(Exception):
                name = repr(decode(document).id)
            subject = f"Document {name} (number {ordinal} of this task)"
        return OutputFailed(
            f"{subject} could not be written by {type(self._writer).__name__}: {reason}. "
            f"{advice}. Run again: no request is sent twice."
        )

    def _name_culprit(
        self,
        writer: DiskWriter,
        documents: Iterable[WrittenDocument],
        types_before: dict[str, DataType],
    ) -> str | None:
        types = ColumnTypes(self._input_types)
        types.types = dict(types_before)
        check = types.add
        other = "it or one before it"
        if writer.schema is not None:
            check = partial(check_rows, schema=writer.schema)
            other = "the writer's schema"
        for ordinal, document in documents:
            for row in self._rows_of(self._decode(document)):
                name = f"document {safe_repr(row.id)} (number {ordinal} of this task)"
                try:
                    check([writer.adapter(row)])
                except TypeConflict as error:
                    columns = f"column {error.column!r} is {error.new} there, and {error.old} in"
                    return f"{name}: {columns} {other}"
                except Exception as error:
                    return f"{name}: {safe_text(error)}"
        return None

    def _copy(
        self,
        staged: StagedFiles | None,
        schema: Schema | None = None,
        show: Callable[[list[Row]], object] | None = None,
    ) -> DiskWriter:
        # A deep copy: writers have counters, batches and open files. The user's writer has no open
        # files.
        original = self._writer.output_mg
        fresh = copy.deepcopy(self._writer, {id(original): staged or original})
        self._decode = decode_for(fresh)
        columns = [name for name in ("text", "id") if name in self._input_types]
        if columns:
            adapter = fresh.adapter

            def with_empty_fields(document: Document) -> Row:
                # datatrove's adapter omits empty fields, but all files need equal columns.
                row: Row = adapter(document)
                return {name: getattr(document, name) for name in columns} | row

            fresh.adapter = with_empty_fields
        if staged is None or not formats.PARQUET.is_written_by(fresh):
            return fresh
        if schema is not None:
            fresh.schema = schema
            if "fixed_size_list" in str(schema):
                omit_dictionaries(fresh)
        elif fresh.schema is not None:
            show = partial(check_rows, schema=fresh.schema)
        if fresh.schema is not None:
            fresh.adapter = ArrowRowAdapter(fresh, show)
        return fresh


class ArrowRowAdapter:
    """The adapter of a ParquetWriter's copy: converts its rows for Arrow."""

    def __init__(self, writer: DiskWriter, show: Callable[[list[Row]], object] | None) -> None:
        self._adapter = writer.adapter
        self._show = show
        self._rows: list[Row] = []
        # A writer with huge documents has a smaller ``batch_size``.
        self._size = min(1000, max(1, writer.batch_size))
        self._other_forms = {
            field.name: field.type for field in writer.schema or () if has_other_form(field.type)
        }

    def __call__(self, document: Document) -> Row:
        row: Row = self._adapter(document)
        if self._show is not None:
            self._rows.append(row)
            if len(self._rows) == self._size:
                self.end()
        if not self._other_forms:
            return row
        return row | {
            name: for_arrow(row.get(name), kind) for name, kind in self._other_forms.items()
        }

    def end(self) -> None:
        rows = self._rows
        self._rows = []
        if self._show is not None and rows:
            self._show(rows)


def omit_dictionaries(writer: DiskWriter) -> None:
    """Makes a copied ParquetWriter, which has a schema, open files without dictionaries.

    Dictionaries of vectors take time and room, and vectors outweigh other columns.
    """
    write = writer._write

    def write_row(row: Row, file: object, filename: str) -> None:
        name = filename
        if writer.max_file_size > 0:
            name = writer._get_filename_with_file_id(filename)
        if name not in writer._writers:
            writer._writers[name] = pq.ParquetWriter(
                file,
                schema=writer.schema,
                compression=writer.compression,
                use_content_defined_chunking=writer.use_content_defined_chunking,
                write_page_index=writer.write_page_index,
                use_dictionary=False,
            )
        write(row, file, filename)

    writer._write = write_row


def prepare_arrow(writer: DiskWriter) -> None:
    """Chooses Arrow's allocator for a ParquetWriter, unless the user has chosen one. Call it before
    the loop runs.

    Arrow converts a batch with the GIL held. With the default allocator, mimalloc, this blocks the
    event loop ten times as long as with the system's.
    """
    if not isinstance(writer, ParquetWriter):
        return
    if (
        pa.default_memory_pool().backend_name == "mimalloc"
        and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ
    ):
        pa.set_memory_pool(pa.system_memory_pool())
    pa.array([""])  # imports pandas, if it is installed


class _NotWritten(Exception):
    def __init__(self, written: WrittenDocument | None = None) -> None:
        self.written = written


_EMPTY_DICT = "_"
_NO_VALUE = {b"datatrove_ckpt": b"no value"}


def infers_schema(writer: DiskWriter) -> bool:
    return formats.PARQUET.is_written_by(writer) and writer.schema is None


class ColumnTypes:
    def __init__(self, input_types: Types = NO_TYPES) -> None:
        self.types: dict[str, DataType] = {}
        self._input_types = input_types

    def add(self, rows: list[Row]) -> None:
        for name in dict.fromkeys(name for row in rows for name in row):
            kind = type_of([row.get(name) for row in rows], name, self._input_types)
            self.types[name] = unify_types(self.types.get(name), kind, name)
            levels = _levels(self.types[name])
            if levels > _MAX_LEVELS:
                raise ValueError(
                    f"values in column {name!r} have {levels} levels (a list has two), and "
                    f"readers of Parquet take {_MAX_LEVELS}"
                )

    def schema(self) -> Schema:
        return pa.schema([writable(pa.field(name, kind)) for name, kind in self.types.items()])


_MAX_LEVELS = 99  # of pyarrow's readers; its writers have no limit


def _levels(kind: DataType) -> int:
    if pa.types.is_dictionary(kind):
        return 1
    parts = [kind.field(number).type for number in range(kind.num_fields)]
    if not parts:
        return 1
    return (1 if pa.types.is_struct(kind) else 2) + max(map(_levels, parts))


def writable(field: Field) -> Field:
    """Replaces null types by text, and gives a dict without keys a key."""
    kind = field.type
    if pa.types.is_null(kind):
        return pa.field(field.name, pa.string(), metadata=_NO_VALUE)
    if pa.types.is_struct(kind):
        fields = [writable(inner) for inner in kind] or [
            pa.field(_EMPTY_DICT, pa.string(), metadata=_NO_VALUE)
        ]
        return pa.field(field.name, pa.struct(fields))
    if pa.types.is_list(kind):
        return pa.field(field.name, pa.list_(writable(kind.value_field)))
    return field


def raw_type(field: Field) -> DataType:
    kind = field.type
    if (field.metadata or {}).get(b"datatrove_ckpt"):
        return pa.null()
    if pa.types.is_struct(kind):
        fields = [(inner.name, raw_type(inner)) for inner in kind]
        if fields == [(_EMPTY_DICT, pa.null())]:
            return pa.struct([])
        return pa.struct(fields)
    if pa.types.is_list(kind):
        return pa.list_(raw_type(kind.value_field))
    return kind


def raw_types(schema: Schema) -> dict[str, DataType]:
    return {field.name: raw_type(field) for field in schema}


def read_schema(folder: DataFolder, path: str) -> Schema | None:
    try:
        with folder.open(path, "rb") as file:
            return pq.ParquetFile(file).schema_arrow
    except (ImportError, OSError, ValueError):
        return None


class SchemaMismatch(NamedTuple):
    """A column because of which a file does not load after an earlier file.

    Attributes:
        column: path as in ``metadata.scores[]``.
        first, later: its type in each file, ``missing`` or ``without a value``.
    """

    column: str
    first: str
    later: str


ONE_TYPE = (
    "With accept_changes, give ParquetWriter a schema or an adapter that sets one type, or "
    "continue with output_format: jsonl"
)


def schema_mismatches(first: Schema, later: Schema, prefix: str = "") -> list[SchemaMismatch]:
    first_fields = {field.name: field for field in first}
    mismatches: list[SchemaMismatch] = []
    for field in later:
        if field.name in first_fields:
            mismatches += _misfits(first_fields[field.name], field, f"{prefix}{field.name}")
        else:
            mismatches.append(SchemaMismatch(f"{prefix}{field.name}", "missing", str(field.type)))
    return mismatches


def _misfits(first: Field, later: Field, column: str) -> Iterator[SchemaMismatch]:
    old = first.type
    new = later.type
    if pa.types.is_null(new):
        return
    no_value = "without a value"
    if pa.types.is_null(raw_type(later)):
        if not _takes_empty_text(old):
            yield SchemaMismatch(column, str(old), no_value)
    elif pa.types.is_null(raw_type(first)):
        if not (pa.types.is_string(new) or pa.types.is_large_string(new)):
            yield SchemaMismatch(column, no_value, str(new))
    elif pa.types.is_struct(old) and pa.types.is_struct(new):
        yield from schema_mismatches(old, new, f"{column}.")
    elif pa.types.is_list(old) and pa.types.is_list(new):
        yield from _misfits(old.value_field, new.value_field, f"{column}[]")
    elif not _takes(old, new, column):
        yield SchemaMismatch(column, str(old), str(new))


def _takes(old: DataType, new: DataType, column: str) -> bool:
    if old.equals(new):
        return True
    try:
        both = unify_types(old, new, column)
    except TypeConflict:
        return False
    # Time zones differ only in display.
    return bool(both.equals(old) or (pa.types.is_timestamp(old) and both.unit == old.unit))


def _takes_empty_text(kind: DataType) -> bool:
    """Whether a loader converts empty text to the type."""
    try:
        pa.nulls(1, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return not pa.types.is_nested(kind)


class RankColumns:
    def __init__(self) -> None:
        self.guess: Schema | None = None
        self.types: dict[str, DataType] = {}
        self._first: list[tuple[int, Schema]] = []
        self._warned: set[str] = set()

    def start(self, chunk_index: int, schema: Schema) -> None:
        self._first = [(chunk_index, schema)]
        self.types = raw_types(schema)

    def add(self, chunk_index: int, schema: Schema) -> list[SchemaMismatch]:
        """Returns the columns because of which the chunk and the first chunk do not load as one
        dataset, each column once.

        Raises:
            TypeConflict: the chunk can never be one dataset with the chunks before.
        """
        # ``_name_culprit`` needs the earlier dict.
        raw = raw_types(schema).items()
        self.types = self.types | {
            name: unify_types(self.types.get(name), kind, name) for name, kind in raw
        }
        self.guess = schema
        both = sorted([*self._first, (chunk_index, schema)], key=itemgetter(0))
        self._first = both[:1]
        mismatches = schema_mismatches(both[0][1], both[-1][1])
        new = [mismatch for mismatch in mismatches if mismatch.column not in self._warned]
        self._warned.update(mismatch.column for mismatch in new)
        return new


def check_rows(rows: list[Row], schema: Schema) -> None:
    """Raises TypeConflict for rows that do not match the schema. Columns outside the schema are
    ignored.
    """
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if not field.nullable and any(value is None for value in values):
            raise TypeConflict(field.name, f"{field.type} not null", "without a value")
        try:
            lost = altered_values(field.type, values, loosely=True)
        except (ValueError, TypeError, OverflowError) as error:
            problem = f"{_name(values[0], field.name)} ({safe_text(error)})"
            raise TypeConflict(field.name, field.type, problem) from error
        if lost:
            problem = f"{_name(lost[0], field.name)} (it would change)"
            raise TypeConflict(field.name, field.type, problem)


def _name(value: object, column: str) -> str:
    try:
        return str(type_of([value], column))
    except Exception:
        return type(value).__name__


class ChunkOutput:
    """Writes the chunks of one rank, one after the other.

    Args:
        folder: the output folder, whose writer is never opened itself.
        scratch: the rank's checkpoint, below which files are staged.
        is_new: whether ``OutputFolder.refuse_existing`` has checked the folder.
        pace: times at which files that are uploaded to the hub are committed.
    """

    def __init__(
        self,
        folder: OutputFolder,
        rank: int,
        scratch: Path,
        prefix: str,
        is_new: bool,
        lease: RankLease,
        pace: CommitPace,
        rows: RowsOf,
    ) -> None:
        self.names = FileNames(folder.writer, rank, prefix, folder.root)
        self._folder = folder
        self._retry = ""
        if prefix:
            self._retry = scratch.parent.name
        self._is_new = is_new
        self._lease = lease
        self._rank = rank
        self._scratch = scratch
        self._writing = ChunkWriter(folder.writer, rank, self.names, rows)
        self._used_names: dict[str, tuple[str, int]] = {}
        self._has_published = False
        self._target = make_target(folder, rank, scratch, lease, pace)
        self.placement: Placement = self._target
        """Puts the files of written chunks in place."""

    def check_complete(self) -> None:
        """Checks the folder, once all chunks are committed.

        Raises:
            OutputMismatch: the folder differs from the commits.
        """
        commits = self._commits()
        listing = self._look(commits)
        self._folder.refuse_foreign(self._rank, listing, commits, is_complete=True)

    def _commits(self) -> RankCommits:
        return RankCommits(self._folder.root, self._rank, read=self._lease.read_rank)

    def _look(self, commits: RankCommits, with_others: bool = True) -> OutputListing:
        committed = self._folder.by_name([commits])
        listing = self._folder.look(committed, self._rank, with_others)
        self._target.settle(commits, listing)
        self._folder.refuse_lost(committed, listing)
        return listing

    def prepare(self, input_types: Types = NO_TYPES) -> None:
        """Compares the folder with the commits, and removes the staged files of earlier processes.

        Raises:
            OutputMismatch: the folder differs from the commits, or belongs to another run.
            StorageFailed, OutputFailed: the folder cannot be written to.
        """
        if not self._is_new:
            self._folder.check_access()
        self._intents = PublishIntents(self._scratch)
        # On the hub, one listing compares all ranks' files elsewhere.
        is_elsewhere = self._folder.hub is None
        with_others = not self._is_new and (is_elsewhere or not self._intents.is_kept)
        commits = self._commits()
        if with_others or commits.files:
            listing = self._look(commits, with_others)
            if with_others:
                self._refuse_strangers(commits, listing)
        self._writing.resume(commits.files, input_types)
        if self.names.fields:  # otherwise the chunk index alone distinguishes names
            self._used_names = {file.path: (file.root, file.chunk_index) for file in commits.files}
        if not self._is_new:
            self._folder.claim()
        if not self._intents.is_kept:
            self._intents.add({})
        self._target.prepare()
        # Listing the output took time, and the staged files may be a new owner's.
        self._lease.files.fence.check(thorough=True)
        files.disk.remove_tree(self._target.staging.parent)
        for folder in (self._target.staging.parent, self._target.staging):
            files.disk.make_dirs(folder, files.PRIVATE_FOLDER)

    def _refuse_strangers(self, commits: RankCommits, listing: OutputListing) -> None:
        """Without intents, all files of a rank are its own."""
        uncommitted = listing.by_rank[self._rank]
        if not uncommitted:
            return
        self._folder.refuse_foreign(self._rank, listing, commits)
        names = {name for root, name in uncommitted if root == self._retry}
        if not self._intents.is_kept:
            # One write, because a crash between two would make the rest foreign.
            self._intents.add({name: self._target.hash_of(name) for name in names})
            return
        intended = names & self._intents.names
        other_names = [
            name
            for name in intended
            if self._target.hash_of(name) not in self._intents.hashes(name)
        ]
        if other_names:
            raise other_content(self._folder.location, sorted(other_names))
        # With another output_filename, their documents are written to other files.
        remove_output(
            self._folder.writer.output_folder,
            [name for name in intended if not self._folder.ours.fullmatch(name)],
        )

    def stop(self) -> None:
        """The next process publishes unfinished uploads again."""
        self._folder.calls.stop()
        self.placement.stop()

    def finish(self) -> None:
        files.disk.remove_tree(self._target.staging.parent)
        self._target.finish()

    def write_chunk(
        self, chunk_index: int, documents: Iterable[WrittenDocument]
    ) -> list[OutputFile]:
        """Writes and publishes a chunk (steps 2 and 3 of a commit). ``placement`` may put them in
        place later.

        Raises:
            OutputFailed: a document cannot be written, or the output folder refuses it. The journal
                stays.
            OutputMismatch: another job has written a file of this name, or owns the folder.
            StorageFailed: the disk refused a write.
        """
        staging = self._target.staging / f"chunk_{chunk_index:05d}"
        files.disk.remove_tree(staging)
        staged = StagedFiles(staging, self._folder.writer.output_mg)
        try:
            self._writing.write(staged, chunk_index, documents)
            mine = (self._retry, chunk_index)
            names = staged.finished if self.names.fields else ()
            for name in names:
                owner = self._used_names.setdefault(plain(name), mine)
                if owner != mine:
                    raise OutputFailed(
                        f"Chunks {owner[1]} and {chunk_index} of task {self._rank} would both "
                        f"write {name}. Put a / or _ between a document's field and the chunk "
                        f"index in output_filename {self.names.template!r}.",
                        starts_over="anew",
                    )
            if not self._has_published:
                self._folder.claim()
                self._has_published = True
            return self._target.publish(chunk_index, staged, self._intents)
        except OutputMismatch:
            files.disk.remove_tree(staging)
            raise
        finally:
            staged.abandon()


# trials ------------------------------------------------------------------------------------------


class _InMemory(OutputFileManager):  # type: ignore[misc]
    """Discards all data."""

    def get_file(self, filename: str) -> io.IOBase:
        file = io.BytesIO() if "b" in self.mode else io.StringIO()
        self._output_files[filename] = file
        return file


@dataclass(eq=False)
class WriterTrial:
    """Checks whether the user's writer, which must never have been opened, can write a document.

    A writer with the rows of datatrove's class makes only the row.

    Attributes:
        is_quick: whether a trial may run in the event loop.
    """

    _writer: DiskWriter
    _input_types: Types
    _rows: RowsOf = one_row

    def __post_init__(self) -> None:
        self._takes_usual = False
        self.is_quick = is_usual(self._writer) and any(
            output_format.is_written_by(self._writer) for output_format in formats.FORMATS
        )
        self._copied = self._copy()

    def is_needed(self, data: bytes) -> bool:
        return not is_plain(data, self._takes_usual)

    def __call__(self, data: bytes, doc_id: str) -> None:
        """Tries an encoded document.

        Raises:
            DocumentNotSerializable: the writer cannot write the document.
        """
        writer = self._writer
        try:
            self._try(data)
        except Exception as error:
            raise DocumentNotSerializable(
                f"Document {safe_repr(doc_id)} holds a value that {type(writer).__name__} cannot "
                f"write: {type(error).__name__}: {safe_text(error)}. Let the rollout use JSON "
                "values, or give the writer an adapter."
            ) from error
        self._takes_usual = formats.JSONL.is_written_by(writer) or infers_schema(writer)

    def _copy(self) -> tuple[DiskWriter, Callable[[bytes], Document]]:
        files = self._writer.output_mg
        copied: DiskWriter = copy.deepcopy(
            self._writer, {id(files): _InMemory(files.fs, files.mode)}
        )
        copied.output_filename = Template("")  # the documents of doctor may lack its fields
        return copied, decode_for(copied)

    def _try(self, data: bytes) -> None:
        copied, decode = self._copied
        if not self.is_quick:
            copied, decode = self._copy()
        for document in self._rows(decode(data)):
            if infers_schema(copied):
                row = copied.adapter(document)
                columns = ColumnTypes(self._input_types)
                columns.add([row])
                for name, kind in columns.types.items():
                    to_arrow(kind, [row[name]])
            elif formats.PARQUET.is_written_by(copied):
                check_rows([copied.adapter(document)], copied.schema)
            elif formats.CSV.is_written_by(copied):
                line([*copied.adapter(document).values()])
            else:
                copied.write(document, rank=0, chunk_index="00000")
