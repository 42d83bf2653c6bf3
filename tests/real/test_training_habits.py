"""Habits of training loops that a checkpoint must not take wrongly: calls of one rank alone, epochs
without ``set_epoch``, restores that come too late, compiled models, readers beside a training.

Needs torch and torchdata.
"""

import json
import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from loguru import logger
from torch import nn

from datatrove_ckpt.errors import ConfigError, WorkerDied
from datatrove_ckpt.process import signals
from datatrove_ckpt.torch import EverySteps, Last, TrainingCheckpoints
from datatrove_ckpt.torch import ranks as ranks_module
from tests.patience import until
from tests.real.test_training_checkpoints import Ranks, called

LAYER = nn.Linear(2, 2)
ROWS = 20
BATCH = 4


@pytest.fixture(autouse=True)
def _the_tests_go_on(monkeypatch):
    """A signal would kill this process some seconds later if threads hold it."""
    monkeypatch.setattr(signals, "_EXIT_SECONDS", 1e6)


@pytest.fixture
def ranks():
    return Ranks()


def opened(folder, **settings):
    options = {"save": EverySteps(1), "keep": Last(9), "asynchronous": False}
    return TrainingCheckpoints(folder, **options | settings)


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    rows = [{"id": str(number), "text": f"text {number}"} for number in range(ROWS)]
    Path(folder, "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


# calls of one rank alone -------------------------------------------------------------------------


def constructs(rank, folder):
    if rank == 0:
        opened(folder)


def saves(rank, folder):
    saved = opened(folder)
    if rank == 0:
        saved.save(1, model=LAYER)


def saves_where_told(rank, folder):
    saved = opened(folder)

    def save():
        saved.maybe_save(1, model=LAYER)

    if torch.distributed.get_rank() == 0 and saved:
        save()


def restores(rank, folder):
    is_main = not rank
    saved = opened(folder)
    if not rank:
        saved.restore(
            model=LAYER,
        )
    return is_main


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


def of_call(rank, folder, target):
    """A rank that raises writes why. The other one waits for that, as in DDP's exchange of
    gradients, or it ends.
    """
    ranks_module._PATIENCE = timedelta(seconds=0.5)
    try:
        target(rank, folder)
    except (ConfigError, WorkerDied) as error:
        Path(folder, f"why-{rank}").write_text(str(error))
    if target is not ends:
        until(lambda: any(Path(folder).glob("why-*")))
    os._exit(0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (constructs, r"TrainingCheckpoints\(\): rank 1 cannot come.*`if rank == 0:`.*`opened\(fo"),
        (saves, r"save\(1\): rank 1 cannot come.*habits.py, line \d+.*`saved.save\(1, model=L"),
        (saves_where_told, r"maybe_save\(1\): rank 1 cannot.*get_rank\(\) == 0.*`save\(\)` \(line"),
        (restores, r"restore\(latest\): rank 1 cannot come.*`if not rank:`.*`saved.restore\("),
        (counts_apart, r"Rank 0 calls maybe_save\(3\), and rank 1 maybe_save\(4\)|has ended"),
        (ends, "has ended"),
    ],
)
def test_a_call_of_one_rank_alone_is_named(tmp_path, ranks, target, message):
    ranks.call(of_call, 2, str(tmp_path), target)
    found = [path.read_text() for path in tmp_path.glob("why-*")]
    assert any(re.search(message, why) for why in found), found


def test_a_rank_that_is_killed_is_named(tmp_path, ranks):
    processes = ranks._start(2, {}, called, of_call, (str(tmp_path), dies))
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert "Another rank has ended" in Path(tmp_path, "why-0").read_text()


def is_slow(rank, folder):
    """Rank 1 evaluates until rank 0 has lost its patience, whose code names no rank."""
    ranks_module._PATIENCE = timedelta(seconds=0.5)
    warned = Path(folder, "warned")
    if rank == 0:
        logger.add(lambda line: warned.write_text(line), level="WARNING", format="{message}")
    saved = opened(folder)
    if rank:
        until(warned.exists)
    saved.maybe_save(1, model=LAYER)
    if rank == 0:
        branch = "save"
    else:
        until(lambda: "maybe_save(2)" in warned.read_text())
        branch = "save, too"
    saved.maybe_save(2, model=LAYER)
    assert branch


def test_a_slow_rank_is_waited_for(tmp_path, ranks):
    ranks.call(is_slow, 2, str(tmp_path))
    assert "rank 1 has not called it for" in Path(tmp_path, "warned").read_text()
    assert opened(tmp_path).steps() == [1, 2]


IF_ELSE = """
def train():
    if rank == 0:
        saved.save(1)
    else:
        saved.save(1)
"""


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        ("if rank == 0:", 3),
        ('if int(os.environ["RANK"]) == 0:', 3),
        ("if step % 9 == 0 and dist.get_rank() == 0:", 3),
        ("if accelerator.is_main_process:", 3),
        ("if self.is_global_zero:", 3),
        ("if not args.rank:", 3),
        ("if not is_main_process:", 0),
        ("if rank != 0:", 0),
        ("if rank == 0 or all_save:", 0),
        ("if tp_rank == 0:", 0),
        ("if local_rank == 0:", 0),
        ("if num_ranks == 8:", 0),
        ('if __name__ == "__main__":', 0),
    ],
)
def test_a_condition_that_only_rank_0_passes_is_found(line, condition):
    for indented in ("        saved.save(1)", "        save(\n\n            saved, 1\n        )"):
        lines = f"\ndef train():\n    {line}\n{indented}\n    step += 1\n".splitlines()
        assert ranks_module._condition(lines, 2, 4) == condition
    assert ranks_module._condition(IF_ELSE.splitlines(), 2, 4) == 0
    assert ranks_module._condition(IF_ELSE.splitlines(), 2, 6) == 0
