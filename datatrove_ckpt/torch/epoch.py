"""One iteration of a worker over its samples of an epoch.

A ``Plan`` says which positions of the order the worker has, from the settings of the dataset and what was read before.
An ``Epoch`` reads them.

``StreamEpoch`` is for readers whose rows cannot be counted (datasets of Hugging Face), or were not (``indexed=False``).
Each worker of each rank reads its own share, from its beginning: every n-th file, or every n-th row of all files if
files would make shares that differ by more than 1 %. Shares may differ in length, there is no ``len()``, and a state
belongs to its number of ranks and workers. States of release 0.1 are of this kind, and resume in this way. With
``skip`` or ``limit`` of the reader, each worker reads all documents up to the limit, and gives every n-th one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from loguru import logger
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.formatting import parse_bytes
from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.index import Index, Row, RowSource
from datatrove_ckpt.torch.order import (
    BlockTable,
    EpochOrder,
    Even,
    Numbers,
    Remaining,
    Topology,
    Window,
    order_by_files,
    order_by_rows,
    unevenness,
)
from datatrove_ckpt.torch.samples import json_row
from datatrove_ckpt.torch.states import DatasetState, Slot, merge_states

Sharding: TypeAlias = Literal["auto", "files", "rows"]

STREAM_VERSION = 1
"""Of the states of ``StreamEpoch``. Those without a number are of this one."""
_UNEVEN = 0.01


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
    if isinstance(window, str) and (size := parse_bytes(window)) is not None:
        return Window(bytes=max(1, size))
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


class StreamEpoch(Iterator[Any]):
    """One iteration over a share.

    Raises:
        CheckpointMismatch: the state was made by another slot.
    """

    def __init__(
        self,
        reader: SeekingReader,
        seed: int | None,
        sharding: str,
        slot: Slot,
        epoch: int,
        then: State | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self.epoch, self._slot, self._seed = epoch, slot, seed
        self._transform = transform
        self._reader = _of_epoch(reader, seed, epoch)
        index, count = slot.rank * slot.workers + slot.worker, slot.world_size * slot.workers
        position = then and then["reader"]
        if then is not None:
            _check(then, slot, index, count)
        self._files = _files(reader, then and then.get("files"))
        if position is not None:
            self._reader.load_state_dict(position)
        self._documents = self._reader.shard(index, count, sharding)
        self._ended = False

    def __next__(self) -> Any:
        try:
            document = next(self._documents)
        except StopIteration:
            self._ended = True
            raise
        return document if self._transform is None else self._transform(document)

    def state(self) -> State:
        start = start_state(self._seed, self.epoch)
        known = {"slot": list(self._slot), "reader": self._reader.state_dict(), "ended": self._ended}
        return start | known | ({"files": self._files} if self._files else {})


def check_stream(reader: SeekingReader, then: State) -> None:
    """Raises CheckpointMismatch if a state is of other files, or of a reader with other options. Reads no row."""
    if "files" in then:
        _files(reader, then["files"])
    if (position := then["reader"]) and "shard" in position:
        _of_epoch(reader, then["shuffle_seed"], then["epoch"]).check_shard(position)


def _of_epoch(reader: SeekingReader, seed: int | None, epoch: int) -> SeekingReader:
    reader = copy.copy(reader)
    if seed is not None:
        reader.shuffle_seed = xxh3_64_intdigest(f"{seed}/{epoch}".encode()) >> 11
    return reader


def start_state(seed: int | None, epoch: int) -> State:
    """The state before an epoch."""
    return {"version": STREAM_VERSION, "shuffle_seed": seed, "epoch": epoch, "reader": None}


def is_stream_state(content: State) -> bool:
    return "reader" in content and "shuffle_seed" in content


def _files(reader: SeekingReader, then: State | None) -> State | None:
    """A digest of all files, those of a ``then`` if it is given. None for datasets, which are more than files.

    Raises:
        CheckpointMismatch: files are gone, new or resized, also such as were not read yet.
    """
    if not isinstance(reader, JsonlReader | ParquetReader | IpcReader):
        return None
    inputs = reader._list_inputs(0, 1, then)
    if then is not None:
        inputs.check_all(then)
        return then
    return inputs.digest(len(inputs.names)).state()


def _check(then: State, slot: Slot, index: int, count: int) -> None:
    shard: list[Any] = (then["reader"] or {}).get("shard", [index, count])
    made_by: object = Slot(*then["slot"]) if "slot" in then else f"share {shard[0]} of {shard[1]}"
    if shard[:2] != [index, count] or ("slot" in then and made_by != slot):
        raise CheckpointMismatch(
            f"The state was made by {made_by}, and this is {slot}, share {index} of {count}. Of this input a state "
            "belongs to its worker: resume with the same world_size and num_workers, and each rank with its own state."
        )


_CHUNK_BYTES, _CHUNK_ROWS = 2**22, 8192
"""The most that becomes Python objects together."""


class Epoch(Iterator[Any]):
    """The samples of one worker.

    Args:
        columns: samples are rows of these columns; None: documents.
        transform: makes a sample of such a row or document; None: as it is.
        after_end: the state that was loaded is of the end of the epoch before.

    Attributes:
        rest: the samples behind the first one, for who wants no call in between.
    """

    def __init__(
        self,
        index: Index,
        plan: Plan,
        reader: SeekingReader,
        columns: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        after_end: bool = False,
    ) -> None:
        self._index, self._plan, self._reader, self._columns = index, plan, reader, columns
        mean = int(index.table.bytes.sum()) // max(1, index.table.total)
        self._chunk = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, mean)))
        self._after_end = after_end
        self._samples = plan.first
        self._start = plan.state(plan.first, index.state).to_json()
        self._is_used, self._skipped = False, 0
        self._missing = plan.skipped
        found = self._read()
        self.rest: Iterator[Any] = found if transform is None else map(transform, found)

    def __next__(self) -> Any:
        self._is_used = True
        return next(self.rest)

    def state(self) -> State:
        """The state after the latest sample."""
        return self._start | {"samples": self._samples} | ({"skipped": self._missing} if self._missing else {})

    def check_used(self, next_epoch: int) -> None:
        """Called before the next epoch.

        A loader without workers keeps in its state that its dataset has ended. If that state was saved at the last
        batch of an epoch, and the loop resumes in the epoch after it, the loader gives nothing and asks for nothing.

        Raises:
            CheckpointMismatch: that happened.
        """
        if self._after_end and not self._is_used and self._plan.samples and next_epoch != self._plan.epoch:
            self._after_end = False
            epoch = self._plan.epoch
            raise CheckpointMismatch(
                f"Epoch {epoch} gave no sample: the state was saved at the last batch of epoch {epoch - 1}, and the "
                f"loader ends there. Resume the loop of epochs at {epoch - 1}: the rest of it is empty, and epoch "
                f"{epoch} follows."
            )

    def _read(self) -> Iterator[Any]:
        source = RowSource(self._index, self._plan.order, self._columns)
        while self._samples < self._plan.samples:
            first = self._samples
            places = self._plan.places(first, min(first + self._chunk, self._plan.samples))
            samples: Iterable[Any]
            samples = map(self._make, source.rows(*places)) if self._columns is None else source.samples(*places)
            for number, sample in enumerate(samples, start=first):
                if sample is None:
                    sample = self._instead_of(source, number)
                    self._missing += sample is None
                self._samples = number + 1
                if sample is not None:
                    yield sample

    def _make(self, row: Row) -> Any:
        """The document of a row, or the row itself if there are columns; None: it is damaged, or holds no document."""
        if row.data is None or self._columns is not None:
            return row.data and json_row(row.data)
        return self._reader.get_document_from_dict(row.data, row.name, row.number)

    def _instead_of(self, source: RowSource, number: int) -> Any:
        """The sample that comes instead of the worker's row with this number, which holds no document.

        Ranks that must be even get the worker's next document twice: it depends on the order alone, so that a resumed
        run gets the same one. Else there is none.

        Raises:
            InputError: no row of the worker's share is a document.
        """
        even = self._plan.settings.even is not None
        if not self._skipped:
            [row] = source.rows(*self._plan.places(number, number + 1))
            what = "so another document comes twice" if even else "so this epoch has fewer samples than len() says"
            logger.warning(f"Row {row.number} of {row.name!r} holds no document, {what}. Further ones are skipped.")
        self._skipped += 1
        if not even:
            return None
        others, total = RowSource(self._index, self._plan.order, self._columns), self._plan.samples
        # Those after it, then those before it.
        for low in (*range(number + 1, total, self._chunk), *range(0, number, self._chunk)):
            high = min(low + self._chunk, total)
            for other in others.rows(*self._plan.places(low, high)):
                if (made := self._make(other)) is not None:
                    return made
        raise InputError(
            f"None of the {total} rows of {self._plan.slot} holds a document. Is text_key "
            f"({self._reader.text_key!r}) correct?"
        )
