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
import types
from collections.abc import Awaitable, Coroutine, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import checksummed_json, read_checksummed_json
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common.redaction import redact, shown_json, without_secrets
from datatrove_ckpt.errors import CkptError, DocumentNotSerializable
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.requests import DocumentAnswers, RankContext
from datatrove_ckpt.generation.side_effects import EffectWatch
from datatrove_ckpt.output.document_codec import encode
from datatrove_ckpt.user_code.description import is_of_user

T = TypeVar("T")
_MAX_BYTES = 256 * 1024  # of a document
_MAX_ALL_BYTES = 4 * 2**20
_VERSION = 1  # changes with what this package makes of a payload: its users changed nothing
_FIRST = 8  # documents that are recorded whatever their hashes are
_CANDIDATES = 1.2 * layout.MAX_RECORDED  # in an input of known size
_ALL = 2**64
_WAITS = ("asyncio.locks", "asyncio.queues")


@dataclass
class RecordedDocument:
    """A finished document.

    Attributes:
        read, result: the document before its rollout, and its line in the journal.
        requests: key, payload (or arguments of a call) and answer. Files hold no secrets.
        code: hash of the code whose keys the calls have.
        draws: state of ``random`` at the start; empty if nothing was drawn until the end.
        run: digest of the run's identity.
    """

    name: str
    ordinal: int
    chunk: int
    id: str
    read: str
    result: str
    requests: list[tuple[list[Any], object, str]]
    code: str
    run: str
    draws: list[int]
    process: list[str] = field(default_factory=list)


def read_recorded(path: Path) -> RecordedDocument | None:
    """Reads a recorded document; None if another version of this package wrote it.

    Raises:
        OSError, TypeError, ValueError: the file is none.
    """
    fields = read_checksummed_json(path.read_bytes(), (_VERSION,))
    if fields.pop("version", None) != _VERSION:
        return None
    return RecordedDocument(**fields)


@types.coroutine
def stepped(
    coroutine: Any, watch: EffectWatch, each: AbstractContextManager[object]
) -> Generator[object, None, Any]:
    """Runs a coroutine, each step in the context ``each``, and sees what it waits for.

    A rollout that waits for other documents is not replayed: alone, it would wait for ever, and
    leave in the user's lists what other documents wait for.
    """
    step = partial(coroutine.send, None)
    while True:
        try:
            with each:
                awaited = step()
        except StopIteration as end:
            return end.value
        if type(awaited) is asyncio.Future and _is_foreign(coroutine, awaited):
            watch.effect = watch.effect or "wait for other documents"
        try:
            yield awaited
            step = partial(coroutine.send, None)
        except BaseException as error:
            step = partial(coroutine.throw, error)


def _is_foreign(coroutine: Any, future: asyncio.Future[object]) -> bool:
    caller = coroutine
    while hasattr(coroutine, "cr_await"):
        innermost = coroutine
        if coroutine.cr_frame.f_globals.get("__name__") not in _WAITS:
            caller = coroutine
        coroutine = coroutine.cr_await
    # A call in a thread has a callback that passes its result on.
    is_awaited = caller is not innermost or "_chain_" not in str(future._callbacks)
    is_lock = innermost.cr_code.co_name == "acquire"
    return is_awaited and not is_lock and is_of_user(caller.cr_code.co_filename)


class RecordingAnswers(DocumentAnswers):
    """The answers of a document that is recorded, or replayed.

    Attributes:
        sent: payloads as JSON.
        each_step: context of each step of the rollout.
    """

    is_asked = True
    each_step: AbstractContextManager[object] = nullcontext()

    def __init__(
        self,
        rank: RankContext,
        slot: ChunkSlot,
        document: RecordedDocument,
        rollouts: int,
        watch: EffectWatch,
    ) -> None:
        super().__init__(rank, slot, document.id, rollouts)
        self.document = document
        self._watch = watch
        self.sent: dict[AnswerKey, str] = {}
        self.known = {
            AnswerKey(*key): CachedAnswer(answer.encode(), None)
            for key, _, answer in document.requests
        }

    def observed(self, work: Coroutine[object, None, T]) -> Awaitable[T]:
        return stepped(work, self._watch, self.each_step)

    async def saved(self, key: AnswerKey) -> CachedAnswer | None:
        # Before any await: the rollout may change its payload. Secrets are hidden when it is
        # written: searching a long text for them would keep the event loop from its work.
        self.sent[key] = shown_json(self.payloads[key.rollout_idx])
        answer = await super().saved(key)
        if answer is not None:
            self.known[key] = answer
        return answer

    def put(self, key: AnswerKey, answer: CachedAnswer, ends_pieces: bool = False) -> None:
        self.known[key] = answer
        super().put(key, answer, ends_pieces)

    def record(self, finished: FinishedDocument) -> bool:
        """Completes the recorded document. Returns False if it cannot be replayed."""
        if finished.outcome == "dead" or self.failed:
            return False
        document = self.document
        if document.draws == [*random.getstate()[1]]:
            document.draws = []
        document.result = finished.document.decode()
        for key, payload in self.sent.items():
            answer = self.known.get(key)
            if answer is None or answer.result is None:
                return False
            document.requests.append(([*key], json.loads(payload), answer.result.decode()))
        return True


def process_names() -> list[str]:
    """Returns names that differ at another start, on another node: they may be in results."""
    node = platform.node().partition(".")[0]
    return [node, os.environ.get("SLURM_JOB_ID", ""), str(os.getpid())]


class RecordedDocuments:
    """A run's recorded documents, as one rank sees them.

    Attributes:
        waits: sees a rollout that waits for other documents. Other runs of the process may not.
    """

    def __init__(self, root: Path, rank: int = -1, share: float = 1.0) -> None:
        self.folder = root / layout.RECORDED
        self.finished: list[RecordedDocument] = []
        self._rank = rank
        self._candidates = _CANDIDATES * share
        self.is_stopped = bool(self.void)
        self.waits = EffectWatch()
        self._limit = _ALL  # documents with smaller hashes are recorded
        # Only names before this one have room: the first tasks of a run have filled it.
        self._end = next(iter(self.names()[layout.MAX_RECORDED - 1 :]), "g")

    def names(self) -> list[str]:
        """Returns the files, the smallest hash first; none if the recording has ended."""
        if (self.folder / layout.VOID).exists():
            return []
        return sorted(path.name for path in self.folder.glob(f"{'?' * 16}.json"))

    @property
    def void(self) -> str:
        path = self.folder / layout.VOID
        if not path.exists():
            return ""
        try:
            return str(read_checksummed_json(path.read_bytes(), (_VERSION,))["why"])
        except (OSError, ValueError, KeyError) as error:
            return f"{path} cannot be read ({error!r})"

    def read(self) -> list[RecordedDocument]:
        documents = []
        for name in self.names()[: layout.MAX_RECORDED]:
            with suppress(OSError, TypeError, ValueError):
                if (document := read_recorded(self.folder / name)) is not None:
                    documents.append(document)
        return documents

    # recording -----------------------------------------------------------------------------------

    def answers(
        self, rank: RankContext, source: SourceDocument, slot: ChunkSlot, rollouts: int
    ) -> DocumentAnswers:
        if not (self.is_stopped or source.finished is not None or source.size > _MAX_BYTES):
            number = xxhash.xxh3_64_intdigest(slot.ordinal.to_bytes(8), self._rank)
            if number < self._limit:
                with suppress(DocumentNotSerializable):
                    document = RecordedDocument(
                        f"{number:016x}",
                        slot.ordinal,
                        slot.chunk.index,
                        source.id,
                        encode(source.document).decode(),
                        "",
                        [],
                        rank.code,
                        rank.checkpoint.run,
                        [*random.getstate()[1]],
                        process_names(),
                    )
                    if slot.ordinal >= _FIRST:
                        expected = max(rank.observer.expected_documents(), slot.ordinal + 1)
                        self._limit = int(self._candidates / expected * _ALL)
                    return RecordingAnswers(rank, slot, document, rollouts, self.waits)
        return DocumentAnswers(rank, slot, source.id, rollouts)

    def finish(self, answers: DocumentAnswers, finished: FinishedDocument) -> None:
        if isinstance(answers, RecordingAnswers) and answers.record(finished):
            self.finished.append(answers.document)

    def taken(self) -> list[RecordedDocument]:
        """Takes those of the finished documents that have room."""
        finished = sorted(self.finished, key=attrgetter("name"))
        self.finished = []
        return [each for each in finished[: layout.MAX_RECORDED] if each.name < self._end]

    def put(self, documents: Iterable[RecordedDocument]) -> None:
        files.disk.make_dirs(self.folder, files.PRIVATE_FOLDER)
        for document in documents:
            requests = [
                (key, without_secrets("payload", payload, is_hashed=False), answer)
                for key, payload, answer in document.requests
            ]
            fields = {"version": _VERSION, **vars(document), "requests": requests}
            data = checksummed_json(fields, indent=False)
            if len(data) <= _MAX_BYTES:
                self._write(f"{document.name}.json", data)
        names = self.names()
        size = 0
        for number, name in enumerate(names):
            with suppress(FileNotFoundError):  # removed by another rank
                size += (self.folder / name).stat().st_size
            if number >= layout.MAX_RECORDED or size > _MAX_ALL_BYTES:
                self._end = min(self._end, name)
                self.remove([name])
        if not names:  # another rank has ended the recording since
            self.remove(f"{document.name}.json" for document in documents)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            files.disk.remove(self.folder / name)

    def _write(self, name: str, data: bytes) -> None:
        # Ranks that start together may write the same file: each has its own beside it.
        beside = self.folder / f"{name}.{self._rank:08x}"
        descriptor = files.disk.create(beside, files.PRIVATE_FILE)
        try:
            files.disk.write(descriptor, data, beside)
        finally:
            os.close(descriptor)
        files.disk.rename(beside, self.folder / name)

    def end(self, why: str) -> None:
        """Ends the recording of the run, for all ranks and attempts."""
        self.is_stopped = True
        try:
            self.remove(self.names())  # first: a full disk must not leave what a start would replay
            files.disk.make_dirs(self.folder, files.PRIVATE_FOLDER)
            self._write(layout.VOID, checksummed_json({"version": _VERSION, "why": redact(why)}))
        except CkptError as error:  # of the disk: the journal decides whether the rank goes on
            logger.warning(f"replay check: its end cannot be recorded: {error}")
        logger.warning(
            f"replay check: finished documents are not replayed, because {redact(why)}. A resume "
            "compares only the rollout's text."
        )
