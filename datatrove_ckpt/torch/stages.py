"""What ``ReaderDataset`` makes of its rows, as values that workers get pickled.

Iterators here are no generators: an error of a function would end these, and the rest of the epoch
would be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from datatrove_ckpt.errors import ConfigError


class Stage(Protocol):
    def apply(self, samples: Iterator[Any]) -> Iterator[Any]: ...

    def count(self, samples: int) -> int:
        """Returns how many samples it makes of so many."""


@dataclass(frozen=True)
class Mapped:
    function: Callable[[Any], object]

    def apply(self, samples: Iterator[Any]) -> Iterator[Any]:
        return map(self._result, samples)

    def count(self, samples: int) -> int:
        return samples

    def _result(self, sample: object) -> object:
        result = self.function(sample)
        if isinstance(sample, dict) and isinstance(result, dict):
            return sample | result
        return result


@dataclass(frozen=True)
class Selected:
    columns: Sequence[str]

    def apply(self, samples: Iterator[Any]) -> Iterator[Any]:
        return map(self._chosen, samples)

    def count(self, samples: int) -> int:
        return samples

    def _chosen(self, row: dict[str, object]) -> dict[str, object]:
        try:
            return {name: row[name] for name in self.columns}
        except KeyError as error:
            raise ConfigError(
                f"select_columns: a row has no {error}; it has {list(row)}."
            ) from error


@dataclass(frozen=True)
class Batched:
    size: int
    drop_last: bool

    def apply(self, samples: Iterator[Any]) -> Iterator[Any]:
        return _Batches(samples, self)

    def count(self, samples: int) -> int:
        if self.drop_last:
            return samples // self.size
        return -(-samples // self.size)


class _Batches(Iterator[object]):
    def __init__(self, samples: Iterator[Any], batched: Batched) -> None:
        self._samples = samples
        self._size = batched.size
        self._least = batched.size if batched.drop_last else 1

    def __next__(self) -> object:
        samples = list(islice(self._samples, self._size))
        if len(samples) < self._least:
            raise StopIteration
        if not isinstance(samples[0], dict):
            return _column(samples)
        names = dict.fromkeys(chain.from_iterable(samples))
        return {name: _column([row.get(name) for row in samples]) for name in names}


def _column(values: list[Any]) -> object:
    """Makes an array of numbers, and of arrays or tensors of one shape and type; returns other
    values as they are.
    """
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds or kind is str:
        return values
    if kind in (bool, int, float):
        return np.array(values)
    shapes = {(getattr(one, "shape", None), getattr(one, "dtype", None)) for one in values}
    if len(shapes) > 1 or (None, None) in shapes:
        return values
    if kind.__module__ != "torch":
        return np.stack(values)
    import torch

    return torch.stack(values)
