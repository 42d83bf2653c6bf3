"""Crash-proof LLM inference for datatrove: each document is processed exactly once, and no answer
is paid for twice.

``InferenceRunner``, ``InferenceConfig`` and the three executors replace datatrove's.
``InferenceResult``, ``InferenceError`` and ``ServerError`` are datatrove's own, so that a script
changes one import line only: ``datatrove_ckpt``, or ``datatrove_ckpt.run_inference``, for
``datatrove.pipeline.inference.run_inference``. ``datatrove_ckpt.checkpoint`` explains recovery on
one page, ``datatrove_ckpt.errors`` the errors.

The names are imported at their first use. Importing datatrove would slow down programs of this
package that do not need it (``python -m datatrove_ckpt.inference...``) by a second.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from datatrove_ckpt import old_paths as old_paths
from datatrove_ckpt.process.gc_tuning import gc_paused

if TYPE_CHECKING:
    from datatrove.pipeline.inference.types import InferenceError as InferenceError
    from datatrove.pipeline.inference.types import RolloutFunction as RolloutFunction
    from datatrove.pipeline.inference.types import ServerError as ServerError

    from datatrove_ckpt.cli.python_job import run as run
    from datatrove_ckpt.config import InferenceConfig as InferenceConfig
    from datatrove_ckpt.config import MonitoringConfig as MonitoringConfig
    from datatrove_ckpt.errors import CkptError as CkptError
    from datatrove_ckpt.executors.jobs import JobsPipelineExecutor as JobsPipelineExecutor
    from datatrove_ckpt.executors.local import LocalPipelineExecutor as LocalPipelineExecutor
    from datatrove_ckpt.executors.slurm import SlurmPipelineExecutor as SlurmPipelineExecutor
    from datatrove_ckpt.rollouts import Classification as Classification
    from datatrove_ckpt.rollouts import InferenceResult as InferenceResult
    from datatrove_ckpt.run_folder.preflight import doctor as doctor
    from datatrove_ckpt.runner import InferenceRunner as InferenceRunner

_TYPES = "datatrove.pipeline.inference.types"
_MODULES = {
    "Classification": f"{__name__}.rollouts",
    "CkptError": f"{__name__}.errors",
    "InferenceConfig": f"{__name__}.config",
    "InferenceError": _TYPES,
    "InferenceResult": _TYPES,
    "InferenceRunner": f"{__name__}.runner",
    "JobsPipelineExecutor": f"{__name__}.executors.jobs",
    "LocalPipelineExecutor": f"{__name__}.executors.local",
    "MonitoringConfig": f"{__name__}.config",
    "RolloutFunction": _TYPES,
    "ServerError": _TYPES,
    "SlurmPipelineExecutor": f"{__name__}.executors.slurm",
    "run": "datatrove_ckpt.cli.python_job",
    "doctor": f"{__name__}.run_folder.preflight",
}

__all__ = [*_MODULES]
__version__ = "0.3.0"

# numpy, which datatrove imports, starts a thread per core, and each spins for 0.1 s.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with gc_paused():
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
