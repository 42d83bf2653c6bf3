"""``ReaderDataset`` has rows of files as a torch dataset whose position can be saved and restored.

An epoch has one order for all ranks and workers (``order.py``).

Each pyarrow take from several chunks copies all chunks, and one joint copy would need twice the
window's memory. So rows are joined part by part, and taken batch by batch.

A list of numbers, mostly a token row, becomes a numpy array: a Python number takes 28 bytes where
the table has 2 or 4. pyarrow takes the numbers of lists one by one, so arrays are cut out of the
batch itself. Arrays are copies: torch warns of read-only arrays, and a view keeps a block alive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from loguru import logger
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import parse_bytes
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.common.setting_types import Count, check_value, refuse
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.block_file import BlockRows
from datatrove_ckpt.readers.blocks import (
    Block,
    BlockInput,
    FilesReader,
    UnifiedSchema,
    folder_reader,
    hub_reader,
)
from datatrove_ckpt.readers.inputs import ReaderState, Row, position_mismatch
from datatrove_ckpt.torch.order import (
    BlockTable,
    EpochOrder,
    Even,
    Numbers,
    OpenWindow,
    RemainingPositions,
    Topology,
    Window,
    distinct,
    order_by_files,
    order_by_rows,
    unevenness,
)
from datatrove_ckpt.torch.stateful import StatefulIterable, refuse_begun
from datatrove_ckpt.torch.states import (
    DatasetState,
    Slot,
    check_settings,
    check_snapshots,
    find_states,
    is_ours,
    is_state,
    load_file,
    merge_all,
)
from datatrove_ckpt.torch.watched_loader import RestoredInput, watch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


RowBatch: TypeAlias = "pa.RecordBatch | list[Row | None]"


def batch_rows(batch: RowBatch, numbers: Numbers) -> Sequence[Row | None]:
    """A damaged line is None."""
    if isinstance(batch, list):
        return [row and json_row(row) for row in map(batch.__getitem__, numbers.tolist())]
    rows: list[Row] = [{} for _ in range(len(numbers))]
    for name, values in batch_columns(batch, numbers).items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def batch_columns(batch: RowBatch, numbers: Numbers) -> dict[str, list[object]]:
    """Returns the columns of these rows; none if the keys of dicts differ."""
    if not isinstance(batch, list):
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _values(column, numbers) for name, column in columns}
    rows = [batch[number] or {} for number in numbers.tolist()]
    names, *others = set(map(tuple, rows))
    if others:
        return {}
    return {name: _json_values([row[name] for row in rows]) for name in names}


def _json_values(values: list[object]) -> list[object]:
    if list in set(map(type, values)):
        return [*map(_json_value, values)]
    return values


def json_row(row: Row) -> Row:
    return {name: _json_value(value) for name, value in row.items()}


def _json_value(values: object) -> object:
    if type(values) is not list or not values or type(values[0]) not in (int, float):
        return values
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return values
    # numpy would round larger integers.
    if kinds <= {int, float} and all(
        type(number) is float or abs(number) <= 2**53 for number in values
    ):
        return np.array(values, np.float64)
    return values


def _values(column: pa.Array, numbers: Numbers) -> list[object]:
    types = pa.types
    kind = column.type
    if _is_number_list(kind) and not (column.null_count or column.values.null_count):
        flat = column.values.to_numpy()
        if types.is_fixed_size_list(kind):
            starts = (numbers + column.offset) * kind.list_size
            ends = starts + kind.list_size
        else:
            offsets = column.offsets.to_numpy()
            starts = offsets[numbers]
            ends = offsets[numbers + 1]
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        return [flat[start:end].copy() for start, end in bounds]
    selected = _take(column, numbers)
    if types.is_dictionary(kind):
        return _values(selected.dictionary_decode(), np.arange(len(numbers)))
    is_plain = (_is_number(kind) or types.is_boolean(kind)) and not selected.null_count
    if is_plain or types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        return [*selected.to_numpy(zero_copy_only=False).tolist()]
    values: list[object] = selected.to_pylist()
    if _is_number_list(kind):
        dtype = kind.value_type.to_pandas_dtype()
        for position, value in enumerate(values):
            if isinstance(value, list) and None not in value:
                values[position] = np.array(value, dtype)
    return values


def _take(column: pa.Array, rows: Numbers) -> pa.Array:
    """Takes rows also of types that pyarrow cannot take: string views, run-end encoding."""
    first = int(rows[0])
    if int(rows[-1]) - first == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return column.slice(first, len(rows))
    try:
        return column.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        return pa.array([column[row].as_py() for row in rows.tolist()], column.type)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_number_list(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


_JOINED = 2**23
"""Rows are joined up to so many bytes, or one block more."""
_RELEASED = 6
"""After so many joins the allocator gives back memory."""

Parts: TypeAlias = "Iterator[tuple[Numbers, RowBatch, Numbers]]"
"""Rows in parts: their places among the wanted rows, a batch or list, and their numbers in it."""


class RowBatches:
    def __init__(self, parts: Iterable[BlockRows]) -> None:
        self._batches: list[RowBatch] = []
        for part in parts:
            self._batches += [part] if isinstance(part, list) else part.to_batches()
        self._ends = np.cumsum([len(batch) for batch in self._batches], dtype=np.int64)

    def take(self, rows: Numbers) -> Parts:
        numbers = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers)
        split = np.split(order, np.cumsum(counts[counts > 0])[:-1])
        for number, positions in zip(np.flatnonzero(counts).tolist(), split, strict=True):
            batch = self._batches[number]
            yield positions, batch, rows[positions] - (int(self._ends[number]) - len(batch))


def owned(table: pa.Table) -> pa.Table:
    """Copies a slice, which would keep the table in memory."""
    # One chunk alone would not be copied.
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def joined_tables(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Joins tables to few, because rows are taken in any order."""
    group: list[pa.Table] = []
    size = count = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        del table
        if size >= _JOINED:
            joined = owned(pa.concat_tables(group))
            group = []
            size = 0
            count += 1
            if count % _RELEASED == 0:
                pa.default_memory_pool().release_unused()
            yield joined
    if group:
        yield owned(pa.concat_tables(group))


_OF_DICTS = 3
"""Size of the dicts of JSONL, for each byte of their lines."""


class InputIndex:
    def __init__(self, reader: FilesReader) -> None:
        self.blocks = BlockInput(reader)
        self._inputs = self.blocks.inputs
        size = 1
        if self.blocks.gives_dicts:
            size = _OF_DICTS
        self.table = BlockTable(
            self.blocks, self.blocks.sequential, reader.skip, reader.limit, size
        )
        number = len(self._inputs.names)
        samples = "\n".join(map(self._inputs.sample, range(number)))
        kind = "tags"  # ETags cost nothing
        if self._inputs.folder.is_local():
            kind = "bytes"
        self.state: ReaderState = {
            "files": self._inputs.digest(number).state(),
            "rows": self.table.total,
            "blocks": self.table.hash,
            "skip": reader.skip,
            "limit": reader.limit,
            "content": [kind, xxh3_64_hexdigest(samples.encode())],
        }
        """Names, sizes and samples of all files, and the number of rows of each block."""

    def check(self, saved: ReaderState) -> None:
        current = self.state
        if saved == current:
            return
        self._inputs.check_all(saved["files"])
        check_settings(saved, {key: current[key] for key in ("skip", "limit")})
        compared = ["rows", "blocks"]
        if saved["content"][0] == current["content"][0]:
            compared.append("content")
        if any(saved[key] != current[key] for key in compared):
            raise position_mismatch(
                "The input has changed: other content in files of the same names and sizes "
                f"({saved['rows']} rows, now {current['rows']})."
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    window: OpenWindow
    rows: RowBatches
    offsets: Numbers

    def take(self, rows: Numbers) -> Parts:
        piece, places = self.window.locate(rows)
        return self.rows.take(places + self.offsets[piece])


@dataclass(eq=False)
class RowSource:
    """Holds only the open window of each share that it reads."""

    index: InputIndex
    _order: EpochOrder
    columns: Sequence[str] | None = None
    _unified: UnifiedSchema | None = None
    _open: dict[int, _Loaded] = field(default_factory=dict)

    def samples(self, shares: Numbers, rows: Numbers) -> list[JsonObject | None]:
        """A damaged line is None."""
        samples: list[JsonObject | None] = [None] * len(shares)
        for positions, part, row_numbers in self._parts(shares, rows):
            read = batch_rows(part, row_numbers)
            for position, sample in zip(positions.tolist(), read, strict=True):
                samples[position] = sample
        return samples

    def by_column(self, shares: Numbers, rows: Numbers) -> dict[str, list[object]]:
        """Is empty if a row is damaged, or columns differ."""
        places = []
        parts = []
        for positions, part, row_numbers in self._parts(shares, rows):
            places.append(positions)
            parts.append(batch_columns(part, row_numbers))
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, list[object]] = {}
        if any([*part] != [*parts[0]] for part in parts):
            return columns
        order = np.argsort(np.concatenate(places)).tolist()
        for name in parts[0]:
            values = [*chain.from_iterable(part[name] for part in parts)]
            columns[name] = [values[place] for place in order]
        return columns

    def _parts(self, shares: Numbers, rows: Numbers) -> Parts:
        for share in distinct(shares).tolist():
            mine = np.flatnonzero(shares == share)
            windows = self._order.shares[share].window_of(rows[mine])
            for number in dict.fromkeys(windows.tolist()):
                positions = mine[windows == number]
                self._load(share, number)
                numbers = rows[positions] - self._open[share].window.first
                for selection, part, row_numbers in self._open[share].take(numbers):
                    yield positions[selection], part, row_numbers

    def _load(self, share: int, number: int) -> None:
        if share in self._open and self._open[share].number == number:
            return
        self._open.pop(share, None)  # frees its memory first
        window = self._order.shares[share].window(number)
        # In the order of the files, so that a large row group is decoded once.
        read = np.argsort(window.pieces.block, kind="stable")
        parts: Iterable[BlockRows] = self._read(window, read)
        if self.index.blocks.gives_dicts:
            parts = [[*chain.from_iterable(parts)]]
        elif window.shuffled or len(read) > 1:
            parts = joined_tables(parts)
        count = window.pieces.rows
        start_in_window = np.cumsum(count) - count
        start_in_loaded = np.empty_like(count)
        start_in_loaded[read] = np.cumsum(count[read]) - count[read]
        # From a row's place in the window to its place in what was loaded.
        offsets = start_in_loaded - start_in_window
        self._open[share] = _Loaded(number, window, RowBatches(parts), offsets)

    def _read(self, window: OpenWindow, read: Numbers) -> Iterator[BlockRows]:
        blocks = self.index.blocks
        in_order = [(blocks[int(window.pieces.block[place])], place) for place in read.tolist()]
        for file, group in groupby(in_order, lambda entry: entry[0].file):
            of_file = list(group)
            blocks.expect(file, [block for block, _ in of_file])
            for block, place in of_file:
                yield self._piece(window, block, place)
            if window.shuffled:
                blocks.drop_buffers(file)

    def _piece(self, window: OpenWindow, block: Block, place: int) -> BlockRows:
        blocks = self.index.blocks
        pieces = window.pieces
        start = int(pieces.start[place])
        count = int(pieces.rows[place])
        rows = blocks.read(block, self.columns, self._unified)
        if isinstance(rows, list):
            return rows[start : start + count]
        rows = rows.slice(start, count)
        if blocks.gives_views and window.shuffled:
            return owned(rows)
        return rows


def parse_window(window: int | str) -> Window:
    if isinstance(window, str):
        size = parse_bytes(window)
        if size is not None:
            return Window(bytes=size)
    elif type(window) is int and window > 0:
        return Window(rows=window)
    raise ConfigError(f'window must be a number of rows, or bytes like "256MB", not {window!r}.')


def _continued(start: DatasetState, saved: DatasetState) -> DatasetState:
    if saved.slot is not None and saved.made_by != start.made_by:
        raise CheckpointMismatch(
            f"The state was made by {saved.made_by}, and this is {start.made_by}. For another "
            "number of ranks or workers, give the states of all ranks to "
            "datatrove_ckpt.torch.restore(loader, states)."
        )
    order = saved.order
    if order["shares"] is None:
        order = start.order
    return replace(
        start, order=order, done=saved.done, samples=saved.samples, skipped=saved.skipped
    )


_CHUNK_BYTES = 2**22
_CHUNK_ROWS = 8192


class Epoch(Iterator[object]):
    """Iterates over the samples of one worker in one epoch.

    Args:
        after_end: the loaded state was saved at the end of the epoch before.

    Attributes:
        iterator: the iterator behind ``__next__``, which saves a call for each sample.
    """

    def __init__(
        self,
        dataset: ReaderDataset,
        slot: Slot,
        number: int,
        saved: DatasetState | None = None,
        after_end: bool = False,
    ) -> None:
        table = dataset._index.table
        seed = dataset.shuffle_seed
        self._dataset = dataset
        self._slot = slot
        self._number = number
        self._after_end = after_end
        self._topology = Topology(slot.world_size, slot.workers, dataset._batch)
        # If rows are not shuffled or files are compressed, an order by rows makes each worker read
        # all blocks. Then shares of whole files are better, unless they are uneven.
        shares = self._topology.slots if dataset._batch == 1 else slot.world_size
        by_rows = shares == 1 or (seed is not None and not table.is_stream.any())
        if by_rows or unevenness(table, shares) > 0.01:
            shares = 0
        start = dataset._state_at(number, slot, shares)
        if saved is not None:
            start = _continued(start, saved)
        shares = start.order["shares"]
        if shares:
            self._order = order_by_files(table, seed, number, dataset._window, shares)
        else:
            self._order = order_by_rows(table, seed, number, dataset._window)
        self._remaining = RemainingPositions(self._order.rows, start.done)
        columns = dataset.columns or getattr(dataset._reader, "_columns", None)
        unified = None
        if seed is not None:
            unified = dataset._index.blocks.unified(columns)
        self._source = RowSource(dataset._index, self._order, columns, unified)
        mean = int(table.bytes.sum()) // max(1, table.total)
        self._chunk = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, mean)))
        self._start = start.to_json()
        self._count = start.rows_of(slot)
        self._samples = start.samples
        self._missing = start.skipped
        self._skipped = 0
        self.iterator = self._read()
        for number, stage in enumerate(dataset._stages):
            if isinstance(stage, Batched) and not number:
                self.iterator = self._read_batches(stage)
            else:
                self.iterator = stage(self.iterator)

    def __next__(self) -> object:
        return next(self.iterator)

    def state(self) -> ReaderState:
        return self._start | {"samples": self._samples, "skipped": self._missing}

    def check_used(self, next_epoch: int) -> None:
        """Raises CheckpointMismatch before the next epoch if this epoch gave nothing.

        A loader without workers that resumes with a state of the last batch of the epoch before
        reads nothing.
        """
        epoch = self._number
        if self._after_end and not self._samples and self._count and next_epoch != epoch:
            self._after_end = False
            raise CheckpointMismatch(
                f"Epoch {epoch} gave no sample: the state is of the last batch of epoch "
                f"{epoch - 1}. Resume the loop of epochs at {epoch - 1}, whose rest is empty; "
                f"epoch {epoch} follows."
            )

    def _places(self, low: int, high: int) -> tuple[Numbers, Numbers]:
        numbers = np.arange(low, high)
        positions = self._topology.places(self._slot.rank, self._slot.worker, numbers)
        return self._order.locate(self._remaining.positions(positions))

    def _read(self) -> Iterator[object]:
        while self._samples < self._count:
            first = self._samples
            last = min(first + self._chunk, self._count)
            for number, sample in enumerate(
                self._source.samples(*self._places(first, last)), first
            ):
                if sample is None:
                    sample = self._substitute_for(number)
                    self._missing += sample is None
                self._samples = number + 1
                if sample is not None:
                    yield sample

    def _read_batches(self, batched: Batched) -> Iterator[object]:
        size = batched.size
        chunk = max(1, self._chunk // size) * size
        while self._samples < self._count:
            first = self._samples
            last = min(first + chunk, self._count)
            columns = self._source.by_column(*self._places(first, last))
            if not columns:
                yield from batched(self._read())
                return
            for low in range(0, last - first, size):
                self._samples = min(first + low + size, last)
                if batched.drop_last and self._samples - first - low < size:
                    return
                yield {name: _column(of[low : low + size]) for name, of in columns.items()}

    def _substitute_for(self, number: int) -> JsonObject | None:
        """If ranks must be even, this is the worker's next row, so it depends on the order
        alone.
        """
        is_even = self._dataset._even is not None
        if not self._skipped:
            consequence = "this epoch has fewer samples than len() says"
            if is_even:
                consequence = "another row comes twice"
            logger.warning(f"A row is damaged, so {consequence}. Such rows are skipped.")
        self._skipped += 1
        if not is_even:
            return None
        # A copy keeps the windows of the source open.
        source = replace(self._source, _open={})
        total = self._count
        for low in (*range(number + 1, total, self._chunk), *range(0, number, self._chunk)):
            for other in source.samples(*self._places(low, min(low + self._chunk, total))):
                if other is not None:
                    return other
        raise InputError(f"None of the {total} rows of {self._slot} is a JSON object.")


# Workers get stages pickled. They are no generators: an error of the user's function would end a
# generator, and the rest of the epoch would be missing.
Stage = Callable[[Iterator[Any]], Iterator[Any]]


def _apply(function: Callable[[object], object], sample: object) -> object:
    result = function(sample)
    if isinstance(sample, dict) and isinstance(result, dict):
        return sample | result
    return result


def _select(columns: Sequence[str], row: dict[str, object]) -> dict[str, object]:
    try:
        return {name: row[name] for name in columns}
    except KeyError as error:
        raise ConfigError(f"select_columns: a row has no {error}; it has {[*row]}.") from None


@dataclass(frozen=True)
class Batched:
    size: int
    drop_last: bool

    def __call__(self, samples: Iterator[object]) -> Iterator[object]:
        return map(_joined, iter(partial(self._take, samples), []))

    def count(self, samples: int) -> int:
        if self.drop_last:
            return samples // self.size
        return -(-samples // self.size)

    def _take(self, samples: Iterator[object]) -> list[object]:
        batch = list(islice(samples, self.size))
        if self.drop_last and len(batch) < self.size:
            return []
        return batch


def _joined(samples: list[Any]) -> object:
    if not isinstance(samples[0], dict):
        return _column(samples)
    names = dict.fromkeys(chain.from_iterable(samples))
    return {name: _column([row.get(name) for row in samples]) for name in names}


def _column(values: list[Any]) -> object:
    kind, *other_types = set(map(type, values))
    if kind in (bool, int, float) and not other_types:
        return np.array(values)
    if not hasattr(values[0], "dtype") or other_types:
        return values
    if len({(value.shape, value.dtype) for value in values}) > 1:
        return values
    if kind.__module__ != "torch":
        return np.stack(values)
    import torch

    return torch.stack(values)


_REMOVED = {
    "rank": "shard(num_shards, index)",
    "world_size": "shard(num_shards, index)",
    "shuffle_seed": "shuffle(seed=0)",
    "transform": "map(function), which gets rows instead of documents",
    "columns": "select_columns([...])",
    "even": "shard(num_shards, index, drop_last=True)",
    "shuffle_window": 'shuffle(seed=0, window="128MB")',
    "batch_size": "batch(batch_size), or shard(num_shards, index, batch_size=...)",
}
"""Arguments of 0.2, in their order, and the methods that replace them."""


class ReaderDataset(StatefulIterable):
    """The rows of files: dicts of their columns, in which a list of numbers is a numpy array.

    Each method returns a new dataset, which begins at epoch 0. ``shuffle`` and ``shard`` choose
    rows of the input, wherever they stand; ``map``, ``select_columns`` and ``batch`` change samples
    in the order of the calls.

    Args:
        reader: a ``JsonlReader``, ``ParquetReader`` or ``IpcReader``. It is copied, and its own
            state does not change. Its ``skip`` and ``limit`` count rows of the whole input, and its
            ``shuffle_seed`` is used as by ``shuffle``.

    Raises:
        ConfigError: the rows of the reader cannot be counted, or an argument is not allowed.
        InputError: a file of the input is damaged.
    """

    columns: Sequence[str] | None = None
    _even: Even = None
    _batch = 1
    _stages: tuple[Stage, ...] = ()

    def __init__(self, reader: SeekingReader, *removed: object, **unknown: object) -> None:
        super().__init__()
        refuse([*list(_REMOVED)[: len(removed)], *unknown], _REMOVED)
        if not isinstance(reader, FilesReader):
            raise ConfigError(
                f"The rows of this {type(reader).__name__} cannot be counted. Use "
                "from_folder(...) or a JsonlReader, ParquetReader or IpcReader of "
                "datatrove_ckpt.readers (after save_to_disk: IpcReader(folder, "
                "glob_pattern='data-*.arrow')). A dataset of the library goes to "
                "StatefulDataLoader, Pack or Mix itself."
            )
        if not reader.has_default_adapter():
            raise ConfigError("it makes documents, and these are rows. Use map.", setting="adapter")
        self.shuffle_seed = reader.shuffle_seed and int(reader.shuffle_seed)
        self._window = parse_window("128MB")
        self._reader = copy.copy(reader)
        self._reader.shuffle_seed = None
        self._index = InputIndex(self._reader)

    @classmethod
    def from_folder(cls, folder: str | PathLike[str], glob_pattern: str | None = None) -> Self:
        """Reads the Parquet, Arrow or JSON Lines files of a folder, also at s3:// or hf://.

        Args:
            glob_pattern: the pattern of the files' paths below the folder; None: all files of one
                of these formats.

        Raises:
            ConfigError: there are no such files, or files of several formats.
        """
        return cls(folder_reader(folder, glob_pattern))

    @classmethod
    def from_hub(
        cls,
        path: str,
        name: str | None = None,
        *,
        split: str = "train",
        revision: str | None = None,
    ) -> Self:
        """Reads the files of a dataset of the Hugging Face hub, at its newest commit. Needs
        ``datasets``, whose ``load_dataset`` has the same arguments.

        Raises:
            ConfigError: the files are not Parquet, Arrow or JSON Lines.
            InputError: there is no such dataset, configuration or split.
        """
        return cls(hub_reader(path, name, split, revision))

    # rows ----------------------------------------------------------------------------------------

    def shuffle(self, seed: int | None = None, window: int | str = "128MB") -> Self:
        """Orders files, blocks and rows by ``seed`` and the epoch.

        Args:
            seed: the same number in all ranks, and after a restart.
            window: how much is shuffled at once, over all ranks and workers: a number of rows, or
                bytes with a unit ("128MB"). No worker holds more than this, and one more part of it
                while it reads on.
        """
        if seed is None:
            raise ConfigError(
                "a number that all ranks share. Write shuffle(seed=0).", setting="seed"
            )
        # NumPy's integers are no JSON.
        return self._with(shuffle_seed=int(seed), _window=parse_window(window))

    def shard(
        self,
        num_shards: Count,
        index: int,
        *,
        drop_last: bool = False,
        batch_size: Count | None = None,
    ) -> Self:
        """Chooses the rows of one of ``num_shards`` ranks, which take turns by the row.

        Args:
            index: the rank, from 0.
            drop_last: all ranks have the same number of rows, and the last rows are left out.
                Otherwise they differ by one row at most.
            batch_size: batch size of a loader that makes the batches. As with ``batch``, its
                workers then take turns by the batch: only the last batch of a rank is smaller,
                ``len(loader)`` is exact, and the global batch of a step does not depend on the
                topology.
        """
        check_value("num_shards", Count, num_shards)
        check_value("batch_size", Count | None, batch_size)
        if not 0 <= index < num_shards:
            raise ConfigError(f"must be from 0 to {num_shards - 1}, not {index}.", setting="index")
        return self._with(
            rank=self.rank + self.world_size * int(index),
            world_size=self.world_size * int(num_shards),
            _even="drop" if drop_last else self._even,
            _batch=int(batch_size or self._batch),
        )

    # samples -------------------------------------------------------------------------------------

    def select_columns(self, column_names: str | Sequence[str]) -> Self:
        """Keeps these columns. Others are not read, unless ``map`` or ``batch`` stands before."""
        if isinstance(column_names, str):
            column_names = [column_names]
        if self._stages:
            return self._with(_stages=(*self._stages, partial(map, partial(_select, column_names))))
        return self._with(columns=column_names)

    def map(self, function: Callable[[Any], object]) -> Self:
        """Gives ``function`` each sample. A dict that it returns adds columns to a row; another
        result takes the place of the row.
        """
        return self._with(_stages=(*self._stages, partial(map, partial(_apply, function))))

    def batch(self, batch_size: Count, drop_last_batch: bool = False) -> Self:
        """Joins ``batch_size`` samples to one. Give the loader ``batch_size=None``.

        A column of numbers, or of arrays of one shape, becomes one array, another column a list.
        The workers of a loader take turns by the batch.
        """
        check_value("batch_size", Count, batch_size)
        batched = Batched(int(batch_size), drop_last_batch)
        return self._with(_batch=batched.size, _stages=(*self._stages, batched))

    def __len__(self) -> int:
        """Returns the number of samples of this rank in an epoch, including damaged rows."""
        topology = Topology(self.world_size, 1)
        count = topology.of_rank(self._index.table.total, self.rank, self._even)
        for stage in self._stages:
            if isinstance(stage, Batched):
                count = stage.count(count)
        return count

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. Call it before each epoch.

        Raises:
            CheckpointMismatch: the last epoch gave no sample, because its state was saved at the
                end of the epoch before it.
        """
        self._check_used(epoch)
        super().set_epoch(epoch)

    def _check_used(self, epoch: int) -> None:
        if isinstance(self._running, Epoch):
            self._running.check_used(epoch)

    def _iteration(self, epoch: int, slot: Slot, state: ReaderState | None) -> Epoch:
        self._check_used(epoch)
        saved = None
        is_next = state is not None and state["epoch"] != epoch
        if state is not None and not is_next:
            saved = DatasetState.from_json(state)
        return Epoch(self, slot, epoch, saved, is_next)

    # states --------------------------------------------------------------------------------------

    def _order(self) -> ReaderState:
        window = [self._window.rows, self._window.bytes]
        return {"shuffle_seed": self.shuffle_seed, "window": window}

    def _state_at(self, epoch: int, slot: Slot | None, shares: int | None) -> DatasetState:
        return DatasetState(
            epoch=epoch,
            order=self._order() | {"shares": shares},
            input=self._index.state,
            slot=slot,
            batch=self._batch,
            even=self._even,
        )

    def _start_state(self) -> ReaderState:
        return self._state_at(self._shared.epoch, None, None).to_json()

    def check_state(self, state: ReaderState) -> None:
        super().check_state(state)
        saved = DatasetState.from_json(state)
        check_settings(saved.order, self._order())
        self._index.check(saved.input)

    def made(self, state: ReaderState, workers: int) -> bool:
        is_alike = [state["batch"], state["even"]] == [self._batch, self._even]
        return super().made(state, workers) and (state["slot"] is None or is_alike)

    def _has_ended(self, state: ReaderState) -> bool:
        return DatasetState.from_json(state).has_ended()


def restore(loader: DataLoader, states: Iterable[ReaderState | str | PathLike[str]]) -> int:
    """Lets a loader resume in the epoch in which states of all ranks were saved. Call it in each
    rank.

    Args:
        loader: a StatefulDataLoader, or any DataLoader, of a ``ReaderDataset``, ``Pack`` or
            ``Mix``. It has not begun yet.
        states: ``loader.state_dict()`` of each rank, in any order, or files of ``torch.save`` with
            them.

    Returns:
        The number of the epoch with which the loop of epochs continues: the epoch of the states, or
        the next epoch if no rank had a sample left. Then nothing is loaded, because torchdata
        begins a loader that had finished once more.

    Raises:
        ConfigError: the loader has no such dataset, or has begun, or there is no dataset's state.
        CheckpointCorrupt: a state or file is damaged.
        CheckpointMismatch: files, seed or another setting have changed; a rank's or worker's state
            is missing or repeated; the states are of different epochs, settings, inputs or steps;
            or a loader has made a state between two of its snapshots, or a source has rows that are
            not counted.
    """
    dataset = loader.dataset
    if not isinstance(dataset, StatefulIterable):
        raise ConfigError(
            "restore() needs a loader of a ReaderDataset, Pack or Mix, and this has a "
            f"{type(dataset).__name__}. Use loader.load_state_dict() with this rank's state, and "
            "as many ranks and workers."
        )
    refuse_begun(loader)
    loaded: list[Any] = [load_file(state) for state in states]
    dataset_states = [list(find_states(state, is_ours)) for state in loaded]
    merged = merge_all([state for parts in dataset_states for state in parts])
    epoch = int(merged["epoch"])
    finished = [bool(state.get("_iterator_finished")) for state in loaded]
    if merged.get("ended") or merged.get("finished") or all(finished):
        return epoch + 1
    dataset.check_state(merged)
    if hasattr(loader, "load_state_dict") and not any(finished):
        workers = loader.num_workers
        key = "_snapshot" if workers else "_num_yielded"
        for state, parts in zip(loaded, dataset_states, strict=True):
            if (
                parts
                and key in state
                and all(dataset.made(state_of_slot, max(1, workers)) for state_of_slot in parts)
            ):
                _load(loader, loader, state, merged)
                return epoch
    check_snapshots(loaded)
    _load(loader, dataset, merged, merged)
    return epoch


def _load(
    loader: DataLoader,
    target: DataLoader | StatefulIterable,
    state: ReaderState,
    merged: ReaderState,
) -> None:
    rows = 0
    for each in map(DatasetState.from_json, find_states(merged, is_state)):
        rows += each.input["rows"] - RemainingPositions(each.input["rows"], each.done).rows
    target.load_state_dict(state)
    dataset = None if target is loader else target
    watch(loader, RestoredInput(dataset, state, int(merged["epoch"]), rows, loader.dataset._shared))
