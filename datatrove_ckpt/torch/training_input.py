"""Saves and restores the input of a training: the states of all ranks' loaders, and the epoch."""

from collections.abc import Sequence
from typing import Any

import torch
from loguru import logger
from torch.utils.data import DataLoader
from xxhash import xxh3_64_intdigest

import datatrove_ckpt.torch.dataset as dataset
import datatrove_ckpt.torch.loader_workers as workers
import datatrove_ckpt.torch.stateful as stateful
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch.ranks import Ranks
from datatrove_ckpt.torch.states import find_states, is_ours
from datatrove_ckpt.torch.step_folder import StepName


class TrainingInput:
    """The loader of this rank.

    Attributes:
        epoch: the number of the epoch with which the loop continues; None: it was not saved.
        told_epoch: the number of this epoch, if the loader reads no dataset of ours.
        restored: the restored input, by its step. A loader that has not begun again knows less.
    """

    def __init__(self, ranks: Ranks, signals: Sequence[str]) -> None:
        self._ranks = ranks
        self._signals = signals
        self.epoch: int | None = 0
        self.told_epoch: int | None = None
        self.restored: dict[int, list[Any]] = {}
        self._epochs_ended = 0

    def has_ended(
        self, loader: DataLoader | None = None, epoch: int | None = None, **ignored: object
    ) -> bool:
        """Returns whether an epoch has ended since the last call."""
        before = self._epochs_ended
        source = _source_of(loader)
        if loader is not None and source is not None:
            states = list(find_states(loader.state_dict(), is_ours))
            ended = bool(states) and all(map(source._has_ended, states))
            epoch = source._shared.epoch + source._shared.again + ended
        if epoch is None:
            raise ConfigError("EveryEpoch: the loader does not show its epoch. Give epoch=.")
        self._epochs_ended = epoch
        return epoch > before

    def state(self, loader: DataLoader | None) -> dict[str, Any] | None:
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
            seed = f"{torch.initial_seed()} {self._ranks.rank} {step}"
            workers.keep_workers(loader, xxh3_64_intdigest(seed.encode()), self._signals)

    def load(self, loader: DataLoader | None, name: StepName, inputs: list[Any]) -> None:
        """Restores the input of a step. Raises ConfigError if the step has no input, or an input of
        another number of ranks.
        """
        if loader is None:
            if inputs[0] is not None and self._ranks.rank == 0:
                logger.warning(
                    f"{name} also holds loader: not restored, as restore was not given it. The "
                    "input begins anew."
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
            elif self.epoch is not None:
                self.epoch += 1
        else:
            raise ConfigError(
                f"The step is of {len(inputs)} ranks, and there are {self._ranks.size}: only the "
                "input of a ReaderDataset, Pack or Mix continues with another number."
            )
        source = _source_of(loader)
        if source is not None and self.epoch is not None:
            source._shared.again = self.epoch - source._shared.epoch
        self._epochs_ended = self.epoch or 0


def _source_of(loader: object) -> stateful.StatefulIterable | None:
    """Returns this package's dataset of a loader, also in a wrapper such as Accelerate's."""
    source = loader
    while source is not None:
        if isinstance(source, stateful.StatefulIterable):
            return source
        source = getattr(source, "dataset", None)
    return None
