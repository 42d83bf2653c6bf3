"""Saves and restores the input of a training: the states of all ranks' loaders, and the epoch.

It also prepares a loader's workers: they outlive signals, and have seeds that do not depend on
restarts. torchrun, Slurm and terminals also signal workers. Then torch's workers die, and the
loader raises before the training can save. Here workers ignore signals, even ``terminate``.
multiprocessing waits for workers at the exit, so a thread in each worker watches for the end of the
training.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from loguru import logger
from torch.utils.data import DataLoader
from xxhash import xxh3_64_intdigest

import datatrove_ckpt.torch.dataset as dataset
import datatrove_ckpt.torch.stateful as stateful
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.process.shutdown import SIGNALS
from datatrove_ckpt.torch.random_state import random_state
from datatrove_ckpt.torch.ranks import Ranks
from datatrove_ckpt.torch.states import find_states, is_ours
from datatrove_ckpt.torch.step_folder import StepName
from datatrove_ckpt.torch.watched_loader import RestoredInput, watch


@dataclass
class TrainingInput:
    """The loader of this rank.

    Attributes:
        epoch: the number of the epoch with which the loop continues; None: it was not saved.
        restored: the restored input, by its step. A loader that has not begun again knows less.
        first_iteration: what the loader has loaded. The loader itself is not kept: the workers of
            one that is dropped would end only with the garbage.
    """

    _ranks: Ranks
    _signals: Sequence[str]
    epoch: int | None = 0
    told_epoch: int | None = None
    restored: dict[int, list[object]] = field(default_factory=dict)
    first_iteration: RestoredInput | None = None
    _epochs_ended: int = 0

    def has_ended(self, loader: Any = None, epoch: int | None = None, **ignored: object) -> bool:
        before = self._epochs_ended
        source = _source_of(loader)
        if source is not None:
            states = list(find_states(loader.state_dict(), is_ours))
            ended = bool(states) and all(map(source._has_ended, states))
            epoch = source._shared.epoch + source._shared.again + ended
        if epoch is None:
            raise ConfigError("EveryEpoch: the loader does not show its epoch. Give epoch=.")
        self._epochs_ended = epoch
        return epoch > before

    def state(self, loader: DataLoader | None) -> dict[str, object] | None:
        if loader is None:
            return None
        stateful.refuse_shuffled(loader)
        epoch = self.told_epoch
        again = 0
        source = _source_of(loader)
        if source is not None:
            again = source._shared.again
            epoch = source._shared.epoch + again
        return {"epoch": epoch, "again": again, "loader": loader.state_dict()}

    def prepare(self, loader: DataLoader | None, step: int) -> None:
        if loader is not None:
            stateful.refuse_shuffled(loader)
            stateful.refuse_begun(loader)
            keep_workers(loader, self.seed(step), self._signals)
            watch(loader)
            self.first_iteration = None

    def seed(self, step: int) -> int:
        seed = f"{torch.initial_seed()} {self._ranks.rank} {step}"
        return xxh3_64_intdigest(seed.encode()) >> 1

    def load(self, loader: DataLoader | None, name: StepName, inputs: list[Any]) -> None:
        """Raises ConfigError if the step has no input, or an input of another number of ranks."""
        if loader is None:
            if inputs[0] is not None and self._ranks.rank == 0:
                logger.warning(
                    f"{name} also holds loader, which is not restored. The input begins anew."
                )
            return
        self.prepare(loader, name.step)
        if None in inputs:
            raise ConfigError(f"{name} was saved without a loader.")
        self.restored = {name.step: inputs}
        self.epoch = inputs[0]["epoch"]
        states = [each["loader"] for each in inputs]
        of_all_ranks = len(inputs) == self._ranks.size
        if of_all_ranks:
            state = states[self._ranks.rank]
            states.insert(0, state)  # ranks that read the same rows have equal states
        if stateful.is_counted(getattr(loader, "dataset", None)):
            self.epoch = dataset.restore(loader, states) + inputs[0].get("again", 0)
        elif of_all_ranks:
            has_ended = isinstance(state, dict) and bool(state.get("_iterator_finished"))
            if not has_ended:
                loader.load_state_dict(state)
                watch(loader, RestoredInput(None, state))
            elif self.epoch is not None:
                self.epoch += 1
        else:
            raise ConfigError(
                f"The step is of {len(inputs)} ranks, and there are {self._ranks.size}. Only a "
                "ReaderDataset, Pack or Mix continues with another number."
            )
        restored = getattr(loader, "_restored", None)
        if restored is not None:
            restored.random_state = random_state()
        self.first_iteration = restored
        source = _source_of(loader)
        if source is not None and self.epoch is not None:
            source._shared.again = self.epoch - source._shared.epoch
        self._epochs_ended = self.epoch or 0


def _source_of(loader: object) -> stateful.StatefulIterable | None:
    source = loader
    while source is not None:
        if isinstance(source, stateful.StatefulIterable):
            return source
        source = getattr(source, "dataset", None)
    return None


# workers ------------------------------------------------------------------------------------------

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
    """
    inner = getattr(loader, "base_dataloader", loader)
    usual = getattr(inner, "worker_init_fn", None)
    if getattr(inner, "num_workers", 0) and not isinstance(usual, OutlivesSignals):
        inner.worker_init_fn = OutlivesSignals(usual, signals)
    if seed is not None and getattr(inner, "generator", False) is None:
        inner.generator = torch.Generator().manual_seed(seed)


@cache
def _is_over(process: int) -> torch.Tensor:
    flag = torch.zeros(1, dtype=torch.bool).share_memory_()
    # Before multiprocessing waits for the workers: in a process that it started itself, without
    # atexit.
    multiprocessing.util.Finalize(None, flag.fill_, args=(True,), exitpriority=100)
    atexit.register(flag.fill_, True)
    return flag


def _ignore(*_: object) -> None:
    pass
