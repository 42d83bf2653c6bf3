"""``datatrove-ckpt verify`` and ``repair``: what they print, and how they end.

Exit codes: 0 no problem found, everything finished; 1 there are problems (repair: some could not be repaired); 2 a
mistake on the command line; 3 (verify) no problem found, but not finished.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from datatrove_ckpt.cli.status import number_of_tasks, print_json, sum_counts, totals
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance import verify as checks
from datatrove_ckpt.maintenance.findings import Report
from datatrove_ckpt.maintenance.repair import carry_out
from datatrove_ckpt.maintenance.repair_plan import Plan, check_output_folder, make_plan

# verify --------------------------------------------------------------------------------------------------------------


def verify(arguments: argparse.Namespace) -> int:
    """Prints each problem and a verdict. Returns the exit code."""
    report = checks.verify(arguments.checkpoints, arguments.output, arguments.full)
    code = 1 if report.problems else 3 if report.unfinished else 0
    if arguments.json:
        tasks = max((number_of_tasks(rank) for rank in report.ranks if not rank.root), default=0)
        print_json(
            {
                "checkpoints": str(report.checkpoints),
                "output": report.output,
                "full": arguments.full,
                "exit_code": code,
                "ranks": [summary.to_json() for summary in report.summaries],
                "totals": totals(report.summaries, tasks) | {"files": report.number_of_files},
                "problems": [asdict(problem) for problem in report.problems],
                "unfinished": [asdict(unfinished) for unfinished in report.unfinished],
            }
        )
    else:
        print("\n".join([*map(str, report.problems), *map(str, report.unfinished), _verdict(report, arguments.full)]))
    return code


def _verdict(report: Report, full: bool) -> str:
    counts = sum_counts(summary for summary in report.summaries if not summary.root)
    found = plural(len(report.problems), "problem") if report.problems else "no problem"
    if report.unfinished:
        found += f", {plural(len(report.unfinished), 'thing')} not finished"
    retries = [summary for summary in report.summaries if summary.root]
    retried = f", {sum_counts(retries).written} of which were written by a retry" if retries else ""
    checked = "sizes and contents" if full else "sizes; --full compares contents, too"
    ranks = plural(len(report.ranks) - len(retries), "rank")
    return (
        f"{found}: {ranks}, {plural(counts.read, 'document')} ({counts.written} written, "
        f"{counts.dropped} dropped, {counts.dead} dead letters{retried}) in {plural(report.number_of_files, 'file')} "
        f"of {report.output} (checked: {checked})"
    )


# repair --------------------------------------------------------------------------------------------------------------


def repair(arguments: argparse.Namespace) -> int:
    """Prints each step and carries it out. Returns the exit code."""
    report = checks.verify(arguments.checkpoints, arguments.output, arguments.full)
    check_output_folder(report)
    plan = make_plan(report, arguments.logging_dir)
    for line in (*(f"not repaired: {text}" for text in plan.left), *plan.describe(arguments.logging_dir)):
        print(line)
    if not plan.ranks and not plan.markers:
        print("There is nothing that repair can do." if plan.left else "There is nothing to repair.")
    elif arguments.dry_run:
        print("Nothing was done (--dry-run).")
    else:
        carry_out(plan, report, arguments.logging_dir)
        print(_what_next(plan, arguments.logging_dir))
    return 1 if plan.left else 0


def _what_next(plan: Plan, logging_dir: str | None) -> str:
    again = "Run the pipeline again to process these chunks"
    again += ", as a retry of dead letters." if all(rank.root for rank in plan.ranks) and plan.ranks else "."
    if logging_dir is not None or not plan.ranks:
        return f"Done. {again}"
    names = ", ".join(
        f"LOGGING_DIR/completions/{number:05d}" for number in sorted({rank.number for rank in plan.ranks})
    )
    return (
        f"Done. Now remove {names}, where they exist (or repair again with --logging-dir LOGGING_DIR): datatrove skips "
        f"ranks that have such a marker. {again}"
    )
