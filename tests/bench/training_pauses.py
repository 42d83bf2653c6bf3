"""How long a save stops a training: ``python -m tests.bench.training_pauses [--gigabytes 1]
[--rounds 4]``. ``--device cuda`` measures a model on a GPU.

The same tensors in the same folder, in one process: torch.save in line with fsync and rename;
async_save of torch.distributed.checkpoint, with the stager that it makes for pinned memory
(DefaultStager); TrainingCheckpoints. Each way has a process of its own, so that none finds the
pinned memory of another. A pause is what the loop waits; written is when the next may begin.
``--seconds`` ends the rounds of a way early.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from datatrove_ckpt.torch import Last, TrainingCheckpoints
from tests.bench.measure import table


@contextmanager
def torch_save(folder, device):
    def save(model, number):
        path = folder / f"{number}.pt"
        with path.with_suffix(".new").open("wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".new").rename(path)
        return lambda: None

    yield save


@contextmanager
def dcp_async_save(folder, device):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    on_gpu = device != "cpu"
    options = StagingOptions(
        use_pinned_memory=on_gpu,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=on_gpu,
    )
    stager = DefaultStager(options)

    def save(model, number):
        nonlocal stager
        if number and torch.__version__ < "2.12":  # there, a stager stages once
            stager = DefaultStager(options)
        response = dcp.async_save(
            model.state_dict(), checkpoint_id=str(folder / str(number)), async_stager=stager
        )
        future = getattr(response, "upload_completion", response)
        return future.result

    yield save
    stager.close()


@contextmanager
def ours(folder, device):
    with TrainingCheckpoints(folder, keep=Last(1)) as saved:

        def save(model, number):
            saved.save(number, model=model)
            return saved.close

        yield save


WAYS = {
    "torch.save": torch_save,
    "dcp.async_save, DefaultStager": dcp_async_save,
    "TrainingCheckpoints": ours,
}


def measure(way, options):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    width = int((options.gigabytes * 1e9 / 4 / 16) ** 0.5)
    layers = (nn.Linear(width, width, bias=False) for _ in range(16))
    model = nn.Sequential(*layers).to(options.device)
    pauses = []
    written = []
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        with WAYS[way](folder, options.device) as save:
            for number in range(options.rounds):
                if options.device != "cpu":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                wait = save(model, number)
                pauses.append(time.perf_counter() - began)
                wait()
                written.append(time.perf_counter() - began)
                for old in [*folder.glob(f"{number}.pt"), *folder.glob(f"{number}/*")]:
                    old.unlink()
                if number and time.monotonic() > end:
                    break
    dist.destroy_process_group()
    return {"pauses": pauses, "written": written}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561"}
        print(json.dumps(measure(options.way, options)))
        return
    rows = []
    for way in WAYS:
        command = [sys.executable, "-m", "tests.bench.training_pauses", *sys.argv[1:]]
        done = subprocess.run(
            [*command, "--way", way], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            rows.append([way, "-", "-", (done.stderr.strip().splitlines() or [""])[-1][:60]])
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        pauses, written = found["pauses"], found["written"]
        figures = [pauses[0], statistics.median(pauses[1:]), statistics.median(written[1:])]
        rows.append([way, *(f"{figure:.3f}" for figure in figures)])
    device = "CPU"
    if options.device != "cpu":
        device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}, {options.gigabytes} GB")
    table(["seconds", "first pause", "later pauses", "written"], rows)


if __name__ == "__main__":
    main()
