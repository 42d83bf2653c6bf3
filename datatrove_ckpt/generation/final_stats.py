"""A rank's numbers as datatrove's stats, under the names that its own runner uses.

They cover all attempts and retries, and come from the checkpoint, because the step object may have
run another rank before.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datatrove.utils.stats import MetricStats, MetricStatsDict, Stats, TimingStats

from datatrove_ckpt.checkpoint.clock import NO_SECONDS, Seconds
from datatrove_ckpt.checkpoint.commits import read_commits, sum_work
from datatrove_ckpt.checkpoint.layout import (
    COMMITS,
    SHARD,
    rank_folder,
    retry_folders,
)
from datatrove_ckpt.checkpoint.numbers import DocumentCounts, Sums, WorkStats
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.readers.shard import ShardRecord
from datatrove_ckpt.rollouts.batch import BatchRollout


class RankNumbers:
    """The numbers of a rank and its retries. Each document counts once.

    Args:
        root: ``checkpoints_local_dir``.
        opened: the folder of the checkpoint that ``fill`` gets.

    Raises:
        CheckpointCorrupt: a commit of another folder is damaged.
    """

    def __init__(self, rank: int, root: Path, opened: Path | None = None) -> None:
        self.counts = DocumentCounts()
        self.work = WorkStats()
        self.seconds = NO_SECONDS
        self._opens_retry = opened is not None and opened.parent != root
        self._shard = rank_folder(root, rank) / SHARD
        for parent in (root, *retry_folders(root)):
            folder = rank_folder(parent, rank)
            if folder != opened:
                self._add(parent != root, *sum_work(read_commits(folder / COMMITS).values()))

    def _add(
        self, is_retry: bool, counts: DocumentCounts, work: WorkStats, seconds: Seconds
    ) -> None:
        if is_retry:
            self.counts += counts.of_retry()
        else:
            self.counts += counts
        self.work += work
        self.seconds = Seconds(*(sum(both) for both in zip(self.seconds, seconds, strict=True)))

    def fill(self, stats: Stats, checkpoint: OpenCheckpoint | None = None) -> None:
        """Sets the numbers of a step. ``checkpoint``: the open one, closed."""
        if checkpoint is not None:
            self._add(self._opens_retry, checkpoint.counts, checkpoint.work, checkpoint.seconds)
        counts = self.counts
        work = self.work
        seconds = self.seconds
        skipped = (ShardRecord.read(self._shard) or ShardRecord()).skipped
        found = {
            "prompt_tokens": metric(work.prompt_tokens, "request"),
            "completion_tokens": metric(work.completion_tokens, "request"),
            "successful_requests": _ones(work.prompt_tokens.n, "request"),
            "failed_requests": _ones(work.failed_requests, "request"),
            "requests": metric(work.requests, "rollout"),
            "successful_rollouts": metric(work.successful_rollouts, "document"),
            "failed_rollouts": metric(work.failed_rollouts, "document"),
            "documents_processed": _ones(counts.read - counts.dead, "document"),
            "skipped_bad_requests": _ones(counts.dead, "document"),
            "skipped_damaged_lines": _ones(skipped.damaged, "line"),
            "skipped_rows_without_text": _ones(skipped.without_text, "row"),
            "inference_time": timing(seconds.inference, "seconds"),
        }
        stats.stats = MetricStatsDict(
            init={name: value for name, value in found.items() if value.n}
        )
        if seconds.total:
            stats.time_stats = timing(seconds.total, "total")


def finished_documents(stats: Iterable[Stats]) -> int:
    found = [
        each.stats.get(name)
        for each in stats
        for name in ("documents_processed", "skipped_bad_requests")
    ]
    return sum(int(metric.total) for metric in found if metric is not None)


def metric(sums: Sums, unit: str) -> MetricStats:
    """Returns the result of ``MetricStats.update`` over the single values."""
    if not sums.n:
        return MetricStats(unit=unit)
    mean = sums.total / sums.n
    # In integers: a difference of large floats would lose the variance.
    variance = max(0, sums.n * sums.squares - sums.total**2) / sums.n
    low, high = (mean if end is None else end for end in (sums.low, sums.high))
    return MetricStats(sums.total, sums.n, mean, low, high, variance, unit)


def timing(seconds: float, unit: str) -> TimingStats:
    return TimingStats(seconds, 1, seconds, seconds, seconds, 0.0, unit)


def _ones(n: int, unit: str) -> MetricStats:
    return metric(Sums(n, n, n, 1, 1), unit)


def lines_with_error(rollout_fn: object, counts: DocumentCounts) -> int:
    """Returns how many lines of a batch file have an error in the output. A line is one request."""
    if isinstance(rollout_fn, BatchRollout):
        return counts.written - counts.answers
    return 0
