"""Runs a pipeline's ranks on one machine, in worker processes (``process/workers.py``).

Unlike datatrove's executor:

    a worker is killed, or out of memory    its rank starts again; datatrove's run never ends
    SIGTERM or SIGHUP to the run            all ranks drain, all processes end; datatrove leaves
                                            processes behind
    settings or input have changed          refused before anything starts; datatrove skips
    since ranks finished                    finished ranks
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, closing, nullcontext
from copy import copy, deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import multiprocess
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import MetricStats, MetricStatsDict, PipelineStats
from loguru import logger
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.claims.claims import RUN, Claims, lock_run, new_owner, open_store
from datatrove_ckpt.common import JsonObject, object_store
from datatrove_ckpt.common.attempts import AttemptProgress
from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.common.setting_types import Count, CountOrAll, check, check_value, one_of
from datatrove_ckpt.errors import (
    CheckpointLocked,
    CkptError,
    ConfigError,
    DocumentError,
    GivenUp,
    GoalReached,
    LimitReached,
    Preempted,
    ServerError,
    UnexpectedExit,
    WorkerDied,
)
from datatrove_ckpt.generation.limit_watch import limit_reached
from datatrove_ckpt.process import signals
from datatrove_ckpt.process.gc_tuning import gc_tuned
from datatrove_ckpt.process.open_files import raise_limit
from datatrove_ckpt.process.preemption import Preemption, has_time_for
from datatrove_ckpt.process.rank_threads import RankThreads
from datatrove_ckpt.process.screen import RunProgress, Screen
from datatrove_ckpt.process.shutdown import exit_error, no_exit
from datatrove_ckpt.process.task_errors import failure_note, task_of_many
from datatrove_ckpt.process.task_log import log_of_many
from datatrove_ckpt.process.workers import TaskList, Tasks, Workers
from datatrove_ckpt.runner import InferenceRunner
from datatrove_ckpt.user_code.script_names import nothing_carried

_CLAIMS_POLL = 2.0  # seconds
_REMOTE_CLAIMS_POLL = 15.0
_TO_SAVE = 120.0  # seconds after the drain: disk, the last upload of a mirror, servers
# Seconds before each listing: a remote listing may lag.
_MARKER_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)
_RANK = "datatrove_ckpt.generation.rank"
_Done = Callable[[int, PipelineStats], None]
"""Takes each complete rank, with its statistics."""


class OwnExecutor(PipelineExecutor):  # type: ignore[misc]  # datatrove has no types
    pipeline: list[PipelineStep]
    skip_completed: bool

    def _prepare(self, kind: type) -> None:
        dependency = self.depends
        if dependency is not None and not isinstance(dependency, kind):
            raise ConfigError(
                f"depends: must be a {kind.__name__}; it is a {type(dependency).__name__}."
            )
        if any(runner.retry_dead_letters for runner in self._runners):
            self.skip_completed = False

    @property
    def _runners(self) -> list[InferenceRunner]:
        return [step for step in self.pipeline if isinstance(step, InferenceRunner)]

    @property
    def _drain_seconds(self) -> float:
        return max((runner.drain_seconds for runner in self._runners), default=0.0)

    @property
    def _folder(self) -> str:
        return str(self.logging_dir.resolve_paths("")).rstrip("/")

    def _run_dependency(self) -> None:
        first = self.depends
        if first is None:
            return
        if not first._launched:
            logger.info("The executor in depends runs first.")
            first.run()
        if isinstance(limit_reached(first.pipeline), GoalReached):
            return
        while incomplete := first.get_incomplete_ranks(skip_completed=True):
            if getattr(first, "local_tasks", first.world_size) == first.world_size:
                raise not_complete(first, incomplete)
            logger.info(
                f"Waiting for {plural(len(incomplete), 'task')} that this executor depends on."
            )
            time.sleep(120.0)

    def _worker(self, **options: Any) -> LocalPipelineExecutor:
        worker = LocalPipelineExecutor(self.pipeline, self.tasks, 1, self.logging_dir, **options)
        worker.skip_completed = True  # the markers of ranks that run again are gone
        worker.get_distributed_env = self.get_distributed_env  # steps see where they run
        return worker

    def _ends_by_limit(self) -> bool:
        reached = limit_reached(self.pipeline)
        if reached is not None and not isinstance(reached, GoalReached):
            raise reached
        return reached is not None

    def _stats_of_complete(self, ranks: Iterable[int]) -> PipelineStats:
        saved = PipelineStats()
        for rank in sorted(ranks):
            try:
                saved += _saved_stats(self.logging_dir, rank)
            except FileNotFoundError:
                logger.warning(f"stats.json lacks task {rank}: its file in stats/ is gone.")
        return saved

    def _write_stats(self, stats: PipelineStats, local: Iterable[int]) -> None:
        other_ranks = set(range(self.world_size)) - set(local)
        if other_ranks:
            if self.get_incomplete_ranks(other_ranks, skip_completed=True):
                return
            stats = stats + self._stats_of_complete(other_ranks)
        with self.logging_dir.open("stats.json", "wt") as file:
            stats.save_to_disk(file)

    def given_up_error(self, causes: dict[int, str], kind: type[CkptError] = GivenUp) -> CkptError:
        named = "".join(f"\n  task {rank}: {cause}" for rank, cause in sorted(causes.items()))
        return kind(
            f"{len(causes)} of {self.world_size} tasks were given up:{named}\nCorrect the cause, "
            "and run again, not as a worker."
        )


class LocalPipelineExecutor(OwnExecutor, DatatroveExecutor):  # type: ignore[misc]
    """Runs the ranks of a pipeline on this machine.

    All arguments but the last two are those of datatrove's ``LocalPipelineExecutor``. With
    ``workers=1`` the ranks run in this process.

    Args:
        max_rank_attempts: how many worker processes may die of the same rank (kill -9, out of
            memory) before it is given up. The other ranks continue. Several ranks of a process that
            dies are tried again one by one.
        ranks_at_once: how many ranks each worker may run at one time, over the same servers: while
            the last answers of a rank are waited for, the next rank starts. None: 32, or 1 if a
            shared_context is opened for each rank. Ranks run in turn if the pipeline has several
            InferenceRunners, or one with reuse_servers=False.
    """

    keeps_servers = False
    """Its servers stay for the next executor of this process, until ``close_servers``."""
    _is_worker = False  # ends when no rank is free
    # Claims of ranks that this process took; None: the ranks were given.
    _claims: Claims | None = None

    def __init__(
        self,
        pipeline: list[PipelineStep | Callable[..., object]],
        tasks: Count = 1,
        workers: CountOrAll = -1,
        *arguments: object,
        max_rank_attempts: Count = 2,
        ranks_at_once: Count | None = None,
        **options: object,
    ) -> None:
        check(LocalPipelineExecutor, {**locals(), **options})
        super().__init__(pipeline, tasks, workers, *arguments, **options)
        check_value("local_tasks", Count, self.local_tasks)
        methods = multiprocess.get_all_start_methods()
        check_value("start_method", one_of(methods), self.start_method)
        self.max_rank_attempts = max_rank_attempts
        self.ranks_at_once = ranks_at_once
        self._prepare(DatatroveExecutor)

    def run(self) -> PipelineStats | None:
        """Runs every rank that is not complete. When it returns, all are complete, and the output
        is what they wrote.

        With ``retry_dead_letters`` of a runner, complete ranks also run.

        Returns:
            The statistics of all ranks, or None if all were complete already.

        Raises:
            CkptError: see ``check_before_run``, and ``run_ranks``.
        """
        from datatrove_ckpt.run_folder.preflight import run_checked

        if not self._runners:  # datatrove's own behavior stays
            return self.run_ranks()
        return run_checked(self)

    def run_ranks(self) -> PipelineStats | None:
        """Runs the ranks without the checks of ``run``.

        Raises:
            WorkerDied: some ranks were given up.
            KeyboardInterrupt, SystemExit, Preempted: a signal came. All ranks have drained.
            Exception: the error of the first rank that failed. The other ranks have drained.
        """
        self._run_dependency()
        self._launched = True
        local = range(self.local_rank_offset, self.local_rank_offset + self.local_tasks)
        ranks = self.get_incomplete_ranks(local)
        if not ranks:
            logger.info(f"{plural_is(len(local), 'task')} complete already.")
            if not self.logging_dir.exists("stats.json"):  # a kill came before it was written
                self._write_stats(self._stats_of_complete(local), local)
            return None
        if self._ends_by_limit():
            return None
        self.save_executor_as_json()
        complete = len(local) - len(ranks)
        if complete:
            logger.info(f"{complete} of {plural_is(len(local), 'task')} complete already.")
        stats = self._stats_of_complete(set(local) - set(ranks))

        def done(rank: int, result: PipelineStats) -> None:
            nonlocal stats, complete
            stats += result
            complete += 1
            if screen is None:
                logger.info(f"{complete} of {plural(self.world_size, 'task')} completed.")
            else:
                screen.complete(rank)

        with self._screen(len(local), complete, stats) as screen:
            self._run_ranks(ranks, screen, done)
        for seconds in _MARKER_DELAYS:
            time.sleep(seconds)
            incomplete = self.get_incomplete_ranks(ranks, skip_completed=True)
            if not incomplete or self.logging_dir.is_local():
                break
        # Ranks that run again have their old markers.
        is_cut = bool(incomplete) or (not self.skip_completed and complete < len(local))
        if is_cut and self._ends_by_limit():
            return stats
        if complete < len(local):
            stats = self._stats_of_complete(local)
        if incomplete:
            raise not_complete(self, incomplete)
        self._write_stats(stats, local)
        if self.local_tasks > 1:  # a single task has logged its own
            logger.success(stats.get_repr(f"All {self.local_tasks} tasks"))
        return stats

    def run_worker(self) -> int:
        """Runs tasks that no other process runs, until there is none. Returns how many it has
        completed.

        Any number of processes may do that at one time, beside one that calls ``run``. Only ``run``
        makes the checks. A task whose documents, input or output are wrong is given up, with its
        cause; this process continues.

        Raises:
            ConfigError: ``logging_dir`` cannot hold claims.
            LimitReached: the run has reached a limit, ``until`` included.
            GivenUp: no task is free, and some were given up, by this or another process.
            CheckpointLocked: another process runs all tasks.
            CkptError: a task failed by something that may pass, or is wrong for all tasks.
            KeyboardInterrupt, SystemExit, Preempted: a signal came. All tasks of this process have
                drained.
        """
        from datatrove_ckpt.run_folder.preflight import check_before_worker
        from datatrove_ckpt.run_folder.run_plan import RunPlan

        check_before_worker(RunPlan(self))
        worker = copy(self)
        worker._is_worker = True
        local = range(self.world_size)
        ranks = self.get_incomplete_ranks(local)
        raise_limit_reached(self.pipeline, ranks)
        stats = self._stats_of_complete(set(local) - set(ranks))
        completed = []

        def done(rank: int, result: PipelineStats) -> None:
            completed.append(rank)
            if screen is not None:
                screen.complete(rank)

        with self._screen(len(local), len(local) - len(ranks), stats) as screen:
            worker._take_and_run(ranks, screen, done)
        raise_limit_reached(self.pipeline, self.get_incomplete_ranks(local))
        return len(completed)

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        # datatrove documents that ``run`` calls this for each task; it has no public name.
        try:
            with task_of_many(self.local_tasks > 1):
                return super()._run_for_rank(rank, local_rank, node_rank)
        except (DocumentError, ServerError, UnexpectedExit) as error:
            log = self.logging_dir.resolve_paths(f"logs/task_{rank:05d}.log")
            error.add_note(f"The traceback is in the log of task {rank}: {log}")
            raise

    def is_rank_completed(self, rank: int) -> bool:
        try:
            return bool(super().is_rank_completed(rank))
        except KeyError:
            # huggingface_hub raises it if a bucket's folder appears during the listing.
            return False  # a rank that was complete nevertheless finds that in its checkpoint

    def get_incomplete_ranks(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        if ranks is None:
            ranks = range(self.world_size)
        if skip_completed is None:
            skip_completed = self.skip_completed
        if not skip_completed:
            return list(ranks)
        markers = self._markers()
        return [rank for rank in ranks if f"{rank:05d}" not in markers]

    def _markers(self) -> set[str]:
        folder = self.logging_dir
        if folder.is_local():  # fsspec takes ten times as long
            return {path.name for path in Path(folder.resolve_paths("completions")).glob("*")}
        # fsspec caches listings, and other processes write there.
        for name in ("completions/00000", "stats/00000.json"):
            folder.invalidate_cache(name)
        try:
            return {Path(name).name for name in folder.list_files("completions")}
        except KeyError:  # see ``is_rank_completed``
            return set()

    def _screen(
        self, ranks: int, complete: int, stats: PipelineStats
    ) -> Screen | nullcontext[None]:
        if not self._runners:
            return nullcontext()
        from datatrove_ckpt.generation.final_stats import finished_documents

        interval = min(runner.config.metric_interval for runner in self._runners)
        return Screen(RunProgress(ranks, complete, finished_documents(stats.stats)), interval)

    def _open_claims(self, end: str, screen: Screen | None = None) -> closing[Claims]:
        """Makes this process known to others. ``end``: the end of its name: RUN, LOOKS or empty."""
        from datatrove_ckpt.generation.final_stats import finished_documents

        owner = new_owner(end)
        store = open_store(f"{self._folder}/claims", owner, self.logging_dir.fs.storage_options)
        apart = copy(self)
        apart.logging_dir = _own_listings(self.logging_dir)
        before = set(self.get_incomplete_ranks(range(self.world_size)))

        def incomplete() -> list[int]:
            ranks = apart.get_incomplete_ranks(range(self.world_size), True)
            if screen is not None:
                for rank in sorted(before.difference(ranks)):
                    before.remove(rank)
                    if not screen.progress.is_complete(rank):
                        stats = apart._stats_of_complete([rank])
                        screen.progress.complete(rank, finished_documents(stats.stats))
            return ranks

        return closing(
            Claims(
                store,
                owner,
                incomplete,
                self.reached,
                self.max_rank_attempts,
                self._most_at_once == 1,
                partial(has_time_for, self._drain_seconds),
                self._is_worker,
            )
        )

    def reached(self, rank: int) -> AttemptProgress:
        from datatrove_ckpt.run_folder.run_plan import rank_progress

        urls = [runner.checkpoints_remote_dir for runner in self._runners]
        # Read only without a mirror: a variable in it may not be set here.
        roots = (runner.checkpoints_root for runner in self._runners)
        return rank_progress(list(filter(None, urls)), roots, rank)

    def _run_ranks(self, ranks: Sequence[int], screen: Screen | None, done: _Done) -> None:
        """Runs the ranks that workers leave, and waits for the others. Without workers, no rank is
        claimed: a worker that would join, or a second process of all ranks, is refused.
        """
        folders = [runner.checkpoints_local_dir for runner in self._runners]
        may_have_workers = (
            folders
            and self.skip_completed
            and self.local_tasks == self.world_size > 1
            and not object_store.is_in_repository(self._folder)
            and None not in folders
        )
        if not may_have_workers:
            self._run_all(ranks, screen, done)
            return
        with ExitStack() as stack:
            workers = []
            try:
                claims = stack.enter_context(self._open_claims(RUN))
                claims.clear()
                workers = [
                    other.process for other in claims.other_claimants() if not other.runs_all
                ]
                if not workers and self.logging_dir.is_local():
                    lock = lock_run(Path(self._folder, "claims"))
                    stack.callback(lock.release, remove=True)
            except CheckpointLocked:
                raise
            except (OSError, CkptError) as error:
                logger.warning(
                    f"Workers of this run cannot be listed: {error}. Start none beside it."
                )
            if not workers:
                self._run_all(ranks, screen, done)
                return
        names = ", ".join(workers)
        logger.info(
            f"Workers have tasks of this run: {names}. This command joins them, in one process."
        )
        self._take_and_run(ranks, screen, done)

    def _take_and_run(self, ranks: Sequence[int], screen: Screen | None, done: _Done) -> None:
        with self._open_claims("", screen) as claims:
            worker = copy(self)
            worker.workers = 1
            worker._claims = claims
            line_at = 0.0
            while (
                incomplete := set(self.get_incomplete_ranks(ranks))
                - claims.done
                - claims.given_up().keys()
            ):
                free, are_orphaned = claims.free()
                if free and not claims.has_time:
                    logger.info("The job's time limit is too near to take another task.")
                    with Preemption([], 0.0) as preemption:  # requeues the job, and raises
                        preemption.stop_for_time_limit()
                if free:
                    if worker._run_all(free, screen, done, may_overlap=not are_orphaned):
                        return
                    line_at = 0.0
                    if not claims.failures:
                        continue
                    if claims.failures >= 5:
                        raise CkptError(
                            f"No task could be claimed, {claims.failures} times in a row. "
                            "Correct the cause above, and run again."
                        )
                elif self._is_worker and not self.keeps_servers:
                    break  # there is a next step
                elif time.monotonic() >= line_at:
                    workers = [
                        other.process
                        for other in claims.other_claimants()
                        if incomplete.intersection(other.ranks)
                    ]
                    logger.info(
                        f"Waiting for {plural(len(incomplete), 'task')} of other processes: "
                        f"{', '.join(workers) or 'without claims'}."
                    )
                    line_at = time.monotonic() + 300.0
                if screen is not None:
                    screen.tick()
                time.sleep(_CLAIMS_POLL if self.logging_dir.is_local() else _REMOTE_CLAIMS_POLL)
            runs = [other.process for other in claims.other_claimants() if other.runs_all]
            running = incomplete if runs else incomplete & claims.locked.keys()
            if running and self._is_worker:
                raise CheckpointLocked(
                    f"{plural_is(len(running), 'task')} run by {', '.join(runs) or 'processes'}. "
                    "Wait for their end (after a kill elsewhere, five minutes), or stop them and "
                    "start each machine with run --worker."
                )
            given_up = claims.given_up()
            if given_up:
                raise self.given_up_error(given_up)
            if not self._is_worker:
                claims.clear()

    def _run_all(
        self, ranks: Sequence[int], screen: Screen | None, done: _Done, may_overlap: bool = True
    ) -> bool:
        overlap = may_overlap and self._most_at_once > 1 and len(ranks) > self.workers
        if self.workers != 1:
            self._in_workers(ranks, screen, overlap, done)
            return False
        limit_met = threading.Event()
        remaining = iter(ranks)

        def take() -> int | None:
            if limit_met.is_set():
                return None
            if self._claims is not None:
                return self._claims.next()
            return next(remaining, None)

        def make_executor() -> LocalPipelineExecutor:
            copied = copy(self)
            copied.pipeline = deepcopy(self.pipeline)
            return copied

        tasks = TaskList(iter(take, None), done)
        self._work_through(tasks, make_executor, 0, overlap, limit_met)
        return limit_met.is_set()

    def _run_taken(self, rank: int, slot: int) -> PipelineStats | None:
        claims = self._claims
        if claims is None:
            return self._run_one(rank, slot)
        try:
            stats = self._run_one(rank, slot)
        except CheckpointLocked as error:
            claims.lost(rank)
            logger.warning(f"Task {rank} is left to another process. {error}")
            return None
        except Exception as error:
            code, cause = failure_note(error)
            if code in (1, 3):
                claims.failed(rank, cause, for_good=code == 3)
            else:
                claims.release(rank)
            if code != 3 or not self._is_worker:
                raise
            logger.error(f"Task {rank} is given up, and the other tasks continue. {cause}")
            return None
        except BaseException:
            claims.release(rank)
            raise
        claims.complete(rank)
        return stats

    def _run_one(self, rank: int, slot: int) -> PipelineStats:
        if self.is_rank_completed(rank):  # by a process that died just afterwards
            return _saved_stats(self.logging_dir, rank)
        try:
            return self._run_for_rank(rank, slot)
        except SystemExit as exit:
            if exit.code and signals.in_main_thread():  # of a signal it has a code
                raise
            raise exit_error(f"A step of task {rank}", exit) from exit

    @property
    def _most_at_once(self) -> int:
        runners = self._runners
        # Each of several runners needs the GPUs in its turn.
        if len(runners) != 1 or not runners[0].may_share_servers:
            return 1
        if self.ranks_at_once is not None:
            return self.ranks_at_once
        if isinstance(runners[0].shared_context, Mapping | None):
            # Short tasks with a long tail need as many for 64 requests
            # (docs/internals/benchmarks.md).
            return 32
        return 1

    def _work_through(
        self,
        ranks: Tasks,
        make_executor: Callable[[], LocalPipelineExecutor],
        slot: int,
        overlap: bool,
        limit_met: threading.Event,
    ) -> None:
        """Runs ranks in this process, each with an executor and steps of its own. Once
        ``limit_met`` is set, the other ranks end by themselves.
        """
        folder = Path.cwd()

        def run(rank: int) -> PipelineStats | None:
            if limit_met.is_set() and self._claims is None:  # thousands of ranks may be left
                return None
            os.chdir(folder)  # another rank's step may have left it
            executor = make_executor()
            executor.logging_dir = _own_listings(executor.logging_dir)
            try:
                return executor._run_taken(rank, slot)
            except LimitReached:
                limit_met.set()
                return None

        from datatrove_ckpt.inference.servers.host import ServerHost, close_warm_servers

        try:
            with gc_tuned(), chdir("."):
                if not overlap:
                    for rank in iter(ranks.next, None):
                        ranks.done(rank, run(rank))
                    return
                (runner,) = self._runners
                preemption = runner.preemption()
                shutdown = preemption.shutdown
                at_once = raise_limit(*runner.requests_and_servers(), self._most_at_once)
                make_servers = partial(
                    ServerHost, shutdown, runner.models.values(), self.keeps_servers
                )
                exits = no_exit("A rollout, or a task that it started,", shutdown)
                with task_of_many(True), log_of_many(slot), preemption, exits:
                    RankThreads(at_once, preemption, make_servers, run, ranks).work_through()
        finally:
            if not self.keeps_servers:
                close_warm_servers()

    def _in_workers(
        self, ranks: Sequence[int], screen: Screen | None, overlap: bool, done: _Done
    ) -> None:
        from datatrove_ckpt.run_folder.run_plan import RunPlan

        parent_identities = [identity.stored for identity in RunPlan(self).identities]
        context = multiprocess.get_context(self.start_method)
        context.set_forkserver_preload(["__main__", "datatrove_ckpt.executors.local", _RANK])
        if self.start_method == "fork":
            import_module(_RANK)  # once, and not in each worker
        drain_signals = (name for runner in self._runners for name in runner.drain_signals)
        numbers = {*signals.STOP_SIGNALS, *(signal.Signals[name] for name in drain_signals)}
        # Pickled for every start method, so that each rank gets its own copy.
        work = partial(_work, self._pickled(), parent_identities, overlap)
        with Workers(
            context,
            self.workers,
            work,
            numbers,
            self.max_rank_attempts,
            self._drain_seconds + _TO_SAVE,
            screen,
        ) as workers:
            for rank, stats in workers.run(ranks):
                if stats is not None:
                    done(rank, stats)
        if workers.signal:
            signals.raise_again([workers.signal])
            raise Preempted(
                f"Stopped by {signal.Signals(workers.signal).name}. Run again to resume."
            )
        if workers.lost:
            raise self.given_up_error(workers.lost, WorkerDied)

    def _pickled(self) -> bytes:
        try:
            with nothing_carried():
                return bytes(ForkingPickler.dumps(self))
        except Exception as error:  # of a step's __reduce__
            raise ConfigError(
                f"The pipeline cannot be sent to worker processes: {type(error).__name__}: "
                f"{error}. Give a function that makes what cannot be pickled, or set workers=1."
            ) from error


def _work(
    pickled: bytes, identities: Sequence[JsonObject], overlap: bool, slot: int, ranks: Tasks
) -> None:
    from datatrove_ckpt.run_folder.run_plan import RunPlan

    make_executor: Callable[[], LocalPipelineExecutor] = partial(ForkingPickler.loads, pickled)
    executor = make_executor()
    RunPlan(executor).check_code(identities)
    executor._work_through(ranks, make_executor, slot, overlap, threading.Event())


def close_servers() -> None:
    from datatrove_ckpt.inference.servers.host import close_warm_servers

    close_warm_servers()


def not_complete(executor: PipelineExecutor, incomplete: Sequence[int]) -> CkptError:
    logs = executor.logging_dir.resolve_paths("logs")
    return CkptError(
        f"{len(incomplete)} of {executor.world_size} tasks are not complete; task "
        f"{incomplete[0]} is the first. Their logs are in {logs}. Run again to resume."
    )


def raise_limit_reached(pipeline: Sequence[object], incomplete: Sequence[int]) -> None:
    reached = limit_reached(pipeline) if incomplete else None
    if reached is not None:
        raise reached


def _own_listings(folder: DataFolder) -> DataFolder:
    """Returns a remote folder with its own file system: fsspec's cached listings are not
    thread-safe.
    """
    if folder.is_local():
        return folder
    shared = folder.fs
    file_system = type(shared)(
        *shared.storage_args, skip_instance_cache=True, **shared.storage_options
    )
    return DataFolder(folder.path, fs=file_system)


def _saved_stats(logging_dir: DataFolder, rank: int) -> PipelineStats:
    with logging_dir.open(f"stats/{rank:05d}.json") as file:
        stats = PipelineStats.from_json(json.load(file))
    for step in stats.stats:
        step.stats = MetricStatsDict(
            init={name: _as_counted(value) for name, value in step.stats.items()}
        )
    return stats


def _as_counted(value: dict[str, float] | float) -> MetricStats:
    if isinstance(value, dict):
        return MetricStats.from_dict(value)
    if value:
        return MetricStats(value, value, 1, 1, 1)
    return MetricStats(0, 1, 0, 0, 0)
