"""Readers as torch datasets whose position can be saved and restored; whole checkpoints of a training.

    dataset.py    ReaderDataset, restore(); start reading here
    order.py      which row stands at which position of an epoch; which worker reads which positions
    epoch.py      an iteration of a worker: what it reads, from the settings and the state, and the reading
    index.py      the rows of an input by number
    blocks.py     BlockInput: the input as blocks of rows; block_formats.py: what a format gives
    samples.py    rows of a table as dicts and arrays, and rows taken out of batches
    states.py     states of ReaderDataset; merging.py: states of all workers together, of Pack and Mix, too
    seals.py      checksums of states, and files that hold them
    packing.py    Pack: rows of tokens as samples of one length
    mixing.py     Mix: several sources, drawn by weight
    stateful.py   what these two and ReaderDataset share: iterations, numbers in shared memory; needs no torch

    checkpoints.py  TrainingCheckpoints: all states of a training, saved together
    steps.py        the folders of saved steps
    snapshot.py     what a save copies while the training waits
    ranks.py        what ranks tell each other

What needs torch is imported at its first use, so that the rest can be imported and tested without it.
"""

from typing import TYPE_CHECKING

from datatrove_ckpt.torch.merging import gather, merge
from datatrove_ckpt.torch.mixing import Mix
from datatrove_ckpt.torch.packing import Pack

if TYPE_CHECKING:
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints
    from datatrove_ckpt.torch.dataset import ReaderDataset, Sample, restore, text_and_id

__all__ = [
    "Mix",
    "Pack",
    "ReaderDataset",
    "Sample",
    "TrainingCheckpoints",
    "gather",
    "merge",
    "restore",
    "text_and_id",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from datatrove_ckpt.torch import checkpoints, dataset

    module = next(one for one in (dataset, checkpoints) if name in vars(one))
    return getattr(module, name)
