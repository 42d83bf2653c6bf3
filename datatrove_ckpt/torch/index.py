"""The input of a training: blocks, files, and rows at places of an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.readers.inputs import misfit
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.readers.tables import Numbers
from datatrove_ckpt.torch.batches import Parts, RowBatches, json_row, owned, table_rows
from datatrove_ckpt.torch.block_file import Rows
from datatrove_ckpt.torch.blocks import Block, BlockInput, FilesReader
from datatrove_ckpt.torch.order import BlockTable, EpochOrder, OpenWindow

_OF_DICTS = 3
"""Size of the dicts of JSONL, for each byte of their lines."""


class Row(NamedTuple):
    """A row, its file, and its number there. ``data`` is None for a damaged line of JSONL."""

    data: JsonObject | None
    name: str
    number: int


class Index:
    def __init__(self, reader: FilesReader) -> None:
        self.blocks = BlockInput(reader)
        self._inputs = self.blocks._inputs
        size = 1
        if isinstance(reader, JsonlReader):
            size = _OF_DICTS
        self.table = BlockTable(
            self.blocks, self.blocks.sequential, reader.skip, reader.limit, size
        )
        number = len(self._inputs.names)
        samples = "\n".join(map(self._inputs.sample, range(number)))
        kind = "tags"  # the ETags of remote files, which cost nothing
        if self._inputs.folder.is_local():
            kind = "bytes"
        self.state: State = {
            "files": self._inputs.digest(number).state(),
            "rows": self.table.total,
            "blocks": self.table.hash,
            "skip": reader.skip,
            "limit": reader.limit,
            "content": [kind, xxh3_64_hexdigest(samples.encode())],
        }
        """Names, sizes and samples of all files, and the number of rows of each block."""

    def check(self, then: State) -> None:
        now = self.state
        if then == now:
            return
        self._inputs.check_all(then["files"])
        for key in ("skip", "limit"):
            if then[key] != now[key]:
                raise CheckpointMismatch(
                    f"The state was made with {key}={then[key]}, and this reader has "
                    f"{key}={now[key]}. Use the same, or start without the state."
                )
        if [then["rows"], then["blocks"]] != [now["rows"], now["blocks"]]:
            raise misfit(
                "The input has changed: the files have the same names and sizes as when the state "
                f"was made, but they had {then['rows']} rows, and have {now['rows']}, or their row "
                f"groups have other sizes, or skip or limit is another one."
            )
        kept = then["content"]
        if kept != now["content"] and kept[0] == now["content"][0]:
            raise misfit(
                "The input has changed: the files have the same names, sizes and numbers of rows "
                "as when the state was made, but the content of one is another."
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    window: OpenWindow
    rows: RowBatches | list[JsonObject | None]
    moved: Numbers

    def take(self, rows: Numbers) -> Parts:
        piece, places = self._find(rows)
        places = places + self.moved[piece]
        if isinstance(self.rows, list):
            return iter([(np.arange(len(rows)), [self.rows[place] for place in places.tolist()])])
        return self.rows.take(places)

    def origins(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        piece, places = self._find(rows)
        pieces = self.window.pieces
        return pieces.block[piece], pieces.start[piece] + places - (
            np.cumsum(pieces.rows) - pieces.rows
        )[piece]

    def _find(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        places = self.window.order[rows]
        return np.searchsorted(np.cumsum(self.window.pieces.rows), places, side="right"), places


@dataclass(eq=False)
class RowSource:
    """Rows of an order. Holds only the open window of each share that it reads."""

    index: Index
    _order: EpochOrder
    columns: Sequence[str] | None = None
    _open: dict[int, _Loaded] = field(default_factory=dict)

    def rows(self, shares: Numbers, rows: Numbers) -> list[Row]:
        found: dict[int, Row] = {}
        table = self.index.table
        names = self.index.blocks.names
        for places, data, share, numbers in self._parts(shares, rows):
            block, in_block = self._open[share].origins(numbers)
            files = [names[file] for file in table.file[block].tolist()]
            lines = (table.first[block] + in_block).tolist()
            if not isinstance(data, list):
                data = data.to_pylist()
            found.update(zip(places.tolist(), map(Row, data, files, lines), strict=True))
        return [found[place] for place in range(len(shares))]

    def samples(self, shares: Numbers, rows: Numbers) -> list[JsonObject | None]:
        """Reads the rows as plain dicts, in which lists of numbers are arrays.

        None: a damaged line.
        """
        found: dict[int, JsonObject | None] = {}
        for places, part, _, _ in self._parts(shares, rows):
            if isinstance(part, list):
                part = [row and json_row(row) for row in part]
            else:
                part = table_rows(part)
            found.update(zip(places.tolist(), part, strict=True))
        return [found[place] for place in range(len(shares))]

    def _parts(
        self, shares: Numbers, rows: Numbers
    ) -> Iterator[tuple[Numbers, Rows, int, Numbers]]:
        """Yields rows in parts: which these are, the rows, their share, and their numbers in its
        window.
        """
        for share in np.unique(shares).tolist():
            mine = np.flatnonzero(shares == share)
            windows = self._order.shares[share].window_of(rows[mine])
            for number in dict.fromkeys(windows.tolist()):
                places = mine[windows == number]
                self._load(share, number)
                numbers = rows[places] - self._open[share].window.first
                for some, part in self._open[share].take(numbers):
                    yield places[some], part, share, numbers[some]

    def _load(self, share: int, number: int) -> None:
        if share in self._open and self._open[share].number == number:
            return
        self._open.pop(share, None)  # frees its memory before the next window is read
        window = self._order.shares[share].window(number)
        # In the order of the files, so that a large row group is decoded once.
        read = np.argsort(window.pieces.block, kind="stable")
        parts = self._read(window, read)
        loaded: RowBatches | list[JsonObject | None]
        if self.index.blocks.gives_dicts:
            loaded = list(chain.from_iterable(parts))
        else:
            loaded = RowBatches(parts, window.shuffled or len(read) > 1)
        count = window.pieces.rows
        moved = np.empty_like(count)
        moved[read] = np.cumsum(count[read]) - count[read]
        self._open[share] = _Loaded(number, window, loaded, moved - (np.cumsum(count) - count))

    def _read(self, window: OpenWindow, read: Numbers) -> Iterator[Rows]:
        blocks = self.index.blocks
        in_order = [(blocks[int(window.pieces.block[place])], place) for place in read.tolist()]
        for file, group in groupby(in_order, lambda found: found[0].file):
            of_file = list(group)
            blocks.expect(file, [block for block, _ in of_file])
            for block, place in of_file:
                yield self._piece(window, block, place)  # a name would hold it
            if window.shuffled:
                blocks.let_go(file)

    def _piece(self, window: OpenWindow, block: Block, place: int) -> Rows:
        blocks = self.index.blocks
        pieces = window.pieces
        start = int(pieces.start[place])
        count = int(pieces.rows[place])
        rows = blocks.read(block, self.columns)
        if isinstance(rows, list):
            return rows[start : start + count]
        rows = rows.slice(start, count)
        if blocks.gives_views and window.shuffled:
            return owned(rows)
        return rows
