"""Takes back the commits of the chunks to redo. The next run processes these chunks again.

To the next run a chunk without a commit is not done. It makes the chunk from its journal and its cached answers where
they still exist, else from new answers, and skips the later chunks, which are committed.

The effects. After each of them, a run, ``verify`` and ``repair`` can continue:

    0. take the lock and the fence            no other process works on the rank until the end
    1. remove datatrove's completion marker   else the executor skips the rank
    2. overwrite the chunks' dead letters with spaces, if others follow them: the redone chunk appends them again
    3. correct run.json and last_chunk        they say how many commits there are, and a run refuses fewer
    4. replace commits.jsonl                  <- from here on the next run redoes the chunks
    5. cut off the chunks' dead letters, if no others follow them
    6. remove the output files of all ranks   the next run may choose other names (from metadata, for example); on the
                                              hub all of them in one commit

Dead letters are overwritten, not cut out: each commit records the size of dead_letters.jsonl after it, and a run cuts
the file to that size after a crash. Cutting letters out would change two files that must agree, and after a crash in
between the next run would cut at the wrong place. Spaces before a line's JSON value change neither the value nor the
size. The lock file stays: it marks the rank as unfinished.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.identity import RunClaim
from datatrove_ckpt.checkpoint.layout import LOCK
from datatrove_ckpt.checkpoint.lines import read_lines, seal
from datatrove_ckpt.errors import CheckpointMismatch, OutputFailed
from datatrove_ckpt.maintenance.findings import REDO_KINDS, Report
from datatrove_ckpt.maintenance.inspect import RankFolder
from datatrove_ckpt.maintenance.rebuild import Rebuild, correct_last_chunk, replace_log
from datatrove_ckpt.maintenance.repair_plan import Plan, Redo, letters_of, recorded_folders
from datatrove_ckpt.output.hub_commits import remove_files
from datatrove_ckpt.retrying import failure_line, file_system_call

_BLOCK = 1 << 20


def carry_out(plan: Plan, report: Report, logging_dir: str | None = None) -> None:
    """Carries out the plan.

    Raises:
        CheckpointLocked: a process works on one of the ranks; nothing was changed.
        CheckpointMismatch: a rank was changed since it was verified; no commit was taken back.
        OutputFailed, StorageFailed: a file could not be changed; the same command continues from there.
    """
    # In a folder that no run.json names, a file that differs from its commit may be another job's.
    moved = recorded_folders(report) != {report.folder.resolve_paths("")}
    keep = {problem.path for problem in report.problems if problem.kind in REDO_KINDS} if moved else set()
    with ExitStack() as locks:
        for rank in plan.ranks:
            locks.callback(files.Lock(rank.folder / LOCK).release)
        for rank in plan.ranks:
            # From here on an old process without a lock (on a lost node, for example) writes nothing. ``take`` also
            # syncs the folder, and so the lock file, which marks the rank as unfinished.
            claim = _claim(rank)
            claim.take(claim.commits)
        for redo in plan.redo:
            _check_unchanged(redo)
        for number in plan.markers:
            _remove_marker(str(logging_dir), number)
        for rebuild in plan.rebuild:
            _rebuild(rebuild)
        for redo in plan.redo:
            _take_back(redo)
        # The next run may choose other names, from metadata for example.
        names = [file.path for redo in plan.redo for commit in redo.commits for file in commit.files]
        _remove_output(report, [name for name in names if name not in keep])


def _claim(rank: RankFolder) -> RunClaim:
    return RunClaim(rank.folder, RunIdentity(rank.settings))


def _check_unchanged(redo: Redo) -> None:
    commits = redo.rank.commits()
    if any(commits.get(commit.chunk_index) != commit for commit in redo.commits):
        raise CheckpointMismatch(
            f"{redo.rank.commits_file} was changed by a run while its output was verified. Repair again."
        )


def _rebuild(plan: Rebuild) -> None:
    if plan.letters:
        _blank(plan.rank.dead_letters_file, plan.letters)
    _expect_only(plan.rank, [commit.chunk_index for commit in plan.kept])
    replace_log(plan)


def _expect_only(rank: RankFolder, chunks: list[int]) -> None:
    """From here on a run accepts a log with the commits of these chunks only."""
    _claim(rank).take(len(chunks))
    correct_last_chunk(rank.last_chunk_file, chunks)


def _remove_marker(logging_dir: str, number: int) -> None:
    folder, name = get_datafolder(logging_dir), f"completions/{number:05d}"
    _remove(folder, name)
    if folder.is_local():
        files.disk.sync_dir(Path(folder.resolve_paths(name)).parent)


def _remove_output(report: Report, names: list[str]) -> None:
    if report.hub is not None:
        remove_files(report.hub, names)
        return
    for name in names:
        _remove(report.folder, name)


def _take_back(redo: Redo) -> None:
    rank = redo.rank
    if not redo.commits:
        return
    to_redo = {commit.chunk_index for commit in redo.commits}
    commits = rank.commits()
    kept = [commit for index, commit in commits.items() if index not in to_redo]
    letters_end = max((commit.dead_letters_size for commit in kept if commit.counts.dead), default=0)
    ranges = [letters_of(commits.values(), index) for index in to_redo if commits[index].counts.dead]
    # Letters after the last one to keep are cut off below, or, after a crash, by the next run.
    if between := [place for place in ranges if place[0] < letters_end]:
        _blank(rank.dead_letters_file, between)
    _expect_only(rank, [commit.chunk_index for commit in kept])
    _replace_commits(rank, commits, to_redo, letters_end)
    if rank.dead_letters_file.exists() and rank.dead_letters_file.stat().st_size > letters_end:
        files.disk.truncate(rank.dead_letters_file, letters_end)


def _blank(path: Path, ranges: list[tuple[int, int]]) -> None:
    """Overwrites these byte ranges of the file with spaces, atomically."""
    if not path.exists():
        return
    new = path.with_name(path.name + ".new")
    fd = files.disk.create(new)
    files.copy_mode(path, fd)
    try:
        for block in _blanked(path, ranges):
            files.disk.write(fd, block, new)
    finally:
        os.close(fd)
    files.disk.sync(new)
    files.disk.rename(new, path)
    files.disk.sync_dir(path.parent)


def _blanked(path: Path, ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    at = 0
    with explained("read", path), path.open("rb") as file:
        while block := bytearray(file.read(_BLOCK)):
            for start, end in ranges:
                first, last = max(start - at, 0), min(end - at, len(block))
                if first < last:
                    block[first:last] = b" " * (last - first)
            yield bytes(block)
            at += len(block)


def _replace_commits(rank: RankFolder, commits: dict[int, Commit], to_redo: set[int], letters_end: int) -> None:
    """Writes the log without the commits to take back, and without their dead letters at the end of that file."""
    lines = []
    for line, commit in zip(read_lines(rank.commits_file), commits.values(), strict=True):
        if commit.chunk_index in to_redo:
            continue
        if commit.dead_letters_size > letters_end:
            shorter = replace(commit, dead_letters_size=letters_end)
            lines.append(seal(shorter.to_json()))
        else:
            lines.append(seal(line.body))
    files.disk.replace(rank.commits_file, b"".join(lines))


def _remove(folder: Any, name: str) -> None:
    if folder.is_local():
        files.disk.remove(Path(folder.resolve_paths(name)))
        return
    try:
        with file_system_call():
            folder.rm_file(name)
    except FileNotFoundError:
        return
    except OSError as error:
        where = folder.resolve_paths(name)
        raise OutputFailed(f"{where} could not be removed: {failure_line(error)}. Repair again.") from error
