"""``answer``: the name under which the answers of a run are a column of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from datatrove.data import Document

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.errors.doors import ChangeSetting
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.rollouts.interface import FIELDS
from datatrove_ckpt.rollouts.settings import value_of


@dataclass(frozen=True)
class NamedAnswer:
    """Puts the answers of a document into its metadata, beside the whole results.

    Attributes:
        name: without one there is no such object, and the results replace what stands at
            ``metadata_key``, as datatrove's do.
        taken_by_columns: metadata keys that would replace the text or the id of a document in a
            table.
        value_of: what a result puts into the column.
    """

    name: str
    metadata_key: str
    taken_by_columns: Sequence[str]
    is_list: bool
    value_of: Callable[[object], object]

    @classmethod
    def of(cls, step: Step) -> NamedAnswer | None:
        if step.answer is None:
            return None
        return cls(
            step.answer,
            step.metadata_key,
            FIELDS if getattr(step.output_writer, "expand_metadata", False) else (),
            step.model.rollouts_per_document > 1,
            getattr(step.rollout_fn, "value_of", value_of),
        )

    def check(self, document: Document) -> None:
        """Raises ConfigError if the run would replace what a document holds."""
        names = {self.name: "answer", self.metadata_key: "metadata_key"}
        taken = [name for name in names if name in document.metadata]
        if taken:
            others = []
            for name in taken:
                numbered = (f"{name}_{number}" for number in count(2))
                other = next(each for each in numbered if each not in document.metadata)
                others.append(ChangeSetting(names[name], other).setting)
            raise ConfigError(
                f"{names[taken[0]]}: document {document.id!r} has {' and '.join(map(repr, taken))} "
                "in its metadata already, perhaps of an earlier run, and this run would replace "
                f"that. Give other names: {' and '.join(others)}."
            )

    def put(self, document: Document, results: Sequence[object]) -> None:
        """Puts the answers into the metadata, where a value that the rollout put there stays.

        Renames the keys of ``taken_by_columns``: ``text`` to ``metadata_text``.
        """
        metadata = document.metadata
        if self.name not in metadata:
            values = [self.value_of(result) for result in results]
            if self.is_list:
                metadata[self.name] = values
            else:
                metadata[self.name] = values[0]
        for name in self.taken_by_columns:
            if name in metadata:
                column = f"metadata_{name}"
                while column in metadata:
                    column = f"metadata_{column}"
                metadata[column] = metadata.pop(name)
