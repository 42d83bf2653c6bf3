"""Writes a chunk's documents with a copy of the user's writer; Parquet with the schema of them
all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.errors import CkptError, OutputFailed
from datatrove_ckpt.output.arrow_types import NO_TYPES, DataType, NotUnited, Schema, Types
from datatrove_ckpt.output.column_types import (
    ONE_TYPE,
    ColumnTypes,
    RankColumns,
    infers_schema,
    name_culprit,
    read_schema,
    warning,
)
from datatrove_ckpt.output.committed import CommittedFile
from datatrove_ckpt.output.documents import decode
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.formats import PARQUET
from datatrove_ckpt.output.given_schema import check_rows
from datatrove_ckpt.output.names import FileNames
from datatrove_ckpt.output.parquet import Inspect, write_in_batches
from datatrove_ckpt.output.writers import decode_for, write_for

_BATCH = 1000
"""Rows. A writer with huge documents has a smaller ``batch_size``."""


class ChunkWriting:
    def __init__(self, writer: DiskWriter, rank: int, names: FileNames) -> None:
        self.columns = RankColumns()
        self._given = NO_TYPES
        self._writer = writer
        self._decode: Callable[[bytes], Document] = decode
        self._rank = rank
        self._names = names

    def resume(self, committed: Iterable[CommittedFile], given: Types) -> None:
        """Reads the types of the first committed file, if it is on a disk.

        Args:
            given: types of the input's columns, by their paths in the writer's rows.
        """
        self._given = given
        folder = self._writer.output_folder
        if not infers_schema(self._writer) or not folder.is_local():
            return
        first = min(committed, key=lambda file: (file.root, file.chunk_index), default=None)
        if first is None:
            return
        schema = read_schema(folder, first.path)
        if schema is not None:
            self.columns.start(first.chunk_index, schema)

    def write(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> None:
        """Writes and closes the files. ``documents`` is read several times if their schema is not
        known.

        Raises:
            OutputFailed: a document cannot be written, or its types cannot be united with those of
                others.
            StorageFailed: the disk refused a write.
        """
        before = self.columns.known
        try:
            if infers_schema(self._writer):
                self._write_united(staged, chunk_index, documents)
            else:
                self._write(staged, chunk_index, documents, self._copy(staged))
        except _NotWritten as error:
            raise self._failure(chunk_index, documents, error, before) from error.__cause__

    def _write_united(
        self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]
    ) -> None:
        schema = self.columns.guess
        if schema is None or not self._fits(schema, staged, chunk_index, documents):
            schema = self._find_schema(staged, documents)
            self._add(schema, chunk_index)
            self._write(staged, chunk_index, documents, self._copy(staged, schema))
        else:
            self._add(schema, chunk_index)

    def _fits(
        self, schema: Schema, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]
    ) -> bool:
        """Writes the chunk with the previous chunk's schema, unless its own schema differs."""
        types = ColumnTypes(self._given)
        writer = self._copy(staged, schema, types.add)
        with suppress(_NotWritten):
            self._write(staged, chunk_index, documents, writer)
            if types.schema().equals(schema, check_metadata=True):
                return True
        staged.discard()
        return False

    def _find_schema(self, staged: StagedFiles, documents: Iterable[Finished]) -> Schema:
        writer = self._copy(staged)
        types = ColumnTypes(self._given)
        rows = (writer.adapter(self._decode(finished.document)) for finished in documents)
        size = min(_BATCH, max(1, writer.batch_size))
        batches = iter(lambda: list(islice(rows, size)), [])
        try:
            for batch in batches:
                types.add(batch)
            return types.schema()
        except CkptError:
            raise
        except Exception as error:
            raise _NotWritten from error

    def _add(self, schema: Schema, chunk_index: int) -> None:
        try:
            found = self.columns.add(chunk_index, schema)
        except NotUnited as error:
            raise _NotWritten from error
        if found:
            logger.warning(warning(found, chunk_index, self._rank))

    def _write(
        self,
        staged: StagedFiles,
        chunk_index: int,
        documents: Iterable[Finished],
        writer: DiskWriter,
    ) -> None:
        write = write_for(writer, self._decode, self._names, chunk_index)
        finished = None
        try:
            for finished in documents:
                write(finished.document)
            finished = None
            writer.close()
            staged.close()
        except CkptError:
            raise
        except Exception as error:
            raise _NotWritten(finished) from error

    def _failure(
        self,
        chunk_index: int,
        documents: Iterable[Finished],
        error: _NotWritten,
        known: dict[str, DataType],
    ) -> OutputFailed:
        cause = error.__cause__
        what = f"Chunk {chunk_index}"
        why = f"{type(cause).__name__}: {cause}"
        advice = (
            "Fix the writer (its adapter, its schema; new code of it needs accept_changes=True)"
        )
        writer = self._copy(None)
        culprit = None
        with suppress(Exception):  # of a user's adapter; other writers have no schema
            culprit = name_culprit(writer, documents, self._decode, known, self._given)
        if culprit is not None:
            why = culprit
            advice = ONE_TYPE
        elif error.finished is not None:
            name = "(unreadable)"
            with suppress(Exception):
                name = repr(decode(error.finished.document).id)
            what = f"Document {name} (number {error.finished.ordinal} of this task)"
        return OutputFailed(
            f"{what} could not be written by {type(self._writer).__name__}: {why}. {advice}. The "
            "chunk's journal is kept: run the same command again, and no request is sent twice."
        )

    def _copy(
        self, staged: StagedFiles | None, schema: Schema | None = None, inspect: Inspect = len
    ) -> DiskWriter:
        """Returns a fresh copy of the user's writer, which writes to the staging folder.

        Args:
            schema: that of the chunk, if the writer has none.
            inspect: gets each batch of rows before it is written. ``len`` changes nothing.
        """
        # A deep copy: writers keep counters, batches and open files. The user's writer has nothing
        # open.
        original = self._writer.output_mg
        fresh: DiskWriter = copy.deepcopy(self._writer, {id(original): staged or original})
        self._decode = decode_for(fresh)
        if schema is not None:
            fresh.schema = schema
            write_in_batches(fresh, inspect, plain_vectors=True)
        elif PARQUET.is_written_by(fresh):
            write_in_batches(fresh, partial(check_rows, schema=fresh.schema), plain_vectors=False)
        return fresh


class _NotWritten(Exception):
    def __init__(self, finished: Finished | None = None) -> None:
        self.finished = finished
