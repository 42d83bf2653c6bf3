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
    4. correct run.json and last_chunk        they hold the number of commits, and a run refuses
                                              fewer
    5. replace commits.jsonl                  <- from here on the next run redoes the chunks
    6. cut off the chunks' dead letters       if no others follow them

A run between 3 and 5 refuses the missing files, as it refused the damaged ones before.

Dead letters are not cut out, because each commit records the size of dead_letters.jsonl after it.
The lock file stays, and marks the rank as unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import count_unbroken, read_commits
from datatrove_ckpt.checkpoint.identity import RunClaim, RunIdentity
from datatrove_ckpt.checkpoint.layout import LOCK, PUBLISHING
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.checkpoint.lines import explained, seal
from datatrove_ckpt.checkpoint.recovery import write_last_chunk
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.maintenance.findings import Report
from datatrove_ckpt.maintenance.redo import Redo
from datatrove_ckpt.maintenance.repair_plan import RepairPlan
from datatrove_ckpt.output.removal import remove_output

_BLOCK = 1 << 20


def carry_out(plan: RepairPlan, report: Report) -> None:
    """Carries out the plan.

    Raises:
        CheckpointLocked: a process works on one of the ranks; nothing was changed.
        CheckpointMismatch: a rank was changed since it was verified; no commit was taken back.
        OutputFailed, StorageFailed: a file could not be changed; the same command continues from
            there.
    """
    with ExitStack() as locks:
        for rank in plan.ranks:
            locks.callback(files.Lock(rank.folder / LOCK).release)
        for rank in plan.ranks:
            # From here on an old process on a lost node writes nothing.
            _claim(rank).take()
        for redo in plan.redo:
            path = redo.rank.commits_file
            if redo.before is not None and redo.before != read_commits(path):
                raise CheckpointMismatch(
                    f"{path} was changed by a run while its output was verified. Repair again."
                )
        if plan.markers:
            markers = [f"completions/{number:05d}" for number in plan.markers]
            remove_output(get_datafolder(str(plan.logging_dir)), markers)
        changed = [redo for redo in plan.redo if redo.before is None or redo.commits]
        for redo in changed:
            _blank_letters(redo)
        names = [
            file.path for redo in plan.redo for commit in redo.commits for file in commit.files
        ]
        keep = {problem.path for problem in plan.foreign}
        remove_output(report.folder, [name for name in names if name not in keep])
        for redo in changed:
            _carry_out(redo)


def _claim(rank: RankLedger) -> RunClaim:
    return RunClaim(rank.folder, RunIdentity(rank.settings))


def _letters_end(redo: Redo) -> int:
    return max((commit.dead_letters_size for commit in redo.kept if commit.counts.dead), default=0)


def _blank_letters(redo: Redo) -> None:
    # Letters after the last to keep are cut off later, or, after a crash, by the next run.
    path = redo.rank.dead_letters_file
    end = _letters_end(redo)
    between = [place for place in redo.letters if place[0] < end]
    if between and path.exists():
        files.disk.replace(path, _blanked(path, between))


def _carry_out(redo: Redo) -> None:
    rank = redo.rank
    letters_end = _letters_end(redo)
    if redo.before is None:
        # Files of lost commits are the rank's own, and unnamed now.
        files.disk.remove(rank.folder / PUBLISHING)
    # From here on a run accepts only a log with the commits to keep.
    _claim(rank).take(len(redo.kept))
    _correct_last_chunk(rank.last_chunk_file, [commit.chunk_index for commit in redo.kept])
    if redo.before is None:
        _keep_damaged_log(rank.commits_file)
    kept = [
        replace(commit, dead_letters_size=min(commit.dead_letters_size, letters_end))
        for commit in redo.kept
    ]
    files.disk.replace(rank.commits_file, b"".join(seal(commit.to_json()) for commit in kept))
    if rank.dead_letters_file.exists() and rank.dead_letters_file.stat().st_size > letters_end:
        files.disk.truncate(rank.dead_letters_file, letters_end)


def _blanked(path: Path, ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    at = 0
    with explained("read", path), path.open("rb") as file:
        while block := bytearray(file.read(_BLOCK)):
            for start, end in ranges:
                first = max(start - at, 0)
                last = min(end - at, len(block))
                if first < last:
                    block[first:last] = b" " * (last - first)
            yield bytes(block)
            at += len(block)


def _keep_damaged_log(path: Path) -> None:
    if path.exists():
        with explained("read", path):
            data = path.read_bytes()
        files.disk.replace(files.free_name(path, ".damaged-"), data)


def _correct_last_chunk(path: Path, commits: list[int]) -> None:
    unbroken = count_unbroken(commits)
    if unbroken:
        files.disk.make_dirs(path.parent)
        write_last_chunk(path, unbroken - 1)
    elif path.exists():
        files.disk.remove(path)
        files.disk.sync_dir(path.parent)
