"""Readers as torch datasets whose position can be saved and restored; whole checkpoints of a
training.

    dataset.py     ReaderDataset, restore(); start reading here
    topology.py    which worker reads which positions of an epoch
    order.py       which row stands at which position
    epoch.py       an iteration of a worker
    index.py       the rows of an input by number
    blocks.py      BlockInput: the input as blocks of rows; row_counts.py keeps their numbers,
                   unified.py has one schema
    block_file.py  a file as blocks; parquet_blocks.py, arrow_blocks.py and line_blocks.py: one
                   format each
    batches.py     rows taken out of batches; samples.py: rows as dicts and arrays
    states.py      states of ReaderDataset; merging.py: states of all workers together
    seals.py       checksums of states
    packing.py     Pack: rows of tokens as samples of one length
    mixing.py      Mix: several sources, drawn by weight
    stateful.py    iterations of Pack, Mix and ReaderDataset, numbers in shared memory

    checkpoints.py  TrainingCheckpoints: all states of a training, saved together
    steps.py        the folders of saved steps
    sharded.py      states of which each rank has a part
    snapshot.py     copies of states in memory
    workers.py      the workers of loaders
    ranks.py        how ranks agree

``TrainingCheckpoints`` needs torch, and is imported at its first use. The rest can be used without
torch.
"""

from typing import TYPE_CHECKING

from datatrove_ckpt.torch.dataset import ReaderDataset, Sample, restore, text_and_id
from datatrove_ckpt.torch.merging import merge
from datatrove_ckpt.torch.mixing import Mix
from datatrove_ckpt.torch.packing import Pack

if TYPE_CHECKING:
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints

__all__ = [
    "Mix",
    "Pack",
    "ReaderDataset",
    "Sample",
    "TrainingCheckpoints",
    "merge",
    "restore",
    "text_and_id",
]


def __getattr__(name: str) -> object:
    if name != "TrainingCheckpoints":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints

    return TrainingCheckpoints
