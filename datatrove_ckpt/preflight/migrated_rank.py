"""A rank of datatrove's run: its files are compared with the rank's input, and a checkpoint of ours is made of them.

datatrove's runner left this in its ``checkpoints_local_dir``, the first file alone if no chunk of the rank is begun:

    last_chunk/00000.txt      the chunk up to which all are finished. Written in place, so a kill may leave it empty
    00000/chunk_00007.jsonl   the finished documents of an unfinished chunk, each with its results
    00000/replay.sqlite3      answers of documents that are not finished; not used: nothing proves which model gave them

It counts documents as we do: chunk ``k`` holds the documents from ``k * records_per_chunk`` on. A row belongs to the
document of its chunk that has its id and its text. So a chunk is finished if each of its documents has one row in its
output files, or one in the chunk file that says that it was dropped, and no row is left over. ``last_chunk`` alone
proves nothing: datatrove loses documents with repeated ids, and those that it could not save. Nothing tells these from
documents whose rollouts returned None, so they are processed again, unless the user says that they were dropped.

One chunk at a time is in memory, with its input.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.checkpoint.commits import Commit, DocumentCounts, OutputFile, read_last_chunk
from datatrove_ckpt.checkpoint.identity import RunClaim
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.checkpoint.layout import COMMITS, MIGRATED, journal_indices, journal_path
from datatrove_ckpt.checkpoint.lines import Json, seal
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, OutputMismatch
from datatrove_ckpt.formatting import safe_repr, safe_text
from datatrove_ckpt.generation.prefetch import DocumentSource, SourceDocument
from datatrove_ckpt.output.documents import encode, result_of
from datatrove_ckpt.output.formats import Jsonl, format_of
from datatrove_ckpt.preflight.run_plan import RunnerPlan
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.runner import InferenceRunner

LACKS = "datatrove calls its chunk finished, but the chunk's output lacks it: dropped by its rollout, or lost"
_OTHER_TEXT = "what datatrove has kept under its id has another text"
_AGAIN = "the chunk's output has to be made again, and the document cannot be made of it"
_LEAST_KNOWN = 0.75
_AT_ONCE = 64
_NO_RESULTS = "__no_rollouts_remove"  # datatrove's mark for a document that it keeps out of the output
_OWN_FIELDS = ("text", "id", "media", "metadata")


class Left(NamedTuple):
    """A document that the next run processes. ``why``: why what is kept of it does not count, or ""."""

    ordinal: int
    id: str
    why: str


@dataclass
class Chunk:
    """A chunk that datatrove's run has begun.

    Attributes:
        files: its output files. They stay if it is finished, else they are moved aside.
        finished: all its documents are accounted for.
        counts: of its documents: read, and of those that are kept, written and dropped. With their requests and tokens,
            as far as their results tell.
        left: documents that the next run processes.
        problems: what is wrong with its files.
        position, last_input: of its last document.
    """

    index: int
    first_ordinal: int
    files: list[str]
    finished: bool = False
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    position: Json | None = None
    last_input: str = ""

    @property
    def kept(self) -> int:
        """Number of documents that are not processed again."""
        return self.counts.written + self.counts.dropped

    @property
    def redone(self) -> list[Left]:
        """Those of which datatrove has kept something, or says so, that does not count."""
        return [one for one in self.left if one.why]

    def to_json(self) -> Json:
        return {
            "chunk": self.index,
            "finished": self.finished,
            "documents": self.counts.read,
            "written": self.counts.written,
            "dropped": self.counts.dropped,
            "files": self.files if self.finished else [],
            "problems": self.problems,
            "redone": [{"document": one.ordinal, "id": one.id, "why": one.why} for one in self.redone],
            "not_finished": [{"document": one.ordinal, "id": one.id} for one in self.left if not one.why],
        }


@dataclass
class Rank:
    """What becomes of a rank.

    Attributes:
        done: it has a checkpoint of this program already, so nothing is taken over.
        chunks: in ascending order.
        aside: output files that are moved aside, because their documents are in others, or will be.
        most_results: the most results of a document that is kept.
    """

    rank: int
    done: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    most_results: int = 0

    def to_json(self) -> Json:
        chunks = [chunk.to_json() for chunk in self.chunks]
        return {"rank": self.rank, "done": self.done, "chunks": chunks, "moved_aside": self.aside}


@dataclass(frozen=True)
class Theirs:
    """What datatrove's run has of a rank.

    Attributes:
        folder, last_chunk: of its checkpoint. Neither need exist.
        outputs: names of output files, by chunk.
        step: the runner that goes on.
        lacking_are_dropped: documents that files of finished chunks lack were dropped by their rollouts.
        any_text: the rollout changes the text of documents, so an id is enough.
    """

    folder: Path
    last_chunk: Path
    outputs: dict[int, list[str]]
    step: InferenceRunner
    lacking_are_dropped: bool
    any_text: bool

    def last(self) -> int:
        """The chunk up to which datatrove calls all finished; -1: none, or the file is damaged."""
        return -1 if (last := read_last_chunk(self.last_chunk)) is None else last

    def stamp(self) -> list[tuple[Path, int, int]]:
        """Paths, sizes and times of its files: others if the run is still on."""
        paths = [self.last_chunk, *(sorted(self.folder.iterdir()) if self.folder.is_dir() else ())]
        found = [(path, path.stat()) for path in paths if path.exists()]
        return [(path, status.st_size, status.st_mtime_ns) for path, status in found]


# input ---------------------------------------------------------------------------------------------------------------


async def _documents(runner: RunnerPlan, rank: int, writes: bool) -> AsyncGenerator[SourceDocument, None]:
    """The documents of a rank, as the runner would get them."""
    step = runner.step
    revisions = Revisions(step.checkpoints_root) if writes else None
    documents, size = _read(runner, rank), step.records_per_chunk
    source = DocumentSource(documents, seek=step.seek, revisions=revisions, records_per_chunk=size)
    with closing(source):
        async for batch in source.batches(ResumePoint()):
            for document in batch:
                yield document


def _read(runner: RunnerPlan, rank: int) -> Iterable[Document]:
    """Connects the steps as datatrove's executors do. They write nothing."""
    documents: Iterable[Document] | None = None
    for step in deepcopy([one for one in runner.before if not isinstance(one, DiskWriter)]):
        if getattr(step, "exclusion_writer", None) is not None:
            step.exclusion_writer = None
        if callable(step):
            documents = step(documents, rank, runner.tasks)
        elif isinstance(step, Sequence) and not isinstance(step, str):
            documents = step if documents is None else chain(documents, step)
    return documents if documents is not None else []


# rows ----------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A document in a file.

    Attributes:
        text: hash of its text; None if the file does not hold it.
        line: of which the document can be made; None: it cannot be made of this row.
        dropped: datatrove keeps it out of the output.
        work: number of results with their usage, prompt and completion tokens.
    """

    text: int | None
    line: bytes | None
    dropped: bool
    work: tuple[int, int, int]


class _Rows:
    """The rows of a chunk's output, or of datatrove's file of an unfinished chunk.

    Attributes:
        left: rows that were not taken yet, by id.
        problems: what is wrong with the files. A torn line, as a kill leaves it, is left out, with the next one, which
            datatrove has appended right behind it.
    """

    def __init__(self, theirs: Theirs, plain: bool = True) -> None:
        self.problems: list[str] = []
        self.left: dict[str, list[_Row]] = {}
        self.most_results = self.total = 0
        self._step, self._any_text, self._plain = theirs.step, theirs.any_text, plain

    def count_left(self) -> int:
        return sum(map(len, self.left.values()))

    def take(self, document: Document) -> _Row | None:
        """The first row of the document that was not taken yet; None if there is none."""
        rows = self.left.get(str(document.id), [])
        for index, row in enumerate(rows):
            if self._any_text or row.text is None or row.text == _digest(document.text):
                return rows.pop(index)
        return None

    def read(self, found: Iterable[tuple[Json | None, bytes]], name: str) -> None:
        for number, (row, line) in enumerate(found, 1):
            if row is None:
                self.problems.append(f"{name}, line {number} is torn")
            else:
                self._add(row, name, line if self._plain and line else None)

    def _add(self, row: Json, name: str, line: bytes | None) -> None:
        if "id" not in row:
            raise OutputMismatch(
                f"{name} holds rows without ids, so nothing tells which documents of the input they are. Nothing was "
                "changed. Start anew, with another checkpoints_local_dir, output_folder and logging_dir."
            )
        metadata = _metadata_of(row)
        text = _digest(row["text"]) if "text" in row else _digest("") if "metadata" in row else None
        dropped, results = _NO_RESULTS in metadata, metadata.get(self._step.metadata_key)
        if self._plain and not dropped:
            self._check(results, f"the document {safe_repr(str(row['id']))} in {name}")
        self.left.setdefault(str(row["id"]), []).append(_Row(text, line, dropped, _work_of(results)))
        self.total += 1

    def _check(self, results: object, document: str) -> None:
        """Documents with other results than the next run makes must not stand beside them."""
        key, rollouts = self._step.metadata_key, self._step.config.rollouts_per_document
        if not isinstance(results, list) or len(results) > rollouts:
            found = f"{len(results)} results" if isinstance(results, list) else "no results"
            raise CheckpointMismatch(
                f"metadata_key: {key!r}, rollouts_per_document: {rollouts}, but {document} has {found} under that key. "
                "Set both to those of datatrove's run. Nothing was changed."
            )
        self.most_results = max(self.most_results, len(results))


def _of_checkpoint(theirs: Theirs, index: int) -> _Rows:
    """The rows of a chunk's own file."""
    rows, path = _Rows(theirs), journal_path(theirs.folder, index)
    if path.exists():
        with path.open("rb") as lines:
            rows.read(Jsonl().rows(lines, ()), path.name)
    return rows


def _of_output(theirs: Theirs, index: int) -> _Rows:
    """The rows of a chunk's output files.

    Raises:
        OutputMismatch: migrate cannot read such files.
    """
    writer = theirs.step.output_writer
    rows = _Rows(theirs, getattr(writer.adapter, "__func__", None) is DiskWriter._default_adapter)
    columns = ("id", "text", "metadata", theirs.step.metadata_key)
    for name in theirs.outputs.get(index, ()):
        try:
            if (known := format_of(writer)) is None:
                raise OutputMismatch(
                    f"{name}: migrate compares JSON lines and Parquet with the input, and cannot read files of "
                    f"{type(writer).__name__}. Nothing was changed. Start anew, with another checkpoints_local_dir, "
                    "output_folder and logging_dir."
                )
            compression = None if known.is_compressed else writer.output_mg.compression or None
            with writer.output_folder.open(name, "rb", compression=compression) as file:
                rows.read(known.rows(file, columns), name)
        except CkptError:
            raise
        except Exception as error:  # each codec has errors of its own
            rows.problems.append(f"{name} cannot be read to its end ({safe_text(error) or type(error).__name__})")
    return rows


def _digest(text: object) -> int:
    return int(xxhash.xxh3_64_intdigest(str(text).encode("utf-8", "surrogatepass")))


def _metadata_of(row: Json) -> Json:
    """A row's metadata, also where the writer made columns of them."""
    if isinstance(metadata := row.get("metadata"), dict):
        return metadata
    return {name: value for name, value in row.items() if name not in _OWN_FIELDS}


def _work_of(results: object) -> tuple[int, int, int]:
    """Number of results that tell their usage, and the sums of prompt and completion tokens."""
    usages = [one.get("usage") for one in results if isinstance(one, dict)] if isinstance(results, list) else []
    told = [usage for usage in usages if isinstance(usage, dict)]
    prompt, completion = (
        sum(one[name] for one in told if isinstance(one.get(name), int))
        for name in ("prompt_tokens", "completion_tokens")
    )
    return len(told), prompt, completion


# judgement -----------------------------------------------------------------------------------------------------------


class _Judge:
    """Judges one chunk. ``claimed``: datatrove calls it finished."""

    def __init__(self, chunk: Chunk, theirs: Theirs, claimed: bool) -> None:
        self.chunk, self._claimed = chunk, claimed
        self._output, self._checkpoint = _of_output(theirs, chunk.index), _of_checkpoint(theirs, chunk.index)
        self._lacking_are_dropped = claimed and theirs.lacking_are_dropped and bool(chunk.files)
        self._if_finished = DocumentCounts()
        self._usable: list[tuple[int, SourceDocument, _Row]] = []

    def see(self, ordinal: int, source: SourceDocument) -> None:
        """The next document of the chunk."""
        output, checkpoint = self._output.take(source.document), self._checkpoint.take(source.document)
        usable = [row for row in (checkpoint, output) if row is not None and (row.dropped or row.line is not None)]
        if usable:
            self._usable.append((ordinal, source, usable[0]))
        else:
            self.chunk.left.append(Left(ordinal, str(source.document.id), _AGAIN if output is not None else ""))
        self.chunk.last_input = source.fingerprint
        _count(self.chunk.counts, usable[0] if usable else None)
        _count(self._if_finished, output or (checkpoint if checkpoint is not None and checkpoint.dropped else None))

    def end(self, last: SourceDocument, rank: Rank, rows: Counter[str]) -> None:
        """All documents of the chunk were seen. The position of the last is known once the next document is there."""
        chunk, counts, left = self.chunk, self._if_finished, self._output.count_left()
        chunk.position = last.position()
        chunk.problems = [*self._output.problems, *self._checkpoint.problems]
        lacking = counts.read - counts.written - counts.dropped
        if not self._output.problems and not left and (not lacking or self._lacking_are_dropped):
            chunk.finished, chunk.counts, chunk.left = True, counts, []
            counts.dropped += lacking
        else:
            if left:
                chunk.problems.append(f"rows of its output of no document of this chunk, or there twice: {left}")
            chunk.left = [one._replace(why=self._why(one)) for one in chunk.left]
        rank.chunks.append(chunk)
        rank.most_results = max(rank.most_results, self._output.most_results, self._checkpoint.most_results)
        rows.update(all=self._output.total + self._checkpoint.total, unknown=left + self._checkpoint.count_left())

    def _why(self, one: Left) -> str:
        if self._output.left.get(one.id) or self._checkpoint.left.get(one.id):
            return _OTHER_TEXT
        return one.why or (LACKS if self._claimed else "")

    def write_journal(self, folder: Path, metadata_key: str) -> None:
        """The documents that are kept of a chunk that is not finished."""
        if self.chunk.finished or not self._usable:
            return
        journal = ChunkJournal(journal_path(folder, self.chunk.index), self.chunk.first_ordinal)
        for start in range(0, len(self._usable), _AT_ONCE):
            journal.append([_finished(*each, metadata_key) for each in self._usable[start : start + _AT_ONCE]])
        journal.sync()


def _count(counts: DocumentCounts, row: _Row | None) -> None:
    if row is None:
        counts.read += 1
    else:
        counts.count([("dropped" if row.dropped else "written", row.work, None)])


async def judge(rank: Rank, theirs: Theirs, runner: RunnerPlan, folder: Path | None) -> None:
    """Adds the chunks of a rank, up to the last one of which there is anything.

    Args:
        runner: of the run that goes on.
        folder: where the journals of unfinished chunks are written; None: nothing is written, not even the commits of
            datasets that are read.

    Raises:
        CheckpointMismatch: input, output or settings are not those of datatrove's run.
        OutputMismatch: the output cannot be compared with the input.
    """
    size, last_chunk = theirs.step.records_per_chunk, theirs.last()
    unfinished = journal_indices(theirs.folder) if theirs.folder.is_dir() else []
    chunks = max((last_chunk, *unfinished, *theirs.outputs)) + 1
    rows = Counter[str]()
    current: _Judge | None = None
    last: SourceDocument | None = None

    def end_chunk() -> None:
        if current is not None and last is not None:
            current.end(last, rank, rows)
            if folder is not None:
                current.write_journal(folder, theirs.step.metadata_key)

    ordinal = 0
    documents = _documents(runner, rank.rank, writes=folder is not None)
    async for source in documents:
        index, place = divmod(ordinal, size)
        if index >= chunks:
            break
        if place == 0:
            end_chunk()
            current = _Judge(Chunk(index, ordinal, theirs.outputs.get(index, [])), theirs, index <= last_chunk)
        if current is not None:
            current.see(ordinal, source)
        last, ordinal = source, ordinal + 1
    end_chunk()
    await documents.aclose()
    if problem := _problem(rank, theirs, rows, ordinal, chunks):
        raise CheckpointMismatch(
            f"Rank {rank.rank}: {problem}. Give migrate the input, filters, tasks, records_per_chunk, output_folder "
            "and output_filename that datatrove's run had. Nothing was changed."
        )


def _problem(rank: Rank, theirs: Theirs, rows: Counter[str], documents: int, chunks: int) -> str:
    """Why CONFIG is not that of datatrove's run; "" if it may be."""
    if len(rank.chunks) < chunks:
        return (
            f"the input has {documents} documents, but datatrove's run has kept documents of chunk {chunks - 1}, which "
            "would begin beyond its end"
        )
    if (known := rows["all"] - rows["unknown"]) < rows["all"] * _LEAST_KNOWN:
        return (
            f"only {known} of the {rows['all']} rows that datatrove's run has kept are of documents that the "
            "input has in the same chunk"
        )
    claimed, writer = rank.chunks[: theirs.last() + 1], theirs.step.output_writer
    if claimed and not any(chunk.files for chunk in claimed):
        return (
            f"{theirs.last_chunk} calls {len(claimed)} chunks finished, but {writer.output_folder.resolve_paths('')} "
            f"holds none of their files, named as {writer.output_filename.template!r} says"
        )
    return ""


# the checkpoint ------------------------------------------------------------------------------------------------------


def build(folder: Path, claim: RunClaim, rank: Rank, theirs: Theirs) -> None:
    """Completes the rank's folder, in which ``judge`` has put the journals, all of it on the disk."""
    finished = [chunk for chunk in rank.chunks if chunk.finished]
    claim.take(len(finished))
    log = files.AppendFile(folder / COMMITS)
    writer = theirs.step.output_writer
    log.append(b"".join(seal(_commit(chunk, writer).to_json()) for chunk in finished))
    log.sync()
    note = {"aside": rank.aside, "moved": not rank.aside, "from": str(theirs.folder), **rank.to_json()}
    files.disk.replace(folder / MIGRATED, orjson.dumps(note))
    files.disk.sync_dir(folder)
    files.disk.close(folder)


def _commit(chunk: Chunk, writer: DiskWriter) -> Commit:
    return Commit(
        chunk_index=chunk.index,
        first_ordinal=chunk.first_ordinal,
        counts=chunk.counts,
        files=[_output_file(writer, name) for name in chunk.files],
        position=chunk.position,
        last_input=chunk.last_input,
        work=chunk.counts.unsplit().to_json(),
        at=unix_seconds(),
    )


def _output_file(writer: DiskWriter, name: str) -> OutputFile:
    """Reads the file. A local one is synced: datatrove does not do that."""
    with writer.output_folder.open(name, "rb") as file:
        content, size = hashlib.file_digest(file, xxhash.xxh3_128), file.tell()
    if writer.output_folder.is_local():
        files.disk.sync(Path(writer.output_folder.resolve_paths(name)))
    return OutputFile(name, size, content.hexdigest())


def _finished(ordinal: int, source: SourceDocument, row: _Row, metadata_key: str) -> Finished:
    if row.dropped or row.line is None:
        return Finished(ordinal, "dropped", source.fingerprint, b"null", *row.work)
    document = _document(source.document, orjson.loads(row.line), metadata_key)
    return Finished(ordinal, "written", source.fingerprint, encode(document), *row.work)


def _document(document: Document, line: Json, metadata_key: str) -> Document:
    """The finished document: as it was read, with what its line has besides. JSON has lost types, and the input not."""
    metadata = _metadata_of(line)
    kept = {name: value for name, value in document.metadata.items() if name in metadata}
    document.metadata = {name: _typed(kept, name, value) for name, value in metadata.items()}
    document.text = line.get("text", "")
    if isinstance(results := metadata.get(metadata_key), list):
        document.metadata[metadata_key] = [_result(one) for one in results]
    return document


def _typed(as_read: Json, name: str, value: object) -> object:
    if name not in as_read:
        return value
    try:
        same = orjson.loads(orjson.dumps(as_read[name], default=str)) == value
    except TypeError:  # datatrove would not have kept it like this
        same = True
    return as_read[name] if same or name == "file_path" else value


def _result(value: object) -> object:
    """JSON of an InferenceResult becomes one again, for adapters and writers that expect it."""
    try:
        return result_of(value)  # type: ignore[arg-type]
    except TypeError:  # the rollout's own
        return value
