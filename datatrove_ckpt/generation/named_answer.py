"""``answer``: the name under which the answers of a run are a column of its output.

Without it, the results replace what stands at ``metadata_key``, as datatrove's do. With ``explode``
the column is a list, of which ``output`` makes rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import orjson
from datatrove.data import Document

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.rollouts.answers import FENCE
from datatrove_ckpt.rollouts.interface import FIELDS
from datatrove_ckpt.rollouts.settings import value_of


def check_answer(step: Step, document: Document) -> None:
    """Raises ConfigError if the run would replace what a document holds."""
    if step.answer_column is None:
        return
    names = {step.answer_column: "answer", step.metadata_key: "metadata_key"}
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


def put_answer(step: Step, document: Document, results: Sequence[object]) -> bool:
    """Puts the answers into the metadata, where a value that the rollout put there stays. Returns
    False if nothing is to be written: there are no items.

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
    """Returns the items of a list, or of a text that is one in JSON; else the value alone."""
    if isinstance(value, str):
        text = value.strip()
        fenced = FENCE.fullmatch(text)
        if fenced:
            text = fenced[1].strip()
        if text.startswith("["):
            with suppress(orjson.JSONDecodeError):
                value = orjson.loads(text)
    if isinstance(value, list | tuple):
        return value
    return [value]
