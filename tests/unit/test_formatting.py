"""Numbers and errors as people read them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from datatrove_ckpt.formatting import byte_size, duration, error_text, missing_package, number_range, plural


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.000214, "0.21 ms"), (0.0131, "13.1 ms"), (1.0, "1 s"), (6.57, "6.6 s"), (100, "100 s"), (127, "2.1 min"),
     (5400, "1.5 h"), (6 * 3600, "6 h"), (3 * 86400, "3 d"), (0, "0 ms"), (0.12, "0.12 s")],
)  # fmt: skip
def test_durations_are_written_as_people_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (65536, "64 kB"), (3 * 2**29, "1.5 GB"), (2**42, "4 TB")])
def test_sizes_too(size: float, text: str) -> None:
    assert byte_size(size) == text


def test_a_noun_agrees_with_its_number() -> None:
    assert [plural(number, "chunk") for number in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]


def test_a_range_of_one_number_is_that_number() -> None:
    assert (number_range(7, 8), number_range(7, 10)) == ("7", "7 to 9")


def test_an_error_is_its_class_and_message_so_that_a_sentence_can_go_on() -> None:
    assert error_text(ValueError("no such thing.")) == "ValueError: no such thing"
    assert error_text(KeyError()) == "KeyError"


def test_a_missing_package_is_named_with_our_extra() -> None:
    assert missing_package("Install ray to use it") == (
        "the Python package 'ray' is not installed. Run: pip install 'datatrove-ckpt[ray]'."
        if find_spec("ray") is None
        else None
    )
    assert missing_package("cannot import name 'x' from 'pyarrow'") is None  # it is installed
    assert missing_package("an array") is None
