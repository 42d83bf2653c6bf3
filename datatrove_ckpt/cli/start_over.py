"""``datatrove-ckpt run --start-over``: moves aside what the run has made, and says so."""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import suppress
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.yaml_config import is_short
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError, InputError
from datatrove_ckpt.maintenance import relocate
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.preflight import start_over as moves
from datatrove_ckpt.preflight.before_run import check_steps
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan

FLAG = "--start-over"
_OTHER_FOLDERS = re.compile(r"\b(another|a) checkpoints_local_dir\b")


def start_over(executor: PipelineExecutor, arguments: argparse.Namespace) -> None:
    """Renames the folders. From then on the command to resume is the one without the flag.

    Raises:
        ConfigError, CheckpointLocked, StorageFailed: see ``preflight/start_over.py``.
    """
    if arguments.retry_dead_letters:
        raise ConfigError(f"{FLAG}: is given together with --retry-dead-letters, which needs the run that is there.")
    plan, config = RunPlan(executor), arguments.config
    check_steps(plan)
    moved = moves.start_over(plan, config, as_one=is_short(config))
    for old, new in moved.items():
        say(f"Moved aside: {old} -> {new}")
    for runner in plan.runners if moved else ():
        _name_output(runner, moved)
    arguments.command = shlex.join(word for word in shlex.split(arguments.command) if word != FLAG)


def advice(error: Exception, plan: RunPlan, arguments: argparse.Namespace) -> str:
    """For a refusal that tells to choose other folders: the command that starts over, if it would not be refused."""
    if isinstance(error, CheckpointMismatch | InputError) and _OTHER_FOLDERS.search(str(error)):
        with suppress(CkptError, OSError):
            if moves.folders_to_move(plan, arguments.config):
                return f"\nTo start over, with what is there moved aside: {arguments.command} {FLAG}"
    return ""


def _name_output(runner: RunnerPlan, moved: dict[Path, Path]) -> None:
    """Lets the old checkpoint name the old output where it is now. Else it names the output of the new run."""

    def now(path: Path) -> Path:
        return next((new / path.relative_to(old) for old, new in moved.items() if path.is_relative_to(old)), path)

    checkpoints = now(runner.step.checkpoints_root)
    before = Path(runner.step.output_writer.output_folder.resolve_paths("")).absolute()
    if (output := now(before)) == before:  # there was none
        return
    with suppress(CkptError, OSError):
        plan = relocate.plan_relocation(verify(checkpoints, str(output)), was_whole=True)
        relocate.carry_out(plan)
        if not plan.obstacles:
            return
    say(f"{checkpoints} is damaged, so it still names the old output folder, which is now {output}.")
