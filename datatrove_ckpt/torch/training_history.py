"""Writes a training's files for people: its settings, the heartbeats of its ranks, its history; and
reads its folder, also during the training (``read_training``).

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
import shutil
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path, PurePath

import orjson

import datatrove_ckpt.torch.step_folder as step_folder
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lock import lock_holder, name_holder, this_process
from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError, StorageFailed, VersionMismatch


def config_file(config: object) -> bytes:
    """Returns the content of ``config.json``, without secrets.

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
    if isinstance(value, PurePath):
        value = str(value)
    is_token = isinstance(value, str) and path.endswith(".token")
    if is_token or redaction.is_surely_secret(path, value):
        return redaction.HIDDEN
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if is_number or isinstance(value, str | None):
        return value
    text = " ".join(repr(value).split())
    raise ConfigError(f"{path} is {text:.60}, which JSON cannot hold. Give plain values.")


def write_heartbeat(folder: Path, rank: int, ranks: int, step: int) -> None:
    """A full disk does not stop the training."""
    prefixes = ("NCCL_", "TORCH_NCCL_")
    variables = {name: os.environ[name] for name in os.environ if name.startswith(prefixes)}
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
    signs: list[JsonObject] = []
    for path in sorted(folder.glob(".rank-*")):
        with suppress(ValueError, OSError):
            signs.append(orjson.loads(path.read_bytes()))
    # Earlier attempts may have had more ranks.
    _, ranks = max(((sign["at"], sign["ranks"]) for sign in signs), default=(0.0, 0))
    return [sign for sign in signs if sign["rank"] < ranks]


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
        self.curve_at = time.monotonic()

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
        """Replaces ``metrics.csv`` if the disk allows it. Takes seconds after many steps."""
        self.curve_at = time.monotonic()
        with suppress(Exception):
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
            path = self._folder / "metrics.csv"
            files.disk.replace(path, text.getvalue().encode(), files.PUBLIC_FILE)


# the folder, also during the training -------------------------------------------------------------


@dataclass(frozen=True)
class SavedStep:
    """A saved step.

    Attributes:
        at: when it was saved, in Unix seconds.
    """

    step: int
    folder: str
    bytes: int = 0
    at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    damage: str = ""


@dataclass(frozen=True)
class TrainingState:
    """The folder of a training.

    Attributes:
        saved: the newest save in the history: what it cost.
        writer: the process that saves there now; "": there is none.
        ranks: the last heartbeat of each rank that writes to the folder.
    """

    folder: str
    steps: list[SavedStep]
    curve: list[MetricsRow]
    saved: JsonObject
    writer: str
    free_bytes: int
    ranks: list[JsonObject]

    @property
    def restored(self) -> SavedStep | None:
        return next((step for step in reversed(self.steps) if not step.damage), None)

    @property
    def damaged(self) -> list[SavedStep]:
        return [step for step in self.steps if step.damage]

    def to_json(self) -> JsonObject:
        restored = self.restored
        return asdict(self) | {"restored": restored.step if restored else None}


def read_training(folder: Path, full: bool) -> TrainingState:
    """Reads a training's folder; with ``full`` each file of each step, else only file sizes."""
    training = ""
    steps = []
    for name in reversed(step_folder.steps_in(folder)):
        step = SavedStep(name.step, str(name))
        try:
            manifest = step_folder.read_manifest(folder, name)
            size = step_folder.size_of(manifest)
            step = replace(step, bytes=size, at=manifest["at"], metrics=manifest["metrics"])
            training = training or manifest["training"]
            step_folder.check_files(folder, name, full)
            if manifest["training"] != training:
                raise CheckpointCorrupt(f"{folder / str(name)} is of another training.")
        except (CheckpointCorrupt, VersionMismatch, StorageFailed, OSError) as error:
            step = replace(step, damage=str(error))
        if (folder / str(name)).exists():  # a training removes steps
            steps.append(step)
    steps.reverse()
    events = list(read_events(folder))
    saved = next((event for event in reversed(events) if event["event"] == "saved"), {})
    holder = lock_holder(folder / ".lock")
    writer = "" if holder is None else name_holder(holder)
    return TrainingState(
        str(folder),
        steps,
        curve(events),
        saved,
        writer,
        shutil.disk_usage(folder).free,
        read_heartbeats(folder),
    )
