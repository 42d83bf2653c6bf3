"""ChunkJournal holds the finished documents of one unfinished chunk, in order of finishing.

A document is finished once its line is written. The journal keeps the offset and length of each
ordinal's line (12 bytes per document), and reads the lines back in input order.

It reads a megabyte at a time: reading single lines releases the GIL at each read, too briefly for
Python to switch threads.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import (
    ChecksummedLine,
    Json,
    add_checksum,
    explained,
    read_lines,
    verified_body,
)
from datatrove_ckpt.common.counts import (
    NO_SECONDS,
    CompletedWork,
    DocumentCounts,
    DocumentTally,
    DocumentWork,
    Outcome,
    Seconds,
)
from datatrove_ckpt.errors import CheckpointCorrupt

JOURNAL_ADVICE = "Restore the file from a copy, or move it away: its documents are processed again."
"""Advice for a damaged journal."""
_DOCUMENT = b',"document":'
_OUTCOME = re.compile(rb'"outcome":"(\w+)"')
# Lines with a smaller gap between them, in bytes, are read in one call, gap included.
_READ_GAP = 1 << 13


@dataclass(slots=True)
class FinishedDocument:
    """A finished document.

    Attributes:
        document: JSON of the document as it will be written, or of the dead letter for "dead";
            ``null`` for "dropped".
        requests, prompt_tokens, completion_tokens: totals of its rollouts, with cached answers.
        work: rollouts, requests and tokens. Also None for one rollout with at most one answered
            request whose result was kept unless the document is dropped.
        seconds: time that the rank took until the line was written, if known.
        ends: numbers of its answers, of truncated answers, and of empty answers.
        reasons: numbers of answers by finish_reason, and by one of ``FAULTS``.
    """

    ordinal: int
    outcome: Outcome
    fingerprint: str
    document: bytes
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    work: DocumentWork | None = None
    seconds: Seconds | None = field(default=None, compare=False)
    ends: tuple[int, ...] = (0, 0, 0)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def took(self) -> DocumentTally:
        numbers = (self.requests, self.prompt_tokens, self.completion_tokens, *self.ends)
        return self.outcome, numbers, self.work, self.reasons

    def to_line(self) -> bytes:
        head: Json = {
            "ordinal": self.ordinal,
            "outcome": self.outcome,
            "input": self.fingerprint,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.ends != (0, 0, 0):
            head["ends"] = self.ends
        if self.reasons:
            head["reasons"] = self.reasons
        if self.work is not None:
            head["work"] = list(self.work)
        if self.seconds is not None:
            head["seconds"] = list(self.seconds)
        return add_checksum(b"".join((orjson.dumps(head)[:-1], _DOCUMENT, self.document, b"}")))

    @classmethod
    def from_body(cls, body: bytes) -> FinishedDocument:
        at = body.index(_DOCUMENT)
        data = orjson.loads(body[:at] + b"}")
        return cls(
            data["ordinal"],
            data["outcome"],
            data["input"],
            body[at + len(_DOCUMENT) : -1],
            data["requests"],
            data["prompt_tokens"],
            data["completion_tokens"],
            None if data.get("work") is None else DocumentWork(*data["work"]),
            None if data.get("seconds") is None else Seconds(*data["seconds"]),
            tuple(data.get("ends", (0, 0, 0))),
            data.get("reasons", {}),
        )


WrittenDocument = tuple[int, bytes]
"""Ordinal and JSON of a document."""


def read_finished(
    path: Path, fingerprints: dict[int, str], first_ordinal: int = 0, end: int | None = None
) -> Iterator[tuple[ChecksummedLine, FinishedDocument | None]]:
    """Yields the journal's whole lines with their documents; None for a repeated document.

    A fenced-off process may have finished the document as well: the first line counts.

    Args:
        fingerprints: receives the fingerprint of each document, by ordinal.

    Raises:
        CheckpointCorrupt: a line that no crash can leave, or that belongs to another chunk.
    """
    for line in read_lines(path, JOURNAL_ADVICE):
        try:
            finished = FinishedDocument.from_body(line.body)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                path,
                f", at byte {line.offset}: the line is no document of this version ({error!r}). "
                f"Use the version that wrote it. {JOURNAL_ADVICE}",
            ) from error
        ordinal = finished.ordinal
        fingerprint = finished.fingerprint
        if fingerprints.get(ordinal) == fingerprint:
            yield line, None
        elif (
            ordinal in fingerprints
            or ordinal < first_ordinal
            or (end is not None and ordinal >= end)
        ):
            raise CheckpointCorrupt(
                path,
                f", at byte {line.offset}: document {ordinal} does not belong there. "
                f"{JOURNAL_ADVICE}",
            )
        else:
            fingerprints[ordinal] = fingerprint
            yield line, finished


class ChunkJournal:
    """``chunk_00007.jsonl`` of one rank. Only the storage thread appends.

    Args:
        end: the ordinal after the chunk's last document; None: the recovery has found no such
            journal. What a fenced-off process has appended since does not count, and may be mixed
            with this process's lines: nothing is cut off.
    """

    def __init__(self, path: Path, first_ordinal: int, end: int | None = None) -> None:
        self.path = path
        self.first_ordinal = first_ordinal
        self.recovered: dict[int, str] = {}
        """Fingerprints of the documents that earlier attempts finished, by ordinal."""
        self.seconds = NO_SECONDS
        """Time that the rank took until an earlier attempt's last write to the journal."""
        self._offsets = array("q")
        self._lengths = array("I")
        self.uncounted: list[DocumentTally] = []
        """The documents that are not in ``done`` yet."""
        self.done = CompletedWork()
        """The work of the other documents."""
        if end is None:
            self.file = files.AppendFile(path)
            return
        size = 0
        for line, finished in read_finished(path, self.recovered, first_ordinal, end):
            size = line.offset + line.length
            if finished is not None:
                self._remember(finished.ordinal, line.offset, line.length)
                self.seconds = self.seconds.or_later(finished.seconds or NO_SECONDS)
                self.uncounted.append(finished.took)
        self.count()
        self.file = files.AppendFile(path, size)

    def append(self, group: Sequence[FinishedDocument]) -> None:
        lines = [finished.to_line() for finished in group]
        offset = self.file.append(b"".join(lines))
        for finished, line in zip(group, lines, strict=True):
            self._remember(finished.ordinal, offset, len(line))
            offset += len(line)
        self.uncounted += [finished.took for finished in group]

    def count(self) -> DocumentCounts:
        work = CompletedWork.of(self.uncounted)
        self.uncounted.clear()
        self.done += work
        return work.counts

    @property
    def ordinals(self) -> Iterator[int]:
        for index, offset in enumerate(self._offsets):
            if offset >= 0:
                yield self.first_ordinal + index

    def read_in_order(self) -> Generator[tuple[str, WrittenDocument], None, None]:
        with explained("read", self.path), self.path.open("rb", buffering=0) as file:
            for indices in self._megabytes():
                lines = self._read(file.fileno(), indices)
                for index in indices:
                    ordinal = self.first_ordinal + index
                    body = verified_body(lines.pop(index, b"")) or b""
                    outcome = _OUTCOME.search(body)
                    if outcome is None:
                        raise CheckpointCorrupt(
                            self.path, f": document {ordinal} cannot be read back."
                        )
                    document = body[body.index(_DOCUMENT) + len(_DOCUMENT) : -1]
                    yield outcome[1].decode(), (ordinal, document)

    def _megabytes(self) -> Generator[range, None, None]:
        start = size = 0
        for index, length in enumerate(self._lengths):
            if size and size + length > 1 << 20:
                yield range(start, index)
                start = index
                size = 0
            size += length
        yield range(start, len(self._lengths))

    def _read(self, fd: int, indices: range) -> dict[int, bytes]:
        offsets = self._offsets
        lengths = self._lengths
        runs: list[list[int]] = []
        end = -_READ_GAP
        for index in sorted(
            (index for index in indices if offsets[index] >= 0), key=offsets.__getitem__
        ):
            if offsets[index] - end >= _READ_GAP:
                runs.append([])
            runs[-1].append(index)
            end = offsets[index] + lengths[index]
        lines: dict[int, bytes] = {}
        for run in runs:
            start = offsets[run[0]]
            data = os.pread(fd, offsets[run[-1]] + lengths[run[-1]] - start, start)
            for index in run:
                lines[index] = data[
                    offsets[index] - start : offsets[index] - start + lengths[index]
                ]
        return lines

    def remove(self) -> None:
        files.disk.remove(self.path)

    def _remember(self, ordinal: int, offset: int, length: int) -> None:
        index = ordinal - self.first_ordinal
        while len(self._offsets) <= index:
            self._offsets.append(-1)
            self._lengths.append(0)
        self._offsets[index] = offset
        self._lengths[index] = length
