"""Makes readers torch datasets whose position can be saved and restored, and saves a training in
whole checkpoints.

Start at ``dataset.py`` (ReaderDataset, ``restore``) and ``checkpoints.py`` (TrainingCheckpoints).

``checkpoints.py`` and its six modules need torch. The rest works without torch, and what reads the
folder of a training without numpy and readers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datatrove_ckpt.torch.checkpoints import TrainingCheckpoints
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
        Overhead,
        SavePolicy,
        WhenFailing,
    )

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
    "Overhead",
    "Pack",
    "ReaderDataset",
    "SavePolicy",
    "TrainingCheckpoints",
    "WhenFailing",
    "restore",
]

_MODULES = {
    "Mix": "mixing",
    "Pack": "packing",
    "ReaderDataset": "dataset",
    "TrainingCheckpoints": "checkpoints",
    "restore": "dataset",
}
_REMOVED = {
    "Sample": "typing.Any",
    "merge": "restore(loader, states), with the states of all ranks",
    "text_and_id": 'select_columns(["text", "id"])',
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:
        raise ImportError(f"{__name__}.{name} was removed. Use {_REMOVED[name]}.")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "policies")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
