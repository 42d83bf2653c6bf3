"""``reshard``: another number of tasks for a run that has begun, without losing or repeating anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from datatrove.data import Document
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.checkpoint.job import JobLedger, name_tasks, tasks_of
from datatrove_ckpt.checkpoint.layout import (
    RESHARD_PLAN,
    SHARD,
    SHARES,
    is_finished,
    last_chunk_file,
    rank_folder,
    rank_numbers,
    retry_folders,
)
from datatrove_ckpt.checkpoint.lines import sealed_shard
from datatrove_ckpt.checkpoint.resharding import RankLocks, ReshardPlan, Staging, carry_out
from datatrove_ckpt.checkpoint.shares import Part, Shares, names_hash
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.generation.prefetch import stateful_steps
from datatrove_ckpt.generation.run_identity import code_of
from datatrove_ckpt.mirror.changing import restore_all, upload_ranks
from datatrove_ckpt.mirror.reading import new_mirror
from datatrove_ckpt.output.committed import OutputCheck, RankCommits
from datatrove_ckpt.output.owner import Homes
from datatrove_ckpt.output.targets import remove_output
from datatrove_ckpt.output.writers import check_rank_in_template
from datatrove_ckpt.preflight.before_run import check_job, check_output_of_run
from datatrove_ckpt.preflight.input_checks import check_inputs_unchanged
from datatrove_ckpt.preflight.reshard.ranks import Moved, RankInput, Scanner, close_gaps, kept_share, move
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan, checkpoints_seen
from datatrove_ckpt.process.open_files import allow_open_files
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.readers.inputs import divide, joined, options_of, sample_files
from datatrove_ckpt.readers.shard import ReaderRecord, ShardRecord, describe_pipeline
from datatrove_ckpt.runner import InferenceRunner


@dataclass
class Resharded:
    """What was done, or would be.

    Attributes:
        before, after: numbers of tasks.
        left: bytes of input that each task of before had left.
        dealt: bytes of input that each task of now has left.
        cuts: how many files were divided.
        documents: that are committed, or finished in a journal.
        answers: of unfinished documents.
        moved_documents, moved_answers: of these, how many belong to another task now.
        lost_answers: answers that will be requested again, because their request has a seed made of the document's
            number.
        resumed: an interrupted reshard was carried out, nothing else.
        mirror: the new checkpoints_remote_dir, if the run has no other checkpoint.
    """

    before: int
    after: int
    left: list[float] = field(default_factory=list)
    dealt: list[float] = field(default_factory=list)
    cuts: int = 0
    documents: int = 0
    answers: int = 0
    moved_documents: int = 0
    moved_answers: int = 0
    lost_answers: int = 0
    resumed: bool = False
    mirror: str | None = None


def reshard(executor: PipelineExecutor, tasks: int, dry_run: bool = False) -> Resharded:
    """Deals what is left of a run out to another number of tasks.

    Of Hugging Face Jobs, that is done in a copy of the mirror, which becomes another mirror; the old one stays.

    Args:
        executor: any datatrove executor with the run's pipeline, and its old or new number of tasks. Nothing is run.
        tasks: the new number of tasks.
        dry_run: change nothing, apart from what a start of the ranks would complete, too.

    Raises:
        ConfigError: the pipeline cannot be dealt out anew; the message says why.
        CheckpointLocked: a rank is running.
        CkptError: the checkpoint, the output or the input is not as it should be; see ``check_before_run``.
        OSError: the input cannot be listed.
    """
    plan = RunPlan(executor)
    step = plan.only_runner("reshard").step
    if not plan.as_jobs or (url := step.checkpoints_remote_dir) is None:
        return _reshard(plan, tasks, dry_run)
    with log_disabled("datatrove_ckpt.mirror"), checkpoints_seen(executor, True, restore_all):
        step.checkpoints_remote_dir = None
        homes = Homes(step.checkpoints_root, url)
        homes.keep(homes.begun())
        try:
            found = _reshard(plan, tasks, dry_run)
            if not dry_run:
                found.mirror = new_mirror(url)
                upload_ranks(found.mirror, step.checkpoints_root)
        finally:
            step.checkpoints_remote_dir = url
    return found


def _reshard(plan: RunPlan, tasks: int, dry_run: bool) -> Resharded:
    if begun := tasks_of(plan.only_runner("reshard").step.checkpoints_root):
        plan.tasks, plan.local_ranks = begun, range(begun)
    planned = _runner(plan, tasks)
    runner = planned.step
    root = runner.checkpoints_root
    if not root.is_dir() or not rank_numbers(root):
        raise ConfigError(f"reshard: {root} holds no checkpoint. Nothing has started yet: set tasks to {tasks}.")
    if ReshardPlan.read(root) is None:
        check_all_here(root, plan.tasks)
        check_begun(root)
        check_job(plan, dry_run=True, deals_out=True)
        check_inputs_unchanged(plan)
        check_output_of_run(plan, runner.output_writer, root, first_starts=range(plan.tasks))
    finished = [rank for rank in rank_numbers(root) if is_finished(rank_folder(root, rank))]  # a lock would hide it
    ranks = sorted({*range(plan.tasks), *rank_numbers(root)})
    allow_open_files(len(ranks))  # each lock is one
    locks = RankLocks(root, ranks)
    try:
        if (half := ReshardPlan.read(root)) is not None:
            return _resume(plan, runner, half, locks, tasks, dry_run)
        return _Reshard(plan, planned, root, tasks, finished).run(locks, dry_run)
    finally:
        locks.release()


def _resume(
    plan: RunPlan, runner: InferenceRunner, begun: ReshardPlan, locks: RankLocks, tasks: int, dry_run: bool
) -> Resharded:
    if not dry_run:
        _carry_out(plan, runner, begun)
        locks.plan = begun
    if begun.tasks != tasks:
        raise CheckpointMismatch(
            f"An interrupted reshard to {begun.tasks} tasks {'comes' if dry_run else 'came'} first"
            f"{'' if dry_run else ', and is done now'}. Run the same command again for {tasks} tasks."
        )
    return Resharded(begun.before, begun.tasks, resumed=True)


def _carry_out(plan: RunPlan, runner: InferenceRunner, begun: ReshardPlan) -> None:
    carry_out(runner.checkpoints_root, begun, plan.forget, partial(remove_output, runner.output_writer.output_folder))


# what can be dealt out ---------------------------------------------------------------------------------------------


def _runner(plan: RunPlan, tasks: int) -> RunnerPlan:
    """The runner whose input is dealt out.

    Raises:
        ConfigError: its documents do not stand for themselves.
    """
    runner = plan.only_runner("reshard")
    if why := _why_not(runner.before, runner.step, plan.tasks):
        raise ConfigError(f"reshard: {why}")
    check_rank_in_template(runner.step.output_writer, tasks)
    return runner


def _why_not(steps: Sequence[PipelineStep], runner: InferenceRunner, tasks: int) -> str:
    """Why what is left cannot be dealt out, and what to do; "" if it can."""
    readers = [step for step in steps if isinstance(step, SeekingReader)]
    if len(readers) != 1 or steps[0] is not readers[0]:
        return "the pipeline must begin with one reader of datatrove_ckpt.readers, and have no other."
    reader = readers[0]
    if not isinstance(reader, JsonlReader | ParquetReader | IpcReader):
        return f"the rows of {type(reader).__name__} are numbered by task, so their ids would change."
    if reader.limit != -1 or reader.skip:
        return "limit and skip of the reader count documents of each task, so another number of tasks reads others."
    if runner.checkpoints_remote_dir is not None:
        return (
            "the mirror would still hold the old number of tasks. Set checkpoints_remote_dir to null for this command "
            "and from then on, or to another, empty place."
        )
    if runner.seek is False:
        return "seek=False says that documents before the runner do not stand for themselves."
    documents: Iterable[Document] | None = None
    for step in steps:
        if not isinstance(step, PipelineStep) and not callable(step):
            return f"{step!r} is a list of documents, which every task reads."
        documents = step(documents, 0, tasks)
    stateful = [] if runner.seek else stateful_steps(documents or ())
    if stateful:
        return (
            f"{', '.join(stateful)} may keep something from one document to the next, so documents do not stand for "
            "themselves. If that is not so, set seek: true of the runner."
        )
    return ""


# dealing out -------------------------------------------------------------------------------------------------------


class _Reshard:
    """One change of the number of tasks. The ranks' locks are held."""

    def __init__(self, plan: RunPlan, runner: RunnerPlan, root: Path, tasks: int, finished: Collection[int]) -> None:
        self._plan, self._runner, self._root, self._tasks = plan, runner.step, root, tasks
        self._scanner = scanner = Scanner(root, runner, finished)
        self._reader, self._inputs, self._index = scanner.reader, scanner.inputs, scanner.index
        self._round = scanner.shares.round + 1
        self._before = plan.tasks
        self._report = Resharded(plan.tasks, tasks)

    def run(self, locks: RankLocks, dry_run: bool) -> Resharded:
        with log_disabled("datatrove_ckpt.readers"):
            numbers = sorted({*range(self._before), *rank_numbers(self._root), *self._scanner.shares.ranks})
            ranks = {rank: self._scanner.look(rank) for rank in numbers}
        if all(each.is_done or not (each.rest or each.has_started) for each in ranks.values()):
            raise ConfigError(
                f"reshard: nothing is left to deal out: the run in {self._root} is finished. Go on with "
                f"{plural(self._before, 'task')}."
            )
        staging = Staging(self._root)
        try:
            plan = self._stage(ranks, staging)
            if dry_run:
                return self._report
            staging.commit(plan)
        finally:
            if not (self._root / RESHARD_PLAN).exists():
                staging.abandon()
        locks.plan = plan
        _carry_out(self._plan, self._runner, plan)
        return self._report

    def _stage(self, ranks: dict[int, RankInput], staging: Staging) -> ReshardPlan:
        plan, report = ReshardPlan(self._before, self._tasks, self._round), self._report
        own = {task: ranks.get(task) or self._scanner.look(task) for task in range(self._tasks)}
        report.left = [each.load + sum(part.bytes for part in each.rest) for _, each in sorted(ranks.items())]
        moved = self._move(ranks, own, plan, staging)
        loads = [own[task].load for task in own]
        for task, got in moved.items():
            loads[task] += sum(ranks[rank].load for rank in ranks if self._target.get(rank) == task)
            if got.answers:
                plan.answers[task] = own[task].next_ordinal
        rest = (part for each in ranks.values() for part in each.rest)
        parts = sorted(rest, key=lambda part: (self._index[part.name], part.begin))
        dealt = deal(parts, loads, self._cut, self._is_divisible)
        report.dealt = [load + sum(part.bytes for part in mine) for load, mine in zip(loads, dealt, strict=True)]
        shares = {rank: kept_share(each) for rank, each in ranks.items() if rank >= self._tasks and not each.is_done}
        shares |= {rank: each.parts for rank, each in ranks.items() if rank >= self._tasks and each.is_done}
        for rank in plan.retired:
            if ranks[rank].has_started:
                self._record_input(ranks[rank], shares[rank], plan, staging)
        for task, each in own.items():
            mine = [*(moved[task].parts if task in moved else []), *dealt[task]]
            shares[task] = joined([*each.touched(self._scanner.sized), *mine])
            if each.is_done and not mine:
                plan.done.append(task)
        known = {rank: [self._known(part) for part in mine] for rank, mine in sorted(shares.items())}
        data = Shares(self._round, self._tasks, names_hash(self._inputs.names), known).to_bytes()
        Shares.from_bytes(data, self._root / SHARES)  # whatever is wrong with it, nothing has changed yet
        staging.write(SHARES, data)
        for each in ranks.values():
            report.documents += each.point.next_ordinal if each.is_done else each.point.finished.read
            report.answers += each.point.answers
        return plan

    def _move(
        self, ranks: dict[int, RankInput], own: dict[int, RankInput], plan: ReshardPlan, staging: Staging
    ) -> dict[int, Moved]:
        """Gives each unfinished rank that there will be no more to the task with the least work of its own."""
        moved: dict[int, Moved] = {}
        loads = {task: each.load for task, each in own.items()}
        self._target: dict[int, int] = {}
        for rank, each in ranks.items():
            if rank < self._tasks or each.is_done:
                continue
            plan.retired.append(rank)
            if not each.open_ordinals():
                continue
            refuse_retried(self._root, rank, self._before)
            task = self._target[rank] = min(loads, key=lambda task: (loads[task], task))
            loads[task] += each.load + 1
            target = moved.setdefault(task, Moved(own[task], self._runner.records_per_chunk))
            move(each, target, staging)
            plan.moved += close_gaps(each, staging)
            if not own[task].has_started:
                plan.started[task] = rank
        # Files that were published before a kill: these documents go to other tasks, and to other files. Of a mirror,
        # any chunk may be newer than its last upload.
        older = [rank for rank, each in ranks.items() if not each.is_done] if self._plan.as_jobs else []
        open_ones = [rank for rank in plan.retired if ranks[rank].point.journals]
        if commits := [RankCommits(self._root, rank, []) for rank in older or open_ones]:
            check = OutputCheck(self._runner.output_writer, self._root)
            found = check.look(check.by_name(commits))
            plan.unfinished = [name for each in commits for name in check.unfinished_files(each, found, bool(older))]
        plan.moved += sorted(name for each in moved.values() for name in each.files)
        self._report.moved_documents = sum(each.finished for each in moved.values())
        self._report.moved_answers = sum(each.answers for each in moved.values())
        if any(model.seed is not None for model in self._runner.models.values()):
            self._report.lost_answers = self._report.moved_answers
        return moved

    def _record_input(self, rank: RankInput, parts: Sequence[Part], plan: ReshardPlan, staging: Staging) -> None:
        """Stages the record by which the input of a finished rank is compared. A file belongs to who has its end."""
        files = [self._index[part.name] for part in parts if part.end is None]
        read = ReaderRecord(options_of(self._reader), sample_files(self._inputs, files))
        record = ShardRecord([read], pipeline=describe_pipeline(self._scanner.runner.before, code_of)).to_json()
        name = f"{rank.folder.name}/{SHARD}"
        staging.write(name, sealed_shard({**record, "documents": rank.point.next_ordinal + len(rank.committed)}))
        plan.moved.append(name)

    # parts -----------------------------------------------------------------------------------------------------------

    def _is_divisible(self, part: Part) -> bool:
        if isinstance(self._reader, JsonlReader):
            return self._reader._codec(part.name) is None
        return not getattr(self._reader, "stream", False)

    def _cut(self, part: Part, ends: Sequence[int]) -> list[Part]:
        with log_disabled("datatrove_ckpt.readers"):
            pieces = divide(self._reader, self._inputs, self._index[part.name], part, ends)
        self._report.cuts += len(pieces) - 1
        return pieces

    def _known(self, part: Part) -> Part:
        """The part with what shows whether its file has changed, if it is divided."""
        if part.is_whole or part.size is not None:
            return part
        index = self._index[part.name]
        size = self._inputs.size(index)
        content = "" if self._reader._may_grow(part.name) else self._inputs.fingerprint(index, size, whole=True)
        return part._replace(size=size, hash=content)


# What must be there, and over -----------------------------------------------------------------------------------------


def check_all_here(root: Path, tasks: int) -> None:
    """Checks that no task's folder is missing: its documents would be dealt out again.

    Raises:
        CheckpointMismatch: the last chunk of a task is named, or there is a retry of it, and it has no checkpoint.
    """
    if missing := JobLedger.read(root, tasks).removed:
        raise CheckpointMismatch(
            f"{root} holds no checkpoint of {name_tasks(missing)}, and {last_chunk_file(root, missing[0]).parent} or a "
            "retry shows that there was one. Bring it back: reshard needs the folders of all tasks in one place. Where "
            "each node keeps its own, finish the run with the number of tasks that it has."
        )


def refuse_retried(root: Path, rank: int, tasks: int) -> None:
    """Refuses a task whose unfinished documents would move, if dead letters of it were retried: ``repair`` came after.

    A retry knows documents by task and number, so under another task it would not be known that they are delivered.

    Raises:
        CheckpointMismatch: it has; the message says what to do first.
    """
    retries = [folder.name for folder in retry_folders(root) if rank_folder(folder, rank).exists()]
    if retries:
        first = "run" if rank < tasks else f"reshard to {rank + 1} tasks or more, run"
        raise CheckpointMismatch(
            f"{rank_folder(root, rank)} has chunks that are to be made again, and {retries[0]} has delivered dead "
            f"letters of it, which another task would deliver again. First {first} to the end, then reshard."
        )


def check_begun(root: Path) -> None:
    """
    Raises:
        ConfigError: a retry of dead letters is not finished.
    """
    retries = [rank_folder(folder, rank) for folder in retry_folders(root) for rank in rank_numbers(folder)]
    for folder in retries:
        if not is_finished(folder):
            raise ConfigError(
                f"reshard: the retry of dead letters in {folder} is not finished. Finish it first, with "
                "--retry-dead-letters."
            )


# Dealing out ----------------------------------------------------------------------------------------------------------
#
# Parts of an input go to tasks by their bytes; only ``cut`` reads anything. Files that cannot be entered in the middle
# come first, the largest first, each to the task that has the least. All others are laid end to end, and cut where a
# task is full. So every task has the same, as far as one file allows, and there are no more cuts than tasks.

Cut = Callable[[Part, Sequence[int]], list[Part]]
"""Divides a part after about so many bytes of it each, in ascending order. Fewer pieces than asked for are fine."""

SMALLEST_CUT = 0.05
"""A file is not cut for less than this part of a task's share."""


def deal(
    parts: Sequence[Part], loads: Sequence[float], cut: Cut, is_divisible: Callable[[Part], bool]
) -> list[list[Part]]:
    """The parts for each task.

    Args:
        loads: bytes that each task has to do already.
    """
    full = list(map(float, loads))
    dealt: list[list[tuple[int, Part]]] = [[] for _ in loads]
    line = []
    for place, part in sorted(enumerate(parts), key=lambda one: -one[1].bytes):
        if is_divisible(part):
            line.append((place, part))
        else:
            task = min(range(len(full)), key=full.__getitem__)
            dealt[task].append((place, part))
            full[task] += part.bytes
    _lay_out(sorted(line), full, dealt, cut)
    return [[part for _, part in sorted(mine, key=lambda one: one[0])] for mine in dealt]


def _lay_out(line: list[tuple[int, Part]], full: list[float], dealt: list[list[tuple[int, Part]]], cut: Cut) -> None:
    level = fill_level(full, sum(part.bytes for _, part in line))
    room = {task: level - load for task, load in enumerate(full) if load < level}
    tasks = iter(sorted(room))
    task = next(tasks, 0)
    left = room.get(task, 0.0)
    for place, part in line:
        ends: list[int] = []
        owners = [task]
        start = 0.0
        while part.bytes - start > left + SMALLEST_CUT * level and (following := next(tasks, None)) is not None:
            if left > SMALLEST_CUT * level:
                start += left
                ends.append(int(start))
                owners.append(following)
            else:
                owners[-1] = following
            task, left = following, room[following]
        pieces = cut(part, ends) if ends else [part]
        for owner, piece in zip(owners, pieces, strict=False):
            dealt[owner].append((place, piece))
        left -= part.bytes - start


def fill_level(loads: Sequence[float], amount: float) -> float:
    """How high the loads are once the amount is poured over them, the lowest first."""
    ordered = sorted(loads)
    for number, (load, below) in enumerate(zip(ordered, accumulate(ordered), strict=True), start=1):
        level = (below + amount) / number
        if number == len(ordered) or level <= ordered[number]:
            return max(level, load)
    return 0.0
