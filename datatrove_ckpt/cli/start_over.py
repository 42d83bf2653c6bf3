"""``datatrove-ckpt run --start-over``: moves aside what the run has made, and says so."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.checkpoint.job import note_output
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError, InputError
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.preflight import start_over as moves
from datatrove_ckpt.preflight.before_run import check_steps
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan

FLAG = "--start-over"
_OTHER_FOLDERS = re.compile(r"\b(another|a) checkpoints_local_dir\b")


def start_over(executor: PipelineExecutor, config: str | None, is_short: bool, retries: bool) -> None:
    """Renames the folders.

    Args:
        config: the YAML file, if there is one.
        is_short: the job is in the short form.
        retries: dead letters are to be retried.

    Raises:
        ConfigError, CheckpointLocked, StorageFailed: see ``preflight/start_over.py``.
    """
    if retries:
        raise ConfigError(f"{FLAG}: is given together with --retry-dead-letters, which needs the run that is there.")
    plan = RunPlan(executor)
    check_steps(plan)
    moved = moves.start_over(plan, config, is_short, [] if is_short else _files_of_others(plan))
    for old, new in moved.items():
        say(f"Moved aside: {old} -> {new}")
    for runner in plan.runners if moved else ():
        _name_output(runner, moved)


def advice(error: Exception, plan: RunPlan, config: str | None, how: str) -> str:
    """For a refusal that tells to choose other folders: how to start over, if that would not be refused."""
    if isinstance(error, CheckpointMismatch | InputError) and _OTHER_FOLDERS.search(str(error)):
        with suppress(CkptError, OSError):
            if moves.folders_to_move(plan, config):
                return f"\nTo start over, with what is there moved aside: {how}"
    return ""


def _files_of_others(plan: RunPlan) -> list[Path]:
    """The files in output folders that none of the steps has written: another job may be at work there."""
    logs, found = Path(plan.logging_dir.resolve_paths("")).absolute(), dict[str, set[Path]]()
    for _, root in plan.kept:
        with suppress(CkptError, OSError):  # damaged, or not begun
            report = verify(root)
            foreign = {Path(report.output, str(one.path)) for one in report.problems if one.kind == "foreign"}
            found[report.output] = found.get(report.output, foreign) & foreign
    return sorted(path for paths in found.values() for path in paths if not path.is_relative_to(logs))


def _name_output(runner: RunnerPlan, moved: dict[Path, Path]) -> None:
    """Lets the old checkpoint name the old output where it is now. Else it names the output of the new run."""

    def now(path: Path) -> Path:
        return next((new / path.relative_to(old) for old, new in moved.items() if path.is_relative_to(old)), path)

    checkpoints = now(runner.step.checkpoints_root)
    before = Path(runner.step.output_writer.output_folder.resolve_paths("")).absolute()
    if (output := now(before)) == before:  # there was none
        return
    try:
        note_output(checkpoints, str(output))
    except (CkptError, OSError):
        say(f"{checkpoints} is damaged, so it still names the old output folder, which is now {output}.")
