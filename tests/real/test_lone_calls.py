"""Calls of one rank alone, as public trainers write "rank 0 only": an error names them soon, and a
slow rank is waited for.

Needs torch and torchdata.
"""

import functools
import itertools
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.torch import EverySteps, Last, TrainingCheckpoints, progress
from datatrove_ckpt.torch import ranks as ranks_module
from tests.patience import until
from tests.real.training_ranks import called

LAYER = nn.Linear(2, 2)


def opened(folder):
    return TrainingCheckpoints(folder, save=EverySteps(1), keep=Last(9), asynchronous=False)


def impatient():
    ranks_module._LOOK_SECONDS = 0.5
    progress.RECORD_SECONDS = 0.1


# sixteen ways ------------------------------------------------------------------------------------


def short_name(t):
    r = t.rank
    if r == 0:
        t.save()


def multigpu_torchrun(t):  # PyTorch's DDP tutorial
    epoch, save_every = 4, 2
    if t.gpu_id == 0 and epoch % save_every == 0:
        t.save()


def local_rank(t):
    if t.local_rank == 0:
        t.maybe_save()


def nanogpt(t):
    ddp_rank = t.rank
    master_process = ddp_rank == 0
    if master_process:
        t.save()


def of_one_process_or_rank_0(t):
    if not dist.is_initialized() or dist.get_rank() == 0:
        t.maybe_save()


def torchtune(t):
    is_rank_zero = t.rank == 0
    if is_rank_zero:
        t.save()


def hugging_face_trainer(t):
    args = SimpleNamespace(should_save=t.rank == 0)
    if args.should_save:
        t.save()


def accelerate(t):
    accelerator = SimpleNamespace(is_main_process=t.rank == 0)
    if accelerator.is_main_process and t.step:
        t.maybe_save()


def rank_zero_only(function):
    @functools.wraps(function)
    def wrapped(*arguments):
        return function(*arguments) if dist.get_rank() == 0 else None

    return wrapped


@rank_zero_only
def lightning(t):
    t.save()


def lightning_trainer(t):
    trainer = SimpleNamespace(is_global_zero=not t.rank)
    if trainer.is_global_zero:
        t.save()


def torchvision(t):
    def save_on_master(*arguments):
        if dist.get_rank() == 0:
            t.save(*arguments)

    save_on_master()


def of_the_environment(t):
    if int(os.environ.get("RANK", t.rank)) == 0:
        t.maybe_save()


def returns_early(t):
    if t.rank != 0:
        return
    t.save()


def megatron(t):
    if dist.get_rank() == dist.get_world_size() - 1:
        t.save()


def torchtitan(t):
    t.save() if dist.get_rank() == 0 else None


def evaluates(t):
    if not t.rank:
        t.saved.restore(model=LAYER)


WAYS = [
    short_name,
    multigpu_torchrun,
    local_rank,
    nanogpt,
    of_one_process_or_rank_0,
    torchtune,
    hugging_face_trainer,
    accelerate,
    lightning,
    lightning_trainer,
    torchvision,
    of_the_environment,
    returns_early,
    megatron,
    torchtitan,
    evaluates,
]
GOES_ON = r"rank \d has gone on without it"


class Loop(SimpleNamespace):
    """A training loop at its first step."""

    def save(self):
        self.saved.save(self.step, model=LAYER)

    def maybe_save(self):
        self.saved.maybe_save(self.step, model=LAYER)


def in_all_ways(rank, folder, prepare=impatient):
    prepare()
    for number, way in enumerate(WAYS):
        saved = opened(Path(folder, way.__name__))
        loader = StatefulDataLoader(range(8))
        saved.restore(loader=loader, model=LAYER)
        batches = iter(loader)
        next(batches)
        error = Path(folder, f"{way.__name__}.txt")
        try:
            way(Loop(saved=saved, rank=rank, gpu_id=rank, local_rank=rank, step=1))
            if not number % 2:
                next(batches)
                until(error.exists)
        except ConfigError as raised:
            error.write_text(str(raised))
            if not number % 2:
                next(batches)  # the counts are equal again
        dist.all_reduce(torch.ones(1))  # DDP exchanges gradients
    if rank == 0:
        with pytest.raises(ConfigError, match=GOES_ON):
            opened(Path(folder, "constructs"))
    dist.all_reduce(torch.ones(1))


def test_each_way_to_write_rank_0_only_is_named(tmp_path, ranks):
    ranks.call(in_all_ways, 2, str(tmp_path))
    for way in WAYS:
        why = Path(tmp_path, f"{way.__name__}.txt").read_text()
        assert re.search(rf"(save|restore)\(\w+\): {GOES_ON}.* in all ranks", why), way


# other ranks -------------------------------------------------------------------------------------


def counts_apart(rank, folder):
    opened(folder).maybe_save(3 + rank, model=LAYER)


def ends(rank, folder):
    saved = opened(folder)
    if rank < 1:
        saved.save(1, model=LAYER)


def dies(rank, folder):
    saved = opened(folder)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    saved.save(1, model=LAYER)


def writes_why(rank, folder, target):
    impatient()
    try:
        target(rank, folder)
    except CkptError as error:
        Path(folder, f"why-{rank}").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(
    "target, message",
    [
        (counts_apart, r"Rank \d calls maybe_save\(\d\), and rank \d maybe_save\(\d\)|has ended"),
        (ends, "Another rank has ended"),
        (dies, "Another rank has ended"),
    ],
)
def test_a_rank_that_ended_or_makes_another_call_is_named(tmp_path, ranks, target, message):
    processes = ranks._start(2, {}, called, writes_why, (str(tmp_path), target))
    for process in processes:
        process.join(300)
    assert re.search(message, Path(tmp_path, "why-0").read_text())


def is_slow(rank, folder, reads_all):
    """Rank 1 evaluates until rank 0 has looked at it several times."""
    impatient()
    warned = Path(folder, "warned")
    if rank == 0:
        logger.add(lambda line: warned.write_text(line), level="WARNING", format="{message}")
    saved = opened(folder)
    loader = StatefulDataLoader(range(8))
    saved.restore(loader=loader, model=LAYER)
    batches = iter(loader)
    for step in (1, 2):
        if rank or reads_all:
            next(batches)
        dist.all_reduce(torch.ones(1))
        if rank:
            until(lambda step=step: warned.exists() and f"save({step})" in warned.read_text())
            [*StatefulDataLoader(range(8))]
        saved.save(step, loader=loader, model=LAYER)


@pytest.mark.parametrize("reads_all", [True, False], ids=["each", "one reads for both"])
def test_a_slow_rank_is_waited_for(tmp_path, ranks, reads_all):
    ranks.call(is_slow, 2, str(tmp_path), reads_all)
    assert "save(2): rank 1 has not called it for" in Path(tmp_path, "warned").read_text()
    assert opened(tmp_path).steps() == [1, 2]


def test_of_many_ranks_one_reads_the_records_of_all(monkeypatch, warned):
    monkeypatch.setattr(ranks_module, "_LOOK_SECONDS", 0.1)
    numbers = itertools.count(1)
    monkeypatch.setattr(progress.PROGRESS, "record_of", lambda rank: [next(numbers), 0, 0])
    store = dist.HashStore()
    *early, late = [ranks_module.Ranks() for _ in range(4)]
    for rank, each in enumerate([*early, late]):
        each.rank, each.size, each._store = rank, 4, store
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(each.barrier, "save(1)") for each in early]
        until(lambda: warned)
        late.barrier("save(1)")
        [call.result() for call in calls]
    [line] = warned
    assert "save(1): rank 3 has not called it" in line
