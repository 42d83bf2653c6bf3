"""``Pack`` joins rows of tokens, one after the other, and cuts them into samples of one length.

No token is lost between two samples or at a stop: the tokens without a sample are part of the
state.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import datatrove_ckpt.torch.stateful as stateful
from datatrove_ckpt.common.setting_types import Count, check
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.inputs import ReaderState
from datatrove_ckpt.torch.states import Slot

TokenArray = npt.NDArray[Any]
Columns = dict[str, TokenArray]
"""Token arrays by the names of their columns."""
Fill = int | Mapping[str, int]

_FIRST = "first of its row"


class Pack(stateful.StatefulWrapper):
    """Samples of ``length`` tokens from rows of any length.

    Another number of ranks or workers continues with the states of all (``restore``), if the
    source's rows are counted: each row is packed once, and the rest of each packer goes to a new
    packer, as a row of its own. At the end of the epoch each new packer drops or fills up one
    sample.

    Args:
        source: a stateful iterable of rows: dicts with ``columns``, or else plain sequences of
            token ids: lists, numpy arrays, CPU tensors.
        length: tokens in a sample.
        columns: the keys of a row that have one value per token. Other keys are dropped.
        separator: put after each row that has tokens: one number for all columns, or one for each.
            None: nothing.
        pad: fills up the last sample of an epoch: one number for all columns, or one for each.
            None: the last tokens of an epoch that make no whole sample are dropped.
        positions: adds ``position_ids``, which count from 0 in each row and in each sample, for
            attention that does not cross rows.

    Raises:
        ConfigError: a setting cannot work, or a row has no such columns.
    """

    _names_of_options = ("length", "columns", "separator", "pad", "positions")

    def __init__(
        self,
        source: stateful.Source,
        length: Count,
        columns: Sequence[str] = ("input_ids",),
        separator: Fill | None = None,
        pad: Fill | None = None,
        positions: bool = False,
    ) -> None:
        super().__init__([source])
        check(Pack, locals())
        self.length = length
        self.columns = list(columns)
        self.separator = self._for_columns("separator", separator)
        self.pad = self._for_columns("pad", pad)
        self.positions = positions

    def _for_columns(self, name: str, fill: Fill | None) -> dict[str, int] | None:
        if fill is None:
            return None
        if not isinstance(fill, Mapping):
            return dict.fromkeys(self.columns, fill)
        if set(fill) != set(self.columns):
            raise ConfigError(
                f"{name} must have a number for each column of {self.columns}, not for "
                f"{list(fill)}."
            )
        return dict(fill)

    def _new_pass(self, epoch: int, slot: Slot, state: ReaderState | None) -> "Packing":
        (source,) = self._sources
        if state is None:
            return Packing(self, source, [], 0)
        source.load_state_dict(state["source"])
        if "rest" in state:
            leftovers = [state["rest"]]
        else:
            first = slot.worker * slot.world_size + slot.rank
            leftovers = state["rests"][first :: slot.world_size * slot.workers]
        held = [
            {name: _decoded(tokens) for name, tokens in leftover.items()} for leftover in leftovers
        ]
        return Packing(self, source, held, state.get("given", 0))

    def _source_states(self, state: ReaderState) -> list[ReaderState | None]:
        return [state.get("source")]


class Packing(Iterator[Columns]):
    """One pass of a ``Pack``. Holds less than one sample, and the rest of one row."""

    def __init__(
        self, pack: Pack, source: stateful.Source, leftovers: Sequence[Columns], samples: int
    ) -> None:
        self.finished = False
        self._pack = pack
        self._source = source
        self._rows = iter(source)
        self._sample_count = samples
        self._names = list(pack.columns)
        if pack.positions:
            self._names.append(_FIRST)
        self._held: dict[str, list[TokenArray]] = {name: [] for name in self._names}
        self._count = 0
        for leftover in leftovers:
            self._hold(leftover)

    def __next__(self) -> Columns:
        length = self._pack.length
        while self._count < length and not self.finished:
            try:
                row = next(self._rows)
            except StopIteration:
                self.finished = True
            else:
                self._add(row)
        if self._count >= length:
            return self._sample(self._take(length))
        if not self._count or self._pack.pad is None:
            raise StopIteration
        return self._sample(self._padded(self._take(self._count)))

    def state(self) -> ReaderState:
        leftover = {name: _encoded(self._joined(name)) for name in self._names}
        state = {"finished": self.finished, "given": self._sample_count, "rest": leftover}
        if self.finished:
            return state | {"source": stateful.end_state(self._source)}
        return state | {"source": self._source.state_dict()}

    def _add(self, row: object) -> None:
        columns = self._pack.columns
        arrays = {name: _tokens(row, name, len(columns)) for name in columns}
        lengths = {name: len(tokens) for name, tokens in arrays.items()}
        if len({*lengths.values()}) > 1:
            raise ConfigError(
                f"The columns differ in length: {lengths}. Each must have one value per token."
            )
        self._hold(arrays, self._pack.separator)

    def _hold(self, row: Columns, separator: dict[str, int] | None = None) -> None:
        size = len(row[self._pack.columns[0]])
        if not size:
            return
        for name in self._pack.columns:
            these = row[name]
            held = self._held[name]
            if not self._count:
                held.clear()
            if held and held[-1].dtype != these.dtype:
                raise ConfigError(
                    f"{name!r} of a row is {these.dtype}, and of the row before it "
                    f"{held[-1].dtype}. Give all rows one type by the dataset's map."
                )
            held.append(these)
            if separator is not None:
                held.append(np.array([separator[name]], these.dtype))
        size += separator is not None
        if self._pack.positions:
            first = row.get(_FIRST, np.zeros(size, np.bool_)).copy()
            first[0] = True
            self._held[_FIRST].append(first)
        self._count += size

    def _joined(self, name: str) -> TokenArray:
        held = self._held[name]
        if len(held) > 1:
            held[:] = [np.concatenate(held)]
        if held:
            return held[0]
        return np.empty(0, np.int64)

    def _take(self, count: int) -> Columns:
        columns = {}
        self._count -= count
        for name in self._names:
            joined = self._joined(name)
            columns[name] = joined[:count]
            rest = joined[count:]
            if self._count < self._pack.length:
                rest = rest.copy()  # a view keeps all of it in memory
            self._held[name] = [rest]
        return columns

    def _padded(self, columns: Columns) -> Columns:
        padded = {}
        for name, tokens in columns.items():
            missing = self._pack.length - len(tokens)
            # _FIRST has no pad: 0, except that the padding begins a row.
            fill = (self._pack.pad or {}).get(name, 0)
            padded[name] = np.pad(tokens, (0, missing), constant_values=fill)
            if name == _FIRST:
                padded[name][len(tokens)] = True
        return padded

    def _sample(self, columns: Columns) -> Columns:
        self._sample_count += 1
        first = columns.pop(_FIRST, None)
        if first is not None:
            index = np.arange(len(first))
            columns["position_ids"] = index - np.maximum.accumulate(np.where(first, index, 0))
        return columns


def _tokens(row: object, name: str, columns: int) -> TokenArray:
    if isinstance(row, Mapping):
        if name not in row:
            raise ConfigError(
                f"A row has no {name!r}; it has {list(row)}. Tokenise in the dataset's map, or "
                "set columns to keys with a value per token."
            )
        row = row[name]
    elif columns > 1:
        raise ConfigError(
            f"With several columns each row must be a dict with them, not a {type(row).__name__}."
        )
    tokens = np.asarray(row)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iubf" and tokens.size):
        raise ConfigError(
            f"{name!r} of a row must be a list of numbers, one per token, not "
            f"{type(row).__name__} of shape {tokens.shape} and type {tokens.dtype}."
        )
    if tokens.dtype.kind in "iub":
        return tokens.astype(np.int64, copy=False)
    return tokens


def _encoded(tokens: TokenArray) -> list[str]:
    """Encodes an array as its type and its bytes in base64.

    Integers get the smallest type that holds them.
    """
    if tokens.dtype.kind in "iu" and tokens.size:
        tokens = tokens.astype(
            np.promote_types(np.min_scalar_type(tokens.min()), np.min_scalar_type(tokens.max()))
        )
    return [tokens.dtype.str, base64.b64encode(tokens.tobytes()).decode()]


def _decoded(encoded: list[str]) -> TokenArray:
    tokens = np.frombuffer(base64.b64decode(encoded[1]), encoded[0])
    return tokens.astype(np.int64 if tokens.dtype.kind in "iu" else tokens.dtype)
