"""Measures free disk space, and holds new documents back while published chunks fill the disk."""

import os
import time
from pathlib import Path

from loguru import logger

from datatrove_ckpt.common.formatting import byte_size, plural

_CHECK_SECONDS = 1.0


class DiskSpace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_check = 0.0
        self._is_low = False

    def holds_up(self, waiting: int, max_ignored: int) -> bool:
        """Whether no document should be started. Logs each change.

        Args:
            waiting: number of chunks that wait to be put in place.
            max_ignored: number of waiting chunks that are too few to free enough space.
        """
        was_low = self._is_low
        now = time.monotonic()
        if waiting <= max_ignored:
            self._is_low = False
        elif now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            free = free_bytes(self._folder)
            reserve = reserve_bytes(self._folder)
            if was_low:
                self._is_low = free < reserve * 1.1  # the run would alternate every second
            elif free < reserve:
                self._is_low = True
                logger.warning(
                    f"{self._folder}: only {byte_size(free)} are free, less than the reserve of "
                    f"{byte_size(reserve)}, and {plural(waiting, 'chunk')} wait for the hub. No "
                    "new document is started until space is free; documents in progress continue."
                )
        if was_low and not self._is_low:
            logger.info(
                f"{self._folder}: {byte_size(free_bytes(self._folder))} are free. New documents "
                "are started."
            )
        return self._is_low


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def reserve_bytes(folder: Path) -> int:
    """Returns the reserve: a disk with less free space is nearly full.

    The reserve is a twentieth of the disk, and at most 10 GiB. It is at least 64 MiB, because
    SQLite's log and other files need space on a small disk too; and at most half of the disk.
    """
    status = os.statvfs(folder)
    disk = status.f_blocks * status.f_frsize
    return min(max(64 * 2**20, min(10 * 2**30, disk // 20)), disk // 2)
