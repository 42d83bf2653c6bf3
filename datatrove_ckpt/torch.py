"""A training loop that goes on where it was: any of this package's readers as a torch dataset with a state.

    reader = ParquetReader("s3://bucket/corpus")
    dataset = ReaderDataset(reader, rank, world_size, shuffle_seed=0)
    loader = StatefulDataLoader(dataset, batch_size=32, num_workers=4)   # torchdata.stateful_dataloader
    loader.load_state_dict(torch.load("loader.pt"))                      # if there is one
    for epoch in range(first_epoch, epochs):
        dataset.set_epoch(epoch)
        for batch in loader:
            ...
            torch.save(loader.state_dict(), "loader.pt")

Each worker of each rank reads a share of its own: every n-th file, or where there are fewer files than shares, every
n-th line or row of all files (each of them then reads all, and parses its own). Shares differ in length: a loop that
needs equally many batches on each rank stops at the shortest. The number of shares belongs to the state: another number
of ranks or workers is refused.

``limit`` and ``skip`` of the reader count per share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from datatrove.data import Document
from torch.utils.data import IterableDataset, get_worker_info
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import SeekingReader


def text_and_id(document: Document) -> dict[str, str]:
    """What every document has, so that torch can collate them."""
    return {"text": document.text, "id": str(document.id)}


class ReaderDataset(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """The documents of a reader.

    Args:
        reader: one of this package's. It is copied for each epoch; its own state is not touched.
        rank, world_size: of this process among those that train.
        shuffle_seed: order files, blocks and rows by this number and the epoch. None: as the reader does.
        transform: makes a sample of a document. The default one keeps text and id.
    """

    def __init__(
        self,
        reader: SeekingReader,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        transform: Callable[[Document], Any] = text_and_id,
    ) -> None:
        if not isinstance(reader, SeekingReader):
            raise ConfigError(f"{type(reader).__name__} can't seek. Use a reader of datatrove_ckpt.readers.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), not {rank}.")
        self.reader = reader
        self.rank = rank
        self.world_size = world_size
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        # In shared memory: workers that outlive an epoch (persistent_workers) hold a copy of this object.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call, unused-ignore]
        self._next_state: dict[str, Any] | None = None
        self._running: tuple[int, SeekingReader] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Call it before each epoch, with that epoch's number."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: state_dict() is asked for before the first sample, and says then where that one will be.
        state, self._next_state = self._next_state, None
        epoch = int(self._epoch) if state is None else int(state["epoch"])
        reader = copy.copy(self.reader)
        if self.shuffle_seed is not None:
            reader.shuffle_seed = xxh3_64_intdigest(f"{self.shuffle_seed}/{epoch}".encode()) >> 11
        if state is not None:
            reader.load_state_dict(state["reader"])
        self._running = (epoch, reader)
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        documents = reader.share(self.rank * workers + number, self.world_size * workers)
        return map(self.transform, documents)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration stands."""
        if self._next_state is not None:
            return self._next_state
        epoch, reader = self._running or (int(self._epoch), self.reader)
        return {"shuffle_seed": self.shuffle_seed, "epoch": epoch, "reader": reader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on there.

        Raises:
            CheckpointMismatch: the state is one of another seed. What else differs, the first sample finds out.
        """
        if state_dict["shuffle_seed"] != self.shuffle_seed:
            raise CheckpointMismatch(
                f"The state is one of shuffle_seed={state_dict['shuffle_seed']}, and this is {self.shuffle_seed}."
            )
        self._next_state = state_dict
