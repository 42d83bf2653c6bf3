"""The rest of ``datatrove-ckpt run``: runs the executor, and ends with one clear message."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import multiprocess
from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.checkpoint.commits import sum_counts, sum_delivered
from datatrove_ckpt.checkpoint.identity import not_readable
from datatrove_ckpt.checkpoint.job import refuse_other_tasks
from datatrove_ckpt.checkpoint.layout import rank_numbers
from datatrove_ckpt.checkpoint.ledger import JobSums, Limits, Want, find_ranks, read_rank
from datatrove_ckpt.checkpoint.lines import too_large
from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.full_config import FullConfig
from datatrove_ckpt.cli.printing import fail, say
from datatrove_ckpt.cli.what_helps import advise
from datatrove_ckpt.doors import StartOver, current, written
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CkptError,
    ConfigError,
    InputError,
    StorageFailed,
    TooManyDeadLetters,
    UnexpectedExit,
)
from datatrove_ckpt.executor import LocalPipelineExecutor
from datatrove_ckpt.formatting import plural, plural_is
from datatrove_ckpt.jobs_executor import JobsPipelineExecutor
from datatrove_ckpt.preflight.before_run import Checked, check_after_run, check_before_run, check_steps
from datatrove_ckpt.preflight.input_checks import rows_without_document
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan, checkpoints_seen
from datatrove_ckpt.process.pool_signals import usual_handler
from datatrove_ckpt.process.task_errors import QuietErrors, own_error, say_errors_later
from datatrove_ckpt.retrying import code_of_rank, hub_refusal


def execute(executor: PipelineExecutor, content: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Runs what ``build`` has made of a file's content. Returns the exit code.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    plan = RunPlan(executor)
    check_steps(plan)
    if arguments.cancel:
        if not isinstance(executor, JobsPipelineExecutor):
            raise ConfigError("--cancel: cancels Hugging Face Jobs. Stop any other run by a signal, or scancel.")
        jobs = executor.cancel()
        kept = f"Canceled {plural(jobs, 'job')}. What they have uploaded is kept. To resume: run again."
        say(kept if jobs else "No job of this run waits or runs, so none was canceled.")
        return 0
    if arguments.dry_run:
        full = FullConfig(content)
        print(full.text(), end="")
        try:  # it shows a job array, too: with another number of tasks, none of it would start
            _check_tasks(plan)
        except CkptError as error:
            advise(error, plan)
            return fail(error, 1)
        if slurm_submit.submits(executor):  # as comments: the whole remains YAML that can be run
            script = full.redact(slurm_submit.script(executor)).rstrip("\n").splitlines()
            print("\n# What would be submitted:\n#", *(f"# {line}".rstrip() for line in script), sep="\n")
        return 0
    return _checked_run(executor, plan, arguments)


def _check_tasks(plan: RunPlan) -> None:
    """Checks that no other number of tasks was begun with.

    Raises:
        CheckpointMismatch: it names the number.
    """
    for step, root in plan.kept:
        if root.is_dir() and rank_numbers(root):
            refuse_other_tasks(root, step.identity(plan.tasks))


def _checked_run(executor: PipelineExecutor, plan: RunPlan, arguments: argparse.Namespace) -> int:
    """Checks, runs, and turns errors and signals into messages and exit codes."""
    started = False
    interruption = Interruption([name for runner in plan.runners for name in runner.step.drain_signals])
    try:
        with interruption:
            if arguments.fail_on_dead_letters and slurm_submit.submits(executor):
                raise ConfigError(
                    "--fail-on-dead-letters: this command submits the job, and ends before its tasks do. Leave the "
                    "flag out; `datatrove-ckpt status` counts the dead letters."
                )
            if arguments.retry_dead_letters:
                _retry_dead_letters(plan)
            # Complete ranks have dead letters, too.
            executor.skip_completed = executor.skip_completed and not plan.retries
            if isinstance(executor, JobsPipelineExecutor):
                executor.check()
            with checkpoints_seen(executor):
                check_before_run(executor)
            if slurm_submit.submits(executor):
                slurm_submit.check(executor)
            started = True
            dead = _execute(executor, plan, arguments)
            if dead and arguments.fail_on_dead_letters:
                left = TooManyDeadLetters(f"{plural_is(dead, 'dead letter')} left (--fail-on-dead-letters).")
                return fail(left, exit_code(left, arguments.rank))
    except KeyboardInterrupt:
        return _interrupted(interruption)
    except SystemExit as exit:  # datatrove's requeue handler leaves with 15; a step may leave with 0
        if exit.code:
            raise
        return fail(UnexpectedExit("A step called sys.exit. Its task is not complete; raise an Exception instead."), 1)
    except Exception as error:
        if isinstance(error, ConfigError) and not started and arguments.rank is None:
            raise
        if interruption.number is not None:  # the signal may have ended datatrove's own processes first
            return _interrupted(interruption)
        own = own_error(error) or (explain(error, plan) if isinstance(error, OSError) else None)
        if own is None:
            raise
        advise(own, plan)
        return fail(own, exit_code(own, arguments.rank))
    finally:
        say_errors_later(False)
    return 0


def exit_code(error: Exception, rank: int | None) -> int:
    """Of a run that an error stopped. Of one rank: see ``code_of_rank``. Other runs end with 1: scripts know it."""
    if rank is None:
        return 1
    return code_of_rank(error)


def _execute(executor: PipelineExecutor, plan: RunPlan, arguments: argparse.Namespace) -> int:
    """Runs the executor, or submits it, and prints the last line. Returns the number of dead letters that are left."""
    kept = [runner for runner in plan.runners if runner.step.checkpoints_local_dir is not None]
    executor._quiet = QuietErrors(said_later=True)  # pickled with the executor into pool workers and cluster jobs
    if slurm_submit.submits(executor):
        folders = [[str(runner.step.checkpoints_local_dir)] for runner in kept]
        if arguments.config and len(kept) == 1:
            what = [[arguments.config, *arguments.overrides]]
        else:
            what = folders
        say(slurm_submit.submit(executor, what, current().command))
        return 0
    is_ours = isinstance(executor, LocalPipelineExecutor | JobsPipelineExecutor)
    started = unix_seconds()
    if not is_ours and not executor.skip_completed:
        marked = plan.marked()
    else:
        marked = {}
    if is_ours:
        executor.run_ranks()
    else:
        executor.run()
        _refuse_what_is_left(plan, marked)
    with checkpoints_seen(executor) as said:
        checked = check_after_run(executor)
        for runner in RunPlan(executor).runners:
            if runner.root is not None:
                say(said(closing_line(runner, current().command, checked, started)))
    # Of the rank that ran: a checkpoint on a volume has those of the others, too.
    dead = 0
    for job in checked.jobs.values():
        committed = [counts for counts in job.committed if arguments.rank in (None, counts[0])]
        dead += sum_delivered(committed).dead
    return dead


def _interrupted(interruption: Interruption) -> int:
    number = interruption.number or signal.SIGINT
    what = f"interrupted by {signal.Signals(number).name}; what is finished is saved. To resume: {current().command}"
    print(what, file=sys.stderr)
    return 128 + number


def _refuse_what_is_left(plan: RunPlan, marked: dict[str, object]) -> None:
    """Executors of datatrove return normally although tasks failed.

    Args:
        marked: before it ran. A task that ran once more was marked once more.

    Raises:
        CkptError: some tasks are not complete.
    """
    if marked:
        now = plan.marked()
    else:
        now = {}
    old = {name for name, time in marked.items() if now.get(name) == time}
    anew = [rank for rank in range(plan.tasks) if f"completions/{rank:05d}" in old]
    left = sorted({*plan.incomplete(skip_completed=True), *anew})
    if left:
        raise CkptError(
            f"{len(left)} of {plan.tasks} tasks are not complete; rank {left[0]} is the first. Their logs are "
            f"in {plan.logging_dir.resolve_paths('logs')}. Run the same command again to resume."
        )


def _retry_dead_letters(plan: RunPlan) -> None:
    """Lets the ranks process their dead letters instead of the input.

    Raises:
        ConfigError: a rank is not complete; datatrove would mark it as complete although its input is not done.
        CheckpointMismatch: see ``_check_tasks``. Then the ranks that are not complete are not those of the run.
    """
    _check_tasks(plan)
    incomplete = plan.incomplete(skip_completed=True)
    if incomplete:
        raise ConfigError(
            f"--retry-dead-letters: {len(incomplete)} of {plan.tasks} ranks are not finished (rank "
            f"{incomplete[0]} is the first). Finish them first: run the same command without it."
        )
    for runner in plan.runners:
        runner.step.retry_dead_letters = True


# errors of the system -------------------------------------------------------------------------------------------------

# Those outside checkpoints and output: what happened, where, and what to do. They come from ``logging_dir`` above all:
# datatrove writes it, and an error of a full disk names no file.

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


def explain(error: OSError, plan: RunPlan) -> Exception:
    """The error as a message for the user, with the folders of the job; itself if there is nothing to add."""
    logs = plan.logging_dir
    if refused := hub_refusal(error):
        there = re.match("hf://[a-z]+s/([^/]+/[^/]+)", logs.resolve_paths(""))
        return StorageFailed(f"{written.logging_dir}: {refused}." if there and there[1] in refused else f"{refused}.")
    if logs.is_local():
        folders = {"logging_dir": Path(logs.resolve_paths(""))}
    else:
        folders = {}
    folders.update(("checkpoints_local_dir", root) for _, root in plan.kept)
    if error.errno in _FULL:
        places = [*folders.items(), ("TMPDIR", tempfile.gettempdir())]
        where = error.filename or " or ".join(f"{name} {folder}" for name, folder in places)
        free = "Free some space and run the same command again; everything saved so far is kept."
        return StorageFailed(f"{error.strerror}: {where}. {too_large() if error.errno == errno.EFBIG else free}")
    if error.errno not in _CLOSED or not isinstance(error.filename, str):
        return error
    path = Path(error.filename).absolute()  # a folder above that of a setting was to be made for it
    inputs = [Path(step.data_folder.path).absolute() for step in plan.pipeline if hasattr(step, "data_folder")]
    near = (name for name, folder in folders.items() if path.is_relative_to(folder) or folder.is_relative_to(path))
    setting = next(near, "")
    shown = written(setting)
    if error.errno == errno.ENOENT:
        gone = "it was removed during the run, or its file system takes no files there. Choose another"
        if setting:
            return StorageFailed(f"{path} ({shown}): {error.strerror}: {gone} {shown}.")
        return error
    if setting == "checkpoints_local_dir" and error.errno != errno.EROFS:
        return StorageFailed(f"{not_readable(error.filename)}, or choose another {written.checkpoints_local_dir}.")
    if setting:
        where = f" ({shown})"
    else:
        where = ""
    if setting:
        other = f", or mount it writable, or choose another {shown},"
    else:
        other = ", or mount it writable,"
    if any(map(path.is_relative_to, inputs)):
        other = " to read it,"
    else:
        other = other
    return StorageFailed(
        f"{error.filename}{where}: {error.strerror}. Give this user the permission{other} and run the "
        "same command again; everything saved so far is kept."
    )


# signals --------------------------------------------------------------------------------------------------------------

# What the command does on a signal: it lets every rank save what it has, and ends with one line.
#
# ``process/preemption.py`` handles signals in a rank, ``process/workers.py`` in the process that waits for workers.
# Before and after them, and in datatrove's own executors, a signal is an exception.


_FATAL = (signal.SIG_DFL, signal.default_int_handler)
_TO_END = 10.0  # seconds for all that datatrove's executors left behind


class Interruption:
    """``with Interruption(signals) as interruption:`` around what a command does.

    Signals that would end this process on the spot raise KeyboardInterrupt instead: whatever ends in good order on
    Ctrl-C does so on these, too.

    Args:
        signals: names of further signals than SIGINT, SIGTERM and SIGHUP.

    Attributes:
        number: the signal that came.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self.number: int | None = None
        self._names = dict.fromkeys(["SIGINT", "SIGTERM", "SIGHUP", *signals])
        self._borrowed: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for name in self._names:
            number = signal.Signals[name]
            if usual_handler(signal.getsignal(number)) in _FATAL:
                self._borrowed[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self.number is not None:
            _end_children()
        for number, previous in self._borrowed.items():
            signal.signal(number, previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that datatrove's executor forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = self.number or number
        raise KeyboardInterrupt(signal.Signals(number).name)


def _end_children() -> None:
    """Those of datatrove's pools that a second signal left."""
    children = multiprocess.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _TO_END
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()


# closing --------------------------------------------------------------------------------------------------------------

# The last line of ``run``: what all ranks and all attempts have done, and what to do next.


def closing_line(runner: RunnerPlan, command: str, checked: Checked, started: float) -> str:
    """The closing line, over all ranks, their retries and all attempts, with what was checked.

    Args:
        started: when the command did, in Unix seconds. Retries since then are named.

    Raises:
        CheckpointCorrupt: the commits contradict each other.
        InputError: no row of the input is a document.
    """
    root = runner.root
    assert root is not None
    job = checked.jobs[root]
    if not job.ranks:
        find_ranks(root)  # raises, and says why
    counts = job.counts
    if counts.dead < 0 or counts.written + counts.dropped + counts.dead != counts.read:
        raise CheckpointCorrupt(
            f"The commits in {root} contradict each other: {counts.read} documents read, {counts.written} written, "
            f"{counts.dropped} dropped, {counts.dead} dead letters. Do not use the output before you have run: "
            f"{_verify(root)}"
        )
    skipped = rows_without_document(root)
    if not counts.read and (skipped.damaged or skipped.without_text):
        rows = skipped._replace(files=0, names=())  # every file would be named
        raise InputError(
            f"No row of the whole input is a document.{rows} Check text_key{written.and_adapter}, and start again "
            "with ",
            StartOver(),
            ".",
        )
    folder = runner.step.output_writer.output_folder.resolve_paths("")
    if not counts.read:
        return f"There are no documents in the input, so there is no output in {folder}.{_checked(checked)}"
    again = sum_counts(commit.counts for commit in job.retried if commit.at >= started)
    retried = f"{plural(again.read, 'dead letter')}: {again.read - again.dead} succeeded, {again.dead} still dead"
    idle = job.ranks - len({number for number, done in job.committed if done.read})
    had_none = f" {idle} of {plural(job.ranks, 'task')} had no documents." * bool(idle)
    work = f"{f' Retried {retried}.' * bool(again.read)}{skipped}{had_none}{counts.odd_answers}{_attempts(job)}"
    if "--retry-dead-letters" in command.split():
        retry = ""
    else:
        retry = " --retry-dead-letters"
    given = str(runner.copy or runner.step.checkpoints_local_dir)
    shown = root if given.startswith("~") or "$" in given else given  # a shell would not expand it in quotes
    next_step = f"To check the files: {_verify(shown)}"
    if counts.dead:
        seen = shlex.join(["datatrove-ckpt", "show", str(shown), "--dead"])
        next_step = f"To see the dead letters: {seen}. To retry them: {command}{retry}"
    none = ""
    if counts.dead == counts.read:
        ranks = (read_rank(*rank, Want.LETTERS, Limits(0, 1 << 16)) for rank in find_ranks(root))
        causes = sum((rank.causes for rank in ranks), Counter[str]())
        often = "".join(cause for cause, _ in causes.most_common(1))
        none = f"No document was {'written' if counts.answers else 'answered'}: {often}. "
    return (
        f"{none}{counts.written} of {plural_is(counts.read, 'document')} in {plural(job.numbers.files, 'file')} in "
        f"{folder} ({counts.dropped} dropped, {plural(counts.dead, 'dead letter')}), "
        f"for {plural(counts.requests, 'request')} with {counts.prompt_tokens} prompt and "
        f"{plural(counts.completion_tokens, 'completion token')}.{work}{_checked(checked)} {next_step}"
    )


def _attempts(job: JobSums) -> str:
    """What all attempts sent, as a sentence with a space before it; empty if nothing was repeated."""
    sent = job.numbers.work
    ranks = len(job.committed)  # with retries
    attempts = max(ranks, job.numbers.number_of_attempts)
    if not sent.sent or (attempts == ranks and not sent.retries + sent.resent):
        return ""
    if job.numbers.work_is_at_least:
        at_least = "at least "
    else:
        at_least = ""
    again = sent.retries + sent.resent
    if sent.sent == 1:
        were = "was"
    else:
        were = "were"
    said = (
        f" In {plural(attempts, 'attempt')} of {plural(job.ranks, 'task')}, {at_least}"
        f"{plural(sent.sent, 'request')} {were} sent{f', {again} of them again' if again else ''}"
    )
    unused = sent.completion_tokens - job.counts.completion_tokens
    if unused > 0:
        return f"{said}, and {plural(unused, 'completion token')} paid that no document has."
    return f"{said}."


def _checked(checked: Checked) -> str:
    """A sentence with a space before it; empty if nothing could be compared here."""
    parts = []
    if checked.jobs:
        files = sum(job.numbers.files for job in checked.jobs.values())
        parts.append(f"{plural(files, 'output file')} by name, size and time of change")
    if checked.inputs:
        parts.append(f"{plural(checked.inputs, 'input file')} by size and samples")
    if parts:
        return f" Checked: {' and '.join(parts)}, none is gone or changed."
    return ""


def _verify(checkpoints: Path | str) -> str:
    return f"{shlex.join(['datatrove-ckpt', 'verify', str(checkpoints)])} --full"
