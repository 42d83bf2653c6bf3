"""Checks of what a job meets before its first request: endpoints, open files, folder names, an earlier run's files."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint.layout import rank_numbers
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.formatting import error_text, plural
from datatrove_ckpt.inference.servers.endpoint import EndpointAnswer, ask_endpoints
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.output.names import STAGING
from datatrove_ckpt.preflight.checks import PreflightCheck, State, within
from datatrove_ckpt.preflight.probes import REMOTE_SECONDS
from datatrove_ckpt.process.open_files import files_needed, limits, too_low

_SHOWN_MODELS = 5


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
        text = f"{answer.url}: {answer.cause}. Start the server, or correct endpoint_url (without /v1)."
        return PreflightCheck(silent, subject, "endpoint", text)
    if answer.models is None:
        return PreflightCheck("ok", subject, "endpoint", f"{answer.url} answers, and does not list its models.")
    if model in answer.models:
        return PreflightCheck("ok", subject, "endpoint", f"{answer.url} answers, and serves {model}.")
    listed = ", ".join(answer.models[:_SHOWN_MODELS]) + (", ..." if len(answer.models) > _SHOWN_MODELS else "")
    text = f"{answer.url} does not list the model {model!r}; it lists {listed or 'none'}. Correct model_name_or_path."
    return PreflightCheck("problem", subject, "endpoint", text)


def check_open_files(subject: str, config: Any) -> PreflightCheck:
    """Compares the need of one task with the hard limit of this machine."""
    requests = config.max_concurrent_generations
    needed, allowed = files_needed(requests, config.servers), limits()[1]
    if allowed < needed:
        return PreflightCheck("problem", subject, "open files", too_low(requests, needed, allowed))
    text = f"{plural(requests, 'request')} at once need up to {needed}; the hard limit is {allowed}."
    return PreflightCheck("ok", subject, "open files", text)


def check_folder_name(setting: str, folder: Any) -> list[PreflightCheck]:
    """Finds ``$NAME`` and ``~`` in a local folder, which no shell has replaced."""
    name = str(folder)
    if "://" in name or not re.search(r"\$\w|\$\{|(^|/)~", name):
        return []
    text = f"{name} contains $ or ~, which nothing replaces here. Write the folder's full name."
    return [PreflightCheck("problem", setting, "name", text)]


def check_earlier_run(subject: str, step: Any) -> list[PreflightCheck]:
    """Compares output and checkpoints of an earlier run: files that are gone, changed, or nobody's.

    ``step``: an InferenceRunner with checkpoints.
    """
    folder = step.checkpoints_root
    try:
        return within(REMOTE_SECONDS, lambda: _earlier_run(subject, folder, step.output_writer), str(folder))
    except Exception as error:  # whatever a remote file system raises, and files of any content
        text = str(error) if isinstance(error, CkptError) else f"{folder}: {error_text(error)}."
        return [PreflightCheck("problem", subject, "earlier run", text)]


def _earlier_run(subject: str, folder: Path, writer: Any) -> list[PreflightCheck]:
    if not folder.is_dir() or not rank_numbers(folder):
        return _files_in_the_way(subject, writer)
    report = verify(folder)
    kinds: dict[str, list[str]] = defaultdict(list)
    for problem in report.problems:
        kinds[problem.kind].append(str(problem))
    checks = []
    for kind, messages in kinds.items():
        more = f" There are {len(messages)} such: datatrove-ckpt verify {folder}" if len(messages) > 1 else ""
        checks.append(PreflightCheck("problem", subject, f"earlier run, {kind}", f"{messages[0]}{more}"))
    if checks:
        return checks
    states = list(report.states.values())
    text = (
        f"{states.count('finished')} of {plural(len(states), 'rank')} finished; {report.number_of_files} output files"
    )
    return [PreflightCheck("ok", subject, "earlier run", f"{text} are there, of the right size.")]


def _files_in_the_way(subject: str, writer: Any) -> list[PreflightCheck]:
    """Without a checkpoint, files that look like this run's output belong to another one."""
    folder = writer.output_folder
    if not folder.exists(""):
        return []
    parts = re.split(r"\$(?:\w+|\{\w+\})", writer.output_filename.template)
    ours = re.compile(r"(?:\d{3}_)?" + ".+".join(map(re.escape, parts)))
    found = [name for name in folder.list_files() if STAGING not in name and ours.fullmatch(name)]
    if not found:
        return []
    text = f"{folder.resolve_paths('')} has {plural(len(found), 'file')} like {found[0]}, and there is no checkpoint: "
    text += "they are another run's. Choose an empty output_folder, or that run's checkpoints_local_dir."
    return [PreflightCheck("problem", subject, "earlier run", text)]
