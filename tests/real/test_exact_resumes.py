"""Training loops in the forms of public trainers stop and go on with the batches, the random numbers
and the weights of a training without a stop.

Needs torch and torchdata.
"""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.torch import EverySteps, Mix, Pack, ReaderDataset, TrainingCheckpoints, restore
from tests.real.loops import assert_stops_change_nothing, write_rows

ROWS = 40
BATCH = 4
EPOCHS = 2


@pytest.fixture
def documents(tmp_path):
    write_rows(tmp_path / "input", [{"text": str(number)} for number in range(ROWS)], files=1)
    return str(tmp_path / "input")


def augmented(row):
    """A row with noise, which this process draws if there are no workers."""
    return torch.tensor([float(row["text"]), random.random()])


class Run:
    """Dropout, and noise from the process's own generator."""

    def __init__(self, documents, workers=0, persistent=False, kind=StatefulDataLoader):
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.states = {"model": self.model, "optimizer": self.optimizer}
        rows = ReaderDataset.from_folder(documents).shuffle(seed=1)
        self.dataset = rows.shard(1, 0, batch_size=BATCH).map(augmented)
        self.loader = kind(self.dataset, BATCH, num_workers=workers, persistent_workers=persistent)
        self.seen = []

    def backward(self, batch):
        self.seen.append(batch[:, 0].tolist())
        self.model(batch).square().mean().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def result(self):
        return self.seen, self.model.state_dict()


def loop(run, saved, stop, peeks=False, seeds=False, batches_of_step=1):
    step = saved.restore(loader=run.loader, **run.states) or 0
    if seeds:  # and an evaluation before the first step
        torch.manual_seed(123)
        random.seed(123)
        run.model(torch.randn(3, 2))
    for epoch in range(saved.epoch, EPOCHS):
        if peeks:
            assert len(next(iter(run.loader))) == BATCH
        run.dataset.set_epoch(epoch)
        for number, batch in enumerate(run.loader, 1):
            run.backward(batch)
            if number % batches_of_step:
                continue
            run.update()
            step += 1
            saved.maybe_save(step, loader=run.loader, **run.states)
            if step == stop:
                return


FORMS = {
    "PyTorch's DDP tutorial": {"peeks": True},
    "nanoGPT, and accumulate of Accelerate": {"batches_of_step": 2},
    "torchtune": {"seeds": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_training_that_stops_is_that_of_no_stop(documents, tmp_path, form):
    def train(folder, stop):
        run = Run(documents)
        with TrainingCheckpoints(folder, save=EverySteps(1), asynchronous=False) as saved:
            loop(run, saved, stop, **form)
        return run.result

    assert_stops_change_nothing(train, tmp_path, [3, 8, None])


# peeks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [StatefulDataLoader, DataLoader])
def test_a_peek_gives_the_state_back_to_new_workers(documents, persistent, kind):
    def rows(batches):
        return [row for batch in batches for row in batch[:, 0].tolist()]

    first = Run(documents).loader
    batches = iter(first)
    seen = rows(next(batches) for _ in range(4))
    run = Run(documents, 2, persistent, kind)  # other workers: the dataset loads the state
    restore(run.loader, [first.state_dict()])
    for _ in range(2):
        assert rows([next(iter(run.loader))])
    run.dataset.set_epoch(0)
    assert sorted(seen + rows(run.loader)) == [*range(ROWS)]


def wrapped(documents):
    rows = ReaderDataset.from_folder(documents).shuffle(seed=1)
    return Pack(rows.map(lambda row: {"input_ids": [int(row["text"])]}), length=1)


def mixed(documents):
    rows = ReaderDataset.from_folder(documents).shuffle(seed=1)
    return Mix([rows.map(lambda row: int(row["text"]))], [1.0])  # of no known length


@pytest.mark.parametrize(
    "make, numbers",
    [
        (wrapped, lambda batch: batch["input_ids"].flatten().tolist()),
        (mixed, torch.Tensor.tolist),
        (lambda documents: [*range(ROWS)], torch.Tensor.tolist),
    ],
)
def test_a_peek_gives_the_state_of_other_datasets_back(documents, tmp_path, make, numbers):
    def opened():
        return StatefulDataLoader(make(documents), batch_size=BATCH)

    with TrainingCheckpoints(tmp_path / "run", asynchronous=False) as saved:
        loader = opened()
        seen = [
            number for _, batch in zip(range(3), loader, strict=False) for number in numbers(batch)
        ]
        saved.save(3, loader=loader, epoch=0)
        loader = opened()
        saved.restore(loader=loader)
        next(iter(loader))
        seen += [number for batch in loader for number in numbers(batch)]
        assert sorted(seen) == [*range(ROWS)]
        assert len([*loader]) == ROWS // BATCH  # the next epoch


@pytest.mark.parametrize("batches", [1, 2])
def test_batches_that_were_trained_are_not_given_again(documents, tmp_path, warned, batches):
    """A loop that leaves its iteration begins anew, as ever, and a warning counts the rows."""
    for stop in (3, None):
        run = Run(documents)
        with TrainingCheckpoints(tmp_path, save=EverySteps(3), asynchronous=False) as saved:
            step = saved.restore(loader=run.loader, **run.states) or 0
            assert step == (0 if stop else 3)
            run.dataset.set_epoch(0)
            for _ in range(3):
                for number, batch in enumerate(run.loader, 1):
                    run.backward(batch)
                    step += 1
                    saved.maybe_save(step, loader=run.loader, **run.states)
                    if step == stop or (stop is None and number == batches):
                        break
                if stop:
                    break
    [warning] = [line for line in warned if "restored loader" in line]
    assert f"left after {batches} batches" in warning
    assert "12 rows before the restored step" in warning
    first = Run(documents).loader
    begins = [batch[:, 0].tolist() for batch in first][: 3 + batches]
    assert run.seen == begins[3:] + 2 * begins[:batches]


def test_another_epoch_takes_no_state_back(documents, warned):
    saving = Run(documents).loader
    next(iter(saving))
    run = Run(documents)
    assert restore(run.loader, [saving.state_dict()]) == 0
    next(iter(run.loader))
    run.dataset.set_epoch(1)
    assert len([*run.loader]) == ROWS // BATCH
    assert not [line for line in warned if "restored loader" in line]


def test_a_loader_that_a_trainer_makes_of_the_class_of_a_restored_loader_is_read(documents):
    loader = Run(documents).loader
    restore(loader, [Run(documents).loader.state_dict()])
    again = type(loader)([*range(ROWS)], BATCH)  # as Lightning with a DistributedSampler
    assert len([*again]) == len(iter(again)) == ROWS // BATCH


# random numbers ----------------------------------------------------------------------------------


def test_other_numbers_of_ranks_draw_other_numbers_in_each_rank_and_step(tmp_path):
    drawn = set()
    with TrainingCheckpoints(tmp_path, asynchronous=False) as saved:
        for step in (1, 2):
            saved.save(step)
        saved._ranks.size = 2  # as of more ranks
        for step, rank in ((1, 0), (1, 1), (2, 1)):
            torch.manual_seed(0)
            saved._ranks.rank = rank
            saved.restore(step)
            drawn.add((torch.rand(1).item(), random.random()))
    assert len(drawn) == 3
