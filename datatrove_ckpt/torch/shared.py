"""What the process of a training loop and the workers of its loader tell each other.

A worker has a copy of the dataset, made when its loader started it: it does not see what happens to the original, and
the original does not see what the worker reads. So some numbers are in shared memory.
"""

from __future__ import annotations

import torch

_CELLS = 512
_EPOCH, _EPOCH_CALLS, _LOADS, _WARNED, _WORKERS_READ, _PER_WORKER = range(6)


class Shared:
    """Numbers that the original and its copies in workers see alike.

    ``worker`` is the number of a worker, or None for the process of the training loop.
    """

    def __init__(self) -> None:
        self._numbers = torch.zeros(_PER_WORKER + 3 * (_CELLS + 1), dtype=torch.int64)
        self._numbers.share_memory_()  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def epoch(self) -> int:
        return int(self._numbers[_EPOCH])

    @property
    def epoch_was_set(self) -> bool:
        return bool(self._numbers[_EPOCH_CALLS])

    def set_epoch(self, epoch: int) -> None:
        self._numbers[_EPOCH] = epoch
        self._numbers[_EPOCH_CALLS] += 1

    def adopt_epoch(self, epoch: int) -> None:
        """Takes the epoch of a state, in a loop that has never called ``set_epoch``."""
        self._numbers[_EPOCH] = epoch

    def note_read(self, worker: int | None) -> None:
        """A sample was taken in the current epoch."""
        self._numbers[self._cell(worker)] = self._numbers[_EPOCH_CALLS] + 1
        if worker is not None:
            self._numbers[_WORKERS_READ] = 1

    def epoch_begins_again(self, worker: int | None) -> bool:
        """Whether samples of the current epoch were taken before, and nobody was warned yet."""
        again = int(self._numbers[self._cell(worker)]) == int(self._numbers[_EPOCH_CALLS]) + 1
        if not again or self._numbers[_WARNED] or worker:
            return False
        self._numbers[_WARNED] = 1
        return True

    def note_resumed_at_end(self, worker: int | None) -> None:
        """A state of the end of the current epoch was resumed: nothing is left of the epoch."""
        self._numbers[self._cell(worker) + 2 * (_CELLS + 1)] = self._numbers[_EPOCH_CALLS] + 1

    def resumed_at_end(self, worker: int | None, workers: int) -> bool:
        """Whether all workers have done that in the current epoch."""
        numbers = [None] if worker is None else range(workers)
        now = int(self._numbers[_EPOCH_CALLS]) + 1
        return all(int(self._numbers[self._cell(number) + 2 * (_CELLS + 1)]) == now for number in numbers)

    @property
    def workers_read(self) -> bool:
        return bool(self._numbers[_WORKERS_READ])

    def forget_workers(self) -> None:
        """The process of the training loop reads itself from now on."""
        self._numbers[_WORKERS_READ] = 0

    @property
    def loads(self) -> int:
        """How many states the process of the training loop has loaded."""
        return int(self._numbers[_LOADS])

    def note_load(self) -> int:
        self._numbers[_LOADS] += 1
        self.forget_workers()
        return self.loads

    def take_load(self, number: int, worker: int | None) -> bool:
        """True once for each worker and load: the worker resumes there, and in the next epoch it does not."""
        cell = self._cell(worker) + _CELLS + 1
        if int(self._numbers[cell]) >= number:
            return False
        self._numbers[cell] = number
        return True

    def _cell(self, worker: int | None) -> int:
        return _PER_WORKER + (_CELLS if worker is None else worker % _CELLS)
