"""Enumerates crashes: a job, and each recovery, crashes at effect 0, 1, 2, ... until it ends.

Disks that crash are subclasses of ``files.Disk``, which replace it during a test.
"""

import functools
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from datatrove_ckpt.checkpoint import clock, files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import whole_lines
from datatrove_ckpt.checkpoint.history import parse_line
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.testing import outputs
from tests.mirrors import known_ordinals

EFFECTS = (
    "make_dir",
    "create",
    "write",
    "sync",
    "rename",
    "link",
    "truncate",
    "remove",
    "remove_dir",
    "remove_tree",
    "commit",
)
"""The names of the effects on disk: methods of ``files.Disk``."""
REMOTE_EFFECTS = ("put", "create", "copy", "delete", "delete_tree")
"""The names of the effects on a remote: methods of ``ObjectStore``."""

Arguments = tuple[Any, ...]
"""The arguments of an effect.

``Any``, because each effect has its own and all go through one method here.
"""


class SimulatedCrash(BaseException):
    """The process is dead. A BaseException, so that no ``except Exception`` survives it."""


class WatchedDisk(files.Disk):
    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self._lock = self._appending  # held by a thread that appends when its write comes here

    def before(self, name: str, args: Arguments, label: str) -> None:
        """Raises to prevent the effect."""

    def after(self, name: str, args: Arguments) -> None:
        """Called after an effect."""

    def happen(
        self, name: str, args: Arguments, path: Path | str, effect: Callable[[], int | None]
    ) -> int | None:
        """Does an effect on the disk or on a remote, in one order."""
        with self._lock:
            label = f"{name} {Path(path).name}"
            self.before(name, args, label)
            result = effect()
            self.happened.append(label)
            self.after(name, args)
            return result


def path_of(args: Arguments) -> Path:
    """Returns the path that an effect changes: its last path, which for a rename is the target."""
    return next(argument for argument in reversed(args) if isinstance(argument, Path))


def _on_disk(name: str) -> Callable[..., int | None]:
    return lambda self, *args: self.happen(
        name, args, path_of(args), partial(getattr(files.Disk, name), self, *args)
    )


def _on_remote(name: str, disk: WatchedDisk) -> Callable[..., int | None]:
    effect = getattr(ObjectStore, name)
    return lambda *args: disk.happen(name, args, args[1], partial(effect, *args))


for _name in EFFECTS:
    setattr(WatchedDisk, _name, _on_disk(_name))


class CrashingDisk(WatchedDisk):
    """A disk on which ``crash_at`` effects happen. The next effect crashes, and from then on every
    effect raises.

    A copy of the folder as it was at the crash is kept beside it: what a crashed attempt still does
    while it ends never helps the next attempt.

    Args:
        crash_at: number of effects that happen.
        folder: the folder to copy at the crash.
        torn: a write, or a put to a remote, crashes in the middle.
        counted: names of the effects that count, and at which the disk may crash.
    """

    def __init__(
        self,
        crash_at: int,
        folder: Path,
        torn: bool = False,
        counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS),
    ) -> None:
        super().__init__()
        self._counted = counted
        self._count = 0
        self.crashed_at: str | None = None
        self.snapshot = folder.with_name(folder.name + ".at-crash")
        self._crash_at = crash_at
        self._folder = folder
        self._torn = torn

    def before(self, name: str, args: Arguments, label: str) -> None:
        if self.crashed_at is not None:
            raise SimulatedCrash(self.crashed_at)
        self._count += name in self._counted
        if self._count <= self._crash_at or name not in self._counted:
            return
        if name == "write" and self._torn:
            files.Disk.write(self, args[0], memoryview(args[1])[: len(args[1]) // 2], args[2])
        if name == "put" and self._torn:
            tear(*args)
        self.crashed_at = label
        copy_tree(self._folder, self.snapshot)
        raise SimulatedCrash(label)

    def survivors(self) -> Iterator[str]:
        """Puts each folder that the crash may leave behind in place, one after the other, and
        yields its name.
        """
        copy_tree(self.snapshot, self._folder)
        yield "killed"


class CopyingDisk(CrashingDisk):
    """A disk that does not crash: before each effect that is ``counted`` it keeps a copy of the
    folder, which is what a crash there leaves, because nothing that a dead process does reaches it.

    Attributes:
        points: the effects before which there is a copy.
    """

    def __init__(
        self, folder: Path, torn: bool = False, counted: tuple[str, ...] = EFFECTS
    ) -> None:
        super().__init__(0, folder, torn, counted)
        self.points: list[str] = []
        self._copies = Path(tempfile.mkdtemp(dir=folder.parent))

    def happen(
        self, name: str, args: Arguments, path: Path | str, effect: Callable[[], int | None]
    ) -> int | None:
        with self._lock:
            is_torn = self._torn and name in self._counted
            if is_torn and name == "put":
                tear(*args)
            if is_torn and name == "write":
                fd, data, file = args
                half = len(data) // 2
                files.Disk.write(self, fd, memoryview(data)[:half], file)
                args = fd, memoryview(data)[half:], file
                effect = partial(files.Disk.write, self, *args)
            return super().happen(name, args, path, effect)

    def before(self, name: str, args: Arguments, label: str) -> None:
        if name in self._counted:
            self.keep()
            self.points.append(label)

    def keep(self) -> None:
        shutil.copytree(self._folder, self._copies / str(len(self.points)))

    def put_back(self, point: int) -> Iterator[str]:
        """Puts each folder that a crash at this point leaves in place, once, as ``survivors``."""
        shutil.rmtree(self._folder)
        (self._copies / str(point)).rename(self._folder)
        yield "killed"

    def left(self) -> Iterator[tuple[int, str]]:
        """Puts each folder that a crash may leave behind in place.

        Yields the number of the crash point, and the folder's name.
        """
        for number, point in enumerate(self.points):
            for survivor in self.put_back(number):
                yield number, f"{point} ({survivor})"
        shutil.rmtree(self._copies)


def tear(store: ObjectStore, name: str, data: bytes | Path) -> None:
    """Leaves half of what ``ObjectStore.put`` would write."""
    if isinstance(data, bytes):
        store._write(store._path(name), data[: len(data) // 2])


def copy_tree(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@contextmanager
def disk_in_place(disk: files.Disk) -> Iterator[None]:
    """Makes all rooms write to ``disk`` inside the block.

    A simulated crash ends the block and is swallowed.
    """
    before = files.disk
    files.disk = disk
    try:
        with ExitStack() as stack:
            if isinstance(disk, CrashingDisk):
                for name in REMOTE_EFFECTS:
                    effect = _on_remote(name, disk)
                    stack.enter_context(patch.object(ObjectStore, name, effect))
            with suppress(SimulatedCrash):
                yield
    finally:
        files.disk = before
        disk.close()


@contextmanager
def crash_at(number: int, folder: Path, torn: bool = False) -> Iterator[CrashingDisk]:
    """Lets ``number`` effects happen and crashes at the next. Swallows the crash; leaves ``folder``
    as it was then.

    The disk's ``crashed_at`` is None if the block ended before that effect.
    """
    disk = CrashingDisk(number, folder, torn)
    with disk_in_place(disk):
        yield disk
    if disk.crashed_at is not None:
        next(disk.survivors())


AttemptFunction = Callable[[Path], None]
"""One attempt of a job. It keeps everything below the folder that it is given."""


@dataclass
class CrashReport:
    """The crashes that were tried.

    Attributes:
        points: the effects at which the first attempt crashed.
        survivors: number of folders that the crashes may leave behind.
        states: hashes of the folders that differ, each with the number of further crashes that were
            tried from there. An equal folder is tried again only for more crashes.
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


def assert_same_output_after_crash(
    run: AttemptFunction,
    folder: Path,
    *,
    output: str = "output",
    recoveries: int = 1,
    step: int = 1,
    torn: bool = False,
    disk_type: type[CopyingDisk] = CopyingDisk,
    after_crash: AttemptFunction = lambda folder: None,
    counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS),
) -> CrashReport:
    """Runs a job undisturbed, then from each folder that a crash at any effect leaves, and from
    each that a crash of these recoveries leaves.

    Args:
        run: one attempt of the job.
        folder: a folder for the job. Every attempt finds in it what it holds before the first (the
            input).
        output: the folder below ``folder`` whose files must be the same, byte for byte, in the end.
        recoveries: also crash the recoveries: from each crash point (1), each third (3), none (0).
        step: try only the crashes at each multiple of this number.
        torn: a crash at a write leaves half of it.
        disk_type: the disk that keeps what a crash leaves. By default the process is killed, and
            what it has written stays.
        after_crash: called with each different folder that a crash leaves behind, for further
            assertions.
        counted: names of the effects to crash at.

    Raises:
        AssertionError: the output differs. The message names the crash points.
    """
    report = CrashReport()
    expected: dict[str, bytes] = {}

    def resume(crashes: list[str], depth: int) -> None:
        report.attempts += 1
        if not depth:
            run(folder)
            assert_equal(folder / output, expected, crashes)
            return
        disk = disk_type(folder, torn, counted)
        with disk_in_place(disk):
            run(folder)
        if not crashes:
            report.points += disk.points
            expected.update(outputs(folder / output))
        assert_equal(folder / output, expected, crashes)
        for number, crash in disk.left():
            further = 0
            if number % max(recoveries, 1) == 0:
                further = depth - 1
            if number % step == 0 and report.is_new(folder, further):
                after_crash(folder)
                resume([*crashes, crash], further)

    # Otherwise no two folders would be equal.
    with patch.multiple(clock, _monotonic=lambda: 0.0, _wall=lambda: 0.0):
        resume([], 2 if recoveries else 1)
    return report


def _state(folder: Path) -> str:
    """Hashes the content that the next attempt can see.

    SQLite's files hold random numbers: their rows count.
    """
    digest = xxhash.xxh3_128()
    for name, data in outputs(folder).items():
        if name.endswith(f"/{layout.LOCK}") or f"{layout.CACHE}-" in name:
            continue
        digest.update(name.encode())
        if name.endswith(f"/{layout.HISTORY}"):
            # Of a history only the last byte decides what the next attempt does.
            records = map(parse_line, whole_lines(data))
            kinds = [getattr(record, "KIND", None) for record in records]
            data = repr((data[-1:], kinds)).encode()
        if name.endswith(layout.CACHE):
            database = folder / name
            paths = sorted(database.parent.glob(f"{database.name}*"))
            data = _dump(tuple((path.name, path.read_bytes()) for path in paths))
        digest.update(data)
    return str(digest.hexdigest())


@functools.lru_cache(64)  # most survivors have the same database
def _dump(database: tuple[tuple[str, bytes], ...]) -> bytes:
    with tempfile.TemporaryDirectory() as copy:
        for name, data in database:
            (Path(copy) / name).write_bytes(data)
        with closing(sqlite3.connect(Path(copy) / layout.CACHE)) as connection:
            return "".join(sorted(connection.iterdump())).encode()


def assert_equal(folder: Path, expected: dict[str, bytes], crashes: list[str]) -> None:
    actual = outputs(folder)
    assert actual.keys() == expected.keys(), (
        f"after {crashes}: files {sorted(actual)}, not {sorted(expected)}"
    )
    for name, data in expected.items():
        assert actual[name] == data, f"after {crashes}: {name} differs:\n{actual[name]!r}\n{data!r}"


# Those that change what a file holds or is called. A kill before a sync leaves what one before the
# next effect leaves.
OF_FILES = ("create", "write", "rename", "link", "truncate", "remove", "commit")


def committed(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0


def answered(folder):
    """Returns what is answered according to cache, journals and commits, for documents whose text
    is their ordinal.
    """
    finished, cached = known_ordinals(folder / "checkpoints" / "00000")
    return Counter(f"text {ordinal}" for ordinal in finished | cached.keys())
