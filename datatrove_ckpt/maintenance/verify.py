"""Compares the output files with the commits of all ranks. Only reads, and works during a run.

The kinds of problems:

    missing, truncated, grown   an output file does not exist, or is smaller or larger than its commit says
    altered                     its content differs: on the hub by the listed hash, elsewhere (full) by xxh128
    columns                     (full) a Parquet file does not load with the first one of its folder, or as text
    documents                   (full) the files of a chunk hold more or fewer documents than were committed
    duplicate                   several commits name one file
    twice                       a document is in a chunk, and a retry took it as a dead letter of this chunk
    foreign                     no commit names a file in the output folder
    lost                        no commit covers these documents, though the rank is finished or later chunks follow
    overlap                     two commits cover these documents
    dead_letters                dead_letters.jsonl holds more or fewer letters than the commits counted
    commits                     commits are lost or damaged; what else the rank has is not checked
    corrupt                     another file of the checkpoint is damaged
    identity, rank              ranks were run with different settings; a rank is missing, or there is one too many
    output                      the output folder, or a file in it, cannot be read
    config                      the YAML file that was given is not that of this run (found by the command)

``repair`` redoes the chunks with problems of the first two lines and of ``twice``, and rebuilds ``commits``.

Commits are read before the output folder is listed, so a chunk that a run finishes in between never counts as missing.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from typing import Any

import orjson
from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint.commits import Commit, repair_command
from datatrove_ckpt.checkpoint.dealt_out import lost_ranks, older_ranks, refuse_lost_shares, retired_ranks
from datatrove_ckpt.checkpoint.forks import is_unstarted
from datatrove_ckpt.checkpoint.identity import describe_alike, read_run, without_code
from datatrove_ckpt.checkpoint.job import name_tasks
from datatrove_ckpt.checkpoint.layout import JOB, RESHARD_PLAN, RUN, SHARES, rank_folder, retry_folders
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.checkpoint.setting_values import comparable, same_value
from datatrove_ckpt.errors import CheckpointError, ConfigError
from datatrove_ckpt.formatting import number_range, plural
from datatrove_ckpt.maintenance.findings import CommittedChunk, Report
from datatrove_ckpt.maintenance.inspect import RankFolder, RankStatus, find_ranks, summarise
from datatrove_ckpt.maintenance.retried import delivered_twice
from datatrove_ckpt.maintenance.verify_output import check_output
from datatrove_ckpt.output.column_types import Misfit, Schema, misfits, read_schema
from datatrove_ckpt.output.formats import is_known


def verify(
    checkpoints: Path,
    output: str | None = None,
    full: bool = False,
    given: str | None = None,
    planned: str | None = None,
) -> Report:
    """Verifies all ranks.

    Args:
        output: the output folder, if it is not where ``run.json`` says.
        full: also read every output file.
        given: how the user named the checkpoint, for commands to type; None: as ``checkpoints``.
        planned: where the output of a run will be that has not started, if a YAML file tells it.

    Raises:
        ConfigError: ``checkpoints`` contains no checkpoint, or no run.json says where the output is.
    """
    ranks = find_ranks(checkpoints)
    path = output or _output_folder(ranks, planned, given)
    command = f"{repair_command(given or checkpoints, output=output)}{' --full' if full else ''}"
    report = Report(checkpoints, path, get_datafolder(path), command, ranks)
    for rank in ranks:
        _check_rank(report, rank)
    _check_settings(report)
    _check_number_of_ranks(report)
    _check_retries(report)
    check_output(report, full, folder_is_given=output is not None)
    if full:
        check_columns(report)
    return report


def _output_folder(ranks: list[RankFolder], planned: str | None, given: str | None) -> str:
    runs = [run for rank in ranks if (run := _identity(rank))]
    found = [str(folder) for run in runs if (folder := run.get("output_folder"))]
    # Ranks that were complete when the user moved the output still name the old place.
    left = {change.get("old") for change in _accepted(*ranks) if change.get("field") == "output_folder"}
    if found:
        return next((folder for folder in found if folder not in left), found[0])
    if planned is not None:
        return str(get_datafolder(planned).resolve_paths(""))
    what = given or ranks[0].folder.parent
    if runs and all(is_unstarted(run) for run in runs):
        raise ConfigError(
            f"{what} is a fork that has not started, so it has no output yet. Start it first; or give its YAML file "
            "instead, or --output."
        )
    raise ConfigError(f"{what}: no run.json says where the output is. Name it with --output.")


def settings_of_ranks(ranks: list[RankFolder]) -> list[dict[str, Any]]:
    """What each ``run.json`` holds that can be read, those of retries left out."""
    return [kept for rank in ranks if not rank.root and (kept := _identity(rank))]


def _identity(rank: RankFolder) -> dict[str, Any]:
    """The content of run.json; empty if it is damaged, which is reported elsewhere."""
    try:
        return rank.identity
    except CheckpointError:
        return {}


# one rank ------------------------------------------------------------------------------------------------------------


def _check_rank(report: Report, rank: RankFolder) -> None:
    summary, commits = summarise(rank)
    report.summaries.append(summary)
    if summary.error:
        report.add_problem("commits" if summary.can_be_rebuilt else "corrupt", summary.error, rank)
        return
    writer = str(rank.identity.get("output_writer"))
    countable = is_known(writer)
    for commit in commits.values():
        documents = commit.counts.written if countable else None
        report.chunks.append(CommittedChunk(rank, commit.chunk_index, commit.files, documents))
    _check_ordinals(report, rank, commits, summary)
    _check_dead_letters(report, rank, commits, summary)
    _list_unfinished(report, rank, commits, summary)


def _check_ordinals(report: Report, rank: RankFolder, commits: dict[int, Commit], summary: RankStatus) -> None:
    """Checks that the commits together cover every document once."""
    start_over = f"Restore commits.jsonl from a copy, or start this rank over: remove {rank.folder} and its output."
    chunk_index = ordinal = 0
    for _, commit in sorted(commits.items()):
        gap = f"no commit covers documents {number_range(ordinal, commit.first_ordinal)}"
        if commit.first_ordinal < ordinal:
            twice = number_range(commit.first_ordinal, min(ordinal, commit.next_ordinal))
            message = f"an earlier commit also covers documents {twice}. {start_over}"
            report.add_problem("overlap", message, rank, commit.chunk_index)
        elif commit.chunk_index == chunk_index and commit.first_ordinal > ordinal:
            report.add_problem("lost", f"{gap}. {start_over}", rank)
        elif commit.chunk_index > chunk_index and summary.state == "finished":
            advice = f"To process them: {report.repair_command}, then run again."
            message = f"{gap} (chunks {number_range(chunk_index, commit.chunk_index)}). {advice}"
            report.add_problem("lost", message, rank, chunk_index)
        chunk_index, ordinal = commit.chunk_index + 1, commit.next_ordinal


def _check_dead_letters(report: Report, rank: RankFolder, commits: dict[int, Commit], summary: RankStatus) -> None:
    """Checks the number of dead letters of each commit: they lie between the sizes that two commits record."""
    path, start = rank.dead_letters_file, 0
    for commit in commits.values():
        found = rank.count_dead_letters(start, commit.dead_letters_size)
        start = commit.dead_letters_size
        if found != commit.counts.dead:
            message = f"{path} holds {plural(found, 'dead letter')} of this chunk instead of {commit.counts.dead}."
            message += " Restore it from a copy; the output is not affected."
            report.add_problem("dead_letters", message, rank, commit.chunk_index, path)
    size = path.stat().st_size if path.exists() else 0
    if size < start:
        message = f"{path} has {size} bytes instead of the {start} that commits name. Restore it from a copy."
        report.add_problem("dead_letters", message, rank, path=path)
    if size > start and summary.state == "finished":
        message = f"{path} has {size - start} bytes after the last dead letter that a commit covers."
        report.add_problem("dead_letters", message, rank, path=path)


def _list_unfinished(report: Report, rank: RankFolder, commits: dict[int, Commit], summary: RankStatus) -> None:
    if summary.state == "finished":
        return
    before = len(report.unfinished)
    last = max([*commits, *summary.journals], default=-1)
    for index in range(last):
        if index not in commits and index not in summary.journals:
            report.add_unfinished("is not started, although later chunks are.", rank, index)
    for index, number in summary.journals.items():
        report.add_unfinished(f"is not finished; its journal holds {plural(number, 'document')}.", rank, index)
    if len(report.unfinished) == before:
        report.add_unfinished("is not finished: the run is active, or must be run again.", rank)


def _check_retries(report: Report) -> None:
    ranks = {rank.key: rank for rank in report.ranks}
    damaged = {number for (_, number), state in report.states.items() if state == "damaged"}
    retries = retry_folders(report.checkpoints)
    for number in sorted({number for _, number in ranks} - damaged):
        for twice in delivered_twice(report.checkpoints, number, retries):
            advice = f"To redo it without the document: {report.repair_command}, then run again."
            report.add_problem("twice", f"{twice.what} {advice}", ranks[twice.root, number], twice.chunk_index)


# all ranks -----------------------------------------------------------------------------------------------------------


def _check_settings(report: Report) -> None:
    """Checks that all ranks of the run have one identity. The most frequent one counts as right."""
    roots: dict[str, list[RankFolder]] = defaultdict(list)
    for rank in report.ranks:
        if _identity(rank) and rank.settings and not is_unstarted(rank.identity):
            roots[rank.root].append(rank)
    for ranks in roots.values():
        _check_equal_settings(report, ranks)


def _check_equal_settings(report: Report, ranks: list[RankFolder]) -> None:
    settings = {rank.number: rank.settings for rank in ranks}
    if not all(describe_alike(settings[ranks[0].number], fields) for fields in settings.values()):
        # Some ranks were last run by another release, which describes the same code in another way.
        settings = {number: without_code(fields) for number, fields in settings.items()}
    variants: dict[bytes, list[RankFolder]] = defaultdict(list)
    for rank in ranks:
        variants[comparable("", settings[rank.number])].append(rank)
    usual, *others = sorted(variants.values(), key=len, reverse=True)
    for rank in (rank for variant in others for rank in variant):
        old, new = settings[usual[0].number], settings[rank.number]
        known = defaultdict[str, set[bytes]](set)
        for change in _accepted(rank, usual[0]):
            name = str(change.get("field"))
            known[name] |= {comparable(name, change.get("old")), comparable(name, change.get("new"))}
        if all(
            {comparable(name, old.get(name)), comparable(name, new.get(name))} <= known[name]
            for name in _differing(old, new)
        ):
            continue
        message = f"was run with settings that differ from rank {usual[0].number}: {_differences(old, new)}."
        report.add_problem("identity", message, rank, path=rank.folder / RUN)


def _accepted(*ranks: RankFolder) -> list[dict[str, Any]]:
    """The changes that the user has accepted for these ranks of a job, or for the whole job."""
    found = [change for rank in ranks for change in _identity(rank).get("accepted_changes", [])]
    job = ranks[0].folder.parent / JOB
    with suppress(CheckpointError):
        found += read_run(job).get("accepted_changes", []) if job.exists() else []
    return found


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys([*old, *new]) if not same_value(name, old.get(name), new.get(name))]


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {_shown(old.get(name))} -> {_shown(new.get(name))}" for name in _differing(old, new))


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."


def _check_number_of_ranks(report: Report) -> None:
    # A retry has only the ranks with dead letters, so its ranks do not count.
    ranks = {rank.number: rank for rank in report.ranks if not rank.root}
    tasks = max((_identity(rank).get("tasks") or 0 for rank in ranks.values()), default=0)
    is_active = not {"running", "unfinished"}.isdisjoint(report.states.values())
    missing = [number for number in range(tasks) if not rank_folder(report.checkpoints, number).exists()]
    for number in () if is_active else list(missing):
        rank = RankFolder("", number, rank_folder(report.checkpoints, number))
        if rank.last_chunk_file.exists():  # it had committed chunks
            missing.remove(number)
            message = f"{rank.folder} is missing: its checkpoint was removed. Bring it back, or run again."
            report.add_problem("rank", message, rank, path=rank.folder)
    if missing:
        have = "has" if len(missing) == 1 else "have"
        report.add_unfinished(f"{len(missing)} of {plural(tasks, 'task')} {have} not started ({name_tasks(missing)}).")
    try:
        refuse_half_resharded(report.checkpoints)
    except CheckpointError as error:
        report.add_problem("rank", str(error), path=report.checkpoints / RESHARD_PLAN)
    try:
        refuse_lost_shares(report.checkpoints)
    except CheckpointError as error:
        report.add_problem("rank", str(error), path=report.checkpoints / SHARES)
        return
    for number, message in [*lost_ranks(report.checkpoints), *older_ranks(report.checkpoints)]:
        folder = rank_folder(report.checkpoints, number)
        report.add_problem("rank", message, RankFolder("", number, folder), path=folder)
    retired = retired_ranks(report.checkpoints)
    for number, rank in ranks.items():
        if tasks and number >= tasks and number not in retired:
            report.add_problem("rank", f"is one too many: the run has {plural(tasks, 'task')}.", rank, path=rank.folder)


# verify columns -------------------------------------------------------------------------------------------------------

# Whether the Parquet files of a run load as one dataset: no rank can see the columns of another one while it runs.
#
# Loaders take the columns of the first file of a folder, by name, and convert those of the others. Only footers are
# read.


@dataclass
class _Found:
    """The first file that does not fit the first file of all by a column, and how many more there are."""

    chunk: CommittedChunk
    path: str
    first: str
    why: Misfit
    more: int = -1


def check_columns(report: Report) -> None:
    """Adds a problem for each column by which files of one folder do not load together, or not as what they are."""
    broken = {problem.path for problem in report.problems}
    files = {file.path: chunk for chunk in report.chunks for file in chunk.files if file.path.endswith(".parquet")}
    firsts: dict[str, tuple[str, Schema]] = {}
    found: dict[tuple[str, str], _Found] = {}
    for path, chunk in sorted(files.items()):
        if path in broken or (schema := _schema(report, path)) is None:
            continue
        first, expected = firsts.setdefault(dirname(path), (path, schema))
        for why in misfits(expected, schema):
            one = found.setdefault((first, why.column), _Found(chunk, path, first, why))
            one.more += 1
            if one.why.as_text and not why.as_text:  # the worse of both
                one.chunk, one.path, one.why = chunk, path, why
    for one in found.values():
        report.add_problem("columns", _message(one), one.chunk.rank, one.chunk.index, one.path)


def _message(one: _Found) -> str:
    loads = "loads as text" if one.why.as_text else "does not load"
    more = f" So {plural(one.more, 'more file')}." if one.more else ""
    return (
        f"{one.path} {loads} after {one.first}: column {one.why.column!r} is {one.why.later} there, and "
        f"{one.why.first} in the first file, whose types loaders take.{more} Give the loader a schema, or start over "
        "with one for ParquetWriter."
    )


def _schema(report: Report, path: str) -> Schema | None:
    try:
        return read_schema(report.folder, path)
    except ImportError:
        return None
