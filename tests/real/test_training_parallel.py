"""Trainings under tensor and pipeline parallelism, of four processes: stopped, killed within a save,
and restored, also on fewer ranks.

Needs torch and torchdata.
"""

import os
import signal
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch import EverySteps, TrainingCheckpoints, sharded
from tests.real.loops import steps_in
from tests.real.training_ranks import flipped, join

LAYERS = 4
STEPS = 7


def layers(numbers):
    """A stage of the model: each layer has the same name and values in any stage."""
    found = OrderedDict[str, nn.Module]()
    for number in numbers:
        torch.manual_seed(number)
        found[str(number)] = nn.Sequential(OrderedDict(linear=nn.Linear(4, 4), act=nn.Tanh()))
    return nn.Sequential(found)


def batch_of(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss_of(output, target):
    return (output - target).square().mean()


def killed_in_the_save_of(step):
    """Ends each rank by SIGKILL when its parts of the step are written, and nothing else is."""
    usual = sharded.save_parts

    def save_parts(content, folder, group):
        usual(content, folder, group)
        if f"{step:08}" in str(folder) and folder.name == "optimizer":
            dist.barrier(group)
            os.kill(os.getpid(), signal.SIGKILL)

    sharded.save_parts = save_parts


def states_of(model, optimizer, **options):
    """The states of model and optimizer, by the names of the parameters."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, **options)
    return get_state_dict(model, optimizer, options=options)


def keep(states, run):
    """Leaves the whole model and optimizer of the last process."""
    for name, value in (states[0] | states[1]).items():
        torch.save(value, Path(run, f"{name}.pt"))


def mesh_rank(rank, run, begins, mesh, killed, steps=STEPS, back=None):
    """FSDP2 over one dimension of the mesh, tensor parallel over the other."""
    logger.remove()
    model = layers(range(LAYERS))
    if mesh is not None:
        made = init_device_mesh("cpu", mesh, mesh_dim_names=("data", "tensor"))
        plan = {}
        for number in range(0, LAYERS, 2):
            plan |= {f"{number}.linear": ColwiseParallel()}
            plan |= {f"{number + 1}.linear": RowwiseParallel()}
        parallelize_module(model, made["tensor"], plan)
        fully_shard(model, mesh=made["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states = {"model": model, "optimizer": optimizer}
    if killed:
        killed_in_the_save_of(killed)
    with TrainingCheckpoints(run, save=EverySteps(2)) as saved:
        step = saved.restore(**states) or 0
        assert step == begins
        while step < steps:
            loss_of(model(batch_of(step)), batch_of(-step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            saved.maybe_save(step, **states)
        if back:
            saved.rollback(to=back, **states)
    whole = states_of(model, optimizer, full_state_dict=True)
    if rank == 0:
        keep(whole, run)


def stage_rank(rank, run, begins, size, killed):
    """A rank of a pipeline trains some of the layers. DCP saves those of all ranks by their names."""
    logger.remove()
    share = LAYERS // size
    stage = layers(range(rank * share, rank * share + share))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)

    def states():
        return dict(zip(("model", "optimizer"), states_of(stage, optimizer), strict=True))

    def write(folder):
        dcp.save(states(), checkpoint_id=folder)
        if killed and f"{killed:08}" in str(folder):
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def read(folder):
        content = states()
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(
            stage,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )

    piped = PipelineStage(stage, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(piped, n_microbatches=2, loss_fn=loss_of)
    with TrainingCheckpoints(run, save=EverySteps(2)) as saved:
        step = saved.restore(reader=read) or 0
        assert step == begins
        while step < STEPS:
            inputs = [batch_of(step)] if rank == 0 else []
            target = batch_of(-step) if rank == size - 1 else None
            schedule.step(*inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            saved.maybe_save(step, writer=write)
    keep(states_of(stage, optimizer), run)


def kept_in(run):
    return {path.stem: torch.load(path) for path in run.glob("*.pt")}


def assert_near(states, others):
    torch.testing.assert_close(states, others, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "target, sizes",
    [
        (mesh_rank, [((2, 2), 4), ((1, 4), 4), ((3, 1), 3), ((2, 1), 2), ((1, 1), 1), (None, 1)]),
        (stage_rank, [(4, 4), (2, 2)]),
    ],
)
def test_parts_of_a_model_go_on_after_a_kill_within_a_save_on_any_number_of_ranks(
    tmp_path, ranks, target, sizes
):
    whole = tmp_path / "whole"
    whole.mkdir()
    ranks.call(mesh_rank, 1, str(whole), 0, None, 0)
    first, size = sizes[0]
    for number, (mesh, count) in enumerate(sizes):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        join(ranks.start_call(target, size, str(run), 0, first, 6), -signal.SIGKILL)
        assert steps_in(run) == {"2", "4"}
        ranks.call(target, count, str(run), 4, mesh, 0)
        assert steps_in(run) == {"2", "4", "6"}
        assert_near(kept_in(run), kept_in(whole))


def test_a_damaged_part_is_found_and_a_rollback_takes_all_parts(tmp_path, ranks):
    run = str(tmp_path)
    ranks.call(mesh_rank, 2, run, 0, (2, 1), 0, 4)
    expected = kept_in(tmp_path)
    ranks.call(mesh_rank, 2, run, 4, (2, 1), 0, 6)
    part = tmp_path / "step-00000006/states/optimizer/__1_0.distcp"
    part.write_bytes(flipped(part.read_bytes(), 1000))
    for steps, back in ((4, None), (6, 4)):
        ranks.call(mesh_rank, 2, run, 4, (2, 1), 0, steps, back)
        assert_near(kept_in(tmp_path), expected)
    assert list(tmp_path.glob("step-00000004.1/states/*/__1_0.distcp"))


def test_torch_makes_one_file_of_the_parts(tmp_path, ranks):
    ranks.call(mesh_rank, 2, str(tmp_path), 0, (2, 1), 0, 4)
    dcp_to_torch_save(tmp_path / "step-00000004/states/model", tmp_path / "one")
    kept = kept_in(tmp_path)
    weights = {name: kept[name] for name in layers(range(LAYERS)).state_dict()}
    assert_near(torch.load(tmp_path / "one"), weights)


def sharded_stage(rank, run):
    """Each rank has a stage, whose parameters are DTensors of that rank alone."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    stage = layers([rank])
    fully_shard(stage, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(stage.parameters())
    with (
        TrainingCheckpoints(run) as saved,
        pytest.raises(ConfigError, match=r"optimizer differs between the ranks.* to a writer"),
    ):
        saved.save(1, model=stage, optimizer=optimizer)


def test_an_optimizer_of_a_sharded_stage_is_refused_as_no_restore_would_take_it(tmp_path, ranks):
    ranks.call(sharded_stage, 2, str(tmp_path))
