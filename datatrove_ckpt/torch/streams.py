"""Epochs of readers whose rows cannot be counted (datasets of Hugging Face), or were not (``indexed=False``).

Each worker of each rank reads its own share, from its beginning: every n-th file, or every n-th row of all files if
files would make shares that differ by more than 1 %. Shares may differ in length, there is no ``len()``, and a state
belongs to its number of ranks and workers. States of release 0.1 are of this kind, and resume in this way.

With ``skip`` or ``limit`` of the reader, each worker reads all documents up to the limit, and gives every n-th one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.states import Slot


class StreamEpoch(Iterator[Any]):
    """One iteration over a share.

    Raises:
        CheckpointMismatch: the state was made by another slot, or with another seed.
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
        note_read: Callable[[], None],
    ) -> None:
        self.epoch, self._slot, self._seed = epoch, slot, seed
        self._transform, self._note_read = transform, note_read
        self._reader = copy.copy(reader)
        if seed is not None:
            self._reader.shuffle_seed = xxh3_64_intdigest(f"{seed}/{epoch}".encode()) >> 11
        index, count = slot.rank * slot.workers + slot.worker, slot.world_size * slot.workers
        position = then and then["reader"]
        if then is not None:
            _check(then, seed, slot, index, count)
        self._files = _files(reader, then and then.get("files"))
        if position is not None:
            self._reader.load_state_dict(position)
        self._documents = self._reader.shard(index, count, sharding)
        self._ended = self._is_used = False

    def __next__(self) -> Any:
        if not self._is_used:
            self._is_used = True
            self._note_read()
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


def start_state(seed: int | None, epoch: int) -> State:
    """The state before an epoch."""
    return {"shuffle_seed": seed, "epoch": epoch, "reader": None}


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
    digest = inputs.digest(len(inputs.names)).state()
    return {key: digest[key] for key in ("files", "bytes", "all", "names")}


def _check(then: State, seed: int | None, slot: Slot, index: int, count: int) -> None:
    if then["shuffle_seed"] != seed:
        raise CheckpointMismatch(
            f"The state was made with shuffle_seed={then['shuffle_seed']}, and this is {seed}. Use the same, or start "
            "without the state."
        )
    shard: list[Any] = (then["reader"] or {}).get("shard", [index, count])
    made_by: object = Slot(*then["slot"]) if "slot" in then else f"share {shard[0]} of {shard[1]}"
    if shard[:2] != [index, count] or ("slot" in then and made_by != slot):
        raise CheckpointMismatch(
            f"The state was made by {made_by}, and this is {slot}, share {index} of {count}. Of this input a state "
            "belongs to its worker: resume with the same world_size and num_workers, and each rank with its own state."
        )
