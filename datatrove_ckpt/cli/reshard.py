"""``datatrove-ckpt reshard``: prints what it changes, changes it, and prints what is next.

Exit codes: 0 done (with --dry-run: would be); 1 a rank is running, or something is damaged, missing or changed; 2 a
mistake in a file or on the command line.
"""

from __future__ import annotations

import argparse
import shlex

from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.config.paths import is_script, start_command
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.jobs_executor import JobsPipelineExecutor
from datatrove_ckpt.maintenance.where import is_config
from datatrove_ckpt.preflight.reshard.run import Resharded
from datatrove_ckpt.preflight.reshard.run import reshard as deal_out
from datatrove_ckpt.preflight.run_plan import RunPlan


def reshard(arguments: argparse.Namespace) -> int:
    """Prints the sums. Returns the exit code."""
    if not is_config(arguments.what):
        raise ConfigError(
            f"reshard: {arguments.what} is no YAML file and no script. What is left of the input is read through the "
            "steps of the run's pipeline, which only these name."
        )
    executor = make_executor(arguments.what, arguments.overrides)
    if slurm_submit.submits(executor) and not arguments.dry_run:
        slurm_submit.refuse_queued(executor)
    if isinstance(executor, JobsPipelineExecutor) and not arguments.dry_run:
        executor.refuse_running()
    found = deal_out(executor, arguments.tasks, arguments.dry_run)
    for line in _describe_reshard(found, arguments.dry_run):
        say(line)
    if not arguments.dry_run:
        settings = {"executor.tasks": str(found.after)}
        if found.mirror is not None:
            index = RunPlan(executor).only_runner("reshard").index
            settings[f"pipeline.{index}.checkpoints_remote_dir"] = found.mirror
        overrides = [one for one in arguments.overrides if one.removeprefix("--").partition("=")[0] not in settings]
        again = start_command([arguments.what, *overrides])
        flags = shlex.join(f"--{name}={value}" for name, value in settings.items())
        named = " and ".join(f"{name.rpartition('.')[2]}: {value}" for name, value in settings.items())
        on = f"Go on with {again} {flags}, or set {named} in the file."
        say(f"Set {named}, and go on with {again}" if is_script(arguments.what) else on)
    return 0


def _describe_reshard(found: Resharded, dry_run: bool) -> list[str]:
    """What was done, or would be, in sentences."""
    if found.resumed:
        return [f"{found.before} -> {plural(found.after, 'task')}: the interrupted change is carried out."]
    lines = [
        f"{found.before} -> {plural(found.after, 'task')}: {plural(found.documents, 'finished document')} and "
        f"{plural(found.answers, 'saved answer')} are kept."
    ]
    if found.moved_documents or found.moved_answers:
        lines.append(
            f"{plural(found.moved_documents, 'finished document')} and {plural(found.moved_answers, 'saved answer')} "
            "of tasks that will no longer exist go to other tasks."
        )
    if found.lost_answers:
        lines.append(
            f"{plural(found.lost_answers, 'answer')} of them will be requested again: with seed, a request depends on "
            "the number of its document in the task."
        )
    total = sum(found.dealt)
    if not total:
        return [*lines, "Nothing of the input is left."]
    lines.append(
        f"{byte_size(int(total))} of the input are left. The largest task had {_share(found.left)} of them, and "
        f"{'would have' if dry_run else 'has'} {_share(found.dealt)} now; {plural(found.cuts, 'cut')} through files."
    )
    return lines


def _share(sizes: list[float]) -> str:
    return f"{100 * max(sizes, default=0) / (sum(sizes) or 1):.0f} %"
