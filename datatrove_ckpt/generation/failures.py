"""Decides for each document that fails: the rank stops, or the document becomes a dead letter.

``on_document_error="stop"`` (the default) stops the rank, except at a rejected request with
``skip_bad_requests``, at a bad answer by its setting (``on_loop: dead_letter``), and at a request
that kills servers. A server's failure always stops the rank (``Answers.fail``).

A dead letter is a document that could not be processed, with its cause and the data for a retry. A
chunk's dead letters are appended to ``dead_letters.jsonl`` at its commit. A retry writes the
untaken letters to ``retry-00001/<rank>/input.jsonl``, and processes this file like other input,
with a checkpoint in that folder. A document that fails again waits for the next retry.

A taken letter stays a letter when its chunk is redone (after ``repair``): otherwise the document
would be in the output twice.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, NotRequired, TypedDict

import orjson
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceError
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    COMMITS,
    DEAD_LETTERS,
    RETRIES,
    RETRY_INPUT,
    RUN,
    folders_of,
    is_finished,
    rank_folder,
    retry_folder,
    retry_folders,
)
from datatrove_ckpt.common.formatting import likely_mistake, plural, safe_repr, safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.common.retrying import OF_ONE_TEXT
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.errors import (
    BadAnswer,
    CheckpointMismatch,
    CkptError,
    DocumentNotSerializable,
    RequestError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerRefused,
    ServerUnavailable,
    TooManyDeadLetters,
    UnexpectedExit,
    causes,
)
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.raised_errors import DocumentFailed, raised_at
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.generation.user_code import NotAwaitable, name_of
from datatrove_ckpt.output.documents import decode
from datatrove_ckpt.readers.positions import State, position_state
from datatrove_ckpt.rollouts import InvalidAnswer


class Letter(TypedDict):
    """A line of ``dead_letters.jsonl``.

    ``document`` holds the document's fields as ``documents.encode`` wrote them.
    """

    ordinal: int
    id: str
    error: str
    kind: str
    attempts: int
    position: State | None
    payload_hashes: list[str]
    traceback: str
    document: NotRequired[dict[str, object]]


def cause_of(error: BaseException) -> str:
    cause = error.error if isinstance(error, InferenceError) else error
    text = safe_text(cause)
    if isinstance(cause, RequestRejected):
        text = cause.cause
    text = redact(text)
    if isinstance(cause, CkptError | str):
        return text
    return f"{type(cause).__name__}: {text}{likely_mistake(cause)}"


def dead_letter(
    source: SourceDocument, ordinal: int, error: BaseException, payload_hashes: list[str]
) -> bytes:
    """Returns a line of ``dead_letters.jsonl``, without its line break.

    Args:
        payload_hashes: of the last request of each rollout.
    """
    document = source.document
    kept = source.as_read or as_read(document).data
    attempts = 0
    position = position_state(document)
    earlier: Letter | None = getattr(document, "letter", None)
    if earlier is not None:
        ordinal = earlier["ordinal"]
        attempts = earlier["attempts"]
        position = earlier["position"]
    head: Letter = {
        "ordinal": ordinal,
        "id": source.id,
        "error": cause_of(error),
        "kind": type(error.error if isinstance(error, InferenceError) else error).__name__,
        "attempts": attempts + 1,
        "position": position,
        "payload_hashes": [digest for digest in payload_hashes if digest],
        "traceback": redact(safe_text("".join(traceback.format_exception(error)))),
    }
    return b'%s,"document":%s}' % (orjson.dumps(head)[:-1], kept)


def read_letters(path: Path) -> Iterator[Letter]:
    """Yields the letters of a file. A missing file has none."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield orjson.loads(line)


Attempt = tuple[int, int]
"""A document's ordinal, and the attempt that failed, counted from 1."""


def _attempt_of(letter: Letter) -> Attempt:
    return letter["ordinal"], letter["attempts"]


def taken_letters(root: Path, rank: int) -> dict[Attempt, bytes]:
    """Returns the letters of a rank that its retries have taken, as lines."""
    return {
        _attempt_of(letter): orjson.dumps(letter)
        for folder in folders_of(root, rank)
        for letter in read_letters(folder / RETRY_INPUT)
    }


class Retry:
    """One pass over a rank's dead letters. Iterates over their documents.

    Attributes:
        root: the pass's ``checkpoints_local_dir``.
        prefix: stands before the chunk index in the names of its output files.
    """

    def __init__(self, root: Path, number: int, rank: int) -> None:
        self.root = retry_folder(root, number)
        self.prefix = f"retry{number}_"
        self.folder = rank_folder(self.root, rank)
        self.input = self.folder / RETRY_INPUT

    def __len__(self) -> int:
        return sum(1 for _ in read_letters(self.input))

    def __iter__(self) -> Iterator[Document]:
        for letter in read_letters(self.input):
            document = decode(orjson.dumps(letter.pop("document")))
            yield RetriedDocument(document, letter)

    @property
    def is_finished(self) -> bool:
        done = sum(commit.counts.read for commit in read_commits(self.folder / COMMITS).values())
        return done == len(self) and not (self.folder / CACHE).exists()


def next_retry(root: Path, rank: int) -> Retry | None:
    """Resumes an interrupted retry, or starts another. None: there is nothing to retry.

    Raises:
        CheckpointMismatch: the rank itself is not finished; its own documents come first.
        VersionMismatch, CheckpointCorrupt: see ``read_run``.
    """
    folder = rank_folder(root, rank)
    if (folder / RUN).exists():
        read_run(folder / RUN)
    if not is_finished(folder):
        raise CheckpointMismatch(
            f"Task {rank} in {root} is not finished. Run it to its end first, without "
            "retry_dead_letters."
        )
    folders = [folder]
    last = 0
    for path in retry_folders(root):
        number = int(path.name.removeprefix(RETRIES))
        retry = Retry(root, number, rank)
        if not retry.input.exists():
            continue  # of other ranks
        if not retry.is_finished:
            return retry
        folders.append(retry.folder)
        last = number
    taken = taken_letters(root, rank)
    letters = [
        letter
        for each in folders
        for letter in read_letters(each / DEAD_LETTERS)
        if _attempt_of(letter) not in taken
    ]
    if not letters:
        return None
    letters.sort(key=_attempt_of)  # chunks are committed in any order
    retry = Retry(root, last + 1, rank)
    files.disk.make_dirs(retry.folder, files.PRIVATE_FOLDER)
    files.disk.replace(retry.input, b"".join(orjson.dumps(letter) + b"\n" for letter in letters))
    return retry


class RetriedDocument(Document):  # type: ignore[misc]
    """A document that was a dead letter before."""

    __slots__ = ("letter",)

    def __init__(self, document: Document, letter: Letter) -> None:
        super().__init__(document.text, document.id, document.media, document.metadata)
        self.letter = letter


@dataclass
class Failures:
    """The rule for one rank, and the number of its dead letters.

    Attributes:
        dead: dead letters of all attempts.
        taken: lines of letters of retries, whose documents are not processed here.
    """

    step: Step
    dead: int
    taken: dict[Attempt, bytes]

    @property
    def keep_as_read(self) -> bool:
        return (
            self.step.on_document_error == "dead_letter"
            or self.step.skip_bad_requests
            or bool(self.step.settings_for_letters)
        )

    @property
    def are_kept(self) -> bool:
        return self.step.checkpoints_local_dir is not None

    def taken_letter(self, source: SourceDocument, ordinal: int) -> bytes | None:
        """Returns the letter that replaces processing the document; None: no retry has taken it.

        Raises:
            CheckpointMismatch: the retry has another document of this number.
        """
        attempt = (ordinal, 1)
        earlier: Letter | None = getattr(source.document, "letter", None)
        if earlier is not None:
            attempt = (earlier["ordinal"], earlier["attempts"] + 1)
        line = self.taken.get(attempt)
        if line is not None and (taken := orjson.loads(line)["id"]) != source.id:
            raise CheckpointMismatch(
                f"Document {attempt[0]} of this task is {safe_repr(source.id)}, but a retry of "
                f"dead letters has {safe_repr(taken)} under this number: the input was changed "
                "since. Restore it.",
                starts_over="with old results",
            )
        return line

    def letter_or_raise(
        self,
        source: SourceDocument,
        slot: ChunkSlot,
        error: BaseException,
        payload_hashes: list[str],
        rejections: Sequence[RequestRejected],
    ) -> bytes:
        """Returns the document's dead letter, as a line of ``dead_letters.jsonl``.

        Args:
            error: what a rollout of the document raised.
            rejections: the requests of the document that the server has rejected.

        Raises:
            DocumentFailed, CkptError: this failure stops the rank.
            TooManyDeadLetters: this would be a dead letter beyond the limit.
        """
        # Perhaps of an error that gather has returned.
        if isinstance(error, DocumentNotSerializable):
            error = next(
                (cause for cause in causes(error) if isinstance(cause, InferenceError)), error
            )
        name = _named(source.id, slot)
        cause = f"{cause_of(error).rstrip('.: ')}{raised_at(error)}"
        is_letter = (
            self.step.on_document_error == "dead_letter"
            or (self.are_kept and any(map(_is_always_letter, causes(error))))
            or (self.step.skip_bad_requests and is_bad_request(error, rejections))
        )
        if isinstance(error, NotAwaitable) or not is_letter:
            self._stop(name, cause, error, source.document)
        self.dead += 1
        limit = self.step.max_dead_letters
        if limit is not None and self.dead > limit:
            raise TooManyDeadLetters(
                f"{plural(self.dead, 'document')} of this task failed, more than "
                f"max_dead_letters={limit} allows. The last one, {name}: {cause}. Fix the "
                "cause and run the same command again. When the task is finished, "
                "retry_dead_letters processes the dead letters again."
            ) from error
        logger.warning(f"D{name[1:]} becomes a dead letter: {cause}")
        return dead_letter(source, slot.ordinal, error, payload_hashes)

    def _stop(self, name: str, cause: str, error: BaseException, document: Document) -> NoReturn:
        if isinstance(error, CkptError) and not isinstance(error, UnexpectedExit | RequestError):
            raise error
        way, changes = _way_out(error)
        corrected = ""
        if self.are_kept and not self.step.accept_changes:
            corrected = correction(self.step.rollout_fn)
        if corrected:
            way += corrected
            changes.insert(0, _ACCEPTED)
        elif self.are_kept and any(isinstance(one, InvalidAnswer) for one in causes(error)):
            way = (
                "These answers are saved, too, so the same command fails again. "
                f"{_WITHOUT_SUCH} A new run drops them with invalid_answer: drop."
            )
            changes = [_AS_DEAD_LETTERS]
        message = f"D{name[1:]} failed: {cause}. The answers of other documents are saved. {way}"
        payload = None
        raised: str | BaseException = error
        if isinstance(error, InferenceError):
            payload = error.payload
            raised = error.error
        raise DocumentFailed(message, document, raised, payload, changes) from error


def _is_always_letter(cause: BaseException) -> bool:
    if isinstance(cause, BadAnswer):
        return not cause.is_dropped
    return isinstance(cause, RequestPoisoned)


def drops(error: BaseException) -> bool:
    """Returns whether bad answers that are dropped are all that a rollout raises.

    An error that the user's code makes of one is an error.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(drops, error.exceptions))
    cause = getattr(error, "error", None)
    return isinstance(cause, BadAnswer) and cause.is_dropped


_BAD_REQUEST = "BadRequestError"


def is_bad_request(error: BaseException, rejections: Sequence[RequestRejected]) -> bool:
    """Returns whether a rollout's error means that one of its requests was rejected.

    datatrove searches the whole text of an ``InferenceError``, payload included, for
    "BadRequestError". Here the word within a text counts only if the server has rejected a request
    of the document.
    """
    for cause in causes(error):
        if isinstance(cause, RequestRejected):
            return True
        text = safe_text(cause.error if isinstance(cause, InferenceError) else cause)
        if any(str(rejection) in text for rejection in rejections):
            return True
        begins = text.removeprefix("Got ").startswith(_BAD_REQUEST)  # as datatrove's own errors
        if isinstance(cause, InferenceError) and (begins or (rejections and _BAD_REQUEST in text)):
            return True
    return False


def _named(doc_id: str, slot: ChunkSlot) -> str:
    return f"document {safe_repr(doc_id)} (number {slot.ordinal} of this task)"


_ACCEPTED = {"accept_changes": True}
_AS_DEAD_LETTERS = {"on_document_error": "dead_letter"}
_WITHOUT_SUCH = (
    "To go on without such documents, as dead letters, set on_document_error to dead_letter."
)


def correction(rollout_fn: object) -> str:
    """Returns advice on correcting this rollout; "" for ready-made rollouts."""
    if type(rollout_fn).__module__ == InvalidAnswer.__module__:
        return ""
    return (
        f" If you change the code of the rollout {name_of(rollout_fn)} for that, set "
        "accept_changes: what is done and paid is kept, and the new code works on the documents "
        "that are not done."
    )


# As vLLM, SGLang, llama.cpp and OpenAI word it. The words only choose a hint.
_TOO_LONG = re.compile(
    r"(?:context.(?:length|size|window)|max(?:imum)?.(?:model|context|sequence|input).len"
    r"|exceed_context_size|longer than the (?:model|maximum))(?:\D{0,20}(\d+))?",
    re.IGNORECASE,
)

_PROMPT_TOKENS = re.compile(
    r"(\d+) (?:(?:tokens )?(?:in|from) (?:the|your) (?:input|messages|prompt)"
    r"|(?:input|prompt) tokens)"
)


_RUN_AGAIN = "Fix the cause and run the same command again."


def offer_skipping(error: BaseException) -> None:
    """Adds to the error how to continue without documents whose requests are rejected.

    Only for a rank that has answers: otherwise all its requests may be rejected.
    """
    rejected = any(isinstance(cause, RequestRejected) for cause in causes(error))
    if isinstance(error, DocumentFailed) and rejected:
        error.args += (
            " To go on without each document whose request is rejected, as a dead letter, set "
            "skip_bad_requests.",
        )
        error.changes = [{"skip_bad_requests": True}, *error.changes]


def _way_out(error: BaseException) -> tuple[str, list[Mapping[str, object]]]:
    """Returns what to do about a document that failed, and the settings that do it."""
    rejected = next((cause for cause in causes(error) if isinstance(cause, RequestRejected)), None)
    if rejected is None:
        if any(isinstance(cause, RequestFailed) for cause in causes(error)):
            return f"{_RUN_AGAIN} {_WITHOUT_SUCH}", [_AS_DEAD_LETTERS]
        return _RUN_AGAIN, []
    way = ""
    payload = getattr(error, "payload", None) or {}
    if too_long := _TOO_LONG.search(rejected.body):
        context = int(too_long[1] or 0)
        asked = max_tokens_of(payload)
        prompt = 1
        if found := _PROMPT_TOKENS.search(rejected.body):
            prompt = int(found[1])
        if asked + prompt > context > prompt:
            lower = min(context // 2, context - prompt)
            way = (
                f"max_tokens is {asked}, and the model's context, which holds the prompt, too, "
                f"{context}. To continue, lower it, to {lower} for example, and set accept_changes."
            )
            return way, [{"max_tokens": lower, **_ACCEPTED}]
        way = (
            "The prompt is longer than the model's context. ChunkedRollout splits long documents. "
        )
    if "schema" in rejected.body.lower() and "response_format" in payload:
        way = (
            "Correct the schema, and set accept_changes. A strict schema, as of OpenAI's API, "
            "requires each of its properties, with the type null if it may be missing, and has "
            "additionalProperties: false."
        )
        return way, [_ACCEPTED]
    fault = "If the server was at fault, correct it"
    if rejected.remembered:
        fault = "The server was not asked this time"
    way += f"{fault}; to send the request again, set retry_errors."
    return way, [{"retry_errors": True}]


def unanswered(doc_id: str, slot: ChunkSlot, error: CkptError, others: int) -> CkptError:
    """Returns the error that stops the rank after a server failed for a request of this
    document.

    Args:
        others: requests that were answered, if no further one could be.
    """
    document = _named(doc_id, slot)
    is_away = isinstance(error, ServerUnavailable)
    facts = str(error)
    if others and (is_away or (isinstance(error, ServerRefused) and error.status in OF_ONE_TEXT)):
        facts = f"{error.args[0]} {plural(others, 'other request')} had answers."
    elif is_away:
        return ServerUnavailable(f"{error} One of the requests that wait is that of {document}.")
    elif not isinstance(error, RequestFailed):
        return error
    message = (
        f"A request of {document} has no answer. {facts} This does not show that the document is "
        "at fault, so it makes no dead letter. If the server is, correct it, and run the same "
        "command again. To go on without this document, let the rollout return None for it before "
        "any request, and set accept_changes."
    )
    if isinstance(error, RequestFailed):
        return DocumentFailed(message, error=error, changes=[_ACCEPTED])
    error.args = (message,)
    error.changes = [_ACCEPTED]
    return error
