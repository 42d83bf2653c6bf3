"""An ``InferenceRunner``, as the rooms below it see it: its settings, which its own docstring explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from datatrove.pipeline.writers.disk_base import DiskWriter

    from datatrove_ckpt.checkpoint.fields import RunIdentity
    from datatrove_ckpt.checkpoint.interval import Seconds
    from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
    from datatrove_ckpt.generation.shared_context import SharedContext
    from datatrove_ckpt.output.hub_pace import CommitPace
    from datatrove_ckpt.readers.steps import StepRecord
    from datatrove_ckpt.rollouts import Rollout

OnDocumentError = Literal["stop", "dead_letter"]


class Step(Protocol):
    rollout_fn: Rollout
    config: InferenceConfig
    output_writer: DiskWriter
    shared_context: SharedContext
    checkpoints_local_dir: str | None
    checkpoints_remote_dir: str | None
    records_per_chunk: int
    metadata_key: str
    skip_bad_requests: bool
    on_document_error: OnDocumentError
    max_dead_letters: int | None
    retry_dead_letters: bool
    retry_errors: bool
    accept_changes: bool
    keep_answers: bool
    seek: bool | None
    sync_seconds: Seconds
    mirror_seconds: Seconds
    drain_seconds: float
    drain_signals: Sequence[str]
    hub_pace: CommitPace
    monitoring: MonitoringConfig
    steps_before: list[StepRecord] | None
    how_to_accept: str
    stats: Any

    @property
    def checkpoints_root(self) -> Path: ...
    def identity(self, world_size: int) -> RunIdentity: ...
    def track_time(self, unit: str | None = None) -> Any: ...
