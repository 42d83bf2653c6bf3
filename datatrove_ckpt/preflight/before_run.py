"""Everything that is checked before a run starts anything, and once more at its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.executor import LocalPipelineExecutor

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.job_check import check_job, check_step_order, checkpoints_here
from datatrove_ckpt.generation.rank_mirror import mirror_finished_ranks, naming_mirror
from datatrove_ckpt.maintenance.run_check import check_output_of_run
from datatrove_ckpt.output.committed import committed_files
from datatrove_ckpt.output.folders import check_pipeline_folders
from datatrove_ckpt.output.hub_access import check_access, hub_folder_of, private_if_made
from datatrove_ckpt.output.writer_check import check_rank_in_template
from datatrove_ckpt.preflight.inputs import check_inputs_unchanged, note_steps, waits
from datatrove_ckpt.preflight.requirements import check_codecs, check_launch
from datatrove_ckpt.process.gc_tuning import gc_paused
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
        files: output files, with their commits; None: the checkpoints are on other nodes.
        inputs: input files of finished ranks, with what these have read.
    """

    files: int | None
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
    for index, step, root in checkpointed_steps(executor):
        if index not in without:
            # Ranks elsewhere, and those with a mirror, may have checkpoints that cannot be seen here.
            here = before and isinstance(executor, LocalPipelineExecutor) and step.checkpoints_remote_dir is None
            first = getattr(executor, "local_rank_offset", 0)
            files = (files or 0) + check_output_of_run(
                step.output_writer,
                root,
                executor.logging_dir.resolve_paths(""),
                executor.world_size,
                first_starts=range(first, first + executor.local_tasks) if here else (),
                patience_seconds=patience_seconds,
            )
    return files
