"""ReaderDataset: any of this package's readers as a torch dataset whose position can be saved and restored.

    reader = ParquetReader("s3://bucket/corpus")
    dataset = ReaderDataset(reader, rank, world_size, shuffle_seed=0)
    loader = StatefulDataLoader(dataset, batch_size=32, num_workers=4)   # torchdata.stateful_dataloader
    first_epoch = 0
    if saved:                                                            # the files of all ranks
        first_epoch = restore(loader, saved)
    for epoch in range(first_epoch, epochs):
        dataset.set_epoch(epoch)
        for batch in loader:
            ...
            torch.save(loader.state_dict(), f"loader-{rank}.pt")

An epoch has one order for all ranks and workers (``order.py``), which take turns. So ranks differ by one
sample at most, ``len()`` is known, and the states of all ranks continue with any other number of ranks and workers.
What cannot be counted is read by ``StreamEpoch``, without these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, TypeAlias

from datatrove.data import Document
from loguru import logger
from torch.utils.data import IterableDataset, get_worker_info

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import HuggingFaceDatasetReader, IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.epoch import (
    STREAM_VERSION,
    Epoch,
    Plan,
    Settings,
    Sharding,
    StreamEpoch,
    check_stream,
    is_stream_state,
    parse_window,
    start_state,
)
from datatrove_ckpt.torch.index import Index
from datatrove_ckpt.torch.merging import check_snapshots, is_ours, merge_all
from datatrove_ckpt.torch.order import OPEN_BLOCKS, Even, Topology
from datatrove_ckpt.torch.seals import check_seals, find_states, load_file, sealed
from datatrove_ckpt.torch.stateful import Handle, Iterations, Loaded, NoSamples, Shared, StatefulWrapper
from datatrove_ckpt.torch.states import DatasetState, Slot, is_state

Sample: TypeAlias = Any
"""Whatever ``transform`` returns. Not a type variable, because that would need a type argument at each use."""

Iteration: TypeAlias = Epoch | StreamEpoch | NoSamples


def text_and_id(document: Document) -> dict[str, str]:
    """The two fields that every document has, so that torch can collate the samples."""
    return {"text": document.text, "id": str(document.id)}


class ReaderDataset(IterableDataset[Sample]):  # type: ignore[misc, unused-ignore]
    """The documents of a reader.

    Args:
        reader: one of this package's readers. It is copied, and its own state does not change. Its ``skip`` and
            ``limit`` count rows of the whole input; documents, if the rows are not counted. A
            ``HuggingFaceDatasetReader`` is read as Arrow files with ``load_from_disk=True``, except values that
            ``datasets`` makes (images, sound, arrays); of others the rows are not counted.
        rank: the rank of this process in the training.
        world_size: the number of processes in the training.
        shuffle_seed: order files, blocks and rows by this number and the epoch. None: by the reader's own, or in the
            order of the files if it has none.
        transform: makes a sample from a document, or from a row if there are ``columns``. The default one keeps text
            and id, or the row.
        columns: read only these columns, and make no documents: a sample is a dict of them, in which a list of
            numbers (token rows) is a numpy array.
        sharding: "rows": any block may be read by any worker. "files": each worker reads whole files as long as all
            have some, and shares the rest. "auto": files where that makes even shares and saves reading, else rows.
        even: None: ranks differ by one sample at most. "drop": all have the same number, and the last samples are left
            out. "repeat": all have the same number, and the first samples come again.
        shuffle_window: how much is shuffled at once, over all ranks and workers: a number of rows, or bytes with a unit
            ("128MB"). No worker holds more than this, and one more part of it while it reads on.
        batch_size: that of the loader. With it, workers take turns by the batch: only the last batch of a rank is
            smaller, so ``len(loader)`` is exact, and the global batch of a step does not depend on the topology. None:
            workers take turns by the sample.
        indexed: False: do not count the rows of the input; see ``StreamEpoch``.

    Raises:
        ConfigError: the reader cannot seek or not shuffle by ``shuffle_seed``, or an argument is not allowed.
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
        sharding: Sharding = "auto",
        even: Even = None,
        shuffle_window: int | str = "128MB",
        batch_size: int | None = None,
        indexed: bool = True,
    ) -> None:
        if not isinstance(reader, SeekingReader):
            raise ConfigError(f"{type(reader).__name__} cannot seek. Use a reader of datatrove_ckpt.readers.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}.")
        self.reader = reader
        self.rank = rank
        self.world_size = world_size
        self.shuffle_seed = shuffle_seed
        self.transform = transform or (text_and_id if columns is None else None)
        self.columns = columns
        if isinstance(columns, str) or (columns is not None and (not columns or len({*columns}) < len(columns))):
            raise ConfigError(f'columns must be a list of different names, such as ["input_ids"], not {columns!r}.')
        saved = reader.saved_files() if indexed and isinstance(reader, HuggingFaceDatasetReader) else None
        self._files_reader = files = saved or reader
        seed = files.shuffle_seed if shuffle_seed is None else shuffle_seed
        batch = 1 if batch_size is None else batch_size
        self.settings = Settings(seed, parse_window(shuffle_window), sharding, even, batch)
        self._index: Index | None = None
        if indexed and isinstance(files, JsonlReader | ParquetReader | IpcReader):
            self._index = Index(self._plain_reader)
            if self.settings.seed is not None:  # rows of several files come together
                self._index.blocks.unify(columns)
            self._warn_of_small_window(shuffle_window)
        elif shuffle_seed is not None and isinstance(reader, HuggingFaceDatasetReader):
            raise ConfigError(
                f"shuffle_seed={shuffle_seed}: the rows of this HuggingFaceDatasetReader are not counted, so that it "
                "cannot shuffle by a seed. Leave it out, or save the dataset with save_to_disk, and read it with "
                "load_from_disk=True."
            )
        elif even is not None or columns is not None:
            raise ConfigError(
                f"even and columns need the number of rows, and those of {type(reader).__name__} are not counted"
                f"{'' if indexed else ' with indexed=False'}. Leave them out, or use a JsonlReader, ParquetReader or "
                "IpcReader."
            )
        self._shared = Shared()
        self._loaded = Loaded(self._shared)
        self._running: Iteration | None = None
        self._iterations = Iterations()

    @cached_property
    def _plain_reader(self) -> SeekingReader:
        """The reader, without a shuffle of its own: the order is that of the epoch."""
        reader = copy.copy(self._files_reader)
        reader.shuffle_seed = None
        return reader

    def _warn_of_small_window(self, given: int | str) -> None:
        mean = (
            0.0 if self._index is None or self.settings.seed is None else self._index.table.mean(self.settings.window)
        )
        if self.settings.window.limit < 2 * mean and self.rank == 0:
            unit = "rows" if self.settings.window.rows else "bytes"
            logger.warning(
                f"shuffle_window={given!r} is less than two row groups or other parts of a file, which have "
                f"{mean:.0f} {unit} each: rows of different parts hardly mix. Make it at least "
                f"{OPEN_BLOCKS * mean:.0f} {unit}, if there is memory, or write smaller row groups."
            )

    def __getstate__(self) -> dict[str, Any]:
        # For workers that are not forked. They iterate themselves.
        return self.__dict__ | {"_running": None}

    def __len__(self) -> int:
        """The number of samples of this rank in an epoch, all its workers together.

        Rows that hold no document count.

        Raises:
            TypeError: the rows of the input were not counted.
        """
        if self._index is None:
            raise TypeError(f"A ReaderDataset of {type(self.reader).__name__} has no length: its rows are not counted.")
        return Topology(self.world_size, 1).of_rank(self._index.table.total, self.rank, self.settings.even)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. Call it before each epoch.

        Raises:
            CheckpointMismatch: the epoch before gave nothing, because its state was of the end of another one.
        """
        if isinstance(self._running, Epoch):
            self._running.check_used(epoch)
        self._shared.set_epoch(epoch)

    def at_epoch(self, epoch: int) -> ReaderDataset:
        """A copy that begins this epoch. Later calls of ``set_epoch`` and ``load_state_dict`` do not reach it."""
        other = copy.copy(self)
        other._shared, other._running = Shared(), None
        other._loaded = Loaded(other._shared)
        other._iterations = Iterations()
        other.set_epoch(epoch)
        return other

    def __iter__(self) -> Handle:
        # Not a generator: torchdata calls state_dict() before the first sample, and must get the new iteration's state.
        worker = get_worker_info()
        number = worker.id if worker else None
        self._running = self._begin(number, worker.num_workers if worker else 1)
        return self._iterations.begin(self._running, lambda: self._shared.note_read(number))

    def _begin(self, number: int | None, workers: int) -> Iteration:
        """``number``: of this worker, or None."""
        slot = Slot(self.rank, self.world_size, number or 0, workers)
        try:
            state = self._loaded.take(number)
            epoch, is_next = self._epoch_of(state)
            self._check_again(state, epoch, slot)
        except (CheckpointMismatch, ConfigError) as error:
            if number is None:
                raise
            return NoSamples(error)  # raised here, it would end the workers only after seconds
        if state is None and self.settings.seed is not None and self._shared.epoch_begins_again(number):
            logger.warning(
                f"Epoch {epoch} begins again, in the same order as before. Call set_epoch(epoch) before each epoch."
            )
        if isinstance(self._running, Epoch):
            self._running.check_used(epoch)
        if number is None:
            self._shared.forget_workers()
        start = None if is_next else state
        if self._index is None or (start is not None and is_stream_state(start)):
            sharding = self.settings.sharding
            return StreamEpoch(self.reader, self.shuffle_seed, sharding, slot, epoch, start, self.transform)
        then = DatasetState.from_json(start) if start is not None else None
        plan = Plan(self._index.table, self.settings, slot, epoch, then)
        return Epoch(self._index, plan, self._plain_reader, self.columns, self.transform, is_next)

    # States --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The position of the latest iteration. Plain JSON, below 1 kB.

        Raises:
            ConfigError: the samples were read by workers of a loader, and only they know how far they are; or there are
                two iterations at once.
        """
        if get_worker_info() is None and self._shared.workers_read:
            raise ConfigError(
                "The workers of the DataLoader read the samples, and the dataset here does not know how far they are. "
                "Use StatefulDataLoader of torchdata.stateful_dataloader, and save loader.state_dict() instead of "
                "dataset.state_dict()."
            )
        if self._running is not None:
            self._iterations.check(self)
            return sealed(self._running.state())
        if self._loaded.state is not None:
            return self._loaded.state
        if self._index is None:
            return sealed(start_state(self.shuffle_seed, self._shared.epoch))
        order = self.settings.order | {"shares": None}
        return sealed(DatasetState(self._shared.epoch, order, self._index.state).to_json())

    def load_state_dict(self, state_dict: State) -> None:
        """Lets the next iteration resume there: with a state of this rank, or with one of all ranks (``merge``).

        Raises:
            CheckpointCorrupt: the state is damaged.
            CheckpointMismatch: the state was made in another order or of other files, or by another release. That it
                belongs to another worker is found when the iteration begins.
        """
        self.check_state(state_dict)
        self._loaded.put(state_dict)
        self._running = None
        self._iterations.forget()

    def check_state(self, state: State) -> None:
        """Raises what ``load_state_dict`` does, and loads nothing."""
        check_seals(state)
        if not is_stream_state(state):
            then = DatasetState.from_json(state)
            if self._index is None:
                raise CheckpointMismatch(
                    "The state was made of an input whose rows were counted. Resume with indexed=True and the same "
                    "reader."
                )
            then.check_order(self.settings.order)
            self._index.check(then.input)
        elif state.get("version", STREAM_VERSION) != STREAM_VERSION:
            raise CheckpointMismatch(
                f"The state is of version {state['version']} of rows that are not counted, and this release reads "
                f"version {STREAM_VERSION}. Resume with the release that made it."
            )
        elif state["shuffle_seed"] != self.shuffle_seed:
            raise CheckpointMismatch(
                f"The state was made with shuffle_seed={state['shuffle_seed']}, and this is {self.shuffle_seed}. "
                "Use the same, or start without the state."
            )

    def made(self, state: State, workers: int) -> bool:
        """Whether a worker of this rank made the state, with the number of ranks, ``workers`` and settings of now."""
        then = DatasetState.from_json(state)
        made_by = then.slot and (then.slot.rank, then.slot.world_size, then.slot.workers, then.batch, then.even)
        own = (self.rank, self.world_size, workers, self.settings.batch, self.settings.even)
        return made_by in (None, own)

    def _epoch_of(self, state: State | None) -> tuple[int, bool]:
        """The number of this epoch, and whether it is the one after that of the state, which had ended.

        Raises:
            CheckpointMismatch: the state is of another epoch.
        """
        epoch = self._shared.epoch
        if state is None:
            return epoch, False
        then = int(state["epoch"])
        if epoch == then or not self._shared.epoch_was_set:
            self._shared.adopt_epoch(then)
            return then, False
        if epoch == then + 1 and self._has_ended(state):
            return epoch, True
        raise CheckpointMismatch(
            f"The state is of epoch {then}, and set_epoch({epoch}) was called. Start the loop of epochs at {then}, or "
            f"start epoch {epoch} without the state."
        )

    def _check_again(self, state: State | None, epoch: int, slot: Slot) -> None:
        """Loaders that keep in their state that they had ended drop the iterator that resumes there, and begin another
        one, as torchdata does.

        Raises:
            CheckpointMismatch: an epoch that was at its end would be given once more.
        """
        number = slot.worker if get_worker_info() else None
        if not self._shared.epoch_was_set:
            return
        if state is not None and int(state["epoch"]) == epoch and self._has_ended(state):
            self._shared.note_resumed_at_end(number)
        elif state is None and (again := self._shared.comes_again(self, epoch, number, slot.workers)) is not None:
            raise again

    def _has_ended(self, state: State) -> bool:
        if self._index is None or is_stream_state(state):
            return bool(state.get("ended"))
        return DatasetState.from_json(state).has_ended()


def restore(loader: Any, states: Iterable[State | str | PathLike[str]]) -> int:
    """Lets a loader resume in the epoch in which states of all ranks were saved. Call it in each rank.

    Args:
        loader: a StatefulDataLoader, or any DataLoader, of a ``ReaderDataset``, ``Pack`` or ``Mix``. It has not begun
            yet.
        states: ``loader.state_dict()`` of each rank, in any order, or files that ``torch.save`` has made of them; or
            one state that ``gather`` or ``merge`` has made.

    Returns:
        The number of the epoch with which the loop of epochs goes on: that of the states, or the next one if no rank
        had a sample left. Then nothing is loaded, because torchdata begins a loader that had finished once more.

    Raises:
        ConfigError: the loader has no such dataset, or there is no state of one.
        CheckpointCorrupt: a state or file is damaged.
        CheckpointMismatch: files, seed or another setting have changed; see ``merge`` and
            ``ReaderDataset.load_state_dict``.
    """
    dataset = loader.dataset
    if not isinstance(dataset, ReaderDataset | StatefulWrapper):
        raise ConfigError(
            f"restore() needs a loader of a ReaderDataset, Pack or Mix, and this one has a {type(dataset).__name__}. "
            "Use loader.load_state_dict(), with the state of this rank, and the same number of ranks and workers."
        )
    loaded: list[Any] = [load_file(state) for state in states]
    found = [list(find_states(state, is_ours)) for state in loaded]
    if isinstance(dataset, ReaderDataset) and (dataset._index is None or not any(found)):
        return _restore_own(loader, loaded)
    merged = merge_all([one for those in found for one in those])
    epoch, finished = int(merged["epoch"]), [bool(state.get("_iterator_finished")) for state in loaded]
    if merged.get("ended") or merged.get("finished") or all(finished):
        return epoch + 1
    dataset.check_state(merged)
    if hasattr(loader, "load_state_dict") and not any(finished):
        workers = loader.num_workers
        for state, those in zip(loaded, found, strict=True):
            is_of_loader = those and ("_snapshot" if workers else "_num_yielded") in state
            if is_of_loader and all(dataset.made(one, max(1, workers)) for one in those):
                loader.load_state_dict(state)  # the same samples follow, in the same batches
                return epoch
    check_snapshots(loaded)
    dataset.load_state_dict(merged)
    return epoch


def epoch_of(loader: Any) -> int | None:
    """The epoch of a loader's dataset, if that is one of ours, perhaps in a wrapper such as Accelerate's."""
    while (loader := getattr(loader, "dataset", None)) is not None:
        if isinstance(loader, ReaderDataset | StatefulWrapper):
            return loader._shared.epoch
    return None


def _restore_own(loader: Any, states: list[Any]) -> int:
    """For input that is not counted, and for states of release 0.1: each rank has a state of its own."""
    dataset = loader.dataset
    counted = next(find_states(states, is_state), None)
    if counted is not None:
        dataset.check_state(counted)  # which refuses it
    for state in states:
        those = list(find_states(state, is_stream_state))
        if those and (len(states) == 1 or those[0].get("slot", [None])[0] == dataset.rank):
            if all(one.get("ended") for one in those):
                return int(those[0]["epoch"]) + 1
            for one in those:
                dataset.check_state(one)
                check_stream(dataset.reader, one)
            loader.load_state_dict(state)
            return int(those[0]["epoch"])
    raise ConfigError(
        f"There is no state of rank {dataset.rank} in the {len(states)} that were given. Give the loaders' "
        "state_dict() of all ranks."
    )
