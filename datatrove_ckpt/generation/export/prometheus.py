"""Snapshots of ranks as text for Prometheus, with prometheus-client, which is only imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from loguru import logger

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import missing_package
from datatrove_ckpt.generation.export.metrics import METRICS, PREFIX, RANK_LABELS, Metric, Snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric as Family


def check_installed() -> None:
    """Raises ConfigError if prometheus-client is missing."""
    if (missing := missing_package("prometheus_client")) is not None:
        raise ConfigError(f"monitoring: metrics_port and metrics_file: {missing}")


def load() -> None:
    """Imports the library in the calling thread.

    Threads that import a package and a module of it at the same moment may each see the other's half.
    """
    import prometheus_client.exposition  # noqa: F401


def exposition(snapshots: Iterable[Snapshot]) -> bytes:
    """The text of all ranks' metrics, in Prometheus' classic format."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_Collector(lambda: list(snapshots))))


def encoded(snapshots: Iterable[Snapshot], accept: str) -> tuple[bytes, str]:
    """The text in the best format that the scraper takes, and its content type.

    Args:
        accept: the header of this name.
    """
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return bytes(encode(_Collector(lambda: list(snapshots)))), content_type


class _Collector:
    """All that the encoders want of a registry. One of prometheus-client's own would hold on to its collectors."""

    def __init__(self, snapshots: Callable[[], list[Snapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        snapshots = _one_of_each(self._snapshots())
        for name, metric in METRICS.items():
            family = _family(name, metric)
            for snapshot in snapshots:
                rank = [str(snapshot["labels"][label]) for label in RANK_LABELS]
                for labels, value in snapshot["values"].get(name, ()):
                    _add(family, [*rank, *labels], value)
            if family.samples:
                yield family


def _one_of_each(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """The newest attempt of each rank: with two of the same labels, Prometheus refuses all."""
    newest: dict[tuple[str, ...], Snapshot] = {}
    for snapshot in snapshots:
        labels = tuple(str(snapshot["labels"][label]) for label in RANK_LABELS)
        other = newest.setdefault(labels, snapshot)
        if other is not snapshot:
            if _is_running(other) and _is_running(snapshot):
                _warn_of_two(labels)
            newest[labels] = max(other, snapshot, key=_started)
    return list(newest.values())


def _started(snapshot: Snapshot) -> float:
    return float(snapshot["values"][f"{PREFIX}attempt_start_timestamp_seconds"][0][1])


def _is_running(snapshot: Snapshot) -> bool:
    return any(list(labels) == ["running"] and value for labels, value in snapshot["values"][f"{PREFIX}rank_state"])


@cache
def _warn_of_two(labels: tuple[str, ...]) -> None:
    """Once for each rank."""
    logger.warning(
        f"metrics_port: two jobs on this node show a rank {labels[1]} of a run {labels[0]!r}, and only the newer one "
        "is shown. Give each job a run_name of its own."
    )


def _family(name: str, metric: Metric) -> Any:
    from prometheus_client import core

    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[metric.kind](name, metric.help, labels=[*RANK_LABELS, *metric.labels])


def _add(family: Any, labels: list[str], value: Any) -> None:
    if isinstance(value, dict):
        family.add_metric(labels, [tuple(bucket) for bucket in value["buckets"]], value["sum"])
    else:
        family.add_metric(labels, value)
