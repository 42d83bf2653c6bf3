"""ReaderDataset: any of this package's readers as a torch dataset whose position can be saved and restored.

    reader = ParquetReader("s3://bucket/corpus")
    dataset = ReaderDataset(reader, rank, world_size, shuffle_seed=0)
    loader = StatefulDataLoader(dataset, batch_size=32, num_workers=4)   # torchdata.stateful_dataloader
    loader.load_state_dict(torch.load("loader.pt"))                      # if there is one
    for epoch in range(first_epoch, epochs):
        dataset.set_epoch(epoch)
        for batch in loader:
            ...
            torch.save(loader.state_dict(), "loader.pt")

Each worker of each rank reads its own shard: every n-th file, or every n-th line or row of all files if there are fewer
files than shards (then each worker reads all the files, and parses its own lines). Shards differ in length: a loop that
needs the same number of batches on each rank stops at the shortest. The number of shards is part of the state: a state
of another number of ranks or workers is refused.

The reader's ``limit`` and ``skip`` count per shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from datatrove.data import Document
from torch.utils.data import IterableDataset, get_worker_info
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import State

Sample: TypeAlias = Any
"""Whatever ``transform`` returns. Not a type variable, because that would need a type argument at each use."""


def text_and_id(document: Document) -> dict[str, str]:
    """The two fields that every document has, so that torch can collate the samples."""
    return {"text": document.text, "id": str(document.id)}


class ReaderDataset(IterableDataset[Sample]):  # type: ignore[misc, unused-ignore]
    """The documents of a reader.

    Args:
        reader: one of this package's readers. It is copied for each epoch, and its own state does not change.
        rank: the rank of this process in the training.
        world_size: the number of processes in the training.
        shuffle_seed: order files, blocks and rows by this number and the epoch. None: in the reader's order.
        transform: makes a sample from a document. The default one keeps text and id.

    Raises:
        ConfigError: the reader cannot seek, or ``rank`` is out of range.
    """

    def __init__(
        self,
        reader: SeekingReader,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        transform: Callable[[Document], Sample] = text_and_id,
    ) -> None:
        if not isinstance(reader, SeekingReader):
            raise ConfigError(f"{type(reader).__name__} cannot seek. Use a reader of datatrove_ckpt.readers.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}.")
        self.reader = reader
        self.rank = rank
        self.world_size = world_size
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        # In shared memory, because workers that survive an epoch (persistent_workers) have a copy of this object.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call, unused-ignore]
        self._next_state: State | None = None
        self._running: tuple[int, SeekingReader] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. Call it before each epoch."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Sample]:
        # Not a generator: torchdata calls state_dict() before the first sample, and must get the new iteration's state.
        state, self._next_state = self._next_state, None
        epoch = int(self._epoch) if state is None else int(state["epoch"])
        reader = copy.copy(self.reader)
        if self.shuffle_seed is not None:
            reader.shuffle_seed = xxh3_64_intdigest(f"{self.shuffle_seed}/{epoch}".encode()) >> 11
        if state is not None:
            reader.load_state_dict(state["reader"])
        self._running = (epoch, reader)
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        documents = reader.shard(self.rank * workers + worker_id, self.world_size * workers)
        return map(self.transform, documents)

    def state_dict(self) -> State:
        """The position of the latest iteration. Plain JSON."""
        if self._next_state is not None:
            return self._next_state
        epoch, reader = self._running or (int(self._epoch), self.reader)
        return {"shuffle_seed": self.shuffle_seed, "epoch": epoch, "reader": reader.state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        """Lets the next iteration resume there.

        Raises:
            CheckpointMismatch: the state was made with another seed. Other differences are found at the first sample.
        """
        if state_dict["shuffle_seed"] != self.shuffle_seed:
            raise CheckpointMismatch(
                f"The state was made with shuffle_seed={state_dict['shuffle_seed']}, and this is {self.shuffle_seed}."
            )
        self._next_state = state_dict
