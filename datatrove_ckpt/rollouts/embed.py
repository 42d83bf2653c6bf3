"""Rollouts with other answers than texts: a vector, or the probabilities of labels."""

# No postponed annotations: the YAML loader evaluates them.

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from datatrove.data import Document

from datatrove_ckpt.common.setting_types import Count
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.templates import check_template
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import FIELDS, Generate, Payload
from datatrove_ckpt.rollouts.settings import WholeText


@dataclass
class _NoText(WholeText):
    prompt: str = "{text}"
    _: KW_ONLY
    params: Payload | None = None

    uses_chat = None
    _way: ClassVar[str]
    _set_elsewhere = (
        *WholeText._set_elsewhere,
        "input",
        "encoding_format",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.prompt)
        self._check_params("params", self.params)

    def _fit(self, config: InferenceConfig) -> None:
        lacks = config.engine.lacks(self._way)
        if lacks:
            raise ConfigError(f"{lacks}.", setting="rollout_fn")
        super()._fit(config)


@dataclass
class EmbedRollout(_NoText):
    """One embedding per document: the vector of its text.

    The result is ``{"embedding": vector}``, in float32. With ``column`` the vector is in the
    document's metadata, so that it can be a column of a table, and the result says its name and
    length.

    Attributes:
        prompt: the text that is embedded; a model's instruction stands here: ``"query: {text}"``.
        dimensions: numbers to keep of each vector, the first (Matryoshka).
        normalize: divide vectors by their length; one of zeros fails.
        column: metadata key of the vector.
        params: further payload keys.
        max_prompt_tokens: longest text, in tokens; the document's part is cut. "auto":
            ``model_max_context`` less 8.

    ``prompt_column``, ``tokenizer`` and ``chars_per_token`` are those of PromptRollout.

    Raises:
        ConfigError: a setting that cannot work; at the first document, if the model's vectors are
            shorter than ``dimensions``, or the document has a ``column`` of that name.
    """

    _: KW_ONLY
    dimensions: Count | None = None
    normalize: bool = False
    column: str | None = None

    _way = "embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.column in FIELDS:
            raise ConfigError(f"column: {self.column!r} is the document's own. Give another name.")

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        if self.column is not None and config.rollouts_per_document > 1:
            raise ConfigError("column: holds one vector, so rollouts_per_document must be 1.")

    async def __call__(
        self, document: Document, generate: Generate, **shared: object
    ) -> dict[str, object]:
        if self.column is not None and self.column in document.metadata:
            raise ConfigError(
                f"column: document {document.id!r} has metadata {self.column!r} already. Give "
                "another name."
            )
        vector = await generate.embed(
            await self._filled_text(self.prompt, document), **(self.params or {})
        )
        if self.dimensions is not None:
            if len(vector) < self.dimensions:
                raise ConfigError(
                    f"dimensions: is {self.dimensions}, but the model's vectors have {len(vector)} "
                    "numbers."
                )
            vector = vector[: self.dimensions]
        if self.normalize:
            length = np.linalg.norm(vector)
            if not length:
                raise ValueError(
                    f"normalize: the vector of document {document.id!r} is all zeros. To "
                    "continue, set on_document_error to dead_letter"
                )
            vector = vector / length
        if self.column is None:
            return {"embedding": vector}
        document.metadata[self.column] = vector
        return {"column": self.column, "dimensions": len(vector)}


@dataclass
class ClassifyRollout(_NoText):
    """The label that a classification model gives to each document.

    The result has ``label``, ``score`` (its probability) and ``scores`` (each label's).

    Attributes:
        prompt: the text that is classified.
        labels: names of the model's classes, in its order (``id2label``). None: servers name the
            best one only.
        keep: labels to look at.
        threshold: documents with a lower score are dropped.
        params: further payload keys.

    ``max_prompt_tokens`` is that of EmbedRollout; ``prompt_column``, ``tokenizer`` and
    ``chars_per_token`` are those of PromptRollout.

    Raises:
        ConfigError: a setting that cannot work; at the first document, if the model has other
            classes.
    """

    _: KW_ONLY
    labels: list[str] | None = None
    keep: list[str] | None = None
    threshold: float | None = None

    _way = "classify"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None:
            self._check_kept(self.labels)
            self._check_threshold(len(self.labels))

    def _check_kept(self, labels: Collection[str]) -> None:
        unknown = [label for label in self.keep or () if label not in labels]
        if unknown:
            advice = ""
            if self.labels is None:
                advice = " Servers name the best one only: set labels."
            raise ConfigError(
                f"keep: the model has no label {', '.join(unknown)}; it has "
                f"{', '.join(labels)}.{advice}"
            )

    def _check_threshold(self, classes: int) -> None:
        # A model with one class may give any number, as may models with such params.
        if (
            self.threshold is not None
            and classes > 1
            and not (0 <= self.threshold <= 1 or self.params)
        ):
            raise ConfigError(f"threshold: is {self.threshold!r}, and scores are from 0 to 1.")

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        text = await self._filled_text(self.prompt, document)
        answer = await generate.classify(text, self.labels, **(self.params or {}))
        label = answer.label
        score = answer.score
        scores = answer.scores
        if all(0 <= number <= 1 for number in scores.values()):
            self._check_threshold(len(scores))
        if self.keep is not None:
            self._check_kept(scores)
            scores = {name: scores[name] for name in self.keep}
            label = max(scores, key=scores.__getitem__)
            score = scores[label]
        # Servers calculate in float32: their 0.7 is 0.699999988.
        if self.threshold is not None and np.float32(score) < np.float32(self.threshold):
            return None
        return {"label": label, "score": score, "scores": scores}

    def value_of(self, result: object) -> object:
        return result["label"] if isinstance(result, dict) else result
