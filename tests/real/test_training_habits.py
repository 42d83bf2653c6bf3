"""Habits of training loops that a checkpoint must not take wrongly: calls of one rank alone, epochs
without ``set_epoch``, restores that come too late, compiled models, readers beside a training.

Needs torch and torchdata.
"""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import EverySteps, Last, ReaderDataset, TrainingCheckpoints, restore
from tests import golden
from tests.real.loops import write_rows

LAYER = nn.Linear(2, 2)
ROWS = 20
BATCH = 4


def opened(folder, **settings):
    options = {"save": EverySteps(1), "keep": Last(9), "asynchronous": False}
    return TrainingCheckpoints(folder, **options | settings)


@pytest.fixture
def documents(tmp_path):
    rows = [{"id": str(number), "text": f"text {number}"} for number in range(ROWS)]
    write_rows(tmp_path / "documents", rows, files=1)
    return str(tmp_path / "documents")


# epochs without set_epoch ------------------------------------------------------------------------


def loop(documents, folder, workers, seed, stop=0):
    """Three epochs without ``set_epoch``. Returns what each step saw."""
    dataset = ReaderDataset(JsonlReader(documents)).shard(1, 0, batch_size=BATCH)
    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=workers)
    seen = {}
    with opened(folder) as saved:
        step = saved.restore(loader=loader) or 0
        for _ in range(saved.epoch, 3):
            for batch in loader:
                step += 1
                seen[step] = batch["id"]
                saved.maybe_save(step, loader=loader)
                if step == stop:
                    return seen
            saved.save(step, loader=loader)
            if step == -stop:
                return seen
    return seen


@pytest.mark.parametrize("workers, seed", [(0, 1), (0, None), (2, 1)])
def test_epochs_are_counted_where_set_epoch_is_forgotten(tmp_path, documents, workers, seed):
    expected = loop(documents, tmp_path / "whole", workers, seed)
    assert len(expected) == 3 * ROWS // BATCH
    stops = (3, 5, 8, -10, 13) if workers == 0 else (8, -10)
    for stop in stops:
        folder = tmp_path / str(stop)
        seen = loop(documents, folder, workers, seed, stop)
        if stop in (3, 8):
            seen |= loop(documents, folder, workers, seed, stop + 4)  # the second stop
        assert seen | loop(documents, folder, workers, seed) == expected, stop


def test_a_loop_that_sets_its_epoch_once_goes_on_after_several_passes(tmp_path, documents):
    seen = []
    for stop in (2 * ROWS // BATCH + 1, 2 * ROWS // BATCH + 3):
        dataset = ReaderDataset(JsonlReader(documents)).shuffle(seed=1).batch(BATCH)
        loader = StatefulDataLoader(dataset, batch_size=None)
        with opened(tmp_path) as saved:
            step = saved.restore(loader=loader) or 0
            dataset.set_epoch(saved.epoch)
            while step < stop:
                for batch in loader:
                    seen.append(batch["id"])
                    step += 1
                    saved.maybe_save(step, loader=loader)
                    if step == stop:
                        break
    passes = [seen[start : start + 5] for start in (0, 5, 10)]
    assert passes[0] == passes[1]
    assert passes[2] == passes[0][:3]


# restores that come too late ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restore_after_the_loader_has_begun_is_refused(tmp_path, documents, workers):
    loop(documents, tmp_path / "run", workers, 1, 3)
    for begin in (iter, lambda loader: loader.state_dict()):
        dataset = ReaderDataset(JsonlReader(documents)).shuffle(seed=1)
        loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=workers)
        begun = begin(loader)
        for folder in ("run", "empty"):
            with pytest.raises(ConfigError, match=r"has begun.*before the first iter\(loader\)"):
                opened(tmp_path / folder).restore(loader=loader)
        with pytest.raises(ConfigError, match="has begun"):
            restore(loader, [loader.state_dict()])
        del begun


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_loaded_a_state_do_not_begin_again_unseen(documents, kind):
    """Persistent workers have copies of the dataset, which see no later state."""
    dataset = ReaderDataset(JsonlReader(documents)).shuffle(seed=1)
    loader = kind(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)
    state = dataset.state_dict()
    if kind is StatefulDataLoader:
        loader.load_state_dict(loader.state_dict())  # the workers load it
    list(loader)
    with pytest.raises(ConfigError, match="has begun"):
        restore(loader, [state])
    dataset.load_state_dict(state)
    dataset.set_epoch(0)
    with pytest.raises(ConfigError, match="after the loader had started its workers"):
        list(loader)


# signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, settings",
    [("SIGUSR2", {}), ("SIGRTMIN", {"signals": ["SIGRTMIN", "SIGTERM"]})],
)
def test_a_signal_of_ones_choice_saves_within_an_evaluation(tmp_path, name, settings):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    evaluated = []
    ending = opened(tmp_path, save=EverySteps(100), **settings)
    with pytest.raises(SystemExit) as ended, ending as saved:  # noqa: PT012 - its end raises
        assert not saved.maybe_save(7, model=LAYER)
        for batch in range(10):
            evaluated.append(batch)
            if batch == 4:
                signal.raise_signal(number)
            saved.maybe_save(7, model=LAYER)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before
    assert evaluated == [*range(5)]
    assert opened(tmp_path).restore(model=LAYER) == 7


def test_workers_outlive_the_signals_of_ones_choice(tmp_path, documents):
    others = set(multiprocessing.active_children())
    loader = StatefulDataLoader(
        ReaderDataset(JsonlReader(documents)), batch_size=1, num_workers=1, persistent_workers=True
    )
    with opened(tmp_path, signals=["SIGRTMIN"]) as saved:
        saved.restore(loader=loader)
        batches = iter(loader)
        next(batches)
        [worker] = set(multiprocessing.active_children()) - others
        os.kill(worker.pid, signal.SIGRTMIN)
        assert len(list(batches)) == ROWS - 1


@golden.rows("mistakes_of_trainings")
def test_arguments_of_another_kind_are_named(tmp_path, code):
    run = tmp_path / "run"
    golden.refuse("mistakes_of_trainings", code, {**globals(), "run": run})
    assert not run.exists() or "signals" in code


# readers beside a training -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, step, why",
    [
        ("damage", "latest", None),
        ("damage", 1, r"no step 1; there are \[2\]"),
        ("load", "latest", "step-00000001 was removed by its training.*Restore again"),
        ("load", 1, "step-00000001 was removed by its training.*Restore again"),
    ],
)
def test_a_step_that_its_training_removes_is_not_damaged(
    tmp_path, monkeypatch, warned, method, step, why
):
    """Another process checks or loads the newest step, and the training goes on."""
    training = opened(tmp_path, keep=Last(1))
    training.save(1, model=LAYER)
    training.close()  # it takes the lock again, which the reader does not hold
    reader = opened(tmp_path)
    usual = getattr(reader._steps, method)

    def after_a_save(name, *others):
        if name.step == 1:
            training.save(2, model=LAYER)
        return usual(name, *others)

    monkeypatch.setattr(reader._steps, method, after_a_save)
    if why is not None:
        with pytest.raises(CkptError, match=why):
            reader.restore(step, model=LAYER, weights_only=True)
        step = "latest"
    assert reader.restore(step, model=LAYER, weights_only=True) == 2
    assert warned == []


# compiled models ---------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner


def plain():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def partly_compiled():
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")
    return model


KINDS = [plain, lambda: torch.compile(plain(), backend="eager"), partly_compiled]


@pytest.mark.parametrize("given", [lambda model: model, lambda model: model.state_dict()])
@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("now", KINDS)
def test_a_compiled_model_is_restored_into_one_that_is_not_and_back(tmp_path, then, now, given):
    old = Wrapped(then())
    nn.init.constant_(next(old.parameters()), 3.0)
    opened(tmp_path).save(1, model=given(old))
    new = Wrapped(now())
    assert opened(tmp_path).restore(model=given(new)) == 1
    assert next(new.parameters()).flatten().tolist() == [3.0] * 4
    other = Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="model: step-00000001 does not fit"):
        opened(tmp_path).restore(model=other)
