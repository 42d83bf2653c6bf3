"""Looks at one rank: what it reads, how far it has come, and what of its input nobody has touched; moves documents.

A rank's folder tells which documents are finished, by their number. Where these lie in the input is known after each
commit only. So what comes after the last commit of the unbroken run is read once more, through the same steps, and
compared with what the folder holds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog, DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.journal import Finished, read_finished
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, RUN, journal_path, last_chunk_of, rank_folder
from datatrove_ckpt.checkpoint.ledger import scan_complete_commits
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.checkpoint.recovery import ResumePoint, recover
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.checkpoint.resharding import Staging
from datatrove_ckpt.checkpoint.shares import Part, Place, Share, Shares, names_hash, read_shares
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.output.documents import fingerprint
from datatrove_ckpt.preflight.run_plan import RunnerPlan
from datatrove_ckpt.readers.inputs import between, list_input, shuffled_names
from datatrove_ckpt.readers.positions import PLAIN_INTEGER, Reading, position_of


@dataclass
class RankInput:
    """A rank, its input, and how far it has come.

    Attributes:
        parts: the rank's whole input.
        is_done: it has nothing left to do.
        point: where it resumes.
        places: after the last document before ``point``, and after each one that was touched since.
        rest: what it has not touched.
        load: about how many bytes of the documents that it has touched are not finished.
    """

    rank: int
    folder: Path
    parts: list[Part]
    is_done: bool = False
    point: ResumePoint = field(default_factory=ResumePoint)
    places: list[Place] = field(default_factory=lambda: [Place(0, ())])
    rest: list[Part] = field(default_factory=list)
    load: float = 0.0

    @property
    def next_ordinal(self) -> int:
        """The number of the first document that was not touched."""
        return self.point.next_ordinal + len(self.places) - 1

    def touched(self, sized: Callable[[Sequence[Part]], list[Part]]) -> list[Part]:
        """What the rank has touched of its input. ``sized``: see ``Scanner``."""
        end = self.places[-1]
        parts = between(self.parts, Place(0, ()), end)
        if parts and end.at and self.rest and self.rest[0].name == parts[-1].name:  # the rest of this file is another's
            whole = sized(self.parts[end.part : end.part + 1])[0].bytes
            parts[-1] = parts[-1]._replace(bytes=max(0, whole - self.rest[0].bytes))
        return parts

    def open_ordinals(self) -> list[int]:
        """Documents that were touched, or come before one that was, and are in no commit."""
        committed = {*self.committed}
        return [ordinal for ordinal in range(self.point.next_ordinal, self.next_ordinal) if ordinal not in committed]

    @property
    def has_started(self) -> bool:
        return (self.folder / RUN).exists()

    @property
    def committed(self) -> list[int]:
        """Documents in commits after the unbroken run of them."""
        done = self.point.done.values()
        return sorted(ordinal for one in done for ordinal in range(one.first_ordinal, one.next_ordinal))

    def place_after(self, ordinal: int) -> Place:
        """The place right after a document that was touched, or after the one before the first of these."""
        return self.places[ordinal - self.point.next_ordinal + 1]


@dataclass
class Scanner:
    """Looks at the ranks of a run.

    Attributes:
        root: ``checkpoints_local_dir``.
        runner: as it was up to now. The first step before it is the reader.
        finished: ranks that are.
        shares: how the input was dealt out up to now; round 0: as datatrove does.
        inputs: the files of the whole input; ``index`` has their numbers.
    """

    root: Path
    runner: RunnerPlan
    finished: Collection[int]

    def __post_init__(self) -> None:
        self.reader: PipelineStep = self.runner.before[0]
        self.inputs = list_input(self.reader)
        self.index = {name: index for index, name in enumerate(self.inputs.names)}
        self.shares = read_shares(self.root) or Shares(0, self.runner.tasks, names_hash(self.inputs.names), {})

    def share_of(self, rank: int) -> Share:
        """What a rank reads up to now."""
        if self.shares.round:
            return self.shares.of(rank)
        tasks, seed = self.runner.tasks, self.reader.shuffle_seed
        names = list(self.inputs.names[rank::tasks]) if rank < tasks else []
        parts = [Part(name) for name in (names if seed is None else shuffled_names(names, seed))]
        return Share(0, self.shares.input, parts)

    def look(self, rank: int) -> RankInput:
        """Completes what a crash has left in the rank's folder, and reads what it has touched.

        Raises:
            CheckpointError: the checkpoint is damaged.
            CheckpointMismatch: the input is not what the rank has read.
        """
        share = self.share_of(rank)
        found = RankInput(rank, rank_folder(self.root, rank), share.parts)
        if not found.has_started:
            found.rest = self.sized(found.parts)
            return found
        commits, _ = scan_complete_commits(found.folder, rank in self.finished)
        if rank in self.finished:
            found.is_done = True
            found.point.next_ordinal = sum(commit.counts.read for commit in commits.values())
            found.point.next_chunk = len(commits)
            found.places = [Place(len(share.parts), ())]
            return found
        self._recover(found)
        self._read(found, share)
        return found

    def _recover(self, found: RankInput) -> None:
        with closing(RequestCache(found.folder / CACHE)) as cache:
            log = CommitLog(found.folder / COMMITS)
            files.disk.make_dirs(last_chunk_of(found.folder).parent)
            found.point = recover(found.folder, log, cache, self.runner.step.records_per_chunk)

    def _read(self, found: RankInput, share: Share) -> None:
        """Reads what the rank has touched since its last commit of the unbroken run."""
        point = found.point
        known = {ordinal: text for journal in point.journals.values() for ordinal, text in journal.recovered.items()}
        finished = set(known)
        for commit in point.done.values():
            known[commit.next_ordinal - 1] = commit.last_input
            finished.update(range(commit.first_ordinal, commit.next_ordinal))
        touched = max([point.next_ordinal, *(number + 1 for number in finished | point.cached)])
        documents = self._documents(found.rank)
        with Reading(point.position, share=share) as reading:
            document = self._begin(documents, found)
            for ordinal in range(point.next_ordinal, touched):
                document = self._next(documents, found, ordinal, known.get(ordinal))
                found.places.append(_place(document))
                found.load += 0 if ordinal in finished else len(as_read(document).data)
            # One more, because the format says how large the rest of a file is once it has opened it.
            extents = [each for each in (next(documents, None), document) if each is not None]
            reading.check_share()
        found.rest = self.sized(between(share.parts, found.places[-1], None))
        read = self._read_of_file(found.places[-1], extents)
        if found.rest and found.places[-1].at:
            found.rest[0] = found.rest[0]._replace(bytes=max(0, int(found.rest[0].bytes - read)))

    def _begin(self, documents: Iterator[Document], found: RankInput) -> Document | None:
        """Sets the place after the last document of the unbroken run, and returns that if it has to be read for it."""
        position, document = found.point.position, None
        if position is not None:
            found.places = [Place(position["before"]["files"], tuple(position["at"]))]
            return None
        for ordinal in range(found.point.next_ordinal):
            document = self._next(documents, found, ordinal, found.point.milestones.get(ordinal))
            found.places = [_place(document)]
        return document

    def _read_of_file(self, place: Place, documents: Sequence[Document]) -> float:
        """How many bytes of the file of a place come before it, as the file's extent tells; 0 if nothing tells it."""
        for document in documents:
            position = position_of(document)
            if position is not None and _place(document).part == place.part and position[2].file is not None:
                return position[2].file.inside(place.at)
        return 0.0

    def sized(self, parts: Sequence[Part]) -> list[Part]:
        """The parts, with the size of those that are whole files."""
        return [part if part.bytes else part._replace(bytes=self.inputs.size(self.index[part.name])) for part in parts]

    @cached_property
    def _listed(self) -> list[str]:
        """Once for all ranks: there may be a thousand, on an object store."""
        listed: list[str] = self.reader._list_files(0, 1) or []
        return listed

    def _documents(self, rank: int) -> Iterator[Document]:
        steps: list[PipelineStep] = copy.deepcopy(list(self.runner.before))
        if not steps[0].paths_file:
            listed = self._listed
            steps[0]._list_files = lambda rank, world_size: listed[rank::world_size] or None
        documents: Iterator[Document] | None = None
        for step in steps:
            documents = step(documents, rank, self.runner.tasks)
        return iter(documents or ())

    def _next(self, documents: Iterator[Document], found: RankInput, ordinal: int, known: str | None) -> Document:
        """The next document, which is the one that the rank has read before."""
        document = next(documents, None)
        if document is None:
            raise CheckpointMismatch(
                f"The input of rank {found.rank} ended after {ordinal} documents, but {found.folder} holds later ones: "
                "it has shrunk. Restore it."
            )
        if known and known != fingerprint(as_read(document).data):
            raise CheckpointMismatch(
                f"Document {ordinal} of rank {found.rank} is not the one that was finished there before (see "
                f"{found.folder}): the input, or a step before the runner, has changed. Restore it."
            )
        return document


def _place(document: Document) -> Place:
    position = position_of(document)
    if position is None:
        raise ConfigError("reshard: a step before the runner makes documents anew: where they were read is not known.")
    at = tuple(number & PLAIN_INTEGER for number in position[3])
    return Place(position[2].shared["before"]["files"], at)


# What moves -----------------------------------------------------------------------------------------------------------
#
# What ranks that there will be no more have not committed: their documents, and what is kept of these. A document that
# moves gets the next numbers of its new rank, right after what that one has touched. Its line of a journal, and its
# answers, are written anew with this number. What such a rank has committed stays in its folder. If chunks were
# committed out of order, their commits are written anew without the gaps.

_HERE = Path()
_START = Place(0, ())
_NUMBER = re.compile(rb'^\{"ordinal":[0-9]+')


@dataclass
class Moved:
    """What a rank gets of others.

    Attributes:
        parts: what it reads after what it has touched.
        files: what is staged for it.
        documents, finished, answers: how many of them.
    """

    rank: RankInput
    records_per_chunk: int
    parts: list[Part] = field(default_factory=list)
    documents: int = 0
    finished: int = 0
    answers: int = 0
    files: set[str] = field(default_factory=set)

    def chunk(self, ordinal: int) -> tuple[int, int]:
        """The index and the first ordinal of the chunk that a document belongs to."""
        index, first = self.rank.point.next_chunk, self.rank.point.next_ordinal
        for end in self.rank.point.chunk_ends(self.records_per_chunk):
            if ordinal < end:
                return index, first
            index, first = index + 1, end
        raise AssertionError


def runs_of(ordinals: list[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each unbroken run of ascending numbers."""
    for _, run in groupby(enumerate(ordinals), lambda one: one[1] - one[0]):
        numbers = [ordinal for _, ordinal in run]
        yield numbers[0], numbers[-1]


def move(source: RankInput, target: Moved, staging: Staging) -> None:
    """Stages what a rank has not committed as its target's."""
    open_ordinals = source.open_ordinals()
    numbers = {old: target.rank.next_ordinal + target.documents + count for count, old in enumerate(open_ordinals)}
    for first, last in runs_of(open_ordinals):
        target.parts += between(source.parts, source.place_after(first - 1), source.place_after(last))
    target.documents += len(numbers)
    _move_journals(source, target, numbers, staging)
    _move_answers(source, target, numbers, staging)


def _move_journals(source: RankInput, target: Moved, numbers: dict[int, int], staging: Staging) -> None:
    for index in source.point.journals:
        for _, finished in read_finished(journal_path(source.folder, index), {}):
            if finished is not None:
                moved = _renumbered(finished, numbers[finished.ordinal])
                chunk, _ = target.chunk(moved.ordinal)
                name = journal_path(rank_folder(_HERE, target.rank.rank), chunk).as_posix()
                path = staging.file(name)
                if name not in target.files:
                    target.files.add(name)
                    own = journal_path(target.rank.folder, chunk)
                    files.disk.replace(path, own.read_bytes() if own.exists() else b"")
                files.disk.append(path, moved.to_line())
                target.finished += 1


def _renumbered(finished: Finished, ordinal: int) -> Finished:
    document = finished.document
    if finished.outcome == "dead":  # a retry finds a letter by its number
        document = _NUMBER.sub(b'{"ordinal":%d' % ordinal, document)
    return replace(finished, ordinal=ordinal, document=document)


def _move_answers(source: RankInput, target: Moved, numbers: dict[int, int], staging: Staging) -> None:
    cached = sorted(source.point.cached)
    if not cached:
        return
    with closing(RequestCache(source.folder / CACHE)) as cache:
        rows = cache.answers_since(0, cached)
    moved = [
        row._replace(ordinal=numbers[row.ordinal], chunk_index=target.chunk(numbers[row.ordinal])[0]) for row in rows
    ]
    with closing(RequestCache(staging.file((rank_folder(_HERE, target.rank.rank) / CACHE).as_posix()))) as staged:
        staged.put(moved)
    target.answers += len(moved)


def close_gaps(source: RankInput, staging: Staging) -> list[str]:
    """Stages the commits of a rank without the documents that have moved. Returns the names of the staged files."""
    if not source.point.done:
        return []
    commits = read_commits(source.folder / COMMITS)
    last = list(commits.values())[-1]
    ordinal, text = 0, ""
    lines: dict[int, Commit] = {}
    for index in range(max(commits) + 1):
        commit = commits.get(index)
        if commit is None:
            commit = Commit(index, ordinal, DocumentCounts(), last_input=text)
        elif index >= source.point.next_chunk:  # what comes before it in the share is another part now
            commit = replace(commit, first_ordinal=ordinal, position=None)
        lines[index] = commit
        ordinal, text = commit.next_ordinal, commit.last_input
    ordered = [lines.pop(index) for index in commits] + [
        replace(commit, dead_letters_size=last.dead_letters_size, at=last.at, seconds=last.seconds)
        for commit in lines.values()
    ]
    name = f"{source.folder.name}/{COMMITS}"
    staging.write(name, b"".join(seal(commit.to_json()) for commit in ordered))
    return [name]


def kept_share(source: RankInput) -> list[Part]:
    """What a rank has committed, as parts of its input."""
    point = source.point
    parts = between(source.parts, _START, source.places[0]) if point.next_ordinal else []
    for first, last in runs_of(source.committed):
        parts += between(source.parts, source.place_after(first - 1), source.place_after(last))
    return parts
