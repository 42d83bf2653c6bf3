"""``datatrove-ckpt run``: builds the executor that a YAML file describes, runs it, and ends with one clear message."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor

from datatrove_ckpt.checkpoint.commits import DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.layout import COMMITS, RETRIES, SHARD
from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.interruption import Interruption, start_fork_server
from datatrove_ckpt.cli.main import fail
from datatrove_ckpt.cli.overrides import describe, read_config
from datatrove_ckpt.cli.quiet_errors import QuietErrors, own_error
from datatrove_ckpt.cli.yaml_config import build, show
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError, InputError, UnexpectedExit
from datatrove_ckpt.generation.job_check import check_job
from datatrove_ckpt.maintenance.run_check import check_output_of_run
from datatrove_ckpt.output.chunk_output import check_rank_in_template
from datatrove_ckpt.output.folders import check_pipeline_folders
from datatrove_ckpt.preflight.inputs import check_inputs_unchanged
from datatrove_ckpt.preflight.requirements import check_codecs, check_launch
from datatrove_ckpt.readers.shard import ShardRecord, SkippedLines
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
    for step in executor.pipeline:
        if isinstance(step, InferenceRunner):
            check_rank_in_template(step.output_writer, executor.world_size)
    check_pipeline_folders(executor.pipeline)
    if arguments.dry_run:
        print("\n".join(describe(content)))
        if slurm_submit.submits(executor):
            print(f"\n{slurm_submit.script(executor)}")
        return 0
    if arguments.retry_dead_letters:
        _retry_dead_letters(executor)
    else:
        _check_inputs(executor)
    check_launch(executor)
    try:
        check_job(executor)
        check_inputs_unchanged(executor)
    except CheckpointMismatch as error:
        return fail(_with_command(error, arguments.command), 1)
    if slurm_submit.submits(executor):
        slurm_submit.check(executor)
    return _execute(executor, arguments.command)


def _execute(executor: Any, command: str) -> int:
    executor._quiet = QuietErrors(said_later=True)  # pickled with the executor into pool workers and cluster jobs
    steps = [step for step in executor.pipeline if isinstance(step, InferenceRunner)]
    checkpoints = [step.checkpoints_local_dir for step in steps if step.checkpoints_local_dir is not None]
    signals = sorted({name for step in steps for name in step.drain_signals})
    interruption = Interruption(signals)
    try:
        with interruption:
            _check_output(executor, before=True)
            if slurm_submit.submits(executor):
                print(slurm_submit.submit(executor, checkpoints, command))
                return 0
            if isinstance(executor, LocalPipelineExecutor) and executor.workers > 1:
                start_fork_server(signals)
            executor.run()
        _refuse_what_is_left(executor)
        _check_output(executor, before=False)
    except KeyboardInterrupt:
        return _interrupted(interruption, command)
    except SystemExit as exit:  # datatrove's requeue handler leaves with 15; a step may leave with 0
        if exit.code:
            raise
        return fail(UnexpectedExit("A step called sys.exit. Its task is not complete; raise an Exception instead."), 1)
    except Exception as error:
        if interruption.number is not None:  # the signal may have ended datatrove's own processes first
            return _interrupted(interruption, command)
        own = own_error(error) or (error if isinstance(error, OSError) else None)
        if own is None:
            raise
        return fail(_with_command(own, command), 1)
    for step in steps:
        if step.checkpoints_local_dir is not None:
            print(_summary(step, command))
    return 0


def _name_flags(executor: Any) -> None:
    """Lets the steps name accept_changes as it is written on this command line, in cluster jobs as well."""
    for index, step in enumerate(executor.pipeline):
        if isinstance(step, InferenceRunner):
            step.how_to_accept = f"add --pipeline.{index}.accept_changes=true to the command"


def _with_command(error: Exception, command: str) -> Exception:
    """The error with the whole command to type, if it names a flag."""
    flag = _ACCEPT.search(str(error))
    return error if flag is None else CheckpointMismatch(f"{error} The whole command: {command} {flag[0]}")


def _check_output(executor: Any, before: bool) -> None:
    """Compares the output of all ranks with their checkpoints, also of those that datatrove skips.

    Raises:
        OutputMismatch: see ``check_output_of_run``.
    """
    for step in executor.pipeline:
        if isinstance(step, InferenceRunner) and step.checkpoints_local_dir is not None:
            # Ranks elsewhere, and those with a mirror, may have checkpoints that cannot be seen here.
            here = before and isinstance(executor, LocalPipelineExecutor) and step.checkpoints_remote_dir is None
            first = getattr(executor, "local_rank_offset", 0)
            check_output_of_run(
                step.output_writer,
                step.checkpoints_root,
                executor.logging_dir.resolve_paths(""),
                executor.world_size,
                first_starts=range(first, first + executor.local_tasks) if here else (),
            )


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


def _summary(step: InferenceRunner, command: str) -> str:
    """The closing line, over all ranks and all attempts."""
    counts, files = DocumentCounts(), 0
    for log in sorted(step.checkpoints_root.glob(f"*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.add(commit.counts)
            files += len(commit.files)
    for log in sorted(step.checkpoints_root.glob(f"{RETRIES}/*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.written += commit.counts.written
            counts.dropped += commit.counts.dropped
            counts.dead += commit.counts.dead - commit.counts.read  # they were dead letters before
            counts.requests += commit.counts.requests
            files += len(commit.files)
    skipped = SkippedLines()
    for path in sorted(step.checkpoints_root.glob(f"*/{SHARD}")):
        record = ShardRecord.read(path)
        skipped += record.skipped if record else SkippedLines()
    if not counts.read and (skipped.damaged or skipped.without_text):
        raise InputError(
            f"No row of the whole input is a document.{skipped} Check text_key and the adapter of the reader, and "
            "start again with another checkpoints_local_dir and logging_dir."
        )
    return (
        f"{counts.written} of {counts.read} documents are in {files} files in "
        f"{step.output_writer.output_folder.resolve_paths('')} ({counts.dropped} dropped, {counts.dead} dead letters), "
        f"for {counts.requests} requests with {counts.prompt_tokens} prompt and {counts.completion_tokens} completion "
        f"tokens.{skipped} {_next_step(step, counts, command)}"
    )


def _next_step(step: InferenceRunner, counts: DocumentCounts, command: str) -> str:
    if counts.dead:
        retry = "" if "--retry-dead-letters" in command.split() else " --retry-dead-letters"
        return f"To retry the dead letters: {command}{retry}"
    return f"To check the files: {shlex.join(['datatrove-ckpt', 'verify', str(step.checkpoints_local_dir)])} --full"


def _check_inputs(executor: Any) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks complete.

    Checks local folders only, and none that another executor has yet to create.

    Raises:
        ConfigError: the folder is missing, no file matches, or the package for a compression is missing.
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
        names = folder.list_files(recursive=step.recursive, glob_pattern=step.glob_pattern)
        if not names:
            pattern = f" that match {show(step.glob_pattern)}" if step.glob_pattern else ""
            raise ConfigError(f"{place} contains no files{pattern}.")
        check_codecs(place, step, names)
