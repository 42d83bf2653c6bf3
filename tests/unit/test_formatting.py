"""Numbers and errors as people read them."""

from importlib.util import find_spec

import pytest

from datatrove_ckpt.common.formatting import (
    byte_size,
    duration,
    error_text,
    missing_package,
    number_range,
    parse_bytes,
    plural,
)


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        ([duration(seconds) for seconds in (0, 0.000214, 0.0131, 0.12, 1.0, 6.57)],
         ["0 ms", "0.21 ms", "13.1 ms", "0.12 s", "1 s", "6.6 s"]),
        ([duration(seconds) for seconds in (100, 127, 5400, 6 * 3600, 3 * 86400)],
         ["100 s", "2.1 min", "1.5 h", "6 h", "3 d"]),
        ([byte_size(size) for size in (12, 65536, 3 * 2**29, 2**42)], ["12 B", "64 kB", "1.5 GB", "4 TB"]),
        ([plural(number, "chunk") for number in (0, 1, 2)], ["0 chunks", "1 chunk", "2 chunks"]),
        ([number_range(7, 8), number_range(7, 10)], ["7", "7 to 9"]),
        # A sentence can go on behind an error.
        ([error_text(ValueError("no such thing.")), error_text(KeyError())], ["ValueError: no such thing", "KeyError"]),
    ],
)  # fmt: skip
def test_numbers_and_errors_are_written_as_people_read_them(written, texts):
    assert written == texts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GB", 12 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("7B", 7),
        ("0.5TB", 5 * 10**11),
        ("12", None),
        (f"{10**400}B", None),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


def test_a_missing_package_is_named_with_our_extra():
    assert missing_package("Install ray to use it") == (
        "the Python package 'ray' is not installed. Run: pip install 'datatrove-ckpt[ray]'."
        if find_spec("ray") is None
        else None
    )
    assert missing_package("cannot import name 'x' from 'pyarrow'") is None  # it is installed
    assert missing_package("an array") is None
