"""How ``reshard`` deals parts of an input out to tasks: everything once, and to each about the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from datatrove_ckpt.checkpoint.shares import Part
from datatrove_ckpt.preflight.reshard.dealing import deal, fill_level


def cut(part: Part, ends: Sequence[int]) -> list[Part]:
    """Exactly there; a piece is its range of bytes."""
    start = part.begin[0] if part.begin else 0
    edges = [start, *(start + end for end in ends), start + part.bytes]
    return [Part(part.name, (a,), (b,), bytes=b - a) for a, b in itertools.pairwise(edges)]


def ranges(dealt: list[list[Part]]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for part in (part for mine in dealt for part in mine):
        begin = part.begin[0] if part.begin else 0
        found.setdefault(part.name, []).append((begin, begin + part.bytes))
    return {name: sorted(pairs) for name, pairs in found.items()}


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=40),
    st.lists(st.just(0) | st.integers(0, 10**5), min_size=1, max_size=60),
)
def test_everything_is_dealt_out_once_and_about_evenly(sizes: list[int], loads: list[int]) -> None:
    parts = [Part(str(number), bytes=size) for number, size in enumerate(sizes)]
    dealt = deal(parts, loads, cut, lambda part: True)
    for part in parts:
        pairs = ranges(dealt)[part.name]
        assert (pairs[0][0], pairs[-1][1]) == (0, part.bytes)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pairs))
    done = [load + sum(part.bytes for part in mine) for load, mine in zip(loads, dealt, strict=True)]
    level = fill_level(list(map(float, loads)), sum(part.bytes for part in parts))
    assert max(done) <= max(1.12 * level + len(parts), max(loads))
    assert sum(len(pairs) for pairs in ranges(dealt).values()) < len(parts) + len(loads)


def test_files_that_cannot_be_entered_in_the_middle_stay_whole() -> None:
    parts = [Part("large", bytes=100), Part("b", bytes=40), Part("c", bytes=30), Part("divisible", bytes=60)]
    dealt = deal(parts, [0, 0, 0], cut, lambda part: part.name == "divisible")
    assert [sum(part.bytes for part in mine) for mine in dealt] == [100, 65, 65]
    assert {name: len(pairs) for name, pairs in ranges(dealt).items()} == {"large": 1, "b": 1, "c": 1, "divisible": 2}


def test_the_parts_of_a_task_are_in_the_order_of_the_input() -> None:
    parts = [Part(str(number), bytes=10) for number in range(20)]
    for mine in deal(parts, [0, 0, 0], cut, lambda part: int(part.name) % 2 == 0):
        assert [int(part.name) for part in mine] == sorted(int(part.name) for part in mine)


def test_a_level_is_that_of_water_poured_over_the_loads() -> None:
    assert fill_level([0, 0], 10) == 5
    assert fill_level([0, 6], 4) == 4
    assert fill_level([0, 6], 10) == 8
    assert fill_level([3], 0) == 3


def test_very_many_tasks_are_dealt_out_in_no_time() -> None:
    """Not a bound on seconds: at a cost that grows with the square, this would take minutes."""
    dealt = deal([Part("a", bytes=20_000)], [0] * 20_000, cut, lambda part: True)
    assert {sum(part.bytes for part in mine) for mine in dealt} == {1}
