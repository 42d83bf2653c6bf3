"""Documents survive the journal with their types, and our adapter returns what datatrove's default
one returns.
"""

import datetime
import decimal
import enum
import io
import math
from pathlib import Path

import numpy as np
import orjson
import pytest
from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.output.document_codec import (
    decode,
    decode_for,
    decode_json,
    decode_plain,
    decode_rows,
    encode,
    encode_finished,
    exploded,
    fingerprint,
    has_default_adapter,
    is_plain,
    line_of,
    write_for,
)
from datatrove_ckpt.output.file_names import FileNames
from tests import golden
from tests.unit.tables import plain, texts


def through(value):
    return decode(encode(Document("text", "id", metadata={"value": value}))).metadata["value"]


class Color(enum.Enum):
    RED = "red"


RESULT = InferenceResult(
    "answer", "stop", {"prompt_tokens": 1, "details": {"cached": 0}}, "because"
)
NOW = datetime.datetime(
    2026, 11, 20, 3, 4, 5, 678, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
)


@golden.rows("values")
def test_a_value_comes_back_equal_and_of_its_type(code):
    value = eval(code)
    back = through(value)
    golden.hold("values", code, type(back).__name__)
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    "value", [np.arange(6).reshape(2, 3), np.zeros(0), np.asfortranarray(np.eye(2, dtype="f2"))]
)
def test_a_numpy_array_keeps_shape_and_type(value):
    back = through([value])[0]
    np.testing.assert_array_equal(back, value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    back += 1  # and can be written to


@pytest.mark.parametrize("value", golden.values("nulls_of_json", globals()))
def test_what_json_would_turn_into_null_is_kept(value):
    back = through({"x": [value, None]})["x"]
    assert repr(back) == repr([value, None])


def test_a_value_is_the_same_beside_one_that_json_cannot_say():
    """True was 1 there; nanoseconds and an empty text of numpy were lost anywhere."""
    import pandas as pd

    time = pd.Timestamp("2020-01-01T00:00:00.123456789+02:00")
    values = [True, False, 1, "x", time, np.str_("")]
    for beside in (None, math.nan, 2**70, {1: 2}, {"$py": 1}):
        assert repr(through([*values, beside])[:-1]) == repr([True, False, 1, "x", time, ""])


TIME = NOW.timetz()
DECIMALS = map(decimal.Decimal, ("1E+80", "NaN", "1" * 77))
USUAL_VALUES = [TIME.replace(tzinfo=None), decimal.Decimal("-1.5"), datetime.timedelta(-(10**7))]
USUAL_VALUES += [np.float32(0.5), np.int64(1), np.arange(3.0), np.ones((2, 2), np.float32)]
USUAL_VALUES += [b"x", NOW, NOW.date(), math.nan]
ODD_VALUES = [{1}, 1j, 2**70, {1: 2}, TIME, np.array(1.0), datetime.timedelta.max, *DECIMALS]


@pytest.mark.parametrize("values, is_usual", [(USUAL_VALUES, True), (ODD_VALUES, False)])
def test_of_the_values_of_tables_only_those_without_a_type_need_a_trial(values, is_usual):
    for value in values:
        data = encode(Document("text", "id", metadata={"value": [value], "result": RESULT}))
        assert is_plain(data, with_usual=True) is is_usual
        assert not is_plain(data)


def test_what_json_can_say_as_well_becomes_that():
    class Text(str):
        pass

    assert through([Color.RED, Path("a/b"), (1, 2), Text("x")]) == ["red", "a/b", [1, 2], "x"]


def test_what_cannot_be_kept_is_named():
    with pytest.raises(
        DocumentNotSerializable, match=r"'id' holds .*<object object .* of type object"
    ):
        through({"deep": [object()]})
    with pytest.raises(DocumentNotSerializable, match="array of type object"):
        through(np.array([object()]))
    with pytest.raises(DocumentNotSerializable):
        encode(Document("lone surrogate \ud800", "id"))


@settings(max_examples=12)
@given(texts, st.dictionaries(texts, plain, max_size=4))
def test_any_plain_document_comes_back_equal(text, metadata):
    document = Document(text, "id", metadata=metadata)
    assert decode(encode(document)) == document
    assert b"\n" not in encode(document)
    assert fingerprint(encode(document)) == fingerprint(encode(decode(encode(document))))


# Our adapter returns what datatrove's default one returns, value for value and key for key -------


DOCUMENTS = golden.named("documents", globals())


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("expand_metadata", [False, True])
@pytest.mark.parametrize("save_media_bytes", [False, True])
@pytest.mark.parametrize("writer_class", [JsonlWriter, ParquetWriter])
def test_it_returns_what_the_default_one_returns(
    tmp_path, name, expand_metadata, save_media_bytes, writer_class
):
    writer = writer_class(
        str(tmp_path),
        "${rank}",
        None,
        expand_metadata=expand_metadata,
        save_media_bytes=save_media_bytes,
    )
    data = encode(DOCUMENTS[name])
    expected = writer.adapter(decode(data))
    assert decode_for(writer) is (decode_json if writer_class is JsonlWriter else decode_rows)
    given = writer.adapter(decode_plain(data))
    assert repr(given) == repr(expected)  # also the order of keys and the types of values
    assert not has_default_adapter(writer)


def test_bytes_of_numpy_are_base64_in_json_lines():
    data = encode(Document("text", "id", metadata={"v": np.bytes_(b"\xff")}))
    assert decode_json(data).metadata == {"v": "/w=="}


def test_a_row_of_an_adapter_is_converted_only_if_orjson_lacks_a_value(tmp_path):
    row = {"ids": [1, 2], "day": datetime.date(2024, 1, 1), "media": [{"media_bytes": b"\xff"}]}
    writer = JsonlWriter(str(tmp_path), "${rank}", None, lambda writer, document: row)
    decode_for(writer)
    assert writer.adapter(Document("text", "id")) is row
    row["ids"] = [b"\xff"]
    assert writer.adapter(Document("text", "id")) == row | {"ids": ["/w=="]}


KEY = "rollout_results"
results = st.builds(
    InferenceResult, texts, st.none() | st.just("stop"), st.dictionaries(texts, plain), st.none()
)
USUAL = [
    RESULT,
    InferenceResult("", None, {"prompt_tokens": 2, "details": None}),
    InferenceResult("$results", "stop", {}),
]
UNUSUAL = golden.values("unusual_documents", globals())


def finished_document(text="text", id="id", found=USUAL, metadata=None, media=()):
    return Document(text, id, [*media], {**(metadata or {}), KEY: found})


def check_finished(document):
    """It comes back as it was, and the line that is known of it is that of datatrove's writer."""
    data = encode_finished(document, KEY)
    assert repr(decode(data)) == repr(decode(encode(document)))
    assert repr(decode_plain(data)) == repr(decode_plain(encode(document)))
    for expands in (False, True):
        if (line := line_of(data, expands)) is not None:
            written = io.BytesIO()
            writer = JsonlWriter("unused", "${rank}", None, expand_metadata=expands)
            writer._write(writer.adapter(document), written, "")
            assert line == written.getvalue()
            assert is_plain(data)
    return data


@settings(max_examples=12)
@given(
    texts,
    st.lists(results, max_size=3),
    st.dictionaries(texts | st.sampled_from(["$py", "text", "metadata"]), plain, max_size=4),
)
def test_the_line_of_a_finished_document_is_what_the_writer_writes(text, found, metadata):
    check_finished(finished_document(text, found=found, metadata=metadata))


@pytest.mark.parametrize(
    "metadata", [{}, {"none": None, "$results": "x", "metadata": {}, "x": 'of ,"$results":"y"}'}]
)
def test_of_a_usual_document_the_line_is_known(metadata):
    assert line_of(check_finished(finished_document("text null", metadata=metadata)))


@pytest.mark.parametrize("fields", UNUSUAL)
def test_of_any_other_document_it_is_not(fields):
    assert line_of(check_finished(finished_document(**fields))) is None


def test_a_finished_document_is_checked_like_any_other():
    with pytest.raises(DocumentNotSerializable, match="its text is of type list"):
        encode_finished(finished_document(["text"]), KEY)


def test_a_writer_with_names_of_its_own_gets_each_document(tmp_path):
    class Named(JsonlWriter):
        def _get_output_filename(self, document, *rank, **fields):
            return f"{document.id}.jsonl"

    writer = Named(str(tmp_path), "${rank}_${chunk_index}", None)
    write = write_for(writer, decode_for(writer), FileNames(writer, 0), 0)
    for name in ("a", "b"):
        write(encode_finished(finished_document(id=name), KEY))
    assert set(writer.output_mg.get_open_files()) == {"a.jsonl", "b.jsonl"}


def test_other_adapters_are_left_alone(tmp_path):
    class Own(JsonlWriter):
        def _default_adapter(self, document):
            return {"own": document.id}

    def adapter(self, document):
        return {"given": document.id}

    for writer in (
        Own(str(tmp_path), "${rank}", None),
        JsonlWriter(str(tmp_path), "${rank}", None, adapter=adapter),
    ):
        before = writer.adapter(DOCUMENTS["text only"])
        assert decode_for(writer) is decode
        assert writer.adapter(DOCUMENTS["text only"]) == before


def test_each_row_of_a_document_has_its_media_as_they_were():
    """A writer that saves media changes those of the row that it has."""
    picture = Media("0", 0, "a.png", media_bytes=b"png")
    found = []
    document = Document("t", "i", [picture], {"item": ["a", "b"], "results": [1]})
    for row in exploded(document, column="item", key="results"):
        found.append((row.id, row.media[0].media_bytes, row.metadata))
        row.media[0].media_bytes = None
    assert found == [
        ("i/0", b"png", {"results": [1], "n": 0, "item": "a"}),
        ("i/1", b"png", {"n": 1, "item": "b"}),
    ]


def test_json_lines_hold_pictures_beside_what_json_lacks(tmp_path):
    """The second try of the row encoded them again."""
    writer = JsonlWriter(str(tmp_path), "${rank}", None, save_media_bytes=True)
    write = write_for(writer, decode_for(writer), FileNames(writer, 0), 0)
    write(encode(DOCUMENTS["media"]))
    writer.close()
    row = orjson.loads((tmp_path / "00000").read_bytes())
    assert [one["media_bytes"] for one in row["media"]] == ["/w==", None]
    assert row["metadata"]["inside"]["media_bytes"] == "AQ=="


def test_media_that_are_no_list_are_refused_in_a_sentence():
    result = InferenceResult(text="a", finish_reason="stop", usage={})
    document = Document("text", "id", metadata={"rollout_results": [result]})
    document.media = np.array([1, 2])
    with pytest.raises(DocumentNotSerializable, match="'id' holds a value that cannot be kept"):
        encode_finished(document, "rollout_results")
