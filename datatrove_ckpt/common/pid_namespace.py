"""Identifies the kernel and PID namespace of a process. Containers and cloned machines may share a
host name, which does not show that a lock is seen, or that a process id means the same process.
"""

import os
from pathlib import Path

import xxhash

_PROC = Path("/proc")


def pid_namespace_id() -> str:
    """Returns eight hexadecimal digits for this boot of a kernel, whose processes see each other's
    locks, and eight for the PID namespace. Empty if the system does not show both.
    """
    try:
        if (_PROC / "self").readlink().name != str(os.getpid()):  # of another namespace
            return ""
        boot = (_PROC / "sys/kernel/random/boot_id").read_bytes()
        namespace = (_PROC / "self/ns/pid").readlink().name.encode()
    except OSError:
        return ""
    return xxhash.xxh32(boot).hexdigest() + xxhash.xxh32(namespace).hexdigest()
