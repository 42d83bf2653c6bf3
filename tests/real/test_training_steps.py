"""Steps of a training that one can list and load, the loss curve, and the commands that read both.

Needs torch.
"""

import csv
import json
import math
import re
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError
from datatrove_ckpt.torch import (
    Best,
    Every,
    EverySteps,
    Last,
    Overhead,
    TrainingCheckpoints,
    step_folder,
)
from datatrove_ckpt.torch import checkpoints as module
from datatrove_ckpt.torch.training_history import read_training
from tests.real.loops import Full

KEEP = Last(2) | Best("loss") | Every(30)
LOSSES = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 2.0}


def opened(folder, **settings):
    return TrainingCheckpoints(folder, **{"keep": KEEP, "asynchronous": False} | settings)


def model_of(step):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, step)
    return model


def filled(folder, losses=LOSSES, **settings):
    """A training whose weights are the number of the step."""
    config = {"lr": 0.1, "layers": [1, 2]}
    with opened(folder, **settings) as saved:
        for step, loss in losses.items():
            saved.save(step, model=model_of(step), config=config, metrics={"loss": loss})
    return folder


def weight(model):
    return int(model.weight[0, 0])


@pytest.mark.parametrize(
    "step, found", [("latest", 50), ("best", 20), (30, 30)], ids=["latest", "best", "number"]
)
@pytest.mark.parametrize("is_gone", [False, True], ids=["folder", "remote"])
def test_each_kept_step_is_listed_and_restored_from_folder_and_remote(
    tmp_path, step, found, is_gone
):
    folder = filled(tmp_path / "run", remote=str(tmp_path / "remote"))
    if is_gone:
        folder = tmp_path / "new node"
    model, config = model_of(0), {"old": True}
    with opened(folder, remote=str(tmp_path / "remote")) as saved:
        assert saved.steps() == [20, 30, 40, 50]
        assert saved.latest_step() == 50
        assert saved.restore(step, model=model, config=config) == found
        assert saved.metrics == {"loss": LOSSES[found]}
    assert weight(model) == found
    assert config == {"lr": 0.1, "layers": [1, 2]}


def test_a_step_is_restored_from_a_file_system_that_maps_no_files(tmp_path, monkeypatch):
    load = torch.load

    def unmapped(path, mmap, **options):
        if mmap:
            raise RuntimeError("unable to mmap 16 bytes: No such device (19)")
        return load(path, **options)

    filled(tmp_path)
    monkeypatch.setattr(torch, "load", unmapped)
    model = model_of(0)
    assert opened(tmp_path).restore(model=model) == 50
    assert weight(model) == 50


def test_a_process_that_starts_no_threads_any_more_saves_and_copies(tmp_path, monkeypatch):
    """At the end of one, in Python 3.12."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("at shutdown")))
    filled(tmp_path / "run", asynchronous=True, remote=str(tmp_path / "remote"))
    assert opened(tmp_path / "new", remote=str(tmp_path / "remote")).restore() == 50


def test_what_follows_an_older_step_is_newer_than_all_steps_and_listed_once(tmp_path):
    filled(tmp_path)
    with opened(tmp_path, keep=Last(9)) as saved:
        assert saved.restore(30, model=model_of(0)) == 30
        saved.save(40, model=model_of(41))
        assert saved.steps() == [20, 30, 50, 40]
    model = model_of(0)
    with opened(tmp_path) as saved:
        assert saved.restore(model=model) == saved.latest_step() == 40
        assert weight(model) == 41


def test_the_best_step_gives_its_whole_parts_if_all_steps_are_damaged(tmp_path, warned):
    for config in filled(tmp_path).glob("step-*/states/config.pt"):
        config.write_bytes(b"?")
    model = model_of(0)
    with opened(tmp_path) as saved:
        assert saved.restore("best", model=model) == weight(model) == 20
        with pytest.raises(CheckpointCorrupt, match="config"):
            saved.restore("best", config={})


def test_weights_alone_change_nothing_else_and_let_no_other_training_save_there(tmp_path, warned):
    filled(tmp_path)
    history = Path(tmp_path, "history.jsonl").read_text()
    model = model_of(0)
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    with pytest.raises(ConfigError, match="keep= has no Best"):
        opened(tmp_path, keep=Last(2)).restore("best")
    saved = opened(tmp_path)
    assert saved.restore("best", weights_only=True, model=model) == 20
    assert weight(model) == 20
    assert torch.equal(torch.get_rng_state(), expected)
    assert warned == []
    assert Path(tmp_path, "history.jsonl").read_text() == history
    with pytest.raises(ConfigError, match="holds step-00000050 of an earlier training"):
        saved.save(60, model=model)


def test_what_a_rollback_throws_away_comes_back_from_no_remote(tmp_path):
    settings = {"remote": str(tmp_path / "remote"), "keep": Last(3) | Best("loss")}
    filled(tmp_path / "run", {100: 3.0, 200: 2.0, 300: 0.01}, **settings)
    with opened(tmp_path / "run", **settings) as saved:
        saved.rollback(to=200, model=model_of(0))
        for step, loss in ((300, 1.5), (400, 1.8), (500, 1.7), (600, 1.6)):
            saved.save(step, model=model_of(0), metrics={"loss": loss})
    with opened(tmp_path / "new node", **settings) as saved:
        assert saved.steps() == [300, 400, 500, 600]
        assert saved.restore("best") == 300
        assert saved.metrics == {"loss": 1.5}
        saved.save(301, model=model_of(0))
        assert 600 in saved.steps()


def test_a_save_that_fails_on_a_full_disk_costs_no_best_step(tmp_path, monkeypatch, warned):
    keep = Last(1) | Best("loss")
    filled(tmp_path, {1: 1.0, 2: 2.0}, keep=keep)
    with opened(tmp_path, keep=keep) as saved:
        saved.restore()
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", Full(0))
            saved.save(3, model=model_of(0), metrics={"loss": 0.5})
        assert "No space left" in str(saved.failure)
        assert saved.steps() == [1, 2]
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: 1 / 0)
        saved.save(4, model=model_of(0))  # a look that fails ends no save


class Given(Exception):
    """What a hook raises."""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_hook_gets_the_error_of_a_failed_save_and_may_end_the_training(
    tmp_path, monkeypatch, warned, asynchronous, ends
):
    errors = []

    def on_failure(error):
        assert threading.current_thread() is threading.main_thread()
        errors.append(str(error))
        if ends:
            raise Given

    disk = Full(0)
    made = []
    with (
        suppress(Given),
        opened(tmp_path, on_failure=on_failure, asynchronous=asynchronous) as saved,
    ):
        saved.save(1, model=model_of(1))
        saved._writing.join()
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", disk)
            saved.save(2, model=model_of(2))
            saved._writing.join()
            saved.maybe_save(3)
        made.append(3)
        saved.save(4, model=model_of(4))
    assert len(errors) == 1
    assert "No space left" in errors[0]
    assert made == [3][ends:]
    assert saved.steps() == [1, 4][: 2 - ends]


@dataclass
class Settings:
    betas: tuple[float, float] = (0.9, 0.95)
    optimizer: dict[str, object] = field(default_factory=lambda: {"lr": 0.1, "eos_token": "</s>"})
    api_key: str = "of-a-tracker"
    token: str = "of-a-hub"
    data: Path = Path("data/train")


CONFIG = {
    "betas": [0.9, 0.95],
    "optimizer": {"lr": 0.1, "eos_token": "</s>"},
    "api_key": "***",
    "token": "***",
    "data": "data/train",
}


def test_each_step_has_the_config_as_json(tmp_path):
    settings = {"remote": str(tmp_path / "remote"), "config": Namespace(model=Settings(), seed=7)}
    folder = filled(tmp_path / "run", {10: 1.0, 20: 2.0}, **settings)
    with opened(folder, **settings) as saved:
        saved.rollback(to=10, model=model_of(0))
    for name in ("run/step-00000010", "run/step-00000010.1", "remote/step-00000010.1"):
        text = Path(tmp_path, name, "config.json").read_text()
        assert json.loads(text) == {"model": CONFIG, "seed": 7}
    assert opened(folder).restore(model=model_of(0)) == 10


def test_a_save_that_failed_is_tried_again_before_the_next(tmp_path, monkeypatch, warned):
    disk = Full(0)
    model = nn.Linear(100, 100)
    with opened(tmp_path, save=EverySteps(100)) as saved:
        monkeypatch.setattr(files, "disk", disk)
        assert saved.maybe_save(100, model=model)
        assert "No space left" in str(saved.failure)
        disk.is_full = False
        assert not saved.maybe_save(101, model=model)
        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
        assert saved.maybe_save(102, model=model)
        assert saved.failure is None
    assert saved.steps() == [102]


def test_a_bound_on_overhead_holds_if_saves_fail(tmp_path, warned):
    def write(folder):
        errors.append(folder)
        raise OSError("full")

    errors = []
    with suppress(OSError), opened(tmp_path, save=Overhead(0.5)) as saved:
        for step in range(9):
            saved.maybe_save(step, model=model_of(0), writer=write)
    assert len(errors) == 1


def test_a_state_that_grows_is_saved_as_it_is(tmp_path):
    seen = {"ids": torch.arange(3), "mean": torch.tensor(1.0)}
    with opened(tmp_path, asynchronous=True) as saved:
        for step in (1, 2, 3):
            saved.save(step, seen=seen)
            seen["ids"].resize_(3 + step).fill_(step)
    found = {}
    assert opened(tmp_path).restore(seen=found) == 3
    assert found["ids"].tolist() == [2] * 5
    assert found["mean"] == 1


def test_a_metric_of_best_that_is_only_logged_is_missed(tmp_path, warned):
    with opened(tmp_path) as saved:
        saved.log(1, loss=1.0)
        saved.save(1, model=model_of(1))
    assert "has no 'loss'" in warned[0]
    assert "not only to log" in warned[0]
    with opened(tmp_path / "other") as saved:
        saved.log(1, loss=1.0)
        saved.save(1, model=model_of(1), metrics={"loss": 1.0})
    assert len(warned) == 1


# the loss curve ----------------------------------------------------------------------------------


def curve_of(folder):
    with Path(folder, "metrics.csv").open() as file:
        return list(csv.reader(file))


def train(folder, until, stop):
    """Logs each step, saves each tenth; ends at ``stop`` as a kill would."""
    model = nn.Linear(2, 2)
    saved = opened(folder)
    step = saved.restore(model=model) or 0
    while step < until:
        step += 1
        saved.log(step, loss=100.0 / step)
        if step % 10 == 0:
            saved.save(step, model=model, metrics={"accuracy": float(step)})
        if step == stop:
            saved._steps.unlock()
            return
    saved.close()


def test_the_curve_of_a_training_that_was_killed_is_that_of_the_whole_one(tmp_path):
    train(tmp_path / "whole", 50, None)
    for stop in (3, 15, 17, 20, 31, 44):
        train(tmp_path / "killed", 50, stop)
    train(tmp_path / "killed", 50, None)
    found = curve_of(tmp_path / "killed")
    assert found == curve_of(tmp_path / "whole")
    assert found[0] == ["step", "loss", "accuracy"]
    assert [row[0] for row in found[1:]] == [str(step) for step in range(1, 51)]
    assert found[20] == ["20", "5.0", "20.0"]


def test_the_loop_writes_no_curve_but_each_ten_minutes(tmp_path, monkeypatch):
    with opened(tmp_path) as saved:
        saved.log(1, loss=1.0)
        saved.save(1, model=model_of(1))
        saved.log(1, accuracy=0.5)  # of an evaluation after the save
        saved.save(2, model=model_of(1))
        assert not Path(tmp_path, "metrics.csv").exists()
        monkeypatch.setattr(module, "_CURVE_SECONDS", 0.0)
        saved.save(3, model=model_of(1))
        expected = [["step", "loss", "accuracy"], ["1", "1.0", "0.5"]]
        assert curve_of(tmp_path) == expected
        saved.log(3, loss=2.0)
        saved.log(4, loss=math.nan)
    assert curve_of(tmp_path) == [*expected, ["3", "2.0", ""], ["4", "nan", ""]]


# commands ----------------------------------------------------------------------------------------


def test_the_commands_read_the_folder_of_a_training(tmp_path, command):
    folder = str(filled(tmp_path / "run"))
    shown = command("status", folder).out
    assert "a training, 4 steps" in shown
    assert "A restore takes step 50" in shown
    assert "loss       " in shown
    assert "2 at 50" in shown
    assert json.loads(command("status", folder, "--json").out)["restored"] == 50
    rows = command("show", folder).out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["20", "30", "40", "50"]
    assert "loss=1" in rows[1]
    assert "<- a restore takes it" in rows[-1]
    assert "no problem: 4 steps" in command("verify", folder).out


def test_status_has_the_last_sign_of_each_rank_and_the_variables_of_nccl(
    tmp_path, monkeypatch, command
):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_AUTH_TOKEN", "is-a-secret-1234")
    folder = filled(tmp_path / "run")
    assert "ranks" not in command("status", str(folder)).out
    now = 1e9
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with opened(folder) as saved:
        saved.restore()
        saved.maybe_save(51)
        assert not [*folder.glob(".rank-*")]  # another process may save there
        saved.save(52, model=model_of(0))
        for step, later in ((53, 1.0), (54, 1.0), (55, 31.0)):
            now += later
            saved.maybe_save(step)
    own = json.loads(Path(folder, ".rank-00000").read_text())
    Path(folder, ".rank-00000").write_text(json.dumps(own | {"ranks": 2}))
    for rank, at in ((1, -6e4), (7, -9e5)):  # of a training that had more ranks
        sign = {"at": time.time() + at, "rank": rank, "ranks": 2 + rank // 7 * 6, "step": 43}
        text = json.dumps(sign | {"host": "node7", "variables": {"NCCL_DEBUG": "WARN"}})
        Path(folder, f".rank-0000{rank}").write_text(text)
    Path(folder, ".rank-00008").write_text('{"at": ')
    shown = command("status", str(folder)).out
    found = re.search("ranks      2 of 2, last heartbeat .+ ago; oldest (.+)", shown)
    assert found[1] == "16.7 h ago at step 43, rank 1 on node7"
    assert "NCCL       NCCL_DEBUG=INFO NCCL_DEBUG=WARN TORCH_NCCL_AUTH_TOKEN=***" in shown
    signs = json.loads(command("status", str(folder), "--json").out)["ranks"]
    assert [(sign["rank"], sign["step"]) for sign in signs] == [(0, 55), (1, 43)]


def test_no_step_waits_for_the_sign_in_a_folder_that_is_busy(tmp_path, monkeypatch):
    is_free = threading.Event()
    signs = []
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(
        module, "write_heartbeat", lambda *sign: signs.append(sign) or is_free.wait(300)
    )
    with opened(tmp_path, asynchronous=True, save=EverySteps(100)) as saved:
        saved.save(1)
        for step in (2, 3):
            saved.maybe_save(step)
        is_free.set()
    assert [sign[-1] for sign in signs] == [2]


def test_a_step_that_is_removed_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    with opened(tmp_path, keep=Last(2)) as saved:
        for step in (1, 2):
            saved.save(step, model=model_of(0))
        check = step_folder.check_files

        def check_during_a_save(folder, name, full):
            if name.step == 1:
                saved.save(3, model=model_of(0))
            check(folder, name, full)

        monkeypatch.setattr(step_folder, "check_files", check_during_a_save)
        steps = read_training(tmp_path, full=True).steps
    assert [(step.step, step.damage) for step in steps] == [(2, "")]


def test_the_commands_name_a_damaged_step_and_what_a_restore_takes_instead(tmp_path, command):
    folder = filled(tmp_path / "run")
    file = folder / "step-00000050/states/model.pt"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"PK", b"KP"))
    assert "A restore takes step 50" in command("status", str(folder)).out  # sizes alone
    checked = command("verify", str(folder), code=1).out
    assert "step-00000050: " in checked
    assert "has not the bytes it was saved with" in checked
    assert "A restore takes step 40" in checked
    file.write_bytes(content[:-1])
    assert "A restore takes step 40" in command("status", str(folder)).out
    with opened(folder) as saved:
        assert saved.restore() == 40


def test_no_state_is_of_a_step_that_is_passed_over(tmp_path):
    with opened(tmp_path) as saved:
        for step in (1, 2):
            saved.save(step, model=model_of(step), numbers={"step": torch.tensor(step)})
    file = tmp_path / "step-00000002/states/model.pt"
    file.write_bytes(file.read_bytes().replace(b"PK", b"KP"))
    model, numbers = model_of(0), {"step": torch.tensor(0)}
    with opened(tmp_path) as saved:
        assert saved.restore(model=model, numbers=numbers) == 1
    assert (weight(model), int(numbers["step"])) == (1, 1)
