"""Tools for tests, also of users: a server that counts requests, and disks that crash a job at any
effect. Start at ``assert_same_output_after_crash``.
"""

from datatrove_ckpt.testing.crashes import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    CrashReport,
    SimulatedCrash,
    assert_same_output_after_crash,
    crash_at,
    disk_in_place,
    outputs,
)
from datatrove_ckpt.testing.fake_server import FakeServer

__all__ = [
    "EFFECTS",
    "REMOTE_EFFECTS",
    "CrashReport",
    "CrashingDisk",
    "FakeServer",
    "SimulatedCrash",
    "assert_same_output_after_crash",
    "crash_at",
    "disk_in_place",
    "outputs",
]
