"""Runs the executor of ``datatrove-ckpt run``, and ends with one clear message; with that of an
error come the commands that help against it.
"""

import argparse
import errno
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.cli.printing import fail, note, say
from datatrove_ckpt.cli.short_form import Node
from datatrove_ckpt.cli.yaml_config import FullConfig
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import plural, plural_is, without_flag
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config.paths import COMMAND_FILE
from datatrove_ckpt.errors import (
    CkptError,
    ConfigError,
    LimitReached,
    StorageFailed,
    TooManyDeadLetters,
    WaitsForBatches,
    form,
)
from datatrove_ckpt.executors.local import not_complete, raise_limit_reached
from datatrove_ckpt.process import task_errors
from datatrove_ckpt.process.shutdown import exit_error
from datatrove_ckpt.process.signals import STOP_SIGNALS, Interruption
from datatrove_ckpt.run_folder import preflight
from datatrove_ckpt.run_folder.run_plan import RunPlan, check_steps, note_workers
from datatrove_ckpt.run_folder.run_summary import summary_line, write_card

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_job(config: Node, executor: PipelineExecutor, arguments: argparse.Namespace) -> int:
    if arguments.worker:
        for name in ("retry_dead_letters", "fail_on_dead_letters"):
            if getattr(arguments, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: is not for --worker.")
        from datatrove_ckpt.cli.kubernetes import refuse_other_kinds

        refuse_other_kinds(executor, "--worker")
        init_args = config["executor"].get("init_args") or {}
        if not init_args.get("logging_dir"):  # each worker would have one of its own
            raise ConfigError("executor: logging_dir: --worker needs one.")
        config["executor"]["init_args"] = init_args | {"workers": 1}
        executor.workers = 1
    if "kubernetes" in config:
        from datatrove_ckpt.cli.kubernetes import kubernetes_job

        kubernetes_job(config, RunPlan(executor))
    if arguments.print_config:
        say(FullConfig(config).text().rstrip())
        return 0
    if arguments.sample is not None:
        from datatrove_ckpt.cli.output_commands import sample

        return sample(executor, arguments.sample)
    return execute(executor, config, arguments)


def execute(executor: PipelineExecutor, config: Node, arguments: argparse.Namespace) -> int:
    """Runs the executor of a file.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    plan = RunPlan(executor)
    check_steps(plan)
    if plan.submits and not hasattr(executor, "submit"):
        raise ConfigError(
            f"executor: class_path: write {plan.name}; datatrove's own is for scripts."
        )
    if arguments.no_wait:
        if plan.tasks > 1:  # the first would end the others
            raise ConfigError("--no-wait: is for a run of one task. Set tasks: 1, or leave it out.")
        plan = _changed(executor, plan, no_wait=True)
    if arguments.cancel:
        if not hasattr(executor, "cancel"):
            raise ConfigError(
                "--cancel: is for Hugging Face Jobs. Stop other runs by a signal, or scancel."
            )
        jobs = executor.cancel()
        message = f"Canceled {plural(jobs, 'job')}. To resume: run again."
        say(message if jobs else "No job of this run waits or runs.")
        return 0
    if arguments.dry_run:
        full = FullConfig(config)
        say(full.text().rstrip())
        note_workers(plan.workers, plan.tasks)
        if plan.submits:  # as comments: the whole remains YAML that can be run
            script = full.redact(executor.script()).rstrip("\n").splitlines()
            comments = ["", "# What would be submitted:", "#"]
            comments += [f"# {line}".rstrip() for line in script]
            say("\n".join(comments))
        return 0
    return _checked_run(executor, plan, config, arguments)


def _checked_run(
    executor: PipelineExecutor, plan: RunPlan, config: Node, arguments: argparse.Namespace
) -> int:
    started = False
    drain_signals = [
        signal.Signals[name] for runner in plan.runners for name in runner.step.drain_signals
    ]
    interruption = Interruption([*STOP_SIGNALS, *drain_signals])
    try:
        with interruption:
            if arguments.fail_on_dead_letters and plan.submits:
                raise ConfigError(
                    "--fail-on-dead-letters: this command only submits. Leave the flag out; "
                    "`datatrove-ckpt status` counts dead letters."
                )
            if arguments.retry_dead_letters:
                incomplete = plan.incomplete(skip_completed=True)
                if incomplete:  # datatrove would mark it as complete although its input is not done
                    raise ConfigError(
                        f"--retry-dead-letters: {len(incomplete)} of {plan.tasks} tasks are not "
                        f"finished (task {incomplete[0]} is the first). First run without it."
                    )
                plan = _changed(executor, plan, retry_dead_letters=True)
            if plan.retries:  # datatrove's executors, and a flag, leave it as it was
                executor.skip_completed = False
            if not arguments.worker:
                with plan.with_mirrors() as seen:
                    preflight.check_before_run(seen)
            started = True
            dead = _execute(executor, plan, config, arguments)
            if dead and arguments.fail_on_dead_letters:
                text = f"{plural_is(dead, 'dead letter')} left (--fail-on-dead-letters)."
                return fail(TooManyDeadLetters(text), 1)
    except KeyboardInterrupt:
        return _interrupted(interruption, arguments.command)
    except SystemExit as exit:
        # datatrove's requeue handler exits with 15; a step may exit with 0.
        if exit.code:
            raise
        return fail(exit_error("A step", exit), 1)
    except Exception as error:
        if isinstance(error, ConfigError) and not started and not arguments.worker:
            raise
        # The signal may have ended datatrove's own processes first.
        if interruption.number:
            return _interrupted(interruption, arguments.command)
        package_error: Exception | None = task_errors.own_error(error)
        if package_error is None and isinstance(error, OSError):
            package_error = _explained(error, plan)
        if package_error is None:
            raise
        advise(package_error, plan, arguments.command)
        code = 1
        if arguments.worker or isinstance(package_error, WaitsForBatches | LimitReached):
            code = retrying.code_of_rank(package_error)
        return fail(package_error, code)
    finally:
        task_errors.say_errors_later(False)
    return 0


def _explained(error: OSError, plan: RunPlan) -> Exception | None:
    """Returns an error with advice for a full disk, or a refusal of the hub. Such an error is
    mostly about ``logging_dir``, and names no file; files of a rank have errors of their own.
    """
    logs = plan.logging_dir
    roots = [root for _, root in plan.with_checkpoints]
    refused = retrying.hub_refusal(error)
    if refused:
        return StorageFailed(f"{refused}.", setting="" if logs.is_local() else "logging_dir")
    if error.errno not in _FULL:
        return None
    folders = " or ".join(map(str, [logs.resolve_paths(""), *roots]))
    try:
        with explained("use", error.filename or folders):
            raise error
    except CkptError as with_advice:
        return with_advice


def _execute(
    executor: PipelineExecutor, plan: RunPlan, config: Node, arguments: argparse.Namespace
) -> int:
    """Returns the dead letters that are left; 0: unknown."""
    # Pickled with the executor into pool workers and cluster jobs.
    executor._quiet = task_errors.QuietErrors(said_later=True)
    if arguments.worker:
        completed = plural(executor.run_worker(), "task")
        say(f"This worker has completed {completed}, and no task is free now.")
        return 0
    command = shlex.join(arguments.command)
    redacted = FullConfig(config).redact(redact(command))
    if plan.logging_dir.is_local():
        with plan.logging_dir.open(COMMAND_FILE, "w") as file:
            file.write(redacted)
            if form():
                file.write(f"\n{plan.logging_dir.path}")
    with_checkpoints = [
        runner for runner in plan.runners if runner.step.checkpoints_local_dir is not None
    ]
    if plan.submits:
        locations = [[str(runner.step.checkpoints_local_dir)] for runner in with_checkpoints]
        if arguments.config and len(with_checkpoints) == 1:
            locations = [[arguments.config, *arguments.overrides]]
        status_commands = [
            shlex.join(["datatrove-ckpt", "status", *location]) for location in locations
        ]
        say(executor.submit(status_commands, command))
        return 0
    started = unix_seconds()
    if hasattr(executor, "run_ranks"):
        executor.run_ranks()
    else:
        plan.forget_completed()
        executor.run()
        incomplete = plan.incomplete(skip_completed=True)  # datatrove's executors hide failures
        raise_limit_reached(plan.pipeline, incomplete)
        if incomplete:
            raise not_complete(executor, incomplete)
    with plan.with_mirrors() as seen:
        jobs = preflight.check_after_run(seen)
        for runner, root in seen.with_checkpoints:
            say(summary_line(runner, root, jobs[root], started, command))
            if runner.step.card and runner.copy is None:
                try:
                    write_card(runner, root, redacted)
                except (OSError, CkptError) as error:
                    say(f"The card was not written: {error}")
    goal = plan.limit_reached()
    if goal is not None:
        advise(goal, plan, arguments.command)
        fail(goal, 0)
    return sum(job.counts.dead for job in jobs.values())


def _interrupted(interruption: Interruption, argv: Sequence[str]) -> int:
    number = interruption.number or signal.SIGINT
    note(f"interrupted by {signal.Signals(number).name}. To resume: {shlex.join(argv)}")
    return 128 + number


def _changed(executor: PipelineExecutor, plan: RunPlan, **changes: bool) -> RunPlan:
    for runner in plan.runners:
        executor.pipeline[runner.index] = runner.step.changed(**changes)
    return RunPlan(executor)


# commands that help against an error --------------------------------------------------------------


def advise(error: Exception, plan: RunPlan, argv: Sequence[str] = ()) -> None:
    if not isinstance(error, CkptError):
        return
    if argv:
        for number, changes in enumerate(error.changes):
            runner = f"pipeline.{plan.runners[0].index}"
            paths = {
                "tasks": "executor.tasks",
                "max_tokens": f"{runner}.config.default_generation_params.max_tokens",
            }
            # Only a run of all tasks can make all changes.
            changed = [word for word in argv if word != "--worker"]
            for name, value in changes.items():
                text = str(value)
                if isinstance(value, bool):
                    text = text.lower()
                flag = f"--{plan.setting_paths.get(name, name).replace('_', '-')}"
                added = [flag, text]
                if not form():
                    flag = f"--{paths.get(name, f'{runner}.{name}')}"
                    added = [f"{flag}={text}"]
                changed = [*without_flag(changed, flag), *added]
            command = shlex.join(changed)
            error.add_note(f"{'or' if number else 'The whole command'}: {command}")
    if error.starts_over and form() and plan.logging_dir.is_local():
        folder = Path(plan.logging_dir.resolve_paths("")).absolute().parent
        inputs = [step.data_folder for step in plan.pipeline if hasattr(step, "data_folder")]
        holds_input = any(Path(data.path).absolute().is_relative_to(folder) for data in inputs)
        if folder.is_dir() and not holds_input:
            move = shlex.join(["mv", str(folder), str(files.free_name(folder, "."))])
            error.add_note(f"To start over, move it aside while no task runs: {move}")
