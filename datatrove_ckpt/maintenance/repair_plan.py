"""Decides what ``repair`` will do and what it leaves alone. Changes nothing.

A run fills a chunk up to records_per_chunk documents, or to the end of the input. So chunks can be redone if the redone
chunks end exactly where the next chunk starts. They do not for a short last chunk after which the input grew, or if
records_per_chunk was changed in between: then the rank must start over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint.commits import Commit
from datatrove_ckpt.errors import CheckpointError, ConfigError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.findings import REDO_KINDS, Problem, Report
from datatrove_ckpt.maintenance.inspect import RankFolder, name_place
from datatrove_ckpt.maintenance.rebuild import Rebuild, plan_rebuild
from datatrove_ckpt.output.folders import stands_elsewhere


@dataclass
class Redo:
    """The chunks that one rank must redo. ``commits``: those to take back; ``lost``: chunks without a commit."""

    rank: RankFolder
    commits: list[Commit] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.rank.key

    def describe(self) -> Iterator[str]:
        for commit in self.commits:
            what = f"take back its commit, to have {plural(commit.counts.read, 'document')} processed again"
            if commit.counts.dead:
                what += f", {plural(commit.counts.dead, 'dead letter')} among them"
            names = ", ".join(file.path for file in commit.files)
            yield f"{name_place(*self.key, commit.chunk_index)}: {what}" + (f"; remove {names}" if names else "")
        for index in self.lost:
            yield f"{name_place(*self.key, index)}: mark it as not done"
        if self.rank.identity.get("accepted_changes"):
            yield f"{name_place(*self.key)}: its settings were changed (accept_changes); the new ones will be used"


@dataclass
class Plan:
    """What to do, and which problems are left. ``markers``: the ranks whose completion markers are removed."""

    rebuild: list[Rebuild] = field(default_factory=list)
    redo: list[Redo] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    markers: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[RankFolder]:
        """The ranks that are changed."""
        return [*(rebuild.rank for rebuild in self.rebuild), *(redo.rank for redo in self.redo)]

    def describe(self, logging_dir: str | None) -> Iterator[str]:
        for rebuild in self.rebuild:
            yield from rebuild.describe()
        for redo in self.redo:
            yield from redo.describe()
        for number in self.markers:
            yield f"rank {number}: remove {logging_dir}/completions/{number:05d}, so that the executor runs it again"


def make_plan(report: Report, logging_dir: str | None = None) -> Plan:
    """The plan that follows from a report. Changes nothing.

    Args:
        logging_dir: the executor's; completion markers of the ranks to redo are removed there.
    """
    plan = Plan()
    concerned: dict[tuple[str, int], list[Problem]] = defaultdict(list)
    others = []
    for problem in report.problems:
        if problem.kind == "commits" and _plan_rebuild(plan, report, problem):
            continue
        if problem.kind in REDO_KINDS or (problem.kind == "lost" and problem.chunk_index is not None):
            concerned[problem.root, problem.rank or 0].append(problem)
        else:
            others.append(problem)
    shared = {problem.path for problem in report.problems if problem.kind == "duplicate"}
    for rank in report.ranks:
        if rank.key in concerned:
            _plan_rank(plan, rank, concerned[rank.key], shared)
    redone = {(*redo.key, commit.chunk_index) for redo in plan.redo for commit in redo.commits}
    plan.left += [str(problem) for problem in others if (problem.root, problem.rank, problem.chunk_index) not in redone]
    if logging_dir is not None:
        plan.markers = list(_markers(plan, report, logging_dir))
    return plan


def check_output_folder(report: Report) -> None:
    """Refuses to repair with the files of another folder, perhaps of another job, while the right one is there.

    Raises:
        ConfigError: ``run.json`` names another output folder, which exists.
    """
    for recorded in sorted(recorded_folders(report)):
        if stands_elsewhere(recorded, report.folder):
            raise ConfigError(
                f"--output {report.output}: the output of {report.checkpoints} is in {recorded}, as its run.json says, "
                "and that folder still exists. Nothing was changed. Leave --output out to repair the files there. If "
                f"they were all moved to {report.output}, first remove or rename {recorded}."
            )


def recorded_folders(report: Report) -> set[str]:
    """The output folders that the ranks name; not those of ranks whose ``run.json`` is damaged."""
    found = set()
    for rank in report.ranks:
        with suppress(CheckpointError):
            found.add(str(rank.identity.get("output_folder") or report.output))
    return found


def _plan_rebuild(plan: Plan, report: Report, problem: Problem) -> bool:
    rank = next(rank for rank in report.ranks if rank.key == (problem.root, problem.rank))
    found = plan_rebuild(rank)
    if isinstance(found, str):
        plan.left.append(f"{name_place(*rank.key)}: its commits cannot be rebuilt: {found}")
        return False
    plan.rebuild.append(found)
    return True


def _markers(plan: Plan, report: Report, logging_dir: str) -> Iterator[int]:
    # The marker of an unfinished rank is wrong: an earlier repair without --logging-dir left it.
    keys = {key for key, state in report.states.items() if state == "unfinished"}
    keys |= {rank.key for rank in plan.ranks}
    folder = get_datafolder(logging_dir)
    folder.invalidate_cache()
    for number in sorted(number for root, number in keys if not root):
        if folder.isfile(f"completions/{number:05d}"):
            yield number


def _plan_rank(plan: Plan, rank: RankFolder, problems: list[Problem], shared: set[str | None]) -> None:
    commits = rank.commits()
    to_redo = {problem.chunk_index for problem in problems if problem.kind in REDO_KINDS}
    for commit in commits.values():
        if commit.chunk_index in to_redo and (obstacle := _obstacle(rank, commits, commit, shared)):
            to_redo.discard(commit.chunk_index)
            plan.left.append(f"{name_place(*rank.key, commit.chunk_index)}: cannot be redone: {obstacle}")
    kept = {index: commit for index, commit in commits.items() if index not in to_redo}
    redo = Redo(rank)
    lost = any(problem.kind == "lost" for problem in problems)
    for chunks, fits in _holes(rank, commits, kept):
        if fits:
            redo.commits += [commits[index] for index in chunks if index in commits]
            redo.lost += [index for index in chunks if lost and index not in commits and index < max(commits)]
            continue
        plan.left += [
            f"{name_place(*rank.key, index)}: cannot be redone: it was made before the input grew or "
            "records_per_chunk changed, and would not end where the next chunk starts. Start this rank over: remove "
            f"{rank.folder} and its output."
            for index in chunks
        ]
    if redo.commits or redo.lost:
        plan.redo.append(redo)


def _obstacle(rank: RankFolder, commits: dict[int, Commit], commit: Commit, shared: set[str | None]) -> str | None:
    if any(file.path in shared for file in commit.files):
        return "another commit names the same output file, which would be overwritten."
    if commit.counts.dead and not _letters_are_whole(rank, commits, commit):
        return f"its dead letters are damaged in {rank.dead_letters_file}. Restore that file from a copy."
    return None


def letters_of(commits: Iterable[Commit], chunk_index: int) -> tuple[int, int]:
    """Start and end of a commit's dead letters in their file, in bytes. They are in the order of the commits."""
    start = end = 0
    for commit in commits:
        start, end = end, commit.dead_letters_size
        if commit.chunk_index == chunk_index:
            break
    return start, end


def _letters_are_whole(rank: RankFolder, commits: dict[int, Commit], commit: Commit) -> bool:
    """Whether the commit's dead letters are whole lines, or missing, or overwritten by an interrupted repair."""
    start, end = letters_of(commits.values(), commit.chunk_index)
    if all(not block.strip(b" ") for block in rank.dead_letters(start, end)):
        return True
    first = b"".join(rank.dead_letters(max(start - 1, 0), max(start, 1)))
    last = b"".join(rank.dead_letters(end - 1, end))
    starts_whole = not start or first in (b"\n", b" ")
    return starts_whole and last == b"\n" and rank.count_dead_letters(start, end) == commit.counts.dead


def _holes(rank: RankFolder, commits: dict[int, Commit], kept: dict[int, Commit]) -> Iterator[tuple[range, bool]]:
    """Runs of chunks without a commit to keep, each with whether redone chunks would end where they must."""
    per_chunk = rank.identity.get("records_per_chunk") or 0
    ordinal = expected = 0
    for index in sorted(kept):
        if index > expected:
            chunks = range(expected, index)
            yield chunks, kept[index].first_ordinal - ordinal == per_chunk * len(chunks)
        expected, ordinal = index + 1, kept[index].next_ordinal
    chunks = range(expected, max(commits, default=-1) + 1)
    if chunks:
        # After the last commit to keep, only journals limit where redone chunks may end.
        journals = max(rank.journals(), default=-1)
        yield chunks, all(commits[i].counts.read == per_chunk for i in chunks if i in commits and i < journals)
