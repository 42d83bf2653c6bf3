"""The metrics of a rank: their names, what they mean, and their values now.

Names and units are as Prometheus wants them: seconds, bytes, and ``_total`` for what only grows. Those counters start
from zero in each attempt, which Prometheus' ``rate`` and ``increase`` understand. What is summed over all attempts is a
gauge: after a kill it may be a little lower than before, which would make a counter look as if it had started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import Buckets, Progress, Spread, WorkCounts

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


class Histogram(NamedTuple):
    """As Prometheus has it: each upper end with the number of values up to it, and the sum of all values."""

    buckets: list[tuple[str, int]]
    sum: float


Values: TypeAlias = dict[tuple[str, ...], float] | Histogram | float | None
"""Of a metric: by the values of its own labels, or the only one. None: not known."""


@dataclass(frozen=True)
class RankNow:
    """Which rank it is, where it works, and how far it is.

    Attributes:
        run: the job's name.
        job: of Slurm; "" outside of it.
        started_at, now: Unix seconds.
        ranks: how many the job has.
        state: one of ``STATES``.
    """

    run: str
    rank: int
    host: str
    job: str
    started_at: float
    ranks: int
    state: str
    now: float
    progress: Progress
    spread: Spread

    def values(self) -> dict[str, Values]:
        """By the names in ``METRICS``. Those of an input whose position is not known are left out."""
        total, own, position = self.progress, self.progress.own, self.progress.position
        found: dict[str, Values] = {
            "rank_info": {(__version__, self.host, self.job): 1},
            "rank_state": {(state,): int(state == self.state) for state in STATES},
            "job_ranks": self.ranks,
            "updated_timestamp_seconds": round(self.now, 3),
            "attempt_start_timestamp_seconds": round(self.started_at, 3),
            "rank_seconds": {("inference",): total.seconds.inference, ("total",): total.seconds.total},
            "rank_documents": {(name,): getattr(total.documents, name) for name in ("written", "dropped", "dead")},
            "rank_requests": total.documents.requests,
            "rank_tokens": _tokens(total.documents),
            "rank_chunks": total.chunks,
            "input_done_ratio": position.share,
            f"input_done_{position.unit}": position.done,
            f"input_size_{position.unit}": position.total,
            "documents_total": own.documents,
            "documents_in_progress": total.in_work,
            "requests_total": {("answered",): own.requests - own.failed, ("failed",): own.failed},
            "requests_in_flight": total.in_flight,
            "requests_waiting": total.waiting,
            "request_attempts_total": own.sent,
            "request_retries_total": {("error",): own.retries, ("server_lost",): own.resent},
            "request_errors_total": {(kind,): count for kind, count in own.errors.items()},
            "cache_hits_total": own.cached,
            "tokens_total": _tokens(own),
            "server_restarts_total": own.restarts,
            "request_duration_seconds": _histogram(self.spread.milliseconds, 22, 1000.0),  # 1 ms to 35 min
            "request_prompt_tokens": _histogram(self.spread.prompt_tokens, 18),
            "request_completion_tokens": _histogram(self.spread.completion_tokens, 18),
        }
        return {PREFIX + name: values for name, values in found.items()}


def _tokens(counts: DocumentCounts | WorkCounts) -> dict[tuple[str, ...], float]:
    return {("prompt",): counts.prompt_tokens, ("completion",): counts.completion_tokens}


def _histogram(buckets: Buckets, ends: int, divisor: float = 1.0) -> Histogram:
    """``ends``: upper ends of the buckets, as powers of two from 1 on. The sum is of their middles, at most 9 % off."""
    found: list[tuple[str, int]] = []
    for power in range(ends):
        upto = sum(count for bucket, count in buckets.items() if bucket <= 4 * power)  # the last one below 2 ** power
        found.append((repr(2.0**power / divisor), upto))
    found.append(("+Inf", sum(buckets.values())))
    middles = (count * (buckets.lower(bucket) + buckets.lower(bucket + 1)) / 2 for bucket, count in buckets.items())
    return Histogram(found, sum(middles) / divisor)
