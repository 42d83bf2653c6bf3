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

An epoch has one order for all ranks and workers (``order.py``), which take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from datatrove.data import Document

from datatrove_ckpt.common.declared import Count, check
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.blocks import FilesReader
from datatrove_ckpt.torch.epoch import Epoch, EpochPlan, Settings, parse_window
from datatrove_ckpt.torch.index import Index, RowSource
from datatrove_ckpt.torch.merging import check_snapshots, is_ours, merge_all
from datatrove_ckpt.torch.seals import check_seals, find_states, load_file
from datatrove_ckpt.torch.stateful import StatefulIterable
from datatrove_ckpt.torch.states import DatasetState, Slot
from datatrove_ckpt.torch.topology import Even, Topology

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

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
        if isinstance(columns, str):
            raise ConfigError(f"columns must be a list, such as [{columns!r}].")
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
        batch = 1 if batch_size is None else int(batch_size)
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        self.columns = columns
        self.settings = Settings(shuffle_seed, parse_window(shuffle_window), even, batch)
        self._plain_reader = copy.copy(reader)
        self._plain_reader.shuffle_seed = None  # the order is that of the epoch
        self._index = Index(self._plain_reader)
        self._read_columns = columns or getattr(reader, "_columns", None)
        if shuffle_seed is not None:  # rows of several files come together
            self._index.blocks.unify(self._read_columns)

    def __len__(self) -> int:
        """Returns the number of samples of this rank in an epoch. Rows without a document count."""
        return Topology(self.world_size, 1).of_rank(
            self._index.table.total, self.rank, self.settings.even
        )

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
        plan = EpochPlan(self._index.table, self.settings, slot, epoch, then)
        source = RowSource(self._index, plan.order, self._read_columns)
        return Epoch(source, plan, self._plain_reader, self.columns, self.transform, is_next)

    # States --------------------------------------------------------------------------------------

    def _start_state(self) -> State:
        order = self.settings.order | {"shares": None}
        return DatasetState(self._shared.epoch, order, self._index.state).to_json()

    def check_state(self, state: State) -> None:
        check_seals(state)
        then = DatasetState.from_json(state)
        then.check_order(self.settings.order)
        self._index.check(then.input)

    def made(self, state: State, workers: int) -> bool:
        then = DatasetState.from_json(state)
        if then.slot is None:
            return True  # of all workers
        slot = Slot(self.rank, self.world_size, then.slot.worker, workers)
        return (then.slot, then.batch, then.even) == (slot, self.settings.batch, self.settings.even)

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
    source: object = loader
    while source is not None:
        if isinstance(source, StatefulIterable):
            return source._shared.epoch
        source = getattr(source, "dataset", None)
    return None
