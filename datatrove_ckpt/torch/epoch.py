"""One iteration of a worker over its samples of an epoch.

A ``EpochPlan`` chooses the worker's positions in the order, and an ``Epoch`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from loguru import logger

from datatrove_ckpt.common.formatting import parse_bytes
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.readers.tables import Numbers
from datatrove_ckpt.torch.index import Row, RowSource
from datatrove_ckpt.torch.order import BlockTable, Window, order_by_files, order_by_rows, unevenness
from datatrove_ckpt.torch.samples import json_row
from datatrove_ckpt.torch.states import DatasetState, Slot
from datatrove_ckpt.torch.topology import Even, Remaining, Round, Topology

_UNEVEN = 0.01


@dataclass(frozen=True)
class Settings:
    seed: int | None
    window: Window
    even: Even
    batch: int

    @property
    def order(self) -> State:
        """The part that a state keeps, beside the number of shares."""
        return {"shuffle_seed": self.seed, "window": [self.window.rows, self.window.bytes]}


def parse_window(window: int | str) -> Window:
    if isinstance(window, str):
        size = parse_bytes(window)
        if size is not None:
            return Window(bytes=max(1, size))
    elif type(window) is int and window > 0:
        return Window(rows=window, bytes=None)
    raise ConfigError(
        f'shuffle_window must be a number of rows, or bytes like "256MB", not {window!r}.'
    )


class EpochPlan:
    """The rows of one worker. ``then``: the state that the epoch continues, of this slot or of all.

    Raises:
        CheckpointMismatch: the state belongs to another slot, or another order.
    """

    def __init__(
        self,
        table: BlockTable,
        settings: Settings,
        slot: Slot,
        epoch: int,
        then: DatasetState | None,
    ) -> None:
        self.slot = slot
        self.settings = settings
        self.epoch = epoch
        self.done: tuple[Round, ...] = ()
        self.first = 0
        self.skipped = 0
        self._topology = Topology(slot.world_size, slot.workers, settings.batch)
        self.shares = _file_shares(table, settings, self._topology)
        if then is not None:
            self._continue(then)
        if self.shares:
            self.order = order_by_files(table, settings.seed, epoch, settings.window, self.shares)
        else:
            self.order = order_by_rows(table, settings.seed, epoch, settings.window)
        self._remaining = Remaining(self.order.rows, self.done)
        self.samples = self._topology.of_worker(
            self._remaining.rows, slot.rank, slot.worker, settings.even
        )

    def _continue(self, then: DatasetState) -> None:
        then.check_order(self.settings.order)
        self.done = then.done
        known = then.order["shares"]
        if known is not None:  # None: the state before the epoch began
            self.shares = known
        if then.slot is None:
            return
        made_by = f"{then.slot}, batch_size={then.batch}, even={then.even!r}"
        this = f"{self.slot}, batch_size={self.settings.batch}, even={self.settings.even!r}"
        if made_by != this:
            raise CheckpointMismatch(
                f"The state was made by {made_by}, and this is {this}. A state belongs to its "
                "worker. To continue with another number of ranks or workers, give the states of "
                "all ranks to datatrove_ckpt.torch.restore(loader, states)."
            )
        self.first = then.samples
        self.skipped = then.skipped

    def places(self, low: int, high: int) -> tuple[Numbers, Numbers]:
        places = self._topology.places(self.slot.rank, self.slot.worker, np.arange(low, high))
        return self.order.locate(self._remaining.positions(places))

    def state(self, samples: int, input_state: State) -> DatasetState:
        return DatasetState(
            epoch=self.epoch,
            order=self.settings.order | {"shares": self.shares},
            input=input_state,
            done=self.done,
            slot=self.slot,
            samples=samples,
            skipped=self.skipped,
            batch=self.settings.batch,
            even=self.settings.even,
        )


def _file_shares(table: BlockTable, settings: Settings, topology: Topology) -> int:
    """Returns the number of shares of whole files; 0: shares are cut by rows.

    By rows, all workers read all blocks if rows are not shuffled or files are compressed. Then
    whole files are better, if they make even shares.
    """
    count = topology.slots if topology.batch == 1 else topology.ranks
    if count == 1 or (settings.seed is not None and not table.is_stream.any()):
        return 0
    if unevenness(table, count) > _UNEVEN:
        return 0
    return count


# The limits of what becomes Python objects together.
_CHUNK_BYTES = 2**22
_CHUNK_ROWS = 8192


class Epoch(Iterator[object]):
    """The samples of one worker.

    Args:
        columns: samples are rows of these columns; None: documents.
        after_end: the loaded state is of the end of the epoch before.

    Attributes:
        rest: the samples behind the first one, without a call in between.
    """

    def __init__(
        self,
        source: RowSource,
        plan: EpochPlan,
        reader: SeekingReader,
        columns: Sequence[str] | None,
        transform: Callable[[Any], object] | None,
        after_end: bool = False,
    ) -> None:
        self._source = source
        self._plan = plan
        self._reader = reader
        self._columns = columns
        self._after_end = after_end
        index = source.index
        mean = int(index.table.bytes.sum()) // max(1, index.table.total)
        self._chunk = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, mean)))
        self._samples = plan.first
        self._start = plan.state(plan.first, index.state).to_json()
        self._is_used = False
        self._skipped = 0
        self._missing = plan.skipped
        self.rest = self._read()
        if transform is not None:
            self.rest = map(transform, self.rest)

    def __next__(self) -> object:
        self._is_used = True
        return next(self.rest)

    def state(self) -> State:
        return self._start | {"samples": self._samples, "skipped": self._missing}

    def row_name(self, behind: int) -> str:
        number = self._samples - behind
        [row] = self._source.rows(*self._plan.places(number, number + 1))
        return f"Row {row.number} of {row.name!r}"

    def check_used(self, next_epoch: int) -> None:
        """Raises CheckpointMismatch before the next epoch if this epoch gave nothing.

        A loader without workers that resumes with a state of the last batch of the epoch before
        reads nothing.
        """
        epoch = self._plan.epoch
        if self._after_end and not self._is_used and self._plan.samples and next_epoch != epoch:
            self._after_end = False
            raise CheckpointMismatch(
                f"Epoch {epoch} gave no sample: the state was saved at the last batch of epoch "
                f"{epoch - 1}, and the loader ends there. Resume the loop of epochs at "
                f"{epoch - 1}: the rest of it is empty, and epoch {epoch} follows."
            )

    def _read(self) -> Iterator[object]:
        while self._samples < self._plan.samples:
            first = self._samples
            last = min(first + self._chunk, self._plan.samples)
            for number, sample in enumerate(self._samples_of(first, last), start=first):
                if sample is None:
                    sample = self._instead_of(number)
                    self._missing += sample is None
                self._samples = number + 1
                if sample is not None:
                    yield sample

    def _samples_of(self, first: int, last: int) -> Iterable[object]:
        places = self._plan.places(first, last)
        if self._columns is None:
            return map(self._make, self._source.rows(*places))
        return self._source.samples(*places)

    def _make(self, row: Row) -> object:
        """Makes a document of a row, or returns the row if there are columns; None: damaged, or no
        document.
        """
        if row.data is None:
            return None
        if self._columns is not None:
            return json_row(row.data)
        return self._reader.get_document_from_dict(row.data, row.name, row.number)

    def _instead_of(self, number: int) -> object:
        """Returns a sample in place of the worker's row with this number, which holds no document.

        Ranks that must be even get the worker's next document twice, which depends on the order
        alone. Others: None.
        """
        is_even = self._plan.settings.even is not None
        if not self._skipped:
            what = "this epoch has fewer samples than len() says"
            if is_even:
                what = "another document comes twice"
            logger.warning(
                f"{self.row_name(0)} holds no document, so {what}. Further ones are skipped."
            )
        self._skipped += 1
        if not is_even:
            return None
        # Adapters take values out of the rows of a source.
        others = RowSource(self._source.index, self._plan.order, self._source.columns)
        total = self._plan.samples
        # Those after it, then those before it.
        for low in (*range(number + 1, total, self._chunk), *range(0, number, self._chunk)):
            high = min(low + self._chunk, total)
            for other in map(self._make, others.rows(*self._plan.places(low, high))):
                if other is not None:
                    return other
        raise InputError(
            f"None of the {total} rows of {self._plan.slot} holds a document. Is text_key "
            f"({self._reader.text_key!r}) correct?"
        )
