"""Crash-proof LLM inference for datatrove: exactly once, nothing paid twice, resumed where it was.

``InferenceRunner`` and ``InferenceConfig`` take the place of datatrove's. Recovery is told on one page in
``datatrove_ckpt.checkpoint``, the errors in ``datatrove_ckpt.errors``.

The names are imported when they are first used: the servers' processes (``python -m datatrove_ckpt.inference...``)
live below this package, and would otherwise take a second longer to start, loading datatrove for nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datatrove_ckpt.config import InferenceConfig
    from datatrove_ckpt.errors import CkptError
    from datatrove_ckpt.runner import InferenceRunner

_HOMES = {"CkptError": "errors", "InferenceConfig": "config", "InferenceRunner": "runner"}

__all__ = ["CkptError", "InferenceConfig", "InferenceRunner"]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
