"""ChunkOutput: the documents of a finished chunk -> any DiskWriter -> staged files -> published in one step.

Files appear under their final names complete or not at all. They are staged in the checkpoint's folder, and then get
their names, or are uploaded (see ``targets.py``). The writer does not notice: each chunk gets a fresh copy of it, with
our file manager (see ``file_managers.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.intents import Intents
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.lease import RankLease
from datatrove_ckpt.errors import CkptError, OutputFailed, OutputMismatch
from datatrove_ckpt.output.arrow_types import (
    OWN_SCHEMA_ADVICE,
    SCHEMA_ADVICE,
    ColumnTypes,
    NotUnited,
    RankColumns,
    Schema,
    check_rows,
    infers_schema,
    name_culprit,
    read_schema,
    warning,
)
from datatrove_ckpt.output.committed import CommittedFile, FoundFiles, RankCommits, other_content, published_names
from datatrove_ckpt.output.documents import decode
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.formats import PARQUET
from datatrove_ckpt.output.hub_pace import CommitPace
from datatrove_ckpt.output.names import FileNames, plain
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.output.parquet import Inspect, write_in_batches
from datatrove_ckpt.output.targets import StagedChunk, make_target
from datatrove_ckpt.output.writers import decode_for, write_for

_BATCH = 1000
"""Rows. A writer with huge documents has a smaller ``batch_size``."""


class ChunkOutput:
    """Writes the chunks of one rank, one after the other.

    Args:
        folder: the rank's output folder. Its writer is copied for each chunk, and never opened itself.
        lease: knows the rank's commits. The target checks it before a further attempt to upload or to commit.
        pace: when files that are uploaded to the hub are committed.
    """

    def __init__(self, folder: OutputFolder, lease: RankLease, pace: CommitPace) -> None:
        self.names = folder.names
        self._folder = folder
        self._check = folder.check
        self._lease = lease
        self._rank = folder.rank
        self._writing = ChunkWriting(folder.writer, folder.rank, folder.names)
        self._taken: dict[str, tuple[str, int]] = {}
        self._has_published = False
        self._target = make_target(folder, lease, pace)
        self.placement = self._target.placement
        """Puts the files of written chunks in place."""

    def check_complete(self) -> None:
        """Call it when all chunks are committed.

        Raises:
            OutputMismatch: committed files are missing or changed, files are there that no commit names, or the folder
                belongs to another run.
        """
        self._check.refuse_unknown(*self._look())

    def _commits(self) -> RankCommits:
        return RankCommits(self._check.root, self._rank, read=self._lease.read_commits)

    def _look(self, others: bool = True) -> tuple[RankCommits, FoundFiles]:
        """Lists the folder, and refuses it if committed files are missing or changed."""
        commits = self._commits()
        found = self._folder.look(commits, others)
        self._target.settle(commits, found)
        self._check.refuse_lost(self._check.by_name([commits]), found)
        return commits, found

    def prepare(self) -> None:
        """Removes the files that earlier processes staged and did not publish, and makes the staging folder.

        Raises:
            OutputMismatch: files that earlier attempts committed are missing or changed, other files have their
                names, or the folder belongs to another run.
            StorageFailed, OutputFailed: the output folder cannot be written to. It is checked here, before the first
                request is paid for.
        """
        is_first = self._folder.is_first
        if not is_first:
            self._folder.check_access()
        self._intents = Intents(self._folder.scratch)
        # On the hub others' files are only looked for where all ranks are compared: that is one listing, and not many.
        is_elsewhere = self._folder.hub is None
        others = not is_first and (is_elsewhere or not self._intents.is_kept)
        if others or self._commits().files:
            commits, found = self._look(others)
            if others:
                self._refuse_strangers(commits, found)
            self._writing.resume(commits.files)
            if self.names.fields:  # otherwise the chunk index alone keeps names apart
                self._taken = {one.path: (one.root, one.chunk_index) for one in commits.files}
        if not is_first:
            self._folder.claim()
        if not self._intents.is_kept:
            self._intents.add({})
        self._target.prepare()
        files.disk.remove_tree(self._target.staging.parent)
        for folder in (self._target.staging.parent, self._target.staging):
            files.disk.make_dirs(folder, files.PRIVATE_FOLDER)

    def _refuse_strangers(self, commits: RankCommits, found: FoundFiles) -> None:
        """Refuses files that this rank has not published. Of a rank that kept no intents, all are its own."""
        uncommitted = found.by_rank[self._rank]
        if not uncommitted:
            return
        names = {name for root, name in uncommitted if root == self._folder.retry}
        if not self._intents.is_kept:
            self._check.refuse_strangers(commits, found)
            # All in one write: a crash between two of them would make strangers of the rest.
            self._intents.add({name: self._target.hash_of(name) for name in names})
            return
        intended = names & self._intents.names
        others = [name for name in intended if self._target.hash_of(name) not in self._intents.hashes(name)]
        if others:
            raise other_content(self._check.where, sorted(others))
        self._check.refuse_strangers(commits, found, published_names(self._check.root, self._rank))

    def stop(self) -> None:
        """Ends the wait for uploads and commits under way. The next process publishes those chunks again."""
        self._folder.calls.stop()
        self.placement.stop()

    def finish(self) -> None:
        """Removes the staging folder. Nothing may be staged after that."""
        files.disk.remove_tree(self._target.staging.parent)
        self._target.finish()

    def write_chunk(self, chunk_index: int, documents: Iterable[Finished]) -> list[OutputFile]:
        """Writes and publishes a chunk: steps 2 and 3 of a commit. Returns its files; see ``placement``.

        Raises:
            OutputFailed: a document cannot be written, or the output folder refuses it. The journal is kept.
            OutputMismatch: another job has written a file of the same name, or owns the folder.
            StorageFailed: the disk refused a write.
        """
        staging = self._target.staging / f"chunk_{chunk_index:05d}"
        files.disk.remove_tree(staging)
        staged = StagedFiles(staging, self._folder.writer.output_mg)
        try:
            self._writing.write(staged, chunk_index, documents)
            self._refuse_taken(chunk_index, staged.finished)
            if not self._has_published:
                self._folder.claim()
                self._has_published = True
            return self._target.publish(StagedChunk(chunk_index, staging, staged.finished), self._intents)
        except OutputMismatch:
            files.disk.remove_tree(staging)
            raise
        finally:
            staged.abandon()

    def _refuse_taken(self, chunk_index: int, names: Iterable[str]) -> None:
        if not self.names.fields:
            return
        mine = (self._folder.retry, chunk_index)
        for name in names:
            owner = self._taken.setdefault(plain(name), mine)
            if owner != mine:
                raise OutputFailed(
                    f"Chunks {owner[1]} and {chunk_index} of rank {self._rank} would both write {name}: fields of "
                    f"documents run into the chunk index in output_filename {self.names.template!r}. Put a / or _ "
                    "between them, choose another output_folder and checkpoint for that, and start again."
                )


# Writes the documents of a chunk with a copy of the user's writer, Parquet with the schema of all of them.
#
# See ``arrow_types`` for what that schema is, and why.


class ChunkWriting:
    """Writes the chunks of one rank, one after the other, into staged files.

    Attributes:
        columns: the types of the columns of the chunks so far, if the writer finds them out by itself.
    """

    def __init__(self, writer: DiskWriter, rank: int, names: FileNames) -> None:
        self.columns = RankColumns()
        self._writer = writer
        self._decode: Callable[[bytes], Document] = decode
        self._rank = rank
        self._names = names

    def resume(self, committed: Iterable[CommittedFile]) -> None:
        """Learns the types of the first file that earlier attempts committed.

        A remote file is not read for that: ``verify --full`` compares all files.
        """
        folder = self._writer.output_folder
        if not infers_schema(self._writer) or not folder.is_local():
            return
        first = min(committed, key=lambda one: (one.root, one.chunk_index), default=None)
        if first is not None and (schema := read_schema(folder, first.path)) is not None:
            self.columns.start(first.chunk_index, schema)

    def write(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> None:
        """Writes and closes the files. ``documents`` is read several times if their schema is not known.

        Raises:
            OutputFailed: a document cannot be written, or its types cannot be united with those of others.
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

    def _write_united(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> None:
        schema = self.columns.guess
        if schema is None or not self._fits(schema, staged, chunk_index, documents):
            schema = self._find_schema(staged, documents)
            self._add(schema, chunk_index)
            self._write(staged, chunk_index, documents, self._copy(staged, schema))
        else:
            self._add(schema, chunk_index)

    def _fits(self, schema: Schema, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> bool:
        """Writes the chunk with the schema of the chunk before, unless its own is another one."""
        types = ColumnTypes(schema)
        writer = self._copy(staged, schema, types.add)
        with suppress(_NotWritten):
            self._write(staged, chunk_index, documents, writer)
            if types.schema().equals(schema, check_metadata=True):
                return True
        staged.discard()
        return False

    def _find_schema(self, staged: StagedFiles, documents: Iterable[Finished]) -> Schema:
        writer = self._copy(staged)
        types = ColumnTypes()
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
            logger.warning(f"Rank {self._rank}: {warning(found, chunk_index)}")

    def _write(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished], writer: DiskWriter) -> None:
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
        self, chunk_index: int, documents: Iterable[Finished], error: _NotWritten, known: dict[str, Any]
    ) -> OutputFailed:
        """``known``: the types of the columns of the chunks before."""
        cause = error.__cause__
        writer, kind = self._copy(None), type(self._writer).__name__
        with suppress(Exception):  # a user's adapter may raise anything
            if culprit := name_culprit(writer, documents, self._decode, known):
                advice = SCHEMA_ADVICE if writer.schema is None else OWN_SCHEMA_ADVICE
                return OutputFailed(
                    f"Chunk {chunk_index} could not be written by {kind}: {culprit}. {advice}. The chunk's "
                    "journal is kept: run the same command again, and no request is sent twice."
                )
        if error.finished is None:
            return OutputFailed(
                f"Chunk {chunk_index} could not be written by {kind}: {type(cause).__name__}: {cause}. Its journal is "
                "kept: fix the writer and run the same command again (new code of it needs accept_changes=True)."
            )
        name = "(unreadable)"
        with suppress(Exception):
            name = repr(decode(error.finished.document).id)
        return OutputFailed(
            f"Document {name} (number {error.finished.ordinal} of this rank) could not be written by {kind}: "
            f"{type(cause).__name__}: {cause}. Its chunk's journal is kept: fix the writer (its adapter, its schema) "
            "and run the same command again (a new adapter needs accept_changes=True)."
        )

    def _copy(self, staged: StagedFiles | None, schema: Schema | None = None, inspect: Inspect = len) -> DiskWriter:
        """A writer with the user's settings and no state of earlier chunks, which writes to the staging folder.

        Args:
            schema: that of the chunk, if the writer has none.
            inspect: gets each batch of rows before it is written. ``len`` changes nothing.
        """
        # A deep copy, because writers keep counters, batches and open files in attributes of their own. The user's
        # writer was never written to, so there is nothing open to copy. Its file manager is replaced.
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
    """With the cause as ``__cause__``, and the document that was being written, if it was one."""

    def __init__(self, finished: Finished | None = None) -> None:
        super().__init__()
        self.finished = finished
