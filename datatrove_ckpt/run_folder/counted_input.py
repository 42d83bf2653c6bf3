"""Counts the documents of a runner's input for ``run --sample``, and draws some at random.

The steps before the runner are read as the run reads them, so that a document has the content and
the ordinal that it has in the run. After 10 s, an input whose rows are documents is read at twenty
places of its files, which are blocks of counted rows. Of other inputs, about twenty tasks are read,
each from its start, and the rest is estimated by bytes.
"""

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
from datatrove_ckpt.readers.inputs import Position, PositionedDocument, Reading, position_of
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


@dataclass(frozen=True)
class DrawnInput:
    """Documents of an input, in their order, and all of them: None if its size is not known."""

    documents: list[SampledDocument]
    whole: Population | None


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

    def reach(self, position: Position | None) -> None:
        if position is not None:
            self.reached.append((self.count, position[2].progress(position)))


@dataclass(eq=False)
class _Documents:
    """Counts documents, and keeps some that are drawn at random (reservoir sampling)."""

    number: int
    count: int = 0
    characters: float = 0.0
    kept: list[SampledDocument] = field(default_factory=list)
    random: Random = field(default_factory=partial(Random, 6))

    def add(self, document: Document, rank: int, ordinal: int) -> None:
        # A prompt may use any column.
        size = 1.0 + len(document.text) + len(str(document.metadata))
        self.count += 1
        self.characters += size
        place = len(self.kept)
        if place == self.number:
            place = self.random.randrange(self.count)
        if place < self.number:
            sampled = SampledDocument(document.text, document.id, document.media, document.metadata)
            sampled.rank = rank
            sampled.ordinal = ordinal
            sampled.size = size
            self.kept[place : place + 1] = [sampled]

    def read(self, task: _TaskInput, until: float) -> bool:
        """Reads documents of a task until a time. Returns whether these were all."""
        position = None
        is_whole = True
        with task.reading:
            for document in task.documents:
                self.add(document, task.rank, task.count)
                task.count += 1
                # A step may make several documents of one, or begin with one of its own.
                position = position_of(document) or position
                if task.count == 1:
                    task.reach(position)
                if time.monotonic() >= until:
                    is_whole = False
                    break
        task.reach(position)
        return is_whole

    def drawn(self, number: Estimate | None) -> DrawnInput:
        """``number``: of the documents of the whole input; None: it is not known."""
        in_order = sorted(self.kept, key=attrgetter("rank", "ordinal"))
        if number is None:
            return DrawnInput(in_order, None)
        mean_size = self.characters / max(1, self.count)
        return DrawnInput(in_order, Population(number, mean_size))


def count_input(runner: RunnerPlan, number: int) -> DrawnInput:
    """Reads the input of the runner, and draws ``number`` documents."""
    documents = _Documents(number)
    tasks = runner.plan.tasks
    inputs = [_TaskInput(rank, _read(runner, rank)) for rank in range(tasks)]
    documents.random.shuffle(inputs)
    waiting = deque(inputs)
    end = time.monotonic() + _SECONDS
    while waiting and (time.monotonic() < end or not documents.count):
        task = waiting.popleft()
        if not documents.read(task, min(end, time.monotonic() + _SECONDS / _PLACES)):
            waiting.append(task)
    if not waiting:
        return documents.drawn(Estimate.exact(documents.count))
    if _counts_rows(runner.before):
        return _at_places(runner, number)
    return documents.drawn(_by_bytes([task for task in inputs if task.count], tasks))


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


def _at_places(runner: RunnerPlan, number: int) -> DrawnInput:
    """Reads rows of some blocks. The error of their mean size is small beside that of the draw."""
    reader: Any = runner.before[0]
    tasks = runner.plan.tasks
    blocks = BlockInput(reader)
    every = [*blocks]
    rows = sum(block.rows for block in every)
    step = -(-len(every) // _PLACES)
    documents = _Documents(number)
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
    return documents.drawn(Estimate.exact(rows))


def _by_bytes(begun: Sequence[_TaskInput], tasks: int) -> Estimate | None:
    """Estimates the documents after the first of each task: what is before that may be skipped, or
    be read ahead.
    """
    known = [task.reached for task in begun if len(task.reached) > 1 and task.reached[-1][1].total]
    parts = [part for reached in known for part in pairwise(reached)]
    counts = [after[0] - before[0] for before, after in parts]
    done = [after[1].done - before[1].done for before, after in parts]
    units = {reached[-1][1].unit for reached in known}
    if len(known) < len(begun) or len(units) > 1 or not sum(done):
        return None
    remaining = [(end.total or 0) - start.done for (_, start), *_, (_, end) in known]
    tasks = min(tasks, known[0][-1][1].tasks or tasks)
    rest = estimate(counts, done, fmean(remaining) * tasks)
    return Estimate(tasks + rest.value, tasks + rest.low, tasks + rest.high)
