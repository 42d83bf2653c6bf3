"""``migrate``: takes over a run of datatrove's own runner, rank after rank. A dry run only finds out what there is."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from datatrove.io import get_datafolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import (
    COMMITS,
    FROM_DATATROVE,
    MIGRATED,
    RUN,
    is_datatroves,
    last_chunk_file,
    rank_folder,
)
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, ConfigError
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.listing import list_output
from datatrove_ckpt.output.names import output_pattern, rank_and_chunk
from datatrove_ckpt.output.removal import remove_files
from datatrove_ckpt.preflight.migration.building import build
from datatrove_ckpt.preflight.migration.findings import Findings, Rank, Shape
from datatrove_ckpt.preflight.migration.holders import find_holder, open_files, warn_of_young
from datatrove_ckpt.preflight.migration.judgement import Files, Options, judge
from datatrove_ckpt.preflight.migration.known import (
    Known,
    check_known,
    check_shape,
    read_known,
)
from datatrove_ckpt.preflight.migration.rank_input import RankInput
from datatrove_ckpt.preflight.migration.theirs import Stamp, TheirRank, find_ranks, is_in_place
from datatrove_ckpt.runner import InferenceRunner

_NEW = "new"
_OUTPUT = "output"
_LOCK = "migrate.lock"


@dataclass(frozen=True)
class Migration:
    """What to take over, and how.

    Attributes:
        executor: datatrove's or ours; it is not run.
        folder: ``checkpoints_local_dir`` of datatrove's run; it may be the executor's.
        logging_dir: of datatrove's run; None: the executor's.
        lacking_are_dropped, any_text: see ``Options``.
    """

    executor: Any
    folder: Path
    logging_dir: str | None = None
    lacking_are_dropped: bool = False
    any_text: bool = False


def migrate(migration: Migration, dry_run: bool = False) -> Findings:
    """Takes over the ranks of datatrove's run. What was done before is not done again.

    Args:
        dry_run: change nothing.

    Raises:
        ConfigError: there is nothing to take over, or no runner that could go on with it.
        CheckpointMismatch, OutputMismatch: the settings are not those of datatrove's run.
        CheckpointLocked: datatrove's run is still on, or another process takes it over.
    """
    index = _runner_of(migration.executor)
    step: InferenceRunner = migration.executor.pipeline[index]
    root = step.checkpoints_root.absolute()
    found = find_ranks(migration.folder, root)
    known = read_known(migration.executor, migration.logging_dir, step)
    _check_tasks(migration, found, known)
    options = Options(migration.lacking_are_dropped, migration.any_text)
    job = _Job(migration, index, step, root, options, known, dry_run)
    findings = Findings([], migration.executor.world_size, known.why_not_same, known.other)
    with nullcontext() if dry_run else _locked(root):
        job.find(found, findings)
        if not dry_run:
            job.take_over(findings)
    return findings


def _runner_of(executor: Any) -> int:
    found = [
        index
        for index, step in enumerate(executor.pipeline)
        if isinstance(step, InferenceRunner) and step.checkpoints_local_dir is not None
    ]
    if len(found) != 1:
        raise ConfigError(
            f"migrate: the pipeline has {len(found)} InferenceRunners with checkpoints_local_dir. It needs one, which "
            "goes on with the run of datatrove's."
        )
    return found[0]


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One ``migrate`` at a time."""
    folder = root / FROM_DATATROVE
    files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
    lock = files.Lock(folder / _LOCK)
    try:
        yield
    finally:
        lock.release(remove=True)


# what is known of datatrove's run ------------------------------------------------------------------------------------


def _check_tasks(migration: Migration, found: dict[int, TheirRank], known: Known) -> None:
    tasks = migration.executor.world_size
    if max(found) >= tasks:
        raise CheckpointMismatch(
            f"tasks: {tasks}, but {migration.folder} holds rank {max(found)}: datatrove's run had more. Set tasks to "
            "what that run had."
        )
    check_known(known, migration.executor.pipeline[_runner_of(migration.executor)], tasks)


# one rank ------------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A rank that can be taken over. ``stamp``: of its files before they were read."""

    rank: Rank
    theirs: TheirRank
    stamp: Stamp
    files: Files
    read: RankInput


@dataclass(frozen=True)
class _Job:
    migration: Migration
    index: int
    step: InferenceRunner
    root: Path
    options: Options
    known: Known
    dry_run: bool
    found: list[_Found] = field(default_factory=list)

    @property
    def _writer(self) -> DiskWriter:
        return self.step.output_writer

    def find(self, theirs: dict[int, TheirRank], findings: Findings) -> None:
        """Finds out what there is of all ranks, before anything is changed.

        Raises:
            CheckpointLocked: datatrove's run is still on.
            CheckpointMismatch, OutputMismatch: the settings are not those of datatrove's run.
        """
        new = {number: one for number, one in theirs.items() if not self._is_done(number)}
        self._check_not_open([path for one in new.values() for path in open_files(one.folder)], new)
        for number, one in theirs.items():
            findings.ranks.append(self._judge(one) if number in new else Rank(number, done=True))
        shape = Shape.sum(one.rank.shape for one in self.found)
        findings.warnings += filter(None, [check_shape(self.known, shape, self.step)])
        self._check_still(findings)
        for rank in findings.ranks:
            if rank.done:
                self._move_output(rank_folder(self.root, rank.rank), rank, dry_run=True)
        for number in set(range(self.migration.executor.world_size)) - theirs.keys():
            if not self._is_done(number):
                outputs = self._outputs(number).values()
                findings.missing[number] = [name for names in outputs for name in names]

    def take_over(self, findings: Findings) -> None:
        """Changes what ``find`` has found."""
        for rank in findings.ranks:
            if rank.done:
                self._move_output(rank_folder(self.root, rank.rank), rank)
        for one in self.found:
            one.rank.made_with = findings.made_with(one.rank.kept)
            self._take_over(one.rank, one.files, one.read)

    def _is_done(self, rank: int) -> bool:
        return (rank_folder(self.root, rank) / RUN).exists()

    def _judge(self, theirs: TheirRank) -> Rank:
        rank, stamp = Rank(theirs.rank), theirs.stamp()
        outputs = self._outputs(theirs.rank)
        read = RankInput(self.migration.executor, self.index, theirs.rank, writes=not self.dry_run)
        their_files = Files(theirs, self._writer, outputs, self.step.metadata_key)
        asyncio.run(judge(rank, their_files, read, self.step.records_per_chunk, self.options))
        committed = {name for chunk in rank.chunks if chunk.finished for name in chunk.files}
        rank.aside = [name for names in outputs.values() for name in names if name not in committed]
        self.found.append(_Found(rank, theirs, stamp, their_files, read))
        return rank

    # whether datatrove's run is still on

    def _check_still(self, findings: Findings) -> None:
        """Looks again at all that was read: reading it may have taken hours."""
        for one in self.found:
            if one.theirs.stamp() != one.stamp:
                raise CheckpointLocked(
                    f"{one.theirs.folder} has changed while it was read: datatrove's run is still on. Stop it first, "
                    "and run the same command again. Nothing was changed."
                )
        paths = [path for one in self.found for path in (*open_files(one.theirs.folder), *self._local(one))]
        self._check_not_open(paths, [one.rank.rank for one in self.found])
        findings.warnings += filter(None, [warn_of_young([*paths, *(one.theirs.last_chunk for one in self.found)])])

    def _local(self, found: _Found) -> list[Path]:
        """The rank's output files, if they are files."""
        folder = self._writer.output_folder
        names = [name for names in found.files.outputs.values() for name in names] if folder.is_local() else []
        return [Path(folder.resolve_paths(name)) for name in names]

    def _check_not_open(self, paths: list[Path], ranks: Iterable[int]) -> None:
        migration = self.migration
        logs = get_datafolder(migration.logging_dir) if migration.logging_dir else migration.executor.logging_dir
        local = [Path(logs.resolve_paths(f"logs/task_{rank:05d}.log")) for rank in ranks] if logs.is_local() else []
        if (holder := find_holder([*paths, *local])) is not None:
            raise CheckpointLocked(
                f"Process {holder.pid} ({holder.command}) has {holder.path} open: datatrove's run is still on. Stop it "
                "first, and run the same command again. Nothing was changed."
            )

    # changing

    def _outputs(self, rank: int) -> dict[int, list[str]]:
        """The rank's output files of each chunk, in alphabetical order."""
        pattern = output_pattern(self._writer.output_filename.template, any_writer=True, rank=f"{rank:05d}")
        found: dict[int, list[str]] = {}
        for name in sorted(list_output(self._writer, (), rank).sizes):
            if (match := pattern.fullmatch(name)) is not None:
                (retry, number), chunk = rank_and_chunk(match)
                if not retry and number == rank and ".." not in name.split("/"):
                    found.setdefault(chunk, []).append(name)
        return found

    def _take_over(self, rank: Rank, their_files: Files, read: RankInput) -> None:
        folder, aside = rank_folder(self.root, rank.rank), self.root / FROM_DATATROVE
        new = rank_folder(aside / _NEW, rank.rank)
        identity = self.step.identity(self.migration.executor.world_size)
        asyncio.run(build(new, rank, their_files, read, identity, self.options.any_text))
        last = last_chunk_file(self.root, rank.rank)
        if is_in_place(self.migration.folder, self.root):
            _move(folder, rank_folder(aside, rank.rank))
            if is_datatroves(last):
                _move(last, last_chunk_file(aside, rank.rank))
        files.disk.remove(last)
        files.disk.rename(new, folder)
        files.disk.sync_dir(self.root)
        self._move_output(folder, rank)

    def _move_output(self, folder: Path, rank: Rank, dry_run: bool = False) -> None:
        """Moves output aside that will be made again, or whose documents are in other files. Again after a crash."""
        path = folder / MIGRATED
        note: Json = orjson.loads(path.read_bytes()) if path.exists() else {"moved": True}
        if note["moved"]:
            return
        committed = {file.path for commit in read_commits(folder / COMMITS).values() for file in commit.files}
        rank.aside = [name for name in note["aside"] if name not in committed]
        if dry_run:
            return
        for name in rank.aside:
            _set_aside(self._writer, name, self.root / FROM_DATATROVE / _OUTPUT / name)
        if (hub := HubFolder.of(self._writer.output_folder)) is not None:
            remove_files(hub, rank.aside)
        files.disk.replace(path, orjson.dumps({**note, "moved": True}))


def _move(source: Path, target: Path) -> None:
    """Renames what exists, once."""
    if source.exists() and not target.exists():
        files.disk.make_dirs(target.parent, files.PRIVATE_FOLDER)
        files.disk.rename(source, target)
        files.disk.sync_dir(target.parent)
        files.disk.sync_dir(source.parent)


def _set_aside(writer: DiskWriter, name: str, target: Path) -> None:
    """Copies an output file to ``target``, and removes it. One that is gone was moved before."""
    folder = writer.output_folder
    if not folder.exists(name):
        return
    new = target.with_name(target.name + ".new")
    files.disk.make_dirs(target.parent, files.PRIVATE_FOLDER)
    with folder.open(name, "rb") as source, new.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    files.disk.sync(new)
    files.disk.rename(new, target)
    files.disk.sync_dir(target.parent)
    if folder.is_local():
        path = Path(folder.resolve_paths(name))
        files.disk.remove(path)
        files.disk.sync_dir(path.parent)
    elif HubFolder.of(folder) is None:
        folder.rm(name)
