"""Decides what ``repair`` will do and what it leaves alone. Changes nothing.

Chunks can be redone if they end exactly where the next chunk starts. Otherwise (the input grew
after a short last chunk, or records_per_chunk changed) the rank must start over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint.commits import Commit, read_commits
from datatrove_ckpt.checkpoint.job import recorded_output
from datatrove_ckpt.checkpoint.layout import journal_indices
from datatrove_ckpt.checkpoint.ledger import RankLedger, name_place
from datatrove_ckpt.errors import ConfigError, OutputMismatch
from datatrove_ckpt.maintenance.findings import REDO_KINDS, Problem, Report
from datatrove_ckpt.maintenance.rebuild import plan_rebuild
from datatrove_ckpt.maintenance.redo import Redo
from datatrove_ckpt.maintenance.verify import other_run
from datatrove_ckpt.maintenance.verify_output import is_owned
from datatrove_ckpt.mirror.job import restore_advice
from datatrove_ckpt.output.folders import stands_elsewhere
from datatrove_ckpt.output.owner import Homes


@dataclass
class RepairPlan:
    """``left``: the problems that stay.

    ``markers``: the ranks whose completion markers are removed. ``foreign``: the
    problems of output files that may be another run's, and stay.
    """

    logging_dir: str | None = None
    redo: list[Redo] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    markers: list[int] = field(default_factory=list)
    foreign: list[Problem] = field(default_factory=list)

    @property
    def ranks(self) -> list[RankLedger]:
        return [redo.rank for redo in self.redo]

    def describe(self) -> Iterator[str]:
        yield from (f"not repaired: {text}" for text in self.left)
        for redo in self.redo:
            yield from redo.describe()
        for problem in self.foreign:
            if problem.kind != "missing":
                yield (
                    f"{problem.path} stays: it may be another run's. Move it away before the run "
                    "goes on."
                )
        for number in self.markers:
            yield (
                f"task {number}: remove {self.logging_dir}/completions/{number:05d}, so that the "
                "task runs again"
            )


def make_plan(report: Report, logging_dir: str | None) -> RepairPlan:
    """Returns the plan that follows from a report.

    Args:
        logging_dir: the executor's; completion markers of the ranks to redo are removed there.
    """
    plan = RepairPlan(logging_dir)
    concerned: dict[tuple[str, int], list[Problem]] = defaultdict(list)
    others = []
    for problem in report.problems:
        if problem.kind == "commits":
            damaged = next(
                rank for rank in report.ranks if rank.key == (problem.root, problem.rank)
            )
            if advice := _advice_of_mirror(report, damaged):
                plan.left.append(f"{damaged.place}: its commits are damaged.{advice}")
                continue
            found = plan_rebuild(damaged)
            if isinstance(found, Redo):
                plan.redo.append(found)
                continue
            plan.left.append(f"{damaged.place}: its commits cannot be rebuilt: {found}")
        if problem.kind in REDO_KINDS or (
            problem.kind == "lost" and problem.chunk_index is not None
        ):
            concerned[problem.root, problem.rank or 0].append(problem)
        else:
            others.append(problem)
    shared = {problem.path for problem in report.problems if problem.kind == "duplicate"}
    for rank in report.ranks:
        if rank.key in concerned:
            _plan_rank(plan, rank, concerned[rank.key], shared)
    redone = {(*redo.rank.key, commit.chunk_index) for redo in plan.redo for commit in redo.commits}
    plan.left += [
        str(problem)
        for problem in others
        if (problem.root, problem.rank, problem.chunk_index) not in redone
    ]
    # Without an owner, or in another folder than the checkpoint's.
    if recorded_output_of(report) != report.folder.resolve_paths("") or not is_owned(report):
        plan.foreign = [problem for problem in report.problems if problem.kind in REDO_KINDS]
    if logging_dir is not None:
        # An earlier repair without --logging-dir left the marker.
        keys = {rank.key for rank in report.ranks if rank.state == "unfinished"} | {
            rank.key for rank in plan.ranks
        }
        folder = get_datafolder(logging_dir)
        numbers = sorted(number for root, number in keys if not root)
        folder.invalidate_cache()
        plan.markers = [number for number in numbers if folder.isfile(f"completions/{number:05d}")]
    return plan


def _advice_of_mirror(report: Report, rank: RankLedger) -> str:
    """Returns how to restore a rank from the run's mirror, which is free; a rebuilt rank pays for
    requests again.
    """
    begun = Homes(report.checkpoints, None).kept
    if begun is None or rank.root:
        return ""
    size = 0
    if rank.commits_file.exists():
        size = rank.commits_file.stat().st_size
    return restore_advice(f"{begun.home}/{rank.folder.name}", rank.folder, size)


def check_output_folder(report: Report) -> None:
    """Refuses to repair with another folder's files while the right folder exists.

    Raises:
        ConfigError: it is another run's; or the checkpoint names another one, which exists, and is
            no other run's.
    """
    try:
        is_owned(report)
    except OutputMismatch as refusal:
        raise ConfigError(f"{refusal} Nothing was changed.") from refusal
    other = other_run(report.checkpoints, report.output)
    if other is not None:
        raise ConfigError(
            f"--output: {report.output} belongs to the run in {other}. Nothing was changed."
        )
    recorded = recorded_output_of(report)
    if (
        stands_elsewhere(recorded, report.folder)
        and other_run(report.checkpoints, recorded) is None
    ):
        raise ConfigError(
            f"--output {report.output}: the output of {report.checkpoints} was in {recorded} at "
            "the last start, and that folder still exists. Nothing was changed. Leave --output "
            f"out to repair the files there. If they were all moved to {report.output}, first "
            f"remove or rename {recorded}."
        )


def recorded_output_of(report: Report) -> str:
    return recorded_output(report.checkpoints, (rank.run for rank in report.ranks)) or report.output


def _plan_rank(
    plan: RepairPlan, rank: RankLedger, problems: list[Problem], shared: set[str | None]
) -> None:
    commits = read_commits(rank.commits_file)
    to_redo = {problem.chunk_index for problem in problems if problem.kind in REDO_KINDS}
    for commit in commits.values():
        if commit.chunk_index not in to_redo:
            continue
        obstacle = _obstacle(rank, commits, commit, shared)
        if obstacle is not None:
            to_redo.discard(commit.chunk_index)
            plan.left.append(
                f"{name_place(*rank.key, commit.chunk_index)}: cannot be redone: {obstacle}"
            )
    kept = {index: commit for index, commit in commits.items() if index not in to_redo}
    redo = Redo(rank, commits)
    lost = any(problem.kind == "lost" for problem in problems)
    for chunks, fits in _holes(rank, commits, kept):
        if fits:
            redo.commits += [commits[index] for index in chunks if index in commits]
            redo.lost += [
                index for index in chunks if lost and index not in commits and index < max(commits)
            ]
            continue
        plan.left += [
            f"{name_place(*rank.key, index)}: cannot be redone: it was made before the input grew "
            "or records_per_chunk changed, and would not end where the next chunk starts. Start "
            f"this task over: remove {rank.folder} and its output."
            for index in chunks
        ]
    to_redo = {commit.chunk_index for commit in redo.commits}
    redo.kept = [commit for index, commit in commits.items() if index not in to_redo]
    redo.letters = [
        letters_of(commits.values(), one.chunk_index) for one in redo.commits if one.counts.dead
    ]
    if redo.commits or redo.lost:
        plan.redo.append(redo)


def _obstacle(
    rank: RankLedger, commits: dict[int, Commit], commit: Commit, shared: set[str | None]
) -> str | None:
    if any(file.path in shared for file in commit.files):
        return "another commit names the same output file, which would be overwritten."
    if commit.counts.dead and not _letters_are_whole(rank, commits, commit):
        return (
            f"its dead letters are damaged in {rank.dead_letters_file}. Restore that file from "
            "a copy."
        )
    return None


def letters_of(commits: Iterable[Commit], chunk_index: int) -> tuple[int, int]:
    """Returns start and end of a commit's dead letters in their file, which follows the commits'
    order.
    """
    start = end = 0
    for commit in commits:
        start = end
        end = commit.dead_letters_size
        if commit.chunk_index == chunk_index:
            break
    return start, end


def _letters_are_whole(rank: RankLedger, commits: dict[int, Commit], commit: Commit) -> bool:
    """Whether the dead letters are whole lines, or missing, or overwritten by an interrupted
    repair.
    """
    start, end = letters_of(commits.values(), commit.chunk_index)
    if all(not block.strip(b" ") for block in rank.dead_letters(start, end)):
        return True
    first = b"".join(rank.dead_letters(max(start - 1, 0), max(start, 1)))
    last = b"".join(rank.dead_letters(end - 1, end))
    starts_whole = not start or first in (b"\n", b" ")
    return (
        starts_whole and last == b"\n" and rank.count_dead_letters(start, end) == commit.counts.dead
    )


def _holes(
    rank: RankLedger, commits: dict[int, Commit], kept: dict[int, Commit]
) -> Iterator[tuple[range, bool]]:
    """Yields gaps between kept commits, and whether redone chunks would end where they must."""
    per_chunk = rank.run.get("records_per_chunk") or 0
    ordinal = expected = 0
    for index in sorted(kept):
        if index > expected:
            chunks = range(expected, index)
            yield chunks, kept[index].first_ordinal - ordinal == per_chunk * len(chunks)
        expected = index + 1
        ordinal = kept[index].next_ordinal
    chunks = range(expected, max(commits, default=-1) + 1)
    if chunks:
        # After the last kept commit, only journals limit the end of redone chunks.
        journals = max(journal_indices(rank.folder), default=-1)
        yield (
            chunks,
            all(
                commits[i].counts.read == per_chunk for i in chunks if i in commits and i < journals
            ),
        )
