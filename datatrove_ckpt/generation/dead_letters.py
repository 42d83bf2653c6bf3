"""Dead letters: the documents that could not be processed, and their retries.

A line has a document's cause, and its data for a retry. A chunk's dead letters are appended to
``dead_letters.jsonl`` at its commit. A retry writes the dead letters that no retry has taken to
``retry-00001/<rank>/input.jsonl``, and processes this file like other input, with a checkpoint in
that folder. A document that fails again waits for the next retry.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path

import orjson
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import likely_mistake, safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, RequestRejected
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.output.document_codec import as_read, decode
from datatrove_ckpt.readers.inputs import position_state

Letter = JsonObject
"""A line of ``dead_letters.jsonl``; its ``document`` is as ``documents.encode`` wrote it."""


def failure_of(error: BaseException) -> str | BaseException:
    """Returns the failure itself: for datatrove's ``InferenceError`` its ``error``."""
    if isinstance(error, InferenceError):
        failure: str | BaseException = error.error
        return failure
    return error


def cause_of(error: BaseException) -> str:
    failure = failure_of(error)
    text = safe_text(failure)
    if isinstance(failure, RequestRejected):
        text = failure.cause
    text = redact(text)
    if isinstance(failure, CkptError | str):
        return text
    return f"{type(failure).__name__}: {text}{likely_mistake(failure)}"


def dead_letter(
    source: SourceDocument, ordinal: int, error: BaseException, payload_hashes: list[str]
) -> bytes:
    """Returns a line of ``dead_letters.jsonl``, without its line break.

    Args:
        payload_hashes: payload hash of the last request of each rollout.
    """
    document = source.document
    encoded = source.as_read or as_read(document).data
    earlier: Letter = getattr(document, "dead_letter", {})
    head: Letter = {
        "ordinal": earlier.get("ordinal", ordinal),
        "id": source.id,
        "error": cause_of(error),
        "kind": type(failure_of(error)).__name__,
        "attempts": earlier.get("attempts", 0) + 1,
        "position": earlier.get("position", position_state(document)),
        "payload_hashes": [digest for digest in payload_hashes if digest],
        "traceback": redact(safe_text("".join(traceback.format_exception(error)))),
    }
    return b'%s,"document":%s}' % (orjson.dumps(head)[:-1], encoded)


def read_letters(path: Path) -> Iterator[Letter]:
    """Yields the dead letters of a file; none if it is missing."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield orjson.loads(line)


LetterAttempt = tuple[int, int]
"""A document's ordinal, and the attempt that failed, counted from 1."""


def _attempt_of(letter: Letter) -> LetterAttempt:
    return letter["ordinal"], letter["attempts"]


def retried_dead_letters(root: Path, rank: int) -> dict[LetterAttempt, bytes]:
    """Returns the dead letters of a rank that its retries have taken, as lines."""
    return {
        _attempt_of(letter): orjson.dumps(letter)
        for folder in layout.folders_of(root, rank)
        for letter in read_letters(folder / layout.RETRY_INPUT)
    }


class DeadLetterRetry:
    """One pass over a rank's dead letters. Iterates over their documents.

    Attributes:
        root: the pass's ``checkpoints_local_dir``.
        prefix: text before the chunk index in the names of its output files.
    """

    def __init__(self, root: Path, number: int, rank: int) -> None:
        self.root = layout.retry_folder(root, number)
        self.prefix = f"retry{number}_"
        self.folder = layout.rank_folder(self.root, rank)
        self.input = self.folder / layout.RETRY_INPUT

    def __iter__(self) -> Iterator[Document]:
        for letter in read_letters(self.input):
            yield RetriedDocument(decode(orjson.dumps(letter.pop("document"))), letter)

    @property
    def is_finished(self) -> bool:
        done = sum(
            commit.counts.read for commit in read_commits(self.folder / layout.COMMITS).values()
        )
        letters = sum(1 for _ in read_letters(self.input))
        return done == letters and not (self.folder / layout.CACHE).exists()


def next_retry(root: Path, rank: int) -> DeadLetterRetry | None:
    """Resumes an interrupted retry, or starts a new retry. None: there is nothing to retry.

    Raises:
        CheckpointMismatch: the rank itself is not finished; its own documents come first.
        VersionMismatch, CheckpointCorrupt: ``run.json`` cannot be read.
    """
    folder = layout.rank_folder(root, rank)
    if (folder / layout.RUN).exists():
        read_run(folder / layout.RUN)
    if not layout.is_finished(folder):
        raise CheckpointMismatch(
            f"Task {rank} in {root} is not finished. Run it to its end first, without "
            "retry_dead_letters."
        )
    folders = [folder]
    last = 0
    for path in layout.retry_folders(root):
        number = int(path.name.removeprefix(layout.RETRIES))
        retry = DeadLetterRetry(root, number, rank)
        if not retry.input.exists():
            continue  # a retry of other ranks
        if not retry.is_finished:
            return retry
        folders.append(retry.folder)
        last = number
    retried = retried_dead_letters(root, rank)
    letters = [
        letter
        for each in folders
        for letter in read_letters(each / layout.DEAD_LETTERS)
        if _attempt_of(letter) not in retried
    ]
    if not letters:
        return None
    letters.sort(key=_attempt_of)  # chunks are committed in any order
    retry = DeadLetterRetry(root, last + 1, rank)
    files.disk.make_dirs(retry.folder, files.PRIVATE_FOLDER)
    files.disk.replace(retry.input, b"".join(orjson.dumps(letter) + b"\n" for letter in letters))
    return retry


class RetriedDocument(Document):  # type: ignore[misc]
    """A document that was a dead letter before."""

    __slots__ = ("dead_letter",)

    def __init__(self, document: Document, letter: Letter) -> None:
        super().__init__(document.text, document.id, document.media, document.metadata)
        self.dead_letter = letter
