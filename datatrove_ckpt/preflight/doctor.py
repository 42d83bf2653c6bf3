"""``datatrove-ckpt doctor``: checks folders, input, servers and limits of an executor before it
runs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from datatrove.data import Document
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.readers.base import BaseReader

from datatrove_ckpt.common import BATCH, retrying
from datatrove_ckpt.common.formatting import duration, error_text, figure, plural
from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import CkptError, DocumentNotSerializable
from datatrove_ckpt.errors.doors import written
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.generation.named_answer import check_answer
from datatrove_ckpt.generation.user_code import check_first, try_media, unsent_prompts
from datatrove_ckpt.inference.servers.endpoints import EndpointAnswer, ExternalServers
from datatrove_ckpt.inference.servers.host import check_servers
from datatrove_ckpt.mirror.restore import find_outdated
from datatrove_ckpt.output.documents import decode, encode
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access, private_if_made
from datatrove_ckpt.output.hub_pace import COMMITS_PER_HOUR, HOUR
from datatrove_ckpt.output.names import writer_name
from datatrove_ckpt.output.writer_trial import check_writable
from datatrove_ckpt.preflight.before_run import check_job, check_output, check_steps, committed_here
from datatrove_ckpt.preflight.checks import (
    Finding,
    State,
    about,
    answered,
    check_checkpoints,
    check_local_output,
    check_remote,
    tried,
    within,
)
from datatrove_ckpt.preflight.input_checks import Sample, check_input, check_inputs_unchanged
from datatrove_ckpt.preflight.prompts import check_prompts
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.process.open_files import files_needed, limits, too_low
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.runner import InferenceRunner

_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_ANSWER = {"text": "An answer.", "finish_reason": "stop", "usage": _USAGE}


_COSTED_DOCUMENTS = 1000
_CHARACTERS_PER_TOKEN = 4
_ONLY_HERE = re.compile(r"//(localhost|127\.|0\.0\.0\.0|\[::1?\])")


def doctor(executor: PipelineExecutor) -> list[Finding]:
    """Checks folders, input, servers and limits before a run.

    What would fail has the state "problem".
    """
    with log_disabled("datatrove", "datatrove_ckpt"):
        return [*_examine(executor)]


def _examine(executor: PipelineExecutor) -> Iterator[Finding]:
    plan = RunPlan(executor)
    sample = Sample()
    yield from about("pipeline", _check_steps(executor, plan))
    yield from about(written.logging_dir, check_remote(plan.logging_dir))
    unreachable = []
    runners = {runner.index: runner for runner in plan.runners}
    for index, step in enumerate(plan.pipeline):
        place = ""
        if len(runners) > 1:
            place = f"pipeline[{index}] "
        if isinstance(step, BaseReader):
            checks, found_here = check_input(step, plan.tasks, plan.waits)
            yield from about(f"{place}input", checks)
            if not sample.documents:
                sample = found_here
        runner = runners.get(index)
        if runner is not None:
            found = list(check_runner(runner, place, sample))
            if any(
                (one.state, one.what, one.subject) == ("problem", "reachable", f"{place}output")
                for one in found
            ):
                unreachable.append(index)
            yield from found
    yield from about("job", _check_earlier(plan, unreachable))


def _check_earlier(plan: RunPlan, unreachable: Sequence[int]) -> Iterator[Finding]:
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
        earlier: list[tuple[str, str, Callable[[], object]]] = [
            ("job", "earlier runs", partial(check_job, seen, dry_run=True)),
            ("input", "of finished tasks", partial(check_inputs_unchanged, seen)),
            (
                "output",
                "of earlier runs",
                partial(check_output, seen, True, unreachable, retrying.HUB_PROBE),
            ),
        ]
        for each in earlier:
            found = _compared(*each)
            yield replace(found, message=str(seen.shown(found.message)))


def _check_steps(executor: PipelineExecutor, plan: RunPlan) -> Iterator[Finding]:
    check_steps(plan)
    if hasattr(executor, "check"):  # a JobsPipelineExecutor
        executor.check(plan)
    yield from ()


def check_runner(runner: RunnerPlan, place: str, sample: Sample) -> Iterator[Finding]:
    """``place`` stands before the subjects."""
    plan = runner.plan
    step = runner.step
    remote = runner.step.checkpoints_remote_dir
    yield from about(f"{place}input", _check_prompt(runner, sample))
    for config in step.models.values():
        yield from about(
            f"{place}{config.server_name('server')}", _check_server(plan, step, config)
        )
        if config.prices and sample.documents and config.server_type == "endpoint":
            yield _costs(config, sample)
    yield from about(f"{place}checkpoints", _check_checkpoints(plan, step))
    yield from about(f"{place}output", _check_output(runner))
    yield from about(f"{place}output", _check_writer(runner, sample))
    if remote is not None:
        yield from about(f"{place}mirror", check_remote(remote, deletes=True))
    if step.monitoring.metrics_port is not None:
        yield from about(f"{place}monitoring", _check_monitoring(step.monitoring))
    yield from about(f"{place}output", check_rules_of_hub(plan, step))


def _check_prompt(runner: RunnerPlan, sample: Sample) -> Iterator[Finding]:
    if sample.first and runner.index == 1:
        first = decode(sample.first)
        check_answer(runner.step, first)
        if runner.step.on_document_error == "stop":
            check_first(runner.step.rollout_fn, first)
            asyncio.run(try_media(runner.step.rollout_fn, first))
        prompts = asyncio.run(unsent_prompts(runner.step.rollout_fn, sample.documents))
        yield from check_prompts(prompts, runner.step.model.servers)


def _costs(config: InferenceConfig, sample: Sample) -> Finding:
    """Estimates what documents cost, from the texts of the first ones."""
    characters = sum(len(document.text) for document in sample.documents)
    prompt = characters // len(sample.documents) // _CHARACTERS_PER_TOKEN
    answer = max_tokens_of(config.default_generation_params)
    number = _COSTED_DOCUMENTS * config.rollouts_per_document
    plain, batch = (number * config.cost(prompt, 0, answer, tier) / 1e9 for tier in ("", BATCH))
    text = (
        f"{_COSTED_DOCUMENTS:,} documents cost about {figure(plain)}, and with provider_batches "
        f"{figure(batch)}: {plural(prompt, 'token')} of their text and {answer} of an answer "
        "(max_tokens) each, in one request. A longer prompt costs more, and a shorter answer less."
    )
    return Finding("ok", "costs", text, config.server_name("server"))


def _check_server(
    plan: RunPlan, step: InferenceRunner, config: InferenceConfig
) -> Iterator[Finding]:
    """Whether what the server needs is installed, and its key set.

    Starts nothing; asks endpoints for their models.
    """
    if plan.as_jobs and config.server_type != "endpoint":
        yield Finding(
            "ok", "ready", f"the jobs install {config.server_type}, unless their image has it."
        )
        return
    ready = tried("ready", partial(_server_is_ready, config))
    yield ready
    yield Finding("note", "requests", f"{config.places} (max_concurrent_generations).")
    if config is step.model:
        yield _check_open_files(*step.requests_and_servers())
    if config.server_log_folder is not None:
        expand_path("server_log_folder", config.server_log_folder)
    if config.server_type == "endpoint" and ready.state == "ok":
        yield from check_endpoints(config)
    here = [url for url in config.endpoint_urls if _ONLY_HERE.search(url)]
    if plan.as_jobs and here:
        yield Finding(
            "warning", "endpoint", f"{here[0]} is this machine, which the jobs cannot reach."
        )


def _server_is_ready(config: InferenceConfig) -> str:
    check_servers(config)
    if config.server_type == "endpoint":
        return "the key is set, if the endpoint needs one."
    return f"everything that {config.server_type} needs is installed here."


def _check_checkpoints(plan: RunPlan, step: InferenceRunner) -> Iterator[Finding]:
    if plan.as_jobs:
        return  # each job has a disk of its own
    if step.checkpoints_local_dir is None:
        yield Finding(
            "warning", "folder", "none: a run that dies starts over. Set checkpoints_local_dir."
        )
        return
    folder = step.checkpoints_root
    mirrored = step.checkpoints_remote_dir is not None
    files = _FILES_PER_RANK * plan.at_once
    yield from answered(folder, check_checkpoints(folder, files, mirrored, not plan.is_local))


def _check_output(runner: RunnerPlan) -> Iterator[Finding]:
    writer = runner.step.output_writer
    hub = HubFolder.of(writer.output_folder)
    if hub is not None:
        yield _check_access(runner, hub)
    elif not writer.output_folder.is_local():
        yield from check_remote(writer.output_folder)
    else:
        folder = Path(writer.output_folder.resolve_paths("")).absolute()
        files = _STAGED_PER_RANK * runner.plan.at_once
        yield from answered(folder, check_local_output(folder, files, not runner.plan.is_local))


def _check_writer(runner: RunnerPlan, sample: Sample) -> Iterator[Finding]:
    step = runner.step
    writer = runner.step.output_writer
    name = writer_name(writer)
    if sample.first:
        document = decode(sample.first)
    else:
        document = Document(text="text", id="id")
    document.metadata[step.metadata_key] = [_ANSWER] * step.config.rollouts_per_document
    try:
        check_writable(writer, encode(document), document.id)
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
    if pace.per_hour > COMMITS_PER_HOUR:
        text += (
            f" The hub allows {COMMITS_PER_HOUR} to a free account, and refuses more for up to "
            "an hour."
        )
    state: State = "ok"
    if plan.tasks > _HOURS_OF_COMMITS * pace.per_hour:
        state = "warning"
        text += (
            f" Each of {plural(plan.tasks, 'task')} makes one commit at least, which takes "
            f"{duration(plan.tasks * HOUR / pace.per_hour)}. Use fewer tasks, or several "
            "repositories."
        )
    yield Finding(state, "commits", text)


def _check_access(runner: RunnerPlan, hub: HubFolder) -> Finding:
    private = private_if_made(runner.step.output_writer)
    committed = committed_here(runner)
    look = partial(check_access, hub, private, only_look=True, committed=committed)
    return tried("reachable", lambda: within(look, hub.url))


def _check_monitoring(config: MonitoringConfig) -> Iterator[Finding]:
    check_monitoring(config)
    yield Finding("ok", "ready", "everything that it needs is installed here.")


# job checks --------------------------------------------------------------------------------------

_SHOWN_MODELS = 5


def check_endpoints(config: InferenceConfig) -> list[Finding]:
    try:
        answers = within(lambda: asyncio.run(ExternalServers(config).ask()), written.endpoint_url)
    except CkptError as error:
        return [Finding("problem", "endpoint", str(error))]
    silent: State = "problem" if all(answer.cause for answer in answers) else "warning"
    return [_check_answer(answer, config, silent) for answer in answers]


def _check_answer(answer: EndpointAnswer, config: InferenceConfig, silent: State) -> Finding:
    model = config.model_name_or_path
    if answer.refused:
        return Finding("problem", "endpoint", f"{answer.url} {answer.cause}.")
    if answer.cause:
        text = f"{answer.url}: {answer.cause}. Start the server, or correct {written.endpoint_url}."
        return Finding(silent, "endpoint", text)
    if answer.models is None:
        text = (
            f"{answer.url} answers, and does not list its models. Some gateways have no such list: "
            f"then all is well. Otherwise correct {written.endpoint_url}."
        )
        return Finding("warning", "endpoint", text)
    if model in answer.models:
        context = answer.models[model]
        asked = max_tokens_of(config.default_generation_params)
        if isinstance(context, int) and asked >= context:
            text = f"max_tokens is {asked}, and max_model_len of {answer.url} {context}: lower it."
            return Finding("problem", "endpoint", text)
        return Finding("ok", "endpoint", f"{answer.url} answers, and serves {model}.")
    listed = ", ".join([*answer.models][:_SHOWN_MODELS]) + (
        ", ..." if len(answer.models) > _SHOWN_MODELS else ""
    )
    text = (
        f"{answer.url} does not list the model {model!r}; it lists {listed or 'none'}. Correct "
        f"{written.model_name_or_path}."
    )
    return Finding("problem", "endpoint", text)


def _check_open_files(requests: int, servers: int) -> Finding:
    needed = files_needed(requests, servers)
    allowed = limits()[1]
    if allowed < needed:
        return Finding("problem", "open files", too_low(requests, servers, needed, allowed))
    text = (
        f"{plural(requests, 'request')} at once need up to {needed}; the hard limit is {allowed}."
    )
    return Finding("ok", "open files", text)


def _compared(subject: str, what: str, check: Callable[[], object]) -> Finding:
    """Compares the job with what earlier runs have left, as ``run`` does. Changes nothing."""
    try:
        found = within(check, subject)
    except (CkptError, OSError) as error:
        return Finding("problem", what, str(error), subject)
    if not found or not isinstance(found, list):
        return Finding("ok", what, "nothing differs.", subject)
    more = ""
    if len(found) > 1:
        more = f" There are {len(found)} such tasks."
    return Finding(
        "warning",
        what,
        f"{found[0].text} A run removes the marker and runs the task.{more}",
        subject,
    )


# run.json, commits.jsonl, the database and its log, last_chunk, dead letters, lock, journals and
# staged files.
_FILES_PER_RANK = 20
_STAGED_PER_RANK = 4
_HOURS_OF_COMMITS = 24
