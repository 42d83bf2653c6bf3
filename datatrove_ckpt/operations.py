"""What the commands ``migrate``, ``fork``, ``relocate`` and ``doctor`` do, for an executor of a script.

None of them runs the executor; all may be datatrove's or ours. They print nothing, and return what they found. Of Slurm
they ask nothing: cancel what waits in a queue first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.checkpoint.identity import Change, RunIdentity, compare
from datatrove_ckpt.checkpoint.ledger import Want, read_ranks
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.maintenance import fork as forks
from datatrove_ckpt.maintenance.relocate import Relocation, carry_out, plan_relocation
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.maintenance.where import Place, open_place, restored, upload
from datatrove_ckpt.preflight.checks import Finding
from datatrove_ckpt.preflight.doctor import examine
from datatrove_ckpt.preflight.migration import Findings, Migration
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.runner import InferenceRunner

NOT_ABOUT_IT = ("datatrove", "datatrove_ckpt")  # their logs are about another run, or about a copy of it


def migrate(
    executor: PipelineExecutor,
    folder: str | Path | None = None,
    logging_dir: str | None = None,
    lacking_are_dropped: bool = False,
    any_text: bool = False,
    dry_run: bool = False,
) -> Findings:
    """Takes over an interrupted run of datatrove's own ``InferenceRunner``. Then run the executor.

    Args:
        executor: with our ``InferenceRunner``, and the input, steps, tasks and output of that run.
        folder: its ``checkpoints_local_dir``; None: the executor's.

    The other arguments, and errors: see ``Migration``.
    """
    root = folder or RunPlan(executor).only_runner("migrate").step.checkpoints_root
    with log_disabled(*NOT_ABOUT_IT):
        return Migration(executor, Path(root).expanduser(), logging_dir, lacking_are_dropped, any_text, dry_run).run()


def doctor(executor: PipelineExecutor) -> list[Finding]:
    """Checks folders, input, servers and limits before a run. What would fail has the state "problem"."""
    with log_disabled(*NOT_ABOUT_IT):
        return [*examine(executor)]


def relocate(executor: PipelineExecutor, *, sizes_only: bool = False, dry_run: bool = False) -> Relocation:
    """Lets a copied checkpoint continue where its output was copied to.

    Args:
        executor: with the folders of the copy.
        sizes_only: compare names and sizes, and read no output.

    Returns:
        What was changed, or would be. With ``obstacles`` nothing was: the copy is not complete.

    Raises:
        ConfigError: there is no checkpoint.
        CkptError: see ``carry_out`` of ``maintenance/relocate.py``.
    """
    with open_place(type(executor).__name__, content_of(executor), trusted=True) as named, restored(named) as place:
        report = verify(place.folder, place.output, not sizes_only, [place.what])
        plan = plan_relocation(report, is_mirror=place.is_copy)
        if not (dry_run or plan.obstacles or plan.is_done):
            carry_out(plan)
            upload(place, plan.ranks)
    return plan


def fork(
    executor: PipelineExecutor, source: str | Path, *, keep_answers: bool = True, dry_run: bool = False
) -> forks.Fork:
    """Makes the checkpoint of a new run, with what is still valid of another one. Then run the executor.

    Args:
        executor: of the new run, with folders of its own and what is changed.
        source: the other run: its run folder, checkpoint folder or mirror.
        keep_answers: use those whose final payload is equal.

    Raises:
        ConfigError: the new run is not new, or has another number of tasks.
        CkptError: see ``maintenance/fork.py``.
    """
    new = NewRun.of(executor, type(executor).__name__)
    with open_place(str(source), trusted=True) as named, forking(named, new, keep_answers) as (_, _, found, folder):
        if not dry_run:
            new.put_in_place(folder)
    return found


def content_of(executor: PipelineExecutor) -> dict[str, Any]:
    """What a YAML file in the long form would say of the folders and the size of the job, for ``open_place``."""
    plan = RunPlan(executor)
    pipeline = [{"init_args": _settings(step) if isinstance(step, InferenceRunner) else {}} for step in plan.pipeline]
    logging_dir = str(plan.logging_dir.resolve_paths(""))
    arguments = {"tasks": plan.tasks, "logging_dir": logging_dir, "pipeline": pipeline}
    return {"executor": {"class_path": plan.name, "init_args": arguments}}


def _settings(step: InferenceRunner) -> dict[str, object]:
    writer = {"init_args": {"output_folder": str(step.output_writer.output_folder.resolve_paths(""))}}
    names = ("checkpoints_local_dir", "checkpoints_remote_dir", "records_per_chunk")
    return {"output_writer": writer, **{name: getattr(step, name) for name in names}}


# the new run of a fork ------------------------------------------------------------------------------------------------


@dataclass
class NewRun:
    """The run to start.

    Attributes:
        folder: its ``checkpoints_local_dir``; None: its tasks run as jobs, so it has a mirror only.
        name: what people call its executor: a YAML file, a script; None: only the folder was given.
        identity: what it will be, if there is an executor.
        mirror: its ``checkpoints_remote_dir``, likewise.
        logging_dir: its executor's, likewise.
        changes: what it has otherwise than the other run, once they were compared.
    """

    folder: Path | None
    name: str | None = None
    identity: RunIdentity | None = None
    mirror: str | None = None
    logging_dir: str = ""
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def of(cls, executor: PipelineExecutor, name: str) -> NewRun:
        """
        Raises:
            ConfigError: none of its steps keeps a checkpoint, or several do.
        """
        plan = RunPlan(executor)
        kept = [runner for runner in plan.runners if runner.step.checkpoints_local_dir]
        if len(kept) != 1:
            raise ConfigError(
                f"{name}: {len(kept)} of its steps keep a checkpoint. Name the new checkpoint folder instead of "
                "the file."
            )
        step, logs = kept[0].step, str(plan.logging_dir.resolve_paths(""))
        mirror = step.checkpoints_remote_dir
        folder = None if plan.as_jobs and mirror else step.checkpoints_root
        return cls(folder, name, kept[0].identity, mirror, logs)

    def compare(self, run: forks.Source, place: Place) -> None:
        """Finds out what is changed.

        Raises:
            ConfigError: it has a folder of the other run, or another number of tasks.
        """
        if self.identity is None:
            return
        self.changes, settings = compare(run.settings, self.identity), self.identity.fields
        changed = {change.field: change for change in self.changes}
        if "tasks" in changed:
            raise ConfigError(
                f"{self.name}: tasks: {changed['tasks'].shown_old} -> {changed['tasks'].shown_new}. Each task's share "
                "of the input would be another one, so nothing could be kept. Leave tasks as they are, or start a new "
                "run; or fork first, start each task once, then deal the rest out with `datatrove-ckpt reshard`."
            )
        output = str(settings["output_folder"])
        if (forks.real_place(output), settings["output_filename"]) in run.outputs:
            raise ConfigError(
                f"{self.name}: output_folder: {output} is that of {place.what}. Choose another one: the new run would "
                "write over the other one's files."
            )
        if _is_used(self.logging_dir, place.logging_dir):
            raise ConfigError(
                f"{self.name}: logging_dir: {self.logging_dir} is another run's: datatrove skips the tasks that it "
                "marks as complete there. Choose another one."
            )
        if self.mirror is not None:
            forks.check_mirror(self.mirror)

    def put_in_place(self, folder: Path) -> None:
        """Makes what was built in ``folder`` its checkpoint."""
        if self.mirror is not None:
            forks.upload(folder, self.mirror)
        if self.folder is not None:
            forks.put_in_place(folder, self.folder)


@contextmanager
def forking(named: Place, new: NewRun, keep_answers: bool) -> Iterator[tuple[Place, forks.Source, forks.Fork, Path]]:
    """Compares the runs, and builds the new one's checkpoint in a folder that is removed at the end.

    Raises:
        ConfigError, CkptError: see ``NewRun.compare`` and ``maintenance/fork.py``.
    """
    with restored(named) as place, log_disabled(*NOT_ABOUT_IT), TemporaryDirectory(prefix="datatrove-ckpt-") as own:
        source = place.what if place.is_copy else str(place.folder.absolute())
        forks.check_source(place.folder)
        run = forks.Source.read(place.folder, list(read_ranks(place.folder, Want.SETTINGS)))
        new.compare(run, place)
        target = new.folder or Path(own, "fork")
        forks.check_target(place.folder, target)
        why = run.why_unusable(new.identity) if keep_answers else None
        with forks.built(place.folder, source, target, why) as (found, folder):
            yield place, run, found, folder


def _is_used(logging_dir: str, other: str | None) -> bool:
    """Whether it is the other run's, as far as a file tells that, or has markers of finished tasks."""
    here = forks.real_place(logging_dir)
    if other is not None and here == forks.real_place(other):
        return True
    markers = Path(here, "completions")
    return "://" not in here and markers.is_dir() and any(markers.iterdir())
