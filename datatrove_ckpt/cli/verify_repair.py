"""``datatrove-ckpt verify`` and ``repair``: print problems and steps, and return exit codes."""

import argparse
from dataclasses import asdict

from datatrove_ckpt.checkpoint.compare import mixed_settings
from datatrove_ckpt.cli.open_run import open_run
from datatrove_ckpt.cli.printing import say, say_result
from datatrove_ckpt.common.formatting import plural, plural_or_no
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder import verify as checks
from datatrove_ckpt.run_folder.repair import apply_repair, check_output_folder, make_plan
from datatrove_ckpt.run_folder.run_location import restored, upload
from datatrove_ckpt.run_folder.run_state import check_idle


def verify(arguments: argparse.Namespace) -> int:
    """Prints each problem and a verdict. Returns the exit code."""
    with open_run(arguments, output=arguments.output) as location:
        report = checks.verify(location, arguments.full)
    code = 0
    if report.problems:
        code = 1
    elif report.unfinished and report.goal is None:
        code = 3
    lines = [*map(str, report.problems), *map(str, report.unfinished)]
    runs = [report.job, *(rank.run for rank in report.ranks)]
    accepted = (change for run in runs for change in run.get("accepted_changes", []))
    for name, old, new in mixed_settings(accepted):
        lines.append(
            f"accept_changes: {name} was {old} for some of the documents, and {new} for others."
        )
    sums = report.sums
    counts = sums.counts
    summary = plural_or_no(len(report.problems), "problem")
    if report.unfinished:
        summary += f", {plural(len(report.unfinished), 'thing')} not finished"
    if report.unfinished and report.goal is not None:
        summary += " (until is reached)"
    checked = "sizes; --full also compares contents"
    if report.full:
        checked = "sizes and contents"
    if report.uncounted:
        checked += f"; rows of {', '.join(sorted(report.uncounted))} cannot be counted"
    lines.append(
        f"{summary}: {plural(sums.ranks, 'task')}, {plural(counts.read, 'document')} "
        f"({counts.written} written, {counts.dropped} dropped, "
        f"{plural(counts.dead, 'dead letter')}) in {plural(sums.numbers.files, 'file')} of "
        f"{report.output} (checked: {checked})"
    )
    totals = {**counts.fields(), "lengths": counts.lengths.percentiles}
    fields = {
        "checkpoints": str(report.checkpoints),
        "output": report.output,
        "full": report.full,
        "exit_code": code,
        "totals": {**totals, "files": sums.numbers.files},
        "problems": [asdict(problem) for problem in report.problems],
        "unfinished": [asdict(unfinished) for unfinished in report.unfinished],
    }
    say_result(arguments.json, fields, lines)
    return code


def repair(arguments: argparse.Namespace) -> int:
    """Prints each step of a repair and carries it out. Returns the exit code."""
    with (
        open_run(arguments, output=arguments.output) as named,
        log_disabled("datatrove_ckpt.mirror"),
        restored(named) as location,
    ):
        report = checks.verify(location, arguments.full)
        check_output_folder(report)
        plan = make_plan(report, arguments.logging_dir or location.logging_dir)
        lines = list(plan.describe())
        is_needed = plan.ranks or plan.markers
        if plan.unrepaired and not is_needed:
            lines.append("There is nothing that repair can do.")
        elif not is_needed:
            lines.append("There is nothing to repair.")
        for line in lines:
            say(line)
        if is_needed and arguments.dry_run:
            say("Nothing was done (--dry-run).")
        elif is_needed:
            if location.is_copy:
                check_idle(named, plan.ranks)
            apply_repair(plan, report)
            upload(location, plan.ranks)
            again = "Run the pipeline again to process these chunks"
            if plan.ranks and all(rank.root for rank in plan.ranks):
                again += ", as a retry of dead letters"
            numbers = sorted({rank.number for rank in plan.ranks})
            markers = ""
            if numbers and plan.logging_dir is None:
                names = ", ".join(f"LOGGING_DIR/completions/{number:05d}" for number in numbers)
                markers = (
                    f" Now remove {names}, where they exist (or repair again with --logging-dir "
                    "LOGGING_DIR): datatrove skips tasks that have such a marker."
                )
            say(f"Done.{markers} {again}.")
    return int(bool(plan.unrepaired))
