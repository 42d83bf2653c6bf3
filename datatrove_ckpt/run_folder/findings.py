"""What is wrong with a job, and what is fine, in the order in which a run looks.

A run raises the first finding that refuses, before it starts anything; doctor prints all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.data import Document
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.readers.base import BaseReader
from datatrove.utils.stats import PipelineStats
from loguru import logger

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.identity import (
    compare_job,
    name_tasks,
    note_output,
    refuse_changes,
)
from datatrove_ckpt.checkpoint.layout import (
    RUN,
    is_finished,
    rank_folder,
    rank_numbers,
    refuse_missing_run_json,
    retry_folders,
)
from datatrove_ckpt.checkpoint.ledger import JobSums, RankLedger, Want, read_rank
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import duration, error_text, plural
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.config.paths import existing_part, expand_path
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    CkptError,
    ConfigError,
    DocumentNotSerializable,
    ServerStartFailed,
    TooManyDeadLetters,
)
from datatrove_ckpt.errors.names import name_copy, setting_name, use
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.generation.final_stats import lines_with_error
from datatrove_ckpt.generation.finished_from import OldRuns
from datatrove_ckpt.generation.noted_requests import NotedRequest, unsent_prompts
from datatrove_ckpt.generation.results import check_answer
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.generation.user_code import check_first, try_media
from datatrove_ckpt.inference.servers.endpoints import EndpointAnswer, ask_endpoints
from datatrove_ckpt.inference.servers.host import check_servers
from datatrove_ckpt.mirror.job import compare_mirrored_job
from datatrove_ckpt.mirror.restore import find_outdated, restore_outdated
from datatrove_ckpt.output.arrow_types import NO_TYPES
from datatrove_ckpt.output.committed import RankCommits, has_commits, some
from datatrove_ckpt.output.documents import decode, encode
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access
from datatrove_ckpt.output.hub_pace import HOUR
from datatrove_ckpt.output.names import writer_name
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.output.writer_trial import WriterTrial
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.process.open_files import files_needed, limits, too_low
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder.checks import (
    Finding,
    State,
    about,
    check_checkpoints,
    check_local_output,
    check_remote,
    within,
)
from datatrove_ckpt.run_folder.input_checks import (
    check_input,
    check_inputs_unchanged,
    note_steps,
    refuse_input,
    refuse_vanished_input,
)
from datatrove_ckpt.run_folder.prompts import check_prompts
from datatrove_ckpt.run_folder.run_plan import (
    RunnerPlan,
    RunPlan,
    WrongMarker,
    check_steps,
    note_workers,
    refuse_without_claims,
)
from datatrove_ckpt.run_folder.sample_table import ROUND_NUMBER, costs
from datatrove_ckpt.runner import InferenceRunner

# What ``check_job`` compares before any task of a job starts. datatrove skips tasks that have a
# completion marker in ``logging_dir``, so a finished task never looks at its own checkpoint again.
#
#     marker   checkpoint of the rank      what happens
#     any      older than in the mirror    it is restored, and then compared
#     any      of another run              refused, see ``checkpoint/identity.py``
#     yes      none, but in the mirror     it is restored, and then compared
#     yes      none                        refused: its documents may not be in the output
#     yes      not finished                the marker is removed, so that the rank runs
#     yes      of another run, but empty   the marker is removed: it runs with the new settings
#     yes      finished                    the rank is skipped
#     no       of this run, or none        the rank runs


def check_job(plan: RunPlan, dry_run: bool = False) -> list[WrongMarker]:
    """Compares a job, and those that it depends on, with what its folders hold from earlier runs.
    Starts nothing, and removes no marker: other checks may refuse the run.

    Args:
        dry_run: restore nothing from a mirror.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
    """
    wrong = []
    if plan.depends is not None:
        wrong = check_job(plan.depends, dry_run)
    completed = plan.completed()
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            _check_tasks(plan, completed)
            continue
        found = _compare_checkpoints(runner, completed, dry_run)
        wrong += [WrongMarker(plan, rank, text) for rank, text in found.items()]
        completed = [rank for rank in completed if rank not in found]
    return wrong


def _check_tasks(plan: RunPlan, completed: list[int]) -> None:
    """Compares the number of tasks with datatrove's file of the last start, where no checkpoint has
    it.
    """
    if not completed or not plan.logging_dir.isfile("executor.json"):
        return
    with plan.logging_dir.open("executor.json") as file:
        tasks = json.load(file).get("world_size")
    if tasks != plan.tasks:
        raise CheckpointMismatch(
            f"{plan.logging_dir.resolve_paths('completions')} marks tasks of another run as "
            "complete:\n"
            f"  tasks: {tasks} -> {plan.tasks}\n"
            "Go on with the old number of tasks, or choose another logging_dir (and output) for "
            "the new one."
        )


def _compare_checkpoints(runner: RunnerPlan, skipped: list[int], dry_run: bool) -> dict[int, str]:
    """Restores what only the mirror has, then compares: see ``_compare_markers``."""
    plan = runner.plan
    root = runner.root or Path(str(runner.step.checkpoints_local_dir))
    use(runner.step.form)
    mirror = runner.step.checkpoints_remote_dir
    if not mirror:
        for rank in plan.local_ranks:
            refuse_missing_run_json(rank_folder(root, rank))
        return _compare_markers(runner, root, skipped)
    # From there a rank may get what it lacks. Nodes of a cluster may have checkpoints on their own
    # disks.
    with ExitStack() as stack:
        if not plan.is_local and not root.exists():
            copy = Path(stack.enter_context(TemporaryDirectory()))
            name_copy(copy, str(root))
            root = copy
        if dry_run:
            skipped = [rank for rank in skipped if (rank_folder(root, rank) / RUN).exists()]
        elif runner.copy is None:
            restore_outdated(mirror, root, skipped)
        return _compare_markers(runner, root, skipped)


def _compare_markers(runner: RunnerPlan, folder: Path, skipped: list[int]) -> dict[int, str]:
    """Compares one step. Returns what is wrong with markers that are to be removed, by rank.

    Args:
        skipped: the ranks that have a marker.
    """
    plan = runner.plan
    step = runner.step
    identity = runner.identity
    ranks = plan.local_ranks

    if len(skipped) < len(ranks):
        OldRuns(step, identity)
    # A retry takes dead letters with any settings, but each rank its own.
    is_retry = step.retry_dead_letters
    found = compare_job(folder, identity, None if len(ranks) == plan.tasks else ranks, is_retry)
    if step.checkpoints_remote_dir:
        others = compare_mirrored_job(step.checkpoints_remote_dir, folder, identity, is_retry)
        found.by_rank |= others.by_rank
        found.empty += others.empty
    kept = [rank for rank in skipped if rank not in found.empty]
    if found.changes:
        advice = ""
        done = [rank for rank in found.ranks if rank in kept]
        if done:
            advice = (
                f"Finished with the old settings: {name_tasks(done)}. What is finished stays as it "
                "is. "
            )
        may_mix = not found.is_layout and len(kept) < len(ranks)
        if not (step.accept_changes and may_mix):
            if len(kept) == len(ranks):
                advice = (
                    "All tasks are finished, so the new settings would change no output any more. "
                    "For dead letters alone, retry_dead_letters takes the new settings. "
                )
            raise refuse_changes(folder, found, advice, may_mix)
        if advice:
            logger.warning(advice)
    missing = [rank for rank in kept if not (rank_folder(folder, rank) / RUN).exists()]
    if missing:
        markers = plan.logging_dir.resolve_paths("completions")
        mirror = step.checkpoints_remote_dir
        holds = f"{folder} holds no"
        if mirror:
            holds = f"neither {folder} nor {mirror} holds a"
        raise CheckpointMismatch(
            f"{markers} marks {name_tasks(missing)} as complete, but {holds} checkpoint that shows "
            "it, so nothing shows that the documents are in the output. If the checkpoints were "
            "moved or deleted, bring them back; if they are on another machine, run this command "
            "there. If the markers are of another job, choose another folder for the logs. To "
            "process these tasks from the start, delete their markers "
            f"({markers}/{missing[0]:05d} ...) and output files."
        )
    wrong = {}
    for rank in skipped:
        if rank in found.empty:
            why = "did nothing yet, and its settings have changed"
        elif is_finished(rank_folder(folder, rank)):
            continue
        else:
            why = "is not finished"
        marker = plan.logging_dir.resolve_paths(f"completions/{rank:05d}")
        wrong[rank] = (
            f"Task {rank} is marked as complete ({marker}), but its checkpoint "
            f"{folder}/{rank:05d} {why}."
        )
    return wrong


def earlier_runs(
    plan: RunPlan, dry_run: bool = False, unreachable: Collection[str] = ()
) -> Iterator[Finding]:
    """Compares a job with what earlier runs have left. Restores ranks from mirrors, and makes
    missing repositories on the hub.

    Args:
        dry_run: change nothing, and wait for a hub no longer than doctor does.
        unreachable: the subjects of outputs that are not compared.
    """
    yield from _compared("job", "earlier runs", _find_markers, plan, dry_run)
    yield from _compared("input", "of finished tasks", check_inputs_unchanged, plan)
    policy = None
    if dry_run:
        policy = retrying.HUB_PROBE
    else:
        yield from _compared("output", "reachable", check_hub, plan)
    yield from _compared("output", "of earlier runs", compare_outputs, plan, unreachable, policy)


def _compared(
    subject: str, what: str, check: Callable[..., Iterable[Finding] | None], *arguments: object
) -> Iterator[Finding]:
    found = [*about(subject, check, *arguments, what=what)]
    yield from found or [Finding("ok", what, "nothing differs.", subject)]


def _find_markers(plan: RunPlan, dry_run: bool) -> Iterator[Finding]:
    found = check_job(plan, dry_run)
    if found:
        text = f"{found[0].text} A run removes the marker and runs the task."
        if len(found) > 1:
            text += f" There are {len(found)} such tasks."
        yield Finding("warning", "earlier runs", text, markers=found)


def check_hub(plan: RunPlan) -> None:
    """Checks that tasks may write to their output folders on the hub, and makes missing
    repositories.

    Raises:
        OutputFailed: see ``check_access``.
    """
    for runner in plan.runners:
        writer = runner.step.output_writer
        hub = HubFolder.of(writer.output_folder)
        if hub is not None and (runner.step.retry_dead_letters or plan.incomplete()):
            check_access_of(runner, hub)


def check_access_of(runner: RunnerPlan, hub: HubFolder, only_look: bool = False) -> str:
    """Returns what was found. See ``check_access``."""
    private = None
    if runner.root is None or not has_commits(runner.root):
        private = getattr(runner.step.output_writer, "private", None)
    return check_access(hub, private, only_look=only_look)


def compare_outputs(
    plan: RunPlan, without: Collection[str] = (), policy: retrying.RetryPolicy | None = None
) -> None:
    """Compares the output of all ranks, also those that datatrove skips, with their checkpoints,
    before a run.

    Args:
        without: the subjects of outputs that are skipped.
        policy: see ``OutputFolder.look``.

    Raises:
        CkptError: see ``check_output_of_run``.
    """
    for runner, root in plan.kept:
        if f"{plan.place(runner.index)}output" in without:
            continue
        # Ranks elsewhere, or with a mirror, may have checkpoints that are invisible here; those
        # of jobs are visible.
        first_starts: Iterable[int] = ()
        if plan.as_jobs or (plan.is_local and runner.step.checkpoints_remote_dir is None):
            first_starts = plan.local_ranks
        check_output_of_run(runner, root, first_starts, policy)


# output of all ranks -----------------------------------------------------------------------------


@gc_paused()  # commits of many ranks, and no garbage: collections would take a third of the time
def check_output_of_run(
    runner: RunnerPlan,
    checkpoints: Path,
    first_starts: Iterable[int] = (),
    policy: retrying.RetryPolicy | None = None,
    want: Want = Want.COMMITS,
) -> JobSums:
    """Lists the output folder once. Returns the sums over the ranks of the job; all committed files
    are there.

    Args:
        first_starts: ranks that will start for the first time, if they have no checkpoint.
        policy: see ``OutputFolder.look``.
        want: what to read of each rank, for the sums.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint
            knows, or the repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/ledger.py``.
    """
    logging_dir = runner.plan.logging_dir.resolve_paths("")
    tasks = runner.plan.tasks
    mirror = runner.step.checkpoints_remote_dir
    folder = OutputFolder(runner.step.output_writer, checkpoints, mirror, logging_dir)
    numbers = []
    if checkpoints.is_dir():
        numbers = rank_numbers(checkpoints)
    retries = retry_folders(checkpoints)
    job = JobSums()

    def read(folder: Path, commits: Want) -> RankLedger:
        rank = read_rank(folder, want | commits)
        if rank.number < tasks:
            job.add_rank(rank)
        return rank

    try:  # all, before any file is called unknown
        commits = {rank: RankCommits(checkpoints, rank, retries, read) for rank in numbers}
    except CommitsDamaged as error:
        raise CommitsDamaged(error.log, error.what, logging_dir) from None
    committed = folder.by_name(commits.values())
    found = folder.look(committed, policy=policy)
    folder.refuse_lost(committed, found)
    for rank in first_starts:
        if not found.by_rank[rank]:
            continue
        # Checked again: a rank that started since may have written the files.
        rank_files = rank_folder(checkpoints, rank)
        has_started = (rank_files / RUN).exists()
        if mirror is not None and not has_started:
            from datatrove_ckpt.mirror.manifests import Versions

            has_started = bool(Versions(f"{mirror}/{rank_files.name}").all_versions())
        if not has_started:
            folder.refuse_foreign(rank, found)
    for rank_commits in commits.values():
        is_complete = rank_commits.is_finished
        if is_complete or rank_commits.has_run:
            folder.refuse_foreign(rank_commits.rank, found, rank_commits, is_complete)
    for rank in sorted(found.by_rank):
        if rank >= tasks:
            folder.refuse_foreign(rank, found)
    return job


_COMMITS_PER_HOUR = 128  # what the hub allows to a free account
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_ANSWER = {"text": "An answer.", "finish_reason": "stop", "usage": _USAGE}


_CHARACTERS_PER_TOKEN = 4
_ONLY_HERE = re.compile(r"//(localhost|127\.|0\.0\.0\.0|\[::1?\])")


def doctor(executor: PipelineExecutor) -> list[Finding]:
    """Checks folders, input, servers and limits before a run.

    What would fail has the state "problem".
    """
    plan = RunPlan(executor)
    with log_disabled("datatrove", "datatrove_ckpt"):
        found = list(surroundings(plan, is_thorough=True))
        unreachable = {
            finding.subject
            for finding in found
            if (finding.state, finding.what) == ("problem", "reachable")
        }
        return [*found, *about("job", _doctor_earlier_runs, plan, unreachable)]


def _doctor_earlier_runs(plan: RunPlan, unreachable: Collection[str]) -> Iterator[Finding]:
    """Compares the job with earlier runs, unless a run would restore from a mirror first."""
    for runner, root in plan.kept:
        mirror = runner.step.checkpoints_remote_dir
        if mirror is None:
            continue
        names = within(partial(find_outdated, mirror, root, needed=()), mirror)
        if names:
            text = (
                f"another node has continued {plural(len(names), 'task')} of this node. A run "
                f"restores from {mirror} first, and then compares the output, which is not "
                "compared here: leave its files as they are."
            )
            yield Finding("warning", "folder", text, "checkpoints")
            return
    with plan.with_mirrors(dry_run=True) as seen:
        check = earlier_runs(seen, dry_run=True, unreachable=unreachable)
        yield from within(lambda: [*check], "what earlier runs left")


def surroundings(plan: RunPlan, is_thorough: bool = False) -> Iterator[Finding]:
    """Checks what a job needs: settings, folders, input, and what its servers need.

    Args:
        is_thorough: try the folders, read the first documents and ask the endpoints. A run finds
            that out by itself.
    """
    yield from about("pipeline", check_steps, plan)
    yield from about("pipeline", plan.check_executor)
    yield from about(setting_name("logging_dir"), _check_logging_dir, plan, is_thorough)
    sample: list[Document] = []
    runners = {runner.index: runner for runner in plan.runners}
    for index, step in enumerate(plan.pipeline):
        place = plan.place(index)
        if not is_thorough:
            yield from about(f"{place}input", refuse_input, plan, index, step)
        elif isinstance(step, BaseReader):
            yield from about(f"{place}input", check_input, step, plan, sample, what="readable")
        if index in runners:
            yield from check_runner(runners[index], sample, is_thorough)


def _check_logging_dir(plan: RunPlan, is_thorough: bool) -> Iterator[Finding]:
    if plan.pulls:
        refuse_without_claims(plan)
    if plan.logging_dir.is_local():
        refuse_file("logging_dir", plan.logging_dir.resolve_paths(""))
    if is_thorough:
        yield from check_remote(plan.logging_dir)


def refuse_file(setting: str, folder: str | Path) -> None:
    """Raises ConfigError if a file is in the place of a folder, or of one of its parents."""
    place = existing_part(Path(folder).absolute())
    if not place.is_dir():
        raise ConfigError(
            f"{str(folder)!r} cannot be a folder, because {place} is a file. Choose another "
            "folder.",
            setting=setting,
        )


def check_runner(
    runner: RunnerPlan, sample: list[Document], is_thorough: bool
) -> Iterator[Finding]:
    plan = runner.plan
    place = plan.place(runner.index)
    step = runner.step
    remote = step.checkpoints_remote_dir
    yield from about(f"{place}input", _check_prompt, runner, sample)
    # Cluster jobs may have what is missing here.
    if is_thorough or (plan.is_local and plan.incomplete()):
        for config in step.models.values():
            subject = f"{place}{config.server_name('server')}"
            yield from about(subject, _check_server, runner, config, is_thorough)
        if sample:
            yield from _costs(step, sample)
        yield from about(f"{place}monitoring", step.monitoring.check_packages)
    for subject, check in (("checkpoints", _check_checkpoints), ("output", _check_output)):
        yield from about(f"{place}{subject}", check, runner, is_thorough, what="reachable")
    if is_thorough:
        yield from about(f"{place}output", _check_writer, runner, sample)
        if remote is not None:
            yield from about(f"{place}mirror", check_remote, remote)
    yield from about(f"{place}output", check_rules_of_hub, plan, step)


def _check_prompt(runner: RunnerPlan, sample: list[Document]) -> Iterator[Finding]:
    if sample and runner.index == 1:  # a later step gets what the steps before it have changed
        # Rollouts may change fields, whose values may be large, or not be copied at all.
        copies = (replace(one, metadata={**one.metadata}) for one in (sample[0], *sample))
        first, *documents = copies
        check_answer(runner.step, first)
        if runner.step.on_document_error == "stop":
            check_first(runner.step.rollout_fn, first)
            event_loop.run(try_media(runner.step.rollout_fn, first))
        prompts = event_loop.run(unsent_prompts(runner.step.rollout_fn, documents))
        yield from check_prompts(prompts, runner.step.model.servers)


def _costs(step: Step, documents: Sequence[Document]) -> Iterator[Finding]:
    """Estimates what documents cost, from the texts of the first ones."""
    answer = max_tokens_of(step.model.default_generation_params)
    sent = []
    for document in documents:
        usage = {
            "prompt_tokens": len(document.text) // _CHARACTERS_PER_TOKEN,
            "completion_tokens": answer,
        }
        request = NotedRequest(document.text, usage=usage)
        sent.append([request] * step.model.rollouts_per_document)
    found = [" ".join(row) for row in costs(step, sent, [1] * len(sent), ROUND_NUMBER)]
    if found:
        text = (
            f"of {ROUND_NUMBER:,} documents: {'; '.join(found)}, if each takes one request, of the "
            f"tokens of its text and {answer} of an answer (max_tokens). `run --sample` measures "
            "them."
        )
        yield Finding("ok", "costs", text, "prices")


def _check_server(
    runner: RunnerPlan, config: InferenceConfig, is_thorough: bool
) -> Iterator[Finding]:
    """Checks that what the server needs is installed, and its key set.

    Starts nothing; ``is_thorough`` asks endpoints for their models.
    """
    as_jobs = runner.plan.as_jobs
    is_endpoint = config.server_type == "endpoint"
    text = f"everything that {config.server_type} needs is installed here."
    if is_endpoint:
        text = "the key is set, if the endpoint needs one."
    elif as_jobs:
        text = f"the jobs install {config.server_type}, unless their image has it."
    ready = Finding("ok", "ready", text)
    if is_endpoint or not as_jobs:
        try:
            check_servers(config)
        except (ConfigError, ServerStartFailed) as error:
            ready = Finding("problem", "ready", str(error), error=ConfigError(error))
    yield ready
    if not is_thorough or (as_jobs and not is_endpoint):
        return
    yield Finding("note", "requests", f"{config.places} (max_concurrent_generations).")
    if config is runner.step.model:
        requests, servers = runner.step.requests_and_servers()
        needed = files_needed(requests, servers)
        allowed = limits()[1]
        text = too_low(requests, servers, needed, allowed)
        if allowed >= needed:
            text = f"{requests} at once need up to {needed}; the hard limit is {allowed}."
        yield Finding("ok" if allowed >= needed else "problem", "open files", text)
    if config.server_log_folder is not None:
        expand_path("server_log_folder", config.server_log_folder)
    if is_endpoint and ready.state == "ok":
        yield from check_endpoints(config)
    here = [one.url for one in config.endpoints_by_name.values() if _ONLY_HERE.search(one.url)]
    if as_jobs and here:
        yield Finding(
            "warning", "endpoint", f"{here[0]} is this machine, which the jobs cannot reach."
        )


def _check_checkpoints(runner: RunnerPlan, is_thorough: bool) -> Iterator[Finding]:
    if runner.root is not None:
        refuse_file("checkpoints_local_dir", runner.root)
    plan = runner.plan
    step = runner.step
    if plan.as_jobs or not is_thorough:
        return  # each job has a disk of its own
    if step.checkpoints_local_dir is None:
        yield Finding(
            "warning", "folder", "none: a run that dies starts over. Set checkpoints_local_dir."
        )
        return
    folder = step.checkpoints_root
    mirrored = step.checkpoints_remote_dir is not None
    check = check_checkpoints(folder, mirrored, not plan.is_local)
    yield from within(lambda: [*check], str(folder))


def _check_output(runner: RunnerPlan, is_thorough: bool) -> Iterator[Finding]:
    output = runner.step.output_writer.output_folder
    if output.is_local():
        refuse_file("output_folder", output.resolve_paths(""))
    if not is_thorough:
        return  # tasks write there soon
    hub = HubFolder.of(output)
    if hub is not None:
        look = partial(check_access_of, runner, hub, only_look=True)
        yield Finding("ok", "reachable", within(look, hub.url))
    elif not output.is_local():
        yield from check_remote(output)
    else:
        folder = Path(output.resolve_paths("")).absolute()
        check = check_local_output(folder, not runner.plan.is_local)
        yield from within(lambda: [*check], str(folder))


def _check_writer(runner: RunnerPlan, sample: list[Document]) -> Iterator[Finding]:
    step = runner.step
    writer = step.output_writer
    name = writer_name(writer)
    document = Document(text="text", id="id")
    if sample:
        document = decode(as_read(sample[0]).data)
    document.metadata[step.metadata_key] = [_ANSWER] * step.config.rollouts_per_document
    try:
        WriterTrial(writer, NO_TYPES)(encode(document), document.id)
    except DocumentNotSerializable as error:
        text = (
            f"{name} cannot write a document with an answer that is made up: "
            f"{error_text(error.__cause__ or error)}."
        )
        text += " Correct it, unless real answers are different."
        # datatrove's writers write any document, but an adapter or a schema may expect another
        # answer.
        yield Finding("warning" if name.startswith("datatrove.") else "problem", "writer", text)
    else:
        yield Finding("ok", "writer", f"{name} writes a document with an answer that is made up.")


def check_rules_of_hub(plan: RunPlan, step: InferenceRunner) -> Iterator[Finding]:
    """Compares a job's commits, at least one per task, with the hub's limit for a free account."""
    hub = HubFolder.of(step.output_writer.output_folder)
    if hub is None or hub.is_bucket:
        return
    pace = step.hub_pace
    text = f"all tasks together keep to {pace.per_hour} per hour (hub_commits_per_hour)."
    if pace.per_hour > _COMMITS_PER_HOUR:
        text += (
            f" The hub allows {_COMMITS_PER_HOUR} to a free account, and refuses more for up to "
            "an hour."
        )
    state: State = "ok"
    if plan.tasks > 24 * pace.per_hour:  # more than a day
        state = "warning"
        text += (
            f" Each of {plural(plan.tasks, 'task')} makes one commit at least, which takes "
            f"{duration(plan.tasks * HOUR / pace.per_hour)}. Use fewer tasks, or several "
            "repositories."
        )
    yield Finding(state, "commits", text)


# job checks --------------------------------------------------------------------------------------


def check_endpoints(config: InferenceConfig) -> Iterator[Finding]:
    answers = within(lambda: event_loop.run(ask_endpoints(config)), setting_name("endpoint_url"))
    silent: State = "warning"
    if all(answer.cause for answer in answers):
        silent = "problem"
    for answer, endpoint in zip(answers, config.endpoints_by_name.values(), strict=True):
        yield _check_answer(answer, config, str(endpoint.model), silent)


def _check_answer(
    answer: EndpointAnswer, config: InferenceConfig, model: str, silent: State
) -> Finding:
    if answer.refused:
        return Finding(silent, "endpoint", f"{answer.url} {answer.cause}.")
    if answer.cause:
        text = f"{answer.url}: {answer.cause}. Start the server, or correct its URL."
        return Finding(silent, "endpoint", text)
    if answer.models is None:
        text = (
            f"{answer.url} answers, and does not list its models. Some gateways have no such list: "
            "then all is well. Otherwise correct its URL."
        )
        return Finding("warning", "endpoint", text)
    if model in answer.models:
        context = answer.models[model]
        asked = max_tokens_of(config.default_generation_params)
        if isinstance(context, int) and asked >= context:
            text = f"max_tokens is {asked}, and max_model_len of {answer.url} {context}: lower it."
            return Finding("problem", "endpoint", text)
        return Finding("ok", "endpoint", f"{answer.url} answers, and serves {model}.")
    listed = some([*answer.models], 5) or "none"
    text = (
        f"{answer.url} does not list the model {model!r}; it lists {listed}. Correct the model's "
        "name."
    )
    return Finding("problem", "endpoint", text)


# What a run does with them ------------------------------------------------------------------------


def check_before_run(plan: RunPlan) -> None:
    """Makes all checks that need more than the settings. Starts nothing, and notes in each runner
    the steps before it.

    Raises:
        ConfigError: a setting cannot work on this machine, or with the others.
        CheckpointMismatch: markers, checkpoints or the input of finished ranks are another run's.
        OutputFailed: the output's repository on the hub cannot be written to.
        CkptError: see ``check_output_of_run``.
        OSError: the input cannot be listed.
    """
    note_workers(plan.workers, plan.tasks)
    _refuse(surroundings(plan))
    wrong = _refuse(earlier_runs(plan))
    note_steps(plan)
    for runner, root in plan.kept:
        note_output(root, runner.step.output_writer.output_folder.resolve_paths(""))
        runner.step.limits.note(root)
        mirror = runner.step.checkpoints_remote_dir
        if mirror is not None and root.is_dir():
            from datatrove_ckpt.mirror.restore import upload_finished_ranks

            # datatrove skips complete ranks, so they are uploaded here.
            upload_finished_ranks(mirror, root)
    remove_markers(wrong)


def check_before_worker(plan: RunPlan) -> None:
    """Makes the checks of this machine, for a worker that takes tasks beside others. ``run`` makes
    those of the job.

    Each starting task compares its settings with ``job.json``; a worker without a task compares
    here.

    Raises:
        CheckpointMismatch: the run is finished, and another one.
        ConfigError, OutputFailed: as ``check_before_run``; or see ``refuse_without_claims``.
    """
    refuse_without_claims(plan)
    _refuse(surroundings(plan))
    check_hub(plan)
    if not plan.incomplete():
        check_job(plan, dry_run=True)
    note_steps(plan)


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


def check_after_run(plan: RunPlan) -> dict[Path, JobSums]:
    """Checks what exit code 0 promises. Another run on the same folders may have finished ranks
    meanwhile.

    Returns the sums of each checkpoint that is on this machine, by its folder.

    Raises:
        CkptError, OSError: as ``check_before_run``.
        TooManyDeadLetters: all documents are dead letters, or all lines of a batch file have an
            error.
    """
    check_job(plan)
    check_inputs_unchanged(plan)
    want = Want.COMMITS | Want.HISTORY | Want.LETTERS
    ended_early = plan.limit_reached() is not None
    jobs = {}
    for runner, root in plan.kept:
        mirror = runner.step.checkpoints_remote_dir
        if ended_early and mirror and runner.copy is None:  # other nodes' tasks have no marker
            restore_outdated(mirror, root, range(plan.tasks))
        job = jobs[root] = check_output_of_run(runner, root, want=want)
        refuse_vanished_input(root, job)
        counts = job.counts
        if counts.read and counts.dead == counts.read:
            often = "".join(cause for cause, _ in job.numbers.dead_letters.most_common(1))
            raise TooManyDeadLetters(
                f"All documents are dead letters: {often}. To see them: datatrove-ckpt show {root} "
                f"--dead. Correct the cause, and start again with retry_dead_letters."
            )
        if counts.written and lines_with_error(runner.step.rollout_fn, counts) == counts.written:
            folder = runner.step.output_writer.output_folder.resolve_paths("")
            raise TooManyDeadLetters(
                f"All lines have an error, as the output in {folder} shows. Correct the cause.",
                starts_over="anew",
            )
    return jobs


def run_checked(executor: PipelineExecutor) -> PipelineStats | None:
    """Runs the ranks of an executor between ``check_before_run`` and ``check_after_run``.

    Returns what its ``run_ranks`` returns.
    """
    plan = RunPlan(executor)
    try:
        with plan.with_mirrors() as seen:
            check_before_run(seen)
        stats = executor.run_ranks()
        with plan.with_mirrors() as seen:
            check_after_run(seen)
    except CkptError as error:  # its message says it all; of the frames, a script shows its own
        error.__traceback__ = None
        raise
    return stats
