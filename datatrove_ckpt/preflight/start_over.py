"""``run --start-over``: moves what a run has made aside, so that the next start begins anew. Deletes nothing.

Folders are renamed one by one: those with the checkpoints last, because a checkpoint refuses to go on without its
output, and output without its checkpoint could be taken for a stranger's. Each rename is synced before the next one.

    crash after                           found on disk          the next start
    nothing                               all                    goes on with the old run, or is refused
    output or logs were renamed           all checkpoints        likewise; if files are committed, it is refused
    a checkpoint of several was renamed   the other checkpoints  refused: their committed files are gone
    the last checkpoint was renamed       nothing                begins anew

So old output never meets a new checkpoint, and ``--start-over`` again moves the rest. A run folder that holds nothing
else is renamed as a whole, in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import LOCK, RUN, is_ours
from datatrove_ckpt.checkpoint.ledger import find_ranks, name_place
from datatrove_ckpt.errors import CheckpointError, CheckpointLocked, ConfigError
from datatrove_ckpt.output.folders import stands_elsewhere
from datatrove_ckpt.output.owner import Homes, Ownership
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan

_INSTEAD = (
    "Instead, choose another run_folder (or checkpoints_local_dir, output_folder and logging_dir) of this job alone."
)


def start_over(plan: RunPlan, config: str | None, as_one: bool, others: Sequence[Path] = ()) -> dict[Path, Path]:
    """Renames the folders. Returns the old and the new names; nothing if the run has not begun.

    Raises:
        ConfigError: see ``folders_to_move``.
        OutputMismatch: the output folder belongs to another run.
        CheckpointLocked: a process works on a task.
        StorageFailed: a folder could not be renamed; the same command goes on.
    """
    folders = folders_to_move(plan, config, as_one, others)
    for root in _begun(plan):
        for retry, number, folder in find_ranks(root):
            if (holder := files.lock_holder(folder / LOCK)) is not None:
                raise CheckpointLocked(
                    f"--start-over: {files.name_holder(holder)} works on "
                    f"{name_place(retry, number)} in {root}. Stop that run, and run the same command again."
                )
    if folders:
        for runner in plan.runners:
            _owner_of(runner).release()
    number = next(n for n in count(1) if not any(_aside(folder, n).exists() for folder in folders))
    for folder in folders:
        files.disk.rename(folder, _aside(folder, number))
        files.disk.sync_dir(folder.parent)
    return {folder: _aside(folder, number) for folder in folders}


def folders_to_move(
    plan: RunPlan, config: str | None = None, as_one: bool = False, others: Sequence[Path] = ()
) -> list[Path]:
    """The folders that a run has made, in the order in which they are to be renamed.

    Args:
        config: the YAML file, which stays where it is.
        as_one: rename the one folder that holds them, if it holds nothing else.
        others: files of other jobs.

    Raises:
        ConfigError: something is not on this machine, or not known to be the run's.
    """
    outputs = [runner.step.output_writer.output_folder for runner in plan.runners]
    if remote := [folder for folder in (*outputs, plan.logging_dir) if not folder.is_local()]:
        raise _refusal(f"{remote[0].resolve_paths('')} is not on this machine, where folders can be renamed.")
    for runner in plan.runners:
        if mirror := runner.step.checkpoints_remote_dir:
            raise _refusal(f"a new start would go on from the mirror {mirror}. Choose another checkpoints_remote_dir.")
        if runner.root is None:
            raise _refusal(f"pipeline[{runner.index}] has no checkpoints_local_dir on this machine.")
    begun, logs = _begun(plan), _path(plan.logging_dir)
    places = dict.fromkeys([*map(_path, outputs), logs, *begun])
    made = [folder for folder in places if folder.is_dir() and any(folder.iterdir())]
    if not begun:
        if unknown := [folder for folder in made if folder != logs or (logs / "completions").is_dir()]:
            raise _refusal(f"no checkpoint shows that {unknown[0]} is this run's. Move it away yourself.")
        return []
    for runner in plan.runners:
        _check_output(runner, made)
    inputs = [step.data_folder for step in plan.pipeline if hasattr(step, "data_folder")]
    staying = [Path(config or "").absolute(), Path.cwd(), *map(_path, filter(DataFolder.is_local, inputs)), *others]
    parent = begun[0].parent
    inside = {path for path in parent.iterdir() if not is_ours(path.name)}
    if as_one and inside <= places.keys() and not _among(staying, parent):
        made = [parent]
    tops = [folder for folder in made if not any(other in folder.parents for other in made)]
    for folder in tops:
        if folder.is_symlink():
            raise ConfigError(f"--start-over: {folder} is a link to {(real := folder.resolve())}: give {real}.")
        if strangers := _among(staying, folder):
            raise _refusal(f"{folder} holds {strangers[0]}, which is not the run's.")
    return sorted(tops, key=lambda folder: bool(_among(begun, folder)))


def _owner_of(runner: RunnerPlan) -> Ownership:
    writer, root = runner.step.output_writer, runner.step.checkpoints_root
    return Ownership(writer.output_folder, writer.output_filename.template, Homes(root, None))


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"--start-over: {why} {_INSTEAD}")


def _path(folder: DataFolder) -> Path:
    return Path(folder.resolve_paths("")).absolute()


def _among(paths: list[Path], folder: Path) -> list[Path]:
    return [path for path in paths if path.is_relative_to(folder)]


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.{number}")


def _begun(plan: RunPlan) -> list[Path]:
    """The folders with checkpoints; datatrove's own have no ``run.json``."""
    return [root for _, root in plan.kept if any(root.glob(f"[0-9]*/{RUN}"))]


def _check_output(runner: RunnerPlan, made: list[Path]) -> None:
    """
    Raises:
        ConfigError: the output folder is not that of the checkpoint.
    """
    folder, root = runner.step.output_writer.output_folder, runner.root
    for path in root.glob(f"[0-9]*/{RUN}") if root is not None and {root, _path(folder)} <= {*made} else ():
        with suppress(CheckpointError):  # whoever starts over may do so because a file is damaged
            other = read_run(path).get("output_folder")
            if other and stands_elsewhere(other, folder):
                raise _refusal(f"{folder.path} is not the output of the run in {root}: that is {other}.")
