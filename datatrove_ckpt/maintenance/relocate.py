"""Makes a checkpoint that was copied belong to the copy of its output, so that a run can go on there.

A checkpoint names its output folder, in ``run.json`` of each rank and in ``job.json``. Commits and positions name files
below their folders, so those names are right at every place. Commits of output that is now on the hub get the hashes
that the hub lists, so that later checks compare contents there, too.

First the files at the new place are compared with the commits, by default with their whole content. No rank may run,
or have run meanwhile. Then:

    1. of each rank, under its lock: replace commits.jsonl, if it gets hashes of the hub
    2. of each rank, under its lock: replace run.json, with a new owner
    3. replace job.json

After a crash between them, some ranks name the old folder and some the new one. A run refuses that, and the same
command goes on. One lock at a time, because there may be more ranks than a process may open files.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import OutputFile, read_commits
from datatrove_ckpt.checkpoint.identity import Change, RunClaim, RunIdentity, read_run, records, stamped
from datatrove_ckpt.checkpoint.layout import JOB, LOCK, RUN, is_finished
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.checkpoint.lines import Json, sealed_json
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.maintenance.repair import replace_commits
from datatrove_ckpt.maintenance.verify import REDO_KINDS, Problem, Report
from datatrove_ckpt.output.hub import HubFile
from datatrove_ckpt.output.names import plain

FOLDER = "output_folder"
"""The field of the identity that names it."""
_OBSTACLES = REDO_KINDS | {"documents", "output", "commits", "corrupt", "rank"}
"""The kinds of problems with which nothing is changed. All others are as they were before the copy."""


@dataclass
class Relocation:
    """What to change.

    Attributes:
        where: the new output folder, as a run names it.
        old: the output folders that the checkpoint names.
        ranks: those that name another one than the new one.
        obstacles: problems because of which nothing may be changed.
        others: problems that have nothing to do with the place.
        job: the content of ``job.json`` if it must be changed.
    """

    report: Report
    where: str
    old: list[str] = field(default_factory=list)
    ranks: list[RankLedger] = field(default_factory=list)
    obstacles: list[Problem] = field(default_factory=list)
    others: list[Problem] = field(default_factory=list)
    job: Json | None = None

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint names the new place already."""
        return not self.ranks and self.job is None


def plan_relocation(report: Report, is_mirror: bool = False, was_whole: bool = False) -> Relocation:
    """What must be changed so that the checkpoint belongs to the output folder of the report. Changes nothing.

    Args:
        is_mirror: the report is about a mirror, which may lack ranks that were finished before there was one.
        was_whole: the files were only renamed, so what they lack they lacked before.

    Raises:
        CheckpointCorrupt: ``job.json`` is damaged.
    """
    where = str(report.folder.resolve_paths(""))
    plan = Relocation(report, where)
    for problem in report.problems:
        may_lack = is_mirror and problem.kind == "rank" and problem.rank is not None
        may_lack |= was_whole and problem.kind in REDO_KINDS | {"documents", "output"}
        (plan.obstacles if problem.kind in _OBSTACLES and not may_lack else plan.others).append(problem)
    damaged = {(problem.root, problem.rank) for problem in plan.obstacles}
    here = (None, where)  # a rank of a fork has none before its first start
    plan.ranks = [rank for rank in report.ranks if rank.key not in damaged and rank.run.get(FOLDER) not in here]
    named = [str(rank.run[FOLDER]) for rank in plan.ranks]
    job = report.checkpoints / JOB
    if job.exists() and (content := read_run(job)).get(FOLDER, where) != where:
        named.append(str(content[FOLDER]))
        plan.job = content
    plan.old = list(dict.fromkeys(named))
    return plan


def carry_out(plan: Relocation) -> None:
    """Carries out the plan.

    Raises:
        CheckpointLocked: a process works on one of the ranks. Nothing was changed, unless it started just now.
        CheckpointMismatch: a run has changed a rank since its files were read. Likewise.
        StorageFailed: a file could not be changed; the same command continues from there.
    """
    report = plan.report
    for rank in plan.ranks:
        if files.lock_holder(rank.folder / LOCK) is not None:
            files.Lock(rank.folder / LOCK).release()  # raises, and says who works on the rank
        _check_unchanged(rank)
    listed = report.hub.files() if report.hub is not None else {}
    for rank in plan.ranks:
        with ExitStack() as stack:
            if not is_finished(rank.folder):  # a lock file that a kill leaves there would call it unfinished
                stack.callback(files.Lock(rank.folder / LOCK).release)
            _check_unchanged(rank)
            _move(rank, plan.where, listed)
    if plan.job is not None:
        change = Change(FOLDER, plan.job.get(FOLDER), plan.where, "", "", None)
        accepted = [*plan.job.get("accepted_changes", []), *records([change])]
        moved = stamped({**plan.job, FOLDER: plan.where, "accepted_changes": accepted})
        files.disk.replace(report.checkpoints / JOB, sealed_json(moved))


def _check_unchanged(rank: RankLedger) -> None:
    if read_run(rank.folder / RUN) != rank.run:
        raise CheckpointMismatch(
            f"{rank.folder} was changed by a run while its output was read. Stop the run, and relocate again."
        )


def _move(rank: RankLedger, where: str, listed: dict[str, HubFile]) -> None:
    commits = read_commits(rank.commits_file)
    hashed = {
        index: replace(commit, files=[_with_hash(file, listed.get(plain(file.path))) for file in commit.files])
        for index, commit in commits.items()
    }
    if hashed != commits:
        replace_commits(rank, hashed.values())
    claim = RunClaim(rank.folder, RunIdentity({**rank.settings, FOLDER: where}), accept_changes=True)
    claim.take(len(commits), attempts=0)


def _with_hash(file: OutputFile, listed: HubFile | None) -> OutputFile:
    return file if file.hub_hash or listed is None else replace(file, hub_hash=listed.hash)
