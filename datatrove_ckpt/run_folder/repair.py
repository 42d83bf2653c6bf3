"""Takes back the commits of the chunks to redo. The next run processes these chunks again.

It uses journals and cached answers where they still exist, else new answers, and skips the later
chunks, which are committed.

The effects. After each of them, a run, ``verify`` and ``repair`` can continue:

    0. take the lock and the fence            no other process works on the rank until the end
    1. remove datatrove's completion marker   else the executor skips the rank
    2. overwrite the chunks' dead letters     if others follow them: the redone chunk appends them
       with spaces                            again
    3. remove the chunks' output files        the next run may choose other names (from metadata,
                                              for example), and replaces no content that it does not
                                              know; on the hub in one commit
    4. correct run.json, remove last_chunk    they hold the number of commits, and a run refuses
                                              fewer
    5. replace commits.jsonl                  <- from here on the next run redoes the chunks
    6. cut off the chunks' dead letters       if no others follow them

A run between 3 and 5 refuses the missing files, as it refused the damaged ones before.

Dead letters are not cut out, because each commit records the size of dead_letters.jsonl after it.
The lock file stays, and marks the rank as unfinished.

What is redone
    Chunks can be redone if they end exactly where the next chunk starts. Otherwise (the input grew
    after a short last chunk, or records_per_chunk changed) the rank must start over.

A damaged commit log
    is rebuilt from the commits that it still proves: each whole line has a checksum. A commit is
    kept if redone chunks before it end where it starts. The next run processes the other chunks
    again, and their dead letters are overwritten with spaces. The damaged log is copied first.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, explained, size_of
from datatrove_ckpt.checkpoint.commits import Commit, read_commits, read_whole_commits
from datatrove_ckpt.checkpoint.fence import RunClaim
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.layout import LOCK, PUBLISHING
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.rank_summary import RankSummary, describe_chunk
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    OutputMismatch,
)
from datatrove_ckpt.mirror.restore import restore_advice
from datatrove_ckpt.output.output_folder import RunOrigin
from datatrove_ckpt.output.targets import remove_output
from datatrove_ckpt.output.writer_checks import stands_elsewhere
from datatrove_ckpt.run_folder.verify import REDO_KINDS, Problem, VerifyReport, is_owned, other_run


@dataclass
class RankRepair:
    """The repair of one rank.

    Attributes:
        original: the log; None: it is damaged.
        not_redoable: chunks that would not end where the next chunk starts, so they stay.
        dead_letter_ranges: ranges of bytes in the dead letters file without a commit to keep.
    """

    rank: RankSummary
    original: dict[int, Commit] | None
    commits_to_keep: list[Commit] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    not_redoable: list[int] = field(default_factory=list)
    dead_letter_ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def dead_letters_end(self) -> int:
        sizes = [commit.dead_letters_size for commit in self.commits_to_keep if commit.counts.dead]
        return max(sizes, default=0)


# What a rank can do again -------------------------------------------------------------------------


def plan_rebuild(rank: RankSummary) -> RankRepair:
    """Plans the repair of a damaged log.

    Raises:
        CheckpointError: nothing can be done.
    """
    whole = read_whole_commits(rank.commits_file)
    # In the order of writing: the size only grows, and only with dead letters.
    whole.sort(key=lambda commit: (commit.dead_letters_size, commit.counts.dead == 0))
    commits: dict[int, Commit] = {}
    for commit in whole:
        commits.setdefault(commit.chunk_index, commit)
    proved = set()
    for _, commit, fits in _gaps(rank, commits):
        if not fits:
            break
        proved.add(commit.chunk_index)
    redo = RankRepair(rank, None, [commit for index, commit in commits.items() if index in proved])
    redo.dead_letter_ranges = [*_foreign_dead_letters(rank, redo.commits_to_keep)]
    return redo


def plan_redo(rank: RankSummary, to_redo: set[int]) -> RankRepair:
    """Plans the repair of a whole log.

    Raises:
        CheckpointError: nothing can be done.
    """
    log = read_commits(rank.commits_file)
    redo = RankRepair(rank, log)
    remaining = {index: commit for index, commit in log.items() if index not in to_redo}
    for chunks, _, fits in _gaps(rank, remaining):
        if not fits:
            redo.not_redoable += chunks
    to_redo = to_redo.difference(redo.not_redoable)
    for index, commit in log.items():
        if index in to_redo:
            redo.commits.append(commit)
        else:
            redo.commits_to_keep.append(commit)
    if any(commit.counts.dead for commit in redo.commits):
        redo.dead_letter_ranges = [*_foreign_dead_letters(rank, redo.commits_to_keep)]
    return redo


def _gaps(rank: RankSummary, commits: dict[int, Commit]) -> Iterator[tuple[range, Commit, bool]]:
    """Yields the chunks missing before each commit, the commit, and whether these chunks, redone,
    would end where it starts.
    """
    per_chunk = rank.run.get("records_per_chunk") or 0
    expected = ordinal = 0
    for index, commit in sorted(commits.items()):
        chunks = range(expected, index)
        yield chunks, commit, commit.first_ordinal - ordinal == per_chunk * len(chunks)
        expected = index + 1
        ordinal = commit.next_ordinal


def _foreign_dead_letters(rank: RankSummary, commits: list[Commit]) -> Iterator[tuple[int, int]]:
    """Yields ranges of dead letters without a commit to keep."""
    start = 0
    for commit in commits:
        data = b"".join(rank.dead_letters(start, commit.dead_letters_size))
        dead_letters = data.splitlines(keepends=True)
        foreign = len(dead_letters) - commit.counts.dead
        if foreign < 0 or (data and data[-1:] not in b"\n "):
            raise CheckpointCorrupt(
                f"its dead letters in {rank.dead_letters_file} are damaged. Restore it from a copy."
            )
        if foreign:
            yield start, start + len(b"".join(dead_letters[:foreign]))
        start = commit.dead_letters_size


# The plan -----------------------------------------------------------------------------------------


@dataclass
class RepairPlan:
    """The repair of a run.

    Attributes:
        foreign: problems of output files that may be another run's.
    """

    logging_dir: str | None = None
    redo: list[RankRepair] = field(default_factory=list)
    unrepaired: list[str] = field(default_factory=list)
    markers: list[int] = field(default_factory=list)
    foreign: list[Problem] = field(default_factory=list)

    @property
    def ranks(self) -> list[RankSummary]:
        return [redo.rank for redo in self.redo]

    def describe(self) -> Iterator[str]:
        yield from (f"not repaired: {text}" for text in self.unrepaired)
        for redo in self.redo:
            rank = redo.rank
            if redo.original is None:
                yield (
                    f"{rank.place}: rebuild {rank.commits_file} from the "
                    f"{plural(len(redo.commits_to_keep), 'commit')} that can be proved; other "
                    "chunks are paid for again"
                )
            for commit in redo.commits:
                action = (
                    f"take back its commit, to have {plural(commit.counts.read, 'document')} "
                    "processed again"
                )
                if commit.counts.dead:
                    action += f", {plural(commit.counts.dead, 'dead letter')} among them"
                if commit.files:
                    action += f"; remove {', '.join(file.path for file in commit.files)}"
                yield f"{describe_chunk(*rank.key, commit.chunk_index)}: {action}"
        for problem in self.foreign:
            if problem.kind != "missing":
                yield (f"{problem.path} stays: it may be another run's. Move it away.")
        for number in self.markers:
            yield (
                f"task {number}: remove {self.logging_dir}/completions/{number:05d}, so that the "
                "task runs again"
            )


def make_plan(report: VerifyReport, logging_dir: str | None) -> RepairPlan:
    plan = RepairPlan(logging_dir)
    concerned: dict[tuple[str, int | None], list[Problem]] = defaultdict(list)
    for problem in report.problems:
        concerned[problem.root, problem.rank].append(problem)
    shared = {problem.path for problem in report.problems if problem.kind == "duplicate"}
    for rank in report.ranks:
        if rank.state == "running":
            plan.unrepaired.append(f"{rank.place}: a process works on it. Stop it, and run again.")
        try:
            redo = _plan_rank(report, rank, concerned[rank.key], shared)
        except CheckpointError as error:
            plan.unrepaired.append(f"{rank.place}: cannot be redone: {error}")
            continue
        if redo is None:
            continue
        plan.unrepaired += [
            f"{describe_chunk(*rank.key, index)}: cannot be redone: it is of an older input or "
            f"records_per_chunk. Start this task over: remove {rank.folder} and its output."
            for index in redo.not_redoable
        ]
        if redo.original is None or redo.commits:
            plan.redo.append(redo)
    redone = {(*redo.rank.key, commit.chunk_index) for redo in plan.redo for commit in redo.commits}
    plan.unrepaired += [
        str(problem)
        for problem in report.problems
        if not _can_redo(problem)
        and (problem.root, problem.rank, problem.chunk_index) not in redone
    ]
    if report.recorded != report.folder.resolve_paths("") or not is_owned(report):
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


def _can_redo(problem: Problem) -> bool:
    return problem.kind == "commits" or problem.kind in REDO_KINDS


def _plan_rank(
    report: VerifyReport, rank: RankSummary, problems: list[Problem], shared: set[str | None]
) -> RankRepair | None:
    kinds = {problem.kind for problem in problems if _can_redo(problem)}
    if "commits" in kinds:
        if advice := _advice_of_mirror(report, rank):
            raise CheckpointError(f"its commits are damaged.{advice}")
        return plan_rebuild(rank)
    if not kinds:
        return None
    to_redo = {
        problem.chunk_index
        for problem in problems
        if problem.kind in REDO_KINDS and problem.chunk_index is not None
    }
    redo = plan_redo(rank, to_redo)
    for commit in redo.commits:
        if any(file.path in shared for file in commit.files):
            raise CheckpointError(
                f"another commit names the output file of chunk {commit.chunk_index}."
            )
    return redo


def _advice_of_mirror(report: VerifyReport, rank: RankSummary) -> str:
    """A rank from a mirror is free; a rebuilt rank pays for requests again."""
    begun = RunOrigin(report.checkpoints, None).recorded
    if begun is None or rank.root:
        return ""
    size = size_of(rank.commits_file)
    return restore_advice(f"{begun.home}/{rank.folder.name}", rank.folder, size)


def check_output_folder(report: VerifyReport) -> None:
    """Refuses to repair with another folder's files while the right folder exists.

    Raises:
        ConfigError: the folder is another run's; or the checkpoint names another folder, which
            exists, and is no other run's.
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
    recorded = report.recorded
    if (
        stands_elsewhere(recorded, report.folder)
        and other_run(report.checkpoints, recorded) is None
    ):
        raise ConfigError(
            f"--output {report.output}: the output of {report.checkpoints} was in {recorded} at "
            f"the last start. Leave --output out, or remove {recorded} if all was moved."
        )


# The effects --------------------------------------------------------------------------------------


def apply_repair(plan: RepairPlan, report: VerifyReport) -> None:
    """Carries out the plan.

    Raises:
        CheckpointLocked: a process works on one of the ranks; nothing was changed.
        CheckpointMismatch: a rank was changed since it was verified; no commit was taken back.
        OutputFailed, StorageFailed: a file could not be changed; the same command continues from
            there.
    """
    with ExitStack() as locks:
        for rank in plan.ranks:
            locks.callback(Lock(rank.folder / LOCK).release)
        for rank in plan.ranks:
            # From here on an old process on a lost node writes nothing.
            _claim(rank).take()
        for redo in plan.redo:
            path = redo.rank.commits_file
            if redo.original is not None and redo.original != read_commits(path):
                raise CheckpointMismatch(f"{path} was changed by a run meanwhile. Repair again.")
        if plan.markers:
            markers = [f"completions/{number:05d}" for number in plan.markers]
            remove_output(get_datafolder(str(plan.logging_dir)), markers)
        for redo in plan.redo:
            # Dead letters behind the last to keep are cut off below, or by the next run.
            path = redo.rank.dead_letters_file
            between = [span for span in redo.dead_letter_ranges if span[0] < redo.dead_letters_end]
            if between and path.exists():
                files.disk.replace(path, _blanked(redo.rank, between, path.stat().st_size))
        names = [
            file.path for redo in plan.redo for commit in redo.commits for file in commit.files
        ]
        keep = {problem.path for problem in plan.foreign}
        remove_output(report.folder, [name for name in names if name not in keep])
        for redo in plan.redo:
            rank = redo.rank
            dead_letters_end = redo.dead_letters_end
            if redo.original is None:
                # Files of lost commits are the rank's own, and unnamed now.
                files.disk.remove(rank.folder / PUBLISHING)
            # From here on a run accepts only a log with the commits to keep.
            _claim(rank).take(len(redo.commits_to_keep))
            if rank.last_chunk_file.exists():
                files.disk.remove(rank.last_chunk_file)
                files.disk.sync_dir(rank.last_chunk_file.parent)
            if redo.original is None and rank.commits_file.exists():
                with explained("read", rank.commits_file):
                    data = rank.commits_file.read_bytes()
                files.disk.replace(files.free_name(rank.commits_file, ".damaged-"), data)
            remaining = [
                replace(commit, dead_letters_size=min(commit.dead_letters_size, dead_letters_end))
                for commit in redo.commits_to_keep
            ]
            files.disk.replace(
                rank.commits_file, b"".join(add_checksum(commit.to_json()) for commit in remaining)
            )
            if size_of(rank.dead_letters_file) > dead_letters_end:
                files.disk.truncate(rank.dead_letters_file, dead_letters_end)


def _claim(rank: RankSummary) -> RunClaim:
    return RunClaim(rank.folder, RunIdentity(rank.settings))


def _blanked(rank: RankSummary, ranges: list[tuple[int, int]], size: int) -> Iterator[bytes]:
    at = 0
    for start, end in ranges:
        yield from rank.dead_letters(at, start)
        yield b" " * (end - start)
        at = end
    yield from rank.dead_letters(at, size)
