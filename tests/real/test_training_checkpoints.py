"""TrainingCheckpoints: whatever happens, the training goes on as if nothing had.

Needs torch and torchdata.
"""

import errno
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointLocked,
    CkptError,
    ConfigError,
    Fenced,
    StorageFailed,
)
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import (
    Best,
    Every,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    Last,
    Mix,
    Pack,
    ReaderDataset,
    SavePolicy,
    TrainingCheckpoints,
    step_folder,
)
from datatrove_ckpt.torch.sharded import _known_classes, _Metadata
from datatrove_ckpt.torch.step_folder import StepName, read_manifest, sealed
from datatrove_ckpt.torch.training_history import read_events
from tests import golden
from tests.crashes import crash_at
from tests.patience import Patience, until
from tests.processes import is_alive
from tests.real.loops import Full, steps_in, write_rows
from tests.real.training_ranks import flipped, join, kill, losses_of, processes_below
from tests.training_rows import rows_of

EVERY = 4
LAYER = nn.Linear(2, 2)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    places = [(file, n) for file in range(2) for n in range(24)]
    rows = [{"id": f"{file}-{n}", "text": f"{'abcdefgh'[n % 8]}{n}"} for file, n in places]
    folder = tmp_path_factory.mktemp("documents") / "rows"
    write_rows(folder, rows, files=2)
    return str(folder)


@pytest.fixture(scope="module")
def expected(documents, tmp_path_factory):
    """The losses without a stop."""
    return trained(documents, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def remote(tmp_path):
    return str(tmp_path / "remote")


class Training:
    """One rank. Its losses depend on the model, the optimizer, the order of the documents and on
    dropout.
    """

    def __init__(self, documents):
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.dataset = rows_of(JsonlReader(documents), seed=1, batch_size=5, function=numbers)
        self.new_loader()
        self.losses = {}

    def new_loader(self):
        self.loader = StatefulDataLoader(self.dataset, batch_size=5)

    @property
    def states(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, batch):
        loss = (self.model(batch) - random.random()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(
        self,
        saved,
        steps,
        then=lambda step: None,
    ):
        step = saved.restore(loader=self.loader, **self.states) or 0
        epoch = saved.epoch
        while step < steps:
            self.dataset.set_epoch(epoch)
            for batch in self.loader:
                step += 1
                loss = self.step(batch)
                self.losses[step] = loss, batch.sum().item()
                saved.maybe_save(step, loader=self.loader, metrics={"loss": loss}, **self.states)
                then(step)
                if step == steps:
                    break
            epoch += 1


def numbers(row):
    text = row["text"]
    return torch.tensor([float(ord(text[0]) - 100), float(text[1:]) / 10])


def checkpoints(folder, **settings):
    return TrainingCheckpoints(
        folder, **{"save": EverySteps(EVERY), "asynchronous": False} | settings
    )


def trained(documents, folder, steps=25, **settings):
    training = Training(documents)
    with checkpoints(folder, **settings) as saved:
        training.run(saved, steps)
    return training.losses


def save(folder, *steps, **settings):
    """Saves steps of a small model."""
    with checkpoints(folder, **settings) as saved:
        for step in steps:
            saved.save(step, model=LAYER)


def restored(folder, **settings):
    """The step that another process restores."""
    return checkpoints(folder, **settings).restore(model=LAYER)


def crashes(folder, begin, attempt, torn=False, every=1):
    """Lets an attempt crash at each effect. Yields where; None: at none."""
    for number in itertools.count(0, every):
        shutil.rmtree(folder, ignore_errors=True)
        begin()
        with crash_at(number, folder, torn) as disk:
            attempt()
        yield disk.crashed_at
        if disk.crashed_at is None:
            assert number > 20
            return


# whole or absent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "remote, torn, every",
    [
        (False, True, 4),
        (True, False, 4),
        *(
            pytest.param(remote, torn, 1, marks=pytest.mark.full)
            for remote in (False, True)
            for torn in (False, True)
        ),
    ],
)
def test_a_crash_at_every_effect_changes_no_loss(documents, ram, remote, torn, every, expected):
    folder = ram / "run"
    settings = {"remote": str(folder / "remote")} if remote else {}

    def attempt():
        return trained(documents, folder / "steps", 9, keep=Last(1) | Best("loss"), **settings)

    found = set()
    for crash in crashes(folder, folder.mkdir, attempt, torn, every):
        losses = attempt()
        assert losses == {step: expected[step] for step in losses}, crash
        left = steps_in(folder / "steps")
        assert "8" in left, crash
        assert len(left) <= 3, crash  # the newest, the best, one that is not removed yet
        found.add(str(crash).split()[0])
    assert found >= {"write", "sync"}


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_takes_anothers_place_is_whole_after_a_crash_at_every_effect(ram, step):
    """Or that is saved again."""
    folder, settings = ram / "run", {"keep": Last(1)}

    def replace():
        with checkpoints(folder, **settings) as saved:
            saved.restore()
            saved.save(step, model=LAYER)

    for crash in crashes(folder, lambda: save(folder, 1, **settings), replace):
        with checkpoints(folder, **settings) as again:
            assert again.restore(model=LAYER) in (1, step), crash
            again.save(3, model=LAYER)
        left = {path.name for path in folder.iterdir()} - {"history.jsonl", ".lock"}
        assert left == {"step-00000003"}, crash


def test_of_two_trainings_in_one_folder_the_second_stops_and_who_only_restores_disturbs_none(run):
    first, second = checkpoints(run), checkpoints(run)
    assert second.restore(model=LAYER) is None
    first.save(1, model=LAYER)
    unfinished = run / ".saving-step-00000002"
    unfinished.mkdir()
    assert restored(run) == 1
    assert unfinished.exists()
    with pytest.raises(CheckpointLocked, match=f"another training.*: pid {os.getpid()}"):
        second.save(2, model=LAYER)
    first.close()
    second.save(2, model=LAYER)
    assert restored(run) == 2


def test_two_trainings_share_no_remote(tmp_path, warned, remote):
    save(tmp_path / "one", 20, 24, remote=remote)
    two = tmp_path / "two"
    with pytest.raises(ConfigError, match="remote, holds step-00000024 of an earlier training"):
        save(two, 1, remote=remote)
    save(two, 4)
    refused = pytest.raises(ConfigError, match="remote holds step-00000024 of another training")
    with refused, checkpoints(two, remote=remote) as saved:
        assert saved.restore() == 4
        assert re.search("step-00000024 is passed over: .*is of another training", warned[0])
        saved.save(5, model=LAYER)
    assert "24" in steps_in(remote)


def test_what_a_caller_forgets_is_said(tmp_path, warned):
    loader = StatefulDataLoader([1, 2])
    with checkpoints(tmp_path) as saved:
        saved.save(8, loader=loader, model=LAYER, optimizer=ADAM)
    with checkpoints(tmp_path) as saved:
        saved._ranks.size = 0  # as of fewer ranks
        assert saved.restore(model=LAYER) == 8
        assert "also holds optimizer, which is not restored" in "".join(warned)
        assert "also holds loader, which is not restored" in "".join(warned)


ADAM = torch.optim.Adam(LAYER.parameters())


@golden.rows("mistakes_of_steps")
def test_what_cannot_be_is_named(tmp_path, code):
    with checkpoints(tmp_path) as saved:
        saved.save(8, model=LAYER, optimizer=ADAM)
        there = {*tmp_path.rglob("*.pt")}
        golden.refuse("mistakes_of_steps", code, {**globals(), "saved": saved}, FOLDER=tmp_path)
        for other in ({"model": nn.Linear(3, 3)}, {"optimizer": torch.optim.Adam([LAYER.bias])}):
            with pytest.raises(ConfigError, match=f"{next(iter(other))}: .* does not fit"):
                saved.restore(8, **other)
    assert {*tmp_path.rglob("*.pt")} == there


def test_a_signal_ends_the_wait_for_a_remote_that_hangs(tmp_path, monkeypatch, before_copy, remote):
    hangs = threading.Event()
    before_copy(lambda path: hangs.set() or threading.Event().wait())
    saved = checkpoints(tmp_path, remote=remote, asynchronous=True)
    join, waits = saved._uploading.join, threading.Event()

    def join_and_tell(seconds=None):
        if not waits.is_set():  # a signal before the wait would end none
            waits.set()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return join(seconds)

    monkeypatch.setattr(saved._uploading, "join", join_and_tell)
    with pytest.raises(KeyboardInterrupt), saved:  # noqa: PT012 - its end raises
        saved.save(1, model=LAYER)
        hangs.wait()
    assert "did not end" in str(saved.failure)


def test_a_slow_copy_keeps_its_step_and_holds_up_neither_the_training_nor_the_disk(
    before_copy, warned, run, remote
):
    begun, goes_on = threading.Event(), threading.Event()
    before_copy(lambda path: begun.set() or goes_on.wait())
    with checkpoints(run, remote=remote, asynchronous=True, keep=Last(1) | Best("loss")) as saved:
        for step in range(1, 5):
            saved.save(step, model=LAYER)
            begun.wait()
        until((run / "step-00000004").exists)
        assert not steps_in(remote)
        goes_on.set()
    assert not warned
    assert "4" in steps_in(remote)


def test_what_a_later_process_copies_is_not_replaced_by_the_one_before(tmp_path, remote):
    """Of a node that was given up for lost, and still trains."""
    lost = checkpoints(tmp_path / "one", remote=remote, keep=Last(1) | Best("loss"))
    lost.save(4, model=LAYER)
    with checkpoints(tmp_path / "two", remote=remote) as saved:
        assert saved.restore(model=LAYER) == 4
        saved.save(8, model=LAYER)
        lost.save(12, model=LAYER)
    assert "Fenced: A later process of this training copies to" in str(lost.failure)
    assert steps_in(remote) == {"4", "8"}


def test_workers_draw_other_numbers_in_each_rank_and_for_each_seed_and_step(documents, tmp_path):
    found = set()
    for rank, seed in ((0, 0), (0, 1), (1, 0)):
        saved, training = checkpoints(tmp_path / f"{rank}-{seed}"), Training(documents)
        torch.manual_seed(seed)
        saved._ranks.rank = rank
        saved.restore(loader=training.loader)
        found.add(training.loader.generator.initial_seed())
    saved._ranks.rank = 0
    saved.save(4, loader=training.loader, **training.states)
    training.new_loader()
    saved.rollback(to=4, loader=training.loader, skip_input=False, **training.states)
    found.add(training.loader.generator.initial_seed())
    assert len(found) == 4


def test_conjugate_views_are_saved_as_they_are(tmp_path):
    value = torch.tensor([1 + 2j])
    with checkpoints(tmp_path, asynchronous=True) as saved:
        saved.save(1, views={"one": value, "other": value.conj()})
    found = {}
    checkpoints(tmp_path).restore(views=found)
    assert found == {"one": value, "other": value.conj()}


class Wrapped:
    """A loader as Accelerate makes one for several processes: its dataset is not ours."""

    def __init__(self, loader):
        self.dataset = SimpleNamespace(dataset=loader.dataset)
        self.state_dict, self.load_state_dict, self.base_dataloader = (
            loader.state_dict,
            loader.load_state_dict,
            loader,
        )

    def __iter__(self):
        return iter(self.base_dataloader)


@pytest.mark.parametrize("steps", [12, 16, 20])  # an epoch has 10
def test_a_wrapped_loader_goes_on_in_its_epoch(documents, steps, run, expected):
    losses = {}
    for until_step in (steps, 25):
        training = Training(documents)
        training.loader = Wrapped(training.loader)
        with checkpoints(run) as saved:
            training.run(saved, until_step)
        losses |= training.losses
    assert losses == expected


def test_a_step_that_is_saved_right_after_its_restore_keeps_its_input(documents, run, expected):
    losses = trained(documents, run, 20)  # the end of an epoch
    training = Training(documents)
    with checkpoints(run) as saved:
        step = saved.restore(loader=training.loader, **training.states)
        saved.save(step, loader=training.loader, **training.states)
    losses |= trained(documents, run)
    assert losses == expected


class Numbered(torch.utils.data.Dataset[int]):
    """Ten batches of five, of a dataset that is not ours."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        return number


def loops_over_numbers(run, workers, stop, **named):
    loader = StatefulDataLoader(
        Numbered(),
        batch_size=5,
        num_workers=workers,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )
    seen = []
    with checkpoints(run, save=EverySteps(1)) as saved:
        step = saved.restore(loader=loader) or 0
        for epoch in range(saved.epoch, 3):
            for batch in loader:
                seen.append((epoch, batch.tolist()))
                step += 1
                saved.maybe_save(step, loader=loader, **(named or {"epoch": epoch}))
                if step == stop:
                    return seen
            if step == -stop:
                saved.save(step, loader=loader, epoch=epoch)
                return seen
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_not_ours_goes_on_in_its_epoch(tmp_path, workers):
    for stop in (9, 10, -10, 14, 20, 30):
        batches = loops_over_numbers(tmp_path / str(stop), workers, stop)
        batches += loops_over_numbers(tmp_path / str(stop), workers, 0)
        assert [epoch for epoch, _ in batches] == [
            epoch for epoch in range(3) for _ in range(10)
        ], stop
        for epoch in range(3):
            seen = [number for at, numbers in batches if at == epoch for number in numbers]
            assert sorted(seen) == list(range(50)), (stop, epoch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops", [[25], [3, 13, 25], [10, 20, 25]])
def test_each_epoch_is_saved_after_its_last_batch(documents, run, workers, stops):
    for stop in stops:
        training = Training(documents)
        training.loader = StatefulDataLoader(training.dataset, batch_size=5, num_workers=workers)
        policy = EveryEpoch() | EverySteps(3)
        with TrainingCheckpoints(run, save=policy, keep=Last(99), asynchronous=False) as saved:
            training.run(saved, stop)
    assert steps_in(run) == {*map(str, range(3, 25, 3)), "10", "20"}


def test_an_epoch_that_only_the_loop_knows_is_saved_in_the_next_one(tmp_path):
    with TrainingCheckpoints(tmp_path, save=EveryEpoch(), asynchronous=False) as saved:
        found = [step for step in range(1, 13) if saved.maybe_save(step, epoch=(step - 1) // 5)]
        assert found == [6, 11]
        with pytest.raises(ConfigError, match="does not show its epoch"):
            saved.maybe_save(13)


def failing_on_one(rank, run):
    errors = []
    with checkpoints(run, on_failure=errors.append) as saved:

        def write(folder):
            if rank == 1:
                raise OSError("the node's disk")

        saved.save(1, model=LAYER, writer=write)
        assert list(map(str, errors)) == ["the node's disk"][:rank]
        saved.save(2, model=LAYER)


def test_a_hook_is_called_in_the_rank_whose_save_failed(ranks, run):
    ranks.call(failing_on_one, 2, str(run))
    assert steps_in(run) == {"2"}


class FailsOnOne(SavePolicy):
    """A policy as a user writes it, with a knowledge of its own."""

    def is_due(self, moment):
        return moment.seconds >= 0 and torch.distributed.get_rank() == 1


def steps_saved(rank, run, documents, policy):
    """Of ten steps. Rank 1 has five batches in each epoch, and rank 0 six."""
    dataset = ReaderDataset(JsonlReader(documents, limit=11)).shard(2, rank)
    loader = StatefulDataLoader(dataset, batch_size=1)
    step = 0
    saved_steps = []
    with TrainingCheckpoints(run, save=policy, keep=Last(99)) as saved:
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            for _ in itertools.islice(loader, 10 - step):
                step += 1
                if saved.maybe_save(step, loader=loader):
                    saved_steps.append(step)
    Path(f"{run}-{rank}.json").write_text(json.dumps(saved_steps))


@pytest.mark.parametrize("policy, steps", [(EveryEpoch(), [5, 6, 10]), (FailsOnOne(), None)])
def test_ranks_save_together_where_one_of_them_is_to(documents, ranks, run, policy, steps):
    ranks.call(steps_saved, 2, str(run), documents, policy)
    found = [json.loads(Path(f"{run}-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    assert found[0] == (steps or found[0])
    assert found[0]


def bests_saved(rank, run, losses):
    """Only rank 0's losses count, also after a restart, which knows the saved ones."""
    saved_steps = []
    with TrainingCheckpoints(run, save=Best("loss", lowest=True), keep=Last(99)) as saved:
        first = (saved.restore(model=LAYER) or 0) + 1
        for step, loss in enumerate(losses, first):
            metrics = {"loss": loss if rank == 0 else float(step % 3)}
            if step % 5 and saved.maybe_save(step, model=LAYER, metrics=metrics):
                saved_steps.append(step)
    with Path(f"{run}-{rank}.jsonl").open("a") as file:
        file.write(f"{saved_steps}\n")


def test_a_new_best_is_saved_by_the_number_of_rank_0(ranks, run):
    for losses in ([5.0, 4.0, 4.5, 3.0], [3.5, 2.5, math.nan]):
        ranks.call(bests_saved, 2, str(run), losses)
    for rank in (0, 1):
        assert Path(f"{run}-{rank}.jsonl").read_text() == "[1, 2, 4]\n[6]\n"
    assert steps_in(run) == {"1", "2", "4", "6"}


def test_an_epoch_that_nobody_knows_is_asked_for(tmp_path, warned):
    loops_over_numbers(tmp_path, 0, 14, epoch=None)
    assert [line for line in warned if "give maybe_save and save epoch=" in line] == warned
    assert len(warned) == 1
    with pytest.raises(ConfigError, match=r"step-00000014 was saved without its epoch.*epoch="):
        loops_over_numbers(tmp_path, 0, 20)


def test_a_step_that_was_copied_to_another_name_is_passed_over(tmp_path, warned):
    save(tmp_path, 4)
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000008")
    assert restored(tmp_path) == 4
    assert "is a copy of step-00000004" in warned[0]


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.full)])
def test_every_damaged_byte_is_found_and_the_step_before_is_used(documents, warned, every, run):
    trained(documents, run)
    newest, tried = run / "step-00000024", 0
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        damages = [flipped(whole, place) for place in range(0, len(whole), every)]
        for damage in (*damages, whole[:-1], whole + b"\0", b"", None):
            path.unlink() if damage is None else path.write_bytes(damage)
            warned.clear()
            training = Training(documents)
            step = checkpoints(run).restore(**training.states, loader=training.loader)
            assert step == 20, (path, damage)
            assert re.search(f"passed over.*{re.escape(str(path))}", warned[0])
            tried += 1
        path.write_bytes(whole)
    assert tried > 150
    assert checkpoints(run).restore(**Training(documents).states) == 24


def test_without_any_whole_step_it_says_what_is_wrong_with_each(tmp_path):
    assert restored(tmp_path) is None
    save(tmp_path, 20, 24)
    for manifest in tmp_path.glob("step-*/manifest.json"):
        manifest.unlink()
    with pytest.raises(
        CheckpointCorrupt,
        match=r"no step that is whole: step-00000024: .*missing.* step-00000020: ",
    ):
        restored(tmp_path)


def trained_adam():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(layer.in_features)).sum() for layer in model).backward()
    optimizer.step()
    return model, optimizer


def test_a_tensor_that_cannot_hold_what_was_saved_is_replaced(tmp_path):
    with checkpoints(tmp_path) as saved:
        saved.save(1, state={"mean": torch.tensor(3.7), "limit": torch.tensor(0.5)})
    state = {"mean": torch.tensor(0), "limit": torch.zeros(3)}
    assert checkpoints(tmp_path).restore(state=state) == 1
    assert state == {"mean": torch.tensor(3.7), "limit": torch.tensor(0.5)}


def test_the_tensors_of_a_dict_are_restored_in_place(tmp_path):
    """Else a model whose ``state_dict()`` is given would stay as it was."""
    model, optimizer = trained_adam()
    with checkpoints(tmp_path) as saved:
        states = {"layers": [1], "gone": 1, "model": model.state_dict()}
        saved.save(1, model=model.state_dict(), nested=states, optimizer=optimizer.state_dict())
    other, twin, found = trained_adam()[0], trained_adam()[0], {}
    nested = {"layers": [], "new": 2, "model": twin.state_dict()}
    given = {"model": other.state_dict(), "nested": nested, "optimizer": found}
    assert checkpoints(tmp_path).restore(**given) == 1
    for each in (other, twin):
        assert all(
            torch.equal(*pair) for pair in zip(each.parameters(), model.parameters(), strict=True)
        )
    assert (nested["layers"], set(nested)) == ([1], {"layers", "gone", "model"})
    assert found["state"][0]["step"] == 1


class Custom:
    def state_dict(self):
        return {"path": Path("x")}

    def load_state_dict(self, state):
        assert state == {"path": Path("x")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_that_no_restore_would_take_ends_the_first_save(asynchronous, run):
    with checkpoints(run, asynchronous=asynchronous) as saved:
        saved.save(1, model=LAYER)
        for state, message in (
            (Custom(), r"custom/path holds pathlib\.PosixPath"),
            ({"groups": [{"lr": np.float64(0.1)}]}, "custom/groups/0/lr holds numpy"),
            ({"key": lambda: None}, "custom/key holds what cannot be pickled"),
        ):
            with pytest.raises(ConfigError, match=message):
                saved.save(2, custom=state)
    assert steps_in(run) == {"1"}


def test_any_object_is_saved_and_restored_only_if_that_is_asked_for(tmp_path):
    checkpoints(tmp_path, only_plain=False).save(1, custom=Custom())
    with pytest.raises(ConfigError, match="set only_plain=False"):
        checkpoints(tmp_path).restore(custom=Custom())
    assert checkpoints(tmp_path, only_plain=False).restore(custom=Custom()) == 1


def test_a_remote_that_cannot_be_listed_or_used_is_named(tmp_path, warned, run):
    (tmp_path / "file").touch()
    remote = str(tmp_path / "file" / "run")
    with pytest.raises(StorageFailed, match=f"{remote} cannot be listed: NotADirectoryError"):
        restored(run, remote=remote)
    save(run, 1)
    assert restored(run, remote=remote) == 1
    assert f"{remote} cannot be listed" in warned[0]
    with pytest.raises(ConfigError, match="remote: 'nothing://x' cannot be used"):
        checkpoints(run, remote="nothing://x")


@pytest.mark.parametrize("parts", ["", "; fully_shard(model)"])
def test_the_last_save_is_there_without_a_with_block(run, remote, parts):
    code = (
        "import sys, torch; from datatrove_ckpt.torch import TrainingCheckpoints as Saved;"
        "from torch.distributed.fsdp import fully_shard; store = torch.distributed.HashStore();"
        "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1);"
        f"model = torch.nn.Linear(6000, 6000){parts};"
        "Saved(sys.argv[1], remote=sys.argv[2]).save(1, model=model)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, run, remote], capture_output=True, text=True, check=True
    )
    assert "Use TrainingCheckpoints in a with block" in done.stderr
    assert checkpoints(run).restore() == 1
    assert steps_in(remote) == {"1"}


class Small(files.Disk):
    """A disk that has room for so many bytes below a folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.room = 10**6

    def usage(self, path=None):
        held = sum(each.stat().st_size for each in self.folder.rglob("*") if each.is_file())
        return SimpleNamespace(free=max(0, self.room - held))

    def need(self, size):
        if self.usage().free < size:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, fd, data, path):
        with explained("write to", path):
            self.need(len(data))
        super().write(fd, data, path)

    def make_dir(self, path, mode):
        with explained("make", path):
            self.need(4096)
        super().make_dir(path, mode)


@pytest.fixture
def small(tmp_path, monkeypatch):
    disk, pwrite = Small(tmp_path), os.pwrite
    monkeypatch.setattr(files, "disk", disk)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    monkeypatch.setattr(os, "pwrite", lambda *given: disk.need(4096) or pwrite(*given))
    return disk


def test_steps_that_go_after_a_save_go_before_it_when_the_disk_is_short(tmp_path, small):
    model = nn.Linear(100, 100)
    with checkpoints(tmp_path, keep=Last(3)) as saved:
        saved.save(0, model=model)
        size = small.room - small.usage().free
        small.room = int(3.5 * size)
        for step in range(1, 8):
            saved.save(step, model=model)
            assert saved.failure is None, step
        assert steps_in(tmp_path) == {"5", "6", "7"}
        small.room = size // 2
        saved.save(8, model=model)
        assert isinstance(saved.failure, StorageFailed)
        assert "7" in steps_in(tmp_path)
        small.room = 10**6
        saved.save(8, model=model)
    # Another process starts on a disk that is full of its own steps.
    small.room = 0
    with checkpoints(tmp_path, keep=Last(3)) as saved:
        assert saved.restore(model=model) == 8
        small.room = 10**6
        small.room -= small.usage().free - 2048  # a manifest may be some bytes longer than others
        saved.save(9, model=model)
        assert saved.failure is None


# signals -----------------------------------------------------------------------------------------


def test_a_signal_saves_and_ends_as_the_signal_would(documents, run, expected):
    training = Training(documents)
    before = signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)

    def interrupt(step):
        if step == 9:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended, checkpoints(run) as saved:
        training.run(saved, 25, interrupt)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert max(training.losses) == 10
    losses = trained(documents, run)
    assert min(losses) == 11
    assert training.losses | losses == expected


def test_the_end_of_slurms_time_limit_saves(documents, monkeypatch, run):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    training = Training(documents)
    with pytest.raises(CkptError, match="time limit"), checkpoints(run) as saved:
        training.run(saved, 10**6, lambda step: time.sleep(0.05))
    assert checkpoints(run).restore() == max(training.losses)


# the remote --------------------------------------------------------------------------------------


def test_a_new_node_restores_from_the_remote(documents, warned, run, remote, expected):
    trained(documents, run, 22, remote=remote)
    assert {path.name for path in Path(remote).iterdir()} >= {"step-00000020"}
    shutil.rmtree(run)
    losses = trained(documents, run, remote=remote)
    assert losses == {step: expected[step] for step in range(21, 26)}
    assert not warned

    model = run / "step-00000024/states/model.pt"
    model.write_bytes(b"damaged")
    assert checkpoints(run, remote=remote).restore(**Training(documents).states) == 24
    model.write_bytes(b"damaged")
    Path(remote, "step-00000024/states/model.pt").write_bytes(b"damaged, too")
    states = Training(documents).states
    with checkpoints(run, remote=remote) as saved:
        assert saved.restore(**states) == 20
        saved.save(24, **states)
    (passed,) = [line for line in warned if "step-00000024 is passed over" in line]
    assert remote in passed
    assert str(model) in passed
    shutil.rmtree(run)
    assert checkpoints(run, remote=remote).restore(**states) == 24


# beside the training -----------------------------------------------------------------------------


class Held(files.Disk):
    """Renames wait."""

    def __init__(self):
        super().__init__()
        self.released, self.reached = threading.Event(), threading.Event()

    def rename(self, source, target):
        self.reached.set()
        assert self.released.wait(60)
        super().rename(source, target)


def test_the_training_waits_for_the_copy_in_memory_only(documents, tmp_path, monkeypatch, run):
    training, disk = Training(documents), Held()
    batch = torch.ones(5, 2)
    with checkpoints(run, asynchronous=True, save=EverySeconds(0.0)) as saved:
        monkeypatch.setattr(files, "disk", disk)
        training.step(batch)
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        assert saved.maybe_save(1, **training.states)
        assert disk.reached.wait(60)
        training.step(batch)
        assert not saved.maybe_save(2, **training.states)  # at most one at a time
        assert not steps_in(run)
        disk.released.set()
        until(lambda: saved.maybe_save(3, **training.states))
    again = Training(documents)
    assert checkpoints(run).restore(1, **again.states) == 1
    assert all(torch.equal(value, before[name]) for name, value in again.model.state_dict().items())


def test_tied_weights_and_metadata_are_kept(run):
    model = nn.Sequential(
        nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False), nn.BatchNorm1d(300)
    )
    model[1].weight = model[0].weight
    with checkpoints(run, asynchronous=True) as saved:
        saved.save(1, model=model)
    assert Path(run, "step-00000001/states/model.pt").stat().st_size < 1.2 * 300 * 300 * 4
    state = torch.load(run / "step-00000001/states/model.pt")
    assert state._metadata == model.state_dict()._metadata


@pytest.mark.parametrize("room", [0, 2000])
def test_a_full_disk_is_named_and_the_training_goes_on(
    documents, tmp_path, monkeypatch, warned, room, run, expected
):
    disk = Full(room)
    trained(documents, run, 6)
    monkeypatch.setattr(files, "disk", disk)
    training = Training(documents)
    with checkpoints(run, asynchronous=True) as saved:
        training.run(saved, 14)
        assert (
            isinstance(saved.failure, StorageFailed)
            or until(lambda: saved.failure is not None) is None
        )
        assert "step-00000008 is not saved: Could not write to" in warned[0]
        assert "No space left" in warned[0]
        assert steps_in(run) == {"4"}
        disk.is_full = False
        saved.save(14, loader=training.loader, **training.states)
    losses = trained(documents, run)
    assert training.losses | losses == {step: expected[step] for step in range(5, 26)}
    assert min(losses) == 15

    disk.is_full = True
    errors = []
    other = checkpoints(tmp_path / "other", asynchronous=True, on_failure=errors.append)
    with pytest.raises(StorageFailed) as failed, other as saved:
        saved.save(1, **training.states)  # the end of the block says that the last one is not there
    assert errors == [failed.value]


def test_a_remote_that_refuses_is_named_each_time(monkeypatch, warned, run, remote):
    monkeypatch.setattr(ObjectStore, "put", Mock(side_effect=PermissionError("not allowed")))
    with pytest.raises(StorageFailed, match=r"step-00000008 is not copied to .*Error: not allowed"):
        save(run, 4, 8, remote=remote)
    assert re.search("step-00000004 is not copied to .*not allowed", warned[0])
    assert restored(run) == 8
    assert not steps_in(remote)


def test_a_copy_that_fails_once_is_no_failure(before_copy, warned, run, remote):
    before_copy(Mock(side_effect=itertools.chain([OSError("away")], itertools.repeat(None))))
    save(run, 4, remote=remote, asynchronous=True)
    assert "step-00000004 is not copied to" in warned[0]
    assert steps_in(remote) == {"4"}


@pytest.mark.parametrize("change", [bytes.upper, lambda data: data[:-1], None])
def test_a_copy_that_differs_is_named_and_replaces_no_older_one(
    tmp_path, monkeypatch, warned, run, remote, change
):
    put = ObjectStore.put

    def damage(store, name, content):
        if isinstance(content, Path) and name.startswith("step-00000008/states"):
            content = content.read_bytes()
            if change is None:
                return
            content = change(content)
        put(store, name, content)

    with checkpoints(run, remote=remote, keep=Last(1)) as saved:
        saved.save(4, model=LAYER)
        monkeypatch.setattr(ObjectStore, "put", damage)
        saved.save(8, model=LAYER)
        assert "step-00000008/states/model.pt" in str(saved.failure)
        assert steps_in(remote) == {"4"}
        assert restored(tmp_path / "new node", remote=remote) == 4
        monkeypatch.setattr(ObjectStore, "put", put)
        saved.save(12, model=LAYER)
        assert saved.failure is None
    assert steps_in(remote) == {"12"}


@pytest.fixture
def adapted(monkeypatch):
    """States of a training with a large part that never changes."""
    monkeypatch.setattr(step_folder, "SHARED_BYTES", 50_000)
    return {"base": {"table": torch.arange(20000.0)}, "adapter": {"rank": torch.zeros(2)}}


def save_adapted(saved, states, *steps):
    for step in steps:
        states["adapter"]["rank"].fill_(step)
        saved.save(step, **states)


def assert_adapted(step, folder, remote=None):
    """The step is whole in its folder, or restored from the remote."""
    found = {"base": {}, "adapter": {}}
    with checkpoints(folder, remote=remote) as saved:
        assert saved.restore(step, weights_only=True, **found) in (
            step,
            found["adapter"]["rank"][0],
        )
    assert torch.equal(found["base"]["table"], torch.arange(20000.0))
    return int(found["adapter"]["rank"][0])


def numbers_of_file(run, file="states/base.pt"):
    return {path.stat().st_ino for path in run.glob(f"step-*/{file}")}


def test_steps_share_the_files_that_did_not_change(tmp_path, run, remote, adapted, before_copy):
    sent = Counter()
    before_copy(lambda path: sent.update([path.name]))
    with checkpoints(run, remote=remote, keep=Last(3) | Every(2)) as saved:
        save_adapted(saved, adapted, 1, 2, 3, 4)
        assert len(numbers_of_file(run)) == 2
        assert len(numbers_of_file(run, "states/adapter.pt")) == 3
    with checkpoints(run, remote=remote, keep=Last(3) | Every(2)) as saved:
        assert saved.restore(**adapted) == 4
        saved.rollback(to=3, **adapted)
        save_adapted(saved, adapted, 5, 6)
        assert len(numbers_of_file(run)) == 2
    assert sent["base.pt"] == 1
    assert sent["adapter.pt"] == 6 + 1
    for step in (2, 3, 5, 6):
        assert assert_adapted(step, run) == step
        assert assert_adapted(step, tmp_path / f"node {step}", remote) == step
    assert len([*Path(remote, "shared").iterdir()]) == 1


def test_old_manifests_are_not_read_for_each_large_file(run, adapted, monkeypatch):
    reads = Counter()
    read_manifest = step_folder.read_manifest

    def counted(folder, name):
        reads[name.step] += 1
        return read_manifest(folder, name)

    monkeypatch.setattr(step_folder, "read_manifest", counted)
    tables = {f"table{number}": {"rows": torch.arange(20000.0)} for number in range(8)}
    with checkpoints(run, keep=Last(9)) as saved:
        save_adapted(saved, adapted | tables, *range(1, 5))
    reads.clear()
    with checkpoints(run, keep=Last(9)) as saved:
        saved.restore(**adapted | tables)
        save_adapted(saved, adapted | tables, 5)
    assert 0 < reads[1] < len(tables)


def test_one_damaged_byte_of_a_shared_file_leaves_the_steps_of_its_second_copy(run, adapted):
    with checkpoints(run, keep=Last(3)) as saved:
        save_adapted(saved, adapted, *range(1, 7))
    for damaged, left in ((6, 5), (5, None)):
        base = run / f"step-0000000{damaged}/states/base.pt"
        base.write_bytes(flipped(base.read_bytes(), 20_000))
        with checkpoints(run) as saved:
            if left:
                assert saved.restore(**adapted) == left
                continue
            with pytest.raises(CheckpointCorrupt, match="no step that is whole"):
                saved.restore(**adapted)


def test_a_restart_adds_no_copy_of_a_shared_file(run, adapted):
    for first in (1, 4, 7, 10):
        with checkpoints(run, keep=Last(2) | Every(3)) as saved:
            saved.restore(**adapted)
            save_adapted(saved, adapted, first, first + 1, first + 2)
        assert len(numbers_of_file(run)) == 2
    with checkpoints(run, keep=Last(9)) as saved:
        saved.restore(**adapted)
        older = run / "step-00000009/states/base.pt"
        times = older.stat()
        older.write_bytes(flipped(older.read_bytes(), 20_000))
        os.utime(older, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
        save_adapted(saved, adapted, 13, 14)
    assert assert_adapted(13, run) == 13
    assert assert_adapted(14, run) == 14


def test_whole_parts_of_damaged_steps_are_restored_if_they_alone_are_asked_for(
    run, adapted, warned
):
    with checkpoints(run, keep=Last(2)) as saved:
        save_adapted(saved, adapted, 1, 2)
    for base in run.glob("step-*/states/base.pt"):
        base.write_bytes(flipped(base.read_bytes(), 20_000))
    for asked in ({"weights_only": True}, {}):
        found = {}
        with checkpoints(run) as saved:
            assert saved.restore(adapter=found, **asked) == 2
            assert found["rank"].tolist() == [2, 2]
            if not asked:
                save_adapted(saved, adapted, 3)
                assert saved.restore(**adapted) == 3
    assert "The parts that restore was given are whole in step-00000002" in "".join(warned)
    adapter = run / "step-00000002/states/adapter.pt"
    adapter.write_bytes(b"?")
    with checkpoints(run) as saved, pytest.raises(CheckpointCorrupt, match="adapter"):
        saved.restore(2, adapter={}, weights_only=True)


def test_large_files_go_with_the_last_step_that_has_them(run, remote, adapted, tmp_path):
    with checkpoints(run, remote=remote, keep=Last(1)) as saved:
        save_adapted(saved, adapted, 1, 2)
        before = [path.name for path in Path(remote, "shared").iterdir()]
        adapted["base"] = {"table": torch.zeros(20000)}
        save_adapted(saved, adapted, 3, 4, 5)
        after = [path.name for path in Path(remote, "shared").iterdir()]
    assert len(before) == len(after) == 1
    assert before != after
    assert steps_in(remote) == {"5"}


def test_a_file_that_is_damaged_in_its_place_is_no_part_of_what_this_process_makes_next(
    run, remote, adapted, warned
):
    def damage(step):
        with Path(run, f"step-0000000{step}/states/base.pt").open("r+b") as file:
            file.seek(20_000)
            file.write(b"?")

    with checkpoints(run, remote=remote) as saved:
        save_adapted(saved, adapted, 1)
        damage(1)
        save_adapted(saved, adapted, 2)
        assert assert_adapted(2, run) == 2
        file = Path(run, "step-00000002/states/base.pt")
        times = file.stat()
        damage(2)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
        assert saved.restore(**adapted) == 2
    assert assert_adapted(2, run) == 2


def test_a_node_that_was_given_up_removes_no_shared_object(run, remote, adapted, tmp_path):
    saved = checkpoints(run, remote=remote)
    with saved, checkpoints(tmp_path / "later", remote=remote) as later:
        save_adapted(saved, adapted, 1, 2)
        later.restore(**adapted)
        adapted["base"]["table"] += 1
        save_adapted(later, adapted, 3, 4)
        copied = [*Path(remote, "shared").iterdir()]
        with pytest.raises(Fenced):
            saved._steps.remove_shared([])
    assert [*Path(remote, "shared").iterdir()] == copied


@pytest.mark.parametrize(
    "steps, file, damage",
    [
        (1, "step-00000001/states/base.pt", Path.unlink),
        (1, "step-00000001/states/base.pt", lambda path: path.write_bytes(b"?")),
        (2, "shared/*", Path.unlink),  # by a rule for the age of objects
    ],
)
def test_a_damaged_file_in_the_remote_is_sent_again(
    run, remote, adapted, tmp_path, steps, file, damage
):
    with checkpoints(run, remote=remote) as saved:
        save_adapted(saved, adapted, *range(1, steps + 1))
        [path] = Path(remote).glob(file)
        damage(path)
        save_adapted(saved, adapted, 3)
        assert saved.failure is None
    assert assert_adapted(3, tmp_path / "new node", remote) == 3


def test_without_hard_links_each_step_has_its_own_files(run, adapted, monkeypatch):
    class Unlinked(files.Disk):
        def link(self, source, target):
            with explained("link", target):
                raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "disk", Unlinked())
    with checkpoints(run) as saved:
        save_adapted(saved, adapted, 1, 2)
    assert len(numbers_of_file(run)) == 2
    assert assert_adapted(2, run) == 2


def test_a_release_that_knows_no_shared_files_refuses_such_a_step(
    run, remote, adapted, tmp_path, monkeypatch
):
    with checkpoints(run, remote=remote) as saved:
        save_adapted(saved, adapted, 1, 2)
    monkeypatch.setattr(step_folder, "SHARED", "unknown")
    with pytest.raises(StorageFailed, match=r"another version of this package \(.*Checkpoints 2, "):
        restored(tmp_path / "new node", remote=remote)
    assert read_manifest(run, StepName(0, 2))["format"] == step_folder.FORMAT


@pytest.mark.parametrize(
    "torn, every",
    [(False, 15), *(pytest.param(torn, 1, marks=pytest.mark.full) for torn in (False, True))],
)
def test_a_crash_at_every_effect_leaves_steps_that_share_files_whole(
    ram, adapted, torn, every, tmp_path
):
    folder = ram / "run"
    steps, remote = folder / "steps", folder / "remote"
    nodes = itertools.count()

    def attempt(last=3):
        with checkpoints(steps, remote=str(remote), keep=Last(2)) as saved:
            first = (saved.restore(**adapted) or 0) + 1
            save_adapted(saved, adapted, *range(first, last + 1))

    def assert_whole(crash, *torn_manifest):
        for step in steps_in(steps):
            assert assert_adapted(int(step), steps) == int(step), crash
        for step in steps_in(remote):
            with suppress(*torn_manifest):
                node = tmp_path / str(next(nodes))
                assert assert_adapted(int(step), node, str(remote)) == int(step), crash

    for crash in crashes(folder, folder.mkdir, attempt, torn, every):
        assert_whole(crash, *[CheckpointCorrupt] * torn)
        attempt(5)
        assert_whole(crash)
        assert steps_in(steps) == steps_in(remote) == {"4", "5"}, crash
        assert len([*(remote / "shared").iterdir()]) == 1, crash


@pytest.mark.parametrize("is_md5", [True, False])
def test_a_copy_is_read_unless_the_store_tells_its_md5(tmp_path, monkeypatch, remote, is_md5):
    saved = checkpoints(tmp_path / "run", remote=remote)

    def md5(store, name):
        content = Path(remote, name).read_bytes()
        return hashlib.md5(content).hexdigest() + "-2" * (not is_md5)

    read = []
    blocks = ObjectStore.blocks
    monkeypatch.setattr(ObjectStore, "md5", md5)
    monkeypatch.setattr(
        ObjectStore, "blocks", lambda store, name: read.append(name) or blocks(store, name)
    )
    with saved:
        saved.save(4, model=LAYER)
    files_of = ["random.pt", "input.pt", "states/model.pt"]
    assert sorted(read) == sorted([] if is_md5 else [f"step-00000004/{file}" for file in files_of])


def test_an_unreachable_remote_is_no_damage(monkeypatch, run, remote):
    save(run, 4, remote=remote)
    shutil.rmtree(run)
    monkeypatch.setattr(ObjectStore, "blocks", Mock(side_effect=PermissionError("away")))
    with pytest.raises(StorageFailed, match=r"step-00000004 cannot be read: PermissionError: away"):
        restored(run, remote=remote)
    assert [*run.iterdir()] == []


# roll back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_rollback_is_exact_with_the_input_again_or_skipped(
    documents, skip, killed, run, expected
):
    training = Training(documents)
    with checkpoints(run) as saved:
        training.run(saved, 18)
        if not skip:
            training.new_loader()
        assert (
            saved.rollback(before=16, loader=training.loader, skip_input=skip, **training.states)
            == 12
        )
    assert not Path(run, "step-00000016").exists()
    assert checkpoints(run).restore() == 12
    again = Training(documents) if killed else training
    again.new_loader()
    again.losses.clear()
    with checkpoints(run) as saved:
        again.run(saved, 20)
    assert min(again.losses) == 13
    found = [again.losses[step] for step in range(13, 19)]
    if skip:
        later = [expected[step + 6] for step in range(13, 19)]
        assert [batch for _, batch in found] == [batch for _, batch in later]
        assert found != later
    else:
        assert found == [expected[step] for step in range(13, 19)]
    assert {"12.1", "16.1", "20.1"} <= steps_in(run)
    events = [*read_events(run)]
    assert [event["skipped_input"] for event in events if event["event"] == "rolled back"] == [skip]
    for saved in [event for event in events if event["event"] == "saved"]:
        assert saved["bytes"] > 1000
        assert saved["pause_seconds"] > 0


def test_a_rollback_takes_nested_files_and_one_that_fails_changes_nothing(tmp_path, monkeypatch):
    def writer(folder):
        Path(folder, "deep").mkdir()
        Path(folder, "deep/file").write_text("content")

    model, disk = nn.Linear(100, 100), Full(0)
    with checkpoints(tmp_path) as saved:
        for late in (Future(), (part for part in ())):
            saved.save(1, model=model, writer=lambda folder, late=late: late)
            assert f"the writer returned a {type(late).__name__}" in str(saved.failure)
        saved.save(1, model=model, writer=writer)
        nn.init.zeros_(model.weight)
        saved.save(2, model=model)
        monkeypatch.setattr(files, "disk", disk)
        with pytest.raises(StorageFailed, match="No space left"):
            saved.rollback(to=1, model=model)
        assert not model.weight.any()
        assert steps_in(tmp_path) == {"1", "2"}
        disk.is_full = False
        assert saved.rollback(to=1, model=model) == 1
        assert model.weight.any()
    assert steps_in(tmp_path) == {"1", "1.1"}
    assert Path(tmp_path, "step-00000001.1/writer/deep/file").read_text() == "content"


def test_a_rollback_to_a_step_or_to_the_best(run):
    with checkpoints(run) as saved:
        for step, loss in ((4, 2.0), (8, 1.0), (12, 3.0)):
            saved.save(step, model=LAYER, metrics={"loss": loss})
        assert saved.rollback("best", model=LAYER) == 8
        assert saved.rollback(4, model=LAYER) == 4
    assert restored(run) == 4


# several ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kills, steps, width",
    [
        (4, 200, "64"),
        pytest.param(50, 1000, "64", marks=pytest.mark.full),
        pytest.param(50, 200, "1024", marks=pytest.mark.full),
    ],
)
def test_killed_at_random_instants_two_ranks_see_the_same_losses(
    documents, tmp_path, ranks, kills, steps, width, run
):
    ranks.run(2, documents, tmp_path / "undisturbed", steps, WIDTH=width)
    dice = random.Random(kills)
    for _ in range(kills):
        processes = ranks.start(2, documents, run, steps, SLEEP="0.02", EVERY="2", WIDTH=width)
        before = len(losses_of(run))
        until(lambda before=before: len(losses_of(run)) > before)
        time.sleep(dice.random() * 0.3)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    assert len(losses_of(run)) < steps
    ranks.run(2, documents, run, steps, WIDTH=width)
    for rank in range(2):
        assert losses_of(run, rank) == losses_of(tmp_path / "undisturbed", rank)


def test_more_ranks_go_on_with_the_same_batches_and_a_lost_node_with_the_remote(
    documents, tmp_path, ranks, run, remote
):
    ranks.run(2, documents, tmp_path / "undisturbed", 30)
    ranks.run(2, documents, run, 15, REMOTE=remote)
    shutil.rmtree(run)
    ranks.run(3, documents, run, 30, REMOTE=remote)

    def batches(folder, size):
        each = [losses_of(folder, rank) for rank in range(size)]
        return {step: sum(one[step][1] for one in each) for step in each[0]}

    found, expected = batches(run, 3), batches(tmp_path / "undisturbed", 2)
    assert found == {step: expected[step] for step in range(16, 31)}


def restored_on_two_nodes(rank, nodes, remote):
    """Each node has a disk of its own."""
    model = nn.Linear(1, 1)

    def restored(remote=None):
        with checkpoints(nodes[rank], remote=remote) as saved:
            return saved.restore(model=model), model.bias.item()

    assert restored() == (1, 1.0)
    assert restored(remote) == (2, 3.0)
    assert restored() == (2, 3.0)
    path = Path(nodes[rank], "step-00000002")
    manifest = read_manifest(path.parent, StepName(0, 2))
    del manifest["save"]
    path.joinpath("manifest.json").write_bytes(sealed(manifest))  # of an earlier build
    assert restored() == (2, 3.0)


def test_nodes_that_made_a_step_apart_restore_the_same(tmp_path, ranks, remote):
    nodes = [str(tmp_path / "back"), str(tmp_path / "stayed")]
    model = nn.Linear(1, 1)
    for step, node, url in ((1, 0, None), (2, 0, None), (2, 1, remote)):
        with checkpoints(nodes[node], remote=url) as saved:
            saved.restore()
            nn.init.constant_(model.bias, step + node)
            saved.save(step, model=model)
        if step == 1:
            shutil.copytree(nodes[0], nodes[1])
    ranks.call(restored_on_two_nodes, 2, nodes, remote)


def test_a_signal_to_one_rank_stops_all_at_one_step(documents, tmp_path, ranks, run):
    processes = ranks.start(2, documents, run, 10**6, SLEEP="0.02", EVERY="100000")
    until(lambda: len(losses_of(run)) > 3)
    processes[1].terminate()
    join(processes, 128 + signal.SIGTERM)
    assert max(losses_of(run, 0)) == max(losses_of(run, 1))
    assert checkpoints(run).restore() == max(losses_of(run))
    steps = max(losses_of(run)) + 20
    undisturbed = tmp_path / "undisturbed"
    for folder in (undisturbed, run):
        ranks.run(2, documents, folder, steps)
    # The scheduler of the first attempt has another length: only the documents are the same.
    found, expected = (
        [batch for _, batch in losses_of(each).values()] for each in (run, undisturbed)
    )
    assert found == expected


def test_ranks_that_restored_a_late_step_answer_a_signal_soon(documents, ranks, run):
    late = 100_000
    ranks.run(2, documents, run, late + 5, FIRST=str(late))
    processes = ranks.start(2, documents, run, late + 1000, SLEEP="0.3", EVERY="1000")
    until(lambda: max(losses_of(run)) > late + 7)
    os.kill(processes[0].pid, signal.SIGTERM)
    signalled = max(losses_of(run))  # or later, if this process had to wait
    join(processes, 128 + signal.SIGTERM)
    assert checkpoints(run).restore() == max(losses_of(run)) <= signalled + 7


def test_a_signal_is_answered_within_few_steps_when_fast_ones_become_slow(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt), checkpoints(tmp_path, save=EverySteps(10**6)) as saved:  # noqa: PT012
        monkeypatch.setattr(saved._ranks, "size", 2)
        for step in range(1, 2000):
            saved.maybe_save(step)
            if step == 1500:
                signal.raise_signal(signal.SIGINT)
    assert checkpoints(tmp_path).restore() <= 1500 + 32


@pytest.mark.parametrize(
    "ranks, workers, number, start",
    [
        (1, 1, signal.SIGTERM, "fork"),
        (2, 2, signal.SIGTERM, "fork"),
        (1, 2, signal.SIGINT, "spawn"),
        *(
            pytest.param(ranks, workers, number, start, marks=pytest.mark.full)
            for ranks in (1, 2)
            for workers in (0, 1, 4)
            for number in (signal.SIGTERM, signal.SIGINT)
            for start in ("fork", "forkserver")
        ),
    ],
)
def test_a_signal_to_all_processes_saves_and_ends_soon(
    documents, ranks, workers, number, start, run
):
    """As torchrun, Slurm and a terminal send it: the workers of loaders get it, too."""
    run.mkdir()
    variables = {"SLEEP": "0.2", "EVERY": "1000", "WORKERS": str(workers), "START": start}
    variables |= {"PYTHONFAULTHANDLER": "1"}
    command = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} -m tests.real.train"
    process = subprocess.Popen(
        [sys.executable, *command.split(), documents, str(run), "1000"],
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    began = []
    try:
        second_epoch = 5  # of 4 steps: far from its end, when a single worker is replaced
        until(lambda: process.poll() is not None or len(losses_of(run)) >= second_epoch)
        assert process.poll() is None, process.stderr.read()
        began += processes_below(process.pid)
        assert len(began) > ranks * (1 + workers)
        patience = Patience(20)  # torchrun kills after 30
        kill(reversed(began), number)
        until(lambda: not any(map(is_alive, began[1:])))
        assert not patience.over()
        _, said = process.communicate(timeout=60)
        assert f"is saved ({number.name})" in said
        assert process.returncode != 0
        assert checkpoints(run).restore() == max(losses_of(run)) < 100
    finally:
        kill([*processes_below(process.pid), *began], signal.SIGABRT)  # shows what hangs
        print(process.communicate()[1])


# states of which ranks have parts ----------------------------------------------------------------


def slow_fsdp_rank(rank, run):
    """Changes the model while its parts are written, and leaves what a restore gives."""
    from torch.distributed.fsdp import fully_shard

    from datatrove_ckpt.torch import sharded

    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    fully_shard(model)
    goes_on = threading.Event()
    usual = sharded.save_parts

    def slow(*arguments):
        assert goes_on.wait(60)
        usual(*arguments)

    sharded.save_parts = slow
    with checkpoints(run, asynchronous=True) as saved:
        saved.save(
            1, model=model, once=SimpleNamespace(state_dict=iter([{"": model.weight}]).__next__)
        )
        with torch.no_grad():
            model.weight.zero_()
        goes_on.set()
    with checkpoints(run) as saved:
        saved.restore(model=model)
    torch.save(model.weight.full_tensor(), Path(run, f"weight-{rank}.pt"))


def test_a_training_goes_on_while_the_parts_of_a_step_are_written(tmp_path, ranks):
    ranks.call(slow_fsdp_rank, 2, str(tmp_path))
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"weight-{rank}.pt"), torch.ones(4, 4))


@pytest.mark.parametrize(
    "line",
    [
        b"cos\nsystem",
        b"ctorch\nload",
        b"ctorch.distributed.checkpoint.metadata\nos.system",
        b"cbuiltins\neval",
    ],
)
def test_a_list_of_parts_runs_no_code(line):
    file = io.BytesIO(b"\x80\x04" + line + b"\n(S'true'\ntR.")
    with pytest.raises(pickle.UnpicklingError, match="it holds"):
        _Metadata(file, _known_classes()).load()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("here", ["pathlib", "pathlib._local"])
def test_a_list_of_parts_may_be_of_another_release_of_python(module, here, monkeypatch):
    """3.13 alone calls the class pathlib._local.PosixPath."""
    monkeypatch.setitem(sys.modules, "pathlib._local", sys.modules["pathlib"])
    own = _Metadata(io.BytesIO())
    own.find_class(here, "PosixPath")
    file = io.BytesIO(f"c{module}\nPosixPath\n.".encode())
    assert _Metadata(file, own.classes).load() is type(Path())


def other_shapes(rank, run):
    with pytest.raises(ConfigError, match=r"save differs between the ranks: .*EverySteps"):
        checkpoints(run, save=EverySteps(400 + rank))
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(parts[0].bias)
    nn.init.constant_(parts[0].weight, 1.0)
    nn.init.constant_(parts[1].weight, 1.0 + rank * 2**-20)  # as of Megatron
    saved = checkpoints(run)
    for name, state, found in (
        ("stage", nn.Linear(2 + rank, 2), "stage"),
        ("sampler", {"seen": [1, {"place": 10 * rank}]}, "sampler"),
        ("model", parts, r"model/1\.weight"),
        ("all", {"model": parts.state_dict()}, r"all/model/1\.weight"),
        ("optimizer", torch.optim.SGD(parts.parameters()), "optimizer/params/0/2"),
    ):
        with pytest.raises(ConfigError, match=f"save: {found} differs between the ranks"):
            saved.save(1, **{name: state})
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.running_mean, rank)  # of DDP, they differ
    with saved:
        config = {"lr": 0.1, "missing": float("nan")}
        saved.save(1, model=model, config=config, writer=lambda folder: threading.Lock())


def test_a_state_of_one_rank_is_refused(tmp_path, ranks):
    ranks.call(other_shapes, 2, str(tmp_path))


def saving(run, loader, count):
    """The batches of a training that saves after each."""
    with checkpoints(run) as saved:
        step = saved.restore(loader=loader) or 0
        for batch in itertools.islice(loader, count):
            yield batch
            step += 1
            saved.save(step, loader=loader)


def tensor_parallel(rank, run, documents, made):
    """Ranks 2n and 2n+1 read the same rows."""
    dataset = rows_of(JsonlReader(documents), rank // 2, 2, seed=1)
    source = dataset
    if made == "Mix":
        source = Mix([dataset], [1])
    loader = StatefulDataLoader(source, batch_size=2, num_workers=1)
    for batch in saving(run, loader, 3):
        with Path(run, f"seen-{rank}").open("a") as file:
            file.write("".join(f"{name}\n" for name in batch["id"]))


@pytest.mark.parametrize("made", ["ReaderDataset", "Mix"])
def test_ranks_that_read_the_same_rows_resume_with_their_own_states(documents, ranks, made, run):
    for _ in range(3):
        ranks.call(tensor_parallel, 4, str(run), documents, made)
    seen = [Path(run, f"seen-{rank}").read_text().split() for rank in range(4)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert len({*seen[0], *seen[2]}) == 2 * len(seen[0]) == 2 * 3 * 3 * 2


@pytest.mark.parametrize("wrap", [Pack, lambda stream, length: Mix([stream], [1])])
def test_a_wrapped_stream_of_datasets_resumes(tmp_path, wrap):
    rows = datasets.Dataset.from_dict({"input_ids": [[number] * 2 for number in range(40)]})
    seen = []
    for _ in range(3):
        stream = rows.to_iterable_dataset(num_shards=2)
        loader = StatefulDataLoader(wrap(stream, 2), batch_size=2, num_workers=1)
        for batch in saving(tmp_path, loader, 4):
            column = batch["input_ids"]
            seen += (column[:, 0] if torch.is_tensor(column) else column[0]).tolist()
    assert seen == list(range(24))


def test_a_shuffled_stream_is_refused_at_the_restore_and_at_a_save(tmp_path):
    stream = datasets.Dataset.from_dict({"a": [*range(40)]}).to_iterable_dataset().shuffle(1)
    loader = StatefulDataLoader(stream)
    with checkpoints(tmp_path) as saved:
        with pytest.raises(ConfigError, match="loses the rows in its buffer"):
            saved.restore(loader=loader)
        with pytest.raises(ConfigError, match="loses the rows in its buffer"):
            saved.save(1, loader=loader)


SPAWNED = """
import torch
import torch.multiprocessing
from datatrove_ckpt.torch.training_input import keep_workers

def train(index):
    loader = torch.utils.data.DataLoader(list(range(20)), num_workers=2, persistent_workers=True)
    keep_workers(loader)
    for _ in loader:
        pass
    train.kept = loader

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


def test_workers_do_not_outlive_a_training_that_multiprocessing_started(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, timeout=500, check=False)
    assert done.returncode == 0
