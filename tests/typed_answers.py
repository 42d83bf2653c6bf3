"""A server of embeddings, scores and classes."""

import hashlib
import struct
from base64 import b64encode

import numpy as np

from datatrove_ckpt import Classification
from tests.jobs import texts_of

DIMENSIONS = 4


def vector_of(text):
    """Of float32 values that need all their digits."""
    digits = hashlib.shake_128(text.encode()).digest(4 * DIMENSIONS)
    return [number / 2**31 for (number,) in struct.iter_unpack("<i", digits)]


def embeddings(payload):
    texts = texts_of(payload)
    data = [{"index": at, "embedding": vector_of(text)} for at, text in enumerate(texts)]
    if payload.get("encoding_format") == "base64":
        for row in data:
            row["embedding"] = b64encode(np.array(row["embedding"], "<f4").tobytes()).decode()
    tokens = sum(map(len, texts))
    return {
        "id": "e",
        "created": 1,
        "data": data[::-1],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def score_of(query, text):
    return vector_of(query + text)[0]


def scores(payload):
    return {
        "data": [
            {"index": i, "score": score_of(payload["text_1"], t)}
            for i, t in enumerate(payload["text_2"])
        ]
    }


def ranking(payload):
    found = [(score_of(payload["query"], text), at) for at, text in enumerate(payload["documents"])]
    found = sorted(found, reverse=True)
    return {"results": [{"index": at, "relevance_score": score} for score, at in found]}


def classes(payload):
    return {"data": [{"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}]}


PATHS = {
    "/v1/embeddings": embeddings,
    "/classify": classes,
    "/v1/classify": classes,
    "/score": scores,
    "/v1/rerank": ranking,
}


TEXTS = ["one", "two", "three"]


async def all_ways(document, generate):
    """Each of them once, and what it must give."""
    text = document.text
    both = await generate.embed([text, "two"])
    assert both.dtype == np.float32
    assert both.shape == (2, DIMENSIONS)
    one = await generate.embed(text, dimensions=DIMENSIONS)
    assert one.shape == (DIMENSIONS,)
    assert one.tobytes() == both[0].tobytes() == np.array(vector_of(text), np.float32).tobytes()
    assert (await generate.embed([])).shape == (0, 0)
    fits = await generate.score(text, TEXTS)
    assert fits.dtype == np.float32
    assert fits.tolist() == np.array([score_of(text, each) for each in TEXTS], np.float32).tolist()
    assert (await generate.score(text, [])).shape == (0,)
    named = await generate.classify(text, labels=["bad", "good"])
    assert named == Classification("good", 0.75, {"bad": 0.25, "good": 0.75})
    assert await generate.classify(text) == Classification("good", 0.75, {"0": 0.25, "1": 0.75})
    document.metadata["vector"] = one
    return {"both": both, "class": named, "text": text}
