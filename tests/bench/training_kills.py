"""Trainings of several ranks that are killed at random: ``python -m tests.bench.training_kills
[--kills 60]``.

FSDP2, tensor parallel times FSDP2, Pack and Mix, each on two or four processes with dropout. All
processes are killed at a random instant and started again, until the kills are used up; then the
training ends. Each step's rows and each rank's loss must be those of a training without a kill.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.torch import EverySteps, Mix, Pack, ReaderDataset, TrainingCheckpoints
from tests.real.loops import write_rows
from tests.real.training_ranks import Ranks, losses_of

ROWS = 600
STEPS = 60
FORMS = {"fsdp": 2, "tp x fsdp": 4, "pack": 2, "mix": 2}


def numbers(row):
    return {"input_ids": [float(row["text"]), 1.0, 2.0, 3.0]}


def tensors(row):
    return torch.tensor(row["input_ids"])


def dataset_of(form, documents, ranks, rank):
    rows = ReaderDataset.from_folder(documents).map(numbers)
    if form == "mix":
        parts = [rows.shuffle(seed=seed).shard(ranks, rank) for seed in (1, 2)]
        return Mix([part.map(tensors) for part in parts], weights=[0.7, 0.3], seed=0)
    rows = rows.shuffle(seed=1).shard(ranks, rank, drop_last=True)
    if form == "pack":
        return Pack(rows, length=4)
    return rows.map(tensors)


def model_of(form):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Dropout(0.2))
    if form == "tp x fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layers, mesh["tensor"], plan)
        fully_shard(layers, mesh=mesh["data"])
        return layers, mesh["data"].get_local_rank(), 2
    if form == "fsdp":
        fully_shard(layers)
        return layers, dist.get_rank(), dist.get_world_size()
    return nn.parallel.DistributedDataParallel(layers), dist.get_rank(), dist.get_world_size()


def train(rank, form, documents, run):
    logger.remove()
    torch.set_num_threads(1)
    model, part, parts = model_of(form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = dataset_of(form, documents, parts, part)
    loader = StatefulDataLoader(dataset, batch_size=2)
    states = {"model": model, "optimizer": optimizer}
    with TrainingCheckpoints(run, save=EverySteps(2)) as saved:
        step = saved.restore(loader=loader, **states) or 0
        while step < STEPS:
            dataset.set_epoch(saved.epoch)
            for batch in loader:
                rows = batch["input_ids"].float() if form == "pack" else batch
                loss = model(rows / ROWS).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                with Path(run, f"losses-{rank}.jsonl").open("a") as file:
                    file.write(json.dumps([step, loss.item(), rows.sum().item()]) + "\n")
                time.sleep(0.02)
                saved.maybe_save(step, loader=loader, **states)
                if step == STEPS:
                    break


def killed(form, size, documents, folder, kills, dice):
    """Returns how many kills a training met, and whether it is that of no kill."""
    ranks = Ranks()
    whole, run = Path(folder, "whole"), Path(folder, "run")
    for path in (whole, run):
        path.mkdir(parents=True)
    ranks.call(train, size, form, documents, str(whole))
    count = 0
    while count < kills and len(losses_of(run)) < STEPS:
        before = len(losses_of(run))
        processes = ranks.start_call(train, size, form, documents, str(run))
        while len(losses_of(run)) <= before and any(each.is_alive() for each in processes):
            time.sleep(0.05)
        time.sleep(dice.random() * 0.2)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        count += 1
    ranks.call(train, size, form, documents, str(run))
    same = all(losses_of(run, rank) == losses_of(whole, rank) for rank in range(size))
    return count, same


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS)
    arguments = parser.parse_args()
    dice = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"text": str(number)} for number in range(ROWS)]
        write_rows(Path(folder, "documents"), rows, files=2)
        for form in arguments.forms:
            kills = arguments.kills // len(arguments.forms)
            count, same = killed(
                form, FORMS[form], str(Path(folder, "documents")), Path(folder, form), kills, dice
            )
            print(f"{form}: {count} kills, {'the same' if same else 'ANOTHER'} training")


if __name__ == "__main__":
    main()
