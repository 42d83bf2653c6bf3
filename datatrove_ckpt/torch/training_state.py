"""Reads the folder of a training's checkpoints, also during the training."""

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datatrove_ckpt.torch.step_folder as step_folder
from datatrove_ckpt.checkpoint.lock import lock_holder, name_holder
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointCorrupt, StorageFailed, VersionMismatch
from datatrove_ckpt.torch.training_history import MetricsRow, curve, read_events, read_heartbeats


@dataclass(frozen=True)
class SavedStep:
    """A saved step.

    Attributes:
        at: when it was saved, in Unix seconds.
        damage: why no restore takes it; "": it is whole, as far as that was checked.
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
        steps: the saved steps, the oldest first.
        curve: the metrics of the steps.
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
        """Returns the step that a restore would take."""
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
        manifest = None
        damage = ""
        try:
            manifest = step_folder.read_manifest(folder, name)
            step_folder.check_files(folder, name, full)
        except (CheckpointCorrupt, VersionMismatch, StorageFailed, OSError) as error:
            damage = str(error)
        if not (folder / str(name)).exists():  # a training removes steps
            continue
        if manifest is None:
            steps.append(SavedStep(name.step, str(name), damage=damage))
            continue
        training = training or manifest["training"]
        if not damage and manifest["training"] != training:
            damage = f"{folder / str(name)} is of another training."
        size = step_folder.size_of(manifest)
        steps.append(
            SavedStep(name.step, str(name), size, manifest["at"], manifest["metrics"], damage)
        )
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
