"""Puts the results of rollouts into documents, and encodes these for the journal. Checks the first
document before a server starts for it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson
from datatrove.data import Document, Media
from loguru import logger

from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.config.templates import fill, lacks
from datatrove_ckpt.errors import ConfigError, DocumentNotSerializable
from datatrove_ckpt.generation.requests import DocumentAnswers
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.user_rollout import name_of
from datatrove_ckpt.output.chunk_writing import WriterTrial
from datatrove_ckpt.output.document_codec import encode_finished, writes_media
from datatrove_ckpt.output.file_names import FileNames
from datatrove_ckpt.rollouts import InferenceResult, InvalidMedia, PromptRollout, ReadyMade
from datatrove_ckpt.rollouts.interface import FIELDS
from datatrove_ckpt.rollouts.media import MEDIA
from datatrove_ckpt.rollouts.settings import FENCE, prompt_source, value_of

DROPPED = b"null"


@dataclass(eq=False)
class ResultEncoder:
    """Puts results into documents, and encodes them.

    Args:
        trial: tries the writer; None without a checkpoint, where a document that fails is lost
            anyway.
    """

    _step: RunnerSettings
    names: FileNames
    _trial: WriterTrial | None

    def __post_init__(self) -> None:
        step = self._step
        self._has_media = writes_media(step.output_writer)
        self.key = step.metadata_key
        self._keeps_results = step.rollout_results
        self._column = step.answer_column
        self._added = step.added_columns
        self._drop_sent = getattr(step.rollout_fn, "drop_sent", None)

    def look_at_first(self, document: Document) -> None:
        step = self._step
        check_first(step, document)
        if self._keeps_results and step.metadata_key in document.metadata:
            logger.warning(
                f"The documents have {step.metadata_key!r} in their metadata already; the new "
                "results replace it. To keep both, give another metadata_key."
            )

    def check(self, document: Document) -> None:
        if self._column is not None or self._added:
            check_answer(self._step, document)

    def check_returned(self, document: Document, results: list[object]) -> None:
        """Checks that a rollout has put no other value into the answers' column than it returned.

        It may put a part of a whole answer there. Ready-made rollouts know their column.

        Raises:
            DocumentNotSerializable: the returned value would have no column.
        """
        column = self._column
        if column not in document.metadata:
            return
        rollout_fn = self._step.rollout_fn
        if hasattr(rollout_fn, "value_of"):
            return
        current = repr(document.metadata[column])
        is_whole = all(isinstance(result, InferenceResult | None) for result in results)
        if not is_whole and current not in (repr(results), *map(repr, results)):
            raise DocumentNotSerializable(
                f"The rollout {name_of(rollout_fn)} has set metadata[{column!r}], where its "
                "result belongs. Use another key."
            )

    def encode(self, document: Document, results: list[object], answers: DocumentAnswers) -> bytes:
        """Returns the document with its results; ``DROPPED`` if it has none.

        Raises:
            DocumentNotSerializable: the document, or a result, cannot be written.
        """
        if self._added:  # columns of ``quality`` and endpoints; values of an old output stay
            values = answers.added()
            for ending, name in self._added.items():
                document.metadata.setdefault(name, values[ending])
        if not self._has_media:
            self._drop_media(document)
        if self._keeps_results:
            document.metadata[self.key] = results
        if not results:
            return DROPPED
        if self._column is not None and not put_answer(self._step, document, results):
            return DROPPED
        self.names.check(document, answers.slot.chunk.index)
        return encode_finished(document, self.key)

    def is_doubtful(self, data: bytes) -> bool:
        return self._trial is not None and self._trial.is_needed(data)

    async def try_writer(self, data: bytes, doc_id: str) -> None:
        assert self._trial is not None
        if self._trial.is_quick:
            self._trial(data, doc_id)
        else:
            await asyncio.to_thread(self._trial, data, doc_id)

    def _drop_media(self, document: Document) -> None:
        """Removes media that the writer does not save: 10 MB of pixels are 13 MB of JSON."""
        for medium in document.media or ():
            if isinstance(medium, Media):
                medium.media_bytes = None
            elif isinstance(medium, dict) and medium.get("media_bytes") is not None:
                medium["media_bytes"] = None
        if self._drop_sent is not None:
            self._drop_sent(document)


def put_answer(step: RunnerSettings, document: Document, results: Sequence[object]) -> bool:
    """Puts the answers into the metadata, unless the rollout has put a value there. Returns False
    if there are no items to write.

    Renames the keys that would replace a column of a table: ``text`` to ``metadata_text``.
    """
    name = step.answer_column
    if name is None:
        return True
    metadata = document.metadata
    has_many = step.model.rollouts_per_document > 1
    if name not in metadata:
        column_of = getattr(step.rollout_fn, "value_of", value_of)
        values = [column_of(result) for result in results]
        if has_many:
            metadata[name] = values
        else:
            metadata[name] = values[0]
    if step.explode:
        values = metadata[name] if has_many else [metadata[name]]
        metadata[name] = [item for value in values for item in _items(value)]
    if getattr(step.output_writer, "expand_metadata", False):
        for field in FIELDS:
            if field in metadata:
                column = f"metadata_{field}"
                while column in metadata:
                    column = f"metadata_{column}"
                metadata[column] = metadata.pop(field)
    return not step.explode or bool(metadata[name])


def _items(value: object) -> Sequence[object]:
    if isinstance(value, str):
        text = value.strip()
        fenced = FENCE.fullmatch(text)
        if fenced:
            text = fenced[1].strip()
        if text.startswith("["):
            with suppress(orjson.JSONDecodeError):
                value = loads(text.encode(errors="surrogatepass"))
    if isinstance(value, list | tuple):
        return value
    return [value]


# a document before a server starts for it ---------------------------------------------------------


def check_first(step: RunnerSettings, document: Document) -> None:
    """Checks the first document.

    Raises:
        ConfigError: ``check_answer`` refuses it; or it lacks a field that the prompt of a
            ready-made rollout needs, and that stops the run.
    """
    check_answer(step, document)
    rollout_fn = step.rollout_fn
    is_ready_made = type(rollout_fn).__module__ == ReadyMade.__module__
    if step.on_document_error == "stop" and isinstance(rollout_fn, ReadyMade) and is_ready_made:
        prompt_source(document, rollout_fn.prompt_column)
        fill(getattr(rollout_fn, rollout_fn.first_template), document, "")
        images = getattr(rollout_fn, "images", None)
        if images not in (None, MEDIA, *document.metadata):
            raise lacks(document, "images", images)


async def try_media(step: RunnerSettings, document: Document) -> None:
    rollout_fn = step.rollout_fn
    if isinstance(rollout_fn, PromptRollout):
        try:
            async with rollout_fn.media_parts(document):
                pass
        except InvalidMedia as error:
            raise ConfigError(f"The first document, {document.id!r}: {error}.") from error


def check_answer(step: RunnerSettings, document: Document) -> None:
    owner = "metadata_key" if step.answer_column is None else "answer"
    settings = dict.fromkeys(step.added_columns.values(), owner)
    if step.answer_column is not None:
        settings[step.answer_column] = "answer"
        if step.rollout_results:
            settings[step.metadata_key] = "metadata_key"
    names = [name for name in settings if name in document.metadata]
    if names:
        current = {"answer": step.answer_column, "metadata_key": step.metadata_key}
        replacements = {
            setting: f"{current[setting]}_2" for setting in map(settings.__getitem__, names)
        }
        raise ConfigError(
            f"{settings[names[0]]}: document {document.id!r} has "
            f"{' and '.join(map(repr, names))} in its metadata already. Give other names: "
            f"{' and '.join(map(' '.join, replacements.items()))}.",
            changes=[replacements],
        )
