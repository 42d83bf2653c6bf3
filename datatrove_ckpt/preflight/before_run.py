"""Everything that is checked before a run starts anything, and once more at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.job_ledger import JobLedger, retired_ranks
from datatrove_ckpt.checkpoint.layout import NOTHING_PUBLISHED, RUN, rank_folder, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.ledger import JobSums, RankLedger, Want
from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import ConfigError, OutputFailed, OutputMismatch, ServerStartFailed
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.generation.rank import naming_mirror
from datatrove_ckpt.inference.servers.connect import check_servers
from datatrove_ckpt.output.committed import CommittedFile, OutputCheck, RankCommits, committed_files
from datatrove_ckpt.output.folders import check_pipeline_folders
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access, is_missing_repository, private_if_made, repository_is_gone
from datatrove_ckpt.output.hub_commits import ANSWER_SECONDS, HubUploads, looks_for
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.output.writers import check_rank_in_template
from datatrove_ckpt.preflight.input_checks import check_codecs, check_inputs_unchanged, note_steps
from datatrove_ckpt.preflight.job_check import check_job, check_step_order
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.readers.inputs import check_reachable, list_input
from datatrove_ckpt.retrying import failure_line


def check_before_run(executor: PipelineExecutor) -> None:
    """All checks that need more than the settings. It starts nothing, and tells each runner the steps before it.

    Raises:
        ConfigError: a folder that is a file, input that is not there, or a requirement that is missing on this machine.
        CheckpointMismatch: checkpoints, markers or the input of finished ranks are those of another run.
        OutputFailed: the output's repository on the hub cannot be written to.
        CkptError: see ``check_output_of_run``.
        OSError: the input cannot be listed.
    """
    plan = RunPlan(executor)
    _check_folders(plan)
    _check_inputs(plan)
    _check_launch(plan)
    with ExitStack() as stack:
        for step, _ in plan.kept:
            stack.enter_context(naming_mirror(step))
        check_job(plan)
        check_inputs_unchanged(plan)
        _check_hub(plan)
        check_output(plan, before=True)
    note_steps(plan)
    for step, root in plan.kept:
        if step.checkpoints_remote_dir is not None and root.is_dir():
            from datatrove_ckpt.mirror.changing import upload_finished_ranks

            # No rank will do it itself, because datatrove does not start those that are complete.
            upload_finished_ranks(step.checkpoints_remote_dir, root)


class Checked(NamedTuple):
    """What was compared and is as it should be.

    Attributes:
        jobs: the sums of each checkpoint that is on this machine, by its folder. All their output files were compared.
        inputs: input files of finished ranks, with what these have read.
    """

    jobs: dict[Path, JobSums]
    inputs: int


def check_after_run(executor: PipelineExecutor) -> Checked:
    """What exit code 0 promises. Another run on the same folders may have finished ranks since ``check_before_run``.

    Raises:
        CkptError, OSError: as ``check_before_run``.
    """
    plan = RunPlan(executor)
    check_job(plan, dry_run=True)
    inputs = check_inputs_unchanged(plan)
    return Checked(check_output(plan, before=False), inputs)


def check_steps(plan: RunPlan) -> None:
    """The checks of settings that one step alone cannot see.

    Raises:
        ConfigError: steps or tasks would write the same files, a step would read its own output, or get no documents.
    """
    for runner in plan.runners:
        check_rank_in_template(runner.step.output_writer, plan.tasks)
    check_step_order(plan.pipeline)
    check_pipeline_folders(plan.pipeline)


def _check_folders(plan: RunPlan) -> None:
    """Refuses local folders of the settings where there is a file, and a new run folder inside another one.

    Raises:
        ConfigError: names the setting and the file, or the other run.
    """
    outputs = [("output_folder", runner.step.output_writer.output_folder) for runner in plan.runners]
    places = [("logging_dir", plan.logging_dir), *outputs]
    folders = [(setting, folder.resolve_paths("")) for setting, folder in places if folder.is_local()]
    for setting, folder in [*folders, *(("checkpoints_local_dir", root) for _, root in plan.kept)]:
        place = existing_part(Path(folder).absolute())
        if not place.is_dir():
            raise ConfigError(
                f"{setting}: {str(folder)!r} cannot be a folder, because {place} is a file. Choose another folder."
            )
    for _, root in plan.kept:
        inside = (place for place in root.parents if place.name in ("output", "checkpoints", "logs"))
        other = next((place for place in inside if any(place.parent.glob(f"checkpoints/[0-9]*/{RUN}"))), None)
        if other and not root.exists() and ("output_folder", str(root.with_name("output"))) in folders:
            raise ConfigError(
                f"run_folder: {root.parent} is inside the run in {other.parent}, in its {other.name}. Choose another."
            )


def _check_inputs(plan: RunPlan) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks complete.

    Lists local folders, others only before jobs that are paid for, and none that another executor has yet to create. A
    retry does not need its input.

    Raises:
        ConfigError: the folder is missing, no file matches, or the package for a compression is missing.
        InputError, OSError: the tasks run here, and what they read cannot be reached.
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
            elif plan.name == "JobsPipelineExecutor" and hasattr(step, "glob_pattern") and plan.incomplete():
                check_listed(f"pipeline[{index}] {type(step).__name__}: data_folder", step)
            continue
        place = f'pipeline[{index}] {type(step).__name__}: data_folder: "{folder.path}"'
        if not folder.isdir(""):
            raise ConfigError(f"{place} is not a folder.")
        if not hasattr(step, "glob_pattern"):  # it reads the media that documents name
            continue
        names = folder.list_files(recursive=step.recursive, glob_pattern=step.glob_pattern)
        if not names:
            pattern = f' that match "{step.glob_pattern}"' if step.glob_pattern else ""
            raise ConfigError(f"{place} contains no files{pattern}.")
        check_codecs(place, step, names)


def check_listed(place: str, reader: Any) -> None:
    """Raises ConfigError if an input elsewhere is not there, or no file of it matches."""
    url, pattern = reader.data_folder.resolve_paths(""), reader.glob_pattern
    try:
        names = list_input(reader).names
    except FileNotFoundError as error:
        raise ConfigError(
            f"{place}: {url} is not there, or this account may not see it: {failure_line(error)}"
        ) from error
    if not names:
        raise ConfigError(f"{place}: {url} has no files{f' that match {pattern!r}' if pattern else ''}.")


def _check_launch(plan: RunPlan) -> None:
    """Refuses a local run whose servers cannot start. Jobs of a cluster run elsewhere, and may have what is missing.

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
            raise ConfigError(f"pipeline[{runner.index}] InferenceRunner: {error}") from error


def _check_hub(plan: RunPlan) -> None:
    """Asks the hub whether tasks that will run may write to their output folders, and has missing repositories made.

    Raises:
        OutputFailed: see ``check_access``.
    """
    for runner in plan.runners:
        writer = runner.step.output_writer
        if (hub := HubFolder.of(writer.output_folder)) is None:
            continue
        if runner.step.retry_dead_letters or plan.incomplete():
            check_access(hub, private_if_made(writer), committed=committed_here(runner))


def committed_here(runner: RunnerPlan) -> Callable[[], int] | None:
    """Counts the output files that a runner's checkpoints on this machine name; None if it has none here."""
    root = runner.root
    return None if root is None else partial(committed_files, runner.step.output_writer, root)


@gc_paused()  # commits of many ranks, and no garbage: collections would take a third of the time
def check_output(
    plan: RunPlan, before: bool, without: Collection[int] = (), patience_seconds: float | None = None
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
    for runner in plan.runners:
        if (root := runner.root) is not None and runner.index not in without:
            # Ranks elsewhere, and those with a mirror, may have checkpoints that cannot be seen here; of jobs all can.
            mirror = runner.step.checkpoints_remote_dir if plan.as_jobs else None
            here = plan.as_jobs or (plan.is_local and runner.step.checkpoints_remote_dir is None)
            ranks = plan.local_ranks if before and here else ()
            want = Want.COMMITS if before else Want.COMMITS | Want.HISTORY
            output = plan, runner.step.output_writer, root, ranks, patience_seconds, want, mirror
            found[root] = check_output_of_run(*output)
    return found


# output of all ranks --------------------------------------------------------------------------------------------------

# Compares the output folder with the checkpoints of all ranks, before a job starts and after it has ended.
#
# datatrove skips ranks that are complete, so they do not look at their own files again. A rank that runs does.


def check_output_of_run(
    plan: RunPlan,
    writer: DiskWriter,
    checkpoints: Path,
    first_starts: Iterable[int] = (),
    patience_seconds: float | None = None,
    want: Want = Want.COMMITS,
    mirror: str | None = None,
) -> JobSums:
    """Lists the output folder once. Returns the sums over the ranks of the job; all committed files are there.

    Args:
        first_starts: ranks that will start for the first time, if they have no checkpoint.
        patience_seconds: how long a hub that does not answer is asked; None: as long as ranks ask it.
        want: what to read of each rank, for the sums.
        mirror: of which ``checkpoints`` is a copy; None: of none.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint knows, or the
            repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/ledger.py``.
    """
    logging_dir, tasks = plan.logging_dir.resolve_paths(""), plan.tasks
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
    committed = check.by_name(commits.values())
    found = _look(check, committed, patience_seconds)
    check.refuse_lost(committed, found)
    for rank in first_starts:
        # Looked at again: what has started since may have written the files that were listed.
        if found.by_rank[rank] and not _has_started(rank_folder(checkpoints, rank), mirror):
            check.refuse_existing(commits.get(rank) or RankCommits(checkpoints, rank, retries), found)
    for rank_commits in commits.values():
        if rank_commits.is_finished:
            check.refuse_unknown(rank_commits, found)
        elif rank_commits.has_run:
            # It may run elsewhere. If it has published nothing even now, it had not when the folder was listed.
            check.refuse_strangers(rank_commits, found, not (rank_commits.folder / NOTHING_PUBLISHED).exists())
    for rank, text in JobLedger.read(checkpoints, ranks={}).lost():  # they may be all that is left of its documents
        if found.by_rank[rank]:
            raise OutputMismatch(text)
    check.refuse_other_ranks(found, tasks, retired)
    return job


def _has_started(folder: Path, mirror: str | None) -> bool:
    if mirror is None or (folder / RUN).exists():
        return (folder / RUN).exists()
    from datatrove_ckpt.mirror.manifests import Versions

    return bool(Versions(f"{mirror}/{folder.name}").all_versions())


def _look(check: OutputCheck, committed: dict[str, CommittedFile], patience_seconds: float | None) -> FoundFiles:
    """
    Raises:
        OutputMismatch: the repository is gone, with files that were committed.
        OutputFailed: the folder cannot be listed.
    """
    if (hub := HubFolder.of(check.writer.output_folder)) is None:
        try:
            return StoppableCalls().run(lambda: check.look(committed), ANSWER_SECONDS)
        except OSError as error:
            raise OutputFailed(
                f"{check.where} cannot be listed: {failure_line(error)}. Correct that and run the same command again."
            ) from error
    uploads = HubUploads(hub, StoppableCalls())
    try:
        found = uploads.looked("cannot be listed", lambda: check.look(committed), patience_seconds)
    except OutputFailed as error:
        if not is_missing_repository(error.__cause__):
            raise
        if number := committed_files(check.writer, check.root):
            raise OutputMismatch(repository_is_gone(hub, number)) from error
        return FoundFiles({})  # where it is needed, ``check_access`` asks for it
    files = committed.values()
    folders = {rank_folder(check.root / one.root, one.rank) for one in files if not found.is_right(one)}
    uploads.look_again(found, files, looks_for(folders))
    return found
