"""``Pack`` and ``Mix`` around ``ReaderDataset``, in torchdata's loader with workers, over several
ranks and epochs.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import itertools

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import Mix, Pack
from tests.pages import torch_example, torch_examples
from tests.real.loops import write_rows
from tests.resume import assert_resume_is_exact
from tests.training_rows import rows_of

ROWS = {"web": 60, "code": 25}


@pytest.fixture
def folder(tmp_path):
    """Two sources of three files.

    Row i of a source has i % 7 + 1 tokens, all of which tell source and row.
    """
    for number, (name, count) in enumerate(ROWS.items(), 1):
        write_rows(tmp_path / name, [{"text": f"{number * 1000 + i}"} for i in range(count)])
    return tmp_path


def tokens(row):
    number = int(row["text"])
    return {"input_ids": [number] * (number % 7 + 1)}


def sources(folder, rank=0, ranks=1):
    return [
        rows_of(JsonlReader((folder / name).as_posix()), rank, ranks, seed=seed, function=tokens)
        for seed, name in enumerate(ROWS)
    ]


def packed(folder, rank, ranks, at_end):
    mix = Mix(sources(folder, rank, ranks), [0.7, 0.3], seed=5, at_end=at_end)
    return Pack(mix, 8, pad=0, positions=True)


@pytest.mark.parametrize("at_end", ["drop", "repeat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_packed_mixtures_resume_under_workers_in_every_epoch(folder, workers, at_end):
    def make():
        return StatefulDataLoader(packed(folder, 0, 1, at_end), batch_size=3, num_workers=workers)

    assert_resume_is_exact(make, [1, 4, (2, 3), 12], epochs=2)


def test_workers_that_survive_an_epoch_hear_of_the_next_one(folder):
    def epochs(**options):
        loader = StatefulDataLoader(
            packed(folder, 0, 1, "repeat"), batch_size=3, num_workers=2, **options
        )
        orders = []
        for epoch in (0, 1, 0):
            loader.dataset.set_epoch(epoch)
            orders.append(
                [token for batch in loader for token in batch["input_ids"].flatten().tolist()]
            )
        return orders

    persistent = epochs(persistent_workers=True)
    assert persistent[0] == persistent[2] != persistent[1]
    assert persistent == epochs()


def test_loaders_can_be_mixed_in_the_main_process(folder):
    def make():
        loaders = [
            StatefulDataLoader(one, batch_size=4, num_workers=1, collate_fn=list)
            for one in sources(folder)
        ]
        return Mix(loaders, [1, 1], at_end="drop")

    count = len(list(make()))
    assert_resume_is_exact(make, [1, count // 2, count - 1], samples=lambda batch: batch)
    assert len(list(itertools.islice(make(), 3))) == 3


def test_the_examples_in_the_docs_run(folder, monkeypatch, capsys):
    (folder / "web").rename(folder / "documents")
    monkeypatch.chdir(folder)
    for block in torch_examples():
        if block.page != "docs/trainers.md" and block != torch_example():
            exec(compile(block.text, block.page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.endswith(" samples\n")
