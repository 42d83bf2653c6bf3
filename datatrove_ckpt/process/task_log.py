"""Makes datatrove append to a task's log. It would truncate the log of a living rank that is started a second time.

Imported with ``InferenceRunner``, and so by every process that unpickles an executor with such a step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TextIO

from datatrove.executor import base
from datatrove.io import DataFolder

_add_task_logger = base.add_task_logger


def _append_to_log(folder: DataFolder, *rank: int, **node: int) -> TextIO:
    def append(path: str, mode: str) -> TextIO:
        return folder.open(path, "a" if folder.is_local() else mode)  # type: ignore[no-any-return]

    return _add_task_logger(SimpleNamespace(open=append), *rank, **node)  # type: ignore[no-any-return]


base.add_task_logger = _append_to_log
