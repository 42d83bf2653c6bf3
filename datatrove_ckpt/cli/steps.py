"""Steps: several runs in one file, with queries between them.

    run_folder: runs/qa           settings beside ``steps`` hold for each step
    model: m
    steps:
      answers: {input: docs/*.parquet, prompt: "{text}"}
      judged: {input: answers, prompt: "{answer}", answer: rating}
      best: {sql: "select id, answer from judged where rating = 'good'"}

Each step is an ordinary run in ``runs/qa/NAME/``, or a query, whose rows are in
``runs/qa/NAME/output/``. Nothing schedules: a step begins when those that it reads are finished.

A run that reads steps keeps its input in ``runs/qa/NAME/input/``, written before its first request.
What that was made from is its record: a start computes the query again if that has changed, and
refuses other rows. So the rows of two inputs never mix.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from datatrove.executor.base import PipelineExecutor
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.run_limits import RunTotals
from datatrove_ckpt.cli import short_form, yaml_config
from datatrove_ckpt.cli.job_input import SavedInput
from datatrove_ckpt.cli.output_commands import MOST, described
from datatrove_ckpt.cli.printing import fail, say
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import did_you_mean, plural, plural_is, without_flag
from datatrove_ckpt.common.lazy_pyarrow import pq
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.errors import (
    CheckpointLocked,
    CheckpointMismatch,
    ConfigError,
    InputError,
    LimitReached,
    TooManyDeadLetters,
    written_in,
)
from datatrove_ckpt.executors.local import close_servers
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder import earlier_runs, preflight, queries
from datatrove_ckpt.run_folder.documents import ShownDocument, select_rows
from datatrove_ckpt.run_folder.finding import Finding, run_check
from datatrove_ckpt.run_folder.queries import Query
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.run_folder.sample import estimate_lines, take_sample
from datatrove_ckpt.run_folder.steps import STEPS, StepFolder

Node = JsonObject
_REDO = "redo.json"
"""File in the run folder while ``--redo`` moves steps aside: the steps, and their new names."""
_LOCK = "steps.lock"
_RUNS = "it is not finished"
_POLL = 0.2  # seconds
_LIMITS = ("max_cost", "max_total_tokens")
"""Settings that hold for all steps together, where a step has none of its own."""
_FIRST = 20  # documents whose columns stand for those of all
_RESERVED = ("input", "output", "checkpoints", "logs")
_REFUSED = {
    "kubernetes": "a pod has no place for the queries between steps",
    "jobs": "a job's disk goes with it, and queries need the rows of the steps before",
}


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        label: names it in messages.
        settings: those of its run; empty for a query.
        query: makes its rows, or the input of its run; None: the input is files.
        sources: the steps that it reads.
        dead_letters: "leave": the steps after it begin although dead letters are left.
    """

    name: str
    label: str
    settings: Node
    query: Query | None
    sources: tuple[str, ...]
    dead_letters: str | None = None

    @property
    def is_run(self) -> bool:
        return bool(self.settings)


def read_steps(short: Node, source: str) -> list[Step]:
    """Returns the steps in the order in which they run.

    Raises:
        ConfigError: a name, a query or the form is wrong, or steps read each other in a circle.
    """
    given = short["steps"]
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{source}: steps: a mapping of names to steps; it is {given!r}.")
    for name, reason in _REFUSED.items():
        if any(name in node for node in (short, *given.values())):
            raise ConfigError(f"{source}: {name}: runs no steps, because {reason}.")
    if "input" in short or "sql" in short:
        raise ConfigError(f"{source}: input and sql: belong into a step.")
    if not isinstance(short.get("run_folder"), str) or "://" in short["run_folder"]:
        raise ConfigError(f"{source}: run_folder: steps need a folder of this machine.")
    own = ("steps", "run_folder", *_LIMITS)
    defaults = {key: value for key, value in short.items() if key not in own}
    lower = [str(name).lower() for name in given]
    steps = {}
    for name, node in given.items():
        label = f"{source}: steps.{name}"
        is_name = re.fullmatch(r"[A-Za-z]\w*", str(name)) and name not in _RESERVED
        if not is_name or lower.count(name.lower()) > 1:
            raise ConfigError(
                f"{label}: a step has a name of its own, of letters, digits and _, and none of "
                f"{', '.join(_RESERVED)}."
            )
        steps[name] = _read_step(name, label, node, defaults, [*given])
    order: dict[str, Step] = {}
    for name in steps:
        _put_in_order(name, steps, order, ())
    return [*order.values()]


def _read_step(name: str, label: str, node: object, defaults: Node, names: list[str]) -> Step:
    if not isinstance(node, dict):
        raise ConfigError(f"{label}: a mapping of settings, or of sql alone; it is {node!r}.")
    if "sql" in node:
        yaml_config.refuse_unknown(node, ["sql"], label)
        rows = queries.parse(str(node["sql"]), label)
        return Step(name, label, {}, rows, _sources(rows, names))
    settings = {"output_format": "parquet", **defaults, **node}
    dead_letters = settings.pop("dead_letters", None)
    if dead_letters not in (None, "stop", "leave"):
        raise ConfigError(f"{label}: dead_letters: stop or leave; it is {dead_letters!r}.")
    yaml_config.refuse_unknown(settings, [*short_form.settings()], label)
    given = settings.get("input")
    query: Query | None = None
    if isinstance(given, dict):
        yaml_config.refuse_unknown(given, ["sql"], f"{label}: input")
        query = queries.parse(str(given.get("sql", "")), f"{label}: input")
    elif given in names:
        key = settings.get("metadata_key", "rollout_results")
        quoted = key.replace("'", "''")
        sql = f"select columns(lambda name: name <> '{quoted}') from \"{given}\""
        query = Query(f"{label}: input", sql, (str(given),))
    elif given is None or (re.fullmatch(r"\w+", str(given)) and not Path(str(given)).exists()):
        hint = did_you_mean(given, names) or f"; the steps are {', '.join(names)}."
        raise ConfigError(f'{label}: input: "{given}" is neither a step nor a file{hint}')
    return Step(name, label, settings, query, _sources(query, names), dead_letters)


def _added_columns(settings: Node) -> dict[str, str]:
    """Returns the types of the columns that a run adds to those of its input."""
    answer = str(settings.get("answer") or "answer")
    kind = queries.type_of_schema(settings.get("json_schema"))
    results = queries.struct({"text": "VARCHAR", "finish_reason": "VARCHAR"})
    columns = {}
    if settings.get("rollout_results", True):
        columns[str(settings.get("metadata_key", "rollout_results"))] = f"{results}[]"
    if settings.get("task") == "embed":
        return {**columns, str(settings.get("column", "embedding")): "FLOAT[]"}
    if not settings.get("explode"):
        return {**columns, answer: kind}
    schema = settings.get("json_schema")
    items = schema.get("items") if isinstance(schema, dict) else None
    properties = items.get("properties") if isinstance(items, dict) else None
    columns["n"] = "BIGINT"
    if not properties:
        return {**columns, answer: kind.removesuffix("[]")}
    return {**columns, **{name: queries.type_of_schema(part) for name, part in properties.items()}}


def _sources(query: Query | None, names: list[str]) -> tuple[str, ...]:
    if query is None:
        return ()
    sources = []
    for table in query.tables:
        if table in names:
            sources.append(table)
        elif re.fullmatch(r"\w+", table):
            hint = did_you_mean(table, names) or f"; the steps are {', '.join(names)}."
            raise ConfigError(f'{query.label}: there is no step "{table}"{hint}')
    return tuple(sources)


def _put_in_order(
    name: str, steps: Mapping[str, Step], order: dict[str, Step], path: tuple[str, ...]
) -> None:
    if name in path:
        circle = " -> ".join([*path[path.index(name) :], name])
        raise ConfigError(f"{steps[name].label}: the steps read each other in a circle: {circle}.")
    for other in steps[name].sources:
        _put_in_order(other, steps, order, (*path, name))
    order.setdefault(name, steps[name])


class StepsJob:
    """A job of steps.

    Args:
        short: the job in the short form.
        source: its file, for messages.

    Raises:
        ConfigError: see ``read_steps``.
    """

    def __init__(self, short: Node, source: str) -> None:
        self.source = source
        self.steps = read_steps(short, source)
        self.root = Path(short["run_folder"]).expanduser()
        self._by_name = {step.name: step for step in self.steps}
        self.limits = {name: short[name] for name in _LIMITS if short.get(name) is not None}
        self._rows: dict[str, tuple[str, str]] = {}

    # what is on disk -----------------------------------------------------------------------------

    def folder(self, step: Step) -> Path:
        return self.root / step.name

    def has_begun(self, step: Step) -> bool:
        return StepFolder(self.folder(step)).has_begun

    def spent(self, name: str, but: Step | None = None) -> float:
        """Returns how much of a limit the steps have used.

        Args:
            but: a step that does not count.
        """
        totals = RunTotals()
        for step in self.steps:
            state = None if step is but else StepFolder(self.folder(step)).state()
            if state is not None:
                totals += state.run_totals
        return totals.cost / 1e9 if name == "max_cost" else totals.tokens

    def unfinished(self, step: Step) -> str:
        """Returns why the steps after this one may not begin; "" if they may."""
        folder = StepFolder(self.folder(step))
        state = folder.state()
        if state is None:
            return "it has not run" if folder.rows is None else ""
        reached = state.limits.reached(state.run_totals)
        if not state.is_finished and (reached is None or reached.setting != "until"):
            return _RUNS
        if not state.delivered.read:
            return "no file of its input has a document"
        dead = state.delivered.dead
        if dead and step.dead_letters != "leave":
            return (
                f"{plural_is(dead, 'dead letter')} left. Retry them (--retry-dead-letters), or go "
                f"on without them: dead_letters: leave, in steps.{step.name}."
            )
        return ""

    def rows_of(self, step: Step) -> tuple[str, str]:
        """Returns the digest of a finished step's rows, and a SELECT of them."""
        if step.name not in self._rows:
            self._rows[step.name] = self._read_rows(step)
        return self._rows[step.name]

    def _read_rows(self, step: Step) -> tuple[str, str]:
        folder = StepFolder(self.folder(step))
        return folder.digest(), select_rows(folder) or self.without_rows(step)

    def without_rows(self, step: Step) -> str:
        """Returns a SELECT of no row with the columns of a step's output, as far as they are known:
        what a rollout adds, nobody knows before it has rows.
        """
        kept = queries.kept_rows(self.folder(step) / layout.KEPT_INPUT)
        if kept is not None:
            inner = kept.select
        elif step.query is None:
            inner = f"select {queries.nulls(self._columns_of_files(step))}"
        else:
            names = step.sources
            tables = [f"{name} as ({self.without_rows(self._by_name[name])})" for name in names]
            inner = f"select * from ({step.query.sql}\n)"
            if tables:
                inner = f"with {', '.join(tables)} {inner}"
        if not step.is_run:
            return inner
        columns = queries.columns_of(Query(step.label, inner), {})
        added = {}
        for name, kind in _added_columns(step.settings).items():
            added[f"{name}_2" if name in columns else name] = kind
        return f"select *, {queries.nulls(added)} from ({inner}) where false"

    def _columns_of_files(self, step: Step) -> dict[str, str]:
        """Returns the types of the columns of an input of files, by its first documents."""
        _, executor = self.executor(step)
        types = {"id": "VARCHAR", "text": "VARCHAR"}
        for document in islice(executor.pipeline[0](None, 0, 1), _FIRST):
            for name, value in document.metadata.items():
                if types.get(name, "VARCHAR") == "VARCHAR":
                    types[name] = queries.type_of_value(value)
        return types

    def bind(self) -> Iterator[Finding]:
        """Checks each query by the columns of the steps that it reads."""
        unknown: set[str] = set()
        for step in self.steps:
            if unknown.intersection(step.sources):
                text = "a rollout before it has no rows yet, so columns are not known."
                yield Finding("note", "query", f"{text} `run --sample 3` tries it.", step.name)
                unknown.add(step.name)
            elif step.query is not None:
                yield from run_check(step.name, self._bind, step, property_name="query")
            rollout = step.settings.get("rollout")
            is_ready_made = rollout is None or rollout in yaml_config.SHORT_NAMES
            if not is_ready_made and self.unfinished(step):
                unknown.add(step.name)

    def _bind(self, step: Step) -> Iterator[Finding]:
        assert step.query is not None
        tables = {}
        for name in step.sources:
            source = self._by_name[name]
            if self.unfinished(source):
                tables[name] = self.without_rows(source)
            else:
                tables[name] = self.rows_of(source)[1]
        names = ", ".join(queries.columns_of(step.query, tables))
        yield Finding("ok", "query", f"its columns are {names}.")

    # before a step -------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Makes the rows of a query, or the input of a run.

        Raises:
            CheckpointMismatch: a run has begun with other rows.
        """
        folder = self.folder(step)
        has_begun = self.has_begun(step)
        if step.is_run and not has_begun and queries.kept_rows(folder / "output"):
            files.disk.remove_tree(folder / "output")  # of a query, or of a start without rows
        if not step.is_run and has_begun:
            raise ConfigError(f"{step.label}: {folder} holds a run. Give the query another name.")
        if step.query is None:
            return
        digests = {name: self.rows_of(self._by_name[name])[0] for name in self._before(step)}
        tables = {name: self.rows_of(self._by_name[name])[1] for name in step.sources}
        made_from = {"sql": step.query.sql, "steps": digests}
        if not step.is_run:
            saved = SavedInput(folder / "output", False, None)
            saved.save_query(step.query, tables, made_from)
            return
        mirror = step.settings.get("checkpoints_remote_dir")
        saved = SavedInput(folder / layout.KEPT_INPUT, has_begun, mirror)
        kept = saved.save_query(step.query, tables, made_from)
        saved.record_folder()
        if not (kept.rows or has_begun):
            nothing = Query(step.label, self.without_rows(step))
            queries.make_rows(nothing, {}, folder / "output", made_from)

    def _before(self, step: Step) -> list[str]:
        """Returns all steps on which a step depends, in order."""
        needed = set(step.sources)
        for other in reversed(self.steps):
            if other.name in needed:
                needed.update(other.sources)
        return [other.name for other in self.steps if other.name in needed]

    def job(self, step: Step) -> Node:
        """Returns the run of a step in the short form."""
        folder = self.folder(step)
        job = {"server_log_folder": f"{self.root}/logs/server", **step.settings}
        for name, limit in self.limits.items():
            rest = limit - self.spent(name, step)
            if rest > 0:
                job.setdefault(name, rest)
        if step.settings.get("endpoint") or step.settings.get("endpoints"):
            del job["server_log_folder"]
        job["run_folder"] = str(folder)
        if step.query is not None:
            given = folder / layout.KEPT_INPUT
            job["input"] = f"{given}/*.parquet"
            if not given.exists():  # so that its settings can be checked
                job.setdefault("tasks", 1)
        return job

    def executor(self, step: Step, given: str | None = None) -> tuple[Node, PipelineExecutor]:
        """Returns the run of a step in the long form, and its executor. It takes over the answers
        of the folders that ``redo`` has moved aside, if its settings are theirs.

        Args:
            given: the files of another input.
        """
        job = self.job(step)
        if given is not None:
            job["input"] = given
        named = job.get("finished_from") or []
        old = [named] if isinstance(named, str) else [*named]
        with written_in(step.label):
            for folder in self._moved_aside(step):
                parts = [str(folder / part) for part in ("output", "checkpoints")]
                candidate = short_form.expand({**job, "finished_from": parts})
                plan = RunPlan(yaml_config.build(candidate))
                try:
                    earlier_runs.check_job(plan, dry_run=True)
                    old += parts
                except (CheckpointMismatch, ConfigError) as error:
                    logger.warning(f"{folder}: its answers are not taken over: {error}")
            if old:
                job["finished_from"] = old
            config = short_form.expand(job)
            executor = yaml_config.build(config)
        executor.keeps_servers = True  # for the next step
        return config, executor

    def _moved_aside(self, step: Step) -> list[Path]:
        """Returns the folders with answers, the newest first."""
        pattern = re.compile(rf"{step.name}\.(\d+)")
        names = [path.name for path in self.root.glob(f"{step.name}.*")]
        numbers = sorted(
            (int(m[1]) for name in names if (m := pattern.fullmatch(name))), reverse=True
        )
        folders = [self.root / f"{step.name}.{number}" for number in numbers]
        return [
            folder
            for folder in folders
            if (folder / "output").is_dir()
            and (folder / "checkpoints").is_dir()
            and (state := StepFolder(folder).state()) is not None
            and state.together.done.written
        ]

    def redo(self, names: Sequence[str]) -> None:
        """Moves steps, and those that depend on them, aside. A start after a kill continues that.

        Raises:
            ConfigError: there is no such step, or its checkpoints are also elsewhere.
            CheckpointLocked: a process works on a step.
        """
        path = self.root / _REDO
        for name in names:
            if name not in self._by_name:
                raise ConfigError(f"--redo: {name} is no step{did_you_mean(name, self._by_name)}")
        again = [
            step for step in self.steps if {step.name, *self._before(step)}.intersection(names)
        ]
        for step in again:
            if step.settings.get("checkpoints_remote_dir"):
                raise ConfigError(
                    f"{step.label}: checkpoints_remote_dir: --redo does not move a mirror. Give "
                    "another mirror and another run_folder."
                )
        moves = json.loads(path.read_bytes()) if path.exists() else {}
        for step in reversed(again):  # no step is ever beside newer input
            folder = self.folder(step)
            if folder.exists():
                moves.setdefault(step.name, files.free_name(folder, ".").name)
        with ExitStack() as stack:
            held = {name: self._hold(self.root / name, stack) for name in moves}
            if moves:
                files.disk.replace(path, json.dumps(moves).encode())
            for name, new in moves.items():
                if (self.root / name).exists():
                    files.disk.rename(self.root / name, self.root / new)
                for lock in held[name]:
                    lock.move(self.root / name, self.root / new)
            files.disk.sync_dir(self.root)
            files.disk.remove(path)

    def _hold(self, folder: Path, stack: ExitStack) -> list[Lock]:
        """Locks all tasks of a step."""
        checkpoints = folder / "checkpoints"
        state = StepFolder(folder).state()
        if state is not None and state.is_at_work:
            raise CheckpointLocked(
                f"A process works on {folder}. Wait for its end, or stop it, and give the same "
                "command again."
            )
        locks = []
        for rank in layout.rank_folders(checkpoints):
            was_there = (rank / layout.LOCK).exists()
            lock = Lock(rank / layout.LOCK)
            stack.callback(lock.release, remove=not was_there)
            locks.append(lock)
        return locks

    # the run -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compares what has begun with the job, before any request.

        Raises:
            CheckpointMismatch: a row, a query or a setting has changed. Names the first such step.
        """
        for step in self.steps:
            with _naming(step):
                if not any(self.unfinished(self._by_name[name]) for name in self._before(step)):
                    self.prepare(step)
                if step.is_run:
                    plan = RunPlan(self.executor(step)[1])
                    if self.has_begun(step):
                        earlier_runs.check_job(plan, dry_run=True)
                        earlier_runs.check_inputs_unchanged(plan)

    def runs(self, redo: Sequence[str] = ()) -> Iterator[Step]:
        """Yields each run. It must have run when the next is taken.

        Args:
            redo: steps that run anew, with those that depend on them.

        Raises:
            CheckpointMismatch: see ``check``.
            TooManyDeadLetters: dead letters keep the next step from beginning.
        """
        files.disk.make_dirs(self.root)
        with self._locked():
            listed = [step.name for step in self.steps]
            files.disk.replace(self.root / STEPS, orjson.dumps(listed))
            self.redo(redo)
            self.check()
        try:
            for step in self.steps:
                yield from self._run(step)
        finally:
            close_servers()

    def _run(self, step: Step) -> Iterator[Step]:
        with self._locked(), _naming(step):
            self.prepare(step)
        kept = queries.kept_rows(self.folder(step) / "output")
        if step.is_run and kept is None:
            for name, limit in self.limits.items():
                spent = self.spent(name)
                if spent >= limit and name not in step.settings and self.unfinished(step):
                    raise LimitReached(
                        f"{limit:g} is reached: all steps together have taken {spent:.6g}. The "
                        "same command with a higher limit continues.",
                        setting=name,
                    )
            yield step
            self._rows.pop(step.name, None)
            reason = self.unfinished(step)
            if reason:
                raise TooManyDeadLetters(f"{step.label}: {reason}")
        elif kept is not None and not kept.rows:
            logger.warning(f"{step.label}: no row reaches it, so its output has none.")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one process at a time prepare steps."""
        lock = None
        while lock is None:
            try:
                lock = Lock(self.root / _LOCK)
            except CheckpointLocked:
                time.sleep(_POLL)
        try:
            yield
        finally:
            lock.release()


def examine_steps(short: Node, source: str) -> list[Finding]:
    """Checks the steps as ``doctor`` checks a run; of a run whose input is not there yet, only the
    settings.
    """
    sys.path.insert(0, str(Path.cwd()))
    job = StepsJob(short, source)
    findings: list[Finding] = []
    for step in job.steps:
        if step.is_run:
            _, executor = job.executor(step)
            if step.query is None or StepFolder(job.folder(step)).given is not None:
                for finding in preflight.doctor(executor):
                    subject = f"{step.name}: {finding.subject}"
                    findings.append(replace(finding, subject=subject))
    return [*findings, *job.bind()]


class StepsSample:
    """Takes the first rows through all steps, in a temporary folder. The answers stay with each
    step, as those of ``run --sample``.

    Attributes:
        tables: a SELECT of the rows that each step has written.
        rows: their number.
        whole: the number that the whole step would write; None if that is not known.
    """

    def __init__(self, job: StepsJob, number: int, folder: Path) -> None:
        self.job = job
        self.number = number
        self.folder = folder
        self.tables: dict[str, str] = {}
        self.rows: dict[str, int] = {}
        self.whole: dict[str, float | None] = {}

    def take(self, step: Step) -> Iterator[str]:
        """Takes rows through a step, and yields lines about them."""
        name = step.name
        given = None
        whole = None
        if step.query is not None:
            tables = {source: self.tables[source] for source in step.sources}
            part = layout.KEPT_INPUT if step.is_run else "output"
            made_from: Node = {"sql": step.query.sql, "steps": {}}
            kept = queries.make_rows(step.query, tables, self.folder / name / part, made_from)
            whole = self._whole(step, kept.rows)
            if not step.is_run or not kept.rows:
                self.tables[name] = kept.select if not step.is_run else self.job.without_rows(step)
                self.rows[name] = kept.rows
                self.whole[name] = whole
                yield f"{name}: {plural(kept.rows, 'row') if kept.rows else 'no row reaches it'}"
                return
            given = f"{kept.folder}/*.parquet"
        _, executor = self.job.executor(step, given)
        plan = RunPlan(executor)
        with log_disabled("datatrove_ckpt.generation.rank"):
            sent = take_sample(plan, self.number, self.folder / name, writes_rows=True)
        documents = sent.documents
        if not documents:
            raise InputError(f"{step.label}: no file of its input has a document.")
        if step.query is None and sent.total is not None:
            whole = len(documents) * sent.total / sum(sent.sizes)
        paths = sorted(map(str, (self.folder / name / "output").glob("*.parquet")))
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
        self.rows[name] = rows
        self.tables[name] = queries.reads(paths) if paths else self.job.without_rows(step)
        self.whole[name] = whole and whole * rows / len(documents)
        yield f"{name}: {plural(len(documents), 'document')} in, {plural(rows, 'row')} out"
        for number, (document, requests) in enumerate(documents, 1):
            shown = ShownDocument(str(document.id), requests[0].question, requests[-1].answer_text)
            yield described(number, shown, "question", MOST)
        if whole is None:
            yield "What the whole step takes is unknown: a query before it groups or joins."
        else:
            sizes = [1.0] * len(documents)
            sample = replace(sent, sizes=sizes, total=max(whole, float(len(documents))))
            yield from estimate_lines(sample, plan.runners[0].step)

    def _whole(self, step: Step, rows: int) -> float | None:
        """Returns how many rows a query gives, by the rows of the sample that it has kept."""
        assert step.query is not None
        if not step.sources:
            return rows
        (first, *others) = step.sources
        whole = self.whole[first]
        if others or whole is None or not step.query.is_filter or not self.rows[first]:
            return None
        return whole * rows / self.rows[first]


def sample_steps(short: Node, source: str, number: int) -> int:
    """Takes the first rows through all steps. Returns the exit code."""
    sys.path.insert(0, str(Path.cwd()))
    with TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        job = StepsJob(short, source)
        sample = StepsSample(job, number, Path(folder))
        try:
            for step in job.steps:
                for line in sample.take(step):
                    say(line)
        finally:
            close_servers()
    missed = [name for name, rows in sample.rows.items() if not rows]
    if missed:
        say(f"No row is left after: {', '.join(missed)}.")
    return 0


@contextmanager
def _naming(step: Step) -> Iterator[None]:
    try:
        yield
    except CheckpointMismatch as error:
        error.add_note(
            f"This is the first step that has changed: {step.label}. Undo the change; or run with "
            f"--redo {step.name}, which runs this step and what depends on it anew, and asks only "
            "for rows that have changed."
        )
        raise


def run_steps(
    short: Node,
    arguments: argparse.Namespace,
    run_job: Callable[[Node, PipelineExecutor, argparse.Namespace], int],
) -> int:
    """Runs the steps of a file. Returns the exit code of the first that is not finished."""
    if arguments.sample is not None:
        return sample_steps(short, arguments.config or "the command line", arguments.sample)
    for flag in ("dry_run", "print_config", "cancel", "no_wait"):
        if getattr(arguments, flag):
            raise ConfigError(f"--{flag.replace('_', '-')}: is for a run without steps.")
    sys.path.insert(0, str(Path.cwd()))  # rollout: my_module.my_rollout
    job = StepsJob(short, arguments.config or "the command line")
    again = without_flag(arguments.command, "--redo")
    again = [word for word in again if word != "--retry-dead-letters"]
    try:
        for step in job.runs(arguments.redo or ()):
            config, executor = job.executor(step)
            plan = RunPlan(executor)
            if plan.submits:
                executor.continue_with(shlex.join(again))
            state = StepFolder(job.folder(step)).state()
            has_dead = state is not None and state.delivered.dead > 0
            retries = arguments.retry_dead_letters and has_dead
            own = argparse.Namespace(**{**vars(arguments), "retry_dead_letters": retries})
            with written_in(step.label):
                code = run_job(config, executor, own)
            is_submitted = plan.submits and executor.array_id is not None
            if code or is_submitted or (arguments.worker and job.unfinished(step) == _RUNS):
                return code
    except LimitReached as error:
        return fail(error, code_of_rank(error))
    return 0
