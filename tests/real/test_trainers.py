"""Hugging Face Trainer and Accelerate stop in epochs 0, 1 and 2, and go on with the rows that would have followed.

Needs torch, torchdata, transformers and accelerate: ``uv pip install -e .[torch] transformers accelerate``.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, send_to_device
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.testing import assert_resume_is_exact
from tests.real.trainers import BATCH, ROWS, STEPS, Recording, dataset, rows_as_parquet, two_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and accelerate
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EPOCHS = 3
STOPS = [2, STEPS, STEPS + 3, 2 * STEPS + 3]  # in epoch 0, at its end, in epoch 1, in epoch 2


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "input").mkdir()
    return rows_as_parquet(tmp_path / "input")


class SavesAtStops(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save = state.global_step in STOPS


def test_trainer_resumes_in_every_epoch(folder: str, ram: Path) -> None:
    def trained(resume_from: int | None) -> list[list[int]]:
        arguments = TrainingArguments(
            output_dir=str(ram / "run"),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(Recording(), arguments, train_dataset=dataset(folder), callbacks=[SavesAtStops()])
        trainer.train(resume_from_checkpoint=resume_from and str(ram / f"run/checkpoint-{resume_from}"))
        return trainer.model.batches

    whole = trained(None)
    assert [len(whole), {len(batch) for batch in whole}] == [EPOCHS * STEPS, {BATCH}]
    epochs = [list(itertools.chain(*whole[first : first + STEPS])) for first in range(0, len(whole), STEPS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS, "each epoch has an order of its own"
    for stop in STOPS:
        rest = trained(stop)
        twice = Counter(itertools.chain(*whole[:stop], *rest)) - Counter(itertools.chain(*whole))
        print(f"Trainer, stopped after step {stop} in epoch {stop // STEPS}: {sum(twice.values())} rows twice")
        assert rest == whole[stop:]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Its loaders keep the position, and each process reads for itself."""
    yield Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    )
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize(("workers", "samples"), [(0, "tokens"), (0, "default"), (0, "columns"), (2, "default")])
def test_accelerate_resumes_in_every_epoch(folder: str, accelerator: Accelerator, workers: int, samples: str) -> None:
    options = {"tokens": {}, "default": {"transform": None}, "columns": {"transform": None, "columns": ["text"]}}

    def make() -> Any:
        loader = DataLoader(dataset(folder, **options[samples]), batch_size=BATCH, num_workers=workers)
        return accelerator.prepare(loader)

    # At the last batch of an epoch Accelerate has seen the end: see the next test.
    stops = [stop for stop in STOPS if stop % STEPS]
    report = assert_resume_is_exact(make, stops if workers == 0 else stops[1:2], epochs=EPOCHS)
    print(f"Accelerate, {workers} workers, {samples} samples: {report}")
    assert report.samples == [ROWS] * EPOCHS


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_goes_on_with_the_next_epoch_after_the_last_batch(
    folder: str, accelerator: Accelerator, workers: int
) -> None:
    def make() -> Any:
        return accelerator.prepare(DataLoader(dataset(folder), batch_size=BATCH, num_workers=workers))

    def epoch(loader: Any, number: int) -> list[int]:
        loader.set_epoch(number)
        return [row for batch in loader for row in batch["input_ids"][:, 0].tolist()]

    first = make()
    epoch(first, 0)
    state = first.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert epoch(resumed, 1) == epoch(first, 1)
    again = make()
    again.load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="Start the loop of epochs at 1"):
        epoch(again, 0)


@pytest.mark.full
def test_two_processes_of_accelerate_share_an_epoch_and_resume_in_it(folder: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=two_processes, args=(rank, folder, str(tmp_path / "meet"), results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=500) for _ in processes]
    for process in processes:
        process.join()
    for ranks in zip(*found, strict=True):
        assert sorted(row for whole, _ in ranks for row in whole) == list(range(ROWS))
        assert [resumed for _, resumed in ranks] == [whole for whole, _ in ranks]


def test_batches_are_moved_to_the_device(folder: str) -> None:
    """Accelerate's dispatcher, its default, takes the size of a batch from a tensor; all else is moved as it is."""
    accelerator = Accelerator(cpu=True)
    batch = next(iter(accelerator.prepare(DataLoader(dataset(folder), batch_size=BATCH))))
    assert {(len(column), column.device) for column in batch.values()} == {(BATCH, accelerator.device)}
    for options in ({"transform": None}, {"transform": None, "columns": ["text"]}):
        loader = DataLoader(dataset(folder, **options), batch_size=BATCH)
        assert all(len(column) == BATCH for column in send_to_device(next(iter(loader)), accelerator.device).values())
    AcceleratorState._reset_state()
    PartialState._reset_state()
