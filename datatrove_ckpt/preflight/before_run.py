"""All checks before a run starts anything, and again at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader
from datatrove.utils.stats import PipelineStats
from loguru import logger

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.identity import refusal
from datatrove_ckpt.checkpoint.job import JobChanges, compare_job, name_tasks, note_output
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
    Limits,
    RankLedger,
    Want,
    find_ranks,
    read_rank,
)
from datatrove_ckpt.claims.stores import refuse_for_claims
from datatrove_ckpt.common.retrying import RetryPolicy, failure_line
from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    CkptError,
    ConfigError,
    OutputFailed,
    OutputMismatch,
    ServerStartFailed,
    TooManyDeadLetters,
)
from datatrove_ckpt.errors.names import setting_name, setting_of, step_place, use
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.generation.final_stats import lines_with_error
from datatrove_ckpt.generation.finished_from import OldRuns
from datatrove_ckpt.generation.rank import naming_mirror
from datatrove_ckpt.inference.servers.host import check_servers
from datatrove_ckpt.mirror.job import compare_mirrored_job
from datatrove_ckpt.mirror.restore import restore_outdated
from datatrove_ckpt.output.committed import (
    CommittedFile,
    OutputCheck,
    RankCommits,
    committed_files,
    published_names,
)
from datatrove_ckpt.output.folders import check_pipeline_folders, writers_of
from datatrove_ckpt.output.hub import HubFolder, is_missing_repository
from datatrove_ckpt.output.hub_access import check_access, private_if_made, repository_is_gone
from datatrove_ckpt.output.hub_uploads import ANSWER_SECONDS, HubReads
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.output.writer_checks import check_rank_in_template
from datatrove_ckpt.preflight.input_checks import check_codecs, check_inputs_unchanged, note_steps
from datatrove_ckpt.preflight.run_plan import Folders, RunnerPlan, RunPlan
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.readers.batch import BatchReader
from datatrove_ckpt.readers.inputs import check_reachable, list_input
from datatrove_ckpt.runner import InferenceRunner

# What ``check_job`` compares before any task of a job starts. datatrove skips tasks that have a
# completion marker in ``logging_dir``, so a finished task never looks at its own checkpoint again.
#
#     marker   checkpoint of the rank      what happens
#     any      older than in the mirror    it is restored, and then compared
#     any      of another run              refused, see ``checkpoint/job.py``
#     yes      none, but in the mirror     it is restored, and then compared
#     yes      none                        refused: its documents may not be in the output
#     yes      not finished                the marker is removed, so that the rank runs
#     yes      of another run, but empty   the marker is removed: it runs with the new settings
#     yes      finished                    the rank is skipped
#     no       of this run, or none        the rank runs


class WrongMarker(NamedTuple):
    """A completion marker that must be removed. ``text``: what is wrong with it."""

    plan: RunPlan
    rank: int
    text: str


def remove_markers(wrong: Iterable[WrongMarker]) -> None:
    for marker in wrong:
        logger.warning(f"{marker.text} The marker is removed, so the task runs again.")
        marker.plan.forget(marker.rank)


def check_job(plan: RunPlan, dry_run: bool = False) -> list[WrongMarker]:
    """Compares a job, and those that it depends on, with what its folders hold from earlier runs.
    Starts nothing, and removes no marker: other checks may refuse the run.

    Args:
        dry_run: restore nothing from a mirror.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
        ConfigError: there is no task, or a step would get no documents.
    """
    check_step_order(plan.pipeline)
    if plan.tasks < 1:
        raise ConfigError(f"{plan.name}: tasks: must be at least 1; it is {plan.tasks}.")
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


def lost_with_disk(plan: RunPlan, is_kept: Callable[[str], bool]) -> list[str]:
    """Returns the settings that name something on the disk of a machine that is lost with it.

    Args:
        is_kept: whether a folder outlives the machine.
    """
    folders: list[tuple[str, object]] = [(setting_name("logging_dir"), plan.logging_dir)]
    for index, step in enumerate(plan.pipeline):
        name = setting_of("data_folder", f"pipeline[{index}]")
        folders.append((name, getattr(step, "data_folder", None)))
    folders += [
        (setting_of("output_folder", place), writer.output_folder)
        for place, writer in writers_of(plan.pipeline)
    ]
    local = [
        (name, folder)
        for name, folder in folders
        if isinstance(folder, DataFolder) and folder.is_local()
    ]
    lost = [name for name, folder in local if not is_kept(folder.resolve_paths(""))]
    for runner in plan.runners:
        step = runner.step
        mirror = runner.step.checkpoints_remote_dir
        if step.checkpoints_local_dir is None:
            lost.append(
                "checkpoints_local_dir (with checkpoints_remote_dir; there are no checkpoints)"
            )
        elif not is_kept(str(step.checkpoints_local_dir)) and not (mirror and is_kept(str(mirror))):
            lost.append("checkpoints_remote_dir (the mirror of the checkpoints)")
    return list(dict.fromkeys(lost))


def check_step_order(pipeline: Sequence[object]) -> None:
    """Refuses a reader whose limit is negative, an ``InferenceRunner`` without a step before it,
    and a step right after one that needs documents.

    As in datatrove, a step needs documents if ``data``, the first argument of its ``run``, has no
    default.

    Raises:
        ConfigError: naming the steps.
    """
    for index, step in enumerate(pipeline):
        if isinstance(step, BaseReader) and step.limit < -1:  # it would read nothing
            raise ConfigError(
                f"{step_place(index, step)}: limit: must be >= 0, or -1 for all documents; it is "
                f"{step.limit}."
            )
    if pipeline and isinstance(pipeline[0], InferenceRunner) and not pipeline[0].retry_dead_letters:
        raise ConfigError(
            f"pipeline[0] {type(pipeline[0]).__name__} would get no documents: no step before it "
            "reads any. Put a reader before it."
        )
    for index, (before, step) in enumerate(pairwise(pipeline)):
        if (
            isinstance(before, InferenceRunner)
            and isinstance(step, PipelineStep)
            and _needs_documents(step)
        ):
            raise ConfigError(
                f"pipeline[{index + 1}] {type(step).__name__} would get no documents: "
                f"pipeline[{index}] {type(before).__name__} passes none on, it writes them with "
                "its output_writer. Put this step into a second executor, whose first step reads "
                "that output, and which has the first executor as its `depends`. (If it is a step "
                "of yours that needs no documents, give `data` in its run() a default.)"
            )


def _needs_documents(step: PipelineStep) -> bool:
    first = next(iter(signature(step.run).parameters.values()), None)
    return (
        first is not None
        and first.default is Parameter.empty
        and first.kind is not Parameter.VAR_POSITIONAL
    )


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


def check_before_run(plan: RunPlan) -> None:
    """Makes all checks that need more than the settings. Starts nothing, and notes in each runner
    the steps before it.

    Raises:
        ConfigError: a setting cannot work on this machine, or with the others.
        CheckpointMismatch: markers, checkpoints or the input of finished ranks are another run's.
        OutputFailed: the output's repository on the hub cannot be written to.
        CkptError: see ``check_output_of_run``.
        OSError: the input cannot be listed.
    """
    if plan.pulls:
        refuse_without_claims(plan)
    note_workers(plan.workers, plan.tasks)
    _check_folders(plan)
    _check_inputs(plan)
    _check_launch(plan)
    with ExitStack() as stack:
        for runner, root in plan.kept:
            stack.enter_context(naming_mirror(runner.step, root))
        wrong = check_job(plan)
        check_inputs_unchanged(plan)
        _check_hub(plan)
        check_output(plan, before=True)
    note_steps(plan)
    for runner, root in plan.kept:
        note_output(root, runner.step.output_writer.output_folder.resolve_paths(""))
        mirror = runner.step.checkpoints_remote_dir
        if mirror is not None and root.is_dir():
            from datatrove_ckpt.mirror.changing import upload_finished_ranks

            # No rank will do it: datatrove does not start complete ranks.
            upload_finished_ranks(mirror, root)
    remove_markers(wrong)


def note_workers(workers: int, tasks: int) -> None:
    """Says so if some workers will have no task."""
    if workers > tasks:
        logger.info(
            f"workers is {workers}, but there is work for {tasks}: one worker runs each task. For "
            f"more, start a new run with tasks: {workers}, and at least as many input files."
        )


def check_before_worker(plan: RunPlan) -> None:
    """Makes the checks of this machine, for a worker that takes tasks beside others. ``run`` makes
    those of the job.

    Each starting task compares its settings with ``job.json``; a worker without a task compares
    here.

    Raises:
        CheckpointMismatch: the run is finished, and another one.
        ConfigError, OutputFailed: as ``check_before_run``; or see ``refuse_without_claims``.
    """
    refuse_without_claims(plan)
    _check_folders(plan)
    _check_inputs(plan)
    _check_launch(plan)
    _check_hub(plan)
    if not plan.incomplete():
        check_job(plan, dry_run=True)
    note_steps(plan)


def refuse_without_claims(plan: RunPlan) -> None:
    """Raises:
    ConfigError: claims cannot lie in ``logging_dir``, or protect nothing.
    """
    refuse_for_claims("logging_dir", plan.logging_dir.resolve_paths(""))
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            raise ConfigError(
                f"pipeline[{runner.index}] InferenceRunner: checkpoints_local_dir: a worker needs "
                "one, because only the checkpoint keeps two workers apart."
            )


def check_after_run(plan: RunPlan) -> dict[Path, JobSums]:
    """Checks what exit code 0 promises. Another run on the same folders may have finished ranks
    meanwhile.

    Returns the sums of each checkpoint that is on this machine, by its folder.

    Raises:
        CkptError, OSError: as ``check_before_run``.
        TooManyDeadLetters: all documents are dead letters, or all lines of a batch file have an
            error.
    """
    check_job(plan)
    check_inputs_unchanged(plan)
    jobs = check_output(plan, before=False)
    for root, job in jobs.items():
        if 0 < job.counts.read == job.counts.dead:
            raise _none_written(root)
    for runner, root in plan.kept:
        counts = jobs[root].counts
        if 0 < counts.written == lines_with_error(runner.step.rollout_fn, counts):
            folder = runner.step.output_writer.output_folder.resolve_paths("")
            raise TooManyDeadLetters(
                f"All lines have an error, as the output in {folder} shows. Correct the cause.",
                starts_over="anew",
            )
    return jobs


def _none_written(root: Path) -> TooManyDeadLetters:
    ranks = (read_rank(*rank, Want.LETTERS, Limits(0, 1 << 16)) for rank in find_ranks(root))
    causes = sum((rank.causes for rank in ranks), Counter[str]())
    often = "".join(cause for cause, _ in causes.most_common(1))
    return TooManyDeadLetters(
        f"All documents are dead letters: {often}. To see them: datatrove-ckpt show {root} --dead. "
        "Correct the cause, and start again with retry_dead_letters."
    )


def run_checked(
    executor: PipelineExecutor, check: Callable[[RunPlan], None] = lambda plan: None
) -> PipelineStats | None:
    """Runs the ranks of an executor between ``check_before_run`` and ``check_after_run``.

    Returns what its ``run_ranks`` returns. ``check``: comes first.
    """
    plan = RunPlan(executor)
    skip_completed = executor.skip_completed
    executor.skip_completed = skip_completed and not plan.retries
    try:
        check(plan)
        with plan.with_mirrors() as seen:
            check_before_run(seen)
        stats = executor.run_ranks()
        with plan.with_mirrors() as seen:
            check_after_run(seen)
    except CkptError as error:  # its message says it all; of the frames, a script shows its own
        error.__traceback__ = None
        raise
    finally:
        executor.skip_completed = skip_completed
    return stats


def check_steps(plan: RunPlan) -> None:
    """Raises:
    ConfigError: steps or tasks would write the same files, a step would read its own output, or get
    no documents.
    """
    for runner in plan.runners:
        check_rank_in_template(runner.step.output_writer, plan.tasks)
    check_step_order(plan.pipeline)
    check_pipeline_folders(plan.pipeline)


def _check_folders(plan: RunPlan) -> None:
    """Refuses local folders of the settings where there is a file.

    Raises:
        ConfigError: names the setting and the file.
    """
    outputs = [
        ("output_folder", runner.step.output_writer.output_folder) for runner in plan.runners
    ]
    places = [("logging_dir", plan.logging_dir), *outputs]
    folders = [
        (setting, folder.resolve_paths("")) for setting, folder in places if folder.is_local()
    ]
    for setting, folder in [*folders, *(("checkpoints_local_dir", root) for _, root in plan.kept)]:
        place = existing_part(Path(folder).absolute())
        if not place.is_dir():
            raise ConfigError(
                f"{str(folder)!r} cannot be a folder, because {place} is a "
                "file. Choose another folder.",
                setting=setting,
            )


def _check_inputs(plan: RunPlan) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks
    complete.

    Lists local folders, and others only before paid jobs. A retry does not need its input.

    Raises:
        ConfigError: the folder is missing, no file matches, or the package for a compression is
            missing.
        InputError, OSError: the tasks run here, and their input cannot be reached.
    """
    if plan.waits or plan.retries:
        return
    for index, step in enumerate(plan.pipeline):
        folder = getattr(step, "data_folder", None)
        if folder is None or getattr(step, "paths_file", None):
            continue
        if not folder.is_local():
            if plan.is_local and plan.incomplete():
                check_reachable(folder)
            elif plan.as_jobs and hasattr(step, "glob_pattern") and plan.incomplete():
                check_listed(f"{step_place(index, step)}: {setting_name('data_folder')}", step)
            continue
        place = f'{step_place(index, step)}: {setting_name("data_folder")}: "{folder.path}"'
        if not folder.isdir(""):
            raise ConfigError(f"{place} is not a folder.")
        if not hasattr(step, "glob_pattern"):  # it reads the media that documents name
            continue
        names = list_input(step).names
        if not names:
            pattern = ""
            if step.glob_pattern:
                pattern = f' that match "{step.glob_pattern}"'
            raise ConfigError(f"{place} contains no files{pattern}.")
        check_codecs(place, step, names)
        if isinstance(step, BatchReader) and not any(root.exists() for _, root in plan.kept):
            step.check()


def check_listed(place: str, reader: BaseDiskReader) -> None:
    """Raises ConfigError if an input elsewhere is not there, or no file of it matches."""
    url = reader.data_folder.resolve_paths("")
    pattern = reader.glob_pattern
    try:
        names = list_input(reader).names
    except FileNotFoundError as error:
        raise ConfigError(
            f"{place}: {url} is not there, or this account may not see it: {failure_line(error)}"
        ) from error
    if not names:
        raise ConfigError(
            f"{place}: {url} has no files{f' that match {pattern!r}' if pattern else ''}."
        )


def _check_launch(plan: RunPlan) -> None:
    """Refuses a local run whose servers cannot start. Cluster jobs may have what is missing here.

    Raises:
        ConfigError: names the step and the setting.
    """
    if not plan.is_local or not plan.incomplete():
        return
    for runner in plan.runners:
        try:
            for config in runner.step.models.values():
                check_servers(config)
            check_monitoring(runner.step.monitoring)
        except (ConfigError, ServerStartFailed) as error:
            raise ConfigError(f"{step_place(runner.index, runner.step)}: {error}") from error


def _check_hub(plan: RunPlan) -> None:
    """Checks that tasks may write to their output folders on the hub, and makes missing
    repositories.

    Raises:
        OutputFailed: see ``check_access``.
    """
    for runner in plan.runners:
        writer = runner.step.output_writer
        hub = HubFolder.of(writer.output_folder)
        if hub is None:
            continue
        if runner.step.retry_dead_letters or plan.incomplete():
            check_access(hub, private_if_made(writer), committed=committed_here(runner))


def committed_here(runner: RunnerPlan) -> Callable[[], int]:
    root = runner.root
    if root is None:
        return int
    return partial(committed_files, runner.step.output_writer, root)


@gc_paused()  # commits of many ranks, and no garbage: collections would take a third of the time
def check_output(
    plan: RunPlan, before: bool, without: Collection[int] = (), policy: RetryPolicy | None = None
) -> dict[Path, JobSums]:
    """Compares the output of all ranks, also those that datatrove skips, with their checkpoints.

    Returns the sums of each checkpoint that can be seen here, by its folder.

    Args:
        before: ranks without a checkpoint will start. Else the sums include the work of all
            attempts.
        without: indices of steps in the pipeline whose output is skipped.
        policy: see ``HubReads.looked``.

    Raises:
        CkptError: see ``check_output_of_run``.
    """
    found = {}
    for runner, root in plan.kept:
        if runner.index not in without:
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
