"""Enumerates crashes: a job, and each recovery, crashes at effect 0, 1, 2, ... until it ends."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest.mock import patch

import xxhash

from datatrove_ckpt.checkpoint import clock
from datatrove_ckpt.checkpoint.history import parse_line
from datatrove_ckpt.checkpoint.layout import CACHE, HISTORY, LOCK
from datatrove_ckpt.checkpoint.lines import whole_lines
from datatrove_ckpt.testing.disks import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    copy_tree,
    disk_in_place,
)

Attempt = Callable[[Path], None]
"""One attempt of a job. It keeps everything below the folder that it is given."""


@dataclass
class CrashReport:
    """What was tried.

    Attributes:
        points: the effects at which the first attempt crashed.
        survivors: number of folders that the crashes may leave behind.
        states: hashes of the folders that differ, each with the number of further crashes that were
            tried from there. An
            equal folder is tried again only for more crashes.
    """

    points: list[str] = field(default_factory=list)
    attempts: int = 0
    survivors: int = 0
    states: dict[str, int] = field(default_factory=dict)

    def is_new(self, folder: Path, further: int) -> bool:
        state = _state(folder)
        self.survivors += 1
        if self.states.get(state, -1) >= further:
            return False
        self.states[state] = further
        return True

    def __str__(self) -> str:
        return (
            f"{len(self.points)} crash points, {self.survivors} survivors, {len(self.states)} of "
            f"them different, {self.attempts} attempts"
        )


def outputs(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_output_after_crash(
    run: Attempt,
    folder: Path,
    *,
    output: str = "output",
    recoveries: int = 1,
    torn: bool = False,
    disk_type: type[CrashingDisk] = CrashingDisk,
    after_crash: Attempt = lambda folder: None,
    counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS),
) -> CrashReport:
    """Runs a job undisturbed, then crashes it at every effect, and each recovery at every effect,
    and runs it again.

    Args:
        run: one attempt of the job.
        folder: a folder for the job. Every attempt finds in it what it holds before the first (the
            input).
        output: the folder below ``folder`` whose files must be the same, byte for byte, in the end.
        recoveries: crash the recoveries, too: those from each crash point (1), each third (3), none
            (0).
        torn: a crash at a write leaves half of it.
        disk_type: the disk that crashes. By default the process is killed, and what it has written
            stays.
        after_crash: called with each different folder that a crash leaves behind, for further
            assertions.
        counted: names of the effects to crash at.

    Raises:
        AssertionError: naming the crash points.
    """
    report = CrashReport()
    fresh = folder.with_name(folder.name + ".fresh")
    copy_tree(folder, fresh)
    run(folder)
    report.attempts += 1
    expected = outputs(folder / output)

    def resume(crashes: list[str], depth: int) -> None:
        if not depth:
            run(folder)
            report.attempts += 1
            assert_equal(folder / output, expected, crashes)
            return
        start = folder.with_name(f"{folder.name}.depth-{depth}")
        copy_tree(folder, start)
        for number in count():
            copy_tree(start, folder)
            disk = disk_type(number, folder, torn, counted)
            report.attempts += 1
            with disk_in_place(disk):
                run(folder)
            if disk.crashed_at is None:
                assert_equal(folder / output, expected, crashes)
                return
            if not crashes:
                report.points.append(disk.crashed_at)
            further = 0
            if number % max(recoveries, 1) == 0:
                further = depth - 1
            for survivor in disk.survivors():
                if report.is_new(folder, further):
                    after_crash(folder)
                    resume([*crashes, f"{disk.crashed_at} ({survivor})"], further)

    copy_tree(fresh, folder)
    # Otherwise no two folders would be equal.
    with patch.multiple(clock, _monotonic=lambda: 0.0, _wall=lambda: 0.0):
        resume([], 2 if recoveries else 1)
    return report


def _state(folder: Path) -> str:
    """Hashes what the next attempt can see.

    SQLite's files hold random numbers: their rows count.
    """
    digest = xxhash.xxh3_128()
    for name, content in outputs(folder).items():
        if name.endswith(f"/{LOCK}") or f"{CACHE}-" in name:
            continue
        digest.update(name.encode())
        if name.endswith(f"/{HISTORY}"):
            # Of a history only the last byte decides what the next attempt does.
            records = map(parse_line, whole_lines(content))
            kinds = [getattr(record, "KIND", None) for record in records]
            content = repr((content[-1:], kinds)).encode()
        if name.endswith(CACHE):
            content = _rows(folder / name)
        digest.update(content)
    return str(digest.hexdigest())


def _rows(database: Path) -> bytes:
    found = sorted(database.parent.glob(database.name + "*"))
    return _dump(tuple((path.name, path.read_bytes()) for path in found))


@functools.lru_cache(64)  # most survivors have the same database
def _dump(contents: tuple[tuple[str, bytes], ...]) -> bytes:
    with tempfile.TemporaryDirectory() as copy:
        for name, content in contents:
            (Path(copy) / name).write_bytes(content)
        with closing(sqlite3.connect(Path(copy) / CACHE)) as connection:
            return "".join(sorted(connection.iterdump())).encode()


def assert_equal(folder: Path, expected: dict[str, bytes], crashes: list[str]) -> None:
    actual = outputs(folder)
    assert actual.keys() == expected.keys(), (
        f"after {crashes}: files {sorted(actual)}, not {sorted(expected)}"
    )
    for name, content in expected.items():
        assert actual[name] == content, (
            f"after {crashes}: {name} differs:\n{actual[name]!r}\n{content!r}"
        )
