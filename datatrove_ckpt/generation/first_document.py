"""Checks a document before a server starts for it."""

from datatrove.data import Document

from datatrove_ckpt.config.templates import fill, lacks
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.rollouts import InvalidMedia, PromptRollout, ReadyMade
from datatrove_ckpt.rollouts.media import MEDIA
from datatrove_ckpt.rollouts.prompt_source import prompt_source


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
    """Encodes the media of the first document.

    Raises:
        ConfigError: a medium is invalid.
    """
    rollout_fn = step.rollout_fn
    if isinstance(rollout_fn, PromptRollout):
        try:
            async with rollout_fn.media_parts(document):
                pass
        except InvalidMedia as error:
            raise ConfigError(f"The first document, {document.id!r}: {error}.") from error


def check_answer(step: RunnerSettings, document: Document) -> None:
    """Raises ConfigError if the run would replace what a document holds."""
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
            f"{settings[names[0]]}: document {document.id!r} has {' and '.join(map(repr, names))} "
            "in its metadata already, perhaps of an earlier run, and this run would replace "
            f"that. Give other names: {' and '.join(map(' '.join, replacements.items()))}.",
            changes=[replacements],
        )
