"""Everything that is checked before a run starts anything, and once more at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.dealt_out import lost_ranks, retired_ranks
from datatrove_ckpt.checkpoint.layout import NOTHING_PUBLISHED, OTHERS_FILES, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.ledger import JobSums, RankLedger, Want
from datatrove_ckpt.errors import ConfigError, OutputFailed, OutputMismatch
from datatrove_ckpt.generation.job_check import check_job, check_step_order, checkpoints_here
from datatrove_ckpt.generation.rank_mirror import mirror_finished_ranks, naming_mirror
from datatrove_ckpt.output.committed import OutputCheck, RankCommits, committed_files
from datatrove_ckpt.output.folders import check_pipeline_folders
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import (
    check_access,
    hub_folder_of,
    is_missing_repository,
    private_if_made,
    repository_is_gone,
)
from datatrove_ckpt.output.hub_commits import ANSWER_SECONDS, HubUploads, looks_for
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.output.writers import check_rank_in_template
from datatrove_ckpt.preflight.inputs import check_inputs_unchanged, note_steps, waits
from datatrove_ckpt.preflight.requirements import check_codecs, check_launch
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.retrying import failure_line
from datatrove_ckpt.runner import InferenceRunner


def check_before_run(executor: Any, retries_dead_letters: bool = False) -> None:
    """All checks that need more than the settings. It starts nothing, and tells each runner the steps before it.

    Args:
        retries_dead_letters: the run processes dead letters, so the input may be gone.

    Raises:
        ConfigError: a folder that is a file, input that is not there, or a requirement that is missing on this machine.
        CheckpointMismatch: checkpoints, markers or the input of finished ranks are those of another run.
        OutputFailed: the output's repository on the hub cannot be written to.
        CkptError: see ``check_output_of_run``.
        OSError: the input cannot be listed.
    """
    check_folders(executor)
    if not retries_dead_letters:
        check_inputs(executor)
    check_launch(executor)
    with ExitStack() as stack:
        for _, step, _ in checkpointed_steps(executor):
            stack.enter_context(naming_mirror(step))
        check_job(executor)
        check_inputs_unchanged(executor)
        check_hub(executor)
        check_output(executor, before=True)
    note_steps(executor)
    for _, step, root in checkpointed_steps(executor):
        if root.is_dir():  # no rank will upload these itself, because datatrove does not start it again
            mirror_finished_ranks(step, root)


def checkpointed_steps(executor: Any) -> Iterator[tuple[int, InferenceRunner, Path]]:
    """Index, step and folder of each checkpoint that is on this machine."""
    for index, step in enumerate(executor.pipeline):
        if isinstance(step, InferenceRunner) and step.checkpoints_local_dir is not None:
            root = checkpoints_here(executor, step)
            if root is not None:
                yield index, step, root


class Checked(NamedTuple):
    """What was compared and is as it should be.

    Attributes:
        jobs: the sums of each checkpoint that is on this machine, by its folder. All their output files were compared.
        inputs: input files of finished ranks, with what these have read.
    """

    jobs: dict[Path, JobSums]
    inputs: int


def check_after_run(executor: Any) -> Checked:
    """What exit code 0 promises. Another run on the same folders may have finished ranks since ``check_before_run``.

    Raises:
        CkptError, OSError: as ``check_before_run``.
    """
    check_job(executor, dry_run=True)
    inputs = check_inputs_unchanged(executor)
    return Checked(check_output(executor, before=False), inputs)


def check_steps(executor: Any) -> None:
    """The checks of settings that one step alone cannot see.

    Raises:
        ConfigError: steps or tasks would write the same files, a step would read its own output, or get no documents.
    """
    for step in executor.pipeline:
        if isinstance(step, InferenceRunner):
            check_rank_in_template(step.output_writer, executor.world_size)
    check_step_order(executor.pipeline)
    check_pipeline_folders(executor.pipeline)


def check_folders(executor: Any) -> None:
    """Refuses local folders of the settings where there is a file.

    Raises:
        ConfigError: names the setting and the file.
    """
    folders: list[tuple[str, str | Path]] = []
    if executor.logging_dir.is_local():
        folders.append(("logging_dir", executor.logging_dir.resolve_paths("")))
    folders += [("checkpoints_local_dir", root) for _, _, root in checkpointed_steps(executor)]
    for step in executor.pipeline:
        if isinstance(step, InferenceRunner) and step.output_writer.output_folder.is_local():
            folders.append(("output_folder", step.output_writer.output_folder.resolve_paths("")))
    for setting, folder in folders:
        place = Path(folder).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise ConfigError(
                f"{setting}: {str(folder)!r} cannot be a folder, because {place} is a file. Choose another folder."
            )


def check_inputs(executor: Any) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks complete.

    Checks local folders only, and none that another executor has yet to create.

    Raises:
        ConfigError: the folder is missing, no file matches, or the package for a compression is missing.
    """
    if waits(executor):
        return
    for index, step in enumerate(executor.pipeline):
        folder = getattr(step, "data_folder", None)
        if folder is None or not folder.is_local() or getattr(step, "paths_file", None):
            continue
        place = f'pipeline[{index}] {type(step).__name__}: data_folder: "{folder.path}"'
        if not folder.isdir(""):
            raise ConfigError(f"{place} is not a folder.")
        names = folder.list_files(recursive=step.recursive, glob_pattern=step.glob_pattern)
        if not names:
            pattern = f' that match "{step.glob_pattern}"' if step.glob_pattern else ""
            raise ConfigError(f"{place} contains no files{pattern}.")
        check_codecs(place, step, names)


def check_hub(executor: Any) -> None:
    """Asks the hub whether tasks that will run may write to their output folders, and has missing repositories made.

    Raises:
        OutputFailed: see ``check_access``.
    """
    for step in executor.pipeline:
        if not isinstance(step, InferenceRunner) or (hub := hub_folder_of(step.output_writer)) is None:
            continue
        if step.retry_dead_letters or executor.get_incomplete_ranks():
            check_access(hub, private_if_made(step.output_writer), committed=committed_here(executor, step))


def committed_here(executor: Any, step: InferenceRunner) -> Callable[[], int] | None:
    """Counts the output files that a step's checkpoints on this machine name; None if it has none here."""
    if step.checkpoints_local_dir is None or (root := checkpoints_here(executor, step)) is None:
        return None
    return partial(committed_files, step.output_writer, root)


@gc_paused()  # commits of many ranks, and no garbage: collections would take a third of the time
def check_output(
    executor: Any, before: bool, without: Collection[int] = (), patience_seconds: float | None = None
) -> dict[Path, JobSums]:
    """Compares the output of all ranks with their checkpoints, also of those that datatrove skips.

    Returns the sums of each checkpoint that can be seen here, by its folder.

    Args:
        before: ranks that have no checkpoint will start. Else the sums have the work of all attempts, too.
        without: indices of steps in the pipeline whose output is not looked at.
        patience_seconds: see ``check_output_of_run``.

    Raises:
        CkptError: see ``check_output_of_run``.
    """
    found = {}
    for index, step, root in checkpointed_steps(executor):
        if index not in without:
            # Ranks elsewhere, and those with a mirror, may have checkpoints that cannot be seen here.
            here = before and isinstance(executor, LocalPipelineExecutor) and step.checkpoints_remote_dir is None
            first = getattr(executor, "local_rank_offset", 0)
            found[root] = check_output_of_run(
                step.output_writer,
                root,
                executor.logging_dir.resolve_paths(""),
                executor.world_size,
                first_starts=range(first, first + executor.local_tasks) if here else (),
                patience_seconds=patience_seconds,
                want=Want.COMMITS if before else Want.COMMITS | Want.HISTORY,
            )
    return found


# output of all ranks --------------------------------------------------------------------------------------------------

# Compares the output folder with the checkpoints of all ranks, before a job starts and after it has ended.
#
# datatrove skips ranks that are complete, so they do not look at their own files again. A rank that runs does.


def check_output_of_run(
    writer: DiskWriter,
    checkpoints: Path,
    logging_dir: str,
    tasks: int,
    first_starts: Iterable[int] = (),
    patience_seconds: float | None = None,
    want: Want = Want.COMMITS,
) -> JobSums:
    """Lists the output folder once. Returns the sums over the ranks of the job; all committed files are there.

    Args:
        logging_dir: the executor's.
        tasks: number of tasks of the job.
        first_starts: ranks that will start for the first time, if they have no checkpoint.
        patience_seconds: how long a hub that does not answer is asked; None: as long as ranks ask it.
        want: what to read of each rank, for the sums.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint knows, or the
            repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/ledger.py``.
    """
    check = OutputCheck(writer, checkpoints, logging_dir)
    numbers = rank_numbers(checkpoints) if checkpoints.is_dir() else []
    retries = retry_folders(checkpoints)
    retired, job = retired_ranks(checkpoints), JobSums()

    def add(rank: RankLedger) -> None:
        if rank.number < tasks or rank.number in retired:
            job.add(rank)

    try:  # all, before any file is called unknown
        commits = {rank: RankCommits(checkpoints, rank, retries, want=want, seen=add) for rank in numbers}
    except CommitsDamaged as error:
        raise CommitsDamaged(error.path, error.what, logging_dir) from None
    found = _look(check, commits.values(), patience_seconds)
    check.refuse_shared(commits.values())
    check.refuse_lost(commits.values(), found)
    for rank in first_starts:
        if rank not in commits or not commits[rank].has_run:
            check.refuse_existing(commits.get(rank) or RankCommits(checkpoints, rank, retries), found)
    for rank_commits in commits.values():
        if rank_commits.is_finished:
            check.refuse_unknown(rank_commits, found)
        elif rank_commits.has_run and not (rank_commits.folder / OTHERS_FILES).exists():
            # It may run elsewhere. If it has published nothing even now, it had not when the folder was listed.
            check.refuse_strangers(rank_commits, found, not (rank_commits.folder / NOTHING_PUBLISHED).exists())
    for rank, text in lost_ranks(checkpoints):  # they may be all that is left of its documents
        if found.by_rank[rank]:
            raise OutputMismatch(text)
    check.refuse_other_ranks(found, tasks, retired)
    return job


def _look(check: OutputCheck, commits: Collection[RankCommits], patience_seconds: float | None) -> FoundFiles:
    """
    Raises:
        OutputMismatch: the repository is gone, with files that were committed.
        OutputFailed: the folder cannot be listed.
    """
    if (hub := hub_folder_of(check.writer)) is not None:
        return _look_at_hub(hub, check, commits, patience_seconds)
    try:
        return StoppableCalls().run(lambda: check.look(commits), ANSWER_SECONDS)
    except OSError as error:
        raise OutputFailed(
            f"{check.where} cannot be listed: {failure_line(error)}. Correct that and run the same command again."
        ) from error


def _look_at_hub(
    hub: HubFolder, check: OutputCheck, commits: Collection[RankCommits], patience_seconds: float | None
) -> FoundFiles:
    uploads = HubUploads(hub, StoppableCalls())
    try:
        found = uploads.looked("cannot be listed", lambda: check.look(commits), patience_seconds)
    except OutputFailed as error:
        if not is_missing_repository(error.__cause__):
            raise
        if number := committed_files(check.writer, check.root):
            raise OutputMismatch(repository_is_gone(hub, number)) from error
        return FoundFiles({})  # where it is needed, ``check_access`` asks for it
    lost = [one.file for each in commits for one in each.files if not found.is_right(one.file)]
    found.show(uploads.look_again(lost, looks_for(each.folder for each in commits)))
    return found
