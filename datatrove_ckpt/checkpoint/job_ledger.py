"""JobLedger: what a job has besides the files of each rank, read once: its ranks, its retries, and ``shares.json``.

People restore folders from older copies, and delete them. What one task has not committed may be another task's since
``reshard`` has dealt the input out, so one folder of before ``reshard`` beside ``shares.json`` of after it would lose
documents, or write them twice.

    found                                             because
    a reshard that was interrupted                    the ranks' files are half those of before
    a rank is newer than shares.json                  nobody knows what each rank reads
    a rank is older than shares.json                  what it had not committed then may be other ranks' now
    another number of tasks starts                    nobody would read the shares of the others
    a rank that runs no more has no folder            no task reads its documents again, and nothing shows their output
    a rank has no folder, and something names it      its documents would be processed again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from datatrove_ckpt.checkpoint.fields import RESHARDS
from datatrove_ckpt.checkpoint.foreign import reshard_command
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import RUN, SHARES, rank_folder, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.checkpoint.shares import Shares, read_shares
from datatrove_ckpt.errors import CheckpointError, CheckpointMismatch

_BY_DATATROVE = Shares(0, 0, "", {})


@dataclass(frozen=True)
class JobLedger:
    """The parts of a job.

    Attributes:
        root: ``checkpoints_local_dir``.
        ranks: those that are there, each with how often the input was dealt out anew, as its ``run.json`` says; None:
            it does not say it.
        tasks: number of ranks that the job has; 0: not known.
        shares: of ``shares.json``; those of round 0 if datatrove deals out the input.
        refusal: why no rank may start: a reshard that was interrupted, or damage.
    """

    root: Path
    ranks: Mapping[int, int | None]
    tasks: int = 0
    shares: Shares = _BY_DATATROVE
    refusal: CheckpointError | None = None

    @classmethod
    def read(cls, root: Path, tasks: int = 0, ranks: Mapping[int, int | None] | None = None) -> JobLedger:
        """Damage is in the ledger, and no error.

        Args:
            ranks: as the attribute, of a caller who has read them; None: those that have a ``run.json``.
        """
        if ranks is None:
            numbers = rank_numbers(root) if root.is_dir() else []
            ranks = {rank: _reshards(root, rank) for rank in numbers if (rank_folder(root, rank) / RUN).exists()}
        shares, refusal = _BY_DATATROVE, None
        try:
            shares = read_shares(root) or shares
            refuse_half_resharded(root)
        except CheckpointError as error:
            refusal = error
        return cls(root, ranks, tasks, shares, refusal)

    @property
    def missing(self) -> list[int]:
        """The ranks that are not there: not started, as far as nothing shows that they were removed."""
        return [rank for rank in range(self.tasks) if rank not in self.ranks]

    @property
    def removed(self) -> list[int]:
        """Of the missing ranks, those that the file for their last chunk names, or a retry of their dead letters."""
        folders = (self.root / "last_chunk", *retry_folders(self.root))
        named = {path.stem for folder in folders for path in folder.glob("*")}
        missing = {rank: rank_folder(self.root, rank) for rank in self.missing}
        # Looked at again: a rank may have started since its folder was looked for, and have finished a chunk.
        return [rank for rank, folder in missing.items() if folder.name in named and not (folder / RUN).exists()]

    @property
    def not_started(self) -> list[int]:
        """The other missing ranks."""
        return sorted({*self.missing}.difference(self.removed))

    @property
    def foreign(self) -> list[int]:
        """The ranks that are there and do not belong to the job, if the file tells that says which are retired."""
        if self.refusal is not None or next(self.newer(), None) is not None:
            return []
        return [rank for rank in self.ranks if self.tasks and rank >= self.tasks and rank not in self.shares.retired]

    def check(self, *wrong: Iterator[tuple[int, str]]) -> None:
        """
        Args:
            wrong: what must not be, such as ``newer()``.

        Raises:
            CheckpointMismatch: a reshard was interrupted, or something of that is; the message names the first one.
            CheckpointCorrupt: a file of ``reshard`` cannot be read.
        """
        if self.refusal is not None:
            raise self.refusal
        for _, problem in chain(*wrong):
            raise CheckpointMismatch(problem)

    def problems(self) -> Iterator[tuple[int | None, str]]:
        """All of that, and the ranks that were removed. Each with its rank; None: that of the job."""
        if self.refusal is not None:
            yield None, str(self.refusal)
        elif newer := next(self.newer(), None):
            yield None, newer[1]  # of one as of all
        else:
            yield from (*self.lost(), *self.older())
        for rank in self.removed:
            folder = rank_folder(self.root, rank)
            yield (
                rank,
                f"{folder} is missing: its checkpoint was removed. Bring it back. If it is gone for good, have its "
                f"documents processed, and paid, again: move the output files of task {rank} elsewhere, delete "
                f"completions/{rank:05d} in logging_dir, then run.",
            )

    def newer(self) -> Iterator[tuple[int, str]]:
        """The ranks that have read a share of ``shares.json``, which is missing or older; with a message for each."""
        number = self.shares.round
        for rank, kept in self.ranks.items():
            if (kept or 0) > number:
                yield (
                    rank,
                    f"{rank_folder(self.root, rank) / RUN} says that the input was dealt out anew by `datatrove-ckpt "
                    f"reshard` (number {kept}), but {self.root / SHARES} "
                    f"{f'is older (number {number})' if number else 'is missing'}, so it is not known what each rank "
                    "reads. Bring the file back.",
                )

    def older(self) -> Iterator[tuple[int, str]]:
        """The ranks that were restored from a copy of before ``reshard``, with a message for each."""
        tasks, number = self.shares.tasks, self.shares.round
        for rank, kept in self.ranks.items():
            if kept is not None and kept < number:
                again = f"{reshard_command(tasks)}, then run" if rank >= tasks else "run"
                yield (
                    rank,
                    f"{rank_folder(self.root, rank)} is of before `datatrove-ckpt reshard` dealt the input out anew "
                    f"(number {number}; this folder has {f'number {kept}' if kept else 'none'}): it was restored from "
                    "an older copy. What was not committed then may be other tasks' now, so documents would be lost "
                    "or there twice. Bring the folder back as it was after reshard. If there is no such copy, move it "
                    f"and the output files of task {rank} elsewhere, then {again}: its documents are processed, and "
                    "paid, again.",
                )

    def lost(self) -> Iterator[tuple[int, str]]:
        """The ranks that run no more, have read something, and have no folder; with a message for each."""
        for rank, share in sorted(self.shares.retired.items()):
            folder = rank_folder(self.root, rank)
            if share and not (folder / RUN).exists():
                yield (
                    rank,
                    f"{folder} is missing: it holds the commits of task {rank}, which `datatrove-ckpt reshard` has "
                    f"left what it had finished. The {self.shares.tasks} tasks of now do not read its documents again, "
                    "so nothing would show that they are in the output. Bring the folder back, as it was after "
                    "reshard. If it is gone for good, have its documents processed, and paid, again: move the output "
                    f"files of task {rank} elsewhere, then {reshard_command(self.shares.tasks)}, then run.",
                )

    def refuse_other_number(self) -> None:
        """
        Raises:
            CheckpointMismatch: ``shares.json`` deals the input out to another number of tasks.
        """
        if self.shares.round and self.shares.tasks != self.tasks:
            raise CheckpointMismatch(
                f"{self.root / SHARES} deals the input out to another number of tasks than this run has:\n"
                f"  tasks: {self.shares.tasks} -> {self.tasks}\n"
                f"Go on with {self.shares.tasks} tasks (--executor.tasks={self.shares.tasks}). If the folder was "
                "restored from a copy of before `datatrove-ckpt reshard`, it must be the whole folder, without this "
                "file."
            )


def count_reshards(root: Path, rank: int, tasks: int) -> int:
    """How many times the input was dealt out anew, for a rank that starts; 0 if there is no ``shares.json``.

    Args:
        tasks: number of tasks of the run that starts it.

    Raises:
        CheckpointCorrupt: it cannot be read.
        CheckpointMismatch: ranks have read shares of it, and it is missing or older; or this rank is older; or it is
            for another number of tasks.
    """
    ranks = {one: _reshards(root, one) for one in {*rank_numbers(root)[:1], rank}}  # any rank that was there tells
    job = JobLedger.read(root, tasks, ranks)
    job.check(job.newer(), ((number, problem) for number, problem in job.older() if number == rank))
    job.refuse_other_number()
    return job.shares.round


def retired_ranks(root: Path) -> set[int]:
    """The ranks of an earlier, larger number of tasks. Their folders hold what they had committed, and are finished.

    Raises:
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    return {*(read_shares(root) or _BY_DATATROVE).retired}


def _reshards(root: Path, rank: int) -> int | None:
    """What a rank's ``run.json`` says; None if there is none, or it cannot be read."""
    path = rank_folder(root, rank) / RUN
    if path.exists():
        with suppress(CheckpointError):  # who reads the rest of it says what is wrong with it
            return int(read_run(path).get(RESHARDS, 0))
    return None
