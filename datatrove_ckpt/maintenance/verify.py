"""Compares the output files with the commits of all ranks. Only reads, and works during a run.

docs/cli.md has the kinds of problems. Commits are read before the output folder is listed, so a
chunk that a run finishes in between never counts as missing.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import chain
from pathlib import Path

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint.commits import CommitsDamaged
from datatrove_ckpt.checkpoint.identity import Change, RunIdentity, comparable, compare, read_run
from datatrove_ckpt.checkpoint.job import name_tasks, recorded_output, removed_ranks
from datatrove_ckpt.checkpoint.layout import JOB, RUN, rank_folder
from datatrove_ckpt.checkpoint.ledger import CHECKED, RankLedger, read_ranks
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.common.formatting import number_range, plural, repair_command
from datatrove_ckpt.errors import CheckpointError, ConfigError
from datatrove_ckpt.maintenance.findings import CommittedChunk, Problem, Report
from datatrove_ckpt.maintenance.verify_columns import check_columns
from datatrove_ckpt.maintenance.verify_output import check_output
from datatrove_ckpt.maintenance.where import Place
from datatrove_ckpt.output.formats import is_known


def verify(place: Place, output: str | None = None, full: bool = False) -> Report:
    command = repair_command(*place.given, output=output)
    if full:
        command += " --full"
    report = Report(place.folder, command)
    for rank in read_ranks(place.folder, CHECKED):
        report.ranks.append(rank)
        report.sums.add(rank)
        _check_rank(report, rank)
        rank.commits = {}  # there may be millions
    report.output = output or find_output(place, report.ranks)
    report.folder = get_datafolder(report.output)
    _check_settings(report)
    _check_ranks(report)
    check_output(report, full, folder_is_given=output is not None)
    if full:
        check_columns(report)
    return report


def find_output(place: Place, ranks: list[RankLedger]) -> str:
    """Returns the output folder of a run, as its checkpoint names it.

    A copied or renamed run folder has its own output: the recorded folder may be another run's.

    Raises:
        ConfigError: nothing names it, or it is gone, and what the checkpoint names is another
            run's.
    """
    checkpoints = place.folder
    what = place.given[0]
    if place.config and place.output is not None:  # whatever the checkpoint says
        return str(get_datafolder(place.output).resolve_paths(""))
    runs = [rank.run for rank in ranks if rank.run]
    recorded = recorded_output(checkpoints, runs)
    if recorded is not None:
        now = checkpoints.absolute().with_name("output")
        other = other_run(checkpoints, recorded)
        is_moved = other or (
            _is_in_run_folder(checkpoints, recorded) and not Path(recorded).is_dir()
        )
        if is_moved and now.is_dir():
            return str(now)
        if other:
            raise ConfigError(
                f"the output of {what} is gone: {recorded} belongs to {other}. Bring it back, or "
                "name it with --output."
            )
        return recorded
    if place.output is not None:
        return str(get_datafolder(place.output).resolve_paths(""))
    for rank in ranks:
        if rank.damage is not None:  # of a newer version, perhaps
            raise rank.damage
    raise ConfigError(f"{what}: no run.json says where the output is. Name it with --output.")


def other_run(checkpoints: Path, recorded: str) -> Path | None:
    """Returns the run folder whose output is recorded here, if this one was copied or renamed."""
    there = Path(recorded).with_name("checkpoints")
    is_other = (
        _is_in_run_folder(checkpoints, recorded)
        and there.is_dir()
        and not there.samefile(checkpoints)
    )
    if is_other and any(there.glob(f"[0-9]*/{RUN}")):
        return there.parent
    return None


def _is_in_run_folder(checkpoints: Path, recorded: str) -> bool:
    return (checkpoints.name, Path(recorded).name) == (
        "checkpoints",
        "output",
    ) and "://" not in recorded


def _check_rank(report: Report, rank: RankLedger) -> None:
    if rank.damage is not None:
        kind = "commits" if isinstance(rank.damage, CommitsDamaged) else "corrupt"
        report.add_problem(kind, str(rank.damage), rank)
        return
    is_countable = is_known(str(rank.run.get("output_writer")))
    for commit in rank.commits.values():
        documents = commit.counts.written if is_countable else None
        report.chunks.append(CommittedChunk(rank, commit.chunk_index, commit.files, documents))
    _check_ordinals(report, rank)
    _check_dead_letters(report, rank)
    _list_unfinished(report, rank)


def _check_ordinals(report: Report, rank: RankLedger) -> None:
    start_over = (
        "Restore commits.jsonl from a copy, or start this task over: remove "
        f"{rank.folder} and its output."
    )
    chunk_index = ordinal = 0
    for _, commit in sorted(rank.commits.items()):
        gap = f"no commit covers documents {number_range(ordinal, commit.first_ordinal)}"
        if commit.first_ordinal < ordinal:
            twice = number_range(commit.first_ordinal, min(ordinal, commit.next_ordinal))
            message = f"an earlier commit also covers documents {twice}. {start_over}"
            report.add_problem("overlap", message, rank, commit.chunk_index)
        elif commit.chunk_index == chunk_index and commit.first_ordinal > ordinal:
            report.add_problem("lost", f"{gap}. {start_over}", rank)
        elif commit.chunk_index > chunk_index and rank.state == "finished":
            advice = f"To process them: {report.repair_command}, then run again."
            message = f"{gap} (chunks {number_range(chunk_index, commit.chunk_index)}). {advice}"
            report.add_problem("lost", message, rank, chunk_index)
        chunk_index = commit.chunk_index + 1
        ordinal = commit.next_ordinal


def _check_dead_letters(report: Report, rank: RankLedger) -> None:
    """Checks that dead letters of a commit lie between recorded sizes."""
    path = rank.dead_letters_file
    start = 0
    for commit in rank.commits.values():
        found = rank.count_dead_letters(start, commit.dead_letters_size)
        start = commit.dead_letters_size
        if found != commit.counts.dead:
            message = (
                f"{path} holds {plural(found, 'dead letter')} of this chunk instead of "
                f"{commit.counts.dead}. Restore it from a copy; the output is not affected."
            )
            report.add_problem("dead_letters", message, rank, commit.chunk_index, path)
    size = path.stat().st_size if path.exists() else 0
    message = ""
    if size < start:
        message = (
            f"{path} has {size} bytes instead of the {start} that commits name. Restore it "
            "from a copy."
        )
    elif size > start and rank.state == "finished":
        message = (
            f"{path} has {size - start} bytes after the last dead letter that a commit covers."
        )
    if message:
        report.add_problem("dead_letters", message, rank, path=path)


def _list_unfinished(report: Report, rank: RankLedger) -> None:
    if rank.state == "finished":
        return
    before = len(report.unfinished)
    journals = rank.open_journals
    last = max([*rank.commits, *journals], default=-1)
    for index in range(last):
        if index not in rank.commits and index not in journals:
            report.add_problem(
                "unfinished", "is not started, although later chunks are.", rank, index
            )
    for index, counts in journals.items():
        held = plural(counts.read, "document")
        report.add_problem("unfinished", f"is not finished; its journal holds {held}.", rank, index)
    if len(report.unfinished) == before:
        report.add_problem(
            "unfinished", "is not finished: the run is active, or must be run again.", rank
        )


def _check_settings(report: Report) -> None:
    """Compares identities with the most frequent one."""
    roots: dict[str, list[RankLedger]] = defaultdict(list)
    for rank in report.ranks:
        if rank.settings:
            roots[rank.root].append(rank)
    for ranks in roots.values():
        variants: dict[bytes, list[RankLedger]] = defaultdict(list)
        for rank in ranks:
            variants[comparable("", rank.settings)].append(rank)
        usual, *others = sorted(variants.values(), key=len, reverse=True)
        for rank in chain.from_iterable(others):
            changes = _not_accepted(rank, usual[0])
            if changes:
                differences = "; ".join(
                    f"{one.field}: {one.shown_old} -> {one.shown_new}" for one in changes
                )
                message = (
                    f"was run with settings that differ from task {usual[0].number}: {differences}."
                )
                report.add_problem("identity", message, rank, path=rank.folder / RUN)


def _not_accepted(rank: RankLedger, usual: RankLedger) -> list[Change]:
    """Returns the differences between two ranks, unless the user accepted all their values."""
    known = defaultdict[str, set[bytes]](set)
    for accepted in accepted_changes(rank, usual):
        name = str(accepted.get("field"))
        known[name] |= {
            comparable(name, accepted.get("old")),
            comparable(name, accepted.get("new")),
        }
    changes = compare(usual.run, RunIdentity(rank.settings))
    for change in changes:
        if (
            not {comparable(change.field, change.old), comparable(change.field, change.new)}
            <= known[change.field]
        ):
            return changes
    return []


def accepted_changes(*ranks: RankLedger) -> list[Json]:
    runs = [rank.run for rank in ranks]
    job = ranks[0].folder.parent / JOB
    with suppress(CheckpointError):
        if job.exists():
            runs.append(read_run(job))
    return [change for run in runs for change in run.get("accepted_changes", [])]


def _check_ranks(report: Report) -> None:
    # A retry has only ranks with dead letters, so its ranks do not count.
    ranks = {rank.number for rank in report.ranks if not rank.root}
    missing = [rank for rank in range(report.tasks) if rank not in ranks]
    removed = removed_ranks(report.checkpoints, missing)
    report.not_started = [rank for rank in missing if rank not in removed]
    tasks = plural(report.tasks, "task")
    if report.not_started:
        started = f"{len(report.not_started)} of {tasks}: {name_tasks(report.not_started)}."
        report.add_problem("unfinished", f"not started: {started}")
    for rank in removed:
        folder = str(rank_folder(report.checkpoints, rank))
        message = (
            f"{folder} is missing: its checkpoint was removed. Bring it back. If it is gone for "
            "good, have its documents processed, and paid, again: move the output files of task "
            f"{rank} elsewhere, delete completions/{rank:05d} in logging_dir, then run."
        )
        report.problems.append(Problem("rank", message, rank=rank, path=folder))
    for rank in sorted(ranks):
        if 0 < report.tasks <= rank:
            folder = str(rank_folder(report.checkpoints, rank))
            report.problems.append(
                Problem("rank", f"is one too many: the run has {tasks}.", rank=rank, path=folder)
            )
