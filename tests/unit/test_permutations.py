"""Shuffled orders are those of every earlier release: a saved position is a place in one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.readers import permutations
from datatrove_ckpt.readers.permutations import hash_numbers, permutation


@pytest.mark.parametrize("salt", [0, 2**32 - 1, 2**63 + 12345])
def test_all_numbers_are_hashed_at_once_as_xxhash_does_it(salt: int) -> None:
    chance = random.Random(salt)
    numbers = [0, 1, 255, 256, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *(chance.getrandbits(64) for _ in range(100))]
    expected = [xxh3_64_intdigest(number.to_bytes(8, "little"), salt) for number in numbers]
    assert hash_numbers(np.array(numbers, dtype=np.uint64), salt).tolist() == expected


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_the_order_is_that_of_release_0_1_0(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "_AT_ONCE", 64)
    salt = xxh3_64_intdigest(b"7/a.parquet/3")
    expected = sorted(range(count), key=lambda number: xxh3_64_intdigest(number.to_bytes(8, "little"), salt))
    assert permutation(count, 7, "a.parquet", 3).tolist() == expected
