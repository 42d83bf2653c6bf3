"""``datatrove-ckpt status``, and the lines and totals that ``verify`` prints as well. Imports no datatrove.

Exit codes: 0 all is well; 1 something is damaged; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import orjson

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.inspect import RankFolder, RankStatus, find_ranks, name_place, summarise


def print_json(content: dict[str, Any]) -> None:
    """Prints one JSON object."""
    print(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


def status(arguments: argparse.Namespace) -> int:
    """Prints a line per rank and the total. Returns the exit code."""
    ranks = find_ranks(arguments.checkpoints)
    summaries = [summarise(rank)[0] for rank in ranks]
    tasks = max((number_of_tasks(rank) for rank in ranks if not rank.root), default=0)
    if arguments.json:
        print_json({"ranks": [summary.to_json() for summary in summaries], "totals": totals(summaries, tasks)})
    else:
        print("\n".join([*(_status_line(summary) for summary in summaries), _total_line(summaries, tasks)]))
    return 1 if any(summary.error for summary in summaries) else 0


def number_of_tasks(rank: RankFolder) -> int:
    """The number of tasks of the run that the rank belongs to; 0 if run.json does not tell."""
    try:
        return int(rank.identity.get("tasks") or 0)
    except CheckpointError:
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
    parts += [f"{tasks - begun} not started"] if tasks > begun else []
    retried = f"; retries wrote {sum_counts(retries).written} of the dead letters" if retries else ""
    return f"total: {plural(max(tasks, begun), 'rank')} ({', '.join(parts)}), {_numbers(summaries)}{retried}"


def _numbers(summaries: list[RankStatus]) -> str:
    counts = sum_counts(summaries)
    journals = [number for summary in summaries for number in summary.journals.values()]
    unfinished = f" and {sum(journals)} in {plural(len(journals), 'unfinished chunk')}" if journals else ""
    return (
        f"{plural(counts.read, 'document')} done "
        f"({counts.written} written, {counts.dropped} dropped, {counts.dead} dead) "
        f"in {plural(sum(summary.chunks for summary in summaries), 'chunk')}{unfinished}; "
        f"{plural(counts.requests, 'request')}, {counts.prompt_tokens} prompt and {counts.completion_tokens} "
        "completion tokens"
    )


def sum_counts(summaries: Iterable[RankStatus]) -> DocumentCounts:
    """The counts of several ranks as one."""
    total = DocumentCounts()
    for summary in summaries:
        total.add(summary.counts)
    return total


def totals(summaries: list[RankStatus], tasks: int) -> dict[str, Any]:
    """Sums over all ranks. Retries are counted apart, since they read documents that were read before."""
    retried = sum_counts(summary for summary in summaries if summary.root)
    summaries = [summary for summary in summaries if not summary.root]
    journals = [number for summary in summaries for number in summary.journals.values()]
    return {
        "ranks": len(summaries),
        "tasks": tasks,
        "chunks": sum(summary.chunks for summary in summaries),
        "unfinished_chunks": len(journals),
        "documents_in_journals": sum(journals),
        **asdict(sum_counts(summaries)),
        "retried": asdict(retried),
    }
