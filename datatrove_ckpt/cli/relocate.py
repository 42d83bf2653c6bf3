"""``datatrove-ckpt relocate``: what it prints, and how it ends.

Exit codes: 0 the checkpoint belongs to its new place (with --dry-run: would); 1 files are missing or changed there, or
a rank is running; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
import shlex

from datatrove_ckpt.checkpoint.commits import repair_command
from datatrove_ckpt.checkpoint.job import name_tasks
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.maintenance import verify as checks
from datatrove_ckpt.maintenance.relocate import FOLDER, Relocation, carry_out, folders_still_there, plan_relocation
from datatrove_ckpt.maintenance.verify import Problem
from datatrove_ckpt.maintenance.where import Place, output_folder_of, restored, upload

_SHOWN, _OTHERS_SHOWN = 20, 5


def relocate(arguments: argparse.Namespace) -> int:
    """Compares the files, prints what it changes, and changes it. Returns the exit code."""
    with place_of(arguments, trusted=True) as place:
        if not place.is_copy:
            return _relocate(arguments, place)
        # A process that still works on the ranks of this mirror stops when it sees the new owner.
        with restored(place) as copy:
            return _relocate(arguments, copy, place)


def _relocate(arguments: argparse.Namespace, place: Place, mirrored: Place | None = None) -> int:
    """Changes the ranks in ``place``; and uploads them, if they were restored from a mirror."""
    output = arguments.output or output_folder_of(place.config)
    if output is None:
        raise ConfigError(
            "--output: name the folder, or the URL, where the output files are now. A YAML file of the run at the new "
            "place as WHAT tells it, too."
        )
    report = checks.verify(place.folder, output, not arguments.sizes_only, place.given)
    plan = plan_relocation(report, is_mirror=mirrored is not None)
    if plan.obstacles:
        say(place.said(_obstacles(plan, place)))
        return 1
    for line in _describe(plan, arguments.sizes_only):
        say(place.said(line))
    if plan.is_done:
        return 0
    if arguments.dry_run:
        say("Nothing was done (--dry-run).")
        return 0
    carry_out(plan)
    if mirrored is not None:
        upload(place, plan.ranks)
    say(_what_next(place, plan))
    return 0


def _obstacles(plan: Relocation, place: Place) -> str:
    shown = [line.replace(plan.report.redo_advice, "") for line in _shown(plan.obstacles, _SHOWN)]
    return "\n".join(
        [
            *shown,
            f"{plural(len(plan.obstacles), 'problem')}: the copy is not complete, so nothing was changed. "
            + _way_out(plan, place),
        ]
    )


def _way_out(plan: Relocation, place: Place) -> str:
    """Names `repair` only where it makes again what is lost. It refuses other files than those that are still there."""
    if any(problem.kind == "rank" for problem in plan.obstacles):
        return "Copy these files and folders again, and relocate again."
    if there := folders_still_there(plan.report):
        return f"Copy these files again from {', '.join(there)}, and relocate again."
    repair = repair_command(place.given, output=plan.report.output)
    return (
        "Copy these files again, and relocate again. What is lost can be made again: "
        f"{repair}, then relocate, then run."
    )


def _shown(problems: list[Problem], most: int) -> list[str]:
    more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
    return [*map(str, problems[:most]), *more]


def _describe(plan: Relocation, sizes_only: bool) -> list[str]:
    report = plan.report
    compared = "names and sizes" if sizes_only else "names, sizes and contents"
    files, ranks = plural(report.number_of_files, "file"), plural(len(report.ranks), "rank")
    lines = [f"{plan.where}: {files}, {byte_size(plan.bytes)}: {compared} are those of the commits of {ranks}."]
    if plan.not_started:
        one = len(plan.not_started) == 1
        lines.append(
            f"{name_tasks(plan.not_started)}: nothing here shows that {'it' if one else 'they'} ever started. If "
            f"{'it did, copy its folder' if one else 'they did, copy their folders'}, too, and relocate again before "
            "you run: what is not here is paid again."
        )
    if plan.is_done:
        return [*lines, f"{report.checkpoints} names this folder already. There is nothing to do."]
    lines += [f"{FOLDER}: {old} -> {plan.where}" for old in plan.old]
    if plan.others:
        verify = shlex.join(["datatrove-ckpt", "verify", str(report.checkpoints), "--output", report.output])
        lines += _shown(plan.others, _OTHERS_SHOWN)
        lines.append(f"{plural(len(plan.others), 'problem')} that the place has nothing to do with: {verify}")
    return lines


def _what_next(place: Place, plan: Relocation) -> str:
    where = f"checkpoints_remote_dir: {place.what}" if place.is_copy else f"checkpoints_local_dir: {place.folder}"
    return (
        f"Done. Run the pipeline with {where} and output_folder: {plan.where}, and the same input. Do not go on with "
        "the original as well: both would process the rest."
    )
