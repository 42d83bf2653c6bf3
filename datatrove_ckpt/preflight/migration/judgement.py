"""Compares what datatrove's runner kept of a rank with the rank's input, one chunk after the other.

datatrove counts documents as we do: chunk ``k`` holds the documents from ``k * records_per_chunk`` on. A row belongs to
the document of its chunk that has its id and its text. So a chunk is finished if each of its documents has one row in
its output files, or one in the chunk file that says that it was dropped, and no row is left over.

Where datatrove calls a chunk finished, and its files lack documents, nothing tells whether their rollouts returned None
or whether they were lost (datatrove loses documents with repeated ids, and those that it could not save). They are
processed again, unless the user says that they were dropped (``lacking_are_dropped``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.preflight.migration.findings import LACKS, Chunk, Left, Rank, Shape
from datatrove_ckpt.preflight.migration.rank_input import RankInput
from datatrove_ckpt.preflight.migration.rows import Row, Rows, digest, read_chunk_file, read_output
from datatrove_ckpt.preflight.migration.theirs import TheirRank

_LACKS = f"{LACKS}: its rollouts returned None, or it was lost"
_ASTRAY = "what datatrove has kept of it is in a file of another chunk, where it does not belong"
_OTHER_TEXT = "what datatrove has kept under its id has another text"
_TORN = "its line is torn"
_REPEATED = "its id is there several times in the chunk, and nothing tells which of them was finished"
_AGAIN = "the chunk's output has to be made again, and the document cannot be made of it"
_LEAST_KNOWN = 0.75


class Options(NamedTuple):
    """What the user says about datatrove's run.

    Attributes:
        lacking_are_dropped: documents that files of finished chunks lack were dropped by their rollouts.
        any_text: the rollout changes the text of documents, so an id is enough.
    """

    lacking_are_dropped: bool = False
    any_text: bool = False


class Kept(NamedTuple):
    """What there is of a document: its row in the output, and in the chunk file."""

    output: Row | None
    checkpoint: Row | None

    def row(self) -> Row | None:
        """The row of which the document can be made."""
        rows = (self.checkpoint, self.output)
        return next((row for row in rows if row is not None and (row.is_whole or row.dropped)), None)


class Files:
    """A rank's files, of datatrove's run, by chunk.

    Args:
        outputs: names of output files.
    """

    def __init__(self, theirs: TheirRank, writer: DiskWriter, outputs: dict[int, list[str]], metadata_key: str) -> None:
        self.theirs = theirs
        self.writer = writer
        self.outputs = outputs
        self.last = theirs.last()
        self.chunk_files = theirs.chunk_files()
        self.metadata_key = metadata_key

    @property
    def chunks(self) -> int:
        """One more than the last chunk of which there is anything."""
        return max((self.last, *self.chunk_files, *self.outputs)) + 1

    def matcher(self, index: int, any_text: bool) -> Matcher:
        """Reads what there is of a chunk."""
        path = self.chunk_files.get(index)
        checkpoint = Rows() if path is None else read_chunk_file(path, self.metadata_key)
        return Matcher(read_output(self.writer, self.outputs.get(index, ()), self.metadata_key), checkpoint, any_text)


@dataclass
class Matcher:
    """Gives each document of a chunk what there is of it. The documents come in input order."""

    output: Rows
    checkpoint: Rows
    any_text: bool

    def __post_init__(self) -> None:
        self.total = self.output.left + self.output.nameless + self.checkpoint.left

    def of(self, source: SourceDocument) -> Kept:
        take = partial(_take, source, any_text=self.any_text)
        return Kept(take(self.output), take(self.checkpoint))


def _take(source: SourceDocument, rows: Rows, any_text: bool) -> Row | None:
    return rows.take(str(source.document.id), digest(source.document.text), any_text)


class _Judge:
    """Judges one chunk. ``claimed``: datatrove calls it finished."""

    def __init__(self, chunk: Chunk, matcher: Matcher, claimed: bool, options: Options, shape: Shape) -> None:
        self.chunk = chunk
        self._shape = shape
        self.matcher = matcher
        self.claimed = claimed
        self._options = options
        self._ids: Counter[str] = Counter()
        self._lacking = 0
        self._in_output = DocumentCounts()
        self._kept = DocumentCounts()

    def see(self, ordinal: int, source: SourceDocument) -> None:
        """The next document of the chunk."""
        kept, id = self.matcher.of(source), str(source.document.id)
        self._ids[id] += 1
        self.chunk.last_input = source.fingerprint
        if (row := kept.row()) is not None:
            _count(self._kept, row)
        else:
            self._kept.read += 1
            why = _AGAIN if kept.output is not None else ""
            self.chunk.left.append(Left(ordinal, id, why, digest(source.document.text)))
        if (shown := row or kept.output) is not None:
            self._shape.see(shown.results)
        if kept.output is not None:
            _count(self._in_output, kept.output)
        elif kept.checkpoint is not None and kept.checkpoint.dropped:
            _count(self._in_output, kept.checkpoint)
        else:
            self._in_output.read += 1
            self._lacking += 1

    def end(self) -> None:
        """All documents of the chunk were seen."""
        chunk, rows = self.chunk, self.matcher.output
        chunk.problems = [*rows.problems, *self.matcher.checkpoint.problems]
        named = min(rows.nameless, self._lacking)  # rows without ids can only be counted
        lacking = self._lacking - named
        trusted = self.claimed and self._options.lacking_are_dropped and bool(chunk.files)
        chunk.finished = not rows.problems and not rows.left and rows.nameless == named and (not lacking or trusted)
        if chunk.finished:
            chunk.left, chunk.counts = [], self._in_output
            chunk.counts.written += named
            chunk.counts.dropped += lacking
            return
        if rows.left:
            chunk.problems.append(
                f"{plural(rows.left, 'row')} of its output {'is' if rows.left == 1 else 'are'} of no document of this "
                "chunk, or there twice"
            )
        chunk.counts = self._kept
        chunk.left = [one._replace(why=self._why(one)) for one in chunk.left]

    def _why(self, left: Left) -> str:
        output, checkpoint = self.matcher.output, self.matcher.checkpoint
        if self._ids[left.id] > 1:
            return _REPEATED
        if left.why:
            return left.why
        if output.by_id.get(left.id) or checkpoint.by_id.get(left.id):
            return _OTHER_TEXT
        if left.id in output.damaged | checkpoint.damaged:
            return _TORN
        return _LACKS if self.claimed else ""


def _count(counts: DocumentCounts, row: Row) -> None:
    counts.count("dropped" if row.dropped else "written", *row.work)


async def judge(rank: Rank, files: Files, read: RankInput, size: int, options: Options) -> None:
    """Adds the chunks of a rank, up to the last one of which there is anything.

    Args:
        read: the rank's input.
        size: ``records_per_chunk``.

    Raises:
        CheckpointMismatch: the input is not that of datatrove's run.
        OutputMismatch: no output of finished chunks is there.
    """
    ordinal, rows = 0, Counter[str]()
    astray: set[tuple[str, int]] = set()
    current: _Judge | None = None
    last: SourceDocument | None = None
    documents = read.documents(ResumePoint())
    async for source in documents:
        index, place = divmod(ordinal, size)
        if place == 0:
            _end(current, last, rank, rows, astray)
            current = None
            if index >= files.chunks:
                break
            chunk = Chunk(index, ordinal, files=files.outputs.get(index, []))
            current = _Judge(chunk, files.matcher(index, options.any_text), index <= files.last, options, rank.shape)
        if current is not None:
            current.see(ordinal, source)
        last, ordinal = source, ordinal + 1
    _end(current, last, rank, rows, astray)
    await documents.aclose()
    for chunk in rank.chunks:
        chunk.left = [
            one._replace(why=_ASTRAY) if one.why in ("", _LACKS) and (one.id, one.text) in astray else one
            for one in chunk.left
        ]
    beyond = [index for index in range(-(-ordinal // size), files.chunks) if _holds_rows(files, index)]
    _check(rank, files, rows, beyond, ordinal)


def _end(
    current: _Judge | None, last: SourceDocument | None, rank: Rank, rows: Counter[str], astray: set[tuple[str, int]]
) -> None:
    """Ends a chunk. Its last document's position is known only now, when the next document is there, or none is."""
    if current is None or last is None:
        return
    current.end()
    current.chunk.position = last.position()
    matcher = current.matcher
    rows["all"] += matcher.total
    rows["known"] += matcher.total - matcher.output.left - matcher.checkpoint.left
    astray |= matcher.output.untaken() | matcher.checkpoint.untaken()
    rank.chunks.append(current.chunk)


def _holds_rows(files: Files, index: int) -> bool:
    return index <= files.last or files.matcher(index, any_text=True).total > 0


def _check(rank: Rank, files: Files, rows: Counter[str], beyond: list[int], documents: int) -> None:
    what = "Give migrate the input, filters, tasks and records_per_chunk that datatrove's run had. Nothing was changed."
    if beyond:
        raise CheckpointMismatch(
            f"Rank {rank.rank}: the input has {documents} documents, but datatrove's run has kept documents of chunk "
            f"{beyond[-1]}, which would begin beyond its end. {what}"
        )
    if rows["known"] < rows["all"] * _LEAST_KNOWN:
        raise CheckpointMismatch(
            f"Rank {rank.rank}: only {rows['known']} of the {rows['all']} rows that datatrove's run has kept are of "
            f"documents that the input has in the same chunk. {what}"
        )
    claimed = [chunk for chunk in rank.chunks if chunk.index <= files.last]
    if claimed and not any(chunk.files for chunk in claimed):
        where = files.writer.output_folder.resolve_paths("")
        raise OutputMismatch(
            f"Rank {rank.rank}: {files.theirs.last_chunk} calls {len(claimed)} chunks finished, but {where} "
            f"holds none of their files, named as {files.writer.output_filename.template!r} says. Set output_folder "
            "and output_filename to those of datatrove's run, or put the files there. Nothing was changed."
        )
