"""The metrics of a rank: their names, what they mean, and their values now.

Names and units are as Prometheus wants them: seconds, bytes, and ``_total`` for what only grows. Those counters start
from zero in each attempt, which Prometheus' ``rate`` and ``increase`` understand. What is summed over all attempts is a
gauge: after a kill it may be a little lower than before, which would make a counter look as if it had started again.

A ``Snapshot`` is plain JSON, so that the process that serves the port can get it from the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from datatrove_ckpt.checkpoint.history_records import Buckets, Progress, Spread

Snapshot: TypeAlias = dict[str, Any]
"""``labels`` of the rank, and ``values``: by metric, a list of [label values, number or histogram]."""

PREFIX = "datatrove_ckpt_"
RANK_LABELS = ("run", "rank")
STATES = ("starting", "running", "stopping", "done", "stopped", "failed")
"""``stopping`` drains; the last three are ends."""


class Metric(NamedTuple):
    """``labels``: its own, besides ``RANK_LABELS``."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_METRICS = {
    "rank_info": Metric("gauge", "Always 1; its labels tell where the rank works.", ("version", "host", "job")),
    "rank_state": Metric("gauge", f"1 for the state that the rank is in, one of {', '.join(STATES)}.", ("state",)),
    "job_ranks": Metric("gauge", "How many ranks the job has, those that work nowhere included."),
    "updated_timestamp_seconds": Metric("gauge", "When these values were read, in Unix seconds."),
    "attempt_start_timestamp_seconds": Metric("gauge", "When this attempt of the rank started, in Unix seconds."),
    "rank_seconds": Metric("gauge", "Time that all attempts of the rank took.", ("phase",)),
    "rank_documents": Metric("gauge", "Documents that all attempts of the rank have finished.", ("outcome",)),
    "rank_requests": Metric("gauge", "Requests of the documents that all attempts of the rank have finished."),
    "rank_tokens": Metric("gauge", "Tokens of the documents that all attempts of the rank have finished.", ("type",)),
    "rank_chunks": Metric("gauge", "Chunks that all attempts of the rank have committed."),
    "input_done_ratio": Metric("gauge", "Part of the rank's input that is done, from 0 to 1; missing if not known."),
    "input_done_bytes": Metric("gauge", "Bytes of the input that are done; missing if not known."),
    "input_size_bytes": Metric("gauge", "Bytes of the whole input of the rank; missing if not known."),
    "input_done_rows": Metric("gauge", "Rows of the input that are done; missing if not known."),
    "input_size_rows": Metric("gauge", "Rows of the whole input of the rank; missing if not known."),
    "documents_total": Metric("counter", "Documents that this attempt has finished."),
    "documents_in_progress": Metric("gauge", "Documents that rollouts work on now."),
    "requests_total": Metric("counter", "Requests of this attempt that ended at a server.", ("outcome",)),
    "requests_in_flight": Metric("gauge", "Requests that servers work on now."),
    "requests_waiting": Metric("gauge", "Requests that wait for a server or a free slot now."),
    "request_attempts_total": Metric("counter", "Times that a request was sent to a server in this attempt."),
    "request_retries_total": Metric(
        "counter", "Requests sent again in this attempt: after an error, or because their server was lost.", ("cause",)
    ),
    "request_errors_total": Metric(
        "counter", "Requests of this attempt that failed once, by kind of error.", ("kind",)
    ),
    "cache_hits_total": Metric("counter", "Requests of this attempt that the request cache answered."),
    "tokens_total": Metric("counter", "Tokens of this attempt's answers, as servers count them.", ("type",)),
    "server_restarts_total": Metric("counter", "Restarts of model servers in this attempt."),
    "request_duration_seconds": Metric("histogram", "Time from sending a request to its answer."),
    "request_prompt_tokens": Metric("histogram", "Prompt tokens of each answer."),
    "request_completion_tokens": Metric("histogram", "Completion tokens of each answer."),
}
METRICS = {PREFIX + name: metric for name, metric in _METRICS.items()}

# Upper ends of the histograms' buckets, as powers of two: 1 ms to 35 min, 1 token to 131,072.
_MILLISECONDS, _TOKENS = range(0, 22), range(0, 18)


@dataclass(frozen=True)
class RankLabels:
    """Which rank it is, and where it works.

    Attributes:
        run: the job's name.
        job: of Slurm; "" outside of it.
        started_at: Unix seconds.
        ranks: how many the job has.
    """

    run: str
    rank: int
    version: str
    host: str
    job: str
    started_at: float
    ranks: int

    def snapshot(self, state: str, now: float, progress: Progress | None, spread: Spread | None) -> Snapshot:
        """The rank's metrics. ``now``: Unix seconds. ``progress``, ``spread``: None if there is nothing yet."""
        values = _Values()
        values.add("rank_info", 1, self.version, self.host, self.job)
        for name in STATES:
            values.add("rank_state", int(name == state), name)
        values.add("job_ranks", self.ranks)
        values.add("updated_timestamp_seconds", round(now, 3))
        values.add("attempt_start_timestamp_seconds", round(self.started_at, 3))
        if progress is not None:
            _add_rank(values, progress)
            _add_attempt(values, progress)
        if spread is not None:
            values.add("request_duration_seconds", _histogram(spread.milliseconds, _MILLISECONDS, 1000.0))
            values.add("request_prompt_tokens", _histogram(spread.prompt_tokens, _TOKENS))
            values.add("request_completion_tokens", _histogram(spread.completion_tokens, _TOKENS))
        return {"labels": {"run": self.run, "rank": str(self.rank)}, "values": values.found}


class _Values:
    def __init__(self) -> None:
        self.found: dict[str, list[tuple[tuple[str, ...], Any]]] = {}

    def add(self, name: str, value: Any, *labels: str) -> None:
        self.found.setdefault(PREFIX + name, []).append((labels, value))


def _add_rank(values: _Values, progress: Progress) -> None:
    """Sums over all attempts."""
    documents = progress.documents
    values.add("rank_seconds", progress.seconds.inference, "inference")
    values.add("rank_seconds", progress.seconds.total, "total")
    for outcome in ("written", "dropped", "dead"):
        values.add("rank_documents", getattr(documents, outcome), outcome)
    values.add("rank_requests", documents.requests)
    values.add("rank_tokens", documents.prompt_tokens, "prompt")
    values.add("rank_tokens", documents.completion_tokens, "completion")
    values.add("rank_chunks", progress.chunks)
    position = progress.position
    if (share := position.share) is not None:
        values.add("input_done_ratio", share)
    if position.unit is not None:
        values.add(f"input_done_{position.unit}", position.done)
        if position.total is not None:
            values.add(f"input_size_{position.unit}", position.total)


def _add_attempt(values: _Values, progress: Progress) -> None:
    own = progress.own
    values.add("documents_total", own.documents)
    values.add("documents_in_progress", progress.in_work)
    values.add("requests_total", own.requests - own.failed, "answered")
    values.add("requests_total", own.failed, "failed")
    values.add("requests_in_flight", progress.in_flight)
    values.add("requests_waiting", progress.waiting)
    values.add("request_attempts_total", own.sent)
    values.add("request_retries_total", own.retries, "error")
    values.add("request_retries_total", own.resent, "server_lost")
    for kind, count in own.errors.items():
        values.add("request_errors_total", count, kind)
    values.add("cache_hits_total", own.cached)
    values.add("tokens_total", own.prompt_tokens, "prompt")
    values.add("tokens_total", own.completion_tokens, "completion")
    values.add("server_restarts_total", own.restarts)


def _histogram(buckets: Buckets, powers: range, divisor: float = 1.0) -> Snapshot:
    """As Prometheus has it: [upper end, number of values up to it], and their sum.

    The sum is made of the buckets' middles, which are at most 9 % off.
    """
    counts = dict(buckets)
    found: list[tuple[str, int]] = []
    below = Buckets.lower
    for power in powers:
        end = 4 * power  # the last of our buckets below 2 ** power
        total = sum(count for bucket, count in counts.items() if bucket <= end)
        found.append((repr(2.0**power / divisor), total))
    found.append(("+Inf", sum(counts.values())))
    middles = (count * (below(bucket) + below(bucket + 1)) / 2 for bucket, count in counts.items())
    return {"buckets": found, "sum": sum(middles) / divisor}
