"""InferenceRunner, the datatrove step: checks its arguments. ``generation/rank.py`` runs its ranks.

datatrove deep-copies and pickles a step, and may run one step object for several ranks in turn. So the step holds only
the user's settings; everything that a rank needs is made in ``run`` and closed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, get_args

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.utils.stats import Stats

from datatrove_ckpt.checkpoint.interval import Seconds, check_seconds
from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.checkpoint_folders import check_checkpoint_folders
from datatrove_ckpt.generation.run_identity import run_identity
from datatrove_ckpt.generation.script_names import CarriesCode
from datatrove_ckpt.generation.shared_context import SharedContext
from datatrove_ckpt.generation.step import OnDocumentError
from datatrove_ckpt.generation.user_code import check_rollout
from datatrove_ckpt.generation.user_frames import called_at
from datatrove_ckpt.output.hub_pace import CommitPace
from datatrove_ckpt.output.hub_writers import with_our_uploads
from datatrove_ckpt.output.writers import check_writer
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.drain_settings import DRAIN_SECONDS, SIGNALS, check_signals
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.process.host_loop import run_hosted
from datatrove_ckpt.process.task_errors import safe_log
from datatrove_ckpt.redaction import Veiled
from datatrove_ckpt.rollouts import Rollout, for_config

if TYPE_CHECKING:
    from datatrove_ckpt.checkpoint.fields import RunIdentity


class InferenceRunner(CarriesCode):
    """Sends each document through a rollout function, and writes the results, one file per chunk of documents.

    The first eight arguments are those of datatrove's ``InferenceRunner``.

    Args:
        rollout_fn: ``async def rollout(document, generate, **shared)``. ``await generate(payload)`` returns an
            ``InferenceResult`` or raises ``InferenceError``. What the rollout returns (an InferenceResult or JSON
            values) is put into ``document.metadata[metadata_key]``, a list with one entry per rollout. None is left
            out; a document whose rollouts all return None is dropped from the output, and counted as done.
        config: the server and how to ask it.
        output_writer: any DiskWriter. With checkpoints its ``output_filename`` needs ``${chunk_index}``. With several
            tasks it needs ``${rank}``: a YAML file is checked for that before anything runs, else the task is when it
            starts.
        shared_context: keyword arguments for the rollout: a dict, a callable that returns one, a context manager
            that gives one, or a callable that returns such a context manager.
        checkpoints_local_dir: local folder for checkpoints; ``~`` and ``$NAME`` are expanded where the task runs. None:
            no checkpoints, and a run that dies starts over.
        records_per_chunk: documents per output file, with checkpoints.
        metadata_key: where the results go in the document's metadata.
        skip_bad_requests: a document whose request the server rejects (HTTP 400, 413, 414, 422, 431) becomes a dead
            letter, instead of stopping the rank.
        on_document_error: "stop" the rank when a rollout raises or its request is rejected, or make the document a
            "dead_letter" and continue. A request that kills servers becomes a dead letter either way. A server that is
            away or fails stops the rank either way.
        max_dead_letters: documents that may become dead letters; one more stops the rank. None: no limit.
        retry_dead_letters: process the dead letters of earlier runs instead of the input, into output files of their
            own. The rank must be finished. datatrove's executors need ``skip_completed=False`` for it.
        seek: whether a resume may seek in the input. None: only if the reader can, and it and the steps after it are
            known to keep nothing from one document to the next; otherwise documents are counted. True declares that
            your steps and adapters keep nothing.
        sync_seconds: time between two syncs, and so what a power loss may cost; kill -9 costs none of it.
            "auto": as short as 2 % of the storage thread's time allows, between 0.1 and 30 seconds.
        drain_seconds: how long requests in flight may take once the rank is asked to stop, by a signal or because
            Slurm's time limit comes near. A second signal ends the wait.
        drain_signals: names of the signals that ask a rank to stop. Afterwards each is raised again for the handler
            that was there before.
        retry_errors: send requests again that an earlier run recorded as permanent errors.
        accept_changes: continue ranks that are not finished and were started with other settings, and record that.
        checkpoints_remote_dir: any fsspec URL (``s3://...``) or folder, to which the checkpoint is copied while the run
            is on. A node without the local folder resumes from there. Credentials come from the environment.
        mirror_seconds: shortest time between two uploads to ``checkpoints_remote_dir``, and so what a lost node may
            cost. "auto": as short as 5 % of the mirror thread's time allows, between 5 and 600 seconds.
        hub_commit_seconds: how long what is uploaded to the Hugging Face hub waits for more before its commit, at most.
        hub_commits_per_hour: commits to a repository in an hour beyond which ranks wait. A free account may make 128.
        monitoring: metrics for Prometheus, and runs of MLflow and Weights & Biases. None: nobody is told anything.
        keep_answers: keep answers of committed documents for a fork with another prompt. They need about as much room
            in the checkpoint as the output has, and no mirror holds them.

    Raises:
        ConfigError: an argument that cannot work.
    """

    name = "Inference 🔍"
    type = "Model call"
    # datatrove writes these attributes to executor.json, and they may hold the user's secrets
    rollout_fn = Veiled()
    config = Veiled()
    shared_context = Veiled()
    monitoring = MonitoringConfig()  # of steps that an earlier version has pickled

    def __init__(
        self,
        rollout_fn: Rollout,
        config: InferenceConfig,
        output_writer: DiskWriter,
        shared_context: SharedContext = None,
        checkpoints_local_dir: str | None = None,
        records_per_chunk: int = 6000,
        metadata_key: str = "rollout_results",
        skip_bad_requests: bool = False,
        on_document_error: OnDocumentError = "stop",
        max_dead_letters: int | None = None,
        retry_dead_letters: bool = False,
        seek: bool | None = None,
        sync_seconds: Seconds = 1.0,
        drain_seconds: float = DRAIN_SECONDS,
        drain_signals: Sequence[str] = SIGNALS,
        retry_errors: bool = False,
        accept_changes: bool = False,
        checkpoints_remote_dir: str | None = None,
        mirror_seconds: Seconds = 60.0,
        hub_commit_seconds: float = 300.0,
        hub_commits_per_hour: int = 112,
        monitoring: MonitoringConfig | None = None,
        keep_answers: bool = False,
    ) -> None:
        super().__init__()
        safe_log()
        self.rollout_fn = rollout_fn
        if not hasattr(config, "server_type"):
            kind = type(config).__name__
            raise ConfigError(f"config: takes an InferenceConfig(...), and not a {kind}{called_at()}.")
        self.config = config if isinstance(config, InferenceConfig) else InferenceConfig.from_datatrove(config)
        self.output_writer = with_our_uploads(output_writer)
        self.shared_context = shared_context
        self.checkpoints_local_dir = None if checkpoints_local_dir is None else str(checkpoints_local_dir)
        self.records_per_chunk = records_per_chunk
        self.metadata_key = metadata_key
        self.skip_bad_requests = skip_bad_requests
        self.on_document_error, self.max_dead_letters = on_document_error, max_dead_letters
        self.retry_dead_letters, self.retry_errors = retry_dead_letters, retry_errors
        self.seek, self.sync_seconds = seek, sync_seconds
        self.drain_seconds, self.drain_signals = drain_seconds, check_signals(drain_signals)
        self.accept_changes, self.keep_answers = accept_changes, keep_answers
        self.checkpoints_remote_dir = checkpoints_remote_dir.rstrip("/") if checkpoints_remote_dir else None
        self.mirror_seconds = mirror_seconds
        self.hub_pace = CommitPace(hub_commit_seconds, hub_commits_per_hour)
        self.monitoring = monitoring or MonitoringConfig()
        self._check_settings()
        self._note_code()

    def _check_settings(self) -> None:
        check_rollout(self.rollout_fn, self.shared_context)
        if self.records_per_chunk < 1:
            raise ConfigError(f"records_per_chunk: must be positive; it is {self.records_per_chunk}.")
        check_seconds("sync_seconds", self.sync_seconds)
        check_seconds("mirror_seconds", self.mirror_seconds)
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds: must be >= 0; it is {self.drain_seconds}.")
        if self.on_document_error not in get_args(OnDocumentError):
            raise ConfigError(f"on_document_error: {self.on_document_error!r} is not one of stop, dead_letter.")
        self.rollout_fn = for_config(self.rollout_fn, self.config)
        check_writer(self.output_writer, checkpoints=self.checkpoints_local_dir is not None)
        needed_by = {
            "on_document_error: dead letters are": self.on_document_error != "stop" or self.retry_dead_letters,
            "monitoring: what MLflow and Weights & Biases get is": self.monitoring.wants_tracking,
        }
        local, remote = self.checkpoints_local_dir, self.checkpoints_remote_dir
        check_checkpoint_folders(local, remote, self.output_writer, needed_by)

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """Processes every document of ``data``. When it returns, all of them are in the output.

        Raises:
            CkptError: see ``errors.py``. Finished work is saved; the same call resumes. The failure of a document is
                also datatrove's InferenceError, that of a server also its ServerError.
            Preempted, or whatever the old signal handlers raise: a stop was requested, see ``process/preemption.py``.
        """
        event_loop.refuse_nested("InferenceRunner.run")
        with gc_paused():
            from datatrove_ckpt.generation.rank import run_rank  # half of the package

        self.stats = Stats(str(self))  # datatrove may have run another rank with this step
        run_rank(self, data, rank, world_size)

    async def run_async(self, data_gen: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """``run`` inside a running event loop, on which the rollouts then run, too. Other tasks go on meanwhile.

        Cancelled, as by ``asyncio.timeout``, this starts nothing new, gives the requests in flight ``drain_seconds``,
        saves everything, and then raises CancelledError; the same call resumes. Cancelled again, it ends that wait.
        ``asyncio.run`` makes Ctrl-C a cancellation. No other signal drains: SIGTERM kills unless you handle it.

        Raises:
            CkptError: see ``run``.
            asyncio.CancelledError: this call was cancelled.
        """
        await run_hosted(partial(self.run, data_gen, rank, world_size), f"rank {rank}")

    def identity(self, world_size: int) -> RunIdentity:
        """What makes two runs the same run, for ``check_job`` and the checkpoint."""
        chunk, key, accept = self.records_per_chunk, self.metadata_key, self.how_to_accept
        return run_identity(self.code(), self.config, self.output_writer, chunk, key, world_size, accept)
