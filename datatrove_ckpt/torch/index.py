"""The input of a training run, as its order needs it: blocks, files, and rows at places of the order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import JsonlReader, SeekingReader
from datatrove_ckpt.readers.inputs import remedy
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.readers.tables import take_rows
from datatrove_ckpt.torch.blocks import BlockInput
from datatrove_ckpt.torch.order import BlockTable, EpochOrder, Numbers, OpenWindow
from datatrove_ckpt.torch.samples import Batches, json_row, owned, table_rows

_OF_DICTS = 3
"""How much larger the dicts of JSONL are than their lines."""


class Row(NamedTuple):
    """A row, the name of its file, and its number there. ``data`` is None for a damaged line of JSONL."""

    data: dict[str, Any] | None
    name: str
    number: int


class Index:
    """The blocks of a reader's files, and what a state keeps of them.

    Raises:
        ConfigError: the reader's files have no blocks.
        InputError: a file is damaged.
    """

    def __init__(self, reader: SeekingReader) -> None:
        self.blocks = BlockInput(reader)
        size = _OF_DICTS if isinstance(reader, JsonlReader) else 1
        self.table = BlockTable(self.blocks, self.blocks.sequential, reader.skip, reader.limit, size)
        self._inputs = inputs = self.blocks._inputs
        files = inputs.digest(len(inputs.names)).state()
        # How the files are sampled, and a hash of the samples: of the ETags of remote files, which cost nothing.
        samples = "\n".join(map(inputs.sample, range(len(inputs.names))))
        content = ["bytes" if inputs.folder.is_local() else "tags", xxh3_64_hexdigest(samples.encode())]
        own = {"skip": reader.skip, "limit": reader.limit, "content": content}
        self.state: State = {"files": files, "rows": self.table.total, "blocks": self.table.hash} | own
        """Which files and rows these are: names, sizes and samples of all, and the number of rows of each block."""

    def check(self, then: State) -> None:
        """Raises CheckpointMismatch if a state was made for other files or rows."""
        now = self.state
        if then == now:
            return
        self._inputs.check_all(then["files"])
        for key in ("skip", "limit"):
            if then.get(key, now[key]) != now[key]:
                raise CheckpointMismatch(
                    f"The state was made with {key}={then[key]}, and this reader has {key}={now[key]}. Use the same, "
                    "or start without the state."
                )
        if [then["rows"], then["blocks"]] != [now["rows"], now["blocks"]]:
            raise CheckpointMismatch(
                "The input has changed: the files have the same names and sizes as when the state was made, but they "
                f"had {then['rows']} rows, and have {now['rows']}, or their row groups have other sizes, or skip or "
                f"limit is another one. {remedy()}"
            )
        found = now["content"]
        kept: Any = then.get("content", found)
        if kept != found and kept[0] == found[0]:
            raise CheckpointMismatch(
                "The input has changed: the files have the same names, sizes and numbers of rows as when the state was "
                f"made, but the content of one is another. {remedy()}"
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An open window and its rows, in the order of its pieces."""

    number: int
    window: OpenWindow
    rows: Batches | list[dict[str, Any] | None]

    def take(self, rows: Numbers) -> Any:
        """The rows with these numbers in the window, in this order: a table or a list."""
        places = self.window.order[rows]
        return [self.rows[place] for place in places] if isinstance(self.rows, list) else self.rows.take(places)

    def origins(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """For each of these rows, its block, and its number in the block."""
        places, pieces = self.window.order[rows], self.window.pieces
        ends = np.cumsum(pieces.rows)
        piece = np.searchsorted(ends, places, side="right")
        return pieces.block[piece], pieces.start[piece] + places - (ends - pieces.rows)[piece]


class RowSource:
    """Rows of an order by their places. Holds the open window of each share that it reads, and no others."""

    def __init__(self, index: Index, order: EpochOrder, columns: Sequence[str] | None = None) -> None:
        self._index, self._order, self._columns = index, order, columns
        self._open: dict[int, _Loaded] = {}

    def rows(self, shares: Numbers, rows: Numbers) -> list[Row]:
        """The rows with these numbers in their shares."""
        found: list[Row | None] = [None] * len(shares)
        table, names = self._index.table, self._index.blocks.names
        for places, loaded, numbers in self._windows(shares, rows):
            block, in_block = loaded.origins(numbers)
            files, lines = table.file[block].tolist(), (table.first[block] + in_block).tolist()
            taken = loaded.take(numbers)
            data = taken if isinstance(taken, list) else taken.to_pylist()
            for place, one, file, line in zip(places.tolist(), data, files, lines, strict=True):
                found[place] = Row(one, names[file], line)
        return [row for row in found if row is not None]

    def samples(self, shares: Numbers, rows: Numbers) -> list[dict[str, Any] | None]:
        """The same as plain dicts, without their origin. Lists of numbers are arrays. None: a damaged line."""
        found: list[dict[str, Any] | None] = [None] * len(shares)
        for places, loaded, numbers in self._windows(shares, rows):
            taken = loaded.take(numbers)
            made: list[dict[str, Any] | None]
            made = [row and json_row(row) for row in taken] if isinstance(taken, list) else [*table_rows(taken)]
            if len(made) == len(found):
                return made
            for place, sample in zip(places.tolist(), made, strict=True):
                found[place] = sample
        return found

    def table(self, shares: Numbers, rows: Numbers) -> Any:
        """The same as one table; of JSONL a list of dicts."""
        import pyarrow as pa

        parts = [(places, loaded.take(numbers)) for places, loaded, numbers in self._windows(shares, rows)]
        if isinstance(parts[0][1], list):
            return self.samples(shares, rows)
        joined = pa.concat_tables([part for _, part in parts], promote_options="permissive").combine_chunks()
        return joined if len(parts) == 1 else take_rows(joined, np.argsort(np.concatenate([p for p, _ in parts])))

    def _windows(self, shares: Numbers, rows: Numbers) -> Iterator[tuple[Numbers, _Loaded, Numbers]]:
        """Which of the rows each window has, the window, and their numbers in it."""
        for share in np.unique(shares):
            mine = np.flatnonzero(shares == share)
            windows = self._order.shares[share].window_of(rows[mine])
            for number in dict.fromkeys(windows.tolist()):
                places = mine[windows == number]
                loaded = self._loaded(int(share), number)
                yield places, loaded, rows[places] - loaded.window.first

    def _loaded(self, share: int, number: int) -> _Loaded:
        found = self._open.get(share)
        if found is None or found.number != number:
            self._open.pop(share, None)  # its memory is free before the next window is read
            window = self._order.shares[share].window(number)
            found = self._open[share] = _Loaded(number, window, self._read(window))
        return found

    def _read(self, window: OpenWindow) -> Batches | list[dict[str, Any] | None]:
        blocks, pieces = self._index.blocks, window.pieces
        parts: list[Any] = [None] * len(pieces.block)
        is_copied = blocks.gives_views and window.shuffled
        last = -1
        # In the order of the files: a large row group is then decoded once for all of its blocks in the window.
        for place in np.argsort(pieces.block, kind="stable").tolist():
            start, count = int(pieces.start[place]), int(pieces.rows[place])
            block = blocks[int(pieces.block[place])]
            if window.shuffled and last not in (-1, block.file):
                blocks.let_go(last)
            last = block.file
            rows = blocks.read(block, self._columns)
            part = rows[start : start + count] if isinstance(rows, list) else rows.slice(start, count)
            parts[place] = owned(part) if is_copied else part
        if window.shuffled:
            blocks.let_go(last)
        if isinstance(parts[0], list):
            return [row for part in parts for row in part]
        # The window's order is made where rows are taken, so that a resume waits for the rows of one batch only.
        return Batches(parts)
