"""Prepares a loader's workers: they outlive signals, and have seeds that do not depend on restarts.

torchrun, Slurm and terminals also signal workers. Then torch's workers die, and the loader raises
before the training can save. Here workers ignore signals, even ``terminate``. multiprocessing waits
for workers at the exit, so a thread in each worker watches for the end of the training.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.utils.data import DataLoader

from datatrove_ckpt.process.shutdown import SIGNALS

_POLL_SECONDS = 0.1


class OutlivesSignals:
    """A ``worker_init_fn`` that calls the ``usual`` one as well."""

    def __init__(self, usual: Callable[[int], object] | None, signals: Sequence[str]) -> None:
        self._usual = usual
        self._signals = signals
        self._is_over = _is_over(os.getpid())

    def __call__(self, worker: int) -> None:
        for name in self._signals:
            # Not SIG_IGN, which programs that a worker starts would have.
            signal.signal(signal.Signals[name], _ignore)
        threading.Thread(target=self._end, daemon=True).start()
        if self._usual is not None:
            self._usual(worker)

    def _end(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        while parent.is_alive() and not self._is_over:
            parent.join(_POLL_SECONDS)
        os._exit(0)


def keep_workers(
    loader: DataLoader, seed: int | None = None, signals: Sequence[str] = SIGNALS
) -> None:
    """Lets a loader's workers outlive signals. Call it before they start.

    Args:
        seed: seed of the workers' seeds. None: each iterator draws them from torch's generator,
            also in a resumed epoch.
        signals: names of the signals.
    """
    inner = getattr(loader, "base_dataloader", loader)  # of Accelerate's
    usual = getattr(inner, "worker_init_fn", None)
    if getattr(inner, "num_workers", 0) and not isinstance(usual, OutlivesSignals):
        inner.worker_init_fn = OutlivesSignals(usual, signals)
    if seed is not None and getattr(inner, "generator", False) is None:
        inner.generator = torch.Generator().manual_seed(seed >> 1)


@cache
def _is_over(process: int) -> torch.Tensor:
    """Makes a flag that this process shares with its workers, and sets when it ends."""
    flag = torch.zeros(1, dtype=torch.bool).share_memory_()
    # Before multiprocessing waits for the workers: in a process that it started itself, without
    # atexit.
    multiprocessing.util.Finalize(None, flag.fill_, args=(True,), exitpriority=100)
    atexit.register(flag.fill_, True)
    return flag


def _ignore(*_: object) -> None:
    pass
