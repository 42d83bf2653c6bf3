"""How long a save stops a training, when it is on the disk, and how long a restore takes:
``python -m tests.bench.training_pauses [--gigabytes 1] [--rounds 5]``.

The same tensors in the same folder: torch.save in line with fsync and rename, and torch.load;
save (and async_save, with the stager that it makes for pinned memory, DefaultStager) and load of
torch.distributed.checkpoint; TrainingCheckpoints. Each way has a process of its own, so that none
finds the pinned memory of another, and they take turns, so that all meet the same disk and load. A
pause is what the loop waits; written is when the next may begin; restored is when the model has the
values, from the page cache. The last columns are medians of ratios: to save of DCP, and to the
first way's load, in the same round.

``--adamw`` adds an optimizer, within the gigabytes; ``--sharded`` uses FSDP2 (then torch.save
is not measured); ``--device cuda`` a GPU; ``--seconds`` ends the rounds early.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from datatrove_ckpt.torch import Last, TrainingCheckpoints
from tests.bench.measure import table


@contextmanager
def torch_save(folder, states):
    path = folder / "states.pt"

    def save(number):
        with path.with_suffix(".new").open("wb") as file:
            torch.save({key: state.state_dict() for key, state in states.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".new").rename(path)
        return lambda: None

    def restore(into):
        found = torch.load(path, map_location="cpu")
        for key, state in into.items():
            state.load_state_dict(found[key])

    yield save, restore


def of_dcp(states):
    model, *optimizers = states.values()
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))


@contextmanager
def dcp_save(folder, states):
    def save(number):
        dcp.save(of_dcp(states), checkpoint_id=folder / str(number))
        return lambda: None

    yield save, lambda into: dcp_load(folder, into)


def dcp_load(folder, states):
    (found,) = folder.iterdir()
    content = of_dcp(states)
    dcp.load(content, checkpoint_id=found)
    model, *optimizers = states.values()
    set_state_dict(
        model,
        optimizers,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )


@contextmanager
def dcp_async_save(folder, states):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    on_gpu = torch.cuda.is_initialized()
    options = StagingOptions(
        use_pinned_memory=on_gpu,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=on_gpu,
    )
    stager = DefaultStager(options)

    def save(number):
        nonlocal stager
        if number and torch.__version__ < "2.12":  # there, a stager stages once
            stager = DefaultStager(options)
        response = dcp.async_save(
            of_dcp(states), checkpoint_id=folder / str(number), async_stager=stager
        )
        future = getattr(response, "upload_completion", response)
        return future.result

    yield save, lambda into: dcp_load(folder, into)
    stager.close()


@contextmanager
def ours(folder, states):
    with TrainingCheckpoints(folder, keep=Last(1)) as saved:

        def save(number):
            saved.save(number, **states)
            return saved.close

        yield save, lambda into: TrainingCheckpoints(folder).restore(**into)


WAYS = {
    "torch.save, torch.load": torch_save,
    "dcp.save, dcp.load": dcp_save,
    "dcp.async_save, DefaultStager": dcp_async_save,
    "TrainingCheckpoints": ours,
}


def made(options):
    size = options.gigabytes * 1e9 / 4
    if options.adamw:
        size /= 3
    width = int((size / 16) ** 0.5)
    layers = (nn.Linear(width, width, bias=False) for _ in range(16))
    states = {"model": nn.Sequential(*layers).to(options.device)}
    if options.sharded:
        fully_shard(states["model"])
    if options.adamw:
        states["optimizer"] = torch.optim.AdamW(states["model"].parameters())
        states["model"](torch.ones(1, width, device=options.device)).sum().backward()
        states["optimizer"].step()
        states["optimizer"].zero_grad()
    return states


def measure(way, options):
    """Does a round for each line of the input, and prints its seconds."""
    warnings.simplefilter("ignore")
    logger.remove()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    states = made(options)
    others = made(options)  # a restore changes the tensors that the next save copies
    folder = Path(options.folder)
    with WAYS[way](folder, states) as (save, restore):
        for number, _ in enumerate(sys.stdin):
            if options.device != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            wait = save(number)
            pause = time.perf_counter() - began
            wait()
            written = time.perf_counter() - began
            began = time.perf_counter()
            restore(others)
            if options.device != "cpu":
                torch.cuda.synchronize()
            restored = time.perf_counter() - began
            print(json.dumps([pause, written, restored]), flush=True)
            for old in folder.glob(f"*{number}"):
                shutil.rmtree(old)
    dist.destroy_process_group()


def measured(options):
    """Returns by its way the seconds of all rounds, which the ways make in turn."""
    found = {way: [] for way in WAYS if not (options.sharded and way.startswith("torch"))}
    with ExitStack() as stack:
        processes = {}
        for number, way in enumerate(found):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
            command = [sys.executable, "-m", "tests.bench.training_pauses", *sys.argv[1:]]
            variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            processes[way] = subprocess.Popen(
                [*command, "--way", way, "--folder", folder],
                env=os.environ | variables | {"MASTER_PORT": str(29561 + number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(processes[way])
        end = time.monotonic() + options.seconds
        for number in range(options.rounds):
            for way, process in processes.items():
                process.stdin.write("\n")
                process.stdin.flush()
                found[way].append(json.loads(process.stdout.readline()))
            if number and time.monotonic() > end:
                break
        for process in processes.values():
            process.communicate(timeout=60)
    return found


def median_ratio(rounds, others, column):
    return statistics.median(
        own[column] / other[column] for own, other in zip(rounds, others, strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        measure(options.way, options)
        return
    found = measured(options)
    saves = found["dcp.save, dcp.load"]
    loads = next(iter(found.values()))
    rows = []
    for way, rounds in found.items():
        first, *later = rounds
        figures = [first[0], *(statistics.median(column) for column in zip(*later, strict=True))]
        figures.append(median_ratio(later, saves[1:], 1))
        figures.append(median_ratio(later, loads[1:], 2))
        rows.append([way, *(f"{figure:.3f}" for figure in figures)])
    device = "CPU"
    if options.device != "cpu":
        device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}, {options.gigabytes} GB")
    columns = ["first pause", "later pauses", "written", "restored", "written x", "restored x"]
    table(["seconds", *columns], rows)


if __name__ == "__main__":
    main()
