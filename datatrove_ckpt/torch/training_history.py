"""Writes a training's files for people: its settings, the heartbeats of its ranks, its history.

    config.json      the training's settings, in each step
    .rank-RANK       the heartbeat of a rank: its last step, time, host and variables of NCCL
    history.jsonl    events: saved, failed, restored, rolled back, not copied; metrics of steps
    metrics.csv      the loss curve

A stop loses the steps after the last save, and the training makes them again. So the metrics of a
step replace earlier lines of ``history.jsonl`` with metrics of this step and of all later steps.
"""

import csv
import io
import json
import math
import os
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lock import this_process
from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.errors import ConfigError


def config_file(config: object) -> bytes:
    """Returns the content of ``config.json`` for a dict, dataclass or Namespace, without secrets.

    Returns no bytes for None.

    Raises:
        ConfigError: JSON cannot hold a value.
    """
    if config is None:
        return b""
    plain = _plain(config, "config")
    if not isinstance(plain, dict):
        raise ConfigError(f"config is {plain!r:.60}. Give a dict, a dataclass or a Namespace.")
    return json.dumps(plain, indent=2, ensure_ascii=False).encode() + b"\n"


def _plain(value: object, path: str) -> object:
    if isinstance(value, Namespace):
        value = vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{number}") for number, item in enumerate(value)]
    if redaction.is_surely_secret(path, value):
        return redaction.HIDDEN
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if is_number or isinstance(value, str | None):
        return value
    text = " ".join(repr(value).split())
    raise ConfigError(f"{path} is {text:.60}, which JSON cannot hold. Give plain values.")


def write_heartbeat(folder: Path, rank: int, ranks: int, step: int) -> None:
    """Writes the heartbeat of a rank that takes steps. A full disk does not stop the training."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    sign = {
        **this_process(),
        "rank": rank,
        "ranks": ranks,
        "step": step,
        "at": time.time(),
        "variables": _plain(variables, "nccl"),
    }
    with suppress(OSError):
        (folder / f".rank-{rank:05}").write_bytes(orjson.dumps(sign))


def read_heartbeats(folder: Path) -> list[JsonObject]:
    """Returns the last heartbeat of each rank. A heartbeat that is being written may be missing."""
    signs: list[JsonObject] = []
    for path in sorted(folder.glob(".rank-*")):
        with suppress(ValueError, OSError):
            signs.append(orjson.loads(path.read_bytes()))
    newest = max((sign["at"], sign["ranks"]) for sign in signs) if signs else (0.0, 0)
    # Earlier attempts may have had more ranks.
    return [sign for sign in signs if sign["rank"] < newest[1]]


HISTORY = "history.jsonl"

MetricsRow = tuple[int, dict[str, float]]
"""A step and its metrics."""


def read_events(folder: Path) -> Iterator[JsonObject]:
    """Yields the events, without a line that a kill has torn."""
    path = folder / HISTORY
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                event = orjson.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def curve(events: Iterable[JsonObject]) -> list[MetricsRow]:
    """Returns the metrics of the steps that the training has kept, in their order."""
    rows: list[MetricsRow] = []
    for event in events:
        if event["event"] != "metrics":
            continue
        step = int(event["step"])
        while rows and rows[-1][0] > step:
            rows.pop()
        if rows and rows[-1][0] == step:
            rows[-1][1].update(event["metrics"])
        else:
            rows.append((step, dict(event["metrics"])))
    return rows


class TrainingHistory:
    """Appends events to ``history.jsonl``. They wait in memory while another process may own it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # the training and its writing thread record events
        self._waiting: list[JsonObject] = []

    def note(self, is_owner: bool, event: str, step: int, **values: object) -> None:
        """Records an event, and writes all waiting events if this process owns the folder.

        Raises:
            StorageFailed: the events cannot be written; they wait for the next event.
        """
        with self._lock:
            self._waiting.append({"event": event, "step": step, "at": time.time(), **values})
            if is_owner:
                lines = b"".join(orjson.dumps(waiting) + b"\n" for waiting in self._waiting)
                files.disk.append(self._folder / HISTORY, lines)
                self._waiting = []

    def write_curve(self) -> None:
        """Replaces ``metrics.csv``, which takes seconds after many steps. Raises StorageFailed."""
        rows = curve(read_events(self._folder))
        if not rows:
            return
        columns = [*dict.fromkeys(name for _, row in rows for name in row)]
        text = io.StringIO()
        table = csv.DictWriter(text, ["step", *columns], lineterminator="\n")
        table.writeheader()
        for step, metrics in rows:
            metrics |= {name: math.nan for name, value in metrics.items() if value is None}
            table.writerow({"step": step, **metrics})
        files.disk.replace(
            self._folder / "metrics.csv", text.getvalue().encode(), files.PUBLIC_FILE
        )
