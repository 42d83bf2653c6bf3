"""``datatrove-ckpt doctor``: checks folders, input, servers and limits of an executor before it runs.

The checks change nothing; ``cli/preflight_commands.py`` prints them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.readers.base import BaseReader
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import CkptError, DocumentNotSerializable
from datatrove_ckpt.formatting import error_text, plural
from datatrove_ckpt.generation.document_limit import most_documents
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.generation.job_check import check_job
from datatrove_ckpt.inference.servers.connect import EndpointAnswer, ask_endpoints, check_servers
from datatrove_ckpt.output.documents import decode, encode
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access, hub_folder_of, private_if_made
from datatrove_ckpt.output.names import writer_name
from datatrove_ckpt.output.writers import check_writable
from datatrove_ckpt.preflight.before_run import check_output, check_steps, committed_here
from datatrove_ckpt.preflight.checks import (
    PreflightCheck,
    State,
    check_checkpoints,
    check_local_output,
    check_remote,
    within,
)
from datatrove_ckpt.preflight.hub_limits import Rate, check_commits, check_files, check_refusals, observed_rate
from datatrove_ckpt.preflight.input_checks import Sample, check_input
from datatrove_ckpt.preflight.inputs import check_inputs_unchanged, waits
from datatrove_ckpt.preflight.probes import REMOTE_SECONDS
from datatrove_ckpt.preflight.shares import check_workers, workers_of
from datatrove_ckpt.preflight.space import Needs, answer_bytes, check_space, estimate
from datatrove_ckpt.process.open_files import files_needed, limits, requests_at_once, too_low
from datatrove_ckpt.runner import InferenceRunner

_ANSWER = {
    "text": "An answer.",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def examine(executor: Any, documents_per_second: float | None = None) -> list[PreflightCheck]:
    """Runs all checks for everything that the executor and its steps name. A check that fails is a problem.

    Args:
        documents_per_second: of one task, for the room that it needs while the hub refuses commits.
    """
    checks = _guarded("pipeline", lambda: _check_steps(executor))
    checks += _guarded("logging_dir", lambda: [check_remote("logging_dir", executor.logging_dir)])
    sample = Sample()
    unreachable = []
    several = sum(isinstance(step, InferenceRunner) for step in executor.pipeline) > 1
    for index, step in enumerate(executor.pipeline):
        place = f"pipeline[{index}] " if several else ""
        if isinstance(step, BaseReader):
            workers = workers_of(executor)
            found, first = check_input(f"{place}input", step, executor.world_size, workers, waits(executor))
            checks += found
            sample = sample if sample.number else first
        if isinstance(step, InferenceRunner):
            found = _check_runner(place, step, sample, executor, index)
            unreachable += [index] if _is_unreachable(f"{place}output", found) else []
            checks += found
            checks += _check_hub(place, step, sample, executor, documents_per_second)
    checks += _guarded("job", lambda: check_workers("job", executor))
    return [*checks, *_guarded("job", lambda: check_earlier_runs(executor, unreachable))]


def _guarded(subject: str, check: Callable[[], list[PreflightCheck]]) -> list[PreflightCheck]:
    try:
        return check()
    except CkptError as error:
        return [PreflightCheck("problem", subject, "checked", str(error))]
    except Exception as error:  # a list of all problems is worth more than the traceback of one
        return [PreflightCheck("problem", subject, "checked", f"this could not be checked: {error_text(error)}.")]


def _is_unreachable(subject: str, checks: list[PreflightCheck]) -> bool:
    return any((check.state, check.subject, check.what) == ("problem", subject, "reachable") for check in checks)


def _check_steps(executor: Any) -> list[PreflightCheck]:
    check_steps(executor)
    return []


def _check_runner(place: str, step: InferenceRunner, sample: Sample, executor: Any, index: int) -> list[PreflightCheck]:
    server, checkpoints, output = f"{place}server", f"{place}checkpoints", f"{place}output"
    checks = _guarded(server, lambda: _check_server(server, step.config))
    ranks, moves = workers_of(executor), _moves(executor)
    checks += _guarded(checkpoints, lambda: _check_checkpoints(checkpoints, step, sample, ranks, moves))
    checks += _guarded(output, lambda: _check_output(output, step, sample, ranks, executor))
    checks += _guarded(output, lambda: [_check_writer(output, step, sample)])
    if step.output_writer.output_folder.is_local() and sample.documents:
        checks += _guarded(output, lambda: [_check_space(output, step, sample, executor, index)])
    remote, monitoring = step.checkpoints_remote_dir, step.monitoring
    if remote is not None:
        checks += _guarded(f"{place}mirror", lambda: [_check_mirror(f"{place}mirror", remote)])
    if monitoring.wants_metrics or monitoring.wants_tracking:
        checks += _guarded(f"{place}monitoring", lambda: [_check_monitoring(f"{place}monitoring", monitoring)])
    return checks


def _check_server(subject: str, config: Any) -> list[PreflightCheck]:
    ready = check_server(subject, config)
    checks = [ready, check_open_files(subject, config)]
    if config.server_log_folder is not None:
        expand_path("server_log_folder", config.server_log_folder)
    if config.server_type == "endpoint" and ready.state == "ok":
        checks += check_endpoints(subject, config)
    return checks


def _needs(step: InferenceRunner, sample: Sample, ranks: int) -> Needs:
    return estimate(
        sample,
        answer_bytes(step),
        step.records_per_chunk,
        most_documents(step.config),
        ranks,
        stages_remotely=not step.output_writer.output_folder.is_local(),
    )


def _check_checkpoints(
    subject: str, step: InferenceRunner, sample: Sample, ranks: int, moves: bool
) -> list[PreflightCheck]:
    if step.checkpoints_local_dir is None:
        text = "none: a run that dies starts over. Set checkpoints_local_dir."
        return [PreflightCheck("warning", subject, "folder", text)]
    folder, need = step.checkpoints_root, _needs(step, sample, ranks).checkpoints
    return check_checkpoints(subject, folder, step.sync_seconds, need, step.checkpoints_remote_dir is not None, moves)


def _check_output(
    subject: str, step: InferenceRunner, sample: Sample, ranks: int, executor: Any
) -> list[PreflightCheck]:
    output = step.output_writer.output_folder
    if (hub := hub_folder_of(step.output_writer)) is not None:
        return [_check_access(subject, step, hub, executor)]
    if not output.is_local():
        return [check_remote(subject, output)]
    folder = Path(output.resolve_paths("")).absolute()
    template = step.output_writer.output_filename.template
    return check_local_output(subject, folder, template, _needs(step, sample, ranks).output, _moves(executor))


def _check_writer(subject: str, step: InferenceRunner, sample: Sample) -> PreflightCheck:
    """Writes a document to memory, with an answer that is made up."""
    writer, name = step.output_writer, writer_name(step.output_writer)
    document = decode(sample.first) if sample.first else Document(text="text", id="id")
    document.metadata[step.metadata_key] = [_ANSWER] * step.config.rollouts_per_document
    try:
        check_writable(writer, 0, encode(document), document.id)
    except DocumentNotSerializable as error:
        text = f"{name} cannot write a document with an answer that is made up: {error_text(error.__cause__ or error)}."
        text += " Correct it, unless real answers are different."
        # Those of datatrove write any document. But an adapter or a schema may want another answer than this one.
        return PreflightCheck("warning" if name.startswith("datatrove.") else "problem", subject, "writer", text)
    return PreflightCheck("ok", subject, "writer", f"{name} writes a document with an answer that is made up.")


def _moves(executor: Any) -> bool:
    """Whether a task may restart on another node."""
    return not isinstance(executor, LocalPipelineExecutor)


def _check_hub(
    place: str, step: InferenceRunner, sample: Sample, executor: Any, documents_per_second: float | None
) -> list[PreflightCheck]:
    """What the hub's rules mean for a job whose output is there."""
    if (hub := hub_folder_of(step.output_writer)) is None:
        return []
    checkpoints, output, ranks = f"{place}checkpoints", f"{place}output", workers_of(executor)
    checks = []
    if not hub.is_bucket:
        checks.append(check_commits(output, ranks, executor.world_size, step.hub_pace))
    if sample.documents:
        tasks, records = executor.world_size, step.records_per_chunk
        chunks = tasks * math.ceil(sample.documents / tasks / records)
        checks.append(check_files(output, step.output_writer, chunks, tasks, records))
    if step.checkpoints_local_dir is not None:
        given = documents_per_second

        def refusals() -> list[PreflightCheck]:
            rate = observed_rate(executor.logging_dir) if given is None else Rate(given, "as given")
            folder = step.checkpoints_root
            return [check_refusals(checkpoints, folder, sample, answer_bytes(step), ranks, rate)]

        checks += _guarded(checkpoints, refusals)
    return checks


def _check_access(subject: str, step: InferenceRunner, hub: HubFolder, executor: Any) -> PreflightCheck:
    private, committed = private_if_made(step.output_writer), committed_here(executor, step)
    try:
        found = within(REMOTE_SECONDS, lambda: check_access(hub, private, only_look=True, committed=committed), hub.url)
    except CkptError as error:
        return PreflightCheck("problem", subject, "reachable", str(error))
    return PreflightCheck("ok", subject, "reachable", found)


def _check_space(subject: str, step: InferenceRunner, sample: Sample, executor: Any, index: int) -> PreflightCheck:
    limit = getattr(executor.pipeline[0], "limit", -1)
    # A step in between, or an adapter of the user, may drop or shorten documents.
    kept = index == 1 and getattr(step.output_writer.adapter, "__func__", None) is DiskWriter._default_adapter
    folder = Path(step.output_writer.output_folder.resolve_paths("")).absolute()
    return check_space(subject, folder, step, sample, limit * executor.world_size if limit > 0 else None, kept)


def _check_mirror(subject: str, remote: Any) -> PreflightCheck:
    try:
        folder = get_datafolder(remote)
    except (ImportError, ValueError, OSError) as error:  # no such protocol, or its library is not installed
        return PreflightCheck("problem", subject, "reachable", f"checkpoints_remote_dir: {remote}: {error}")
    return check_remote(subject, folder, deletes=True)


def _check_monitoring(subject: str, config: MonitoringConfig) -> PreflightCheck:
    check_monitoring(config)
    for name, path in {"metrics_file": config.metrics_file, "metrics_targets": config.metrics_targets}.items():
        if path is not None and not (folder := expand_path("", path.replace("${rank}", "0")).parent).is_dir():
            text = f"monitoring.{name}: there is no folder {folder} here; without it nothing is written."
            return PreflightCheck("warning", subject, "ready", text)
    return PreflightCheck("ok", subject, "ready", "everything that it needs is installed here.")


def check_server(subject: str, config: Any) -> PreflightCheck:
    """Checks that what the server needs is installed and that its key is set. Starts nothing, sends nothing."""
    try:
        check_servers(config)
        if config.server_type == "endpoint":
            text = "the key is set, if the endpoint needs one."
        else:
            text = f"everything that {config.server_type} needs is installed here."
    except CkptError as error:
        return PreflightCheck("problem", subject, "ready", str(error))
    return PreflightCheck("ok", subject, "ready", text)


# job checks -----------------------------------------------------------------------------------------------------------

# Checks of what a job meets before its first request: endpoints, open files, what earlier runs have left.


_SHOWN_MODELS = 5
_PATIENCE_SECONDS = 10.0


def check_endpoints(subject: str, config: Any) -> list[PreflightCheck]:
    """Asks each endpoint for its models, with the run's key."""
    try:
        answers = within(REMOTE_SECONDS, lambda: asyncio.run(ask_endpoints(config)), "endpoint_url")
    except CkptError as error:
        return [PreflightCheck("problem", subject, "endpoint", str(error))]
    silent: State = "problem" if all(answer.cause for answer in answers) else "warning"
    return [_check_answer(subject, answer, config.model_name_or_path, silent) for answer in answers]


def _check_answer(subject: str, answer: EndpointAnswer, model: str, silent: State) -> PreflightCheck:
    if answer.refused:
        text = f"{answer.url}: {answer.cause}. Check api_key_env, and that the key may use this model."
        return PreflightCheck("problem", subject, "endpoint", text)
    if answer.cause:
        text = f"{answer.url}: {answer.cause}. Start the server, or correct endpoint_url."
        return PreflightCheck(silent, subject, "endpoint", text)
    if answer.models is None:
        text = (
            f"{answer.url} answers, and does not list its models. Some gateways have no such list: then all is well. "
            "Otherwise correct endpoint_url."
        )
        return PreflightCheck("warning", subject, "endpoint", text)
    if model in answer.models:
        return PreflightCheck("ok", subject, "endpoint", f"{answer.url} answers, and serves {model}.")
    listed = ", ".join(answer.models[:_SHOWN_MODELS]) + (", ..." if len(answer.models) > _SHOWN_MODELS else "")
    text = f"{answer.url} does not list the model {model!r}; it lists {listed or 'none'}. Correct model_name_or_path."
    return PreflightCheck("problem", subject, "endpoint", text)


def check_open_files(subject: str, config: Any) -> PreflightCheck:
    """Compares the need of one task with the hard limit of this machine."""
    requests = requests_at_once(config.max_concurrent_generations, config.servers)
    needed, allowed = files_needed(requests, config.servers), limits()[1]
    if allowed < needed:
        return PreflightCheck("problem", subject, "open files", too_low(requests, needed, allowed))
    text = f"{plural(requests, 'request')} at once need up to {needed}; the hard limit is {allowed}."
    return PreflightCheck("ok", subject, "open files", text)


def check_earlier_runs(executor: Any, unreachable: Collection[int] = ()) -> list[PreflightCheck]:
    """Compares the job with what earlier runs have left, as ``run`` does. Changes nothing.

    Args:
        unreachable: indices of steps whose output folder cannot be reached, which is reported already.
    """
    output = partial(check_output, executor, True, unreachable, _PATIENCE_SECONDS)
    return [
        *_compared("job", "earlier runs", partial(check_job, executor, dry_run=True)),
        *_compared("input", "of finished tasks", partial(check_inputs_unchanged, executor)),
        *_compared("output", "of earlier runs", output),
    ]


def _compared(subject: str, what: str, check: Callable[[], object]) -> list[PreflightCheck]:
    try:
        found = within(REMOTE_SECONDS, check, subject)
    except (CkptError, OSError) as error:
        return [PreflightCheck("problem", subject, what, str(error))]
    if not found or not isinstance(found, list):
        return [PreflightCheck("ok", subject, what, "nothing differs.")]
    more = f" There are {len(found)} such tasks." if len(found) > 1 else ""
    return [PreflightCheck("warning", subject, what, f"{found[0]} A run removes the marker and runs the task.{more}")]
