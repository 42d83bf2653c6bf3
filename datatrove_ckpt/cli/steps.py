"""Steps: several runs in one file, with queries between them.

    run_folder: runs/qa           settings beside ``steps`` hold for each step
    model: m
    steps:
      answers: {input: docs/*.parquet, prompt: "{text}"}
      judged: {input: answers, prompt: "{answer}", answer: rating}
      best: {sql: "select id, answer from judged where rating = 'good'"}

Each step is an ordinary run in ``runs/qa/NAME/``, or a query, whose rows are in
``runs/qa/NAME/output/``. A step reads files, and steps above it. Nothing schedules: they run in the
order of the file.

A run that reads steps keeps its input in ``runs/qa/NAME/input/``, written before its first request.
What that was made from is its record: a start computes the query again if that has changed, and
refuses other rows. So the rows of two inputs never mix.
"""

import argparse
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import orjson
from datatrove.data import Document
from datatrove.executor.base import PipelineExecutor
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.run_limits import RunTotals
from datatrove_ckpt.cli import short_form, yaml_config
from datatrove_ckpt.cli.execution import run_job
from datatrove_ckpt.cli.job_input import SavedInput
from datatrove_ckpt.cli.output_commands import MOST, described
from datatrove_ckpt.cli.printing import fail, note, say
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import did_you_mean, plural, plural_is, without_flag
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import (
    CheckpointLocked,
    CheckpointMismatch,
    CkptError,
    ConfigError,
    TooManyDeadLetters,
    written_in,
)
from datatrove_ckpt.executors.local import close_servers
from datatrove_ckpt.output.arrow_types import types_of
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder import earlier_runs, preflight, queries
from datatrove_ckpt.run_folder.documents import ShownDocument, select_rows
from datatrove_ckpt.run_folder.finding import Finding, run_check
from datatrove_ckpt.run_folder.queries import Query, Tables
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.run_folder.sample import estimate_lines, take_sample
from datatrove_ckpt.run_folder.steps import STEPS, StepFolder

Node = JsonObject
_LOCK = "steps.lock"
"""Held while rows are made: workers wait for it."""
_RUN_LOCK = "run.lock"
"""Held by a run of all tasks, until its end."""
_RUNS = "it is not finished"
_POLL = 0.2  # seconds
_LIMITS = ("max_cost", "max_total_tokens")
"""Settings that hold for all steps together, but those that have their own."""
_FIRST = 20  # documents whose columns stand for those of all
_OF_TYPE = {"string": "", "integer": 1, "number": 0.5, "boolean": True}
_RESERVED = ("input", "output", "checkpoints", "logs")
_REFUSED = {
    "kubernetes": "a pod has no place for the queries between them",
    "jobs": "a job's disk goes with it, and queries need the rows of the steps before",
    "output_format": "queries read Parquet. For another format: datatrove-ckpt export",
}


@dataclass(frozen=True)
class Step(StepFolder):
    """A step.

    Attributes:
        label: names it in messages.
        settings: those of its run; empty for a query.
        sources: the steps that it reads.
        leaves_dead_letters: the steps after it begin although dead letters are left.
    """

    label: str
    settings: Node
    query: Query | None
    sources: list[Self]
    leaves_dead_letters: bool

    @property
    def is_run(self) -> bool:
        return bool(self.settings)

    def unfinished(self) -> str:
        """Returns why the steps after this one may not begin; "" if they may."""
        state = self.state()
        if state is None:
            return "it has not run" if self.rows is None else ""
        reached = state.limits.reached(state.run_totals)
        if not state.is_finished and (reached is None or reached.setting != "until"):
            return _RUNS
        if not state.delivered.read:
            return "no file of its input has a document"
        dead = state.delivered.dead
        if dead and not self.leaves_dead_letters:
            return (
                f"{plural_is(dead, 'dead letter')} left. Retry them (--retry-dead-letters), or go "
                f"on without them: dead_letters: leave, in steps.{self.name}."
            )
        return ""


def read_steps(short: Node, source: str) -> list[Step]:
    """Returns the steps in the order in which they run.

    Raises:
        ConfigError: a name, a query or the form is wrong.
    """
    given = short["steps"]
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{source}: steps: a mapping of names to steps; it is {given!r}.")
    for name, reason in _REFUSED.items():
        if any(name in node for node in (short, *given.values())):
            raise ConfigError(f"{source}: {name}: steps have none, because {reason}.")
    if not isinstance(short.get("run_folder"), str) or "://" in short["run_folder"]:
        raise ConfigError(f"{source}: run_folder: steps need a folder of this machine.")
    root = Path(short["run_folder"]).expanduser()
    own = ("steps", "run_folder", *_LIMITS)
    defaults = {key: value for key, value in short.items() if key not in own}
    steps: dict[str, Step] = {}
    for name, node in given.items():
        label = f"{source}: steps.{name}"
        is_name = re.fullmatch(r"[A-Za-z]\w*", str(name)) and name not in _RESERVED
        if not is_name or name.lower() in map(str.lower, steps):
            raise ConfigError(
                f"{label}: a step has a name of its own, of letters, digits and _, and none of "
                f"{', '.join(_RESERVED)}."
            )
        steps[name] = _read_step(root / name, label, node, defaults, steps)
    return [*steps.values()]


def _read_step(
    folder: Path, label: str, node: object, defaults: Node, above: Mapping[str, Step]
) -> Step:
    if not isinstance(node, dict):
        raise ConfigError(f"{label}: a mapping of settings, or of sql alone; it is {node!r}.")
    settings: Node = {}
    if "sql" in node:
        query: Query | None = short_form.read_query(node, label)
    else:
        settings = {"output_format": "parquet", **defaults, **node}
        yaml_config.refuse_unknown(settings, [*short_form.settings(), "dead_letters"], label)
        query = _read_input(settings, f"{label}: input", above)
    dead_letters = settings.pop("dead_letters", "stop")
    if dead_letters not in ("stop", "leave"):
        raise ConfigError(f"{label}: dead_letters: stop or leave; it is {dead_letters!r}.")
    sources = []
    for table in query.tables if query else ():
        if table in above:
            sources.append(above[table])
        elif query and re.fullmatch(r"\w+", table):
            hint = did_you_mean(table, above)
            raise ConfigError(f'{query.label}: there is no step "{table}" above it{hint}')
    return Step(folder, label, settings, query, sources, dead_letters == "leave")


def _read_input(settings: Node, label: str, above: Mapping[str, Step]) -> Query | None:
    given = settings.get("input")
    if isinstance(given, dict):
        return short_form.read_query(given, label)
    name = str(given or "")
    if name in above or (re.fullmatch(r"\w+", name) and not Path(name).exists()):
        key = settings.get("metadata_key", "rollout_results").replace("'", "''")
        sql = f"select columns(lambda name: name <> '{key}') from \"{name}\""
        return Query(label, sql, (name,))
    return None


def _example(schema: object) -> object:
    if not isinstance(schema, dict):
        return ""
    properties = schema.get("properties")
    if properties:
        return {name: _example(part) for name, part in properties.items()}
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}))]
    return _OF_TYPE.get(str(schema.get("type")))


class StepsJob:
    """A job of steps.

    Raises:
        ConfigError: see ``read_steps``.
    """

    def __init__(self, short: Node, source: str) -> None:
        self.steps = read_steps(short, source)
        self.root = self.steps[0].folder.parent
        self.limits = {name: short[name] for name in _LIMITS if short.get(name) is not None}

    # what is on disk -----------------------------------------------------------------------------

    def tables(self, step: Step) -> Tables:
        """Returns the rows that a step reads of others; of those without rows, the columns."""
        return {
            source.name: select_rows(source) or self.without_rows(source) for source in step.sources
        }

    def without_rows(self, step: Step) -> object:
        """Returns a table of no row with the columns of a step, as far as they are known: what a
        rollout adds, nobody knows before it has rows.
        """
        columns = {}
        if step.query is not None:
            columns = queries.columns_of(step.query, self.tables(step))
        if not step.is_run:
            return pa.schema(columns).empty_table()
        _, executor = self.executor(step)
        runner = RunPlan(executor).runners[0].step
        if step.query is None:
            first = islice(executor.pipeline[0](None, 0, 1), _FIRST)
            columns = dict(types_of([{"id": "", "text": "", **row.metadata} for row in first]))
        if runner.answer in columns and "answer" not in step.settings:
            runner = runner.changed(answer=short_form.free_answer(columns))
        answer = _example(getattr(runner.rollout_fn, "json_schema", None))
        if runner.explode and not isinstance(answer, list):
            answer = [answer]
        metadata: Node = dict.fromkeys([*columns, *runner.added_columns.values()])
        if runner.rollout_results:
            metadata[runner.metadata_key] = [{"text": "", "finish_reason": ""}]
        if runner.answer_column:
            metadata[runner.answer_column] = answer
        made = runner.rows(Document("", "", metadata=metadata))
        types = dict(types_of([row.metadata for row in made]))
        return pa.schema(types | columns).empty_table()

    def bind(self, step: Step) -> None:
        if step.query is not None:
            queries.columns_of(step.query, self.tables(step))

    # before a step -------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Makes the rows of a query, or the input of a run.

        Raises:
            CheckpointMismatch: a run has begun with other rows.
        """
        folder = step.folder
        has_begun = step.has_begun
        if step.is_run and step.rows and not has_begun:
            files.disk.remove_tree(folder / "output")  # of a query, or of a start without rows
        if step.query is None:
            return
        digests = {source.name: source.digest() for source in step.sources}
        made_from = {"sql": step.query.sql, "steps": digests}
        part = layout.KEPT_INPUT if step.is_run else "output"
        saved = SavedInput(folder / part, has_begun, step.settings.get("checkpoints_remote_dir"))
        kept = saved.save_query(step.query, self.tables(step), made_from)
        if step.is_run:
            saved.record_folder()
            if not (kept.rows or has_begun):
                nothing = {"nothing": self.without_rows(step)}
                query = Query(step.label, "from nothing")
                queries.make_rows(query, nothing, folder / "output", made_from)

    def executor(self, step: Step, rows: Path | None = None) -> tuple[Node, PipelineExecutor]:
        """Returns the run of a step in the long form, and its executor. It takes over the answers
        of the folders that ``redo`` has moved aside, if its settings are theirs.

        Args:
            rows: the folder with the rows of its query; None: that of the step.
        """
        job = {**self.limits, **step.settings, "run_folder": str(step.folder)}
        monitoring = job.get("monitoring") or {}
        name = f"{monitoring.get('run_name') or self.root.name}/{step.name}"
        job["monitoring"] = {**monitoring, "run_name": name}
        if step.query is not None:
            rows = rows or step.folder / layout.KEPT_INPUT
            job["input"] = f"{rows}/*.parquet"
            if not rows.exists():
                job.setdefault("tasks", 1)
        named = job.get("finished_from") or []
        old = [named] if isinstance(named, str) else [*named]
        paths = self.root.glob(f"{step.name}.[0-9]*")
        moved = [path for path in paths if StepFolder(path).has_begun]
        with written_in(step.label):
            for folder in sorted(moved, key=lambda path: (len(path.name), path), reverse=True):
                listed = (folder / "output", folder / "checkpoints")
                parts = [str(part) for part in listed if part.exists()]
                more = {**job, "finished_from": [*old, *parts]}
                try:
                    plan = RunPlan(yaml_config.build(short_form.expand(more)))
                    earlier_runs.check_job(plan, dry_run=True)
                    job = more
                    old += parts
                except (CheckpointMismatch, ConfigError) as error:
                    warn_once(f"{folder}: its answers are not taken over: {error}")
            config = short_form.expand(job)
            executor = yaml_config.build(config)
        executor.keeps_servers = True
        if self.limits:
            before = RunTotals()
            for other in self.steps:
                state = other.state()
                if state is not None and other is not step:
                    before += state.run_totals
            cost = 0.0 if "max_cost" in step.settings else before.cost / 1e9
            tokens = 0 if "max_total_tokens" in step.settings else before.tokens
            runner = RunPlan(executor).runners[0]
            executor.pipeline[runner.index] = runner.step.changed(spent_before=(cost, tokens))
        return config, executor

    def redo(self, names: Sequence[str]) -> None:
        """Moves steps, and those that depend on them, aside. After a kill, the same command moves
        the rest.

        Raises:
            ConfigError: there is no such step, or its checkpoints are also elsewhere.
            CheckpointLocked: a process works on a step.
        """
        listed = [step.name for step in self.steps]
        for name in names:
            if name not in listed:
                raise ConfigError(f"--redo: {name} is no step{did_you_mean(name, listed)}")
        again: list[Step] = []
        with ExitStack() as stack:
            for step in self.steps:
                if step.name not in names and not any(source in again for source in step.sources):
                    continue
                again.append(step)
                if step.settings.get("checkpoints_remote_dir"):
                    raise ConfigError(
                        f"{step.label}: checkpoints_remote_dir: --redo does not move a mirror. "
                        "Give another mirror and another run_folder."
                    )
                state = step.state()
                if state is not None and state.is_at_work:
                    raise CheckpointLocked(
                        f"A process works on {step.folder}. Stop it, and run again."
                    )
                for rank in layout.rank_folders(step.folder / "checkpoints"):
                    stack.callback(Lock(rank / layout.LOCK).release)
            for step in reversed(again):  # no step is ever beside newer input
                if step.folder.exists():
                    files.disk.rename(step.folder, files.free_name(step.folder, "."))
            files.disk.sync_dir(self.root)

    # the run -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compares what has begun with the job, before any request.

        Raises:
            CheckpointMismatch: a row, a query or a setting has changed. Names the first such step.
        """
        for step in self.steps:
            with _naming(step):
                if not any(source.unfinished() for source in step.sources):
                    self.prepare(step)
                if step.is_run:
                    plan = RunPlan(self.executor(step)[1])
                    if step.has_begun:
                        earlier_runs.check_job(plan, dry_run=True)
                        earlier_runs.check_inputs_unchanged(plan)

    def runs(self, redo: Sequence[str] = (), is_worker: bool = False) -> Iterator[Step]:
        """Yields each run. It must have run when the next is taken.

        Args:
            redo: steps that run anew, with those that depend on them.
            is_worker: others work on the steps at the same time.

        Raises:
            CheckpointLocked: another process runs the steps, and this is no worker.
            TooManyDeadLetters: dead letters keep the next step from beginning.
        """
        files.disk.make_dirs(self.root)
        with ExitStack() as stack:
            if not is_worker:
                stack.callback(Lock(self.root / _RUN_LOCK).release)
            stack.callback(close_servers)
            with self._locked():
                listed = [step.name for step in self.steps]
                files.disk.replace(self.root / STEPS, orjson.dumps(listed))
                self.redo(redo)
                self.check()
            for step in self.steps:
                with self._locked(), _naming(step):
                    self.prepare(step)
                kept = step.rows
                if kept is not None:
                    logger.info(f"{step.label}: {plural(kept.rows, 'row')} in {kept.folder}")
                    continue
                yield step
                reason = step.unfinished()
                if reason:
                    raise TooManyDeadLetters(f"{step.label}: {reason}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one process at a time prepare steps."""
        lock = None
        while lock is None:
            try:
                lock = Lock(self.root / _LOCK)
            except CheckpointLocked as error:
                warn_once(f"Waiting for a query: {error}")
                time.sleep(_POLL)
        try:
            yield
        finally:
            lock.release()


def examine_steps(short: Node, source: str) -> Iterator[Finding]:
    """Checks the steps as ``doctor`` checks a run; of a run whose input is not there yet, only the
    settings.
    """
    job = StepsJob(short, source)
    unknown: list[Step] = []
    for step in job.steps:
        if step.is_run:
            _, executor = job.executor(step)
            if step.query is None or step.given is not None:
                for finding in preflight.doctor(executor):
                    yield replace(finding, subject=f"{step.name}: {finding.subject}")
        if any(source in unknown for source in step.sources):
            text = "a rollout before it has no rows yet, so columns are not known."
            yield Finding("note", "query", f"{text} `run --sample 3` tries it.", step.name)
            unknown.append(step)
        else:
            yield from run_check(step.name, job.bind, step, property_name="query")
        if {"rollout", "task"} & step.settings.keys() and step.unfinished():
            unknown.append(step)


def sample_steps(short: Node, source: str, number: int) -> int:
    """Takes the first rows through all steps, in a temporary folder. The answers stay with each
    step, as those of ``run --sample``.
    """
    job = StepsJob(short, source)
    with TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        trial = StepsJob({**short, "run_folder": folder}, source)
        shares: dict[str, float | None] = {}
        try:
            for step, tried in zip(job.steps, trial.steps, strict=True):
                trial.prepare(tried)
                share: float | None = 1.0
                if step.query is not None and step.sources:
                    share = None
                    if queries.takes_row_by_row(step.query, trial.tables(tried)):
                        share = shares[step.sources[0].name]
                if tried.rows is None:
                    plan = RunPlan(job.executor(step, tried.folder / layout.KEPT_INPUT)[1])
                    share = _sample_step(plan, tried, number, share)
                else:
                    rows = tried.rows.rows
                    say(f"{step.name}: {plural(rows, 'row') if rows else 'no row reaches it'}")
                shares[step.name] = share
        finally:
            close_servers()
    return 0


def _sample_step(plan: RunPlan, step: Step, number: int, share: float | None) -> float | None:
    """Sends the first rows of a step. Returns how many times as many rows the whole step makes."""
    with log_disabled("datatrove_ckpt.generation.rank"):
        sent = take_sample(plan, number, step.folder, writes_rows=True)
    if sent.is_kept:
        Path(step.folder, "checkpoints").symlink_to(sent.checkpoints.absolute())
    whole = None
    further = None
    if sent.whole is not None and share is not None:
        whole = sent.whole.times(share)
        further = whole.number.value / len(sent.documents)
    paths = (step.folder / "output").glob("*.parquet")
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    say(f"{step.name}: {plural(len(sent.documents), 'document')} in, {plural(rows, 'row')} out")
    for place, (document, requests) in enumerate(sent.documents, 1):
        shown = ShownDocument(str(document.id), requests[0].question, requests[-1].answer_text)
        say(described(place, shown, "question", MOST))
    for line in estimate_lines(replace(sent, whole=whole), plan.runners[0].step):
        say(line)
    return further


@contextmanager
def _naming(step: Step) -> Iterator[None]:
    try:
        yield
    except CheckpointMismatch as error:
        error.add_note(
            f"This is the first step that has changed: {step.label}. Undo the change, or run with "
            f"--redo {step.name}, which runs this step and what depends on it anew."
        )
        raise


def run_steps(short: Node, arguments: argparse.Namespace) -> int:
    """Returns the exit code of the first step that is not finished."""
    source = arguments.config or "the command line"
    if arguments.sample is not None:
        return sample_steps(short, source, arguments.sample)
    job = StepsJob(short, source)
    if arguments.dry_run or arguments.print_config:
        for step in job.steps:
            say(f"--- # {step.name}{'' if step.is_run else ': a query'}")
            if step.is_run:
                run_job(*job.executor(step), arguments)
        return 0
    again = without_flag(arguments.command, "--redo")
    again = [word for word in again if word != "--retry-dead-letters"]
    try:
        for step in job.runs(arguments.redo or (), arguments.worker):
            config, executor = job.executor(step)
            plan = RunPlan(executor)
            if plan.submits:
                executor.continue_with(shlex.join(again))
            state = step.state()
            has_dead = state is not None and state.delivered.dead > 0
            retries = arguments.retry_dead_letters and has_dead
            own = argparse.Namespace(**{**vars(arguments), "retry_dead_letters": retries})
            with written_in(step.label):
                code = run_job(config, executor, own)
            if code:
                note(f"The step that stopped: {step.label}.")
            is_submitted = plan.submits and executor.array_id is not None
            if code or is_submitted or (arguments.worker and step.unfinished() == _RUNS):
                return code
    except CkptError as error:
        if not arguments.worker:
            raise
        return fail(error, code_of_rank(error))
    return 0
