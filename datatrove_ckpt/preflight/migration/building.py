"""Makes a rank's checkpoint of what datatrove's runner kept: a folder that is renamed into place when it is whole."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import xxhash
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.checkpoint.commits import Commit, OutputFile
from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.identity import RunClaim
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.checkpoint.layout import COMMITS, MIGRATED, journal_path
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.output.documents import encode
from datatrove_ckpt.output.hub import HubFile, HubFolder
from datatrove_ckpt.preflight.migration.findings import Chunk, Rank
from datatrove_ckpt.preflight.migration.judgement import Files, Matcher
from datatrove_ckpt.preflight.migration.rank_input import RankInput
from datatrove_ckpt.preflight.migration.rows import DAMAGED, Row, metadata_of, open_output

_AT_ONCE = 64
_BLOCK = 1 << 20
# datatrove 0.8 read its own chunk files with a reader that adds their names.
_OF_CHUNK_FILE = re.compile(r"chunk_\d+\.jsonl$")
_RESULT_FIELDS = ({"text", "finish_reason", "usage"}, {"text", "finish_reason", "usage", "reasoning"})


async def build(
    folder: Path, rank: Rank, theirs: Files, read: RankInput, identity: RunIdentity, any_text: bool
) -> None:
    """Makes the rank's folder, all of it on the disk.

    Args:
        folder: where; what an interrupted call has left there is removed.
    """
    files.disk.remove_tree(folder)
    files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
    finished = [chunk for chunk in rank.chunks if chunk.finished]
    RunClaim(folder, identity).take(len(finished))
    commits = list(_commits(finished, theirs.writer))
    log = files.AppendFile(folder / COMMITS)
    log.append(b"".join(seal(commit.to_json()) for commit in commits))
    log.sync()
    await _write_journals(folder, rank, theirs, read, any_text)
    note = {"aside": rank.aside, "moved": not rank.aside, "from": str(theirs.theirs.folder)}
    files.disk.replace(folder / MIGRATED, orjson.dumps({**note, **rank.to_json(), "made_with": rank.made_with}))
    files.disk.sync_dir(folder)
    files.disk.close(folder)


# finished chunks -----------------------------------------------------------------------------------------------------


def _commits(finished: list[Chunk], writer: DiskWriter) -> Iterator[Commit]:
    hub = HubFolder.of(writer.output_folder)
    names = [name for chunk in finished for name in chunk.files]
    listed = {} if hub is None else hub.look_up(names)
    for chunk in finished:
        yield Commit(
            chunk_index=chunk.index,
            first_ordinal=chunk.first_ordinal,
            counts=chunk.counts,
            files=[_output_file(writer, name, listed.get(name)) for name in chunk.files],
            position=chunk.position,
            last_input=chunk.last_input,
            work=chunk.counts.unsplit(),
            at=unix_seconds(),
        )


def _output_file(writer: DiskWriter, name: str, listed: HubFile | None) -> OutputFile:
    """Reads the file. A local one is synced: datatrove does not do that."""
    content, size = xxhash.xxh3_128(), 0
    with writer.output_folder.open(name, "rb") as file:
        while block := file.read(_BLOCK):
            content.update(block)
            size += len(block)
    if writer.output_folder.is_local():
        files.disk.sync(Path(writer.output_folder.resolve_paths(name)))
    hub_hash = "" if listed is None else listed.oid or listed.blob or ""
    return OutputFile(name, size, content.hexdigest(), hub_hash)


# chunks that are not finished ----------------------------------------------------------------------------------------


async def _write_journals(folder: Path, rank: Rank, theirs: Files, read: RankInput, any_text: bool) -> None:
    """Reads the input once more, from the first chunk on that needs it."""
    chunks = {chunk.index: chunk for chunk in rank.chunks}
    wanted = {chunk.index for chunk in rank.chunks if not chunk.finished and chunk.kept}
    if not wanted:
        return
    start, before = chunks[min(wanted)], chunks.get(min(wanted) - 1)
    position = before.position if before is not None else None
    point = ResumePoint(start.index, start.first_ordinal, position)
    documents = read.documents(point)
    try:
        for index in range(start.index, max(wanted) + 1):
            if index in wanted:
                await _write_journal(folder, chunks[index], theirs, documents, any_text)
            else:
                await _pass(documents, chunks[index])
    finally:
        await documents.aclose()


async def _pass(documents: AsyncGenerator[SourceDocument, None], chunk: Chunk) -> None:
    for _ in range(chunk.counts.read):
        await anext(documents)


async def _write_journal(
    folder: Path, chunk: Chunk, theirs: Files, documents: AsyncGenerator[SourceDocument, None], any_text: bool
) -> None:
    matcher = theirs.matcher(chunk.index, any_text)
    journal = ChunkJournal(journal_path(folder, chunk.index), chunk.first_ordinal)
    with Lines(theirs, folder, chunk) as lines:
        group: list[Finished] = []
        for ordinal in range(chunk.first_ordinal, chunk.first_ordinal + chunk.counts.read):
            finished = _finished(ordinal, await anext(documents), matcher, lines, theirs.metadata_key)
            group += [] if finished is None else [finished]
            if len(group) >= _AT_ONCE:
                journal.append(group)
                group = []
        if group:
            journal.append(group)
    journal.sync()


def _finished(
    ordinal: int, source: SourceDocument, matcher: Matcher, lines: Lines, metadata_key: str
) -> Finished | None:
    row = matcher.of(source).row()
    if row is None:
        return None
    if row.dropped:
        return Finished(ordinal, "dropped", source.fingerprint, b"null", *row.work)
    document = _document(source.document, lines.read(row), metadata_key)
    return Finished(ordinal, "written", source.fingerprint, encode(document), *row.work)


def _document(document: Document, line: dict[str, Any], metadata_key: str) -> Document:
    """The finished document: as it was read, with what its line has besides. JSON has lost types, and the input not."""
    metadata = metadata_of(line)
    if "file_path" not in document.metadata and _OF_CHUNK_FILE.search(str(metadata.get("file_path"))):
        metadata = {name: value for name, value in metadata.items() if name != "file_path"}
    kept = {name: value for name, value in document.metadata.items() if name in metadata}
    document.metadata = {name: _typed(kept, name, value) for name, value in metadata.items()}
    document.text = line.get("text", "")
    if isinstance(results := metadata.get(metadata_key), list):
        document.metadata[metadata_key] = [_result(one) for one in results]
    return document


def _typed(as_read: dict[str, Any], name: str, value: object) -> object:
    if name not in as_read:
        return value
    try:
        same = orjson.loads(orjson.dumps(as_read[name], default=str)) == value
    except TypeError:  # datatrove would not have kept it like this
        same = True
    return as_read[name] if same or name == "file_path" else value


def _result(value: object) -> object:
    """JSON of an InferenceResult becomes one again, for adapters and writers that expect it."""
    if isinstance(value, dict) and set(value) in _RESULT_FIELDS:
        return InferenceResult(**value)
    return value


class Lines:
    """Reads lines of a chunk's files again, in any order. Compressed output is decompressed into the rank's folder."""

    def __init__(self, theirs: Files, folder: Path, chunk: Chunk) -> None:
        self._theirs = theirs
        self._folder = folder
        self._chunk = chunk
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()
        for path in self._folder.glob("spool-*"):
            path.unlink()

    def read(self, row: Row) -> dict[str, Any]:
        if row.name not in self._open:
            self._open[row.name] = self._path(row.name).open("rb")
        file = self._open[row.name]
        file.seek(row.offset)
        line: dict[str, Any] = orjson.loads(file.read(row.length))
        return line

    def _path(self, name: str) -> Path:
        found = self._theirs.chunk_files.get(self._chunk.index)
        if found is not None and found.name == name:
            return found
        spool = self._folder / f"spool-{len(self._open)}"
        # Damage ends the loop: the rows lie before it.
        with open_output(self._theirs.writer, name) as file, spool.open("wb") as copy, suppress(*DAMAGED):
            copy.writelines(file)
        return spool
