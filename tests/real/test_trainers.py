"""Hugging Face Trainer and Accelerate stop in epochs 0, 1 and 2, and go on with the rows that would
have followed.

Needs torch, torchdata, transformers and accelerate: ``uv pip install -e .[torch] transformers
accelerate``.
"""

import itertools
import multiprocessing
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.torch import Best, EverySteps, Last, TrainingCheckpoints
from tests.real.loops import assert_stops_change_nothing
from tests.real.trainers import (
    BATCH,
    ROWS,
    STEPS,
    Recording,
    dataset,
    rows_as_parquet,
    two_processes,
)
from tests.resume import assert_resume_is_exact

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and accelerate
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EPOCHS = 3
STOPS = [2, STEPS, STEPS + 3, 2 * STEPS + 3]  # in epoch 0, at its end, in epoch 1, in epoch 2


@pytest.fixture
def folder(tmp_path):
    return rows_as_parquet(tmp_path / "input")


def arguments_of(ram, **options):
    return TrainingArguments(
        output_dir=str(ram / "run"),
        per_device_train_batch_size=BATCH,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )


class SavesAtStops(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def on_step_end(self, args, state, control, **others):
        control.should_save = state.global_step in STOPS


def test_trainer_resumes_in_every_epoch(folder, ram):
    def trained(resume_from):
        arguments = arguments_of(ram, num_train_epochs=EPOCHS, save_strategy="no")
        trainer = Trainer(
            Recording(), arguments, train_dataset=dataset(folder), callbacks=[SavesAtStops()]
        )
        trainer.train(
            resume_from_checkpoint=resume_from and str(ram / f"run/checkpoint-{resume_from}")
        )
        return trainer.model.batches, trainer.model.state_dict()

    whole, weights = trained(None)
    assert [len(whole), {len(batch) for batch in whole}] == [EPOCHS * STEPS, {BATCH}]
    epochs = [
        list(itertools.chain(*whole[first : first + STEPS]))
        for first in range(0, len(whole), STEPS)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS, "each epoch has an order of its own"
    for stop in STOPS:
        rest, last = trained(stop)
        twice = Counter(itertools.chain(*whole[:stop], *rest)) - Counter(itertools.chain(*whole))
        print(
            f"Trainer, stopped after step {stop} in epoch {stop // STEPS}: {sum(twice.values())} rows twice"
        )
        assert rest == whole[stop:]
        for key, value in weights.items():
            assert value.equal(last[key]), key


@pytest.fixture
def accelerator():
    """Its loaders keep the position, and each process reads for itself."""
    yield Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, dispatch_batches=False
        ),
    )
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize(
    "workers, samples", [(0, "tokens"), (0, "default"), (0, "columns"), (2, "default")]
)
def test_accelerate_resumes_in_every_epoch(folder, accelerator, workers, samples):
    options = {
        "tokens": {},
        "default": {"function": None},
        "columns": {"function": None, "columns": ["text"]},
    }

    def make():
        loader = DataLoader(
            dataset(folder, **options[samples]), batch_size=BATCH, num_workers=workers
        )
        return accelerator.prepare(loader)

    # At the last batch of an epoch Accelerate has seen the end: see the next test.
    stops = [stop for stop in STOPS if stop % STEPS]
    found = assert_resume_is_exact(make, stops if workers == 0 else stops[1:2], epochs=EPOCHS)
    assert found == [ROWS] * EPOCHS


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_goes_on_with_the_next_epoch_after_the_last_batch(folder, accelerator, workers):
    def make():
        return accelerator.prepare(
            DataLoader(dataset(folder), batch_size=BATCH, num_workers=workers)
        )

    def epoch(loader, number):
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
def test_two_processes_of_accelerate_share_an_epoch_and_resume_in_it(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=two_processes, args=(rank, folder, str(tmp_path / "meet"), results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=500) for _ in processes]
    for process in processes:
        process.join()
    for ranks in zip(*found, strict=True):
        assert sorted(row for whole, _ in ranks for row in whole) == list(range(ROWS))
        assert [resumed for _, resumed in ranks] == [whole for whole, _ in ranks]


def test_trainers_checkpoints_are_checked_and_the_one_before_a_damaged_one_is_used(folder, ram):
    arguments = arguments_of(ram, max_steps=STEPS + 4, save_steps=2, save_total_limit=1)
    kept = ram / "kept"

    def trained():
        model, found = Recording(), list[Path]()
        with TrainingCheckpoints(kept, keep=Last(3) | Best("loss")) as checkpoints:

            class Keeps(TrainerCallback):  # type: ignore[misc, unused-ignore]
                def on_save(self, args, state, control, **others):
                    made = Path(args.output_dir, f"checkpoint-{state.global_step}")
                    step = state.global_step
                    checkpoints.save(
                        step, writer=lambda to: shutil.copytree(made, to, dirs_exist_ok=True)
                    )

            trainer = Trainer(model, arguments, train_dataset=dataset(folder), callbacks=[Keeps()])
            checkpoints.restore(reader=found.append)
            trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
        return model.batches

    whole = trained()
    (newest,) = Path(kept, f"step-{STEPS + 4:08}").glob("writer/*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert trained() == whole[STEPS + 2 :]


def test_accelerate_saves_and_loads_through_the_writer(folder, ram):
    def trained(kept, steps):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
        )
        rows = dataset(folder)
        torch.manual_seed(7)
        model = Recording()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = StatefulDataLoader(rows, batch_size=BATCH)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        with TrainingCheckpoints(kept, save=EverySteps(1)) as checkpoints:
            step = checkpoints.restore(loader=loader, reader=accelerator.load_state) or 0
            for epoch in range(checkpoints.epoch, EPOCHS):
                rows.set_epoch(epoch)
                for batch in loader:
                    accelerator.backward(prepared(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    checkpoints.maybe_save(step, loader=loader, writer=accelerator.save_state)
                    if step == steps:
                        return model.batches, model.state_dict()
        return model.batches, model.state_dict()

    whole = assert_stops_change_nothing(trained, ram, [2, STEPS + 2, 100])
    assert len(whole) == EPOCHS * STEPS
