"""Runs one rank: builds its checkpoint, output, source and scheduler, and closes them.

A program that only makes or inspects a step (``runner.py``) does not import this module.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.job_file import recorded_settings
from datatrove_ckpt.checkpoint.layout import BATCHES, SHARD, rank_folder
from datatrove_ckpt.checkpoint.old_answers import open_old_answers, with_samples
from datatrove_ckpt.checkpoint.open_checkpoint import CheckpointManager, OpenCheckpoint
from datatrove_ckpt.common import BATCH
from datatrove_ckpt.common.counts import CompletedWork
from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.config.inference_config import NodeGroup
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    CkptError,
    ConfigError,
    LimitReached,
    WaitsForBatches,
    use_form,
)
from datatrove_ckpt.generation.datatrove_errors import raised_for_scripts
from datatrove_ckpt.generation.document_limit import DocumentLimit
from datatrove_ckpt.generation.document_runs import DocumentRuns
from datatrove_ckpt.generation.failures import (
    FailurePolicy,
    next_retry,
    offer_skipping,
    retried_dead_letters,
)
from datatrove_ckpt.generation.final_stats import fill_stats, sum_rank
from datatrove_ckpt.generation.finished_from import FinishedDocuments, compare_earlier_runs
from datatrove_ckpt.generation.input_columns import input_types
from datatrove_ckpt.generation.limit_watch import LimitWatch, limit_reached
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.quality import AnswerQuality
from datatrove_ckpt.generation.replay import evidence, replays_of
from datatrove_ckpt.generation.requests import RankContext
from datatrove_ckpt.generation.results import ResultEncoder
from datatrove_ckpt.generation.run_identity import servers_digest
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.scheduler import Scheduler
from datatrove_ckpt.generation.side_effects import OURS, ROLLOUTS, watched
from datatrove_ckpt.generation.user_frames import first_failure, warn_when_blocked
from datatrove_ckpt.generation.user_rollout import name_of
from datatrove_ckpt.inference.servers.host import ServerHost, check_servers, one_rank
from datatrove_ckpt.mirror.mirror import RemoteMirror
from datatrove_ckpt.output.chunk_writing import ChunkOutput, WriterTrial, prepare_arrow
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.output.writer_checks import (
    check_rank_in_template,
    refuse_own_output,
    template_uses,
)
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.fork_boundaries import wait_to_fork
from datatrove_ckpt.process.gc_tuning import gc_tuned
from datatrove_ckpt.process.host_loop import host_loop, rank_of_many
from datatrove_ckpt.process.open_files import raise_limit
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.shutdown import end_tasks, no_exit
from datatrove_ckpt.readers.inputs import Revisions
from datatrove_ckpt.readers.pipeline import StepStats, steps_before
from datatrove_ckpt.rollouts import ReadyMade

_STARTS_OVER = "There is no checkpoint (checkpoints_local_dir): the same command starts over."


def run_rank(
    step: RunnerSettings, data: Iterable[Document] | None, rank: int, world_size: int
) -> None:
    use_form(step.form)
    requests, servers = step.requests_and_servers()
    # The servers and their connections are shared: the executor has counted them.
    if rank_of_many() is not None:
        requests = servers = 0
    preemption = step.preemption()
    with raised_for_scripts(), preemption, step.track_time(unit="total"):
        raise_limit(requests, servers)
        preemption.check_time_limit()
        check_rank_in_template(step.output_writer, world_size)
        documents = () if step.retry_dead_letters else data or ()
        for before, name, _ in steps_before(documents):
            refuse_own_output(name, before, "output_writer", step.output_writer)
        nodes = NodeGroup.from_environment()
        if nodes.count > 1 and len(step.models) > 1:
            names = ", ".join(step.models)
            raise ConfigError(
                f"config: {nodes.count} nodes per task serve one model, and this run has {names}."
            )
        # Before gc_tuned, which freezes the objects of imported modules.
        prepare_arrow(step.output_writer)
        with one_rank(preemption.shutdown), gc_tuned(), watched(OURS):
            if nodes.rank > 0:  # only the head node reads and writes
                from datatrove_ckpt.inference.servers.multi_node import follow_head

                asyncio.run(follow_head(step.model, rank, nodes, preemption.shutdown))
            else:
                with checkpoints_root(step) as root:
                    _Run(step, data or [], root, rank, world_size, preemption, []).lead()


@contextmanager
def checkpoints_root(step: RunnerSettings) -> Iterator[Path]:
    if step.checkpoints_local_dir is not None:
        yield step.checkpoints_root
        return
    # A stop does not wait for a blocked writer, which may still write there.
    with TemporaryDirectory(prefix="datatrove-ckpt-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        except CkptError as error:
            error.add_note(_STARTS_OVER)
            raise


@dataclass
class _Run:
    step: RunnerSettings
    data: Iterable[Document]
    root: Path
    rank: int
    world_size: int
    preemption: Preemption
    accepted: list[Json]
    has_batches: bool = False

    def lead(self) -> None:
        step = self.step
        rank = self.rank
        for config in step.models.values():
            check_servers(config)
        step.monitoring.check_packages()
        if step.finished_from:
            with self.preemption.interruptible():
                identity = step.identity(self.world_size)
                self.accepted, unchecked = compare_earlier_runs(step, identity)
            if unchecked:
                logger.warning(f"Task {rank}:{unchecked}")
        root = self.root
        if step.checkpoints_local_dir is not None:
            step.limits.note(root)
        with self.preemption.interruptible():
            reached = limit_reached([step])
        if reached is not None:
            raise reached
        if step.checkpoints_remote_dir is not None:
            from datatrove_ckpt.mirror.restore import restore_rank, restore_recorded

            with self.preemption.interruptible():
                restore_rank(
                    step.checkpoints_remote_dir, root, rank, retries=step.retry_dead_letters
                )
                restore_recorded(step.checkpoints_remote_dir, root)
            step.adopt_recorded_settings()
        if not step.retry_dead_letters:
            self._take_in_passes(self.data, root)
            return
        StepStats(self.data).restore(rank_folder(root, rank) / SHARD)
        retry = next_retry(root, rank)
        if retry is None:
            logger.info(f"Task {rank}: there are no dead letters to retry.")
            fill_stats(step.stats, sum_rank(rank, root), rank_folder(root, rank))
        else:
            self._take_in_passes(retry, retry.root, retry.prefix)

    def _take_in_passes(self, data: Iterable[Document], root: Path, prefix: str = "") -> None:
        self.has_batches = any(model.provider_batches for model in self.step.models.values())
        self.has_batches |= (rank_folder(root, self.rank) / BATCHES).exists()
        if not self.has_batches:
            self._take(data, root, prefix)
            return
        logger.info(
            "provider_batches: a rollout with k requests in a row takes k passes, and each waits "
            "for its batches, a day at most."
        )
        for number, documents in enumerate(input_passes(data)):
            if not self._take(documents, root, prefix, number == 0):
                return

    def _take(
        self, data: Iterable[Document], root: Path, prefix: str = "", is_first: bool = True
    ) -> bool:
        """Takes the rank's lease, and runs one pass. Returns whether another pass must follow."""
        step = self.step
        rank = self.rank
        preemption = self.preemption
        folder = rank_folder(root, rank)
        identity = replace(step.identity(self.world_size), accepted=self.accepted)
        is_kept = step.checkpoints_local_dir is not None
        output_folder = OutputFolder(
            step.output_writer,
            self.root,
            step.checkpoints_remote_dir,
            run=identity.digest if is_kept else None,
        )
        mirror = None
        if (remote := step.checkpoints_remote_dir) is not None:
            from datatrove_ckpt.mirror.restore import join_mirrored_job

            job = None
            # The ranks of other nodes are only on the mirror.
            if not step.retry_dead_letters:
                with preemption.interruptible(), self._explained(identity):
                    job = join_mirrored_job(remote, self.root, rank, identity, step.accept_changes)
            url = f"{remote}/{folder.relative_to(self.root)}"
            mirror = RemoteMirror(url, folder, step.mirror_seconds, preemption.shutdown, job)
        records_per_chunk = step.records_per_chunk
        if not template_uses(step.output_writer, "chunk_index"):
            records_per_chunk = sys.maxsize
        manager = CheckpointManager(
            root,
            rank,
            records_per_chunk,
            identity,
            placed_later=output_folder.hub is not None,
            sync_seconds=step.sync_seconds,
            retry_errors=step.retry_errors and is_first,
            keep_answers=step.keep_answers,
            accept_changes=step.accept_changes,
            mirror=mirror,
            keeps_paid=bool(step.limits),
            shutdown=preemption.shutdown,
        )
        with self._explained(identity), manager.lock() as locked, ExitStack() as undo:
            documents = self._open_source(data)
            undo.callback(documents.close)
            other_work = sum_rank(rank, self.root, folder)
            old = None
            with preemption.interruptible():
                is_new = locked.is_first and is_kept
                if is_new:
                    retry = root.name if prefix else ""
                    output_folder.refuse_existing(rank, retry)
                # Dead letters have other numbers.
                if not locked.is_finished and not step.retry_dead_letters:
                    if step.answers_from:
                        path = expand_path("answers_from", step.answers_from)
                        old = open_old_answers(path, rank, identity)
                    old = with_samples(root, rank, servers_digest(step.models), old)
            check_moved = preemption.interruptible()(output_folder.check_moved)
            lease = locked.take(check_moved, old)
            undo.pop_all()
        output = ChunkOutput(
            output_folder, rank, folder, prefix, is_new, lease, step.hub_pace, step.rows
        )
        checkpoint = OpenCheckpoint(manager, lease, output)
        return self._process(data, documents, checkpoint, other_work, output)

    @contextmanager
    def _explained(self, identity: RunIdentity) -> Iterator[None]:
        try:
            yield
        except CheckpointMismatch as error:
            changes = compare(recorded_settings(self.root), identity)
            if changes and (shown := evidence(self.step, self.root, changes)):
                error.add_note(shown)
            raise

    def _open_source(self, documents: Iterable[Document]) -> DocumentSource:
        step = self.step
        makes_dead_letters = step.on_document_error == "dead_letter" or bool(
            step.settings_for_letters
        )
        finished = None
        if step.finished_from:
            finished = FinishedDocuments(
                step.finished_from,
                self.rank,
                step,
                self.root,
                isinstance(step.rollout_fn, ReadyMade),
            )
        return DocumentSource(
            documents,
            makes_dead_letters or step.skip_bad_requests,
            step.seek,
            step.steps_before,
            Revisions(self.root),
            step.records_per_chunk,
            finished,
        )

    def _process(
        self,
        data: Iterable[Document],
        documents: DocumentSource,
        checkpoint: OpenCheckpoint,
        other_work: CompletedWork,
        output: ChunkOutput,
    ) -> bool:
        step = self.step
        rank = self.rank
        preemption = self.preemption
        shutdown = preemption.shutdown
        completed = False
        progress = RankReporter(rank, documents, checkpoint, shutdown, step.model.metric_interval)
        exports = ExitStack()
        if step.monitoring.metrics_port is not None:
            from datatrove_ckpt.generation.prometheus import shown_rank

            exports.enter_context(shown_rank(step, rank, checkpoint, progress, shutdown))
        try:
            self._log_start(checkpoint)
            with preemption.interruptible():
                types = input_types(data, rank_folder(self.root, rank), step.output_writer)
                output.prepare(types)
            shutdown.check()
            trial = None
            if step.checkpoints_local_dir is not None:
                trial = WriterTrial(step.output_writer, types, step.rows)
            results = ResultEncoder(step, output.names, trial)
            main = self._generate(documents, checkpoint, progress, results)
            subject = f"The rollout {name_of(step.rollout_fn)}, or a task that it started,"
            with preemption.watched(checkpoint.flush), no_exit(subject, shutdown):
                host = host_loop()
                again = (event_loop if host is None else host).run(main)
            if step.checkpoints_local_dir is not None and not again:
                with preemption.interruptible():
                    output.check_complete()
            completed = not again
        except BaseExceptionGroup as group:
            error = first_failure(group)
            # Also counts answers that came during the stop.
            if progress.has_answers() or step.retry_dead_letters:
                offer_skipping(error)
            raise error from error.__cause__
        finally:
            documents.close()
            try:
                checkpoint.close(completed, progress.last_records)
            finally:
                exports.close()
            done = checkpoint.done
            if step.retry_dead_letters:
                done = done.of_retry()
            fill_stats(step.stats, other_work + done, rank_folder(self.root, rank))
            is_early = shutdown.is_requested or isinstance(shutdown.failure, LimitReached)
            if is_early and not completed:
                self._log_stop(checkpoint, progress.own.documents)
        checkpoint.raise_failure()
        if again:
            shutdown.check()
            return True
        output.finish()
        self._log_end(checkpoint, progress)
        return False

    async def _generate(
        self,
        documents: DocumentSource,
        checkpoint: OpenCheckpoint,
        progress: RankReporter,
        results: ResultEncoder,
    ) -> bool:
        wait_to_fork()
        watchers = [
            asyncio.create_task(progress.report()),
            asyncio.create_task(self.preemption.watch_time_limit()),
            asyncio.create_task(warn_when_blocked()),
        ]
        limits = LimitWatch(self.step, checkpoint, self.preemption.shutdown)
        if limits.is_on:
            watchers.append(asyncio.create_task(limits.poll_until_reached()))
        try:
            passes = None
            if self.has_batches:
                from datatrove_ckpt.generation.provider_passes import ProviderPasses  # few need it

                with replays_of(self.step, self.preemption, self.root) as replays:
                    await replays.refuse_changes(checkpoint)
                passes = ProviderPasses(self.step.models, checkpoint, self.preemption.shutdown)
                await passes.settle(self.step.no_wait)
            parked = await self._run_rollouts(documents, checkpoint, progress, results, limits)
            if parked and passes is not None:
                await passes.settle(self.step.no_wait)
            return parked
        finally:
            await end_tasks(*watchers)
            limits.close()

    async def _run_rollouts(
        self,
        documents: DocumentSource,
        checkpoint: OpenCheckpoint,
        progress: RankReporter,
        results: ResultEncoder,
        limits: LimitWatch,
    ) -> bool:
        step = self.step
        preemption = self.preemption
        failures = FailurePolicy(
            step, checkpoint.resumed.finished.dead, retried_dead_letters(self.root, self.rank)
        )
        host = host_loop()
        shared_host = None
        if host is not None and isinstance(host.servers, ServerHost):
            shared_host = host.servers
        servers = shared_host or ServerHost(preemption.shutdown, step.models.values(), keeps=True)
        ends_well = False
        try:
            with replays_of(step, preemption, self.root, self.rank, 1 / self.world_size) as replays:
                requests = RankContext(
                    step.models,
                    checkpoint,
                    progress,
                    preemption.shutdown,
                    AnswerQuality(step.refusals),
                    limits,
                    step.code().digest,
                )
                limit = DocumentLimit([*step.models.values()], servers.media)
                rollout_fn = replays.rollout_fn
                runs = DocumentRuns(
                    requests, rollout_fn, results, ROLLOUTS, failures, limit, replays.recorded
                )
                await Scheduler(requests, self.rank, servers, runs, replays).run(documents)
                ends_well = True
                if not runs.parked:
                    documents.add_earlier_stats()
        finally:
            if shared_host is None:
                await servers.close(ends_well)
        return runs.parked > 0

    # log lines of a rank's start and end ---------------------------------------------------------

    def _log_start(self, checkpoint: OpenCheckpoint) -> None:
        if not checkpoint.lease.lock.works:
            logger.warning(
                f"{self.step.checkpoints_local_dir} has no file locks: do not start a second "
                f"process for task {self.rank}."
            )
        point = checkpoint.resumed
        if not point.is_fresh:
            done = plural_is(point.finished.read, "document")
            written = point.committed.counts.written
            answers = plural_is(point.answers, "answer")
            logger.info(f"Resuming: {done} done ({written} in output files), {answers} kept.")

    def _log_stop(self, checkpoint: OpenCheckpoint, documents: int) -> None:
        shutdown = self.preemption.shutdown
        level = "WARNING"
        ended = f"interrupted by {shutdown.cause}"
        again = "Run again to resume."
        if not shutdown.cause and isinstance(shutdown.failure, LimitReached):
            level = "INFO"
            ended = f"ended by {shutdown.failure.setting}"
            again = f"A higher {shutdown.failure.setting} resumes it."
        if checkpoint.error is not None:
            logger.error(
                f"Task {self.rank}: a part of its work could not be saved: {checkpoint.error}"
            )
        if self.step.checkpoints_local_dir is None:
            saved = f". {_STARTS_OVER}"
        elif checkpoint.error is not None:
            saved = ". Correct the cause, and run again."
        else:
            given_up = ""
            if shutdown.given_up:
                given_up = f"Given up in flight: {plural(shutdown.given_up, 'request')}. "
            saved = (
                f", saved: {plural(documents, 'document')} of this run and every "
                f"answer, {shutdown.seconds:.1f} s later. {given_up}{again}"
            )
        logger.log(level, f"Task {self.rank}: {ended}{saved}")

    def _log_end(self, checkpoint: OpenCheckpoint, progress: RankReporter) -> None:
        step = self.step
        counts = checkpoint.done.counts
        if not counts.read:
            logger.success(
                f"Task {self.rank}: there are no documents in its input.{progress.source.skipped}"
            )
            return
        again = "If you run again, it has nothing to do."
        if step.checkpoints_local_dir is None:
            again = _STARTS_OVER
        elif step.retry_dead_letters and counts.dead:
            again = f"If you run again, it tries {plural(counts.dead, 'dead letter')} once more."
        sent = f"{progress.last.own.sent} sent in this run"
        tiers = progress.last.total.tiers
        if BATCH in tiers:
            sent += f", {tiers[BATCH]} answered in batches"
        logger.success(
            f"Task {self.rank}: {counts.written} of {plural(counts.read, 'document')} written to "
            f"{step.output_writer.output_folder.resolve_paths('')} "
            f"({counts.dropped} dropped, {plural(counts.dead, 'dead letter')}); "
            f"{plural(counts.requests, 'request')}, "
            f"{sent}, {plural(counts.prompt_tokens, 'prompt token')}, "
            f"{plural(counts.completion_tokens, 'completion token')}."
            f"{counts.odd_answers}{progress.source.skipped} {again}"
        )


def input_passes(data: Iterable[Document]) -> Iterator[Iterable[Document]]:
    """Yields the input of each pass: an iterable that runs the steps before the runner.

    Raises:
        WaitsForBatches: another pass would find a function or an iterator empty.
    """
    steps = [(step, names) for step, _, names in steps_before(data)]
    first = data
    if steps:
        first = steps[-1][1].get("data") or ()
    is_step = [isinstance(step, PipelineStep) for step, _ in steps]
    if isinstance(first, Iterator) or not all(is_step):
        yield data
        raise WaitsForBatches(
            "The batches' answers are saved, but the input is a function or an iterator, read "
            "once: run again, or make it a PipelineStep or a list."
        )
    while True:
        made = map(deepcopy, first) if isinstance(first, list) else first
        for step, names in reversed(steps):
            made = step.run(made, names["rank"], names["world_size"])
        yield made
