"""The methods of ``generate``: embed, classify, score, rerank, tokenize. ``rollouts.Generate`` documents them.

Each is one request, or one for each text, of a way that the engine has (``Engine.ways``). So cache, retries, counters
and errors are those of any request: what is here makes payloads of arguments, and values of answers. The methods are no
coroutine functions: arguments that can't be right stop the rank when it is still known who has called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import numpy as np

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.answers import JsonObject, Way
from datatrove_ckpt.inference.client.typed_answers import Floats, from_base64, typed_way
from datatrove_ckpt.output.documents import Result
from datatrove_ckpt.rollouts import Classification, Payload, Ranked

T = TypeVar("T")
Asked: TypeAlias = Coroutine[object, None, T]


class Ways:
    """The base class of a ``generate``."""

    _config: InferenceConfig

    def _answered(self, payload: Payload, way: Way) -> Asked[Result]:
        """Sends one request. A subclass does it."""
        raise NotImplementedError

    def _refused(self, wrong: str) -> Asked[NoReturn]:
        """Stops the rank with a ConfigError. A subclass does it."""
        raise NotImplementedError

    def embed(self, texts: str | Sequence[str], /, **params: object) -> Asked[Floats]:
        wrong = self._wrong("embed", texts) if isinstance(texts, str) else self._wrong("embed", texts=texts)
        return self._refused(wrong) if wrong else self._embed(texts, params)

    def classify(self, text: str, /, labels: Sequence[str] | None = None, **params: object) -> Asked[Classification]:
        wrong = self._wrong("classify", text)
        return self._refused(wrong) if wrong else self._classify(text, labels, params)

    def score(self, query: str, texts: Sequence[str], /) -> Asked[Floats]:
        wrong = self._wrong("score", query, texts)
        return self._refused(wrong) if wrong else self._score(query, list(texts))

    def rerank(self, query: str, texts: Sequence[str], /, top_n: int | None = None) -> Asked[list[Ranked]]:
        wrong = self._wrong("rerank", query, texts)
        if not wrong and top_n is not None and (type(top_n) is not int or top_n < 1):
            wrong = f"generate.rerank takes a top_n of at least 1, and not {top_n!r}"
        return self._refused(wrong) if wrong else self._rerank(query, list(texts), top_n)

    def tokenize(self, text: str, /) -> Asked[list[int]]:
        wrong = self._wrong("tokenize", text)
        return self._refused(wrong) if wrong else self._tokenize(text)

    async def _embed(self, texts: str | Sequence[str], params: Mapping[str, object]) -> Floats:
        if isinstance(texts, str):
            return from_base64((await self._ask("embed", (texts,), params))["embeddings"][0])
        asked = [self._ask("embed", (text,), params) for text in texts]
        # All of them, also if one fails: the request cache has the others when the document is retried.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        vectors = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            vectors.append(from_base64(answer["embeddings"][0]))
        return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    async def _classify(self, text: str, labels: Sequence[str] | None, params: Mapping[str, object]) -> Classification:
        answer = await self._ask("classify", (text,), params)
        label, scores = answer["label"], answer["probabilities"]
        best = max(range(len(scores)), key=scores.__getitem__)
        if labels is not None and len(labels) != len(scores):
            await self._refused(f"generate.classify has {len(labels)} labels, and the model has {len(scores)} classes")
        if labels is None:
            unnamed = "LABEL_" if label == f"LABEL_{best}" else ""
            labels = [f"{unnamed}{index}" for index in range(len(scores))]
            label = label or labels[best]
        else:
            if label not in ("", f"LABEL_{best}", labels[best]):
                await self._refused(
                    f"generate.classify: label {best} is {labels[best]!r}, but the model says {label!r}"
                )
            label = labels[best]
        return Classification(label, scores[best], dict(zip(labels, scores, strict=True)))

    async def _score(self, query: str, texts: list[str]) -> Floats:
        if not texts:
            return np.empty(0, np.float32)
        return from_base64((await self._ask("score", (query, texts), {}, count=len(texts)))["scores"])

    async def _rerank(self, query: str, texts: list[str], top_n: int | None) -> list[Ranked]:
        if not texts:
            return []
        answer = await self._ask("rerank", (query, texts, top_n), {}, count=len(texts), best=top_n)
        return [Ranked(index, score) for index, score in answer["ranking"]]

    async def _tokenize(self, text: str) -> list[int]:
        tokens: list[int] = (await self._ask("tokenize", (text,), {}))["tokens"]
        return tokens

    async def _ask(
        self, name: str, values: tuple[object, ...], params: Mapping[str, object], **asked: int | None
    ) -> JsonObject:
        """What ``typed_answers`` keeps of the answer. ``asked``: see ``typed_way``."""
        to = self._config.engine.ways[name]
        result = await self._answered(to.payload(values, params), typed_way(name, to.path, **asked))
        assert result.answer is not None
        return result.answer

    def _wrong(self, name: str, text: object = "", texts: object = ()) -> str:
        """Why no such request can be right; "" if it can."""
        engine = self._config.engine
        if lacks := engine.lacks(name):
            return lacks
        if isinstance(texts, str):
            return f"generate.{name} takes a list of texts, and not one text"
        for each in [text, *(texts if isinstance(texts, Sequence) else [texts])]:
            if not isinstance(each, str):
                return f"generate.{name} takes texts, and not a {type(each).__name__}"
        return ""
