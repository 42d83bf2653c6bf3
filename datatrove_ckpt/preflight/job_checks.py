"""Checks of what a job meets before its first request: endpoints, open files, what earlier runs have left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.generation.job_check import check_job
from datatrove_ckpt.inference.servers.endpoint import EndpointAnswer, ask_endpoints
from datatrove_ckpt.preflight.before_run import check_output
from datatrove_ckpt.preflight.checks import PreflightCheck, State, within
from datatrove_ckpt.preflight.inputs import check_inputs_unchanged
from datatrove_ckpt.preflight.probes import REMOTE_SECONDS
from datatrove_ckpt.process.open_files import files_needed, limits, requests_at_once, too_low

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


def _compared(subject: str, what: str, check: Callable[[], list[str] | int | None]) -> list[PreflightCheck]:
    try:
        found = within(REMOTE_SECONDS, check, subject)
    except (CkptError, OSError) as error:
        return [PreflightCheck("problem", subject, what, str(error))]
    if not found or isinstance(found, int):
        return [PreflightCheck("ok", subject, what, "nothing differs.")]
    more = f" There are {len(found)} such tasks." if len(found) > 1 else ""
    return [PreflightCheck("warning", subject, what, f"{found[0]} A run removes the marker and runs the task.{more}")]
