"""Documents survive the journal with their types."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult
from hypothesis import given, settings
from hypothesis import strategies as st

from datatrove_ckpt.documents import decode, encode, fingerprint
from datatrove_ckpt.errors import DocumentNotSerializable


def through(value: Any) -> Any:
    return decode(encode(Document("text", "id", metadata={"value": value}))).metadata["value"]


class Color(enum.Enum):
    RED = "red"


NOW = datetime.datetime(2026, 11, 20, 3, 4, 5, 678, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        1.5,
        '"$py":',
        NOW,
        NOW.date(),
        NOW.time(),
        b"\x00\xff",
        decimal.Decimal("1.10"),
        pytest.param({"a", "b"}, id="a set"),  # its repr is another one in each process
        1 + 2j,
        {"$py": ["datetime", "not a date"]},
        {"$py": 1, "other": NOW},
        {1: "a key that is no string", "b": [None, {"c": b"x"}]},
        InferenceResult("text", "stop", {"prompt_tokens": 1, "details": None}, "why"),
        [InferenceResult("text", "stop", {})],
        Media("m", 1, "u", media_bytes=b"x"),
        *(np.float32(0.1), np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("s")),
        np.datetime64("2026-11-20T01:02:03"),
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("value", [np.arange(6).reshape(2, 3), np.zeros(0), np.asfortranarray(np.eye(2, dtype="f2"))])
def test_a_numpy_array_keeps_shape_and_type(value: Any) -> None:
    back = through([value])[0]
    np.testing.assert_array_equal(back, value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    back += 1  # and can be written to


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_what_json_would_turn_into_null_is_kept(value: float) -> None:
    back = through({"x": [value, None]})["x"]
    assert repr(back) == repr([value, None])


def test_what_json_can_say_as_well_becomes_that() -> None:
    class Text(str):
        pass

    assert through([Color.RED, Path("a/b"), (1, 2), Text("x")]) == ["red", "a/b", [1, 2], "x"]


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(DocumentNotSerializable, match=r"'id' holds .*<object object .* of type object"):
        through({"deep": [object()]})
    with pytest.raises(DocumentNotSerializable, match="array of type object"):
        through(np.array([object()]))
    with pytest.raises(DocumentNotSerializable):
        encode(Document("lone surrogate \ud800", "id"))


def test_media_come_back_as_media() -> None:
    document = Document("t", "i", media=[Media("m", 0, "u", media_bytes=b"\xff", metadata={"w": np.int32(3)})])
    assert decode(encode(document)) == document


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")) | st.just("$py"), inner),
    max_leaves=20,
)


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8")), st.dictionaries(st.text(st.characters(codec="utf-8")), plain))
def test_any_plain_document_comes_back_equal(text: str, metadata: dict[str, Any]) -> None:
    document = Document(text, "id", metadata=metadata)
    assert decode(encode(document)) == document
    assert b"\n" not in encode(document)
    assert fingerprint(encode(document)) == fingerprint(encode(decode(encode(document))))


@pytest.mark.parametrize("metadata", [{}, {1: "a key that is no string"}, {"nan": math.nan}])
def test_an_encoded_document_takes_the_room_of_its_bytes(metadata: dict[Any, Any]) -> None:
    document = Document("x" * 100_000, "id", metadata=metadata)
    tracemalloc.start()
    try:
        data = encode(document)
        assert tracemalloc.get_traced_memory()[0] < 1.1 * len(data)
    finally:
        tracemalloc.stop()
