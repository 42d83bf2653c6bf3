"""``check_job``: what is compared before any task of a job starts.

datatrove skips every task that has a completion marker in ``logging_dir``, so a finished task never looks at its own
checkpoint again. Whoever runs an executor calls ``check_job`` first, which looks at finished tasks as well.

    marker   checkpoint of the rank      what happens
    any      of another run              refused, see ``checkpoint/job.py``
    yes      none, but in the mirror     it is restored, and then compared
    yes      none                        refused: nothing shows that the rank's documents are in the output
    yes      not finished                the marker is removed, so that the rank runs
    yes      of another run, but empty   the marker is removed, so that the rank runs with the new settings
    yes      finished                    the rank is skipped
    no       of this run, or none        the rank runs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.checkpoint.foreign import refuse_missing_run_json, reshard_command
from datatrove_ckpt.checkpoint.forks import refuse_half_forked
from datatrove_ckpt.checkpoint.identity import Change, refusal, way_back
from datatrove_ckpt.checkpoint.job import JobChanges, compare_job, name_tasks
from datatrove_ckpt.checkpoint.job_ledger import JobLedger, retired_ranks
from datatrove_ckpt.checkpoint.layout import DEAD_LETTERS, RUN, is_finished, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.mirror.job import compare_mirrored_job, restore_shares
from datatrove_ckpt.mirror.restore import restore_rank
from datatrove_ckpt.output.folders import writers_of
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.runner import InferenceRunner

# A restore waits for a remote nearly all the time.
_MIRROR_THREADS = 16


def check_job(plan: RunPlan, dry_run: bool = False, deals_out: bool = False) -> list[str]:
    """Compares a job, and those that it depends on, with what its folders hold from earlier runs. Starts nothing.

    Args:
        dry_run: remove no marker and restore nothing from a mirror.
        deals_out: for ``reshard``, which gives other tasks what those of an earlier number have left.

    Returns:
        For each marker that is removed, or would be, what is wrong with it.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
        ConfigError: there is no task, or a step would get no documents.
    """
    check_step_order(plan.pipeline)
    if plan.tasks < 1:
        raise ConfigError(f"{plan.name}: tasks: must be at least 1; it is {plan.tasks}.")
    wrong = [] if plan.depends is None else check_job(plan.depends, dry_run)
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            _check_tasks(plan)
            continue
        root = runner.root or Path(runner.step.checkpoints_local_dir)
        wrong += _check_runner(plan, runner, root, dry_run, deals_out)
        if not deals_out:
            _refuse_left_behind(root, plan.tasks)
    return wrong


def lost_with_disk(plan: RunPlan, is_kept: Callable[[str], bool]) -> list[str]:
    """The settings that name something on the disk of a machine that is lost with it.

    Args:
        is_kept: whether a folder outlives the machine.
    """
    folders: dict[str, object] = {"logging_dir": plan.logging_dir}
    for index, step in enumerate(plan.pipeline):
        folders[f"data_folder of pipeline[{index}]"] = getattr(step, "data_folder", None)
    folders |= {f"output_folder of {place}": writer.output_folder for place, writer in writers_of(plan.pipeline)}
    local = {name: one for name, one in folders.items() if isinstance(one, DataFolder) and one.is_local()}
    lost = [name for name, folder in local.items() if not is_kept(folder.resolve_paths(""))]
    for runner in plan.runners:
        step, mirror = runner.step, runner.step.checkpoints_remote_dir
        if step.checkpoints_local_dir is None:
            lost.append("checkpoints_local_dir (with checkpoints_remote_dir; there are no checkpoints)")
        elif not is_kept(str(step.checkpoints_local_dir)) and not (mirror and is_kept(str(mirror))):
            lost.append("checkpoints_remote_dir (the mirror of checkpoints_local_dir)")
    return lost


def check_step_order(pipeline: Sequence[object]) -> None:
    """Refuses an ``InferenceRunner`` without a step before it, and a step right after one that needs documents.

    The runner passes no documents on. As in datatrove, a step needs documents if ``data``, the first argument of its
    ``run``, has no default.

    Raises:
        ConfigError: naming the steps.
    """
    if pipeline and isinstance(pipeline[0], InferenceRunner) and not pipeline[0].retry_dead_letters:
        raise ConfigError(
            f"pipeline[0] {type(pipeline[0]).__name__} would get no documents: no step before it reads any. Put a "
            "reader before it."
        )
    for index, (before, step) in enumerate(pairwise(pipeline)):
        if isinstance(before, InferenceRunner) and isinstance(step, PipelineStep) and _needs_documents(step):
            raise ConfigError(
                f"pipeline[{index + 1}] {type(step).__name__} would get no documents: pipeline[{index}] "
                f"{type(before).__name__} passes none on, it writes them with its output_writer. Put this step into a "
                "second executor, whose first step reads that output, and which has the first executor as its "
                "`depends`. (If it is a step of yours that needs no documents, give `data` in its run() a default.)"
            )


def _needs_documents(step: PipelineStep) -> bool:
    first = next(iter(signature(step.run).parameters.values()), None)
    return first is not None and first.default is Parameter.empty and first.kind is not Parameter.VAR_POSITIONAL


def _skipped(plan: RunPlan) -> list[int]:
    """The ranks that datatrove will skip, because they have a completion marker."""
    incomplete = set(plan.incomplete(plan.local_ranks))
    return [rank for rank in plan.local_ranks if rank not in incomplete]


def _check_tasks(plan: RunPlan) -> None:
    """Without a checkpoint, the file that datatrove writes at each start has the number of tasks."""
    if not _skipped(plan) or not plan.logging_dir.isfile("executor.json"):
        return
    with plan.logging_dir.open("executor.json") as file:
        tasks = json.load(file).get("world_size")
    if tasks != plan.tasks:
        raise CheckpointMismatch(
            f"{plan.logging_dir.resolve_paths('completions')} marks tasks of another run as complete:\n"
            f"  tasks: {tasks} -> {plan.tasks}\n"
            "Go on with the old number of tasks, or choose another logging_dir (and output) for the new one."
        )


def _check_runner(plan: RunPlan, runner: RunnerPlan, root: Path, dry_run: bool, deals_out: bool) -> list[str]:
    refuse_half_forked(root)
    refuse_half_resharded(root)
    skipped, mirror = _skipped(plan), runner.step.checkpoints_remote_dir
    if not mirror:  # from there a rank may get what it lacks
        job = JobLedger.read(root)
        job.check(job.newer(), job.older())
        for rank in plan.local_ranks:
            refuse_missing_run_json(rank_folder(root, rank))
    with ExitStack() as stack:
        folder = root
        # Nodes of a cluster may keep their checkpoints on their own disks, with a mirror.
        if not plan.is_local and mirror and not root.exists():
            folder = Path(stack.enter_context(TemporaryDirectory()))
        missing = [rank for rank in skipped if not (rank_folder(folder, rank) / RUN).exists()]
        if mirror and missing and dry_run:
            skipped = [rank for rank in skipped if rank not in missing]
        elif mirror and not dry_run:
            _restore(mirror, folder, missing, plan.tasks)
        wrong = _find_wrong(plan, runner, root, folder, skipped)
    job = JobLedger.read(root, plan.tasks, ranks={})
    job.refuse_other_number()
    if not deals_out and not (mirror and dry_run):
        job.check(job.lost())
    for rank, text in wrong.items():
        if not dry_run:
            logger.warning(f"{text} The marker is removed, so the task runs again.")
            plan.forget(rank)
    return list(wrong.values())


def _refuse_left_behind(root: Path, tasks: int) -> None:
    """Refuses a run if tasks of an earlier, larger number have something to do again, which no task would do."""
    folders = {rank: rank_folder(root, rank) for rank in sorted(retired_ranks(root))}
    left = [rank for rank, folder in folders.items() if (folder / RUN).exists() and not is_finished(folder)]
    if left:
        raise CheckpointMismatch(
            f"{root}: chunks of {name_tasks(left)} are to be made again, and since reshard there are only {tasks} "
            f"tasks. Deal them out: {reshard_command(tasks)}, then run."
        )


def _restore(url: str, folder: Path, missing: list[int], tasks: int) -> None:
    """Restores these ranks, and what the mirror may have newer since ``reshard``: no task restores ranks of before.

    Raises:
        CheckpointMismatch: the mirror is that of an earlier number of tasks, or ranks do not fit ``shares.json``,
            or it is for another number of tasks.
    """
    with suppress(OSError):  # a rank that starts says it
        restore_shares(url, folder)
    job = JobLedger.read(folder, tasks)
    job.check(job.newer())
    job.refuse_other_number()
    here = folder.is_dir() and rank_numbers(folder)
    lost = [rank for rank, _ in job.lost()] if here else sorted(job.shares.retired)
    older = [rank for rank, _ in job.older()]
    with ThreadPoolExecutor(_MIRROR_THREADS) as pool:
        list(pool.map(partial(restore_rank, url, folder, retries=False), sorted({*missing, *lost, *older})))
    job = JobLedger.read(folder)
    job.check(job.newer(), job.older())


def _find_wrong(plan: RunPlan, runner: RunnerPlan, root: Path, folder: Path, skipped: list[int]) -> dict[int, str]:
    """Compares one step. Returns what is wrong with markers that are to be removed, by rank.

    Args:
        root: ``checkpoints_local_dir``, for messages.
        folder: where the checkpoints are read: ``root``, or what was restored from the mirror.
        skipped: the ranks that have a marker.
    """
    step, identity, ranks = runner.step, runner.identity, plan.local_ranks

    def counts(change: Change) -> bool:
        """A retry takes dead letters with any settings, but each rank takes its own."""
        return not step.retry_dead_letters or change.field == "tasks"

    def explained(rank: int, why: str) -> str:
        checkpoint, marker = rank_folder(root, rank), plan.marker(rank)
        return f"Task {rank} is marked as complete ({marker}), but its checkpoint {checkpoint} {why}."

    found = compare_job(folder, identity, None if len(ranks) == plan.tasks else ranks, counts)
    if step.checkpoints_remote_dir:
        found.join(compare_mirrored_job(step.checkpoints_remote_dir, folder, identity, counts))
    empty = [rank for rank in skipped if rank in found.empty]
    kept = [rank for rank in skipped if rank not in found.empty]
    if found.changes:
        _refuse_changes(found, runner, root, folder, kept, len(ranks))
    missing = [rank for rank in kept if not (rank_folder(folder, rank) / RUN).exists()]
    if missing:
        markers = plan.logging_dir.resolve_paths("completions")
        them = "it" if len(missing) == 1 else "them"
        mirror = step.checkpoints_remote_dir
        holds = f"neither {root} nor {mirror} holds a" if mirror else f"{root} holds no"
        raise CheckpointMismatch(
            f"{markers} marks {name_tasks(missing)} as complete, but {holds} checkpoint of {them}, so nothing "
            "shows that the documents are in the output. If the checkpoints were moved or deleted, bring them "
            "back; if they are on another machine, run this command there. If the markers are of another job, "
            "choose another logging_dir. To process these tasks from the start, delete their markers "
            f"({markers}/{missing[0]:05d} ...) and output files."
        )
    wrong = {rank: explained(rank, "did nothing yet, and its settings have changed") for rank in empty}
    unfinished = [rank for rank in kept if not is_finished(rank_folder(folder, rank))]
    return wrong | {rank: explained(rank, "is not finished") for rank in unfinished}


def _refuse_changes(
    found: JobChanges, runner: RunnerPlan, root: Path, folder: Path, skipped: list[int], tasks: int
) -> None:
    """Raises, unless the changes are accepted and there is a task that they can be applied to."""
    kept = [rank for rank in found.ranks if rank in skipped]
    finished = f"Finished with the old settings: {name_tasks(kept)}. What is finished stays as it is." if kept else ""
    may_mix = not found.is_layout and len(skipped) < tasks
    if runner.step.accept_changes and may_mix:
        if finished:
            logger.warning(finished)
        return
    tasks = min([tasks, *(change.old for change in found.changes if change.field == "tasks" and change.old)])
    is_left = len(skipped) < tasks
    way_out = way_back(found.changes, runner.identity, may_mix, is_left)
    if not is_left:
        way_out = f"All tasks are finished, so the new settings would change no output any more. {way_out}"
        letters = [rank_folder(folder, rank) / DEAD_LETTERS for rank in skipped]
        if any(path.exists() and path.stat().st_size for path in letters):
            way_out += " For the dead letters alone, --retry-dead-letters takes the new settings."
    elif finished:
        way_out = f"{finished} {way_out}"
    raise refusal(f"The checkpoints in {root} ({name_tasks(found.ranks)}) were", found.changes, way_out)
