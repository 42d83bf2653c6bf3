"""A rank's numbers as datatrove's stats, under the names that its own runner uses.

They cover all attempts and retries, and come from the checkpoint, because the step object may have
run another rank before.
"""

from collections.abc import Iterable
from pathlib import Path

from datatrove.utils.stats import MetricStats, MetricStatsDict, Stats, TimingStats

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.commits import read_commits, sum_commits
from datatrove_ckpt.common.counts import CompletedWork, DocumentCounts, RunningStats
from datatrove_ckpt.readers.shard_record import ShardRecord
from datatrove_ckpt.rollouts.batch_rollout import BatchRollout


def sum_rank(rank: int, checkpoints: Path, opened: Path | None = None) -> CompletedWork:
    total = CompletedWork()
    for folder in layout.folders_of(checkpoints, rank):
        if folder == opened:
            continue
        done = sum_commits(read_commits(folder / layout.COMMITS).values())
        if layout.RankAddress.of(folder).retry:
            done = done.of_retry()
        total += done
    return total


def fill_stats(stats: Stats, done: CompletedWork, folder: Path) -> None:
    counts = done.counts
    work = done.work
    skipped = (ShardRecord.read(folder / layout.SHARD) or ShardRecord()).skipped
    metrics = {
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
        "inference_time": timing(done.seconds.inference, "seconds"),
    }
    stats.stats = MetricStatsDict(init={name: value for name, value in metrics.items() if value.n})
    if done.seconds.total:
        stats.time_stats = timing(done.seconds.total, "total")


def finished_documents(stats: Iterable[Stats]) -> int:
    metrics = [
        each.stats.get(name)
        for each in stats
        for name in ("documents_processed", "skipped_bad_requests")
    ]
    return sum(int(metric.total) for metric in metrics if metric is not None)


def metric(sums: RunningStats, unit: str) -> MetricStats:
    n = max(sums.n, 1)
    mean = sums.total / n
    # In integers: a difference of large floats would lose the variance.
    variance = max(0, n * sums.squares - sums.total**2) / n
    return MetricStats(sums.total, sums.n, mean, sums.low or 0, sums.high or 0, variance, unit)


def timing(seconds: float, unit: str) -> TimingStats:
    return TimingStats(seconds, 1, seconds, seconds, seconds, 0.0, unit)


def _ones(n: int, unit: str) -> MetricStats:
    return metric(RunningStats(n, n, n, 1, 1), unit)


def lines_with_error(rollout_fn: object, counts: DocumentCounts) -> int:
    if isinstance(rollout_fn, BatchRollout):
        return counts.written - counts.answers
    return 0
