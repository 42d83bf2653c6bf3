"""One iteration of a worker over its samples of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loguru import logger

from datatrove_ckpt.errors import CheckpointMismatch, InputError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.index import Index, Row, RowSource
from datatrove_ckpt.torch.plan import Plan
from datatrove_ckpt.torch.samples import json_row, row_arrays, table_arrays

_CHUNK_BYTES, _CHUNK_ROWS = 2**21, 8192
"""The most that becomes Python objects together."""


class Epoch(Iterator[Any]):
    """The samples of one worker.

    Args:
        columns: samples are rows of these columns; None: documents.
        arrays: a sample is a whole batch of such rows: for each column an array.
        transform: makes a sample of such a row or document; None: as it is.
        note_read: called when the first sample is taken.
        after_end: the state that was loaded is of the end of the epoch before.

    Attributes:
        rest: the samples behind the first one, for who wants no call in between.
    """

    def __init__(
        self,
        index: Index,
        plan: Plan,
        reader: SeekingReader,
        columns: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        note_read: Callable[[], None],
        after_end: bool = False,
        arrays: bool = False,
    ) -> None:
        self._index, self._plan, self._reader, self._columns = index, plan, reader, columns
        self._make = self._row if columns is not None else self._document
        mean = int(index.table.bytes.sum()) // max(1, index.table.total)
        self._chunk = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, mean)))
        self._note_read, self._after_end = note_read, after_end
        self._samples = plan.first
        self._start = plan.state(plan.first, index.state).to_json()
        self._is_used, self._skipped = False, 0
        self._missing = plan.skipped  # a batch of rows goes on after them; one of arrays is smaller
        found = self._read() if columns is None else self._read_arrays() if arrays else self._read_columns()
        self.rest: Iterator[Any] = found if transform is None else map(transform, found)

    def __next__(self) -> Any:
        if not self._is_used:
            self._is_used = True
            self._note_read()
        return next(self.rest)

    def state(self) -> State:
        """The state after the latest sample."""
        return self._start | {"samples": self._samples} | ({"skipped": self._missing} if self._missing else {})

    def check_used(self, next_epoch: int) -> None:
        """Called before the next epoch.

        A loader without workers keeps in its state that its dataset has ended. If that state was saved at the last
        batch of an epoch, and the loop resumes in the epoch after it, the loader gives nothing and asks for nothing.

        Raises:
            CheckpointMismatch: that happened.
        """
        if self._after_end and not self._is_used and self._plan.samples and next_epoch != self._plan.epoch:
            self._after_end = False
            epoch = self._plan.epoch
            raise CheckpointMismatch(
                f"Epoch {epoch} gave no sample: the state was saved at the last batch of epoch {epoch - 1}, and the "
                f"loader ends there. Resume the loop of epochs at {epoch - 1}: the rest of it is empty, and epoch "
                f"{epoch} follows."
            )

    def _read(self) -> Iterator[Any]:
        source = RowSource(self._index, self._plan.order)
        while self._samples < self._plan.samples:
            first = self._samples
            last = min(first + self._chunk, self._plan.samples)
            for number, row in enumerate(source.rows(*self._plan.places(first, last)), start=first):
                made = self._make(row)
                if made is None:
                    made = self._instead_of(row, number)
                self._samples = number + 1
                self._missing += made is None
                if made is not None:
                    yield made

    def _read_columns(self) -> Iterator[dict[str, Any]]:
        source = RowSource(self._index, self._plan.order, self._columns)
        while self._samples < self._plan.samples:
            first = self._samples
            last = min(first + self._chunk, self._plan.samples)
            for sample in source.samples(*self._plan.places(first, last)):
                if sample is None:
                    number = self._samples
                    sample = self._instead_of(self._damaged(source, number), number)
                    if sample is None:
                        self._samples += 1
                        self._missing += 1
                        continue
                self._samples += 1
                yield sample

    def _read_arrays(self) -> Iterator[dict[str, Any]]:
        """Batches begin at multiples of their size, also after a state of single rows."""
        source, batch = RowSource(self._index, self._plan.order, self._columns), self._plan.settings.batch
        while self._samples < self._plan.samples:
            first = self._samples
            last = min((first // batch + max(1, self._chunk // batch)) * batch, self._plan.samples)
            table = source.table(*self._plan.places(first, last))
            for low in range(first // batch * batch, last, batch):
                start, end = max(first, low), min(low + batch, last)
                if isinstance(table, list):
                    made = row_arrays(self._whole(table[start - first : end - first], source, start))
                else:
                    made = table_arrays(table.slice(start - first, end - start))
                self._samples = end
                if made:
                    yield made

    def _whole(self, rows: list[dict[str, Any] | None], source: RowSource, first: int) -> list[dict[str, Any]]:
        """The rows, without damaged lines, or with other rows instead of them."""
        numbered = enumerate(rows, start=first)
        found = [row or self._instead_of(self._damaged(source, number), number) for number, row in numbered]
        return [row for row in found if row is not None]

    def _damaged(self, source: RowSource, number: int) -> Row:
        [row] = source.rows(*self._plan.places(number, number + 1))
        return row

    def _row(self, row: Row) -> dict[str, Any] | None:
        return row.data and json_row(row.data)

    def _document(self, row: Row) -> Any:
        return row.data and self._reader.get_document_from_dict(row.data, row.name, row.number)

    def _instead_of(self, row: Row, number: int) -> Any:
        """The sample that comes instead of a row that holds no document.

        Ranks that must be even get the worker's next document twice: it depends on the order alone, so that a resumed
        run gets the same one. Else there is none.

        Raises:
            InputError: no row of the worker's share is a document.
        """
        even = self._plan.settings.even is not None
        if not self._skipped:
            what = "so another document comes twice" if even else "so this epoch has fewer samples than len() says"
            logger.warning(
                f"Row {row.number} of {row.name!r} holds no document, {what}. Further such rows are skipped, too."
            )
        self._skipped += 1
        if not even:
            return None
        source, total = RowSource(self._index, self._plan.order, self._columns), self._plan.samples
        for low, high in _after(number, total, self._chunk):
            for other in source.rows(*self._plan.places(low, high)):
                if (made := self._make(other)) is not None:
                    return made
        raise InputError(
            f"None of the {total} rows of {self._plan.slot} holds a document. Is text_key "
            f"({self._reader.text_key!r}) correct?"
        )


def _after(number: int, total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Ranges of the numbers below ``total``: those after ``number``, then those before it."""
    for low in range(number + 1, total, chunk):
        yield low, min(low + chunk, total)
    for low in range(0, number, chunk):
        yield low, min(low + chunk, number)
