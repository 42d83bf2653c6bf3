"""For tests: a server that answers and counts, and crashes at every point where there can be one.

Public, so that a user can prove a rollout, an adapter or a writer of their own. Imported by nothing in the package.
"""

from datatrove_ckpt.testing.crashes import (
    CrashReport,
    assert_same_output_after_crash,
    assert_same_output_after_disk_errors,
    outputs,
)
from datatrove_ckpt.testing.disks import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    FailingDisk,
    PowerLossDisk,
    SimulatedCrash,
    crash_at,
    disk_in_place,
)
from datatrove_ckpt.testing.server import FakeServer

__all__ = [
    "EFFECTS",
    "REMOTE_EFFECTS",
    "CrashReport",
    "CrashingDisk",
    "FailingDisk",
    "FakeServer",
    "PowerLossDisk",
    "SimulatedCrash",
    "assert_same_output_after_crash",
    "assert_same_output_after_disk_errors",
    "crash_at",
    "disk_in_place",
    "outputs",
]
