"""Checks a job before and after its run, in the order of a run.

A run raises the first finding that refuses, before it starts anything; doctor prints all.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.readers.base import BaseReader
from datatrove.utils.stats import PipelineStats
from loguru import logger

from datatrove_ckpt.checkpoint.job_file import record_output_folder
from datatrove_ckpt.checkpoint.rank_summary import Include, JobTotals
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError, InputError, TooManyDeadLetters
from datatrove_ckpt.generation.final_stats import lines_with_error
from datatrove_ckpt.generation.recorded_documents import RecordedDocuments
from datatrove_ckpt.generation.replay import mismatch, replay_all, why_not_replayed
from datatrove_ckpt.mirror import restore
from datatrove_ckpt.process.streams import flush_streams, open_streams
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder import earlier_runs
from datatrove_ckpt.run_folder.environment_checks import check_environment, check_hub
from datatrove_ckpt.run_folder.finding import (
    REMOTE_SECONDS,
    Finding,
    FindingState,
    run_check,
    with_timeout,
)
from datatrove_ckpt.run_folder.run_plan import (
    RunnerPlan,
    RunPlan,
    WrongMarker,
    note_workers,
    refuse_without_claims,
)


def doctor(executor: PipelineExecutor) -> list[Finding]:
    """Checks folders, input, servers and limits before a run.

    A finding of what would fail has the state "problem".
    """
    plan = RunPlan(executor, for_doctor=True)
    with log_disabled("datatrove", "datatrove_ckpt"):
        findings = list(check_environment(plan))
        is_reached = not any(
            (finding.state, finding.what) == ("problem", "reachable")
            and finding.subject.endswith("output")
            for finding in findings
        )
        return [*findings, *run_check("job", _doctor_earlier_runs, plan, is_reached)]


def _doctor_earlier_runs(plan: RunPlan, with_output: bool) -> Iterator[Finding]:
    """Compares the job with earlier runs, unless a run would restore from a mirror first."""
    for runner, root in plan.with_checkpoints:
        mirror = runner.step.checkpoints_remote_dir
        if mirror is None:
            continue
        names = with_timeout(partial(restore.find_outdated, mirror, root, needed=()), mirror)
        if names:
            text = (
                f"another node has continued {plural(len(names), 'task')}. A run restores from "
                f"{mirror} first, so the output is not compared."
            )
            yield Finding("warning", "folder", text, "checkpoints")
            return
    with plan.with_mirrors() as seen:
        check = comparisons(seen, with_output)
        yield from with_timeout(lambda: [*check], "what earlier runs left")


def comparisons(plan: RunPlan, with_output: bool = True) -> Iterator[Finding]:
    """Compares a job with what earlier runs have left. Restores ranks from mirrors, and makes
    missing repositories on the hub, but not for doctor.
    """
    checks: list[tuple[str, str, Callable[[RunPlan], Iterable[Finding] | None]]] = [
        ("job", "earlier runs", _find_markers),
        ("input", "of finished tasks", earlier_runs.check_inputs_unchanged),
    ]
    if plan.for_doctor:
        checks.append(("rollout", "replay check", _replay))
    if not plan.for_doctor:
        checks.append(("output", "reachable", check_hub))
    if with_output:
        checks.append(("output", "of earlier runs", earlier_runs.compare_outputs))
    for subject, property_name, check in checks:
        findings = [*run_check(subject, check, plan, property_name=property_name)]
        yield from findings or [Finding("ok", property_name, "nothing differs.", subject)]


def _find_markers(plan: RunPlan) -> Iterator[Finding]:
    markers = earlier_runs.check_job(plan, plan.for_doctor)
    if markers:
        text = f"{markers[0].text} A run removes the marker and runs the task."
        if len(markers) > 1:
            text += f" There are {len(markers)} such tasks."
        yield Finding("warning", "earlier runs", text, markers=markers)


def _replay(plan: RunPlan) -> Iterator[Finding]:
    for runner, root in plan.with_checkpoints:
        step = runner.step
        recorded = RecordedDocuments(root)
        why_not = why_not_replayed(step) or recorded.void
        if not recorded.names():
            why_not = why_not or "no document is recorded yet"
        if why_not:
            state: FindingState = "note" if recorded.void else "ok"
            yield Finding(state, "replay check", f"nothing is replayed: {why_not}.")
            continue
        verdict = replay_all(step, root, REMOTE_SECONDS / 2)
        if verdict.real and not step.accept_changes:
            error = mismatch(verdict)
            yield Finding("problem", "replay check", str(error), error=error)
        else:
            state = "ok" if verdict.is_same else "warning"
            yield Finding(state, "replay check", f"{verdict}.")


# What a run does with findings --------------------------------------------------------------------


def check_before_run(plan: RunPlan) -> None:
    """Makes all checks that need more than the settings. Starts nothing, and records in each runner
    the steps before it.

    Raises:
        ConfigError: a setting cannot work on this machine, or with the others.
        CheckpointMismatch: markers, checkpoints or the input of finished ranks are another run's.
        OutputFailed: the output's repository on the hub cannot be written to.
    """
    note_workers(plan.workers, plan.tasks)
    _refuse(check_environment(plan))
    wrong = _refuse(comparisons(plan))
    note_steps(plan)
    for runner, root in plan.with_checkpoints:
        record_output_folder(root, runner.step.output_writer.output_folder.resolve_paths(""))
        runner.step.limits.note(root)
        mirror = runner.step.checkpoints_remote_dir
        if mirror is not None and root.is_dir():
            # datatrove skips complete ranks, so they are uploaded here.
            restore.upload_finished_ranks(mirror, root)
    remove_markers(wrong)


def check_before_worker(plan: RunPlan) -> None:
    """Makes the checks of this machine, for a worker that takes tasks beside others. ``run`` makes
    the checks of the job.

    Each starting task compares its settings with ``job.json``; a worker without a task compares
    here.

    Raises:
        CheckpointMismatch: the folders hold another run, which is finished.
        ConfigError, OutputFailed: as ``check_before_run``; or see ``refuse_without_claims``.
    """
    refuse_without_claims(plan)
    _refuse(check_environment(plan))
    check_hub(plan)
    if not plan.incomplete():
        earlier_runs.check_job(plan, dry_run=True)
    note_steps(plan)


def note_steps(plan: RunPlan) -> None:
    if plan.depends is not None:
        note_steps(plan.depends)
    for runner in plan.runners:
        runner.step.record_steps_before(runner.before)


def _refuse(findings: Iterable[Finding]) -> list[WrongMarker]:
    """Raises the error of the first finding that refuses. Returns the markers to remove."""
    markers: list[WrongMarker] = []
    for finding in findings:
        if finding.error is not None:
            raise finding.error
        markers += finding.markers
        if finding.state == "warning" and not finding.markers:
            logger.warning(f"{finding.what}: {finding.message}")
    return markers


def remove_markers(wrong: Iterable[WrongMarker]) -> None:
    for marker in wrong:
        logger.warning(f"{marker.text} The marker is removed, so the task runs again.")
        marker.plan.forget(marker.rank)


def check_after_run(plan: RunPlan) -> dict[Path, JobTotals]:
    """Checks what exit code 0 promises. Another run on the same folders may have finished ranks
    meanwhile.

    Returns the sums of each checkpoint that is on this machine, by its folder.

    Raises:
        CkptError, OSError: as ``check_before_run``.
        CheckpointCorrupt: the commits contradict each other.
        InputError: no row of the input is a document.
        TooManyDeadLetters: all documents are dead letters, or all lines of a batch file have an
            error.
    """
    earlier_runs.check_job(plan)
    earlier_runs.check_inputs_unchanged(plan)
    want = Include.COMMITS | Include.HISTORY | Include.LETTERS
    ended_early = plan.limit_reached() is not None
    jobs = {}
    for runner, root in plan.with_checkpoints:
        mirror = runner.step.checkpoints_remote_dir
        if ended_early and mirror and runner.copy is None:  # other nodes' tasks have no marker
            restore.restore_outdated(mirror, root, range(plan.tasks))
        job = jobs[root] = earlier_runs.check_output_of_run(runner, root, want=want)
        earlier_runs.refuse_vanished_input(root, job)
        counts = job.counts
        if counts.dead < 0 or counts.written + counts.dropped + counts.dead != counts.read:
            raise CheckpointCorrupt(
                f"The commits in {root} contradict each other: {counts.read} documents read, "
                f"{counts.written} written, {counts.dropped} dropped, {counts.dead} dead "
                f"letters. Run: datatrove-ckpt verify {root} --full"
            )
        if not counts.read and (job.numbers.skipped or _has_read_all(runner, job)):
            raise InputError(
                f"No row of the input is a document.{job.numbers.skipped} Check its files, and "
                "the reader's text_key and adapter.",
                starts_over="anew",
            )
        if counts.read and counts.dead == counts.read:
            often = "".join(cause for cause, _ in job.numbers.dead_letters.most_common(1))
            raise TooManyDeadLetters(
                f"All documents are dead letters: {often}. To see them: datatrove-ckpt show "
                f"{root} --dead. Correct the cause, and set retry_dead_letters."
            )
        if counts.written and lines_with_error(runner.step.rollout_fn, counts) == counts.written:
            folder = runner.step.output_writer.output_folder.resolve_paths("")
            raise TooManyDeadLetters(
                f"All lines have an error, as the output in {folder} shows. Correct the cause.",
                starts_over="anew",
            )
    return jobs


def _has_read_all(runner: RunnerPlan, job: JobTotals) -> bool:
    """Whether a finished job has read its whole input. False if other nodes have tasks of it."""
    plan = runner.plan
    return (
        all(isinstance(step, BaseReader) and not step.skip for step in runner.before)
        and job.ranks == plan.tasks
        and not plan.incomplete(skip_completed=True)
    )


def run_checked(executor: PipelineExecutor) -> PipelineStats | None:
    """Runs the ranks of an executor between ``check_before_run`` and ``check_after_run``."""
    open_streams()  # a script may lack them, too
    plan = RunPlan(executor)
    try:
        with plan.with_mirrors() as seen:
            check_before_run(seen)
        stats = executor.run_ranks()
        with plan.with_mirrors() as seen:
            check_after_run(seen)
    except CkptError as error:  # its message suffices; a script shows only its own frame
        error.__traceback__ = None
        raise
    finally:
        flush_streams()
    return stats
