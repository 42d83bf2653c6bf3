"""Answers that are numbers, in the forms of all engines; a wrong one is never an array."""

import base64
import json

import numpy as np
import pytest

from datatrove_ckpt.common.redaction import HIDDEN, remember
from datatrove_ckpt.inference.client.responses import (
    RetryableError,
    from_base64,
    read_json,
    to_base64,
    typed_api,
)

VECTOR = [0.1, -2.5, 3e-8]
BASE64 = base64.b64encode(np.array(VECTOR, "<f4").tobytes()).decode()
USAGE = {"prompt_tokens": 7, "total_tokens": 7}


def kept(name, answer, count=1):
    raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    completion = typed_api(name, "/v1/x", count).parse(raw)
    assert (completion.text, completion.finish_reason) == ("", "stop")
    return completion.answer


def data(*rows, **more):
    return {"id": "x", "created": 5, "object": "list", "data": list(rows), "usage": USAGE, **more}


def results(*pairs):
    return {
        "results": [{"index": index, "relevance_score": score} for index, score in pairs],
        "usage": USAGE,
    }


SGLANG_RANKING = [
    {"score": 0.75, "index": 1, "meta_info": {"id": "a", "prompt_tokens": 3, "e2e_latency": 0.1}},
    {"score": 0.25, "index": 0, "meta_info": {"id": "b", "prompt_tokens": 4, "e2e_latency": 0.2}},
]


@pytest.mark.parametrize("vector", [VECTOR, BASE64])
def test_vectors_come_in_the_order_of_their_index_bit_for_bit(vector):
    other = [4, 5, 6]
    found = kept(
        "embed", data({"index": 1, "embedding": vector}, {"index": 0, "embedding": other}), 2
    )
    assert list(found) == ["embeddings"]
    arrays = [from_base64(text) for text in found["embeddings"]]
    assert arrays[0].tolist() == other
    assert arrays[1].dtype == np.float32
    assert arrays[1].tobytes() == np.array(VECTOR, np.float32).tobytes()
    assert found["embeddings"][1] == to_base64(arrays[1]) == BASE64
    arrays[1][0] = 9  # it is the user's


@pytest.mark.parametrize(
    "answer, expected",
    [
        (
            data({"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}),
            {"label": "good", "probabilities": [0.25, 0.75]},
        ),
        (
            data({"label": "a", "probs": [0.7, 0.3]}),
            {"label": "a", "probabilities": [0.7, 0.3]},
        ),
        (
            data({"index": 0, "label": None, "probs": [1]}),
            {"label": None, "probabilities": [1]},
        ),
    ],
)
def test_classes(answer, expected):
    assert kept("classify", answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        data({"index": 0, "score": 0.25}, {"index": 1, "score": 0.75}),
        data({"score": 0.25}, {"score": 0.75}),
        results((1, 0.75), (0, 0.25)),
        SGLANG_RANKING,
    ],
    ids=["vllm", "without an index", "llamacpp", "sglang"],
)
def test_scores(answer):
    assert from_base64(kept("score", answer, 2)["scores"]).tolist() == [0.25, 0.75]
    parsed = typed_api("score", "/v1/x", 2).parse(json.dumps(answer).encode())
    assert parsed.usage["prompt_tokens"] == 7


def vectors(*values):
    return data(*({"index": at, "embedding": value} for at, value in enumerate(values)))


WRONG = [
    *(
        ("embed", answer, 1)
        for answer in (b"", b"7", b"[1]", {}, {"error": "no"}, data(), data(7), data({"index": 0}))
    ),
    ("embed", vectors(VECTOR), 2),
    ("embed", vectors(VECTOR, VECTOR), 1),
    ("embed", vectors(VECTOR, VECTOR[:2]), 2),
    ("embed", data({"index": 1, "embedding": VECTOR}), 1),
    ("embed", data({"index": [], "embedding": VECTOR}), 1),
    ("embed", data({"index": 0, "embedding": VECTOR}, {"embedding": VECTOR}), 2),
    ("embed", b'{"data":[{"index":0,"embedding":[0.5,NaN]}]}', 1),
    ("embed", vectors([0.5, 1e300]), 1),
    ("embed", vectors([0.5, "1"]), 1),
    ("embed", vectors([0.5, True]), 1),
    ("embed", vectors([[0.5, 1.0], [0.5, 1.0]]), 1),
    ("embed", vectors([]), 1),
    ("embed", vectors(""), 1),
    ("embed", vectors("AAAA"), 1),
    ("embed", vectors("not base64!"), 1),
    ("embed", vectors(base64.b64encode(np.array([np.nan], "<f4").tobytes()).decode()), 1),
    ("classify", data({"index": 0, "label": 7, "probs": [0.5]}), 1),
    ("classify", data({"index": 0, "label": "a", "probs": []}), 1),
    ("score", data({"index": 0, "score": None}), 1),
    ("score", results((0, 1.0), (0, 1.0)), 2),
    ("score", {"results": [{"relevance_score": 0.75}, {"relevance_score": 0.25}]}, 2),
]


@pytest.mark.parametrize("name, answer, count", WRONG)
def test_an_answer_of_another_form_is_retried(name, answer, count):
    with pytest.raises(RetryableError):
        kept(name, answer, count)


@pytest.mark.parametrize(
    "answer, key",
    [
        ("<html>key\twith-a-tab", "key\twith-a-tab"),
        ('{"error": "clé-of-a-user"}', "clé-of-a-user"),
    ],
)
def test_a_secret_is_hidden_before_a_quoted_answer_is_escaped(answer, key):
    with pytest.raises(RetryableError) as failed:
        read_json(answer.encode())
    remember(key)
    failed.value.quote()
    assert HIDDEN in failed.value.cause
