"""This version continues the states that users keep beside their models:
tests/data/contracts/states.json.

Who means to change them writes them anew: DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0
THIS_FILE
"""

import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import Mix, Pack
from datatrove_ckpt.torch.order import ConsumedRound, Topology
from datatrove_ckpt.torch.states import DatasetState, Slot, check_checksums, sealed
from tests.stateful_rows import Rows
from tests.training_rows import merge, rows_of
from tests.yaml_jobs import write_rows

STATES = Path(__file__).parents[1] / "data" / "contracts" / "states.json"
AFTER = 3


def reader(folder, **options):
    return JsonlReader(str(folder / "input"), **options)


def mix(folder):
    return Mix(
        [Rows([f"{name}{i}" for i in range(8)], shuffles=True) for name in "ab"], [2, 1], 1, "drop"
    )


SOURCES = {
    "JsonlReader": reader,
    "Mix": mix,
    "Pack": lambda folder: Pack(Rows([{"input_ids": np.arange(n)} for n in range(1, 9)]), 4),
}


def shown(sample):
    return (
        sample
        if isinstance(sample, str)
        else getattr(sample, "id", None) or sample["input_ids"].tolist()
    )


def kept(name, make):
    states = json.loads(STATES.read_bytes())
    if "DATATROVE_CKPT_WRITE_GOLDEN" in os.environ:
        states[name] = make()
        lines = [f"{json.dumps(each)}: {json.dumps(states[each])}" for each in states]
        STATES.write_text("{{\n{}\n}}\n".format(",\n".join(lines)))
    return states[name]


def write_input(folder):
    (folder / "input").mkdir()
    for number in range(2):
        rows = [{"text": "x", "id": f"{number}/{index}"} for index in range(5)]
        write_rows(folder / "input" / f"{number}.jsonl", rows)


@pytest.mark.parametrize("name", SOURCES)
def test_a_saved_position_is_continued(name, tmp_path):
    write_input(tmp_path)

    def samples(source):
        return map(shown, source.run() if isinstance(source, JsonlReader) else iter(source))

    def make():
        source = SOURCES[name](tmp_path)
        read = samples(source)
        list(itertools.islice(read, AFTER))
        return {"state": source.state_dict(), "rest": list(read)}

    then = kept(name, make)
    source = pickle.loads(pickle.dumps(SOURCES[name](tmp_path)))  # as a spawned worker has it
    source.load_state_dict(then["state"])
    assert list(samples(source)) == then["rest"] != []


def test_a_position_in_shuffled_rows_is_refused(tmp_path):
    """Earlier releases shuffled the rows of each file."""
    (tmp_path / "input").mkdir()
    source = reader(tmp_path, shuffle_seed=1)
    source.load_state_dict(json.loads(STATES.read_bytes())["JsonlReader, shuffled"]["state"])
    (tmp_path / "input" / "0.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(CheckpointMismatch, match="shuffled=None, now 'files'"):
        list(source.run())


def test_states_of_documents_go_on_as_rows(tmp_path):
    """Of 0.2: one is of a dataset of documents in batches, the others are of ranks with
    even="repeat".
    """
    write_input(tmp_path)
    saved = json.loads(STATES.read_bytes())
    then = saved["ReaderDataset, alone"]
    alone = rows_of(reader(tmp_path), seed=1, window=4, batch_size=2)
    alone.load_state_dict(then["state"])
    assert [row["id"] for row in alone] == then["rest"] != []
    then = saved["ReaderDataset, even ranks"]
    other = rows_of(reader(tmp_path), seed=1, window=4)
    other.load_state_dict(merge(then["states"]))
    assert sorted(row["id"] for row in other) == then["rest"] != []


def test_states_of_all_ranks_become_the_same_one():
    def make():
        order = {"shuffle_seed": 1, "window": [1000, None]}
        files, done = (
            {"rows": 100, "files": 2},
            (ConsumedRound(Topology(3, 2, 4), (4, 4, 4, 4, 0, 0)),),
        )
        slots = [Slot(rank, 2, worker, 1) for rank in range(2) for worker in range(1)]
        states = [
            DatasetState(2, order, files, done, slot, 8, 1, 4, "drop").to_json() for slot in slots
        ]
        return {"states": states, "merged": merge(states)}

    then = kept("ReaderDataset", make)
    assert merge(then["states"]) == sealed(then["merged"])
    for state in (*then["states"], then["merged"]):
        assert DatasetState.from_json(state).to_json() | {"checksum": None} == state | {
            "checksum": None
        }


@pytest.mark.parametrize("value", [1, 1.5, np.float64(1.5), None, [1, (2,)], Slot(0, 1, 0, 1)])
def test_a_checksum_is_checked_also_of_a_state_that_was_json(value):
    state = sealed({"source": {"n": value}, 7: [value]})
    check_checksums(state)
    check_checksums(json.loads(json.dumps(state)))
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        check_checksums(state | {"source": {"n": 2}})


@pytest.mark.parametrize("value", [2**70, "\ud800"])
def test_a_state_that_orjson_does_not_write_has_no_checksum(value):
    state = {"source": {"n": value}}
    check_checksums(sealed(state))
    assert sealed(state) == state
