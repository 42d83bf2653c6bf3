"""An ``InferenceRunner``, as the rooms below it see it: its settings, which its own docstring explains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.config.paths import expand_path

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


class Step(PipelineStep):
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
    keep_answers: bool = False  # of steps that an earlier version has pickled
    seek: bool | None
    sync_seconds: Seconds
    mirror_seconds: Seconds
    drain_seconds: float
    drain_signals: Sequence[str]
    hub_pace: CommitPace
    monitoring: MonitoringConfig
    steps_before: list[StepRecord] | None = None  # who starts an executor tells it, see preflight
    how_to_accept: str = "pass accept_changes=True to InferenceRunner"  # the command line has other words

    @property
    def checkpoints_root(self) -> Path:
        """``checkpoints_local_dir`` on this node. Raises ConfigError if a variable in it is not set here."""
        return expand_path("checkpoints_local_dir", self.checkpoints_local_dir or "")

    @abstractmethod
    def identity(self, world_size: int) -> RunIdentity: ...
