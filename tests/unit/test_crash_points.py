"""One attempt, of which what each crash would leave is kept, proves what one attempt for each crash
proves.
"""

import sqlite3
from contextlib import closing

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import CACHE
from datatrove_ckpt.testing import assert_same_output_after_crash
from datatrove_ckpt.testing.disks import EFFECTS, CrashingDisk, copy_tree
from tests.crash_points import (
    CopyingDisk,
    CopyingPowerLossDisk,
    assert_same_output_after_every_crash,
)
from tests.power_loss import PowerLossDisk


def attempt(folder):
    """Every effect, in one order."""
    disk, output, log = files.disk, folder / "output", folder / "log"
    disk.make_dirs(output)
    disk.append(log, b"a line\n")
    disk.sync(log)
    disk.forget(log)
    with closing(sqlite3.connect(folder / CACHE)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS numbers (number)")
        connection.execute("INSERT INTO numbers VALUES (1)")
        disk.commit(connection, folder / CACHE)
    disk.replace(folder / "new", b"what is written is torn in its middle")
    disk.put_new(folder / "new", output / "file")
    disk.sync_dir(output)
    disk.truncate(log, 3)
    disk.make_dir(folder / "empty")
    disk.remove_dir(folder / "empty")
    disk.make_dir(folder / "full")
    disk.replace(folder / "full" / "file", b"removed with its folder")
    disk.remove_tree(folder / "full")
    disk.remove(folder / "new")


@pytest.mark.parametrize(
    ("copying", "crashing", "recoveries", "torn"),
    [
        (CopyingDisk, CrashingDisk, 0, False),
        (CopyingDisk, CrashingDisk, 3, True),
        (CopyingPowerLossDisk, PowerLossDisk, 0, False),
    ],
)
def test_the_same_folders_are_tried(ram, copying, crashing, recoveries, torn):
    folder = ram / "job"
    folder.mkdir()
    copy_tree(folder, ram / "empty")
    one = assert_same_output_after_every_crash(
        attempt, folder, recoveries=recoveries, torn=torn, disk_type=copying, counted=EFFECTS
    )
    copy_tree(ram / "empty", folder)
    each = assert_same_output_after_crash(
        attempt, folder, recoveries=recoveries, torn=torn, disk_type=crashing, counted=EFFECTS
    )
    assert {point.split()[0] for point in one.points} == {*EFFECTS}
    assert one.points == each.points
    assert one.survivors == each.survivors
    assert one.states == each.states
    assert one.attempts < each.attempts
