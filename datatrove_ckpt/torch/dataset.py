"""ReaderDataset: a reader of this package as a torch dataset whose position can be saved and
restored.

    from torchdata.stateful_dataloader import StatefulDataLoader

    reader = ParquetReader("s3://bucket/corpus")
    dataset = ReaderDataset(reader, rank, world_size, shuffle_seed=0, columns=["text"])
    loader = StatefulDataLoader(dataset, batch_size=32, num_workers=4)
    first_epoch = 0
    if saved:                                                            # the files of all ranks
        first_epoch = restore(loader, saved)
    for epoch in range(first_epoch, epochs):
        dataset.set_epoch(epoch)
        for batch in loader:
            ...
            torch.save(loader.state_dict(), f"loader-{rank}.pt")

An epoch has one order for all ranks and workers (``order.py``), which take turns. An ``Epoch`` is
one iteration of one worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.common.declared import Count, check
from datatrove_ckpt.common.formatting import parse_bytes
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.readers.table_files import Numbers
from datatrove_ckpt.torch.blocks import FilesReader
from datatrove_ckpt.torch.index import Index, InputRow, RowSource
from datatrove_ckpt.torch.order import Window, order_by_files, order_by_rows, unevenness
from datatrove_ckpt.torch.stateful import StatefulIterable
from datatrove_ckpt.torch.states import (
    DatasetState,
    Slot,
    check_seals,
    check_settings,
    check_snapshots,
    find_states,
    is_ours,
    load_file,
    merge_all,
)
from datatrove_ckpt.torch.topology import Even, Remaining, Topology

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_UNEVEN = 0.01


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


def _continued(start: DatasetState, then: DatasetState) -> DatasetState:
    """Returns the state from which a worker continues.

    Args:
        start: the beginning of the worker's epoch.
        then: a state of this worker, or of all.

    Raises:
        CheckpointMismatch: the state belongs to another worker, or another order.
    """
    if then.slot is not None and then.made_by != start.made_by:
        raise CheckpointMismatch(
            f"The state was made by {then.made_by}, and this is {start.made_by}. A state belongs "
            "to its worker. To continue with another number of ranks or workers, give the states "
            "of all ranks to datatrove_ckpt.torch.restore(loader, states)."
        )
    order = then.order
    if order["shares"] is None:  # the state before the epoch began
        order = start.order
    return replace(start, order=order, done=then.done, samples=then.samples, skipped=then.skipped)


# The limits of what becomes Python objects together.
_CHUNK_BYTES = 2**22
_CHUNK_ROWS = 8192


class Epoch(Iterator[object]):
    """The samples of one worker: those at the positions of its slot.

    Args:
        then: the state that the epoch continues, of this slot or of all.
        after_end: the loaded state is of the end of the epoch before.

    Attributes:
        rest: the samples behind the first one, without a call in between.

    Raises:
        CheckpointMismatch: the state belongs to another slot, or another order.
    """

    def __init__(
        self,
        dataset: ReaderDataset,
        slot: Slot,
        number: int,
        then: DatasetState | None = None,
        after_end: bool = False,
    ) -> None:
        table = dataset._index.table
        seed = dataset.shuffle_seed
        self._dataset = dataset
        self._slot = slot
        self._number = number
        self._after_end = after_end
        self._topology = Topology(slot.world_size, slot.workers, dataset._batch)
        # By rows, all workers read all blocks if rows are not shuffled or files are compressed.
        # Then shares of whole files are better, if they are even.
        shares = self._topology.slots if dataset._batch == 1 else slot.world_size
        by_rows = shares == 1 or (seed is not None and not table.is_stream.any())
        if by_rows or unevenness(table, shares) > _UNEVEN:
            shares = 0
        start = dataset._state_at(number, slot, shares)
        if then is not None:
            start = _continued(start, then)
        shares = start.order["shares"]
        if shares:
            self._order = order_by_files(table, seed, number, dataset._window, shares)
        else:
            self._order = order_by_rows(table, seed, number, dataset._window)
        self._remaining = Remaining(self._order.rows, start.done)
        self._source = RowSource(dataset._index, self._order, dataset._read_columns)
        mean = int(table.bytes.sum()) // max(1, table.total)
        self._chunk = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, mean)))
        self._start = start.to_json()
        self._count = start.rows_of(slot)
        self._samples = start.samples
        self._missing = start.skipped
        self._skipped = 0
        self.rest = self._read()
        if dataset.transform is not None:
            self.rest = map(dataset.transform, self.rest)

    def __next__(self) -> object:
        return next(self.rest)

    def state(self) -> State:
        return self._start | {"samples": self._samples, "skipped": self._missing}

    def row_name(self, behind: int) -> str:
        number = self._samples - behind
        [row] = self._source.rows(*self._places(number, number + 1))
        return f"Row {row.number} of {row.name!r}"

    def check_used(self, next_epoch: int) -> None:
        """Raises CheckpointMismatch before the next epoch if this epoch gave nothing.

        A loader without workers that resumes with a state of the last batch of the epoch before
        reads nothing.
        """
        epoch = self._number
        if self._after_end and not self._samples and self._count and next_epoch != epoch:
            self._after_end = False
            raise CheckpointMismatch(
                f"Epoch {epoch} gave no sample: the state was saved at the last batch of epoch "
                f"{epoch - 1}, and the loader ends there. Resume the loop of epochs at "
                f"{epoch - 1}: the rest of it is empty, and epoch {epoch} follows."
            )

    def _places(self, low: int, high: int) -> tuple[Numbers, Numbers]:
        numbers = np.arange(low, high)
        places = self._topology.places(self._slot.rank, self._slot.worker, numbers)
        return self._order.locate(self._remaining.positions(places))

    def _read(self) -> Iterator[object]:
        while self._samples < self._count:
            first = self._samples
            last = min(first + self._chunk, self._count)
            for number, sample in enumerate(self._read_from(self._source, first, last), first):
                if sample is None:
                    sample = self._instead_of(number)
                    self._missing += sample is None
                self._samples = number + 1
                if sample is not None:
                    yield sample

    def _read_from(self, source: RowSource, first: int, last: int) -> Iterable[object]:
        """Reads rows of the columns, or documents; None: a damaged line, or no document."""
        places = self._places(first, last)
        if self._dataset.columns is not None:
            return source.samples(*places)
        return map(self._document, source.rows(*places))

    def _document(self, row: InputRow) -> object:
        if row.data is None:
            return None
        reader = self._dataset._plain_reader
        return reader.get_document_from_dict(row.data, row.name, row.number)

    def _instead_of(self, number: int) -> object:
        """Returns a sample in place of the worker's row with this number, which holds no document.

        Ranks that must be even get the worker's next document twice, which depends on the order
        alone. Others: None.
        """
        is_even = self._dataset._even is not None
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
        others = RowSource(self._source.index, self._order, self._source.columns)
        total = self._count
        # Those after it, then those before it.
        for low in (*range(number + 1, total, self._chunk), *range(0, number, self._chunk)):
            for other in self._read_from(others, low, min(low + self._chunk, total)):
                if other is not None:
                    return other
        raise InputError(
            f"None of the {total} rows of {self._slot} holds a document. Is text_key "
            f"({self._dataset._plain_reader.text_key!r}) correct?"
        )


Sample = Any
"""A result of ``transform``."""


def text_and_id(document: Document) -> dict[str, str]:
    """Returns the two fields that every document has, so that torch can collate the samples."""
    return {"text": document.text, "id": str(document.id)}


class ReaderDataset(StatefulIterable):
    """The documents of a reader.

    Args:
        reader: a ``JsonlReader``, ``ParquetReader`` or ``IpcReader``. It is copied, and its own
            state does not change. Its ``skip`` and ``limit`` count rows of the whole input.
        rank: the rank of this process in the training.
        world_size: the number of processes in the training.
        shuffle_seed: order files, blocks and rows by this number and the epoch. None: by the
            reader's own, or in the order of the files if it has none.
        transform: makes a sample from a document, or from a row if there are ``columns``. The
            default one keeps text and id, or the row.
        columns: read only these columns, and make no documents: a sample is a dict of them, in
            which a list of numbers (token rows) is a numpy array.
        even: None: ranks differ by one sample at most. "drop": all have the same number, and the
            last samples are left out. "repeat": all have the same number, and the first samples
            come again.
        shuffle_window: how much is shuffled at once, over all ranks and workers: a number of rows,
            or bytes with a unit ("128MB"). No worker holds more than this, and one more part of it
            while it reads on.
        batch_size: that of the loader. With it, workers take turns by the batch: only the last
            batch of a rank is smaller, so ``len(loader)`` is exact, and the global batch of a step
            does not depend on the topology. None: workers take turns by the sample.

    Raises:
        ConfigError: the rows of the reader cannot be counted, or an argument is not allowed.
        InputError: a file of the input is damaged.
    """

    def __init__(
        self,
        reader: SeekingReader,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        transform: Callable[[Any], Sample] | None = None,
        *,
        columns: Sequence[str] | None = None,
        even: Even = None,
        shuffle_window: int | str = "128MB",
        batch_size: Count | None = None,
    ) -> None:
        super().__init__()
        check(ReaderDataset, locals())
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}."
            )
        if not isinstance(reader, FilesReader):
            raise ConfigError(
                f"The rows of this {type(reader).__name__} cannot be counted. Use a JsonlReader, "
                "ParquetReader or IpcReader of datatrove_ckpt.readers; for a folder of "
                "save_to_disk, IpcReader(folder, glob_pattern='data-*.arrow'). A stream of "
                "datasets, or images and sound of it, need no reader: give the dataset itself to "
                "StatefulDataLoader, Pack or Mix."
            )
        if shuffle_seed is None:
            shuffle_seed = reader.shuffle_seed
        if shuffle_seed is not None:
            shuffle_seed = int(shuffle_seed)  # NumPy's integers are no JSON
        if transform is None and columns is None:
            transform = text_and_id
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        self.columns = columns
        self._window = parse_window(shuffle_window)
        self._order = {
            "shuffle_seed": shuffle_seed,
            "window": [self._window.rows, self._window.bytes],
        }
        self._even = even
        self._batch = int(batch_size or 1)
        self._plain_reader = copy.copy(reader)
        self._plain_reader.shuffle_seed = None  # the order is that of the epoch
        self._index = Index(self._plain_reader)
        self._read_columns = columns or getattr(reader, "_columns", None)
        if shuffle_seed is not None:  # rows of several files come together
            self._index.blocks.unify(self._read_columns)

    def __len__(self) -> int:
        """Returns the number of samples of this rank in an epoch. Rows without a document count."""
        return Topology(self.world_size, 1).of_rank(self._index.table.total, self.rank, self._even)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. Call it before each epoch.

        Raises:
            CheckpointMismatch: the epoch before gave nothing, because its state was of the end of
                another one.
        """
        self._check_used(epoch)
        self._shared.set_epoch(epoch)

    def _check_used(self, epoch: int) -> None:
        if isinstance(self._running, Epoch):
            self._running.check_used(epoch)

    def _iteration(self, epoch: int, slot: Slot, state: State | None) -> Epoch:
        self._check_used(epoch)
        then = None
        is_next = state is not None and state["epoch"] != epoch
        if state is not None and not is_next:
            then = DatasetState.from_json(state)
        return Epoch(self, slot, epoch, then, is_next)

    # States --------------------------------------------------------------------------------------

    def _state_at(self, epoch: int, slot: Slot | None, shares: int | None) -> DatasetState:
        """Returns the state of the beginning of an epoch."""
        return DatasetState(
            epoch=epoch,
            order=self._order | {"shares": shares},
            input=self._index.state,
            slot=slot,
            batch=self._batch,
            even=self._even,
        )

    def _start_state(self) -> State:
        return self._state_at(self._shared.epoch, None, None).to_json()

    def check_state(self, state: State) -> None:
        check_seals(state)
        then = DatasetState.from_json(state)
        check_settings(then.order, self._order)
        self._index.check(then.input)

    def made(self, state: State, workers: int) -> bool:
        then = DatasetState.from_json(state)
        if then.slot is None:
            return True  # of all workers
        slot = Slot(self.rank, self.world_size, then.slot.worker, workers)
        return then.made_by == self._state_at(then.epoch, slot, None).made_by

    def _has_ended(self, state: State) -> bool:
        return DatasetState.from_json(state).has_ended()


def restore(loader: DataLoader, states: Iterable[State | str | PathLike[str]]) -> int:
    """Lets a loader resume in the epoch in which states of all ranks were saved. Call it in each
    rank.

    Args:
        loader: a StatefulDataLoader, or any DataLoader, of a ``ReaderDataset``, ``Pack`` or
            ``Mix``. It has not begun yet.
        states: ``loader.state_dict()`` of each rank, in any order, or files of ``torch.save`` with
            them; or one state of ``merge``.

    Returns:
        The number of the epoch with which the loop of epochs continues: that of the states, or the
        next one if no rank had a sample left. Then nothing is loaded, because torchdata begins a
        loader that had finished once more.

    Raises:
        ConfigError: the loader has no such dataset, or there is no state of one.
        CheckpointCorrupt: a state or file is damaged.
        CheckpointMismatch: files, seed or another setting have changed; see ``merge`` and
            ``ReaderDataset.load_state_dict``.
    """
    dataset = loader.dataset
    if not isinstance(dataset, StatefulIterable):
        raise ConfigError(
            "restore() needs a loader of a ReaderDataset, Pack or Mix, and this one has a "
            f"{type(dataset).__name__}. Use loader.load_state_dict(), with the state of this rank, "
            "and the same number of ranks and workers."
        )
    loaded: list[Any] = [load_file(state) for state in states]
    found = [list(find_states(state, is_ours)) for state in loaded]
    merged = merge_all([state for those in found for state in those])
    epoch = int(merged["epoch"])
    finished = [bool(state.get("_iterator_finished")) for state in loaded]
    if merged.get("ended") or merged.get("finished") or all(finished):
        return epoch + 1
    dataset.check_state(merged)
    if hasattr(loader, "load_state_dict") and not any(finished):
        workers = loader.num_workers
        key = "_snapshot" if workers else "_num_yielded"  # in the states of torchdata's loader
        for state, those in zip(loaded, found, strict=True):
            if those and key in state and all(dataset.made(one, max(1, workers)) for one in those):
                loader.load_state_dict(state)  # the same samples follow, in the same batches
                return epoch
    check_snapshots(loaded)
    dataset.load_state_dict(merged)
    return epoch


def epoch_of(loader: DataLoader) -> int | None:
    """Returns the epoch of a loader's dataset of ours, also in a wrapper such as Accelerate's."""
    source = _source_of(loader)
    if source is None:
        return None
    return source._shared.epoch


def _source_of(loader: DataLoader) -> StatefulIterable | None:
    source: object = loader
    while source is not None:
        if isinstance(source, StatefulIterable):
            return source
        source = getattr(source, "dataset", None)
    return None


def epochs_ended(loader: DataLoader, told: int | None) -> int | None:
    """Returns how many epochs have ended with the loader's last batch. ``told``: the number of the
    epoch, if the dataset is not ours.
    """
    source = _source_of(loader)
    if source is None:
        return told
    states = list(find_states(loader.state_dict(), is_ours))
    return source._shared.epoch + (bool(states) and all(map(source._has_ended, states)))
