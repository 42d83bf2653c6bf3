"""datatrove-ckpt: build the executor that a YAML file describes, run it, and end with one clear message.

What looks at a checkpoint afterwards (status, verify, repair) is in commands.py.

Exit codes: 0 done; 1 stopped by an error, the same command goes on from there; 2 a mistake in the file or on the
command line, nothing was started; 128 + n ended by signal n, so 130 for Ctrl-C; the same command goes on from there.

An error of this package is its message: no traceback of it reaches the terminal. The task's log file keeps one.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor
from loguru import logger

from datatrove_ckpt.checkpoint.commits import DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.layout import COMMITS, RETRIES
from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.commands import add_commands
from datatrove_ckpt.cli.interruption import Interruption, start_fork_server
from datatrove_ckpt.cli.overrides import OVERRIDES_HELP, describe, read_config, split_overrides
from datatrove_ckpt.cli.yaml_config import build, show
from datatrove_ckpt.errors import CkptError, ConfigError, Preempted
from datatrove_ckpt.output.chunk_output import check_rank_in_template
from datatrove_ckpt.runner import InferenceRunner


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    rest, overrides = split_overrides(given)
    parser = _parser()
    arguments = parser.parse_args(rest)
    if "handler" not in arguments:
        return _run(arguments, overrides, shlex.join(["datatrove-ckpt", *given]))
    if "overrides" in arguments:
        arguments.overrides = overrides
    elif overrides:
        parser.error(f"unrecognized arguments: --{overrides[0].removeprefix('--')}")
    return _handle(arguments)


def _handle(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.handler(arguments))
    except ConfigError as error:
        return _fail(error, 2)
    except (CkptError, OSError) as error:
        return _fail(error, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="datatrove-ckpt", description="Crash-proof LLM inference for datatrove.")
    parser.add_argument("--version", action="version", version=f"datatrove-ckpt {version('datatrove-ckpt')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run the pipeline of a YAML file; run it again to resume",
        description="Run the pipeline of a YAML file. After any interruption the same command finishes the rest.",
        epilog=OVERRIDES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("config", metavar="CONFIG", help="YAML file with one key, executor")
    run.add_argument("--dry-run", action="store_true", help="build everything, print it, run nothing")
    run.add_argument(
        "--retry-dead-letters",
        action="store_true",
        help="process the dead letters of a finished run, into output files of their own, instead of the input",
    )
    add_commands(commands)
    return parser


def _run(arguments: argparse.Namespace, overrides: list[str], command: str) -> int:
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    try:
        content = read_config(arguments.config, overrides)
        executor = build(content)
        if arguments.dry_run:
            print("\n".join(describe(content)))
            if slurm_submit.submits(executor):
                print(f"\n{slurm_submit.script(executor)}")
            return 0
        if arguments.retry_dead_letters:
            _retry_dead_letters(executor)
        else:
            _check_inputs(executor)
        for step in executor.pipeline:
            if isinstance(step, InferenceRunner):
                check_rank_in_template(step.output_writer, executor.world_size)
        if slurm_submit.submits(executor):
            slurm_submit.check(executor)
    except ConfigError as error:
        return _fail(error, 2)
    return _execute(executor, command)


def _execute(executor: Any, command: str) -> int:
    executor._quiet = QuietErrors(said_later=True)  # travels with the executor into pool workers and cluster jobs
    steps = [step for step in executor.pipeline if isinstance(step, InferenceRunner)]
    checkpoints = [step.checkpoints_local_dir for step in steps if step.checkpoints_local_dir is not None]
    signals = sorted({name for step in steps for name in step.drain_signals})
    interruption = Interruption(signals)
    try:
        with interruption:
            if slurm_submit.submits(executor):
                print(slurm_submit.submit(executor, checkpoints, command))
                return 0
            if isinstance(executor, LocalPipelineExecutor) and executor.workers > 1:
                start_fork_server(signals)
            executor.run()
        _refuse_what_is_left(executor)
    except KeyboardInterrupt:
        return _interrupted(interruption, command)
    except Exception as error:
        if interruption.number is not None:  # datatrove's own helpers may have ended of the signal before it did
            return _interrupted(interruption, command)
        own = _own_error(error) or (error if isinstance(error, OSError) else None)
        if own is None:
            raise
        return _fail(own, 1)
    for step in steps:
        if step.checkpoints_local_dir is not None:
            print(_summary(step, command))
    return 0


def _interrupted(interruption: Interruption, command: str) -> int:
    number = interruption.number or signal.SIGINT
    what = f"interrupted by {signal.Signals(number).name}; what is finished is saved. To go on: {command}"
    print(what, file=sys.stderr)
    return 128 + number


def _refuse_what_is_left(executor: Any) -> None:
    """Ray's executor returns as if all were well when tasks failed.

    Raises:
        CkptError: some are not complete.
    """
    left = executor.get_incomplete_ranks(skip_completed=True) if isinstance(executor, RayPipelineExecutor) else []
    if left:
        raise CkptError(
            f"{len(left)} of {executor.world_size} tasks are not complete; rank {left[0]} is the first. Their logs are "
            f"in {executor.logging_dir.resolve_paths('logs')}. Run the same command again to go on."
        )


def _retry_dead_letters(executor: Any) -> None:
    """Has every rank run once more: datatrove skips ranks that are complete, and marks those that ran as complete.

    Raises:
        ConfigError: a rank is not complete, and would be marked so although its input isn't done.
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


def _summary(step: InferenceRunner, command: str) -> str:
    """The closing line: all ranks, all lives."""
    counts, files = DocumentCounts(), 0
    for log in sorted(Path(step.checkpoints_local_dir or "").glob(f"*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.add(commit.counts)
            files += len(commit.files)
    for log in sorted(Path(step.checkpoints_local_dir or "").glob(f"{RETRIES}/*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.written += commit.counts.written
            counts.dropped += commit.counts.dropped
            counts.dead += commit.counts.dead - commit.counts.read  # they were dead letters before
            counts.requests += commit.counts.requests
            files += len(commit.files)
    return (
        f"{counts.written} of {counts.read} documents are in {files} files in "
        f"{step.output_writer.output_folder.resolve_paths('')} ({counts.dropped} dropped, {counts.dead} dead letters), "
        f"for {counts.requests} requests with {counts.prompt_tokens} prompt and {counts.completion_tokens} completion "
        f"tokens. Whenever it is interrupted, the same line resumes it: {command}"
    )


def _fail(error: BaseException, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _check_inputs(executor: Any) -> None:
    """Refuses an input folder without files: datatrove warns, and marks the empty ranks complete for ever.

    Only what can be seen cheaply and now: local folders, and no executor that has yet to make them.
    """
    if getattr(executor, "depends", None) or getattr(executor, "depends_job_id", None):
        return
    for index, step in enumerate(executor.pipeline):
        folder = getattr(step, "data_folder", None)
        if folder is None or not folder.is_local() or getattr(step, "paths_file", None):
            continue
        place = f'pipeline[{index}] {type(step).__name__}: data_folder: "{folder.path}"'
        if not folder.isdir(""):
            raise ConfigError(f"{place} is not a folder.")
        if not folder.list_files(recursive=step.recursive, glob_pattern=step.glob_pattern):
            pattern = f" that match {show(step.glob_pattern)}" if step.glob_pattern else ""
            raise ConfigError(f"{place} holds no files{pattern}.")


# --------------------------------------------------------------------------- errors


class QuietErrors:
    """Makes loguru keep tracebacks of this package's errors off the terminal, wherever this object is unpickled.

    datatrove ends a failed task with ``logger.exception`` and exchanges loguru's sinks for every task; only a patcher
    outlives that. Other errors keep their traceback everywhere, but as plain text: loguru's own shows the values of
    local variables, API keys included. On a cluster, where nobody catches what ends a task, Python is kept from
    printing the traceback once more.
    """

    def __init__(self, said_later: bool = False) -> None:
        self.said_later = said_later  # the command itself ends with the message: the log need not say it as well
        logger.configure(patcher=self._patch)
        if not said_later:
            sys.excepthook = _say_nothing_twice

    def __reduce__(self) -> tuple[type[QuietErrors], tuple[()]]:
        return QuietErrors, ()

    def __repr__(self) -> str:
        return "QuietErrors()"

    def _patch(self, record: Any) -> None:
        if record["exception"] is None or record["exception"].value is None:
            return
        error = record["exception"].value
        own = _own_error(error)
        text = "".join(traceback.format_exception(error))
        record["exception"] = None
        if own is None:
            record["message"] += f"\n{text}"
        else:
            record["message"] = (
                f"stopped by {type(own).__name__}" if self.said_later or isinstance(own, Preempted) else str(own)
            )
            logger.debug(text)  # the terminal shows INFO and up while a task runs, its log file everything


def _say_nothing_twice(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _own_error(error) is None:
        sys.__excepthook__(kind, error, trace)


def _own_error(error: BaseException) -> CkptError | None:
    """This package's error, alone or as the cause of what was raised, or None."""
    waiting: list[Any] = [error]
    seen: list[Any] = []
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, CkptError):
            return found
        if isinstance(found, BaseException) and found not in seen:
            seen.append(found)
            waiting += [getattr(found, "error", None), found.__cause__, found.__context__]
            waiting += getattr(found, "exceptions", ())
    return None
