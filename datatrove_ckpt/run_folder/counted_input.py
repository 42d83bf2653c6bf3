"""Counts the documents of a runner's input for ``run --sample``, and draws some at random.

The steps before the runner are read as the run reads them, so that a document has the content and
the ordinal that it has in the run. After 10 s, an input whose rows are documents is read at twenty
places of its files, which are blocks of counted rows. Of other inputs, about twenty tasks are read,
each from its start, and the rest is estimated by bytes.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import attrgetter
from random import Random
from statistics import fmean
from typing import Any

from datatrove.data import Document

from datatrove_ckpt.common.counts import InputPosition
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.blocks import BlockInput
from datatrove_ckpt.readers.compressed import codec_of
from datatrove_ckpt.readers.inputs import PositionedDocument, Reading, position_of
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.tables import ParquetReader
from datatrove_ckpt.run_folder.estimate import Estimate, Population, estimate
from datatrove_ckpt.run_folder.run_plan import RunnerPlan

_SECONDS = 10.0
_PLACES = 20
_ROWS = 2000
"""Rows that are read at all places."""
_MAX_BYTES = 2**32
"""Lines of larger inputs are not counted."""


class SampledDocument(PositionedDocument):
    """A document, its size in characters, and its place in the run."""

    __slots__ = ("ordinal", "rank", "size")
    rank: int
    ordinal: int
    size: float


@dataclass(eq=False)
class _TaskInput:
    """The documents of a task, and their number and the position after the first one, and after
    each read.
    """

    rank: int
    documents: Iterator[Document]
    reading: Reading = field(default_factory=Reading)
    count: int = 0
    reached: list[tuple[int, InputPosition]] = field(default_factory=list)


@dataclass(eq=False)
class _Documents:
    """The sizes of documents, and some of the documents, drawn at random (reservoir sampling).

    Attributes:
        first: only so many of a task's first documents are drawn.
    """

    number: int
    first: float = math.inf
    sizes: list[float] = field(default_factory=list)
    kept: list[SampledDocument] = field(default_factory=list)
    random: Random = field(default_factory=partial(Random, 6))

    def add(self, document: Document, rank: int, ordinal: int) -> None:
        # A prompt may use any column.
        size = 1.0 + len(document.text) + len(str(document.metadata))
        self.sizes.append(size)
        place = len(self.kept)
        if place == self.number:
            place = self.random.randrange(len(self.sizes))
        if place < self.number and ordinal < self.first:
            sampled = SampledDocument(document.text, document.id, document.media, document.metadata)
            sampled.rank = rank
            sampled.ordinal = ordinal
            sampled.size = size
            self.kept[place : place + 1] = [sampled]

    def read(self, task: _TaskInput, until: float) -> bool:
        """Reads documents of a task until a time. Returns whether these were all."""
        position = None
        with task.reading:
            for document in task.documents:
                self.add(document, task.rank, task.count)
                task.count += 1
                position = position_of(document)
                is_whole = time.monotonic() < until
                if position and (task.count == 1 or not is_whole):
                    task.reached.append((task.count, position[2].progress(position)))
                if not is_whole:
                    return False
        if position is not None:
            task.reached.append((task.count, position[2].progress(position)))
        return True

    def in_order(self) -> list[SampledDocument]:
        return sorted(self.kept, key=attrgetter("rank", "ordinal"))


def count_input(
    runner: RunnerPlan, number: int, first: float = math.inf
) -> tuple[list[SampledDocument], Population | None]:
    """Reads the input of the runner.

    Args:
        first: see ``_Documents``.

    Returns:
        ``number`` documents, in their order, and all documents of the input: None if
        its size is not known.
    """
    documents = _Documents(number, first)
    tasks = runner.plan.tasks
    inputs = [_TaskInput(rank, _read(runner, rank)) for rank in range(tasks)]
    documents.random.shuffle(inputs)
    waiting = deque(inputs)
    end = time.monotonic() + _SECONDS
    while waiting and (time.monotonic() < end or not documents.sizes):
        task = waiting.popleft()
        if not documents.read(task, min(end, time.monotonic() + _SECONDS / _PLACES)):
            waiting.append(task)
    if not documents.sizes:
        return [], None
    total: Estimate | None = Estimate.exact(len(documents.sizes))
    if waiting:
        if first == math.inf and _counts_rows(runner.before):
            return _at_places(runner, number)
        total = _by_bytes([task for task in inputs if task.count], tasks)
    whole = None if total is None else Population(total, fmean(documents.sizes))
    return documents.in_order(), whole


def _read(runner: RunnerPlan, rank: int) -> Iterator[Document]:
    documents: Iterator[Document] | None = None
    for step in runner.before:
        if isinstance(step, SeekingReader):  # has the lines that its task has skipped
            step = copy(step)
        documents = iter(step(documents, rank, runner.plan.tasks))
    return documents or iter(())


def _counts_rows(steps: Sequence[object]) -> bool:
    """Whether each row of the input is a document, and the rows are counted in seconds."""
    reader = steps[0]
    if (
        len(steps) > 1
        or not isinstance(reader, ParquetReader | JsonlReader)
        or reader.may_keep_state()  # rows may be left out
    ):
        return False
    if (reader.text_key, reader.shuffle_seed, reader.limit, reader.skip) != (None, None, -1, 0):
        return False
    inputs = reader.list_inputs(0, 1, None)
    sizes = map(inputs.size, range(len(inputs.names)))
    return isinstance(reader, ParquetReader) or (
        sum(sizes) < _MAX_BYTES
        and all(codec_of(name, reader.compression) is None for name in inputs.names)
    )


def _at_places(runner: RunnerPlan, number: int) -> tuple[list[SampledDocument], Population]:
    """Reads rows of some blocks. The mean size is estimated by the ratio to the blocks' bytes,
    with an error that is small beside that of the sample.
    """
    reader: Any = runner.before[0]
    tasks = runner.plan.tasks
    blocks = BlockInput(reader)
    every = [*blocks]
    rows = sum(block.rows for block in every)
    step = -(-len(every) // _PLACES)
    documents = _Documents(number)
    row_bytes: list[float] = []
    for index in range(step // 2, len(every), step):
        block = every[index]
        rank = block.file % tasks
        first = sum(before.rows for before in every[:index] if before.file % tasks == rank)
        name = blocks.names[block.file]
        read: Any = blocks.read(block)
        count = min(block.rows, 1 + _ROWS * step * block.rows // rows)
        for row in documents.random.sample(range(block.rows), count):
            [fields] = read[row : row + 1] if blocks.gives_dicts else read.slice(row, 1).to_pylist()
            if fields:  # the others cannot be read
                document = reader.get_document_from_dict(fields, name, block.first + row)
                documents.add(document, rank, first + row)
                row_bytes.append(block.bytes / block.rows)
    mean_bytes = sum(block.bytes for block in every) / rows
    mean_size = fmean(documents.sizes) * mean_bytes / fmean(row_bytes)
    return documents.in_order(), Population(Estimate.exact(rows), mean_size)


def _by_bytes(begun: Sequence[_TaskInput], tasks: int) -> Estimate | None:
    """Estimates the documents after the first of each task: what is before that may be skipped, or
    be read ahead.
    """
    counts: list[float] = []
    done: list[float] = []
    ends = []
    remaining: list[float] = []
    for task in begun:
        for before, after in pairwise(task.reached):
            counts.append(after[0] - before[0])
            done.append(after[1].done - before[1].done)
        ends += [reached for _, reached in task.reached[-1:] if reached.total]
        remaining += [(end.total or 0) - task.reached[0][1].done for end in ends[len(remaining) :]]
    if len(ends) < len(begun) or len({end.unit for end in ends}) > 1 or not sum(done):
        return None
    tasks = min(tasks, ends[0].tasks or tasks)
    rest = estimate(counts, done, fmean(remaining) * tasks)
    return Estimate(tasks + rest.value, tasks + rest.low, tasks + rest.high)
