"""How far this rank is, for ranks that wait for it: a thread records it in the store of
torch.distributed.
"""

import atexit
import os
import threading
from contextlib import suppress

import orjson
import torch.distributed as dist

from datatrove_ckpt.torch.watched_loader import Given

RECORD_SECONDS = 4.0


class Progress:
    """Counts what this process does with other ranks, and records the counts.

    A thread records them from the first ``TrainingCheckpoints`` on; in processes of a launcher,
    which sets WORLD_SIZE, also in ranks that never make one.
    """

    def __init__(self) -> None:
        self._records = self._process = 0

    def start(self) -> None:
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._is_over = threading.Event()  # not the event of a process that forked this one
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def counts(self) -> list[int]:
        """Returns the numbers of batches, and of exchanges (collectives) of all ranks."""
        exchanges = 0
        with suppress(RuntimeError, AttributeError):  # a backend that does not count
            exchanges = dist.group.WORLD._get_sequence_number_for_group()
        return [Given.batches, exchanges]

    def record_of(self, rank: int) -> list[int]:
        """Returns the number of the rank's newest record, and its counts."""
        store = self._store()
        if not store.check([str(rank)]):
            return [0, 0, 0]
        return [*orjson.loads(store.get(str(rank)))]

    def _store(self) -> dist.Store:
        return dist.PrefixStore("datatrove_ckpt progress", dist.group.WORLD.get_group_store())

    def _record(self) -> None:
        while not self._is_over.wait(RECORD_SECONDS):
            with suppress(Exception):
                store = self._store()
                self._records += 1
                store.set(str(dist.get_rank()), orjson.dumps([self._records, *self.counts()]))

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join()  # in a forked process it has ended


PROGRESS = Progress()
if os.environ.get("WORLD_SIZE", "1") != "1":
    PROGRESS.start()
