"""``JobsPipelineExecutor`` is datatrove's executor for Hugging Face Jobs, with what it lacks.

the package on the job's machine    a zip of this very code, beside ``executor.pik``
                                    (``process/job_launch.py``)
a job's disk is empty               each runner has a mirror, below ``logging_dir`` by default
a job has ranks of its own          it is a worker, which takes ranks until none is free
a job reaches its timeout           its ranks drain before, as on SIGTERM
a job dies                          the next job takes its ranks, while they advance; ``failures``
                                    has the cause
the coordinator ends                jobs continue; the next run of the same command waits for them
"""

import hashlib
import io
import math
import os
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import dill  # type: ignore[import-untyped]
import orjson
from datatrove.executor.jobs import JobsPipelineExecutor as DatatroveExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.claims.claims import LOOKS, Claims, refuse_for_claims
from datatrove_ckpt.common import redaction, retrying
from datatrove_ckpt.common.attempts import AttemptProgress
from datatrove_ckpt.common.formatting import plural, plural_is, seconds_of
from datatrove_ckpt.common.launchers import default_mirror
from datatrove_ckpt.common.setting_types import Count, CountFromZero, CountOrAll, check
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError, GivenUp, GoalReached
from datatrove_ckpt.executors.local import OwnExecutor
from datatrove_ckpt.generation.limit_watch import limit_reached
from datatrove_ckpt.process import job_launch, task_errors
from datatrove_ckpt.process.signals import Interruption
from datatrove_ckpt.user_code import script_names

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.run_plan import RunPlan

_LABEL = "datatrove_ckpt_run"
_SETTINGS = "DATATROVE_CKPT_JOB_SETTINGS"
_CANCELED = "canceled"
_ALL_RANKS = 2  # codes of ``code_of_rank``
_LIMIT_REACHED = 4

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    """A Hugging Face Job.

    Attributes:
        launch: names the file in which the job records why it failed.
        reached: the progress of all ranks when the job was first seen.
        retries: jobs before it, in turn, that advanced no rank.
    """

    id: str
    url: str
    launch: str = ""
    settings: str = ""
    reached: dict[int, AttemptProgress] = field(default_factory=dict)
    retries: int = 0


class JobsPipelineExecutor(OwnExecutor, DatatroveExecutor):  # type: ignore[misc]
    """Runs the ranks of a pipeline on Hugging Face Jobs, and waits for them.

    All arguments are those of datatrove's ``JobsPipelineExecutor``, with these differences.

    Args:
        workers: how many jobs share the tasks. -1: one for each ``tasks_per_job`` of them.
        tasks_per_job: the number of tasks for which ``workers=-1`` starts one job.
        logging_dir: its bucket also gets the package, and by default the mirror of each runner
            (checkpoints/).
        dependencies: packages that the jobs need besides this package, its requirements, and
            without ``image`` the engine.
        flavor: the machine of a job; ``hf jobs hardware`` lists them.
        timeout: a rank drains before. None: 30 minutes, as Jobs have it.
        namespace: who pays; None: the token's account.
        labels, env: labels and variables of each job, beside ours. Values of env are kept in files.
        secrets: secret variables of each job; None takes this process's variable of that name. The
            keys of endpoints (``api_key_env``) and of mirrors are added.
        max_retries: how many more jobs are started in turn although no rank advances, and how often
            a rank that fails, or kills its job, without progress is tried again.
        poll_interval: seconds between two polls of the jobs.
    """

    sends_own_modules = True  # so a module beside the script is no reason to warn

    def __init__(
        self,
        pipeline: list[PipelineStep | Callable[..., object]],
        tasks: Count,
        workers: CountOrAll = -1,
        *arguments: object,
        dependencies: list[str] | None = None,
        tasks_per_job: Count = 1,
        max_retries: CountFromZero = 1,
        poll_interval: float = 15.0,
        **options: object,
    ) -> None:
        check(JobsPipelineExecutor, {**locals(), **options})
        try:
            with task_errors.log_disabled("datatrove.executor.jobs"):  # it is experimental
                super().__init__(
                    pipeline,
                    tasks,
                    workers,
                    *arguments,
                    tasks_per_job=tasks_per_job,
                    max_retries=max_retries,
                    poll_interval=poll_interval,
                    **options,
                )
        except ValueError as error:
            raise ConfigError(error, " A bucket is best: hf://buckets/ORG/NAME.") from None
        if workers == -1:
            self.workers = math.ceil(tasks / tasks_per_job)
        self.tasks_per_job = 1  # a job takes them one by one
        configs = [config for runner in self._runners for config in runner.models.values()]
        # An image may contain its engine.
        engines = [] if self.image else [config.server_type for config in configs]
        self.dependencies = [*script_names.required("hub", *engines), *(dependencies or ())]
        self._prepare(DatatroveExecutor)
        in_files = {
            "env": self.env or {},
            "labels": self.labels or {},
            "dependencies": dict(enumerate(dependencies or ())),
            "image": {0: self.image or ""},
        }
        for key, values in in_files.items():
            for name, value in values.items():
                is_named = key == "env" and redaction.may_name_secret(name)
                if is_named or redaction.may_hold_secret(str(value)):
                    raise ConfigError(f"{key}: {name}: its value may be a secret. Use secrets.")
        self._seconds()
        for index, runner in enumerate(self._runners):
            if runner.checkpoints_remote_dir is None and runner.checkpoints_local_dir is not None:
                refuse_for_claims(self._folder)
                mirror = default_mirror(self._folder, index)
                mirrored = runner.changed(checkpoints_remote_dir=mirror)
                self.pipeline = [mirrored if step is runner else step for step in self.pipeline]

    def run(self) -> None:
        """Starts jobs until every rank is complete, and waits for them. In a job: runs ranks until
        none is free.

        Raises:
            ConfigError: a setting cannot work, or something would be on a job's own disk.
            CkptError: ranks are not complete; the message names them and their jobs. Or see
                ``check_before_run``.
            KeyboardInterrupt: SIGINT or SIGTERM came. The jobs continue.
        """
        from datatrove_ckpt.run_folder.preflight import run_checked

        if job_launch.LAUNCH in os.environ:
            self._work()
        else:
            run_checked(self)

    def _work(self) -> None:
        try:
            self._worker(max_rank_attempts=self.max_retries + 1).run_worker()
        except GivenUp as error:
            logger.error(str(error))
        except Exception as error:
            with (
                suppress(Exception),
                self.logging_dir.open(
                    f"failures/{os.environ[job_launch.LAUNCH]}.json", "wb"
                ) as file,
            ):
                file.write(orjson.dumps(task_errors.failure_note(error)))
            if not isinstance(error, GoalReached):
                raise

    def check(self, plan: "RunPlan") -> None:
        """Refuses a pipeline that jobs cannot run.

        Raises:
            ConfigError: something would be on a job's own disk, or a secret is not set here; or see
                ``own_files``.
        """
        from datatrove_ckpt.run_folder.run_plan import lost_with_disk

        if lost := lost_with_disk(plan, lambda folder: "://" in folder):
            raise ConfigError(
                "a job's disk goes with it. Set to a URL (hf://buckets/ORG/NAME/..., s3://...): "
                f"{'; '.join(lost)}.",
                setting="executor",
            )
        self._secrets()
        script_names.own_files()

    def _ensure_logging_dir_repo(self) -> None:
        with retrying.naming_hub():
            super()._ensure_logging_dir_repo()

    def run_ranks(self) -> None:
        try:
            self._run_dependency()
        except CkptError as error:
            if not self.run_on_dependency_fail:
                raise
            logger.warning(f"{error} The tasks run nevertheless (run_on_dependency_fail).")
        self._launched = True
        self._ensure_logging_dir_repo()
        running = self._running()
        ranks = self._incomplete(range(self.tasks), self.skip_completed)
        if running:
            logger.info(
                f"{plural_is(len(running), 'job')} still at work, of an earlier start: "
                f"{_job_urls(running)}. Waiting."
            )
        else:  # the markers of ranks that run again would hide failures
            for rank in set(ranks) - set(self._incomplete(ranks)):
                self.logging_dir.rm(f"completions/{rank:05d}")
        if not ranks:
            logger.info(f"{plural_is(self.tasks, 'task')} complete already.")
        elif not self._ends_by_limit():
            with retrying.naming_hub():
                self._upload()
            self._work_through()
        if self._incomplete(ranks) and self._ends_by_limit():
            return
        if ranks or not self.logging_dir.isfile("stats.json"):
            stats = self._stats_of_complete(range(self.tasks))
            self._write_stats(stats, range(self.tasks))
            logger.success(stats.get_repr(f"All {self.tasks} tasks"))

    def cancel(self) -> int:
        """Cancels the jobs of this run, and returns their number. Another coordinator starts no
        further jobs.

        Raises:
            CkptError: some jobs could not be canceled; the message names them.
        """
        # Between two jobs there is nothing to cancel.
        with suppress(OSError), self.logging_dir.open(_CANCELED, "w") as file:
            file.write(str(time.time()))
        jobs = self._alive()
        not_canceled = []
        reason = ""
        for job in jobs:
            try:
                retrying.OPENING.run(
                    partial(self._hub.cancel_job, job_id=job.id, namespace=self.namespace),
                    f"Job {job.url} could not be canceled",
                )
            except Exception as error:
                not_canceled.append(job)
                reason = retrying.failure_line(error)
        if not_canceled:
            raise CkptError(
                f"{len(not_canceled)} of {plural(len(jobs), 'job')} could not be canceled: "
                f"{_job_urls(not_canceled)} ({reason}). Run it again."
            )
        return len(jobs)

    def _work_through(self) -> None:
        worker = self._worker(max_rank_attempts=self.max_retries + 1)
        with Interruption([signal.SIGTERM]), worker._open_claims(LOOKS) as claims:
            claims.clear()
            try:
                self._keep_jobs(claims)
            except KeyboardInterrupt:
                if jobs := self._alive():
                    logger.warning(
                        f"{plural_is(len(jobs), 'job')} still at work: {_job_urls(jobs)}. The "
                        "same command waits for them; run --cancel, or cancel(), cancels them."
                    )
                raise
            if given_up := claims.given_up():
                raise self.given_up_error(given_up)

    def _keep_jobs(self, claims: Claims) -> None:

        def look() -> tuple[int, int, dict[int, str]]:
            return len(claims.free().ranks), len(claims.other_claimants()), claims.given_up()

        began = time.time()
        seen: dict[str, _Job] = {}
        retries = 0
        while True:
            alive = {job.id: seen.get(job.id, job) for job in self._alive()}
            for job in seen.values():
                if job.id in alive:
                    continue
                stage = self._stage(job)
                if stage in ("COMPLETED", "ERROR", "CANCELED", "DELETED"):
                    retries = self._retries_after(job, stage)
                else:
                    alive[job.id] = job
            free, at_work, given_up = self._call_hub("The claims of tasks cannot be listed", look)
            incomplete = set(self._incomplete(range(self.tasks))) - given_up.keys()
            is_limited = bool(incomplete) and limit_reached(self.pipeline) is not None
            if not alive and (not incomplete or is_limited):
                return
            number = _wanted(self.workers, len(alive), at_work, free)
            if incomplete and not is_limited and number > 0:
                self._start(alive, number, retries, began)
            seen = alive
            time.sleep(self.poll_interval)

    def _running(self) -> list[_Job]:
        running = self._alive()
        foreign = [job for job in running if job.settings not in ("", self._settings)]
        if foreign:
            raise CheckpointMismatch(
                f"{plural_is(len(foreign), 'job')} still at work, of a start with other "
                f"settings, code or package: {_job_urls(foreign)}. Wait for them, or cancel them "
                "(run --cancel, or cancel()), and run again."
            )
        return running

    def _retries_after(self, job: _Job, stage: str) -> int:
        code = 0
        reason = ""
        # A job that is killed records nothing.
        with (
            suppress(Exception),
            self.logging_dir.open(f"failures/{job.launch}.json", "rb") as file,
        ):
            code, reason = orjson.loads(file.read())
        retries = job.retries
        if code in (128 + signal.SIGTERM, _LIMIT_REACHED) or self._progress() != job.reached:
            retries = 0
        elif stage != "COMPLETED":
            retries += 1
        verdict = ""
        if stage == "CANCELED":
            verdict = "canceled"
        elif code == _ALL_RANKS:
            verdict = "no other start would help"
        elif retries > self.max_retries:
            verdict = f"{plural(retries, 'start')} in turn without progress"
        end = f"Job {job.url} ended as {stage}"
        if reason:
            end = f"{end} ({reason})"
        if verdict:
            incomplete = self._incomplete(range(self.tasks))
            raise CkptError(
                f"{len(incomplete)} of {self.tasks} tasks are not complete. {end}: {verdict}. "
                f"`datatrove-ckpt status` shows each task; logs: hf jobs logs {job.id}, and "
                f"{self._folder}/logs. Other jobs continue. Run again to resume."
            )
        if stage == "COMPLETED":
            logger.info(f"Job {job.url} has ended: no task was free.")
        else:
            logger.warning(f"{end}. Another job continues its tasks.")
        return retries

    def _start(self, alive: dict[str, _Job], number: int, retries: int, began: float) -> None:
        with (
            suppress(OSError, ValueError),
            self.logging_dir.open(_CANCELED, "r") as file,
        ):
            if float(file.read()) > began:
                raise CkptError("This run was canceled. Run again to resume.")
        reached = self._progress()
        for _ in range(number):
            try:
                with (
                    # run_uv_job is experimental.
                    warnings.catch_warnings(action="ignore", category=UserWarning),
                    redirect_stdout(io.StringIO()),  # it prints where it keeps each script
                ):
                    job = self._submit(reached, retries)
            except Exception as error:
                if not retrying.READING.is_transient(error):
                    raise CkptError(
                        f"Hugging Face refuses to start a job: {retrying.failure_line(error)}. "
                        f"{plural(len(alive), 'job')} continue. Correct that and run again."
                    ) from error
                logger.warning(
                    f"No job could be started ({retrying.failure_line(error)}). Tried again."
                )
                return  # if only the answer was lost, the job is found in the list
            alive[job.id] = job

    def _submit(self, reached: dict[int, AttemptProgress], retries: int) -> _Job:
        launch = uuid.uuid4().hex
        env = {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONUNBUFFERED": "1",
            **(self.env or {}),
            job_launch.LAUNCH: launch,
            _SETTINGS: self._settings,
            job_launch.TIMEOUT: f"{self._seconds():g}",
        }
        labels = {"datatrove_job_name": self.job_name, **(self.labels or {}), _LABEL: self._label}
        job = self._hub.run_uv_job(
            job_launch.__file__,
            script_args=[self._folder, self._bundle_name],
            dependencies=self.dependencies,
            python=self.python,
            image=self.image,
            env=env,
            secrets=self._secrets(),
            flavor=self.flavor,
            timeout=self.timeout,
            labels=labels,
            namespace=self.namespace,
        )
        logger.info(f"Started job {job.url}.")
        return _Job(job.id, job.url, launch, self._settings, reached, retries)

    @property
    def _hub(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(token=self.token)

    def _alive(self) -> list[_Job]:
        def ask() -> list[Any]:
            labels = {_LABEL: self._label}
            alive = ["SCHEDULING", "RUNNING"]
            # Without a namespace, huggingface_hub 2.4 looks for the account of the login, and not
            # for that of the token of ``HfApi``.
            account = {"namespace": self.namespace, "token": self.token}
            return [*self._hub.list_jobs(status=alive, labels=labels, **account)]

        jobs = []
        for job in self._call_hub("The jobs cannot be listed", ask):
            env = job.environment or {}
            jobs.append(
                _Job(job.id, job.url, env.get(job_launch.LAUNCH, ""), env.get(_SETTINGS, ""))
            )
        return jobs

    def _stage(self, job: _Job) -> str:
        ask = partial(self._hub.inspect_job, job_id=job.id, namespace=self.namespace)
        try:
            return str(self._call_hub(f"Job {job.url} cannot be inspected", ask).status.stage)
        except CkptError as error:
            if retrying.http_status(error.__cause__) == 404:
                return "DELETED"
            raise

    def _call_hub(self, problem: str, call: Callable[[], T]) -> T:
        try:
            return retrying.READING.run(call, problem)
        except Exception as error:
            raise CkptError(
                f"{problem}: {retrying.failure_line(error)}. The same command waits for the "
                "running jobs."
            ) from error

    def _incomplete(self, ranks: Iterable[int], skip_completed: bool = True) -> list[int]:
        self.logging_dir.fs.invalidate_cache()  # jobs write there
        look = partial(self.get_incomplete_ranks, ranks, skip_completed)
        result: list[int] = self._call_hub("The markers of tasks cannot be listed", look)
        return result

    def _progress(self) -> dict[int, AttemptProgress]:
        ranks = self._incomplete(range(self.tasks))
        reached = self._worker().reached

        def look() -> dict[int, AttemptProgress]:
            return dict(zip(ranks, in_threads(reached, ranks), strict=True))

        return self._call_hub("The mirror cannot be read", look)

    @property
    def _label(self) -> str:
        return hashlib.sha256(self._folder.encode()).hexdigest()[:16]

    @cached_property
    def _settings(self) -> str:
        inputs = [
            (str(step.data_folder.resolve_paths("")), getattr(step, "glob_pattern", None))
            for step in self.pipeline
            if hasattr(step, "data_folder")
        ]
        identities = [runner.identity(self.tasks).stored for runner in self._runners]
        data = orjson.dumps([inputs, identities, self._bundle_name], default=str)
        return hashlib.sha256(data).hexdigest()[:16]

    @cached_property
    def _bundle_name(self) -> str:
        digest = hashlib.sha256(script_names.bundle()).hexdigest()
        return f"datatrove_ckpt-{script_names.version()}-{digest[:12]}.zip"

    def _seconds(self) -> float:
        if self.timeout is None:
            return 1800.0
        seconds = seconds_of(str(self.timeout))
        if seconds is None:
            raise ConfigError(
                f"timeout: takes seconds, or a text such as 90m or 2h; it is {self.timeout!r}."
            )
        return seconds

    def _secrets(self) -> dict[str, str | None]:
        from huggingface_hub import get_token

        names = dict.fromkeys(
            endpoint.api_key_env
            for runner in self._runners
            for config in runner.models.values()
            for endpoint in config.endpoints_by_name.values()
            if endpoint.api_key_env
        )
        if redaction.MIRROR_KEY_VARIABLE in os.environ:
            names[redaction.MIRROR_KEY_VARIABLE] = None
        needed = {"HF_TOKEN": self.token or get_token() or None, **names, **(self.secrets or {})}
        values = {
            name: os.environ.get(name) if value is None else value for name, value in needed.items()
        }
        for name, value in values.items():
            if not value:
                how = "Export"
                if name == "HF_TOKEN":
                    how = "Log in (hf auth login), or export"
                raise ConfigError(
                    f"secrets: {name} is not set here. {how} it.",
                    setting="executor",
                )
        return values

    def _upload(self) -> None:
        """Uploads the package and the executor.

        A job of an earlier launch that starts now reads the same run.
        """
        executor = deepcopy(self)
        executor.token = executor.secrets = executor.depends = None
        executor.skip_completed = True  # the markers of ranks that run once more are gone
        for name, data in {
            self._bundle_name: script_names.bundle(),
            "executor.pik": dill.dumps(executor, fmode=dill.CONTENTS_FMODE),
        }.items():
            with self.logging_dir.open(name, "wb") as file:
                file.write(data)
        executor.save_executor_as_json()


def _wanted(max_jobs: int, alive: int, at_work: int, free: int) -> int:
    """Returns how many jobs to start, if not negative. Each job that is not at work yet takes one
    free rank. The claims of a killed job look alive for a while.
    """
    return min(max_jobs, min(at_work, alive) + free) - alive


def _job_urls(jobs: Iterable[_Job]) -> str:
    return ", ".join(job.url for job in jobs)
