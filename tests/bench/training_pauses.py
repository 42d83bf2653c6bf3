"""How long a save stops a training: ``python -m tests.bench.training_pauses [--gigabytes 1]
[--rounds 5]``. ``--device cuda`` measures a model on a GPU.

The same tensors in the same folder, in one process: torch.save in line with fsync and rename;
async_save of torch.distributed.checkpoint; TrainingCheckpoints. A pause is what the loop waits;
written is when the next may begin.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from datatrove_ckpt.torch import TrainingCheckpoints
from tests.bench.measure import table


def in_line(model: nn.Module, folder: Path, number: int) -> Callable[[], object]:
    path = folder / f"{number}.pt"
    with path.with_suffix(".new").open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").rename(path)
    return lambda: None


def async_save(model: nn.Module, folder: Path, number: int) -> Callable[[], object]:
    return dcp.async_save(model.state_dict(), checkpoint_id=str(folder / str(number))).result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    width = int((options.gigabytes * 1e9 / 4 / 16) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16))).to(
        options.device
    )
    pauses: dict[str, list[float]] = {}
    written: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as name,
        TrainingCheckpoints(Path(name, "ours")) as saved,
    ):

        def ours(model: nn.Module, folder: Path, number: int) -> Callable[[], object]:
            saved.save(number, model=model)
            return saved.close

        ways = {"torch.save": in_line, "dcp.async_save": async_save, "TrainingCheckpoints": ours}
        for number in range(options.rounds):
            for way, save in ways.items():
                if options.device != "cpu":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                wait = save(model, Path(name), number)
                pauses.setdefault(way, []).append(time.perf_counter() - began)
                wait()
                written.setdefault(way, []).append(time.perf_counter() - began)
    dist.destroy_process_group()
    rows = [
        [
            way,
            f"{pauses[way][0]:.3f}",
            f"{statistics.median(pauses[way][1:]):.3f}",
            f"{statistics.median(written[way][1:]):.3f}",
        ]
        for way in pauses
    ]
    table(["seconds", "first pause", "pause", "written"], rows)


if __name__ == "__main__":
    main()
