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
from datatrove_ckpt.checkpoint.run_limits import NO_TOTALS
from datatrove_ckpt.cli import short_form, yaml_config
from datatrove_ckpt.cli.execution import run_job
from datatrove_ckpt.cli.job_input import SavedInput
from datatrove_ckpt.cli.output_commands import show_sample
from datatrove_ckpt.cli.printing import fail, note, say
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import did_you_mean, plural, plural_is, without_flag
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.errors import (
    CheckpointLocked,
    CheckpointMismatch,
    CkptError,
    ConfigError,
    StorageFailed,
    TooManyDeadLetters,
    written_in,
)
from datatrove_ckpt.executors.local import close_servers
from datatrove_ckpt.output.arrow_types import types_of
from datatrove_ckpt.run_folder import earlier_runs, preflight, queries
from datatrove_ckpt.run_folder.documents import rows_of
from datatrove_ckpt.run_folder.finding import Finding, run_check
from datatrove_ckpt.run_folder.queries import Query, Tables
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.run_folder.steps import STEPS, StepFolder, step_folders

Node = JsonObject
_LOCK = "steps.lock"
"""Held while rows are made: workers wait for it."""
_RUN_LOCK = "run.lock"
"""Held by a run of all tasks, until its end."""
_REDO = "redo.json"
"""File in the run folder with the steps of a redo, and their new names, while it is under way."""
_RUNS = "it is not finished"
_FIRST = 20  # documents whose columns stand for those of all
_OF_TYPE = {"string": "", "integer": 1, "number": 0.5, "boolean": True}
_RESERVED = ("input", "output", "checkpoints", "logs")
_REFUSED = {
    "kubernetes": "a pod has no place for the queries between them",
    "jobs": "a job's disk goes with it, and queries need earlier rows",
    "output_format": "queries read Parquet. For another format: datatrove-ckpt export",
}


@dataclass(frozen=True)
class Step(StepFolder):
    """A step.

    Attributes:
        label: names it in messages.
        settings: those of its run; empty for a query.
        sources: the steps that it reads.
        own: its settings without those beside the steps.
    """

    label: str
    settings: Node
    query: Query | None
    sources: list[Self]
    own: Node

    @property
    def is_run(self) -> bool:
        return bool(self.settings)

    @property
    def has_input(self) -> bool:
        """Whether its input is there: files, or the rows of its query."""
        return self.query is None or self.given is not None

    def unfinished(self) -> str:
        """Returns why the steps after this one may not begin; "" if they may."""
        if self.rows is not None:
            return ""
        state = self.state()
        reached = state.limits.reached(state.run_totals)
        if not state.is_finished and (reached is None or reached.setting != "until"):
            return _RUNS
        dead = state.delivered.dead
        if dead and self.settings.get("dead_letters") != "leave":
            return (
                f"{plural_is(dead, 'dead letter')} left. Retry them (--retry-dead-letters), or go "
                f"on without them: dead_letters: leave, in steps.{self.name}."
            )
        return ""

    def has_known_columns(self) -> bool:
        """Whether it has rows, or no rollout decides about its columns."""
        if not self.unfinished():
            return True
        is_open = bool({"rollout", "task"} & self.settings.keys())
        return not is_open and all(source.has_known_columns() for source in self.sources)

    def tables(self) -> Tables:
        """Returns the rows that it reads of others; of those without rows, the columns."""
        return {source.name: rows_of(source) or source.columns() for source in self.sources}

    def columns(self) -> object:
        """Returns a table of no row with its columns, as far as they are known: what a rollout
        adds, nobody knows before it has rows.
        """
        columns = {}
        if self.query is not None:
            columns = queries.columns_of(self.query, self.tables())
        if not self.is_run:
            return pa.schema(columns).empty_table()
        _, executor = self.executor()
        runner = RunPlan(executor).runners[0].step
        if self.query is None:
            first = islice(executor.pipeline[0](None, 0, 1), _FIRST)
            columns = dict(types_of([{"id": "", "text": "", **row.metadata} for row in first]))
        if runner.answer in columns and "answer" not in self.settings:
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

    def prepare(self) -> None:
        """Makes the rows of a query, or the input of a run.

        Raises:
            CheckpointMismatch: a run has begun with other rows.
        """
        has_begun = self.has_begun
        output = self.folder / "output"
        if self.is_run and self.rows and not has_begun:
            files.disk.remove_tree(output)  # of a query, or of a start without rows
        if self.query is None:
            return
        digests = {source.name: source.digest() for source in self.sources}
        made_from = {"sql": self.query.sql, "steps": digests}
        folder = self.folder / layout.KEPT_INPUT if self.is_run else output
        saved = SavedInput(folder, has_begun, self.settings.get("checkpoints_remote_dir"))
        kept = saved.save_query(self.query, self.tables(), made_from)
        if self.is_run and not (kept.rows or has_begun):
            nothing = Query(self.label, "from nothing", reads_files=True)
            queries.keep(nothing, {"nothing": self.columns()}, output, made_from)

    def executor(self, rows: Path | None = None) -> tuple[Node, PipelineExecutor]:
        """Returns its run in the long form, and the executor.

        Args:
            rows: the folder with the rows of its query; None: that of the step.
        """
        job = {**self.settings}
        if self.query is not None:
            rows = rows or self.folder / layout.KEPT_INPUT
            job["input"] = f"{rows}/*.parquet"
            if not rows.exists():
                job.setdefault("tasks", 1)
        with written_in(self.label):
            config = short_form.expand(job)
            executor = yaml_config.build(config)
            executor.keeps_servers = True
            executor.setting_paths = {name: f"steps.{self.name}.{name}" for name in self.own}
            runner = RunPlan(executor).runners[0]
            moved = self.folder.parent.glob(f"{self.name}.[0-9]*")  # by ``redo_steps``
            finished = earlier_runs.add_finished(runner, moved)
            if finished:
                arguments = config["executor"]["init_args"]["pipeline"][runner.index]["init_args"]
                arguments["finished_from"] = finished
            executor.pipeline[runner.index] = runner.step.changed(
                finished_from=finished, spent_before=self._spent_before()
            )
        return config, executor

    def _spent_before(self) -> tuple[float, int]:
        shared = {"max_cost", "max_total_tokens"} & self.settings.keys() - self.own.keys()
        before = NO_TOTALS
        if shared:
            for name, other in step_folders(self.folder.parent).items():
                if name != self.name:
                    before += other.state().run_totals
        cost = before.cost / 1e9 if "max_cost" in shared else 0.0
        return cost, before.tokens if "max_total_tokens" in shared else 0


def _example(schema: object) -> object:
    if not isinstance(schema, dict):
        return ""
    properties = schema.get("properties")
    if properties:
        return {name: _example(part) for name, part in properties.items()}
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}))]
    return _OF_TYPE.get(str(schema.get("type")))


def read_steps(short: Node, source: str) -> list[Step]:
    """Returns the steps in the order in which they run.

    Raises:
        ConfigError: a name, a query or the form is wrong.
    """
    given = short["steps"]
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{source}: steps: a mapping of names to steps; it is {given!r}.")
    if not isinstance(short.get("run_folder"), str) or "://" in short["run_folder"]:
        raise ConfigError(f"{source}: run_folder: steps need a folder of this machine.")
    yaml_config.refuse_unknown(short, [*short_form.settings()], source)
    root = Path(short["run_folder"]).expanduser()
    steps: dict[str, Step] = {}
    for name, node in given.items():
        label = f"{source}: steps.{name}"
        is_name = re.fullmatch(r"[A-Za-z]\w*", str(name)) and name not in _RESERVED
        if not is_name or name.lower() in map(str.lower, steps):
            raise ConfigError(
                f"{label}: take another name, of letters, digits and _, and none of "
                f"{', '.join(_RESERVED)}."
            )
        if not isinstance(node, dict):
            raise ConfigError(f"{label}: a mapping of settings, or of sql alone; it is {node!r}.")
        settings: Node = {}
        if "sql" in node:
            query: Query | None = short_form.read_query(node, label)
        else:
            settings = _settings({**short, **node}, label, root / name)
            query = _read_input(settings, f"{label}: input", steps)
        sources = []
        for table in query.tables if query else ():
            if table in steps:
                sources.append(steps[table])
            elif query and re.fullmatch(r"\w+", table):
                hint = did_you_mean(table, steps)
                raise ConfigError(f'{query.label}: there is no step "{table}" above it{hint}')
        steps[name] = Step(root / name, label, settings, query, sources, node)
    return [*steps.values()]


def _settings(settings: Node, label: str, folder: Path) -> Node:
    del settings["steps"]
    for name in _REFUSED.keys() & settings.keys():
        raise ConfigError(f"{label}: {name}: steps have none, because {_REFUSED[name]}.")
    monitoring = settings.get("monitoring") or {}
    run_name = f"{monitoring.get('run_name') or folder.parent.name}/{folder.name}"
    own = {"run_folder": str(folder), "output_format": "parquet"}
    return {**settings, **own, "monitoring": {**monitoring, "run_name": run_name}}


def _read_input(settings: Node, label: str, above: Mapping[str, Step]) -> Query | None:
    given = settings.get("input")
    key = settings.get("metadata_key", "rollout_results")
    if isinstance(given, dict):
        query = short_form.read_query(given, label)
        # The step's own results take this name.
        return replace(query, left_out=key) if settings.get("rollout_results", True) else query
    name = str(given or "")
    if name in above or (re.fullmatch(r"\w+", name) and not Path(name).exists()):
        sql = f'select {queries.without(key)} from "{name}"'
        return Query(label, sql, (name,))
    return None


# the run ------------------------------------------------------------------------------------------


def redo_steps(steps: Sequence[Step], names: Sequence[str]) -> None:
    """Moves steps, and those that depend on them, aside. A record has their new names, and comes
    first, so any start after a crash makes the moves that are left. Until all steps have run, the
    redo is under way: given again, it moves nothing that has begun anew.

    Raises:
        ConfigError: there is no such step, or its checkpoints are also elsewhere.
        CheckpointLocked: a process works on a step.
        StorageFailed: the record is damaged.
    """
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            raise ConfigError(f"--redo: {name} is no step{did_you_mean(name, known)}")
    root = steps[0].folder.parent
    record = root / _REDO
    named = list[str]()
    if record.exists():
        try:
            earlier = orjson.loads(record.read_bytes())
            named = [*earlier["named"]]
            moves = dict[str, str](earlier["moves"])
        except (KeyError, TypeError, ValueError):
            raise StorageFailed(
                f"{record} is damaged: it names the steps of a redo that is under way. Remove it, "
                "and run again; steps that have not begun anew need --redo again."
            ) from None
        _move(record, named, moves)
    anew = [name for name in names if name not in named]
    if not anew:
        return
    moves = dict[str, str]()
    with ExitStack() as stack:
        for step in steps:
            if step.name not in anew and not any(other.name in moves for other in step.sources):
                continue
            if step.settings.get("checkpoints_remote_dir"):
                raise ConfigError(
                    f"{step.label}: checkpoints_remote_dir: --redo does not move a mirror. Give "
                    "another mirror and another run_folder."
                )
            if step.state().is_at_work:
                raise CheckpointLocked(f"A process works on {step.folder}. Stop it, and run again.")
            for rank in layout.rank_folders(step.folder / "checkpoints"):
                stack.callback(Lock(rank / layout.LOCK).release)
            moves[step.name] = ""
            if step.folder.exists():
                moves[step.name] = files.free_name(step.folder, ".").name
        _move(record, [*named, *anew], moves)


def _move(record: Path, named: Sequence[str], moves: Mapping[str, str]) -> None:
    files.disk.replace(record, orjson.dumps({"named": named, "moves": moves}))
    root = record.parent
    for name, target in moves.items():
        folder = root / name
        if folder.exists() and not Path(root, target).exists():  # else an earlier start moved it
            files.disk.rename(folder, root / target)
            files.disk.sync_dir(root)
    # From here on, what was moved may be removed.
    files.disk.replace(record, orjson.dumps({"named": named, "moves": {}}))


def runs(
    steps: Sequence[Step], redo: Sequence[str] = (), is_worker: bool = False
) -> Iterator[Step]:
    """Yields each run. It must have run when the next is taken.

    Args:
        redo: steps that run anew, with those that depend on them.
        is_worker: others work on the steps at the same time.

    Raises:
        CheckpointLocked: another process runs the steps, and this is no worker.
        CheckpointMismatch: a row, a query or a setting has changed before a step that has begun.
        TooManyDeadLetters: dead letters keep the next step from beginning.
    """
    root = steps[0].folder.parent
    files.disk.make_dirs(root)
    with ExitStack() as stack:
        if not is_worker:
            stack.callback(Lock(root / _RUN_LOCK, "run").release)
        stack.callback(close_servers)
        with queries.locked(root / _LOCK):
            files.disk.replace(root / STEPS, orjson.dumps([step.name for step in steps]))
            redo_steps(steps, redo)
            for step in steps:
                if step.is_run:  # a mistake in its settings, or a change, costs nothing
                    plan = RunPlan(step.executor()[1])
                    if step.has_begun and step.has_input:
                        with _naming(step):
                            _compare(plan)
        for step in steps:  # steps that have run send no request
            with queries.locked(root / _LOCK), _naming(step):
                had_input = step.has_input
                step.prepare()
                if step.has_begun and not had_input:  # lost, and made anew
                    _compare(RunPlan(step.executor()[1]))
            kept = step.rows
            if kept is not None:
                logger.info(f"{step.label}: {plural(kept.rows, 'row')} in {kept.folder}")
                continue
            yield step
            reason = step.unfinished()
            if reason:
                raise TooManyDeadLetters(f"{step.label}: {reason}")
        files.disk.remove(root / _REDO)


def _compare(plan: RunPlan) -> None:
    earlier_runs.check_job(plan, dry_run=True)
    earlier_runs.check_inputs_unchanged(plan)


@contextmanager
def _naming(step: Step) -> Iterator[None]:
    try:
        yield
    except CheckpointMismatch as error:
        files.disk.remove(step.folder.with_name(_REDO))  # which cannot continue
        error.add_note(
            f"The first changed step: {step.label}. Undo the change, or run with --redo "
            f"{step.name}, for this step and what depends on it."
        )
        raise


# commands -----------------------------------------------------------------------------------------


def examine_steps(short: Node, source: str) -> Iterator[Finding]:
    """Checks the steps as ``doctor`` checks a run; of a run whose input is not there yet, only the
    settings.
    """
    for step in read_steps(short, source):
        if step.is_run:
            _, executor = step.executor()
            if step.has_input:
                for finding in preflight.doctor(executor):
                    yield replace(finding, subject=f"{step.name}: {finding.subject}")
        if all(source.has_known_columns() for source in step.sources):
            yield from run_check(step.name, _bind, step, property_name="query")
        else:
            text = "a rollout before it has no rows yet, so columns are not known."
            yield Finding("note", "query", f"{text} `run --sample 3` tries it.", step.name)


def _bind(step: Step) -> None:
    if step.query is not None:
        queries.columns_of(step.query, step.tables())


_Sampled = tuple[float | None, list[int] | None]
"""A step's sample: how many times its rows the run has (None: unknown), and the rows' ordinals in
the run (None: they are those that the sample has drawn).
"""
_WHOLE: _Sampled = (1.0, None)
_UNKNOWN: _Sampled = (None, [])


def sample_steps(short: Node, source: str, number: int) -> int:
    """Takes rows of the whole input through all steps, in a temporary folder. The answers stay with
    each step, as those of ``run --sample``.
    """
    sampled = dict[str, _Sampled]()
    codes = [0]
    with TemporaryDirectory(prefix="datatrove-ckpt-") as folder, ExitStack() as stack:
        stack.callback(close_servers)
        trial = read_steps({**short, "run_folder": folder}, source)
        for step, tried in zip(read_steps(short, source), trial, strict=True):
            tried.prepare()
            share, rows = _WHOLE
            if step.query is not None and step.sources:
                share, rows = _UNKNOWN
                if queries.takes_row_by_row(step.query, tried.tables()):
                    share, rows = sampled[step.sources[0].name]
            if tried.rows is None:
                say(f"{step.name}:")
                _, executor = step.executor(tried.folder / layout.KEPT_INPUT)
                sent, code = show_sample(executor, number, tried.folder, share, True, rows)
                codes.append(code)
                # Rows of several tasks have other numbers in the next step.
                rows = [ordinal for rank, ordinal in sent.places if rank == 0]
                if sent.whole is not None:
                    share = sent.whole.number.value / len(sent.documents)
            else:
                count = tried.rows.rows
                say(f"{step.name}: {plural(count, 'row') if count else 'no row reaches it'}")
            sampled[step.name] = share, rows
    return max(codes)


def run_steps(short: Node, arguments: argparse.Namespace) -> int:
    """Returns the exit code of the first step that is not finished."""
    source = arguments.config or "the command line"
    if arguments.sample is not None:
        return sample_steps(short, source, arguments.sample)
    steps = read_steps(short, source)
    if arguments.dry_run or arguments.print_config:
        for step in steps:
            say(f"--- # {step.name}{'' if step.is_run else ': a query'}")
            if step.is_run:
                run_job(*step.executor(), arguments)
        return 0
    command = without_flag(arguments.command, "--redo")  # which would move what it resumes
    try:
        for step in runs(steps, arguments.redo or (), arguments.worker):
            config, executor = step.executor()
            plan = RunPlan(executor)
            if plan.submits:
                again = (word for word in command if word != "--retry-dead-letters")
                executor.continue_with(shlex.join(again))
            retries = arguments.retry_dead_letters and step.state().delivered.dead > 0
            own = {**vars(arguments), "command": command, "retry_dead_letters": retries}
            with written_in(step.label):
                code = run_job(config, executor, argparse.Namespace(**own))
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
