"""Recorded documents: a sample of a run's finished documents, with their requests, answers and
results, for the replay check (``replay.py``).

The documents whose hashes of rank and ordinal are the smallest: a uniform sample that each attempt
and rank continues, without a lock. Each is a file, ``recorded/<hash>.json`` below
``checkpoints_local_dir``, written beside its name and renamed. Nothing is synced: a file that power
loss has torn counts as missing. ``recorded/void.json`` ends the recording of the run, with its
cause.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
from bisect import insort
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import (
    checksummed_json,
    read_checksummed_json,
    size_of,
)
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common.redaction import masked, redact, shown_json
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.requests import DocumentAnswers, RankContext
from datatrove_ckpt.output.document_codec import encode
from datatrove_ckpt.user_code.description import is_of_user

T = TypeVar("T")
_MAX_BYTES = 256 * 1024  # of a document
_MAX_ALL_BYTES = 4 * 2**20
_VERSION = 1  # changes with what this package makes of a payload: its users changed nothing
_FIRST = 8  # documents that are recorded whatever their hashes are
_MARGIN = 1.2  # times as many candidates as there are places, in an input of known size
_ALL = 2**64
_WAITS = {
    ("asyncio.locks", "wait"),  # of Event, Condition and Barrier
    ("asyncio.queues", "get"),
    ("asyncio.queues", "put"),
    ("asyncio.queues", "join"),
}
_FILE = re.compile(r"[0-9a-f]{16}\.json")


@dataclass
class RecordedDocument:
    """A finished document.

    Attributes:
        read, result: the document before its rollout, and its line in the journal.
        requests: key, payload (or arguments of a call) without secrets, and answer.
        code: hash of the code whose keys the calls have.
        run: digest of the last identity of the run that gave the same requests and result.
    """

    name: str
    ordinal: int
    chunk: int
    id: str
    read: str
    result: str
    requests: list[tuple[list[Any], Any, str]]
    code: str
    run: str
    draws: list[int]
    process: list[str] = field(default_factory=list)


def read_recorded(path: Path) -> RecordedDocument | None:
    """Reads a recorded document; None if another version of this package wrote it."""
    fields = read_checksummed_json(path.read_bytes(), (_VERSION,))
    if fields.pop("version", None) != _VERSION:
        return None
    try:
        return RecordedDocument(**fields)
    except TypeError as error:
        raise ValueError(f"it has other fields: {error}") from error


class Stepped:
    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, Any]:
        step = partial(self._coroutine.send, None)
        while True:
            try:
                awaited = self._take(step)
            except StopIteration as end:
                return end.value
            try:
                yield awaited
                step = partial(self._coroutine.send, None)
            except BaseException as error:
                step = partial(self._coroutine.throw, error)

    def _take(self, step: Callable[[], object]) -> object:
        return step()


class _Observed(Stepped):
    """Finds out whether a rollout waits for other documents: replayed alone, it would wait for
    ever, and leave in the user's lists what other documents wait for.
    """

    def __init__(self, coroutine: Any, recorded: RecordedDocuments) -> None:
        super().__init__(coroutine)
        self._recorded = recorded

    def _take(self, step: Callable[[], object]) -> object:
        awaited = step()
        if type(awaited) is asyncio.Future and self._is_foreign(awaited):
            self._recorded.waits = True
        return awaited

    def _is_foreign(self, future: asyncio.Future[object]) -> bool:
        coroutine = self._coroutine
        while hasattr(inner := coroutine.cr_await, "cr_await"):
            coroutine = inner
        code = coroutine.cr_code
        if (coroutine.cr_frame.f_globals.get("__name__"), code.co_name) in _WAITS:
            return True
        # A call in a thread has a callback that passes its result on.
        callbacks = [str(callback) for callback, _ in getattr(future, "_callbacks", None) or ()]
        return is_of_user(code.co_filename) and not any("_chain_" in name for name in callbacks)


class RecordingAnswers(DocumentAnswers):
    is_asked = True

    def __init__(
        self,
        rank: RankContext,
        slot: ChunkSlot,
        source: SourceDocument,
        rollouts: int,
        name: str,
        read: bytes,
        recorded: RecordedDocuments,
    ) -> None:
        super().__init__(rank, slot, source.id, rollouts)
        self.name = name
        self._recorded = recorded
        self._read = read
        self._draws = [*random.getstate()[1]]
        self._sent: dict[AnswerKey, str] = {}
        self._known: dict[AnswerKey, bytes] = {}

    def observed(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return _Observed(work, self._recorded)

    async def saved(self, key: AnswerKey) -> CachedAnswer | None:
        # Before any await: the rollout may change its payload. Secrets are hidden when it is
        # recorded: searching a long text for them would keep the event loop from its work.
        self._sent[key] = shown_json(self.payloads[key.rollout_idx])
        answer = await super().saved(key)
        self._know(key, answer)
        return answer

    def put(self, key: AnswerKey, answer: CachedAnswer, ends_pieces: bool = False) -> None:
        self._know(key, answer)
        super().put(key, answer, ends_pieces)

    def _know(self, key: AnswerKey, answer: CachedAnswer | None) -> None:
        if answer is not None and answer.result is not None:
            self._known[key] = answer.result

    def record(self, finished: FinishedDocument) -> RecordedDocument | None:
        if finished.outcome == "dead" or self.failed or not self._sent.keys() <= self._known.keys():
            return None
        requests = [
            ([*key], masked("payload", json.loads(payload)), self._known[key].decode())
            for key, payload in self._sent.items()
        ]
        return RecordedDocument(
            self.name,
            self.slot.ordinal,
            self.slot.chunk.index,
            self.doc_id,
            self._read.decode(),
            finished.document.decode(),
            requests,
            self._rank.code,
            self._rank.checkpoint.run,
            self._draws,
            process_names(),
        )


def process_names() -> list[str]:
    """Returns names that differ at another start, on another node: they may be in results."""
    node = platform.node().partition(".")[0]
    return [node, os.environ.get("SLURM_JOB_ID", ""), str(os.getpid())]


class RecordedDocuments:
    """The recorded documents of a run, as one rank sees them.

    Attributes:
        waits: a rollout has waited for something that only another document can bring.
    """

    waits = False

    def __init__(self, root: Path, rank: int = -1, share: float = 1.0) -> None:
        self.folder = root / layout.RECORDED
        self.finished = asyncio.Queue[tuple[RecordingAnswers, FinishedDocument]]()
        self._rank = rank
        self._share = share
        self._hashes = [_hash_in(name) for name in self.names()]
        self._room = 0 if self.void else _ALL  # only smaller hashes have room
        self._limit = self._room

    def names(self) -> list[str]:
        """Returns the files, the smallest hash first; none if the recording has ended."""
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 (speed)
        except (FileNotFoundError, NotADirectoryError):
            return []
        if layout.VOID in names:
            return []
        return sorted(name for name in names if _FILE.fullmatch(name))

    @property
    def void(self) -> str:
        path = self.folder / layout.VOID
        try:
            return str(read_checksummed_json(path.read_bytes(), (_VERSION,))["why"])
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, ValueError, KeyError) as error:
            return f"{path} cannot be read ({error!r})"

    def read(self) -> Iterator[RecordedDocument]:
        for name in self.names()[: layout.MAX_RECORDED]:
            with suppress(OSError, ValueError):
                if (document := read_recorded(self.folder / name)) is not None:
                    yield document

    # recording -----------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        return not self._room

    def stop(self) -> None:
        self._room = self._limit = 0

    def answers(
        self,
        rank: RankContext,
        source: SourceDocument,
        slot: ChunkSlot,
        rollouts: int,
    ) -> DocumentAnswers:
        if not self._limit or source.finished is not None:
            return DocumentAnswers(rank, slot, source.id, rollouts)
        number = xxhash.xxh3_64_intdigest(slot.ordinal.to_bytes(8), self._rank)
        if number < self._limit and number not in self._hashes:
            with suppress(DocumentNotSerializable):
                read = encode(source.document)
                if len(read) < _MAX_BYTES:
                    insort(self._hashes, number)
                    self._set_limit(rank.observer.expected_documents())
                    name = f"{number:016x}"
                    return RecordingAnswers(rank, slot, source, rollouts, name, read, self)
        return DocumentAnswers(rank, slot, source.id, rollouts)

    def _set_limit(self, documents: float) -> None:
        """Args:
        documents: number of documents that this rank probably has; 0: not known.
        """
        self._limit = self._room
        if len(self._hashes) >= layout.MAX_RECORDED:
            self._limit = min(self._limit, self._hashes[layout.MAX_RECORDED - 1])
        if len(self._hashes) >= _FIRST and documents:
            expected = _MARGIN * layout.MAX_RECORDED * self._share / documents
            self._limit = min(self._limit, int(expected * _ALL))

    def taken(
        self, batch: Iterable[tuple[RecordingAnswers, FinishedDocument]]
    ) -> list[RecordedDocument]:
        """Returns the documents of a batch that are among those with the smallest hashes."""
        highest = self._hashes[: layout.MAX_RECORDED][-1]
        documents = []
        for answers, finished in batch:
            if not self.is_stopped and _hash_in(answers.name) <= highest:
                document = answers.record(finished)
                if document is not None:
                    documents.append(document)
        return documents

    def finish(self, answers: DocumentAnswers, finished: FinishedDocument) -> None:
        if isinstance(answers, RecordingAnswers):
            self.finished.put_nowait((answers, finished))

    def put(self, documents: Collection[RecordedDocument]) -> None:
        for document in documents:
            data = checksummed_json({"version": _VERSION, **vars(document)}, indent=False)
            if len(data) <= _MAX_BYTES:
                self._write(f"{document.name}.json", data)
        names = self.names()
        size = 0
        for number, name in enumerate(names):
            size += size_of(self.folder / name)
            if number >= layout.MAX_RECORDED or size > _MAX_ALL_BYTES:
                self._room = min(self._room, _hash_in(name))
                files.disk.remove(self.folder / name)
        if not names:  # another rank has ended the recording since
            self.remove([f"{document.name}.json" for document in documents])

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            files.disk.remove(self.folder / name)

    def _write(self, name: str, data: bytes) -> None:
        files.disk.make_dirs(self.folder, files.PRIVATE_FOLDER)
        # Ranks that start together may write the same file: each has its own beside it.
        beside = self.folder / f"{name}.{self._rank:08x}"
        descriptor = files.disk.create(beside, files.PRIVATE_FILE)
        try:
            files.disk.write(descriptor, data, beside)
        finally:
            os.close(descriptor)
        files.disk.rename(beside, self.folder / name)

    def end(self, why: str) -> None:
        """Ends the recording of the run, for all ranks and attempts.

        Raises:
            CkptError: the disk takes no file. Then, too, nothing is left to be replayed.
        """
        self.stop()
        names = self.names()
        try:
            self._write(layout.VOID, checksummed_json({"version": _VERSION, "why": redact(why)}))
        finally:
            self.remove(names)


def _hash_in(name: str) -> int:
    return int(name[:16], 16)
