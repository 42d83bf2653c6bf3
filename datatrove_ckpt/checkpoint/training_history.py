"""The history of a training: history.jsonl has a line for each event, metrics.csv the loss curve.

A stop loses the steps after the last save, and the training makes them again. So the metrics of a
step take the place of those of all later steps before it in the file. Events: saved, failed,
restored, rolled back, checked, damaged, not copied, and metrics, which may be of each step.
"""

from __future__ import annotations

import csv
import io
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    """Appends events. While ``is_owner()`` is false they wait in memory: another process may own
    the folder.
    """

    def __init__(self, folder: Path, is_owner: Callable[[], bool]) -> None:
        self._folder = folder
        self._is_owner = is_owner
        self._lock = threading.Lock()  # the training logs, and its writing thread notes
        self._waiting: list[JsonObject] = []

    def note(self, event: str, step: int, **others: object) -> None:
        """Raises StorageFailed."""
        with self._lock:
            self._waiting.append({"event": event, "step": step, "at": time.time(), **others})
            if not self._is_owner():
                return
            lines = b"".join(orjson.dumps(each) + b"\n" for each in self._waiting)
            files.disk.append(self._folder / HISTORY, lines)
            self._waiting = []  # of a full disk, they come with the next event

    def write_curve(self) -> None:
        """Writes the CSV file anew, which takes seconds after many steps. Raises StorageFailed."""
        rows = curve(read_events(self._folder))
        if not rows:
            return
        columns = [*dict.fromkeys(name for _, row in rows for name in row)]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["step", *columns])
        for step, metrics in rows:
            metrics |= {name: math.nan for name, value in metrics.items() if value is None}
            table.writerow([step, *(metrics.get(name, "") for name in columns)])
        files.disk.replace(self._folder / CURVE, text.getvalue().encode(), files.PUBLIC_FILE)

    def last(self, event: str) -> float:
        """Returns when the last such event was; 0: never."""
        return max(
            (one["at"] for one in read_events(self._folder) if one["event"] == event), default=0.0
        )
