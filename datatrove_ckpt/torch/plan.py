"""What one worker reads in an epoch, from the settings of the dataset and what was read before. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.deal import Even, Remaining, Topology
from datatrove_ckpt.torch.order import (
    BlockTable,
    EpochOrder,
    Numbers,
    Window,
    order_by_files,
    order_by_rows,
    unevenness,
)
from datatrove_ckpt.torch.states import DatasetState, Slot, merge_states

Sharding: TypeAlias = Literal["auto", "files", "rows"]

_UNEVEN = 0.01
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Settings:
    """The settings of a dataset that decide what each worker reads."""

    seed: int | None
    window: Window
    sharding: Sharding
    even: Even
    batch: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that is not allowed."""
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"shuffle_seed must be an integer or None, not {self.seed!r}.")
        if self.sharding not in get_args(Sharding):
            raise ConfigError(f'sharding must be "auto", "files" or "rows", not {self.sharding!r}.')
        if self.even not in ("drop", "repeat", None):
            raise ConfigError(f'even must be "drop", "repeat" or None, not {self.even!r}.')
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ConfigError(f"batch_size must be an integer from 1 on, or None, not {self.batch!r}.")

    @property
    def order(self) -> State:
        """What a state keeps of these, beside the number of shares."""
        return {"shuffle_seed": self.seed, "window": [self.window.rows, self.window.bytes]}


def parse_window(window: int | str) -> Window:
    """A number of rows, or of bytes with a unit, such as "256MB".

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(window, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?|)B", window.strip().upper())):
        number, unit = found.groups()
        return Window(bytes=max(1, int(float(number) * _UNITS[unit])))
    if isinstance(window, int) and not isinstance(window, bool) and window > 0:
        return Window(rows=window, bytes=None)
    raise ConfigError(f'shuffle_window must be a number of rows, or bytes like "256MB", not {window!r}.')


class Plan:
    """What one worker reads.

    Args:
        table: the input.
        settings: of the dataset.
        slot: the worker.
        epoch: the number of the epoch.
        then: the state that the epoch continues, of this slot or of all; None: from its beginning.

    Raises:
        CheckpointMismatch: the state belongs to another slot, or another order.
    """

    def __init__(
        self, table: BlockTable, settings: Settings, slot: Slot, epoch: int, then: DatasetState | None = None
    ) -> None:
        self.slot, self.settings, self.epoch = slot, settings, epoch
        self._topology = Topology(slot.world_size, slot.workers, settings.batch)
        self.shares = _file_shares(table, settings, self._topology)
        then, self.skipped = then and _of_all(then, slot), 0
        self.done, self.first = (then.done, 0) if then else ((), 0)
        if then is not None:
            then.check_order(settings.order)
            known = then.order["shares"]  # None: the state before the epoch began
            self.shares = self.shares if known is None else known
            if then.slot is not None:
                self._check_slot(then)
                self.first, self.skipped = then.samples, then.skipped
        self.order = make_order(table, settings, epoch, self.shares)
        self._remaining = Remaining(self.order.rows, self.done)
        self.samples = self._topology.of_worker(self._remaining.rows, slot.rank, slot.worker, settings.even)

    def places(self, low: int, high: int) -> tuple[Numbers, Numbers]:
        """Shares and rows of this worker's samples from ``low`` to ``high``."""
        places = self._topology.places(self.slot.rank, self.slot.worker, np.arange(low, high))
        return self.order.locate(self._remaining.positions(places))

    def state(self, samples: int, input_state: State) -> DatasetState:
        """The state after so many samples of this worker."""
        own = (self.done, self.slot, samples, self.skipped, self.settings.batch, self.settings.even)
        return DatasetState(self.epoch, self.settings.order | {"shares": self.shares}, input_state, *own)

    def _check_slot(self, then: DatasetState) -> None:
        now = (self.slot, self.settings.batch, self.settings.even)
        if (then.slot, then.batch, then.even) == now:
            return
        what = f"{then.slot}, batch_size={then.batch}, even={then.even!r}"
        raise CheckpointMismatch(
            f"The state was made by {what}, and this is {self.slot}, batch_size={now[1]}, even={now[2]!r}. A state "
            "belongs to its worker. To continue with another number of ranks or workers, give the states of all ranks "
            "to datatrove_ckpt.torch.restore(loader, states)."
        )


def make_order(table: BlockTable, settings: Settings, epoch: int, shares: int) -> EpochOrder:
    """The order of an epoch. ``shares``: of whole files; 0: by rows."""
    seed, window = settings.seed, settings.window
    if shares:
        return order_by_files(table, seed, epoch, window, shares)
    return order_by_rows(table, seed, epoch, window)


def _file_shares(table: BlockTable, settings: Settings, topology: Topology) -> int:
    """How many shares of whole files there are; 0: shares are cut by rows.

    By rows, each block is read by few workers if rows are shuffled and files can be entered anywhere. Else all workers
    would read all blocks, so whole files are better, if they make even shares.
    """
    count = topology.slots if topology.batch == 1 else topology.ranks
    if settings.sharding != "auto":
        return count if settings.sharding == "files" else 0
    if count == 1 or (settings.seed is not None and not table.is_stream.any()):
        return 0
    return count if unevenness(table, count) <= _UNEVEN else 0


def _of_all(then: DatasetState, slot: Slot) -> DatasetState:
    """The state of the only slot that there was is one of all, for any other slot."""
    is_alone = then.slot is not None and then.slot[1::2] == (1, 1)
    return merge_states([then]) if is_alone and then.slot != slot else then
