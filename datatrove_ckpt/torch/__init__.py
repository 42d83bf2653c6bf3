"""Readers as torch datasets whose position can be saved and restored; whole checkpoints of a
training.

Start at ``dataset.py`` (ReaderDataset, ``restore``) and ``checkpoints.py`` (TrainingCheckpoints).

    order.py        which row stands at which position of an epoch, and which worker reads it
    index.py        the rows of an input by number, in ``readers/blocks.py``
    states.py       states of ReaderDataset, their checksums; states of all workers together
    packing.py, mixing.py, stateful.py
                    Pack, Mix, and what they share with ReaderDataset
    steps.py, sharded.py, training_input.py, ranks.py
                    folders of saved steps; states of which each rank has a part, and their copies
                    in memory; the states of loaders; how ranks agree

``checkpoint/training_*.py``: what needs no torch: format of steps, policies, loss curve.
``TrainingCheckpoints`` needs torch, and is imported at its first use. The rest works without torch.
"""

from typing import TYPE_CHECKING

from datatrove_ckpt.torch.dataset import ReaderDataset, restore
from datatrove_ckpt.torch.mixing import Mix
from datatrove_ckpt.torch.packing import Pack
from datatrove_ckpt.torch.policies import (
    Best,
    Every,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    KeepPolicy,
    Last,
    Moment,
    SavePolicy,
    WhenFailing,
)

if TYPE_CHECKING:
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints

__all__ = [
    "Best",
    "Every",
    "EveryEpoch",
    "EverySeconds",
    "EverySteps",
    "KeepPolicy",
    "Last",
    "Mix",
    "Moment",
    "Pack",
    "ReaderDataset",
    "SavePolicy",
    "TrainingCheckpoints",
    "WhenFailing",
    "restore",
]

_REMOVED = {
    "Sample": "typing.Any",
    "merge": "restore(loader, states), with the states of all ranks",
    "text_and_id": 'select_columns(["text", "id"])',
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:
        raise ImportError(f"{__name__}.{name} was removed. Use {_REMOVED[name]}.")
    if name != "TrainingCheckpoints":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints

    return TrainingCheckpoints
