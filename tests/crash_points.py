"""What ``assert_same_output_after_crash`` proves, with one attempt for all crash points instead of
one for each.

A crash leaves the folder as it was at that effect, and nothing that the process does afterwards
reaches it. So one attempt that goes on, and of whose folder a copy is kept at each effect, leaves
what crashes at all of them leave.
"""

import copy
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

from datatrove_ckpt.checkpoint import files, numbers
from datatrove_ckpt.testing import outputs
from datatrove_ckpt.testing.crashes import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    CrashReport,
    assert_equal,
    copy_tree,
    disk_in_place,
    tear,
)
from tests.power_loss import PowerLossDisk


class CopyingDisk(CrashingDisk):
    """A disk that never crashes: before each effect that is ``counted`` it keeps what a crash there
    would leave.
    """

    def __init__(self, folder, torn=False, counted=EFFECTS):
        super().__init__(0, folder, torn, counted)
        self.points = []
        self._copies = Path(tempfile.mkdtemp(dir=folder.parent))

    def happen(self, name, args, path, effect):
        with self._lock:
            if self._torn and name == "put" and name in self._counted:
                tear(*args)
            if self._torn and name == "write" and name in self._counted:
                half = len(args[1]) // 2
                files.Disk.write(self, args[0], memoryview(args[1])[:half], args[2])
                args = (args[0], memoryview(args[1])[half:], args[2])
                return super().happen(name, args, path, lambda: files.Disk.write(self, *args))
            return super().happen(name, args, path, effect)

    def before(self, name, args, label):
        if name in self._counted:
            self.keep()
            self.points.append(label)

    def keep(self):
        shutil.copytree(self._folder, self._copies / str(len(self.points)))

    def put_back(self, point):
        """``survivors`` of a crash at the point with this number, once."""
        shutil.rmtree(self._folder)
        (self._copies / str(point)).rename(self._folder)
        yield "killed"

    def left(self):
        """Puts each folder that a crash may leave behind in place.

        Yields the number of its point, and its name.
        """
        for number, point in enumerate(self.points):
            for survivor in self.put_back(number):
                yield number, f"{point} ({survivor})"


class CopyingPowerLossDisk(CopyingDisk, PowerLossDisk):
    """The same for power loss."""

    def __init__(self, folder, torn=False, counted=EFFECTS):
        super().__init__(folder, torn, counted)
        self._kept = []

    def before(self, name, args, label):
        if name == "rename":
            self._look()
        super().before(name, args, label)

    def keep(self):
        self._look()
        self._kept.append(copy.deepcopy((self._now, self._durable)))

    def put_back(self, point):
        self._now, self._durable = self._kept[point]
        return self.survivors()


def assert_same_output_after_every_crash(
    run,
    folder,
    *,
    recoveries=0,
    step=1,
    torn=False,
    disk_type=CopyingDisk,
    after_crash=lambda folder: None,
    counted=(*EFFECTS, *REMOTE_EFFECTS),
):
    """Its arguments are those of ``assert_same_output_after_crash``; each ``step``-th crash is tried."""
    report = CrashReport()
    fresh = folder.with_name(f"{folder.name}.fresh")
    copy_tree(folder, fresh)
    run(folder)
    report.attempts += 1
    expected = outputs(folder / "output")

    def resume(crashes, depth):
        """Runs what is in the folder to its end; above depth 0, so does what each crash meanwhile
        would leave.
        """
        report.attempts += 1
        if not depth:
            run(folder)
            assert_equal(folder / "output", expected, crashes)
            return
        disk = disk_type(folder, torn, counted)
        with disk_in_place(disk):
            run(folder)
        assert_equal(folder / "output", expected, crashes)
        report.points += [] if crashes else disk.points
        for number, crash in disk.left():
            further = 0 if number % max(recoveries, 1) else depth - 1
            if number % step == 0 and report.is_new(folder, further):
                after_crash(folder)
                resume([*crashes, crash], further)

    copy_tree(fresh, folder)
    # No time passes: else no two folders would be equal.
    with patch.multiple(numbers, _monotonic=lambda: 0.0, _wall=lambda: 0.0):
        resume([], 2 if recoveries else 1)
    return report
