"""Lightning's Trainer and Fabric stop in the first and in later epochs, and go on with the rows and
weights of a training without a stop.

Needs torch, torchdata and lightning: ``uv pip install -e .[torch] lightning``.
"""

import itertools
import signal
from contextlib import suppress

import pytest
import torch
from lightning import Fabric, LightningModule
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import Preempted
from datatrove_ckpt.torch import EverySteps, ReaderDataset, TrainingCheckpoints
from tests.pages import run_example
from tests.real.loops import assert_stops_change_nothing, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning

ROWS = 48
BATCH = 8
STEPS = ROWS // BATCH  # in an epoch
EPOCHS = 3
# In epoch 0, at its end, in epoch 1, at the first step of epoch 2.
STOPS = [2, STEPS, STEPS + 3, 2 * STEPS + 1]
EXAMPLE = run_example("lightning")


class Stopped(Exception):
    pass


@pytest.fixture
def rows(tmp_path):
    write_rows(tmp_path / "input", [{"text": str(number)} for number in range(ROWS)], "parquet")
    return (tmp_path / "input").as_posix()


def number(row):
    return torch.tensor(int(row["text"]))


def dataset_of(rows):
    rows = ReaderDataset.from_folder(rows).select_columns(["text"]).shuffle(seed=1)
    return rows.map(number).batch(BATCH)


def model_of():
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Embedding(ROWS, 3), torch.nn.Dropout(0.3), torch.nn.Linear(3, 1)
    )


class Module(LightningModule):
    def __init__(self, stop):
        super().__init__()
        self.model, self.stop, self.batches = model_of(), stop, []

    def training_step(self, batch, index):
        if self.trainer.global_step == self.stop:
            raise Stopped
        self.batches.append(batch.tolist())
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Signalled(Module):
    """Gets a signal in the batch after ``stop`` batches of this process."""

    def training_step(self, batch, index):
        if len(self.batches) == self.stop:
            signal.raise_signal(signal.SIGTERM)
        self.batches.append(batch.tolist())
        return self.model(batch).square().mean()


def lightning(rows, folder, stop, workers, kind=Module, **options):
    """One process: it trains to the end, or to the stop. Returns batches and weights."""
    module = kind(stop)
    with suppress(Stopped, Preempted):
        EXAMPLE["fit"](
            module,
            EXAMPLE["Rows"](dataset_of(rows), batch_size=None, num_workers=workers),
            folder,
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
    return module.batches, module.model.state_dict()


def fabric(rows, folder, stop, workers):
    """The loop of docs/training.md."""
    fabric = Fabric(accelerator="cpu")
    body, dataset, batches = model_of(), dataset_of(rows), []
    model, optimizer = fabric.setup(body, torch.optim.AdamW(body.parameters(), lr=0.1))
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
    states = {"model": model, "optimizer": optimizer}
    with TrainingCheckpoints(folder, save=EverySteps(1)) as checkpoints:
        step = checkpoints.restore(loader=loader, **states) or 0
        for epoch in range(checkpoints.epoch, EPOCHS):
            dataset.set_epoch(epoch)
            for batch in loader:
                batches.append(batch.tolist())
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpoints.maybe_save(step, loader=loader, **states)
                if step == stop:
                    return batches, body.state_dict()
    return batches, body.state_dict()


@pytest.mark.parametrize("train, workers", [(lightning, 0), (lightning, 1), (fabric, 0)])
def test_a_training_that_stops_in_any_epoch_is_that_of_no_stop(rows, tmp_path, train, workers):
    whole = assert_stops_change_nothing(
        lambda folder, stop: train(rows, folder, stop, workers), tmp_path, [*STOPS, None]
    )
    epochs = [whole[first : first + STEPS] for first in range(0, len(whole), STEPS)]
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(ROWS))] * EPOCHS
    assert len({str(epoch) for epoch in epochs}) == EPOCHS


def test_a_signal_within_a_window_of_accumulation_loses_no_gradients(rows, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else the signal ends this process
    monkeypatch.setitem(EXAMPLE, "EverySteps", lambda _: EverySteps(1000))
    stops = [0, 3, 1, 1, None]  # in a first, a second, a first and a last batch of three
    try:
        assert_stops_change_nothing(
            lambda folder, stop: lightning(
                rows, folder, stop, 0, kind=Signalled, accumulate_grad_batches=3
            ),
            tmp_path,
            stops,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
