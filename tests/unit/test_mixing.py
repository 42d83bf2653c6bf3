"""``Mix``: shares by weight, the same draws from any stop on, and every way in which sources
end.
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.torch import Mix, Pack
from tests import golden
from tests.resume import assert_resume_is_exact
from tests.stateful_rows import Rows

ENDS = ["stop", "drop", "repeat"]


def source(name, count):
    return Rows([f"{name}{i}" for i in range(count)], shuffles=True)


def mix(at_end="stop", counts=(20, 5, 0), seed=0):
    return Mix(
        [source(name, count) for name, count in zip("abc", counts, strict=False)],
        np.array([2, 1, 1])[: len(counts)],
        seed,
        at_end,
    )


def test_samples_come_in_the_shares_of_the_weights():
    drawn = Counter(
        name[0] for name in itertools.islice(mix(counts=(10_000, 10_000, 10_000)), 8000)
    )
    assert drawn["a"] == pytest.approx(4000, rel=0.05)
    assert drawn["b"] == pytest.approx(2000, rel=0.05)


def test_draws_depend_on_seed_and_epoch_alone_and_each_source_keeps_its_order():
    first, again, other = (list(mix("drop", (50, 50), seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other)
    whole = mix("drop", (50, 50), 1)
    whole.set_epoch(1)
    assert list(whole) != first
    assert [name for name in first if name[0] == "a"] == list(source("a", 50))


def test_ranks_draw_different_sources_also_of_packed_rows():
    def draws(rank):
        sources = [Rows([[number, number]] * 100) for number in (0, 1)]
        for one in sources:
            vars(one).update(rank=rank, world_size=2)
        samples = itertools.islice(Mix([Pack(one, 2) for one in sources], [1, 1]), 50)
        return [int(sample["input_ids"][0]) for sample in samples]

    assert draws(0) == draws(0) != draws(1)


def test_stop_ends_with_the_first_source_that_ends():
    samples = list(mix("stop", (100, 5)))
    assert Counter(name[0] for name in samples)["b"] == 5
    assert 5 < len(samples) < 50
    assert list(mix("stop", (5, 0))) == list(mix("stop", (5, 0)))


def test_repeat_begins_short_sources_again_until_each_has_ended_once():
    samples = list(mix("repeat", (40, 4)))
    counts = Counter(samples)
    assert all(counts[f"a{i}"] == 1 for i in range(40))
    assert all(counts[f"b{i}"] >= 3 for i in range(4))
    of_b = [name for name in samples if name[0] == "b"]
    assert [sorted(of_b[i : i + 4]) for i in (0, 4)] == [["b0", "b1", "b2", "b3"]] * 2
    assert len({tuple(of_b[i : i + 4]) for i in range(0, len(of_b) - 3, 4)}) > 1, (
        "another order in each pass"
    )
    assert sorted(set(mix("repeat", (3, 0)))) == ["a0", "a1", "a2"], (
        "an empty source is not begun for ever"
    )


class ThroughJson:
    """A mixin: a state is loaded as a checkpoint keeps it."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(json.loads(json.dumps(state_dict)))


class JsonMix(ThroughJson, Mix):
    pass


class JsonPack(ThroughJson, Pack):
    pass


@pytest.mark.matrix("at_end", ENDS)
def test_packs_of_mixes_and_mixes_of_packs_resume_from_every_stop_with_a_state_that_is_json(at_end):
    counts = ((1, 4), (2, 3), (3, 2))
    rows = [[[letter * 100 + i] * (i % 4) for i in range(count)] for letter, count in counts]

    def packed_mix():
        sources = [Rows(these, shuffles=True) for these in rows]
        return JsonPack(
            Mix(sources, [3, 1, 1], at_end=at_end), 5, pad=0, separator=7, positions=True
        )

    def mixed_packs():
        sources = [Pack(Rows(these, shuffles=True), 3, separator=7) for these in rows]
        return JsonMix(sources, [3, 1, 1], at_end=at_end)

    for make in (packed_mix, mixed_packs):
        second = make()
        second.set_epoch(1)
        both = len(list(make())) + len(list(second))
        stops = [*range(1, both + 1), (1, 1, 1)]
        assert_resume_is_exact(make, stops, epochs=2, samples=lambda sample: [sample])


def test_a_source_that_has_ended_is_not_asked_for_its_state():
    class Restarting(Rows):
        def _read(self, order):
            """As some loaders: at the end, the state is the beginning of the next epoch."""
            yield from super()._read(order)
            self._at = 0

    def make():
        return Mix([Restarting(["a"]), Rows(["b"] * 9)], [1, 1], at_end="drop")

    whole = list(make())
    for stop in range(1, len(whole) + 1):
        first = make()
        assert list(itertools.islice(first, stop)) == whole[:stop]
        resumed = make()
        resumed.load_state_dict(first.state_dict())
        assert list(resumed) == whole[stop:]


@golden.rows("states_of_mixes")
def test_states_of_other_weights_or_seeds_are_refused(code):
    one = mix()
    next(iter(one))
    error = golden.refuse("states_of_mixes", code, {"mix": mix, "state": one.state_dict()})
    assert isinstance(error, CheckpointMismatch)
