"""Finds the readers of files in a pipeline through its generators: each holds its step and the
generator before it.

For readers that do not seek, it records files, and refuses an input without documents.

It also adds up the stats of the steps before the runner, over all attempts of a rank. After a
resume that seeks, these steps see only the remaining documents. So a saved position holds their
stats right after its document, and the next attempt adds its stats. After a resume that counts,
they see all documents again. The last position holds the stats at the end of the input (``ended``).
"""

import math
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import SupportsFloat

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.utils.stats import MetricStats, MetricStatsDict, Stats
from loguru import logger

from datatrove_ckpt.checkpoint.checksummed_lines import read_shard
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.empty_input import refuse_file_without_documents
from datatrove_ckpt.readers.inputs import (
    InputFolder,
    ReaderState,
    Reading,
    list_input,
    record_reader,
)
from datatrove_ckpt.readers.shard_record import ReaderRecord, ShardRecord, StepRecord

STATS = "stats"


def steps_before(documents: Iterable[Document]) -> Iterator[tuple[PipelineStep, str, JsonObject]]:
    """Yields the steps that make these documents, from the last step to the first: step (None for a
    function), name, arguments.
    """
    while isinstance(documents, types.GeneratorType) and documents.gi_frame is not None:
        names = documents.gi_frame.f_locals
        step = names.get("self")
        if step is None:
            yield None, documents.__name__, names
        else:
            yield step, type(step).__name__, names
        documents = names.get("data") or ()


class PipelineReaders:
    """The readers of files that make these documents. Must be made before the first document is
    read.

    Args:
        pipeline: the executor's steps (see ``describe_pipeline``); None: unknown.
    """

    def __init__(
        self, documents: Iterable[Document], pipeline: Sequence[StepRecord] | None
    ) -> None:
        self._pipeline = pipeline
        readers = [
            (step, names)
            for step, _, names in steps_before(documents)
            if isinstance(step, BaseDiskReader)
        ]
        self._readers = [
            step
            if isinstance(step, SeekingReader)
            else _PlainReader(step, names["rank"], names["world_size"])
            for step, names in reversed(readers)
        ]

    @property
    def count(self) -> int:
        """The number of readers of files; 1 if no reader is found, because a step may hide it."""
        return max(1, len(self._readers))

    def start(self) -> None:
        """Records the files of the readers that do not seek, before anything is read. Raises
        OSError.
        """
        for reader in self._readers:
            if isinstance(reader, _PlainReader):
                reader.start()

    def finish(self, reading: Reading) -> ShardRecord | None:
        """Returns the record of the input after the last document; None if neither readers nor the
        pipeline are known.

        Raises:
            InputError: a reader that does not seek found no document, although its files have
                content.
        """
        starts = iter(reading.starts)
        # A step may hide the readers before it.
        seen: Sequence[object] = self._readers or [None] * len(reading.starts)
        records = []
        for reader in seen:
            if isinstance(reader, _PlainReader):
                records.append(reader.finish())
                continue
            start = next(starts, None)
            if start is None or start.record is None:
                records.clear()
                break
            records.append(start.record())
        if not records and self._pipeline is None:
            return None
        return ShardRecord(records, reading.skipped, self._pipeline)


@dataclass
class _PlainReader:
    _reader: BaseDiskReader
    _rank: int
    _world_size: int

    def start(self) -> None:
        InputFolder.give(self._reader)
        self._inputs = list_input(self._reader).shard(self._rank, self._world_size)
        for index in range(len(self._inputs.names)):
            self._inputs.size(index)
        self._before = self._documents()

    def finish(self) -> ReaderRecord:
        reader = self._reader
        kind = type(reader)
        counts = (
            kind.run is BaseDiskReader.run
            and kind.read_files_shard is BaseDiskReader.read_files_shard
        )
        if counts and reader.limit != 0 and not reader.skip and self._documents() == self._before:
            for index, name in enumerate(self._inputs.names):
                if self._inputs.size(index):
                    with naming_damage(name):
                        refuse_file_without_documents(reader, name, damaged=False)
        return record_reader(reader, self._inputs, len(self._inputs.names))

    def _documents(self) -> int:
        metric = self._reader.stats.stats.get("documents")
        if metric is None:
            return 0
        return int(metric.total)


class StepStats:
    """The steps that make these documents, with stats that begin at zero, because ranks may share a
    step object.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        steps = [
            step
            for step, _, _ in steps_before(documents)
            if isinstance(getattr(step, "stats", None), Stats)
        ]
        self._steps = steps[::-1]
        self._earlier = [MetricStatsDict() for _ in steps]
        self._ended = False
        self._are_known = True
        for step in self._steps:
            step.stats = Stats(step.stats.name)

    def restore(self, shard: Path) -> None:
        self.resume(read_shard(shard))
        self.finish(0)

    def resume(self, state: ReaderState) -> None:
        saved = state.get(STATS)
        self._are_known = (
            saved is not None and [name for name, _ in saved["steps"]] == self._names()
        )
        if saved is not None and self._are_known:
            self._earlier = [_from_json(metrics) for _, metrics in saved["steps"]]
            self._ended = saved["ended"]
        elif self._steps:
            logger.warning(
                "The stats of the steps before InferenceRunner lack earlier attempts, of another "
                "release or pipeline."
            )

    def at_end(self, read: int) -> ReaderState:
        if not self._are_known:
            return {}
        return {STATS: self._state(True, self._totals(read))}

    def saved(self, ended: bool = False) -> ReaderState | None:
        if not self._are_known:
            return None
        return self._state(ended, self._sums())

    def _state(self, ended: bool, totals: Iterable[MetricStatsDict]) -> ReaderState:
        steps = zip(self._names(), map(_to_json, totals), strict=True)
        return {"ended": ended, "steps": list(map(list, steps))}

    def finish(self, read: int) -> None:
        """Sets the steps' stats to the sums over all attempts, at the end of the input."""
        for step, total in zip(self._steps, self._totals(read), strict=True):
            step.stats.stats = total
        self._earlier = [MetricStatsDict() for _ in self._steps]

    def _totals(self, read: int) -> list[MetricStatsDict]:
        if self._ended and not read:
            return self._earlier
        return self._sums()

    def _sums(self) -> list[MetricStatsDict]:
        return [
            earlier + step.stats.stats
            for earlier, step in zip(self._earlier, self._steps, strict=True)
        ]

    def _names(self) -> list[str]:
        return [step.stats.name for step in self._steps]


def _to_json(metrics: MetricStatsDict) -> ReaderState:
    """Converts metrics, except metrics with a number that is not finite, which JSON cannot hold."""
    numbers_by_name = {}
    for name, metric in list(metrics.items()):
        numbers = (
            metric.total,
            metric.n,
            metric.mean,
            metric._running_variance,
            metric.min,
            metric.max,
        )
        if metric.n and all(map(math.isfinite, numbers)):
            numbers_by_name[str(name)] = [*map(_plain, numbers), metric.unit]
    return numbers_by_name


def _plain(number: SupportsFloat) -> float:
    if isinstance(number, Integral):
        return int(number)
    return float(number)


def _from_json(fields: ReaderState) -> MetricStatsDict:
    stats = {}
    for name, (total, n, mean, variance, low, high, unit) in fields.items():
        stats[name] = MetricStats(total, n, mean, low, high, variance, unit)
    return MetricStatsDict(init=stats)
