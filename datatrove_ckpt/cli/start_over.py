"""``run --start-over``: renames the run folder, so that the next start begins anew. Deletes nothing.

The folder is renamed in one step: it holds checkpoints, output and logs, so old output never meets a new checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import LOCK, RUN
from datatrove_ckpt.checkpoint.ledger import find_ranks, name_place
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.doors import StartOver, current
from datatrove_ckpt.errors import CheckpointLocked, CkptError, ConfigError
from datatrove_ckpt.preflight.before_run import check_steps
from datatrove_ckpt.preflight.run_plan import RunPlan

FLAG = "--start-over"


def start_over(executor: PipelineExecutor, config: str | None, retries: bool) -> None:
    """Renames the run folder, if the run has begun.

    Args:
        config: the YAML file, if there is one.
        retries: dead letters are to be retried.

    Raises:
        ConfigError: see ``folder_to_move``.
        CheckpointLocked: a process works on a task.
        StorageFailed: the folder could not be renamed.
    """
    if retries:
        raise ConfigError(f"{_flag()}: is given together with retry_dead_letters, which needs the run that is there.")
    plan = RunPlan(executor)
    check_steps(plan)
    folder = folder_to_move(plan, config)
    if folder is None:
        return
    for root in _begun(plan):
        for retry, number, rank in find_ranks(root):
            if (holder := files.lock_holder(rank / LOCK)) is not None:
                raise CheckpointLocked(
                    f"{_flag()}: {files.name_holder(holder)} works on {name_place(retry, number)} in {root}. Stop that "
                    "run, and run the same command again."
                )
    aside = next(name for number in count(1) if not (name := folder.with_name(f"{folder.name}.{number}")).exists())
    files.disk.rename(folder, aside)
    files.disk.sync_dir(folder.parent)
    say(f"Moved aside: {folder} -> {aside}")


def advise(error: CkptError, plan: RunPlan, config: str | None) -> None:
    """Adds to a refusal that tells to choose other folders how to start over, if that would not be refused."""
    starts = [remedy for remedy in error.remedies if isinstance(remedy, StartOver)]
    if starts:
        with suppress(CkptError, OSError):
            if folder_to_move(plan, config) is not None:
                error.add_note(f"To start over, with what is there moved aside: {starts[0].how}")


def _flag() -> str:
    """How this is named at the job's door."""
    return FLAG if current().words else "start_over"


def folder_to_move(plan: RunPlan, config: str | None) -> Path | None:
    """The run folder; None if the run has not begun.

    Raises:
        ConfigError: the folder is not on this machine, or holds other things than the run.
    """
    outputs = [runner.step.output_writer.output_folder for runner in plan.runners]
    if remote := [folder for folder in (*outputs, plan.logging_dir) if not folder.is_local()]:
        raise _refusal(f"{remote[0].resolve_paths('')} is not on this machine, where folders can be renamed.")
    made = [_path(plan.logging_dir), *map(_path, outputs), *(root for _, root in plan.kept)]
    folder = made[0].parent
    if not current().form or any(path.parent != folder for path in made):
        raise _refusal(f"moves a run_folder. Move these away yourself: {', '.join(map(str, dict.fromkeys(made)))}.")
    if not _begun(plan):
        return None
    if folder.is_symlink():
        raise ConfigError(f"{_flag()}: {folder} is a link to {(real := folder.resolve())}: give {real}.")
    inputs = [step.data_folder for step in plan.pipeline if hasattr(step, "data_folder")]
    staying = [Path(config or "").absolute(), Path.cwd(), *map(_path, filter(DataFolder.is_local, inputs))]
    if strangers := [path for path in staying if path.is_relative_to(folder)]:
        raise _refusal(f"{folder} holds {strangers[0]}, which is not the run's.")
    return folder


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"{_flag()}: {why} Or choose another run_folder (or checkpoints, output and logs) of this job alone."
    )


def _path(folder: DataFolder) -> Path:
    return Path(folder.resolve_paths("")).absolute()


def _begun(plan: RunPlan) -> list[Path]:
    """The folders with checkpoints; datatrove's own have no ``run.json``."""
    return [root for _, root in plan.kept if any(root.glob(f"[0-9]*/{RUN}"))]
