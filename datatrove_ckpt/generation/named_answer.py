"""``answer``: the name under which the answers of a run are a column of its output.

Without it, the results replace what stands at ``metadata_key``, as datatrove's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from datatrove.data import Document

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.rollouts.interface import FIELDS
from datatrove_ckpt.rollouts.settings import value_of


def check_answer(step: Step, document: Document) -> None:
    """Raises ConfigError if the run would replace what a document holds."""
    if step.answer is None:
        return
    names = {step.answer: "answer", step.metadata_key: "metadata_key"}
    taken = [name for name in names if name in document.metadata]
    if taken:
        others = {}
        for name in taken:
            numbered = (f"{name}_{number}" for number in count(2))
            other = next(each for each in numbered if each not in document.metadata)
            others[names[name]] = other
        raise ConfigError(
            f"{names[taken[0]]}: document {document.id!r} has {' and '.join(map(repr, taken))} "
            "in its metadata already, perhaps of an earlier run, and this run would replace "
            f"that. Give other names: {' and '.join(map(' '.join, others.items()))}.",
            changes=[others],
        )


def put_answer(step: Step, document: Document, results: Sequence[object]) -> None:
    """Puts the answers into the metadata, where a value that the rollout put there stays.

    Renames the keys that would replace a column of a table: ``text`` to ``metadata_text``.
    """
    if step.answer is None:
        return
    metadata = document.metadata
    if step.answer not in metadata:
        column_of = getattr(step.rollout_fn, "value_of", value_of)
        values = [column_of(result) for result in results]
        if step.model.rollouts_per_document > 1:
            metadata[step.answer] = values
        else:
            metadata[step.answer] = values[0]
    if getattr(step.output_writer, "expand_metadata", False):
        for name in FIELDS:
            if name in metadata:
                column = f"metadata_{name}"
                while column in metadata:
                    column = f"metadata_{column}"
                metadata[column] = metadata.pop(name)
