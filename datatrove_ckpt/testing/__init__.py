"""For tests: a server that counts requests, disks that crash a job wherever it can crash, and loaders that stop.

This room is public, so that users can test their own rollouts, adapters and writers. It may import ``checkpoint`` and
``mirror``, whose effects it replaces; nothing in the package imports it. Start at ``crashes``
(``assert_same_output_after_crash``), then ``disks`` (what a crash leaves behind), ``server`` (``FakeServer``) and
``resume`` (``assert_resume_is_exact``, for any data loader).
"""

from datatrove_ckpt.testing.crashes import CrashReport, assert_same_output_after_crash, outputs
from datatrove_ckpt.testing.disks import (
    EFFECTS,
    REMOTE_EFFECTS,
    CrashingDisk,
    SimulatedCrash,
    crash_at,
    disk_in_place,
)
from datatrove_ckpt.testing.resume import ResumeReport, assert_resume_is_exact
from datatrove_ckpt.testing.server import FakeServer

__all__ = [
    "EFFECTS",
    "REMOTE_EFFECTS",
    "CrashReport",
    "CrashingDisk",
    "FakeServer",
    "ResumeReport",
    "SimulatedCrash",
    "assert_resume_is_exact",
    "assert_same_output_after_crash",
    "crash_at",
    "disk_in_place",
    "outputs",
]
