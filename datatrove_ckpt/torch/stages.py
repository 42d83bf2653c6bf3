"""What ``ReaderDataset`` makes of its rows, as values that workers get pickled.

Iterators here are no generators: an error of a function would end these, and the rest of the epoch
would be missing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from datatrove_ckpt.errors import ConfigError

Stage = Callable[[Iterator[Any]], Iterator[Any]]


def mapped(function: Callable[[Any], object]) -> Stage:
    return partial(map, partial(_result, function))


def _result(function: Callable[[Any], object], sample: object) -> object:
    result = function(sample)
    if isinstance(sample, dict) and isinstance(result, dict):
        return sample | result
    return result


def selected(columns: Sequence[str]) -> Stage:
    return partial(map, partial(_chosen, columns))


def _chosen(columns: Sequence[str], row: dict[str, object]) -> dict[str, object]:
    missing = set(columns) - row.keys()
    if missing:
        raise ConfigError(f"select_columns: a row has no {missing}; it has {list(row)}.")
    return {name: row[name] for name in columns}


@dataclass(frozen=True)
class Batched:
    size: int
    drop_last: bool

    def __call__(self, samples: Iterator[Any]) -> Iterator[object]:
        return map(_joined, iter(partial(self._take, samples), []))

    def count(self, samples: int) -> int:
        if self.drop_last:
            return samples // self.size
        return -(-samples // self.size)

    def _take(self, samples: Iterator[Any]) -> list[Any]:
        taken = list(islice(samples, self.size))
        if self.drop_last and len(taken) < self.size:
            return []
        return taken


def _joined(samples: list[Any]) -> object:
    if not isinstance(samples[0], dict):
        return _column(samples)
    names = dict.fromkeys(chain.from_iterable(samples))
    return {name: _column([row.get(name) for row in samples]) for name in names}


def _column(values: list[Any]) -> object:
    """Makes an array of numbers, and of arrays or tensors of one shape and type; returns other
    values as they are.
    """
    kind, *others = set(map(type, values))
    if kind in (bool, int, float) and not others:
        return np.array(values)
    if not hasattr(values[0], "dtype") or others:
        return values
    if len({(one.shape, one.dtype) for one in values}) > 1:
        return values
    if kind.__module__ != "torch":
        return np.stack(values)
    import torch

    return torch.stack(values)
