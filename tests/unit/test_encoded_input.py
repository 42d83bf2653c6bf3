"""Documents as read may hold anything.

Their fingerprints are stable, and those of JSON are what they always were.
"""

import datetime
import enum
import io
from dataclasses import dataclass

import numpy as np
import pytest
from datatrove.data import Document

from datatrove_ckpt.output.document_codec import as_read, decode, encode, fingerprint
from tests import golden


class Color(enum.Enum):
    RED = "red"


@dataclass
class Box:
    size: int
    content: object = None


class Decoder:
    """As ``datasets`` marks those of videos and sound."""

    def __init__(self, path, data):
        self._hf_encoded = {"path": path, "bytes": data}


def document(value):
    return Document(
        "text", "id", metadata={"before": 1, "value": value, "after": [None, {"x": 0.5}]}
    )


def shown(value):
    return decode(as_read(document(value)).data).metadata["value"]


def digest(value):
    return fingerprint(as_read(document(value)).data)


def image(color=7, mode="L", size=(3, 2)):
    pil = pytest.importorskip("PIL.Image")
    return pil.new(mode, size, color)


def opened(picture, kind):
    """The image as it comes from a file: not loaded yet."""
    data = io.BytesIO()
    picture.save(data, kind)
    return pytest.importorskip("PIL.Image").open(data)


# identity ----------------------------------------------------------------------------------------

NOW = datetime.datetime(2026, 11, 20, 3, 4, 5, 678, tzinfo=datetime.UTC)


@golden.rows("fingerprints")
def test_what_could_be_kept_always_has_the_fingerprint_that_it_always_had(code):
    """As version 0.1.0 wrote them into journals and commits."""

    def digest_of_kept(value):
        assert as_read(document(value)).data == encode(document(value))
        return digest(value)

    golden.show("fingerprints", code, {**globals(), "digest": digest_of_kept})


def differing():
    """Values that are equal for each kind if made twice, and differ from each other."""
    fortran = np.array([["a", None], [1, b"x"]], dtype=object, order="F")
    return {
        "images": (image(), image(8), image(mode="RGB"), image(size=(2, 3))),
        "arrays of objects": (fortran, fortran[:1], np.array([object], dtype=object)),
        "records": (np.zeros(2, dtype=[("a", "i4")]), np.ones(2, dtype=[("a", "i4")])),
        "decoders": (
            Decoder("a.mp4", None),
            Decoder("b.mp4", None),
            Decoder("a.mp4", b"x"),
            Decoder(None, b"y"),
        ),
        "inside": (
            {1: object()},
            Box(1, object()),
            [object()],
            {"a": image()},
            Box(2, image()),
            (Color.RED, image()),
        ),
    }


KINDS = ["images", "arrays of objects", "records", "decoders", "inside"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_equal_fingerprints_and_others_differ(kind):
    values, again = differing()[kind], differing()[kind]
    assert [digest(value) for value in values] == [digest(value) for value in again]
    assert len({digest(value) for value in values}) == len(values)


def test_an_image_is_its_pixels_however_it_came():
    picture = image()
    for kind in ("PNG", "BMP"):
        lazy = opened(picture, kind)
        assert digest(lazy).__class__ is str
        assert shown(lazy).split(" ", 1)[1] == shown(picture).split(" ", 1)[1]
    lazy = opened(picture, "PNG")
    before = digest(lazy)
    lazy.load()
    assert digest(lazy) == before
    assert shown(picture).startswith("<PIL.Image.Image L 3x2 ")


def test_a_decoder_without_bytes_counts_by_the_name_of_its_file_wherever_that_is_cached():
    assert digest(Decoder("/node1/cache/a.mp4", None)) == digest(Decoder("/node2/a.mp4", None))


def test_of_any_other_object_only_the_type_counts():
    class Any1:
        def __init__(self, value):
            self.value = value

    assert digest(Any1(1)) == digest(Any1(2))
    assert digest(Any1(1)) != digest(object())
    assert digest({object(), Color}) == digest({Color, object()})


# containers that hold themselves -----------------------------------------------------------------


def of_itself():
    value = {"list": ["x"] * 200}
    value["list"] += [value["list"], value]
    return value


def test_containers_that_hold_themselves_are_looked_at_once():
    data = as_read(document(of_itself())).data
    assert data == as_read(document(of_itself())).data
    assert len(data) < 20_000
    assert decode(data).id == "id"
