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
from tests import golden

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


SGLANG_RANKING = golden.values("ranking_of_sglang", globals())


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


def scores(answer):
    parsed = typed_api("score", "/v1/x", 2).parse(json.dumps(answer).encode())
    return from_base64(parsed.answer["scores"]).tolist(), parsed.usage["prompt_tokens"]


def vectors(*values):
    return data(*({"index": at, "embedding": value} for at, value in enumerate(values)))


def tried(*arguments):
    try:
        return kept(*arguments)
    except RetryableError:
        return "an answer of another form is retried"


test_classes_scores_and_answers_of_another_form = golden.shows("typed_answers", globals())


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
