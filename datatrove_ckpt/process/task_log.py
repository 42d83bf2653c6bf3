"""The log files of tasks: datatrove's, with three differences.

A task appends to its log: datatrove would truncate the log of a living rank that is started again.
Ranks that run at once in this process have separate logs; lines of other threads go to all of them.
On a full disk a log lacks lines: the task's error says why.

Imported by each ``InferenceRunner``, and so in every process that unpickles an executor with its
step.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, TextIO

from datatrove.executor import base
from datatrove.io import DataFolder
from loguru import logger

from datatrove_ckpt.process.host_loop import rank_of_many

if TYPE_CHECKING:
    from loguru import Record

_add_task_logger = base.add_task_logger
_close_task_logger = base.close_task_logger
_LINE = (
    "{time:YYYY-MM-DD HH:mm:ss.SSS} | <level>{level: <8}</level> | {name}:{function}:{line} - "
    "<level>{message}</level>"
)
_sinks: dict[int, int] = {}
"""The sinks of ranks that run at once, by the ids of their log files."""


class _OnDisk(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _add(folder: DataFolder, rank: int, local_rank: int = 0, node_rank: int = -1) -> TextIO:
    def append(path: str, mode: str) -> TextIO:
        if folder.is_local():
            return _OnDisk(folder.open(path, "a"))  # type: ignore[return-value]
        return folder.open(path, mode)  # type: ignore[no-any-return]

    if rank_of_many() is None:
        return _add_task_logger(  # type: ignore[no-any-return]
            SimpleNamespace(open=append), rank, local_rank, node_rank=node_rank
        )
    file = append(f"logs/task_{rank:05d}.log", "w")
    _sinks[id(file)] = logger.add(
        file, level="DEBUG", format=_LINE, filter=lambda record: rank_of_many() in (rank, None)
    )
    logger.debug(f"Launching pipeline for {rank=}")
    return file


def _close(file: TextIO) -> None:
    sink = _sinks.pop(id(file), None)
    if sink is None:
        _close_task_logger(file)
        return
    logger.remove(sink)
    file.close()


def _line_of_many(record: "Record") -> str:
    rank = rank_of_many()
    is_named = rank is None or record["message"].startswith("Task ")
    task = "" if is_named else f"task {rank}: "
    return _LINE.replace("<level>{message}", f"{task}<level>{{message}}") + "\n{exception}"


@contextmanager
def log_of_many(slot: int) -> Iterator[None]:
    logger.remove()
    logger.add(sys.stderr, level="INFO" if slot == 0 else "ERROR", format=_line_of_many)
    try:
        yield
    finally:
        _close_task_logger(io.StringIO())


base.add_task_logger = _add
base.close_task_logger = _close
