"""Whether a copy of a checkpoint has all its parts: what the parts that are there tell of those that are not.

A task that has not started has no folder, so a folder that is missing need not be lost. What shows that there was one:
the file that names its last chunk, a retry of its dead letters, or output files of it. A task that was stopped before
its first commit leaves none of these; it is named, and the user knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint.dealt_out import lost_ranks, older_ranks, refuse_lost_shares
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import JOB, last_chunk_file, rank_folder, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.errors import CheckpointError, CheckpointMismatch
from datatrove_ckpt.maintenance.findings import Problem, Report
from datatrove_ckpt.output.names import output_pattern, rank_and_chunk


def check_not_halfway(checkpoints: Path) -> None:
    """Refuses a copy that was made while ``reshard`` was interrupted, or that lacks what it has dealt out.

    Raises:
        CheckpointMismatch: it says which, and what to do.
        CheckpointCorrupt: a file of ``reshard`` cannot be read.
    """
    try:
        refuse_half_resharded(checkpoints)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"{error} Do that at the old place, then copy it again, and relocate again. Nothing was changed."
        ) from None
    refuse_lost_shares(checkpoints)


def missing_ranks(report: Report) -> tuple[list[Problem], list[int]]:
    """Ranks that have no folder: a problem for each one that had one, and the others. And those from older copies."""
    runs = _runs(report)
    tasks = max((run.get("tasks") or 0 for run in runs.values()), default=0)
    found, unknown = list[Problem](), list[int]()
    traces = dict(_traces(report, [number for number in range(tasks) if number not in runs]))
    there = {rank.number for rank in report.ranks if not rank.root}
    for number in range(tasks):
        folder = rank_folder(report.checkpoints, number)
        if number in traces:
            message = f"{folder} is missing, and {traces[number]}."
            found.append(Problem("rank", message, rank=number, path=str(folder)))
        elif number not in there:
            unknown.append(number)
    for number, message in [*lost_ranks(report.checkpoints), *older_ranks(report.checkpoints)]:
        folder = rank_folder(report.checkpoints, number)
        found.append(Problem("rank", message, rank=number, path=str(folder)))
    return found, unknown


def ranks_of_another_number(report: Report) -> list[Problem]:
    """Ranks that were copied before, or after, ``reshard`` gave the run another number of tasks."""
    numbers = {number: run.get("tasks") for number, run in _runs(report).items()}
    usual, job = Counter(numbers.values()).most_common(1), report.checkpoints / JOB
    if not usual:
        return []
    right = usual[0][0]
    with suppress(CheckpointError):
        right = read_run(job).get("tasks", right) if job.exists() else right
    return [
        Problem("rank", f"is of a run with {tasks} tasks, and this one has {right}: reshard came between.", rank=number)
        for number, tasks in numbers.items()
        if tasks != right
    ]


def _runs(report: Report) -> dict[int, Json]:
    """``run.json`` of each rank, without retries, that can be read."""
    found = {}
    for rank in report.ranks:
        with suppress(CheckpointError):
            if not rank.root and rank.identity:
                found[rank.number] = rank.identity
    return found


def _traces(report: Report, numbers: list[int]) -> Iterator[tuple[int, str]]:
    """What shows that each of these ranks had a folder, if something does. None of them has one that can be read."""
    wanted = {number for number in numbers if not rank_folder(report.checkpoints, number).exists()}
    for path, number in _files(report):
        if number in wanted:
            yield number, f"{path} is of it"
    for retry in retry_folders(report.checkpoints):
        for number in wanted.intersection(rank_numbers(retry)):
            yield number, f"{retry.name} has a retry of it"
    for number in wanted:
        if (last := last_chunk_file(report.checkpoints, number)).exists():
            yield number, f"{last} names its last chunk"


def _files(report: Report) -> Iterator[tuple[str, int]]:
    """Output files that no commit names, with the rank that their names tell."""
    templates = {str(run["output_filename"]) for run in _runs(report).values() if "output_filename" in run}
    patterns = [output_pattern(template) for template in sorted(templates)]
    for problem in report.problems:
        if problem.kind != "foreign" or problem.path is None:
            continue
        for match in filter(None, (pattern.fullmatch(problem.path) for pattern in patterns)):
            (root, number), _ = rank_and_chunk(match)
            if not root:
                yield problem.path, number
