"""``Pack``: every token once and in order, in samples of one length, from any stop on.

None of it needs torch.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.torch import Mix, Pack
from datatrove_ckpt.torch.states import sealed
from tests import golden
from tests.stateful_rows import Rows


def rows_of(lengths):
    """Rows of these lengths, whose tokens count on."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, length)) for length in lengths]


def tokens(samples):
    return [sample["input_ids"].tolist() for sample in samples]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 23), max_size=12), st.integers(1, 9), st.booleans())
def test_no_token_is_lost_or_moved(lengths, length, pads):
    rows = rows_of(lengths)
    samples = tokens(Pack(Rows(rows), length, pad=-1 if pads else None))
    got = [token for sample in samples for token in sample if token != -1]
    whole = [token for row in rows for token in row]
    assert got == whole[: len(got)]
    assert {len(sample) for sample in samples} <= {length}
    assert len(whole) - len(got) < (1 if pads else length)


def lists(pack):
    return [{name: column.tolist() for name, column in sample.items()} for sample in pack]


test_rows_are_cut_into_samples_of_one_length = golden.shows("packs", globals())


def test_lists_arrays_and_plain_rows_give_the_same_integers():
    rows = [[1, 2], np.array([3], np.uint16), {"input_ids": np.array([4, 5], np.int32)}, (6,)]
    sample, _ = Pack(Rows([*rows, [0.5] * 6]), 6)  # of no row is anything left
    assert sample["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert sample["input_ids"].dtype == np.int64


def test_values_with_fractions_keep_their_type_through_a_state():
    rows = [{"input_ids": [1, 2, 3], "weight": np.array([0.5, 1, 0.25], np.float32)}] * 3

    def make():
        return Pack(Rows(rows), 4, ["input_ids", "weight"])

    whole = list(make())
    pack = make()
    next(iter(pack))
    resumed = make()
    resumed.load_state_dict(pack.state_dict())
    (last,) = resumed
    assert last["weight"].dtype == np.float32
    assert last["weight"].tolist() == whole[1]["weight"].tolist()


@golden.rows("states_of_packs")
def test_states_of_another_setting_class_epoch_or_worker_are_refused(code):
    pack, of_epoch_4 = (Pack(Rows(rows_of([9])), 4) for _ in range(2))
    next(iter(pack))
    state = pack.state_dict()
    of_epoch_4.set_epoch(4)
    of_epoch_4.load_state_dict(state)
    of_another_worker = Pack(Rows([]), 4)
    of_another_worker.load_state_dict(sealed(state | {"slot": [0, 1, 1, 2]}))
    error = golden.refuse("states_of_packs", code, {**globals(), **locals(), "Mix": Mix})
    assert isinstance(error, CheckpointMismatch)


def test_there_is_no_state_where_nothing_was_read_but_the_one_that_was_loaded():
    pack = Pack(Rows(rows_of([9])), 4)
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        pack.state_dict()
    iterator = iter(pack)
    before = pack.state_dict()
    assert len(list(iterator)) == 2
    pack.load_state_dict(before)
    assert pack.state_dict() == before
    assert len(list(pack)) == 2


def test_over_a_loader_the_rank_is_the_one_of_its_dataset():
    loader = Rows(rows_of([9]))
    loader.dataset = SimpleNamespace(rank=1, world_size=4)
    pack = Pack(loader, 4)
    next(iter(pack))
    assert pack.state_dict()["slot"] == [1, 4, 0, 1]


def test_a_state_at_the_end_of_an_epoch_ends_it_and_the_next_epoch_is_whole():
    """torchdata drops the iterator of a state of an epoch's end, and begins another one."""
    rows = Rows(rows_of([9]))
    pack = Pack(rows, 4)
    list(pack)
    state = pack.state_dict()
    resumed = Pack(rows, 4)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert resumed.state_dict() == state
    assert len(list(resumed)) == 2, (
        "as torchdata does it: an iterator for the state, then one for the next epoch"
    )
    again = Pack(rows, 4)
    again.set_epoch(0)
    again.load_state_dict(state)
    assert list(again) == []
    with pytest.raises(CheckpointMismatch, match="Start the loop of epochs at 1"):
        list(again)
    for one in (resumed, again):
        one.load_state_dict(state)
        one.set_epoch(1)
        assert len(list(one)) == 2, "a loop that goes on with the next epoch"
        assert rows.opened[-1] == 1
