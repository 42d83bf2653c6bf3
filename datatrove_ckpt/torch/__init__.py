"""Readers as torch datasets whose position can be saved and restored.

    dataset.py    ReaderDataset; start reading here
    order.py      which row stands at which position of an epoch
    deal.py       which worker reads which positions; what is left after another topology
    plan.py       these two for one worker, from the dataset's settings
    index.py      the rows of an input by number
    epoch.py      an iteration of a worker
    blocks.py     BlockInput: the input as blocks of rows; block_formats.py: what a format gives
    samples.py    rows of a table as dicts and arrays, and rows taken out of batches
    states.py     states of workers, and of all ranks together
    resume.py     restore(): these into a loader
    streams.py    input whose rows cannot be counted
    shared.py     what the workers and the training loop tell each other
    packing.py    Pack: rows of tokens as samples of one length
    mixing.py     Mix: several sources, drawn by weight
    stateful.py   what these two share, and which iterations over a dataset there are; they need no torch

The names are imported at their first use, so that what needs no torch can be imported and tested without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datatrove_ckpt.torch.dataset import ReaderDataset, Sample, text_and_id
    from datatrove_ckpt.torch.mixing import Mix
    from datatrove_ckpt.torch.packing import Pack
    from datatrove_ckpt.torch.resume import restore
    from datatrove_ckpt.torch.states import gather, merge

_MODULES = {
    "Mix": "mixing",
    "Pack": "packing",
    "ReaderDataset": "dataset",
    "Sample": "dataset",
    "gather": "states",
    "merge": "states",
    "restore": "resume",
    "text_and_id": "dataset",
}

__all__ = ["Mix", "Pack", "ReaderDataset", "Sample", "gather", "merge", "restore", "text_and_id"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
