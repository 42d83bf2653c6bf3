"""The folder on this node for what the user's runs tell each other: locks on GPUs, records of servers."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from datatrove_ckpt.errors import ConfigError


def runtime_folder(part: str = "") -> Path:
    """One folder per user, and per ``part``. Nobody else can look into it.

    Raises:
        ConfigError: somebody else has made it.
    """
    folder = Path(tempfile.gettempdir()) / (f"datatrove-ckpt-{os.getuid()}" + (f"-{part}" if part else ""))
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"TMPDIR: {folder} belongs to another user; point TMPDIR at a folder of your own.")
    return folder
