"""The readers of files in a pipeline, found through its generators: each holds its step and the generator before it.

For readers that do not seek, this module does what ours do themselves: it notes their files, and refuses an input in
which they found no document. It cannot count the rows that they skip.

The stats of the steps before the runner, over all attempts of a rank.

After a resume that seeks, these steps see only the remaining documents. So a saved position holds what their stats were
right after its document, and the next attempt adds that to its own in the end. After a resume that counts, they see all
documents again, and there is nothing to add.

What was counted after the last document of the input belongs to no later position. So the last position holds the stats
at the end of the input, and says so: an attempt that finds no document after it adds nothing of its own.

A retry of dead letters does not run these steps. ``shard.json`` keeps for it what they counted in the rank.
"""

from __future__ import annotations

import csv
import math
import types
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.utils.stats import MetricStats, MetricStatsDict, Stats
from loguru import logger

from datatrove_ckpt.checkpoint.lines import read_shard
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_errors import refuse_file_without_documents
from datatrove_ckpt.readers.inputs import Inputs, list_input, record_reader
from datatrove_ckpt.readers.positions import Reading, State
from datatrove_ckpt.readers.shard import ReaderRecord, ShardRecord, StepRecord

STATS = "stats"
"""Where a position holds them. Readers do not look at it."""


class StepStats:
    """The steps that make these documents, with stats that begin at zero. Made before the first document is read.

    datatrove runs several ranks with one step object (``tasks_per_job``), and would count the ranks together.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        steps = [step for step, _, _ in steps_before(documents) if isinstance(getattr(step, "stats", None), Stats)]
        self._steps: list[Any] = steps[::-1]
        self._earlier = [MetricStatsDict() for _ in steps]
        self._ended = False
        self._known = True
        for step in self._steps:
            step.stats = Stats(step.stats.name)

    def resume(self, state: State) -> None:
        """This attempt resumed at the position ``state`` by seeking."""
        if not self._take(state) and self._steps:
            logger.warning(
                "The stats of the steps before InferenceRunner count this attempt only: an earlier release, or another "
                "pipeline, has saved the position where it resumed."
            )

    def restore(self, shard: Path) -> None:
        """Gives the steps what they counted when the rank read its input, from its ``shard.json``."""
        if not self._take(read_shard(shard)) and self._steps:
            logger.warning(
                "The stats of the steps before InferenceRunner are empty: an earlier release, or another pipeline, has "
                "finished this rank, and a retry of dead letters does not run them."
            )
        self.finish(0)

    def _take(self, state: State) -> bool:
        saved = state.get(STATS)
        self._known = saved is not None and [name for name, _ in saved["steps"]] == self._names()
        if saved is not None and self._known:
            self._earlier, self._ended = [_from_json(metrics) for _, metrics in saved["steps"]], saved["ended"]
        return self._known

    def at_end(self, read: int) -> State:
        """For ``shard.json``: what ``finish`` gives the steps. Empty if it is not known."""
        if not self._known:
            return {}
        steps = zip(self._names(), self._totals(read), strict=True)
        return {STATS: {"ended": True, "steps": [[name, _to_json(metrics)] for name, metrics in steps]}}

    def saved(self, ended: bool = False) -> State | None:
        """The stats of all attempts up to now, as plain JSON; None if they are not known.

        Args:
            ended: the input has ended.
        """
        if not self._known:
            return None
        metrics = [_to_json(_sum(*each)) for each in zip(self._earlier, self._now(), strict=True)]
        return {"ended": ended, "steps": [list(each) for each in zip(self._names(), metrics, strict=True)]}

    def finish(self, read: int) -> None:
        """Gives the steps the stats of all attempts. The input has ended, after ``read`` documents of this attempt."""
        for step, total in zip(self._steps, self._totals(read), strict=True):
            step.stats.stats = total
        self._earlier = [MetricStatsDict() for _ in self._steps]

    def _totals(self, read: int) -> list[MetricStatsDict]:
        later = [MetricStatsDict() for _ in self._steps] if self._ended and not read else self._now()
        return [_sum(*each) for each in zip(self._earlier, later, strict=True)]

    def _names(self) -> list[str]:
        return [step.stats.name for step in self._steps]

    def _now(self) -> list[MetricStatsDict]:
        return [step.stats.stats for step in self._steps]


def _sum(earlier: MetricStatsDict, later: MetricStatsDict) -> MetricStatsDict:
    """Of each metric. Those of one side only stay as they are."""
    if not earlier:
        return later
    both = {name: metric for name, metric in earlier.items() if name not in later}
    for name, metric in list(later.items()):
        both[name] = earlier[name] + metric if name in earlier else metric
    return MetricStatsDict(init=both)


def _to_json(metrics: MetricStatsDict) -> State:
    return {str(name): row for name, metric in list(metrics.items()) if metric.n and (row := _row(metric)) is not None}


def _row(metric: MetricStats) -> list[Any] | None:
    """Steps may count in NumPy's types. None if a number is not finite, which JSON cannot hold."""
    numbers = metric.total, metric.n, metric.mean, metric._running_variance, metric.min, metric.max
    plain = [int(number) if isinstance(number, Integral) else float(number) for number in numbers]
    return [*plain, metric.unit] if all(map(math.isfinite, plain)) else None


def _from_json(content: State) -> MetricStatsDict:
    found = {}
    for name, (total, n, mean, variance, low, high, unit) in content.items():
        found[name] = MetricStats(total, n, mean, low, high, variance, unit)
    return MetricStatsDict(init=found)


def steps_before(documents: Iterable[Document]) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """The steps that make these documents, the last one first: step (None for a function), its name, its arguments."""
    while isinstance(documents, types.GeneratorType) and documents.gi_frame is not None:
        names = documents.gi_frame.f_locals
        step = names.get("self")
        yield step, type(step).__name__ if step is not None else documents.__name__, names
        documents = names.get("data") or ()


def name_file(error: BaseException) -> BaseException:
    """Names the file in which a reader that does not seek found no UTF-8, or no CSV; else the error as it is."""
    trace = error.__traceback__ if isinstance(error, UnicodeDecodeError | csv.Error) else None
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), BaseDiskReader) and isinstance(names.get("filepath"), str):
            named = InputError(
                f"The input file {names['filepath']!r} in {names['self'].data_folder.path} is not UTF-8, or has a "
                f"quote that is not closed: {error}. Correct it (iconv -t utf-8), and run the same command again."
            )
            named.__cause__ = error
            return named
        trace = trace.tb_next
    return error


class PipelineReaders:
    """The readers of files that make these documents. Must be made before the first document is read.

    Args:
        pipeline: the steps as the executor has them (see ``describe_pipeline``); None if that is not known.
    """

    def __init__(self, documents: Iterable[Document], pipeline: Sequence[StepRecord] | None = None) -> None:
        self._pipeline = None if pipeline is None else list(pipeline)
        found = [(step, names) for step, _, names in steps_before(documents) if isinstance(step, BaseDiskReader)]
        self._readers: list[SeekingReader | _PlainReader] = [
            step if isinstance(step, SeekingReader) else _PlainReader(step, names["rank"], names["world_size"])
            for step, names in reversed(found)
        ]

    @property
    def count(self) -> int:
        """How many readers of files there are; 1 if none is known, because a step may hide it."""
        return max(1, len(self._readers))

    def start(self) -> None:
        """Notes the files of the readers that do not seek. To be called before anything is read.

        Raises:
            OSError: the input cannot be read.
        """
        for reader in self._readers:
            if isinstance(reader, _PlainReader):
                reader.start()

    def finish(self, reading: Reading) -> ShardRecord | None:
        """What was read, once the last document has come; None if neither readers of files nor the pipeline are known.

        Raises:
            InputError: a reader that does not seek found no document, although its files have content.
        """
        starts = iter(reading.starts)
        seen: list[Any] = self._readers or [None] * len(reading.starts)  # a step may hide the readers before it
        records: list[ReaderRecord] = []
        for reader in seen:
            start = None if isinstance(reader, _PlainReader) else next(starts, None)
            make = reader.finish if isinstance(reader, _PlainReader) else start.record if start else None
            if make is None:
                records.clear()
                break
            records.append(make())
        if not records:
            return None if self._pipeline is None else ShardRecord(skipped=reading.skipped, pipeline=self._pipeline)
        return ShardRecord(records, reading.skipped, self._pipeline)


class _PlainReader:
    """A reader that does not seek, seen from outside."""

    def __init__(self, reader: BaseDiskReader, rank: int, world_size: int) -> None:
        self._reader, self._rank, self._world_size = reader, rank, world_size
        self._inputs = Inputs(reader.data_folder, ())
        self._before = 0

    def start(self) -> None:
        self._inputs = list_input(self._reader).shard(self._rank, self._world_size)
        for index in range(len(self._inputs.names)):
            self._inputs.size(index)
        self._before = self._documents()

    def finish(self) -> ReaderRecord:
        reader = self._reader
        kind = type(reader)
        counts = kind.run is BaseDiskReader.run and kind.read_files_shard is BaseDiskReader.read_files_shard
        if counts and reader.limit != 0 and not reader.skip and self._documents() == self._before:
            for index, name in enumerate(self._inputs.names):
                if self._inputs.size(index):
                    with naming_damage(name):
                        refuse_file_without_documents(reader, name, damaged=False)
        return record_reader(reader, self._inputs, len(self._inputs.names))

    def _documents(self) -> int:
        """How many documents the reader has yielded, by datatrove's stats."""
        metric = self._reader.stats.stats.get("documents")
        return int(metric.total) if metric is not None else 0
