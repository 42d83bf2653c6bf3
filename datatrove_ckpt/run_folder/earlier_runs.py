"""Compares a job, before it starts and after it has run, with what earlier runs have left:
completion markers and checkpoints, the input that finished tasks have read, and the output.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.pipeline.readers.base import BaseDiskReader
from loguru import logger

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.compare import is_of_code
from datatrove_ckpt.checkpoint.job_file import (
    compare_job,
    name_tasks,
    recorded_settings,
    refuse_changes,
)
from datatrove_ckpt.checkpoint.layout import (
    RUN,
    SHARD,
    is_finished,
    rank_folder,
    rank_numbers,
    refuse_missing_run_json,
    retry_folders,
)
from datatrove_ckpt.checkpoint.rank_summary import (
    Include,
    JobTotals,
    RankSummary,
    read_rank,
    read_ranks,
)
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError, name_copy, use_form
from datatrove_ckpt.generation.finished_from import compare_earlier_runs, listed
from datatrove_ckpt.generation.replay import evidence
from datatrove_ckpt.generation.runner_settings import described
from datatrove_ckpt.mirror.restore import compare_mirrored_job, restore_outdated
from datatrove_ckpt.output.output_folder import OutputFolder, RankCommits
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.readers import HuggingFaceDatasetReader, SeekingReader
from datatrove_ckpt.readers.compressed import WHOLE, refuse_partial_files
from datatrove_ckpt.readers.inputs import (
    MISSING,
    Reading,
    Revisions,
    list_input,
    options_of,
    sample_files,
    shuffled_names,
)
from datatrove_ckpt.readers.shard_record import FileRecord, ReaderRecord, ShardRecord, differences
from datatrove_ckpt.run_folder.run_plan import RunnerPlan, RunPlan, WrongMarker

# What ``check_job`` compares before any task of a job starts. datatrove skips tasks that have a
# completion marker in ``logging_dir``, so a finished task never reads its own checkpoint again.
#
#     marker   checkpoint of the rank      what happens
#     any      older than in the mirror    it is restored, and then compared
#     any      of another run              refused, see ``checkpoint/compare.py``
#     yes      none, but in the mirror     it is restored, and then compared
#     yes      none                        refused: its documents may not be in the output
#     yes      not finished                the marker is removed, so that the rank runs
#     yes      of another run, but empty   the marker is removed: it runs with the new settings
#     yes      finished                    the rank is skipped
#     no       of this run, or none        the rank runs


def check_job(plan: RunPlan, dry_run: bool = False) -> list[WrongMarker]:
    """Compares a job, and those that it depends on, with what its folders hold from earlier runs.
    Starts nothing, and removes no marker: other checks may refuse the run.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
    """
    wrong = []
    if plan.depends is not None:
        wrong = check_job(plan.depends, dry_run)
    completed = plan.completed()
    tasks = plan.tasks
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            # datatrove's file of the last start has it, where no checkpoint does.
            if completed and plan.logging_dir.isfile("executor.json"):
                with plan.logging_dir.open("executor.json") as file:
                    tasks = json.load(file).get("world_size")
            if tasks != plan.tasks:
                raise CheckpointMismatch(
                    f"{plan.logging_dir.resolve_paths('completions')} marks tasks of another run "
                    f"as complete:\n  tasks: {tasks} -> {plan.tasks}\nGo on with the old number "
                    "of tasks, or choose another logging_dir (and output)."
                )
            continue
        faults = _compare_checkpoints(runner, completed, dry_run)
        wrong += [WrongMarker(plan, rank, text) for rank, text in faults.items()]
        completed = [rank for rank in completed if rank not in faults]
    return wrong


def _compare_checkpoints(runner: RunnerPlan, skipped: list[int], dry_run: bool) -> dict[int, str]:
    plan = runner.plan
    root = runner.root or Path(str(runner.step.checkpoints_local_dir))
    use_form(runner.step.form)
    mirror = runner.step.checkpoints_remote_dir
    if not mirror:
        for rank in plan.local_ranks:
            refuse_missing_run_json(rank_folder(root, rank))
        return _compare_markers(runner, root, skipped)
    # Ranks may be restored from the mirror. Nodes of a cluster may have checkpoints on their own
    # disks.
    with ExitStack() as stack:
        if not plan.is_local and not root.exists():
            copy = Path(stack.enter_context(TemporaryDirectory()))
            name_copy(copy, str(root))
            root = copy
        if dry_run:
            skipped = [rank for rank in skipped if (rank_folder(root, rank) / RUN).exists()]
        elif runner.copy is None:
            restore_outdated(mirror, root, skipped)
        return _compare_markers(runner, root, skipped)


def _compare_markers(runner: RunnerPlan, folder: Path, skipped: list[int]) -> dict[int, str]:
    """Returns the faults of markers to remove, by rank."""
    plan = runner.plan
    step = runner.step
    identity = runner.identity
    ranks = plan.local_ranks

    if len(skipped) < len(ranks):
        compare_earlier_runs(step, identity)
    # A retry takes dead letters with any settings, but each rank its own.
    is_retry = step.retry_dead_letters
    comparison = compare_job(
        folder, identity, None if len(ranks) == plan.tasks else ranks, is_retry
    )
    if step.checkpoints_remote_dir:
        mirrored = compare_mirrored_job(step.checkpoints_remote_dir, folder, identity, is_retry)
        comparison.by_rank |= mirrored.by_rank
        comparison.empty += mirrored.empty
    marked = [rank for rank in skipped if rank not in comparison.empty]
    if comparison.changes:
        advice = ""
        done = [rank for rank in comparison.ranks if rank in marked]
        if done:
            advice = f"Finished with the old settings: {name_tasks(done)}. "
        may_mix = not comparison.is_layout and len(marked) < len(ranks)
        if not (step.accept_changes and may_mix):
            if len(marked) == len(ranks):
                advice = (
                    "All tasks are finished; with retry_dead_letters the new settings apply to "
                    "the dead letters. "
                )
            shown = ""
            if may_mix and (plan.is_local or plan.for_doctor):
                shown = evidence(step, folder, comparison.changes)
            elif may_mix and is_of_code(comparison.changes):
                advice += "What that does to documents that are done: datatrove-ckpt doctor. "
            raise refuse_changes(folder, comparison, advice, may_mix, shown)
        if advice:
            logger.warning(advice)
    missing = [rank for rank in marked if not (rank_folder(folder, rank) / RUN).exists()]
    if missing:
        markers = plan.logging_dir.resolve_paths("completions")
        mirror = step.checkpoints_remote_dir
        holds = f"{folder} holds no"
        if mirror:
            holds = f"neither {folder} nor {mirror} holds a"
        raise CheckpointMismatch(
            f"{markers} marks {name_tasks(missing)} as complete, but {holds} checkpoint that "
            "shows it. Bring the checkpoints back, run where they are, or choose another "
            "logging_dir. To start these tasks over, delete their markers "
            f"({markers}/{missing[0]:05d} ...) and output files."
        )
    wrong = {}
    for rank in skipped:
        if rank in comparison.empty:
            reason = "did nothing yet, and its settings have changed"
        elif is_finished(rank_folder(folder, rank)):
            continue
        else:
            reason = "is not finished"
        marker = plan.logging_dir.resolve_paths(f"completions/{rank:05d}")
        wrong[rank] = (
            f"Task {rank} is marked as complete ({marker}), but its checkpoint "
            f"{folder}/{rank:05d} {reason}."
        )
    return wrong


def add_finished(runner: RunnerPlan, folders: Iterable[Path]) -> list[str]:
    """Returns the folders of ``finished_from``, and run folders with documents whose settings are
    those of the run.
    """
    finished = listed(runner.step.finished_from or ())
    for folder in sorted(folders, key=lambda path: (len(path.name), path), reverse=True):
        checkpoints = folder / "checkpoints"
        if not recorded_settings(checkpoints):
            continue
        ranks = read_ranks(checkpoints, Include.JOURNALS)
        if not any(rank.damage or rank.numbers().done.written for rank in ranks):
            continue
        paths = (folder / "output", checkpoints)
        parts = [str(path) for path in paths if path.exists()]
        try:
            compare_earlier_runs(runner.step.changed(finished_from=parts), runner.identity)
            finished += parts
        except (CheckpointMismatch, ConfigError) as error:
            warn_once(f"{folder}: its answers are not taken over: {error}")
    return finished


# datatrove skips a finished rank, so the old output would stand for a changed input. The own check
# of a finished rank without its marker misses files that were replaced by others of equal size.

_NAMED_FILES = 10
_OTHER_CONTENT = "has other content"


def check_inputs_unchanged(plan: RunPlan) -> None:
    """Compares the input with what each finished rank has read: a listing per reader, a sample per
    file.

    It skips runs with another number of tasks, sources that are no files, and retries of dead
    letters, whose input may be gone.

    Raises:
        CheckpointMismatch: a file was added, removed or changed, or an option of a reader, or a
            step before the runner.
        OSError: the input cannot be listed.
    """
    for runner, root in plan.with_checkpoints:
        records = {}
        # The number of tasks is refused elsewhere, with a better message.
        if recorded_settings(root).get("tasks") == plan.tasks:
            for rank in rank_numbers(root):
                folder = rank_folder(root, rank)
                record = ShardRecord.read(folder / SHARD) if is_finished(folder) else None
                if record is not None:
                    records[rank] = record
        is_retry = runner.step.retry_dead_letters
        if not is_retry:
            _check_steps(runner.before, records)
        if plan.waits:
            continue
        readers = [step for step in runner.before if isinstance(step, BaseDiskReader)]
        records = {
            rank: record for rank, record in records.items() if len(record.readers) == len(readers)
        }
        if not records:
            continue
        resuming = set(plan.incomplete(skip_completed=True if is_retry else None))
        with Reading(revisions=Revisions(root)):  # a dataset is listed as the ranks read it
            for number, reader in enumerate(readers):
                # A listing would open the dataset; and the input may be gone.
                if is_retry and isinstance(reader, HuggingFaceDatasetReader):
                    continue
                try:
                    if is_retry and not list_input(reader).names:
                        continue
                except (FileNotFoundError, InputError):
                    continue
                read = {rank: record.readers[number] for rank, record in records.items()}
                _check_reader(plan.tasks, reader, read, resuming, plan.listed.get(reader, ()))


def _check_steps(pipeline: Sequence[object], records: dict[int, ShardRecord]) -> None:
    listed = described(pipeline)
    changed = {
        rank: differences(record.pipeline, listed)
        for rank, record in records.items()
        if record.pipeline is not None
    }
    ranks = [rank for rank, lines in changed.items() if lines]
    if ranks:
        lines = "\n  ".join(changed[ranks[0]])
        raise CheckpointMismatch(
            f"The steps before InferenceRunner have changed since {name_tasks(ranks)} read the "
            f"input:\n  {lines}\nPut the steps back, or process the new input as another run.",
            starts_over="with old results",
        )


def _check_reader(
    tasks: int,
    reader: BaseDiskReader,
    records: dict[int, ReaderRecord],
    resuming: set[int],
    listed: Sequence[str],
) -> None:
    inputs = None
    # Listing such a dataset would download it: its name and recorded commit stand for it.
    is_dataset = isinstance(reader, HuggingFaceDatasetReader)
    if not is_dataset or reader.load_from_disk or reader.streaming:
        inputs = list_input(reader)
    current = recorded = {file.name: file for record in records.values() for file in record.files}
    if inputs is not None:
        indexes = [index for index, name in enumerate(inputs.names) if name in recorded]
        current = {file.name: file for file in sample_files(inputs, indexes)}
        unread = sorted({*listed} - {*inputs.names} - recorded.keys())
        if unread and not any(record.limited for record in records.values()):
            raise InputError(
                f"The input file {unread[0]!r} in {reader.data_folder.path} is gone since this "
                "run began, unread. Put it back, and process it as another run."
            )
    changed = {name: _difference(file, current.get(name)) for name, file in recorded.items()}
    changed = {name: text for name, text in changed.items() if text}
    without = {
        "path_columns": False,
        "delimiter": ",",
        "encoding": None,
    }
    options_now = without | options_of(reader)
    options = dict[str, str]()
    ranks = []
    for rank, record in records.items():
        read = {file.name for file in record.files}
        if isinstance(reader, SeekingReader):
            refuse_partial_files(reader.data_folder, read, reader.compression, record.options)
        if rank in resuming:
            if any(changed.get(name) == _OTHER_CONTENT for name in read):
                ranks.append(rank)
            continue
        would_read = read
        if inputs is not None:
            names = inputs.shard(rank, tasks).names
            if (seed := getattr(reader, "shuffle_seed", None)) is not None:
                names = shuffled_names(names, seed)
            if record.limited:
                names = names[: len(record.files)]
            would_read = set(names)
        changed |= dict.fromkeys(would_read - recorded.keys(), "was not read then")
        differing = {
            name: f"{value!r} -> {options_now[name]!r}"
            for name, value in (without | record.options).items()
            if name != WHOLE and value != options_now[name]
        }
        options |= differing
        if differing or would_read != read or not read.isdisjoint(changed):
            ranks.append(rank)
    if ranks:
        lines = [f"  {name!r} {text}" for name, text in sorted(changed.items())]
        if len(lines) > _NAMED_FILES:
            lines[_NAMED_FILES:] = [f"  and {len(lines) - _NAMED_FILES} more"]
        lines += [f"  {name}: {text}" for name, text in options.items()]
        raise CheckpointMismatch(
            f"The input in {reader.data_folder.path} is not what {name_tasks(ranks)} read:\n"
            + "\n".join(lines or ["  the files are dealt out to the tasks in another order"])
            + "\nPut the input back, or process the new one as another run.",
            starts_over="with old results",
        )
    # Samples do not show an edit in the middle of a long file that keeps its size.
    touched = sum(
        file.modified != current[name].modified
        for name, file in recorded.items()
        if name not in changed
    )
    if touched:
        logger.warning(
            f"{plural(touched, 'input file')} of finished tasks in {reader.data_folder.path}: "
            "only their times differ, so they count as unchanged."
        )


def _difference(recorded: FileRecord, current: FileRecord | None) -> str:
    if current is None or current.size == MISSING:
        return "is gone"
    if recorded.size != current.size:
        return f"had {recorded.size} bytes, has {current.size}"
    if recorded.sample and current.sample and recorded.sample != current.sample:
        return _OTHER_CONTENT
    return ""


def refuse_vanished_input(root: Path, job: JobTotals) -> None:
    """Raises InputError if a rank without a file had one when another rank listed the input."""
    for rank in sorted({*range(job.with_input)} - job.known):
        record = ShardRecord.read(rank_folder(root, rank) / SHARD)
        if record is None or not record.readers:
            continue
        if not any(reader.files for reader in record.readers):
            raise InputError(
                f"The input file of task {rank} was gone before its start. Put it back, and "
                "process it as another run."
            )


def compare_outputs(plan: RunPlan) -> None:
    """Compares the output of all ranks, also those that datatrove skips, with their checkpoints,
    before a run.
    """
    for runner, root in plan.with_checkpoints:
        # Ranks elsewhere, or with a mirror, may have checkpoints that are invisible here;
        # checkpoints of jobs are visible.
        first_starts: Iterable[int] = ()
        if plan.as_jobs or (plan.is_local and runner.step.checkpoints_remote_dir is None):
            first_starts = plan.local_ranks
        check_output_of_run(runner, root, first_starts)


@gc_paused()  # commits of many ranks, and no garbage
def check_output_of_run(
    runner: RunnerPlan,
    checkpoints: Path,
    first_starts: Iterable[int] = (),
    want: Include = Include.COMMITS,
) -> JobTotals:
    """Lists the output folder once. Returns the sums over the ranks of the job; all committed files
    are there.

    Args:
        first_starts: ranks that will start for the first time, if they have no checkpoint.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint
            names, or the repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/rank_summary.py``.
    """
    logging_dir = runner.plan.logging_dir.resolve_paths("")
    tasks = runner.plan.tasks
    mirror = runner.step.checkpoints_remote_dir
    folder = OutputFolder(runner.step.output_writer, checkpoints, mirror, logging_dir)
    numbers = []
    if checkpoints.is_dir():
        numbers = rank_numbers(checkpoints)
    retries = retry_folders(checkpoints)
    job = JobTotals()

    def read(folder: Path, commits: Include) -> RankSummary:
        rank = read_rank(folder, want | commits)
        if rank.number < tasks:
            job.add_rank(rank)
        return rank

    try:  # all, before any file is called unknown
        commits = {rank: RankCommits(checkpoints, rank, retries, read) for rank in numbers}
    except CommitsDamaged as error:
        raise CommitsDamaged(error.log, error.damage, logging_dir) from None
    committed = folder.by_name(commits.values())
    policy = retrying.HUB_PROBE if runner.plan.for_doctor else None
    listing = folder.look(committed, policy=policy)
    folder.refuse_lost(committed, listing)
    for rank in first_starts:
        if not listing.by_rank[rank]:
            continue
        # Checked again: a rank that started since may have written the files.
        rank_files = rank_folder(checkpoints, rank)
        has_started = (rank_files / RUN).exists()
        if mirror is not None and not has_started:
            from datatrove_ckpt.mirror.manifests import VersionStore

            has_started = bool(VersionStore(f"{mirror}/{rank_files.name}").all_versions())
        if not has_started:
            folder.refuse_foreign(rank, listing)
    for rank_commits in commits.values():
        is_complete = rank_commits.is_finished
        if is_complete or rank_commits.has_run:
            folder.refuse_foreign(rank_commits.rank, listing, rank_commits, is_complete)
    for rank in sorted(listing.by_rank):
        if rank >= tasks:
            folder.refuse_foreign(rank, listing)
    return job
