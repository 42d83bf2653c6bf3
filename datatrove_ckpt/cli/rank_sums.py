"""Sums over the ranks that ``verify`` looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.maintenance.inspect import RankStatus


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
    unfinished = DocumentCounts()
    for summary in summaries:
        unfinished.add(summary.unfinished)
    journals = [number for summary in summaries for number in summary.journals.values()]
    return {
        "ranks": len(summaries),
        "tasks": tasks,
        "chunks": sum(summary.chunks for summary in summaries),
        "unfinished_chunks": len(journals),
        "documents_in_journals": sum(journals),
        **asdict(sum_counts(summaries)),
        "unfinished": asdict(unfinished),
        "retried": asdict(retried),
    }
