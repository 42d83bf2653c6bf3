"""A training: ``torchrun --nproc-per-node 2 -m tests.real.train DOCUMENTS RUN STEPS``.

What a user would write.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import EverySteps, ReaderDataset, TrainingCheckpoints

LENGTH = 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width = int(os.environ.get("WIDTH", "64"))  # 1024: nine million parameters
        self.embed, self.drop = nn.Embedding(256, width), nn.Dropout(0.1)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.body(self.drop(self.embed(tokens))))


def tokens(row):
    return torch.tensor(list(row["text"].encode()[:LENGTH].ljust(LENGTH)))


def main(documents, run, steps):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    rows = ReaderDataset(JsonlReader(documents)).shuffle(seed=1)
    rows = rows.shard(size, rank, drop_last=True)
    dataset = rows.map(tokens).batch(12 // size)
    workers = int(os.environ.get("WORKERS", "0"))
    loader = StatefulDataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 1,
        multiprocessing_context=os.environ.get("START") if workers else None,
    )
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with TrainingCheckpoints(
        run, os.environ.get("REMOTE"), save=EverySteps(int(os.environ.get("EVERY", "5")))
    ) as saved:
        step = saved.restore(loader=loader, **states) or int(os.environ.get("FIRST", "0"))
        epoch = saved.epoch
        while step < steps:
            dataset.set_epoch(epoch)
            for batch in loader:
                loss = nn.functional.cross_entropy(
                    model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                with Path(run, f"losses-{rank}.jsonl").open("a") as file:
                    file.write(json.dumps([step, loss.item(), batch.sum().item()]) + "\n")
                time.sleep(float(os.environ.get("SLEEP", "0")))
                saved.maybe_save(step, loader=loader, metrics={"loss": loss.item()}, **states)
                if step == steps:
                    break
            epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
