"""The history of a training: history.jsonl has a line for each event, metrics.csv the loss curve.

A stop loses the steps after the last save, and the training makes them again. So the metrics of a
step take the place of those of all later steps before it in the file. Events: saved, failed,
restored, rolled back, damaged, not copied, and metrics, which may be of each step.
"""

from __future__ import annotations

import csv
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common import JsonObject

HISTORY = "history.jsonl"
CURVE = "metrics.csv"

Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


def read_events(folder: Path) -> Iterator[JsonObject]:
    """Yields the events; skips a line that a kill has torn."""
    path = folder / HISTORY
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                event = orjson.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def curve(events: Iterable[JsonObject]) -> list[Row]:
    """Returns the metrics of the steps that the training has made, in their order."""
    rows: list[Row] = []
    for event in events:
        if event["event"] == "metrics":
            add_row(rows, int(event["step"]), event["metrics"])
    return rows


def add_row(rows: list[Row], step: int, metrics: Mapping[str, float]) -> None:
    while rows and rows[-1][0] > step:
        rows.pop()
    if rows and rows[-1][0] == step:
        rows[-1][1].update(metrics)
    else:
        rows.append((step, dict(metrics)))


class TrainingHistory:
    """Appends events. While ``is_owner()`` is false they wait in memory: another process may own
    the folder.
    """

    def __init__(self, folder: Path, is_owner: Callable[[], bool]) -> None:
        self._folder = folder
        self._is_owner = is_owner
        self._lock = threading.Lock()  # the training logs, and its writing thread notes
        self._waiting: list[JsonObject] = []
        self._rows: list[Row] = []
        self._columns: list[str] = []
        self._written = -1
        """The last step in the CSV file; -1: it is written anew."""

    def note(self, event: str, step: int, **others: object) -> None:
        """Raises StorageFailed. The CSV file follows with the next event that is not a metric."""
        with self._lock:
            self._waiting.append({"event": event, "step": step, "at": time.time(), **others})
            if not self._is_owner():
                return
            lines = b"".join(orjson.dumps(each) + b"\n" for each in self._waiting)
            files.disk.append(self._folder / HISTORY, lines)
            for row in curve(self._waiting):
                self._log(*row)
            self._waiting = []  # of a full disk, they come with the next event
            if event != "metrics" and self._rows:
                self._write_curve()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._written or not metrics.keys() <= {*self._columns}:
            self._written = -1
        add_row(self._rows, step, metrics)

    def _write_curve(self) -> None:
        """Appends the new steps to the CSV file, or writes it anew."""
        path = self._folder / CURVE
        if self._written >= 0:
            files.disk.append(path, self._lines())
        else:
            self._rows = curve(read_events(self._folder)) or self._rows
            self._columns = [*dict.fromkeys(name for _, row in self._rows for name in row)]
            files.disk.forget(path)
            files.disk.replace(path, self._lines(["step", *self._columns]), files.PUBLIC_FILE)
        self._written = self._rows[-1][0]
        self._rows = []

    def _lines(self, head: list[str] | None = None) -> bytes:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if head is not None:
            rows.writerow(head)
        for step, metrics in self._rows:
            rows.writerow([step, *(metrics.get(name) for name in self._columns)])
        return text.getvalue().encode()
