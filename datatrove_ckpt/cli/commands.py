"""datatrove-ckpt status, verify and repair: what they take, what they print, how they end.

What is done before a run is in preflight_commands.py.

Exit codes: 0 all is well and finished, as far as can be told; 1 there are problems (status: something is damaged;
repair: something could not be mended); 2 a mistake on the command line; 3 (verify) no problem, but not finished.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.cli.preflight_commands import add_doctor, add_plan
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.findings import Report, name_place
from datatrove_ckpt.maintenance.inspect import RankStatus, find_ranks, summarise
from datatrove_ckpt.maintenance.repair import carry_out
from datatrove_ckpt.maintenance.repair_plan import Plan, make_plan
from datatrove_ckpt.maintenance.verify import verify

_VERIFY_EPILOG = """\
It reads, and changes nothing; a run may be on meanwhile. Each line names a file or a chunk, what is wrong with it, and
what to do.

exit codes:
  0  all is well and finished, as far as can be told
  1  there are problems
  2  CHECKPOINTS is no checkpoint folder
  3  no problem, but something is not finished
"""

_REPAIR_EPILOG = """\
It takes back the commits of chunks whose output is missing, truncated, grown or (with --full) altered, and removes what
is left of that output. Run the pipeline again after it: exactly these chunks are made again, from journals and cached
answers where they still exist. Nothing may run meanwhile. Whatever it cannot mend it names, and leaves alone.

datatrove's executors skip a rank that has a marker in LOGGING_DIR/completions; name the folder with --logging-dir to
have the markers of the ranks in question removed.

exit codes:
  0  all problems are dealt with (with --dry-run: would be)
  1  some are left, or a rank is at work
  2  CHECKPOINTS is no checkpoint folder
"""


def add_commands(commands: Any) -> None:
    """Adds the subcommands to the parser's."""
    add_doctor(commands)
    add_plan(commands)
    _add(commands, "status", _status, "show what each rank has done; works while a run is on", "")
    checker = _add(commands, "verify", _verify, "check the output against the checkpoint", _VERIFY_EPILOG)
    mender = _add(commands, "repair", _repair, "have damaged chunks made again by the next run", _REPAIR_EPILOG)
    for parser in (checker, mender):
        parser.add_argument("--output", metavar="FOLDER", help="the output folder, if it isn't where run.json says")
        parser.add_argument("--full", action="store_true", help="read all output and compare its content, too")
    mender.add_argument("--logging-dir", metavar="DIR", help="the executor's, whose completion markers are to go")
    mender.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def _add(commands: Any, name: str, handler: Any, what: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path, help="the folder checkpoints_local_dir names")
    if name != "repair":
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(handler=handler)
    return parser


def _print_json(content: dict[str, Any]) -> None:
    print(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


# status --------------------------------------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    ranks = find_ranks(arguments.checkpoints)
    summaries = [summarise(rank)[0] for rank in ranks]
    tasks = max((_tasks(rank) for rank in ranks if not rank.root), default=0)
    if arguments.json:
        _print_json({"ranks": [summary.to_json() for summary in summaries], "totals": _totals(summaries, tasks)})
    else:
        print("\n".join([*(_status_line(summary) for summary in summaries), _total_line(summaries, tasks)]))
    return 1 if any(summary.error for summary in summaries) else 0


def _tasks(rank: Any) -> int:
    try:
        return int(rank.identity.get("tasks") or 0)
    except CheckpointCorrupt:
        return 0


def _status_line(summary: RankStatus) -> str:
    place = name_place(summary.root, summary.rank)
    if summary.error:
        return f"{place}: damaged: {summary.error}"
    state = summary.state
    if summary.holder:
        state += f" (pid {summary.holder.get('pid')} on {summary.holder.get('host')})"
    return f"{place}: {state}, {_numbers([summary])}, last commit {summary.last_commit or 'never'}"


def _total_line(summaries: list[RankStatus], tasks: int) -> str:
    retries = [summary for summary in summaries if summary.root]
    summaries = [summary for summary in summaries if not summary.root]
    states = Counter(summary.state for summary in summaries)
    begun = len(summaries)
    parts = [f"{number} {state}" for state, number in sorted(states.items())]
    parts += [f"{tasks - begun} not begun"] if tasks > begun else []
    retried = f"; of the dead, retries brought {_sum_counts(retries).written} to the output" if retries else ""
    return f"total: {plural(max(tasks, begun), 'rank')} ({', '.join(parts)}), {_numbers(summaries)}{retried}"


def _numbers(summaries: list[RankStatus]) -> str:
    counts = _sum_counts(summaries)
    journals = [number for summary in summaries for number in summary.journals.values()]
    unfinished = f" and {sum(journals)} in {plural(len(journals), 'unfinished chunk')}" if journals else ""
    return (
        f"{plural(counts.read, 'document')} done "
        f"({counts.written} written, {counts.dropped} dropped, {counts.dead} dead) "
        f"in {plural(sum(summary.chunks for summary in summaries), 'chunk')}{unfinished}; "
        f"{plural(counts.requests, 'request')}, {counts.prompt_tokens} prompt and {counts.completion_tokens} "
        "completion tokens"
    )


def _sum_counts(summaries: Iterable[RankStatus]) -> DocumentCounts:
    total = DocumentCounts()
    for summary in summaries:
        total.add(summary.counts)
    return total


def _totals(summaries: list[RankStatus], tasks: int) -> dict[str, Any]:
    """What a retry reads was read before, so retries are counted by themselves."""
    retried = _sum_counts(summary for summary in summaries if summary.root)
    summaries = [summary for summary in summaries if not summary.root]
    journals = [number for summary in summaries for number in summary.journals.values()]
    return {
        "ranks": len(summaries),
        "tasks": tasks,
        "chunks": sum(summary.chunks for summary in summaries),
        "unfinished_chunks": len(journals),
        "documents_in_journals": sum(journals),
        **asdict(_sum_counts(summaries)),
        "retried": asdict(retried),
    }


# verify --------------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    report = verify(arguments.checkpoints, arguments.output, arguments.full)
    code = 1 if report.problems else 3 if report.unfinished else 0
    if arguments.json:
        tasks = max((_tasks(rank) for rank in report.ranks if not rank.root), default=0)
        _print_json(
            {
                "checkpoints": str(report.checkpoints),
                "output": report.output,
                "full": arguments.full,
                "exit_code": code,
                "ranks": [summary.to_json() for summary in report.summaries],
                "totals": _totals(report.summaries, tasks) | {"files": report.number_of_files},
                "problems": [asdict(problem) for problem in report.problems],
                "unfinished": [asdict(unfinished) for unfinished in report.unfinished],
            }
        )
    else:
        print("\n".join([*map(str, report.problems), *map(str, report.unfinished), _verdict(report, arguments.full)]))
    return code


def _verdict(report: Report, full: bool) -> str:
    counts = _sum_counts(summary for summary in report.summaries if not summary.root)
    found = plural(len(report.problems), "problem") if report.problems else "no problem"
    if report.unfinished:
        found += f", {plural(len(report.unfinished), 'thing')} not finished"
    retries = [summary for summary in report.summaries if summary.root]
    retried = f", {_sum_counts(retries).written} of which were written by a retry" if retries else ""
    checked = "sizes and contents" if full else "sizes; --full compares contents, too"
    ranks = plural(len(report.ranks) - len(retries), "rank")
    return (
        f"{found}: {ranks}, {plural(counts.read, 'document')} ({counts.written} written, "
        f"{counts.dropped} dropped, {counts.dead} dead letters{retried}) in {plural(report.number_of_files, 'file')} "
        f"of {report.output} (checked: {checked})"
    )


# repair --------------------------------------------------------------------------------------------------------------


def _repair(arguments: argparse.Namespace) -> int:
    report = verify(arguments.checkpoints, arguments.output, arguments.full)
    plan = make_plan(report, arguments.logging_dir)
    for line in (*(f"not mended: {text}" for text in plan.left), *plan.describe(arguments.logging_dir)):
        print(line)
    if not plan.redo and not plan.markers:
        print("There is nothing that repair can mend." if plan.left else "There is nothing to repair.")
    elif arguments.dry_run:
        print("Nothing was done (--dry-run).")
    else:
        carry_out(plan, report, arguments.logging_dir)
        print(_what_next(plan, arguments.logging_dir))
    return 1 if plan.left else 0


def _what_next(plan: Plan, logging_dir: str | None) -> str:
    again = "Run the pipeline again to have the rest made"
    again += ", as a retry of dead letters." if all(redo.rank.root for redo in plan.redo) and plan.redo else "."
    if logging_dir is not None or not plan.redo:
        return f"Done. {again}"
    names = ", ".join(f"LOGGING_DIR/completions/{number:05d}" for number in sorted({r.rank.number for r in plan.redo}))
    return (
        f"Done. Now remove {names}, where they exist (or repair again with --logging-dir LOGGING_DIR): datatrove skips "
        f"ranks that have such a marker. {again}"
    )
