"""What a rollout asks, without a server."""

import asyncio

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult


def document(text="Rain falls.", **metadata):
    return Document(text=text, id="d1", metadata=metadata)


class Texts:
    """Gives these texts in turn, and remembers what it was asked."""

    def __init__(self, *texts, reason="stop"):
        self.texts = list(texts)
        self.reason = reason
        self.asked = []

    async def __call__(self, payload):
        self.asked.append(payload)
        return InferenceResult(self.texts.pop(0), self.reason, {"completion_tokens": 1})


def asked(rollout, given):
    """The one payload that a rollout sends."""
    model = Texts("")
    asyncio.run(rollout(given, model, anything_shared=1))
    (sent,) = model.asked
    return sent
