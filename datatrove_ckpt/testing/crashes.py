"""Crashes enumerated, not sampled: a job is crashed at effect 0, 1, 2, ... until it completes; then its recoveries."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.testing.disks import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    FailingDisk,
    PowerLossDisk,
    copy_tree,
    disk_in_place,
)

Life = Callable[[Path], None]
"""One life of a job, which keeps everything below the folder it is given."""


@dataclass
class CrashReport:
    """What was tried.

    ``points`` are the effects the first life crashed at, ``lives`` the runs it took. ``survivors`` counts the folders
    that crashes may have left behind, ``states`` those that differ; one that was seen before has the same future, and
    is not tried again.
    """

    points: list[str] = field(default_factory=list)
    lives: int = 0
    survivors: int = 0
    states: set[str] = field(default_factory=set)

    def is_new(self, folder: Path) -> bool:
        state = _state(folder)
        self.survivors += 1
        if state in self.states:
            return False
        self.states.add(state)
        return True

    def __str__(self) -> str:
        return (
            f"{len(self.points)} crash points, {self.survivors} survivors, {len(self.states)} of them different, "
            f"{self.lives} lives"
        )


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_output_after_crash(
    run: Life,
    folder: Path,
    *,
    output: str = "output",
    recoveries: bool = True,
    torn: bool = False,
    power_loss: bool = False,
    after_crash: Life = lambda folder: None,
    counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS),
) -> CrashReport:
    """Runs a job undisturbed, then crashes it at every effect, and each recovery at every effect, and runs it again.

    Args:
        run: one life of the job.
        folder: an empty folder for it; what it holds before the first life (the input) is there in every life.
        output: the folder below it whose files must be the same, byte for byte, in the end.
        recoveries: crash the recoveries, too.
        torn: a crash at a write leaves half of it.
        power_loss: what was not synced may be lost (see ``PowerLossDisk``); else the process is killed.
        after_crash: called with each different folder that a crash leaves behind, for further assertions.
        counted: the effects to crash at.

    Raises:
        AssertionError: naming the crash points.
    """
    report = CrashReport()
    fresh = folder.with_name(folder.name + ".fresh")
    copy_tree(folder, fresh)
    run(folder)
    report.lives += 1
    expected = outputs(folder / output)
    disk_type = PowerLossDisk if power_loss else CrashingDisk

    def survives(start: Path, crashes: list[str], depth: int) -> None:
        """Crashes at every effect of the life that begins with ``start``."""
        number = 0
        while True:
            copy_tree(start, folder)
            disk = disk_type(number, folder, torn, counted)
            report.lives += 1
            with disk_in_place(disk):
                run(folder)
            if disk.crashed_at is None:
                _assert_equal(folder / output, expected, crashes)
                return
            report.points += [] if crashes else [disk.crashed_at]
            for survivor in disk.survivors():
                if report.is_new(folder):
                    after_crash(folder)
                    goes_on([*crashes, f"{disk.crashed_at} ({survivor})"], depth - 1)
            number += 1

    def goes_on(crashes: list[str], depth: int) -> None:
        if depth:
            here = folder.with_name(f"{folder.name}.crashed")
            copy_tree(folder, here)
            survives(here, crashes, depth)
        else:
            run(folder)
            report.lives += 1
            _assert_equal(folder / output, expected, crashes)

    survives(fresh, [], 2 if recoveries else 1)
    return report


def assert_same_output_after_disk_errors(
    run: Life,
    folder: Path,
    *,
    output: str = "output",
    codes: tuple[int, ...] = (errno.ENOSPC, errno.EIO, errno.EROFS),
    after_error: Life = lambda folder: None,
) -> list[str]:
    """Lets the disk refuse every effect of a job, once and for ever, and runs it again without the fault.

    Args:
        run: one life of the job.
        folder: an empty folder for it; what it holds before the first life (the input) is there in every life.
        output: the folder below it whose files must be the same, byte for byte, in the end.
        codes: the errors to try.
        after_error: called with the folder as each refusal leaves it, for further assertions.

    Returns:
        What was refused: effect, error, once or for ever.

    Raises:
        AssertionError: the job went on over a refusal, its error does not name the file and what to do, or the output
            is another.
    """
    fresh = folder.with_name(folder.name + ".fresh")
    copy_tree(folder, fresh)
    run(folder)
    expected = outputs(folder / output)
    tried: list[str] = []
    for code in codes:
        for for_ever in (False, True):
            number = 0
            while (refused := _refuse(run, fresh, folder, FailingDisk(number, code, for_ever))) is not None:
                label = f"{refused}: {errno.errorcode[code]}{' for ever' if for_ever else ''}"
                after_error(folder)
                run(folder)
                _assert_equal(folder / output, expected, [label])
                tried.append(label)
                number += 1
    return tried


def _refuse(run: Life, fresh: Path, folder: Path, disk: FailingDisk) -> str | None:
    copy_tree(fresh, folder)
    failure: CkptError | None = None
    try:
        with disk_in_place(disk):
            run(folder)
    except CkptError as error:
        failure = error
    if failure is None:
        assert disk.failed_at is None, f"went on although the disk refused: {disk.failed_at}"
    else:
        assert disk.failed_at is not None, f"failed without cause: {failure}"
        _assert_helpful(str(failure), disk.refused)
    return disk.failed_at


def _assert_helpful(message: str, refused: list[Path]) -> None:
    assert any(str(path) in message for path in refused), f"none of {refused} is named: {message}"
    assert "run the same command again" in message, f"it is not said what to do: {message}"


def _state(folder: Path) -> str:
    """Tells folders apart by what the next life can see. SQLite's files hold random numbers, so its rows count."""
    digest = xxhash.xxh3_128()
    for name, content in outputs(folder).items():
        if name.endswith("/lock") or ".sqlite3-" in name:
            continue
        digest.update(name.encode())
        digest.update(_rows(folder / name) if name.endswith(".sqlite3") else content)
    return str(digest.hexdigest())


def _rows(database: Path) -> bytes:
    with tempfile.TemporaryDirectory() as copy:
        for path in database.parent.glob(database.name + "*"):
            shutil.copy(path, copy)
        connection = sqlite3.connect(Path(copy) / database.name)
        try:
            return "".join(sorted(connection.iterdump())).encode()
        finally:
            connection.close()


def _assert_equal(folder: Path, expected: dict[str, bytes], crashes: list[str]) -> None:
    actual = outputs(folder)
    assert actual.keys() == expected.keys(), f"after {crashes}: files {sorted(actual)}, not {sorted(expected)}"
    for name, content in expected.items():
        assert actual[name] == content, f"after {crashes}: {name} differs:\n{actual[name]!r}\n{content!r}"
