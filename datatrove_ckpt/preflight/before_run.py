"""Everything that is checked before a run starts anything, and once more at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import ConfigError, ServerStartFailed
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.generation.rank_mirror import naming_mirror
from datatrove_ckpt.inference.servers.connect import check_servers
from datatrove_ckpt.maintenance.run_check import check_output_of_run
from datatrove_ckpt.output.committed import committed_files
from datatrove_ckpt.output.folders import check_pipeline_folders
from datatrove_ckpt.output.hub_access import check_access, hub_folder_of, private_if_made
from datatrove_ckpt.output.writers import check_rank_in_template
from datatrove_ckpt.preflight.inputs import check_codecs, check_inputs_unchanged, note_steps
from datatrove_ckpt.preflight.job_check import check_job, check_step_order
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.process.gc_tuning import gc_paused


def check_before_run(executor: PipelineExecutor) -> None:
    """All checks that need more than the settings. It starts nothing, and tells each runner the steps before it.

    Raises:
        ConfigError: a folder that is a file, input that is not there, or a requirement that is missing on this machine.
        CheckpointMismatch: checkpoints, markers or the input of finished ranks are those of another run.
        OutputFailed: the output's repository on the hub cannot be written to.
        CkptError: see ``check_output_of_run``.
        OSError: the input cannot be listed.
    """
    plan = RunPlan.of(executor)
    _check_folders(plan)
    if not plan.retries:
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
        files: output files, with their commits; None: the checkpoints are on other nodes.
        inputs: input files of finished ranks, with what these have read.
    """

    files: int | None
    inputs: int


def check_after_run(executor: PipelineExecutor) -> Checked:
    """What exit code 0 promises. Another run on the same folders may have finished ranks since ``check_before_run``.

    Raises:
        CkptError, OSError: as ``check_before_run``.
    """
    plan = RunPlan.of(executor)
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
    """Refuses local folders of the settings where there is a file.

    Raises:
        ConfigError: names the setting and the file.
    """
    outputs = [runner.step.output_writer.output_folder for runner in plan.runners]
    folders: list[tuple[str, str | Path]] = []
    if plan.logging_dir.is_local():
        folders.append(("logging_dir", plan.logging_dir.resolve_paths("")))
    folders += [("checkpoints_local_dir", root) for _, root in plan.kept]
    folders += [("output_folder", output.resolve_paths("")) for output in outputs if output.is_local()]
    for setting, folder in folders:
        place = existing_part(Path(folder).absolute())
        if not place.is_dir():
            raise ConfigError(
                f"{setting}: {str(folder)!r} cannot be a folder, because {place} is a file. Choose another folder."
            )


def _check_inputs(plan: RunPlan) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks complete.

    Checks local folders only, and none that another executor has yet to create.

    Raises:
        ConfigError: the folder is missing, no file matches, or the package for a compression is missing.
    """
    if plan.waits:
        return
    for index, step in enumerate(plan.pipeline):
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


def _check_launch(plan: RunPlan) -> None:
    """Refuses a local run whose servers cannot start. Jobs of a cluster run elsewhere, and may have what is missing.

    Raises:
        ConfigError: names the step and the setting.
    """
    if not plan.is_local or not plan.incomplete():
        return
    for runner in plan.runners:
        try:
            check_servers(runner.step.config)
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
        if (hub := hub_folder_of(writer)) is None:
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
) -> int | None:
    """Compares the output of all ranks with their checkpoints, also of those that datatrove skips.

    Returns the number of files; None if no checkpoint can be seen here.

    Args:
        before: ranks that have no checkpoint will start.
        without: indices of steps in the pipeline whose output is not looked at.
        patience_seconds: see ``check_output_of_run``.

    Raises:
        CkptError: see ``check_output_of_run``.
    """
    files: int | None = None
    for runner in plan.runners:
        if (root := runner.root) is not None and runner.index not in without:
            # Ranks elsewhere, and those with a mirror, may have checkpoints that cannot be seen here.
            here = before and plan.is_local and runner.step.checkpoints_remote_dir is None
            files = (files or 0) + check_output_of_run(
                runner.step.output_writer,
                root,
                plan.logging_dir.resolve_paths(""),
                plan.tasks,
                first_starts=plan.local_ranks if here else (),
                patience_seconds=patience_seconds,
            )
    return files
