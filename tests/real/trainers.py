"""What the tests of Trainer and Accelerate share: an input, a model of a few weights, and the rows
it was given.
"""

import itertools
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from datatrove_ckpt.readers import ParquetReader
from tests.real.loops import write_rows
from tests.training_rows import rows_of

ROWS = 48
BATCH = 8
STEPS = ROWS // BATCH  # in an epoch


def rows_as_parquet(folder):
    """Three files with a number in each row."""
    write_rows(folder, [{"text": str(number)} for number in range(ROWS)], "parquet")
    return folder.as_posix()


def tokens(row):
    numbers = torch.full((4,), int(row["text"]))
    return {"input_ids": numbers, "labels": numbers}


def dataset(folder, **options):
    return rows_of(
        ParquetReader(folder), seed=1, **{"function": tokens, "batch_size": BATCH} | options
    )


class Recording(GPT2LMHeadModel):
    """A language model of a few hundred weights, made here and not downloaded.

    Keeps the rows of each batch.
    """

    def __init__(self):
        torch.set_num_threads(1)  # more would only wait for each other
        config = {"vocab_size": ROWS, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
        super().__init__(GPT2Config(**config, bos_token_id=None, eos_token_id=None))
        self.batches = []

    def forward(self, input_ids, labels, **kept):
        self.batches.append(input_ids[:, 0].tolist())
        return super().forward(input_ids=input_ids, labels=labels, **kept)


def two_processes(rank, folder, meeting, results):
    """The main function of one of two processes of Accelerate: twice an epoch, without a stop and
    with one.

    First Accelerate deals out the rows, then the dataset does.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    keeps = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=keeps)
    assert accelerator.num_processes == 2

    def prepared():
        loader = accelerator.prepare(DataLoader(dataset(folder), batch_size=BATCH))
        loader.set_epoch(1)
        return loader

    def own():
        mine = dataset(folder, rank=accelerator.process_index, ranks=accelerator.num_processes)
        mine.set_epoch(1)
        return StatefulDataLoader(mine, batch_size=BATCH)

    def rows(batches):
        return [row for batch in batches for row in batch["input_ids"][:, 0].tolist()]

    found = []
    for make in (prepared, own):
        whole, first, second = rows(make()), make(), make()
        seen = rows(itertools.islice(first, 2))
        second.load_state_dict(first.state_dict())
        found.append((whole, seen + rows(second)))
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()
