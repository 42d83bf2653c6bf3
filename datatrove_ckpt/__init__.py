"""Crash-proof LLM inference for datatrove: each document is processed exactly once, and no answer is paid for twice.

``InferenceRunner``, ``InferenceConfig`` and ``LocalPipelineExecutor`` replace datatrove's.
``datatrove_ckpt.checkpoint`` explains recovery on one page, ``datatrove_ckpt.errors`` the errors.

The names are imported at their first use. Some programs that we start are modules of this package (``python -m
datatrove_ckpt.inference...``); importing datatrove, which they do not need, would make each start a second slower.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datatrove_ckpt.config import InferenceConfig
    from datatrove_ckpt.errors import CkptError
    from datatrove_ckpt.executor import LocalPipelineExecutor
    from datatrove_ckpt.runner import InferenceRunner

_MODULES = {
    "CkptError": "errors",
    "InferenceConfig": "config",
    "InferenceRunner": "runner",
    "LocalPipelineExecutor": "executor",
}

__all__ = ["CkptError", "InferenceConfig", "InferenceRunner", "LocalPipelineExecutor"]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


class _Moved(ModuleType):
    """A module under the name that it had in 0.1. Executors that 0.1 pickled, such as queued Slurm tasks, import it."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name)
        self._target = target

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # asked by the import system and by inspection
            raise AttributeError(name)
        return getattr(import_module(self._target), name)


sys.modules.setdefault(f"{__name__}.slurm", _Moved(f"{__name__}.slurm", f"{__name__}.cli.slurm_submit"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
