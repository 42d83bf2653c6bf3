"""What the hub's rules mean for a job: commits per hour, files per folder, and room while the hub refuses commits.

The rules are those of a free account. A hub that refuses commits (429) says for how long, up to an hour. Generation
goes on meanwhile, so what is finished waits on the disk of the checkpoint: its journals and answers, and its files.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from datatrove_ckpt.formatting import byte_size, duration, plural
from datatrove_ckpt.output.hub_pace import COMMITS_PER_HOUR, HOUR, CommitPace
from datatrove_ckpt.output.names import fields_of_documents
from datatrove_ckpt.preflight.checks import PreflightCheck, State
from datatrove_ckpt.preflight.input_checks import Sample
from datatrove_ckpt.preflight.probes import existing_part
from datatrove_ckpt.retrying import file_system_call

FILES_PER_FOLDER = 10_000
FILES_PER_REPOSITORY = 100_000
_HOURS_OF_COMMITS = 24
_TASKS_OBSERVED = 20


def check_commits(subject: str, ranks: int, tasks: int, pace: CommitPace) -> PreflightCheck:
    """Compares the commits of a job with what it may make in an hour.

    Args:
        ranks: tasks at once.
        tasks: of the whole job. Each makes one commit at least.
    """
    planned = math.ceil(ranks * HOUR / pace.mean_seconds) if pace.seconds > 0 else None
    number = "without a limit" if planned is None else f"about {planned} per hour"
    text = f"{number}: {plural(ranks, 'task')} at once, a commit of each at least every {duration(pace.seconds)} "
    text += f"(hub_commit_seconds). All together keep to {pace.per_hour} (hub_commits_per_hour)"
    before_end = pace.most(ends=False)
    state: State = "ok"
    if before_end < pace.per_hour:
        text += f", and to {before_end} before they end"
    if planned is None or planned > before_end:
        text += f", so a file waits about {duration(ranks * HOUR / before_end)} for its commit"
    text += "."
    if pace.per_hour > COMMITS_PER_HOUR:
        text += f" The hub allows {COMMITS_PER_HOUR} to a free account, and refuses more for up to an hour."
    if tasks > _HOURS_OF_COMMITS * pace.per_hour:
        state = "warning"
        text += (
            f" Each of {plural(tasks, 'task')} makes one commit at least, which takes "
            f"{duration(tasks * HOUR / pace.per_hour)}. Use fewer tasks, or several repositories."
        )
    return PreflightCheck(state, subject, "commits", text)


@dataclass(frozen=True)
class Rate:
    """Documents per second of one task, and where the number comes from. None: unknown."""

    documents: float | None
    source: str = ""


def observed_rate(logging_dir: Any) -> Rate:
    """The mean rate of finished tasks, as datatrove's stats in an executor's ``logging_dir`` have it.

    Raises:
        OSError: the folder cannot be read.
    """
    documents = seconds = 0.0
    tasks = 0
    with file_system_call():
        names = logging_dir.list_files("stats", glob_pattern="*.json") if logging_dir.isdir("stats") else []
        for name in names[:_TASKS_OBSERVED]:
            found = _rate_of(json.loads(logging_dir.cat_file(name)))
            if found is not None:
                documents, seconds, tasks = documents + found[0], seconds + found[1], tasks + 1
    if not seconds or not documents:
        return Rate(None)
    return Rate(documents / seconds, f"as the stats of {plural(tasks, 'finished task')} say")


def _rate_of(stats: Any) -> tuple[float, float] | None:
    """Documents and seconds of a task; None if its stats do not tell them."""
    with suppress(KeyError, TypeError, ValueError):
        for step in stats:
            found = step["stats"]
            if "inference_time" in found:
                number = found["documents"] if "documents" in found else found["documents_processed"]
                return _total(number), _total(found["inference_time"])
    return None


def _total(stat: Any) -> float:
    return float(stat["total"] if isinstance(stat, dict) else stat)


def check_refusals(
    subject: str, folder: Path, sample: Sample, answer: int | None, ranks: int, rate: Rate
) -> PreflightCheck:
    """Compares the free bytes with what piles up in an hour in which the hub takes no commit.

    Args:
        folder: ``checkpoints_local_dir``.
        answer: bytes of the answers to one document; None if unknown.
        ranks: tasks at once, on this disk.
    """
    what = "while the hub refuses commits"
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    if not sample.number:
        text = f"{byte_size(free)} free; what an hour needs {what} cannot be estimated: no document could be read."
        return PreflightCheck("ok", subject, "room for refusals", text)
    # The journal and the staged file hold document and answer, the request cache the answer.
    each = 2 * (sample.mean + (answer or 0)) + (answer or 0)
    answers = "answers not counted (max_tokens is not set)" if answer is None else f"answers up to {byte_size(answer)}"
    basis = f"{plural(ranks, 'task')} at once, documents of {byte_size(sample.mean)}, {answers}"
    if rate.documents is None:
        text = f"{byte_size(free)} free; {what}, an hour of 1 document per second and task needs "
        text += f"{byte_size(each * ranks * HOUR)} ({basis}). Give --documents-per-second to have it compared."
        return PreflightCheck("ok", subject, "room for refusals", text)
    need = int(each * ranks * rate.documents * HOUR)
    state: State = "ok" if free >= need else "warning"
    text = f"{byte_size(free)} free; {what}, an hour needs up to {byte_size(need)}: {basis}, "
    text += f"{rate.documents:.3g} documents per second and task, {rate.source}."
    if state == "warning":
        hours = free / need * HOUR
        text += f" It is full after {duration(hours)}; then the job waits, and goes on by itself. Free some space."
    return PreflightCheck(state, subject, "room for refusals", text)


def check_files(subject: str, writer: Any, chunks: int, tasks: int, records_per_chunk: int) -> PreflightCheck:
    """Compares the number of output files with what the hub recommends. ``chunks``: of all tasks together."""
    folders = _folders(writer.output_filename, chunks, tasks)
    in_folder = None if folders is None else math.ceil(chunks / folders)
    text = f"about {plural(chunks, 'file')}"
    text += "" if in_folder is None else f", up to {in_folder} in a folder"
    advice = []
    factor = chunks / FILES_PER_REPOSITORY
    if chunks > FILES_PER_REPOSITORY:
        advice.append(f"more than {FILES_PER_REPOSITORY} files in a repository")
    if in_folder is not None and in_folder > FILES_PER_FOLDER:
        advice.append(f"more than {FILES_PER_FOLDER} in a folder")
        factor = max(factor, in_folder / FILES_PER_FOLDER)
    if not advice:
        return PreflightCheck("ok", subject, "files", f"{text}.")
    records = _round_up(records_per_chunk * factor)
    text += f". The hub becomes slow with {' and with '.join(advice)}. Set records_per_chunk to {records} or more"
    text += "." if chunks > FILES_PER_REPOSITORY else ", or begin output_filename with ${rank}/."
    return PreflightCheck("warning", subject, "files", text)


def _folders(template: Template, chunks: int, tasks: int) -> int | None:
    """The number of folders among which a template spreads the files; None if documents decide it."""
    folder = Template(posixpath.dirname(template.template))
    if fields_of_documents(folder):
        return None
    names = folder.get_identifiers()
    return chunks if "chunk_index" in names else tasks if "rank" in names else 1


def _round_up(number: float) -> int:
    """Two significant digits."""
    unit = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return math.ceil(number / unit) * unit
