"""Compares a job with what its folders hold from earlier runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from loguru import logger

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.identity import JobChanges, compare_job, name_tasks, refusal
from datatrove_ckpt.checkpoint.layout import (
    DEAD_LETTERS,
    RUN,
    is_finished,
    rank_folder,
    rank_numbers,
    refuse_missing_run_json,
    refuse_resharded,
    retry_folders,
)
from datatrove_ckpt.checkpoint.ledger import (
    JobSums,
    RankLedger,
    Want,
)
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.retrying import RetryPolicy, failure_line
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    CkptError,
    OutputFailed,
    OutputMismatch,
)
from datatrove_ckpt.errors.names import use
from datatrove_ckpt.generation.finished_from import OldRuns
from datatrove_ckpt.mirror.job import compare_mirrored_job
from datatrove_ckpt.mirror.restore import restore_outdated
from datatrove_ckpt.output.committed import (
    CommittedFile,
    FoundFiles,
    OutputCheck,
    RankCommits,
    committed_files,
    published_names,
)
from datatrove_ckpt.output.hub import HubFolder, is_missing_repository
from datatrove_ckpt.output.hub_access import check_access, private_if_made, repository_is_gone
from datatrove_ckpt.output.hub_uploads import ANSWER_SECONDS, HubReads
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.run_folder.checks import Finding, within
from datatrove_ckpt.run_folder.input_checks import check_inputs_unchanged
from datatrove_ckpt.run_folder.run_plan import Folders, RunnerPlan, RunPlan, WrongMarker

# What ``check_job`` compares before any task of a job starts. datatrove skips tasks that have a
# completion marker in ``logging_dir``, so a finished task never looks at its own checkpoint again.
#
#     marker   checkpoint of the rank      what happens
#     any      older than in the mirror    it is restored, and then compared
#     any      of another run              refused, see ``checkpoint/identity.py``
#     yes      none, but in the mirror     it is restored, and then compared
#     yes      none                        refused: its documents may not be in the output
#     yes      not finished                the marker is removed, so that the rank runs
#     yes      of another run, but empty   the marker is removed: it runs with the new settings
#     yes      finished                    the rank is skipped
#     no       of this run, or none        the rank runs


def check_job(plan: RunPlan, dry_run: bool = False) -> list[WrongMarker]:
    """Compares a job, and those that it depends on, with what its folders hold from earlier runs.
    Starts nothing, and removes no marker: other checks may refuse the run.

    Args:
        dry_run: restore nothing from a mirror.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
    """
    before = []
    if plan.depends is not None:
        before = check_job(plan.depends, dry_run)
    wrong: dict[int, str] = {}
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            _check_tasks(plan)
            continue
        skipped = [rank for rank in _skipped(plan) if rank not in wrong]
        wrong |= _check_runner(runner, skipped, dry_run)
    return [*before, *(WrongMarker(plan, rank, text) for rank, text in wrong.items())]


def _skipped(plan: RunPlan) -> list[int]:
    incomplete = set(plan.incomplete(plan.local_ranks))
    return [rank for rank in plan.local_ranks if rank not in incomplete]


def _check_tasks(plan: RunPlan) -> None:
    """Compares the number of tasks with datatrove's file of the last start, where no checkpoint has
    it.
    """
    if not _skipped(plan) or not plan.logging_dir.isfile("executor.json"):
        return
    with plan.logging_dir.open("executor.json") as file:
        tasks = json.load(file).get("world_size")
    if tasks != plan.tasks:
        raise CheckpointMismatch(
            f"{plan.logging_dir.resolve_paths('completions')} marks tasks of another run as "
            "complete:\n"
            f"  tasks: {tasks} -> {plan.tasks}\n"
            "Go on with the old number of tasks, or choose another logging_dir (and output) for "
            "the new one."
        )


def _check_runner(runner: RunnerPlan, skipped: list[int], dry_run: bool) -> dict[int, str]:
    """See ``_find_wrong``."""
    plan = runner.plan
    root = runner.root or Path(str(runner.step.checkpoints_local_dir))
    folders = runner.copy or Folders(root, str(root))
    use(runner.step.form)
    refuse_resharded(root)
    mirror = runner.step.checkpoints_remote_dir
    if not mirror:  # from there a rank may get what it lacks
        for rank in plan.local_ranks:
            refuse_missing_run_json(rank_folder(root, rank))
    with ExitStack() as stack:
        # Nodes of a cluster may have checkpoints on their own disks, with a mirror.
        if not plan.is_local and mirror and not root.exists():
            folder = Path(stack.enter_context(TemporaryDirectory()))
            folders = replace(folders, checkpoint=folder)
        folder = folders.checkpoint
        if mirror and dry_run:
            skipped = [rank for rank in skipped if (rank_folder(folder, rank) / RUN).exists()]
        elif mirror and runner.copy is None:
            restore_outdated(mirror, folder, skipped)
        return _find_wrong(runner, folders, skipped)


def _find_wrong(runner: RunnerPlan, folders: Folders, skipped: list[int]) -> dict[int, str]:
    """Compares one step. Returns what is wrong with markers that are to be removed, by rank.

    Args:
        skipped: the ranks that have a marker.
    """
    plan = runner.plan
    step = runner.step
    identity = runner.identity
    folder = folders.checkpoint
    ranks = plan.local_ranks

    def explained(rank: int, why: str) -> str:
        marker = plan.marker(rank)
        checkpoint = f"{folders.shown_as}/{rank:05d}"
        return (
            f"Task {rank} is marked as complete ({marker}), but its checkpoint {checkpoint} {why}."
        )

    if len(skipped) < len(ranks):
        OldRuns(step, identity)
    # A retry takes dead letters with any settings, but each rank its own.
    is_retry = step.retry_dead_letters
    found = compare_job(folder, identity, None if len(ranks) == plan.tasks else ranks, is_retry)
    if step.checkpoints_remote_dir:
        found.join(compare_mirrored_job(step.checkpoints_remote_dir, folder, identity, is_retry))
    empty = [rank for rank in skipped if rank in found.empty]
    kept = [rank for rank in skipped if rank not in found.empty]
    if found.changes:
        _refuse_changes(found, runner, folders, kept, len(ranks))
    missing = [rank for rank in kept if not (rank_folder(folder, rank) / RUN).exists()]
    if missing:
        markers = plan.logging_dir.resolve_paths("completions")
        mirror = step.checkpoints_remote_dir
        holds = f"{folders.shown_as} holds no"
        if mirror:
            holds = f"neither {folders.shown_as} nor {mirror} holds a"
        raise CheckpointMismatch(
            f"{markers} marks {name_tasks(missing)} as complete, but {holds} checkpoint that shows "
            "it, so nothing shows that the documents are in the output. If the checkpoints were "
            "moved or deleted, bring them back; if they are on another machine, run this command "
            "there. If the markers are of another job, choose another folder for the logs. To "
            "process these tasks from the start, delete their markers "
            f"({markers}/{missing[0]:05d} ...) and output files."
        )
    wrong = {
        rank: explained(rank, "did nothing yet, and its settings have changed") for rank in empty
    }
    unfinished = [rank for rank in kept if not is_finished(rank_folder(folder, rank))]
    return wrong | {rank: explained(rank, "is not finished") for rank in unfinished}


def _refuse_changes(
    found: JobChanges, runner: RunnerPlan, folders: Folders, skipped: list[int], tasks: int
) -> None:
    """Raises, unless the changes are accepted and there is a task that they can be applied to."""
    kept = [rank for rank in found.ranks if rank in skipped]
    finished = ""
    if kept:
        finished = (
            f"Finished with the old settings: {name_tasks(kept)}. What is finished stays as it is."
        )
    may_mix = not found.is_layout and len(skipped) < tasks
    if runner.step.accept_changes and may_mix:
        if finished:
            logger.warning(finished)
        return
    old = [
        change.old
        for change in found.changes
        if change.field == "tasks" and isinstance(change.old, int)
    ]
    tasks = min([tasks, *old])
    advice = finished and f"{finished} "
    if len(skipped) >= tasks:
        advice = "All tasks are finished, so the new settings would change no output any more. "
        letters = [rank_folder(folders.checkpoint, rank) / DEAD_LETTERS for rank in skipped]
        if any(path.exists() and path.stat().st_size for path in letters):
            advice += "For the dead letters alone, retry_dead_letters takes the new settings. "
    raise refusal(
        f"The checkpoints in {folders.shown_as} ({name_tasks(found.ranks)}) were",
        found.changes,
        advice,
        may_mix,
    )


def earlier_runs(
    plan: RunPlan, is_thorough: bool = False, unreachable: Collection[str] = ()
) -> Iterator[Finding]:
    """Compares a job with what earlier runs have left. Restores ranks from mirrors, and makes
    missing repositories on the hub.

    Args:
        is_thorough: change nothing, and wait for no remote folder longer than doctor does.
        unreachable: the subjects of outputs that are not compared.
    """
    check_files = partial(check_output, plan, before=True)
    checks: list[tuple[str, str, Callable[[], object]]] = [
        ("job", "earlier runs", partial(check_job, plan, is_thorough)),
        ("input", "of finished tasks", partial(check_inputs_unchanged, plan)),
    ]
    if is_thorough:
        check_files = partial(check_files, without=unreachable, policy=retrying.HUB_PROBE)
    else:
        checks.append(("output", "reachable", partial(check_hub, plan)))
    checks.append(("output", "of earlier runs", check_files))
    for subject, what, check in checks:
        call = check
        if is_thorough:
            call = partial(within, check, subject)
        try:
            found = call()
        except (CkptError, OSError) as error:
            yield Finding("problem", what, str(error), subject, error)
            continue
        if not isinstance(found, list) or not found:
            yield Finding("ok", what, "nothing differs.", subject)
            continue
        text = f"{found[0].text} A run removes the marker and runs the task."
        if len(found) > 1:
            text += f" There are {len(found)} such tasks."
        yield Finding("warning", what, text, subject, markers=found)


def check_hub(plan: RunPlan) -> None:
    """Checks that tasks may write to their output folders on the hub, and makes missing
    repositories.

    Raises:
        OutputFailed: see ``check_access``.
    """
    for runner in plan.runners:
        writer = runner.step.output_writer
        hub = HubFolder.of(writer.output_folder)
        if hub is not None and (runner.step.retry_dead_letters or plan.incomplete()):
            check_access_of(runner, hub)


def check_access_of(runner: RunnerPlan, hub: HubFolder, only_look: bool = False) -> str:
    """Returns what was found. See ``check_access``."""
    writer = runner.step.output_writer
    committed: Callable[[], int] = int
    if runner.root is not None:
        committed = partial(committed_files, writer, runner.root)
    return check_access(hub, private_if_made(writer), only_look=only_look, committed=committed)


@gc_paused()  # commits of many ranks, and no garbage: collections would take a third of the time
def check_output(
    plan: RunPlan, before: bool, without: Collection[str] = (), policy: RetryPolicy | None = None
) -> dict[Path, JobSums]:
    """Compares the output of all ranks, also those that datatrove skips, with their checkpoints.

    Returns the sums of each checkpoint that can be seen here, by its folder.

    Args:
        before: ranks without a checkpoint will start. Else the sums include the work of all
            attempts.
        without: the subjects of outputs that are skipped.
        policy: see ``HubReads.looked``.

    Raises:
        CkptError: see ``check_output_of_run``.
    """
    found = {}
    for runner, root in plan.kept:
        if f"{plan.place(runner.index)}output" not in without:
            # Ranks elsewhere, or with a mirror, may have checkpoints that are invisible here; those
            # of jobs are visible.
            here = plan.as_jobs or (plan.is_local and runner.step.checkpoints_remote_dir is None)
            ranks: Iterable[int] = ()
            want = Want.COMMITS
            if not before:
                want |= Want.HISTORY
            elif here:
                ranks = plan.local_ranks
            found[root] = check_output_of_run(runner, root, ranks, policy, want)
    return found


# output of all ranks -----------------------------------------------------------------------------


def check_output_of_run(
    runner: RunnerPlan,
    checkpoints: Path,
    first_starts: Iterable[int],
    policy: RetryPolicy | None,
    want: Want,
) -> JobSums:
    """Lists the output folder once. Returns the sums over the ranks of the job; all committed files
    are there.

    Args:
        first_starts: ranks that will start for the first time, if they have no checkpoint.
        policy: see ``HubReads.looked``.
        want: what to read of each rank, for the sums.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint
            knows, or the repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/ledger.py``.
    """
    logging_dir = runner.plan.logging_dir.resolve_paths("")
    tasks = runner.plan.tasks
    mirror = runner.step.checkpoints_remote_dir
    check = OutputCheck(runner.step.output_writer, checkpoints, mirror, logging_dir)
    numbers = []
    if checkpoints.is_dir():
        numbers = rank_numbers(checkpoints)
    retries = retry_folders(checkpoints)
    job = JobSums()

    def add(rank: RankLedger) -> None:
        if rank.number < tasks:
            job.add(rank)

    try:  # all, before any file is called unknown
        commits = {
            rank: RankCommits(checkpoints, rank, retries, want=want, seen=add) for rank in numbers
        }
    except CommitsDamaged as error:
        raise CommitsDamaged(error.log, error.what, logging_dir) from None
    committed = check.by_name(commits.values())
    found = _look(check, committed, policy)
    check.refuse_lost(committed, found)
    for rank in first_starts:
        # Checked again: a rank that started since may have written the files.
        if found.by_rank[rank] and not _has_started(rank_folder(checkpoints, rank), mirror):
            check.refuse_existing(
                commits.get(rank) or RankCommits(checkpoints, rank, retries), found
            )
    for rank_commits in commits.values():
        if rank_commits.is_finished:
            check.refuse_unknown(rank_commits, found)
        elif rank_commits.has_run:
            own = None
            if found.by_rank[rank_commits.rank]:
                own = published_names(checkpoints, rank_commits.rank)
            check.refuse_strangers(rank_commits, found, own)
    check.refuse_other_ranks(found, tasks)
    return job


def _has_started(folder: Path, mirror: str | None) -> bool:
    has_run = (folder / RUN).exists()
    if mirror is None or has_run:
        return has_run
    from datatrove_ckpt.mirror.manifests import Versions

    return bool(Versions(f"{mirror}/{folder.name}").all_versions())


def _look(
    check: OutputCheck, committed: dict[str, CommittedFile], policy: RetryPolicy | None
) -> FoundFiles:
    """Raises:
    OutputMismatch: the repository is gone, with files that were committed.
    OutputFailed: the folder cannot be listed.
    """
    hub = HubFolder.of(check.writer.output_folder)
    if hub is None:
        try:
            return StoppableCalls().run(lambda: check.look(committed), ANSWER_SECONDS)
        except OSError as error:
            raise OutputFailed(
                f"{check.where} cannot be listed: {failure_line(error)}. Correct that and run the "
                "same command again."
            ) from error
    try:
        return HubReads(hub, StoppableCalls()).listed(
            lambda: check.look(committed), committed.values(), policy
        )
    except OutputFailed as error:
        if not committed or not is_missing_repository(error.__cause__):
            raise
        raise OutputMismatch(repository_is_gone(hub, len(committed))) from error
