"""A damaged state gives one error that says so, or the same samples. Each bit or byte of a saved
one is flipped.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import itertools
import json
import warnings

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import Mix, Pack, restore
from tests.real.loops import text_of, write_rows
from tests.stateful_rows import Rows
from tests.training_rows import merge, rows_of

TEXTS = [f"text {number}" for number in range(12)]


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "input", [{"text": text} for text in TEXTS], files=2)
    return tmp_path / "input"


def rows(folder, **options):
    return rows_of(JsonlReader(folder.as_posix()), **({"seed": 1, "function": text_of} | options))


def as_tokens(row):
    return list(row["text"].encode())


KINDS = {
    "ReaderDataset": rows,
    "Pack": lambda folder: Pack(Rows([[number] * 3 for number in range(9)]), 4),
    "Mix": lambda folder: Mix([Rows(range(5)), Rows(range(5, 9))], [1, 1], at_end="drop"),
    "Pack of Mix": lambda folder: Pack(Mix([rows(folder, function=as_tokens)], [1]), 7),
}


def shown(samples):
    return [one if isinstance(one, str | int) else one["input_ids"].tolist() for one in samples]


def stopped(dataset):
    iterator = iter(dataset)
    list(itertools.islice(iterator, 3))
    state = dataset.state_dict()
    return state, shown(iterator)


@pytest.mark.parametrize("kind", KINDS)
def test_each_bit_of_a_state_in_json(folder, kind):
    state, rest = stopped(KINDS[kind](folder))
    whole = json.dumps(state).encode()
    dataset, found, harmless = KINDS[kind](folder), 0, 0
    for place, bit in itertools.product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        try:
            content = json.loads(damaged)
        except ValueError:
            continue
        try:
            dataset.load_state_dict(content)
        except CheckpointCorrupt as error:
            found += 1
            assert "state of the step before" in str(error), (place, bit)
        else:
            harmless += 1
            assert shown(dataset) == rest, (place, bit, damaged)
    assert found > 5 * len(whole) * 0.5
    assert harmless < 100


def test_each_byte_of_a_file_of_torch_save(folder, tmp_path):
    def make():
        return StatefulDataLoader(rows(folder, batch_size=2), batch_size=2, collate_fn=list)

    saving, path = make(), tmp_path / "loader.pt"
    iterator = iter(saving)
    next(iterator)
    torch.save(saving.state_dict(), path)
    rest, whole = list(iterator), path.read_bytes()
    found, loader = 0, make()
    for place, mask in itertools.product(range(len(whole)), (0xFF, 1)):
        damaged = bytearray(whole)
        damaged[place] ^= mask << (place % 8 if mask == 1 else 0)
        path.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                restore(loader, [path])
        except CheckpointCorrupt as error:
            found += 1
            assert str(path) in str(error)
            assert "of the step before" in str(error)
        else:
            assert list(loader) == rest, (place, mask)
            loader = make()
    assert found > len(whole)


def test_a_file_that_is_cut_off_or_no_file_of_torch_is_named(folder, tmp_path):
    state, _ = stopped(rows(folder))
    path = tmp_path / "loader.pt"
    torch.save(state, path)
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:100],
        whole[: len(whole) // 2],
        whole[:-1],
        json.dumps(state).encode(),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointCorrupt, match=r"loader\.pt' is damaged.*of the step before"):
            merge([path])
    with pytest.raises(FileNotFoundError):
        merge([tmp_path / "none.pt"])


def without_checksums(state):
    if isinstance(state, list):
        return [without_checksums(one) for one in state]
    if isinstance(state, dict):
        return {key: without_checksums(value) for key, value in state.items() if key != "checksum"}
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_before_the_checksums_is_continued(folder, kind):
    state, rest = stopped(KINDS[kind](folder))
    assert without_checksums(state) != state
    assert "version" in state
    dataset = KINDS[kind](folder)
    dataset.load_state_dict(without_checksums(state))
    assert shown(dataset) == rest


def test_the_checksum_goes_through_the_loader_its_workers_and_a_merge(folder):
    def make():
        return StatefulDataLoader(
            rows(folder, batch_size=2), batch_size=2, num_workers=2, collate_fn=list
        )

    saving = make()
    next(iter(saving))
    state = saving.state_dict()
    merged = merge([state])
    assert "checksum" in merged
    text = json.dumps(state).replace('"samples": 2', '"samples": 3')
    assert text != json.dumps(state)
    for call in (lambda: merge([json.loads(text)]), lambda: restore(make(), [json.loads(text)])):
        with pytest.raises(CheckpointCorrupt, match="checksum"):
            call()
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        merge([merged | {"epoch": 7}])
