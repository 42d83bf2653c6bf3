"""Finds the readers of files in a pipeline through its generators: each holds its step and the
generator before it.

For readers that do not seek, it records files, and refuses an input without documents. Their
skipped rows are not counted.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.empty_input import refuse_file_without_documents
from datatrove_ckpt.readers.inputs import InputFolder, Reading, list_input, record_reader
from datatrove_ckpt.readers.shard_record import ReaderRecord, ShardRecord, StepRecord


def steps_before(documents: Iterable[Document]) -> Iterator[tuple[Any, str, dict[str, Any]]]:
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
        self._pipeline = None if pipeline is None else list(pipeline)
        readers = [
            (step, names)
            for step, _, names in steps_before(documents)
            if isinstance(step, BaseDiskReader)
        ]
        self._readers: list[SeekingReader | _PlainReader] = [
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
