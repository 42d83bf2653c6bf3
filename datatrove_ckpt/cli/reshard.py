"""``datatrove-ckpt reshard``: prints what becomes of a run with another number of tasks, and changes it.

Exit codes: 0 done; 1 a rank is running, or something is not as it should be; 2 a mistake on the command line, or a
pipeline that cannot be dealt out anew.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import JOB, RUN, rank_folder, rank_numbers
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.cli.yaml_config import make_executor
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.maintenance.where import is_config
from datatrove_ckpt.preflight.reshard.run import Resharded, reshard


def reshard_run(arguments: argparse.Namespace) -> int:
    """Prints the sums. Returns the exit code."""
    if not is_config(arguments.what):
        raise ConfigError(
            f"reshard: {arguments.what} is no YAML file. What is left of the input is read through the steps of the "
            "run's pipeline, which only its YAML file names."
        )
    with place_of(arguments) as place:
        before = _tasks(place.folder)
    arguments.config = arguments.what
    overrides = [one for one in arguments.overrides if not one.removeprefix("--").startswith("executor.tasks=")]
    arguments.overrides = [*overrides, f"executor.tasks={before}"]
    found = reshard(make_executor(arguments), arguments.tasks, arguments.dry_run)
    for line in describe(found, arguments.dry_run):
        say(line)
    if not arguments.dry_run:
        again = ["datatrove-ckpt", "run", arguments.what, *(f"--{one.removeprefix('--')}" for one in overrides)]
        say(f"Go on with {shlex.join([*again, f'--executor.tasks={found.after}'])}, or set tasks in the file.")
    return 0


def _tasks(root: Path) -> int:
    paths = [root / JOB, *(rank_folder(root, rank) / RUN for rank in rank_numbers(root))]
    for path in paths:
        if path.exists() and (tasks := read_run(path).get("tasks")):
            return int(tasks)
    raise ConfigError(f"reshard: {root} holds no checkpoint that tells its number of tasks.")


def describe(found: Resharded, dry_run: bool) -> list[str]:
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
