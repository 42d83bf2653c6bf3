"""``migrate``: takes over an interrupted run of datatrove's own ``InferenceRunner`` (0.7 to 0.10), rank after rank.

Nothing of datatrove's is trusted that the input does not confirm, document by document (``migrated_rank``). All ranks
are read before anything is changed. A rank is taken over in one step, the rename of its new folder into place:

    crash                                           the next ``migrate``
    before anything of datatrove's is moved         makes the folder anew
    between that and the rename                     finds it in the folder "datatrove", and makes the rank's folder anew
    after the rename, before output is moved aside  finds the names in migrated.json, and moves the files
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from glob import iglob
from pathlib import Path

import orjson
from datatrove.executor.base import PipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.identity import RunClaim
from datatrove_ckpt.checkpoint.layout import (
    COMMITS,
    FROM_DATATROVE,
    MIGRATED,
    RUN,
    is_datatroves,
    is_rank,
    last_chunk_file,
    rank_folder,
)
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, CkptError, ConfigError
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.output.committed import list_output
from datatrove_ckpt.output.names import output_pattern, rank_and_chunk
from datatrove_ckpt.output.targets import remove_output
from datatrove_ckpt.preflight.migrated_rank import Rank, Theirs, build, judge
from datatrove_ckpt.preflight.run_plan import RunPlan

_YOUNG_SECONDS = 600.0
_NEW = "new"


@dataclass
class Findings:
    """What there is, and becomes of it. ``ranks`` are in ascending order; ``warnings`` say what to look at."""

    ranks: list[Rank] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        return {"ranks": [rank.to_json() for rank in self.ranks], "warnings": self.warnings}


@dataclass
class Migration:
    """What to take over, and how.

    Attributes:
        executor: datatrove's or ours; it is not run.
        folder: ``checkpoints_local_dir`` of datatrove's run; it may be the executor's.
        logging_dir: of datatrove's run; None: the executor's.
        lacking_are_dropped, any_text: see ``Theirs``.
        dry_run: change nothing.

    Raises:
        ConfigError: the pipeline has no runner that could go on with the run, or several.
    """

    executor: PipelineExecutor
    folder: Path
    logging_dir: str | None = None
    lacking_are_dropped: bool = False
    any_text: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        plan = RunPlan(self.executor)
        self._runner = plan.only_runner("migrate")
        self._logs = plan.logging_dir if self.logging_dir is None else get_datafolder(self.logging_dir)
        self._step = self._runner.step
        self._root = self._step.checkpoints_root.absolute()
        self._aside = self._root / FROM_DATATROVE
        # Then datatrove's folder becomes ours, and what an earlier call has moved aside belongs to it.
        self._is_in_place = self.folder.resolve() == self._root.resolve()

    def run(self) -> Findings:
        """Takes over the ranks of datatrove's run. What was done before is not done again.

        Raises:
            ConfigError: there is nothing to take over.
            CheckpointMismatch, OutputMismatch: the settings are not those of datatrove's run.
            CheckpointLocked: datatrove's run is still on, or another process takes it over.
        """
        with nullcontext() if self.dry_run else self._locked():
            findings, found = self._find()
            if not self.dry_run:
                for rank in findings.ranks:
                    if rank.done:
                        self._move_output(rank)
                for one in found:
                    self._take_over(*one)
        return findings

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One ``migrate`` at a time, in a folder for what it makes."""
        files.disk.make_dirs(self._aside, files.PRIVATE_FOLDER)
        lock = files.Lock(self._aside / "migrate.lock")
        try:
            yield
        except CkptError:
            files.disk.close(self._aside / _NEW)
            files.disk.remove_tree(self._aside / _NEW)
            raise
        finally:
            lock.release(remove=True)

    def _find(self) -> tuple[Findings, list[tuple[Rank, Theirs, RunClaim]]]:
        """Finds out what there is of all ranks, before anything is changed."""
        tasks, theirs = self._runner.tasks, self._theirs()
        if max(theirs) >= tasks:
            raise CheckpointMismatch(
                f"tasks: {tasks}, but {self.folder} holds rank {max(theirs)}: datatrove's run had more. Set "
                "tasks to what that run had."
            )
        findings = Findings()
        done = {rank for rank in range(tasks) if (rank_folder(self._root, rank) / RUN).exists()}
        new = {rank: one for rank, one in theirs.items() if rank not in done}
        self._check_still(new)
        stamps = [one.stamp() for one in new.values()]
        found: list[tuple[Rank, Theirs, RunClaim]] = []
        for number, one in theirs.items():
            rank = Rank(number, done=number in done)
            if rank.done:
                self._move_output(rank, dry_run=True)
            else:
                claim, folder = None, None if self.dry_run else self._new(number)
                if folder is not None:
                    files.disk.remove_tree(folder)  # what an interrupted call has left there
                    files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
                    claim = RunClaim(folder, self._runner.identity)
                asyncio.run(judge(rank, one, self._runner, folder))
                committed = {name for chunk in rank.chunks if chunk.finished for name in chunk.files}
                rank.aside = [name for names in one.outputs.values() for name in names if name not in committed]
                if claim is not None:
                    found.append((rank, one, claim))
            findings.ranks.append(rank)
        if stamps != [one.stamp() for one in new.values()]:  # reading may have taken hours
            raise CheckpointLocked(
                f"{self.folder} has changed while it was read: datatrove's run is still on. Stop it first, "
                "and run the same command again. Nothing was changed."
            )
        findings.warnings += self._check_still(new)
        rollouts = self._step.config.rollouts_per_document
        if 0 < (most := max((rank.most_results for rank in findings.ranks), default=0)) < rollouts:
            findings.warnings.append(
                f"rollouts_per_document is {rollouts}, but no kept document has more than {plural(most, 'result')}"
            )
        if missing := sorted(set(range(tasks)) - theirs.keys() - done):
            findings.warnings.append(
                f"no trace of {plural(len(missing), 'rank')} of {tasks} (the first one is rank {missing[0]}): the next "
                "run begins with the first document"
            )
        return findings, found

    def _theirs(self) -> dict[int, Theirs]:
        """The ranks of datatrove's run, in ascending order."""
        if not self.folder.is_dir():
            raise ConfigError(f"--from: {str(self.folder)!r} is not a folder.")
        bases = [self._aside, self.folder] if self._is_in_place else [self.folder]
        found: dict[int, Theirs] = {}
        for rank in sorted({rank for base in bases for rank in _ranks(base)}):
            folders = [rank_folder(base, rank) for base in bases]
            lasts = [last_chunk_file(base, rank) for base in bases]
            folder = next(filter(_is_theirs, folders), folders[-1] / "none")
            last = next(filter(is_datatroves, lasts), lasts[0].with_name("none"))
            outputs = self._outputs(rank)
            found[rank] = Theirs(folder, last, outputs, self._step, self.lacking_are_dropped, self.any_text)
        if not found:
            raise ConfigError(
                f"--from: {str(self.folder)!r} holds no checkpoint of datatrove's own InferenceRunner "
                "(last_chunk/00000.txt, 00000/chunk_00000.jsonl). Name the folder that was its checkpoints_local_dir."
            )
        return found

    def _outputs(self, rank: int) -> dict[int, list[str]]:
        """The rank's output files of each chunk, in alphabetical order."""
        writer = self._step.output_writer
        pattern = output_pattern(writer.output_filename.template, any_writer=True, rank=f"{rank:05d}")
        found: dict[int, list[str]] = {}
        for name in sorted(list_output(writer, {}, rank).sizes):
            if (match := pattern.fullmatch(name)) is not None:
                (retry, number), chunk = rank_and_chunk(match)
                if not retry and number == rank and ".." not in name.split("/"):
                    found.setdefault(chunk, []).append(name)
        return found

    def _check_still(self, theirs: Mapping[int, Theirs]) -> list[str]:
        """Whether datatrove's run is still on: it takes no lock.

        Returns:
            A warning if its newest file is young.

        Raises:
            CheckpointLocked: a process of this host has one of its files open to write to it.
        """
        output = self._step.output_writer.output_folder
        paths = [path for one in theirs.values() for path, _, _ in one.stamp()]
        if output.is_local():
            names = [name for one in theirs.values() for each in one.outputs.values() for name in each]
            paths += [Path(output.resolve_paths(name)) for name in names]
        if self._logs.is_local():
            paths += [Path(self._logs.resolve_paths(f"logs/task_{rank:05d}.log")) for rank in theirs]
        if (writing := _find_writing(paths)) is not None:
            pid, path = writing
            raise CheckpointLocked(
                f"Process {pid} has {path.absolute()} open: datatrove's run is still on. Stop it first, and run the "
                "same command again. Nothing was changed."
            )
        age = max(0.0, time.time() - max((path.stat().st_mtime for path in paths if path.exists()), default=0))
        young = (
            f"the newest file is {duration(age)} old. A process of another node, or of another user, cannot be seen: "
            "make sure that datatrove's run is stopped on all nodes"
        )
        return [young] if age < _YOUNG_SECONDS else []

    # changing

    def _new(self, rank: int) -> Path:
        return rank_folder(self._aside / _NEW, rank)

    def _take_over(self, rank: Rank, theirs: Theirs, claim: RunClaim) -> None:
        folder, aside, new = rank_folder(self._root, rank.rank), self._aside, self._new(rank.rank)
        build(new, claim, rank, theirs)
        last = last_chunk_file(self._root, rank.rank)
        if self._is_in_place:
            _move(folder, rank_folder(aside, rank.rank))
            if is_datatroves(last):
                _move(last, last_chunk_file(aside, rank.rank))
        files.disk.remove(last)
        files.disk.rename(new, folder)
        files.disk.sync_dir(self._root)
        self._move_output(rank)

    def _move_output(self, rank: Rank, dry_run: bool = False) -> None:
        """Moves output aside that will be made again, or whose documents are in other files. Again after a crash."""
        folder = rank_folder(self._root, rank.rank)
        path = folder / MIGRATED
        note: Json = orjson.loads(path.read_bytes()) if path.exists() else {"moved": True}
        if note["moved"]:
            return
        committed = {file.path for commit in read_commits(folder / COMMITS).values() for file in commit.files}
        rank.aside = [name for name in note["aside"] if name not in committed]
        if dry_run:
            return
        _set_aside(self._step.output_writer, rank.aside, self._aside / "output")
        files.disk.replace(path, orjson.dumps({**note, "moved": True}))


def _ranks(base: Path) -> Iterator[int]:
    for path in base.iterdir() if base.is_dir() else ():
        if is_rank(path.name) and _is_theirs(path):
            yield int(path.name)
    for path in (base / "last_chunk").glob("*.txt"):
        if is_rank(path.stem) and is_datatroves(path):
            yield int(path.stem)


def _is_theirs(folder: Path) -> bool:
    return folder.is_dir() and not (folder / RUN).exists() and any(folder.iterdir())


def _find_writing(paths: Iterable[Path]) -> tuple[int, Path] | None:
    """Another process of this host that has one of the files open to write to it. Those of other users do not show."""
    by_name: dict[str, list[Path]] = {}
    for path in paths:
        by_name.setdefault(path.name, []).append(path)
    for descriptor in map(Path, iglob("/proc/[0-9]*/fd/*")):  # noqa: PTH207 (Path.glob raises for one that ends)
        with suppress(OSError):
            same = [path for path in by_name.get(descriptor.readlink().name, ()) if descriptor.samefile(path)]
            if same and int(descriptor.parts[2]) != os.getpid():
                flags = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text()
                if int(re.findall(r"^flags:\s*(\d+)", flags, re.MULTILINE)[0], 8) & os.O_ACCMODE:
                    return int(descriptor.parts[2]), same[0]
    return None


def _move(source: Path, target: Path) -> None:
    """Renames what exists, once."""
    if source.exists() and not target.exists():
        files.disk.make_dirs(target.parent, files.PRIVATE_FOLDER)
        files.disk.rename(source, target)
        files.disk.sync_dir(target.parent)
        files.disk.sync_dir(source.parent)


def _set_aside(writer: DiskWriter, names: Sequence[str], folder: Path) -> None:
    """Copies output files into ``folder``, and removes them. Those that are gone were moved before."""
    for name in filter(writer.output_folder.exists, names):
        target = folder / name
        new = target.with_name(f"{target.name}.new")
        files.disk.make_dirs(target.parent, files.PRIVATE_FOLDER)
        with writer.output_folder.open(name, "rb") as source, new.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        files.disk.sync(new)
        files.disk.rename(new, target)
        files.disk.sync_dir(target.parent)
    remove_output(writer.output_folder, names)
    if writer.output_folder.is_local():
        for parent in {Path(writer.output_folder.resolve_paths(name)).parent for name in names}:
            files.disk.sync_dir(parent)
