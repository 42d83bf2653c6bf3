"""``datatrove-ckpt run``: builds the executor that a YAML file describes, runs it, and ends with one clear message."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path
from typing import Any

from datatrove.executor import RayPipelineExecutor

from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.closing import closing_line
from datatrove_ckpt.cli.interruption import Interruption
from datatrove_ckpt.cli.main import fail
from datatrove_ckpt.cli.os_errors import explain
from datatrove_ckpt.cli.overrides import describe, read_config
from datatrove_ckpt.cli.quiet_errors import QuietErrors, own_error
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError, UnexpectedExit
from datatrove_ckpt.executor import LocalPipelineExecutor
from datatrove_ckpt.preflight.before_run import check_after_run, check_before_run, check_steps
from datatrove_ckpt.runner import InferenceRunner

_ACCEPT = re.compile(r"--pipeline\.\d+\.accept_changes=true")


def run(arguments: argparse.Namespace) -> int:
    """Builds the executor and runs it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    content = read_config(arguments.config, arguments.overrides)
    executor = build(content)
    _name_flags(executor)
    check_steps(executor)
    if arguments.dry_run:
        print("\n".join(describe(content)))
        if slurm_submit.submits(executor):
            print(f"\n{slurm_submit.script(executor)}")
        return 0
    return _checked_run(executor, arguments)


def _checked_run(executor: Any, arguments: argparse.Namespace) -> int:
    """Checks, runs, and turns errors and signals into messages and exit codes."""
    steps = [step for step in executor.pipeline if isinstance(step, InferenceRunner)]
    signals, started = sorted({name for step in steps for name in step.drain_signals}), False
    interruption = Interruption(signals)
    try:
        with interruption:
            if arguments.retry_dead_letters:
                _retry_dead_letters(executor)
            check_before_run(executor, arguments.retry_dead_letters)
            if slurm_submit.submits(executor):
                slurm_submit.check(executor)
            started = True
            _execute(executor, steps, arguments.command)
    except KeyboardInterrupt:
        return _interrupted(interruption, arguments.command)
    except SystemExit as exit:  # datatrove's requeue handler leaves with 15; a step may leave with 0
        if exit.code:
            raise
        return fail(UnexpectedExit("A step called sys.exit. Its task is not complete; raise an Exception instead."), 1)
    except Exception as error:
        if isinstance(error, ConfigError) and not started:
            raise
        if interruption.number is not None:  # the signal may have ended datatrove's own processes first
            return _interrupted(interruption, arguments.command)
        own = own_error(error) or (explain(error, executor) if isinstance(error, OSError) else None)
        if own is None:
            raise
        return fail(_with_command(own, arguments.command), 1)
    return 0


def _execute(executor: Any, steps: list[InferenceRunner], command: str) -> None:
    """Runs the executor, or submits it, and prints the last line."""
    kept = [step for step in steps if step.checkpoints_local_dir is not None]
    executor._quiet = QuietErrors(said_later=True)  # pickled with the executor into pool workers and cluster jobs
    if slurm_submit.submits(executor):
        print(slurm_submit.submit(executor, [str(step.checkpoints_local_dir) for step in kept], command))
        return
    executor.run_ranks() if isinstance(executor, LocalPipelineExecutor) else executor.run()
    _refuse_what_is_left(executor)
    check_after_run(executor)
    for step in kept:
        print(closing_line(step, command))


def _name_flags(executor: Any) -> None:
    """Lets the steps name accept_changes as it is written on this command line, in cluster jobs as well."""
    for index, step in enumerate(executor.pipeline):
        if isinstance(step, InferenceRunner):
            step.how_to_accept = f"add --pipeline.{index}.accept_changes=true to the command"


def _with_command(error: Exception, command: str) -> Exception:
    """The error with the whole command to type, if it names a flag."""
    flag = _ACCEPT.search(str(error))
    return error if flag is None else CheckpointMismatch(f"{error} The whole command: {command} {flag[0]}")


def _interrupted(interruption: Interruption, command: str) -> int:
    number = interruption.number or signal.SIGINT
    what = f"interrupted by {signal.Signals(number).name}; what is finished is saved. To resume: {command}"
    print(what, file=sys.stderr)
    return 128 + number


def _refuse_what_is_left(executor: Any) -> None:
    """Ray's executor returns normally although tasks failed.

    Raises:
        CkptError: some tasks are not complete.
    """
    left = executor.get_incomplete_ranks(skip_completed=True) if isinstance(executor, RayPipelineExecutor) else []
    if left:
        raise CkptError(
            f"{len(left)} of {executor.world_size} tasks are not complete; rank {left[0]} is the first. Their logs are "
            f"in {executor.logging_dir.resolve_paths('logs')}. Run the same command again to resume."
        )


def _retry_dead_letters(executor: Any) -> None:
    """Makes every rank run once more, although datatrove skips completed ranks.

    Raises:
        ConfigError: a rank is not complete; datatrove would mark it as complete although its input is not done.
    """
    incomplete = executor.get_incomplete_ranks(skip_completed=True)
    if incomplete:
        raise ConfigError(
            f"--retry-dead-letters: {len(incomplete)} of {executor.world_size} ranks are not finished (rank "
            f"{incomplete[0]} is the first). Finish them first: run the same command without it."
        )
    executor.skip_completed = False
    for step in executor.pipeline:
        if isinstance(step, InferenceRunner):
            step.retry_dead_letters = True
