"""A rank's file for node_exporter's textfile collector.

node_exporter may read at any moment, so a version replaces the one before in one step. The file stays when its rank
ends, with the last values and the rank's last state, because otherwise what happened since the last look would be lost.
The next rank that starts with the same setting removes it after ten minutes. It also removes the file of a process that
was killed, which could not write its end.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from loguru import logger

from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.generation.export.metrics import Snapshot
from datatrove_ckpt.generation.export.prometheus import exposition

_KEEP_ENDED_SECONDS = 600.0
_HEAD = re.compile(r"# datatrove-ckpt: (running|ended), process ([0-9]{1,10}) on (\S+)\n")


def metrics_path(setting: str, rank: int) -> Path:
    """The file of a rank on this node.

    Args:
        setting: ``MonitoringConfig.metrics_file``.

    Raises:
        ConfigError: a variable in the path is not set here.
    """
    return _path(setting, f"{rank:05d}")


def _path(setting: str, number: str) -> Path:
    if "${rank}" not in setting:
        setting = f"{setting.removesuffix('.prom')}_${{rank}}.prom"
    return expand_path("monitoring.metrics_file", setting.replace("${rank}", number))


class MetricsFile:
    """Writes a rank's file every few seconds, in a thread of its own.

    Args:
        setting: ``MonitoringConfig.metrics_file``.
        snapshot: the rank's metrics now.
    """

    def __init__(self, setting: str, seconds: float, rank: int, snapshot: Callable[[], Snapshot]) -> None:
        self.path = metrics_path(setting, rank)
        self._others = _path(setting, "*").name  # a pattern
        self._seconds = seconds
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt metrics file", daemon=True)

    def start(self) -> None:
        self._remove_old()
        self._thread.start()

    def end(self) -> None:
        """Writes the last version."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write("running")
            self._ended.wait(self._seconds)
        self._write("ended")

    def _write(self, state: str) -> None:
        """A failure is logged once: the run must not end for it."""
        try:
            head = f"# datatrove-ckpt: {state}, process {os.getpid()} on {socket.gethostname()}\n"
            self._replace(head.encode() + exposition([self._snapshot()]))
            self._failed = False
        except Exception as error:  # whatever it is, the next version may work, and the last one is the most wanted
            if not self._failed:
                why = getattr(error, "strerror", None) or repr(error)
                logger.warning(f"metrics_file: {self.path} cannot be written: {why}. The run goes on.")
            self._failed = True

    def _replace(self, text: bytes) -> None:
        # Another name than *.prom, which node_exporter would read.
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)  # node_exporter is another user; there is nothing secret in it
                file.write(text)
            new.replace(self.path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def _remove_old(self) -> None:
        """Removes what ranks that have ended, or were killed on this machine, have left."""
        for path in self.path.parent.glob(self._others):
            with suppress(OSError, UnicodeError):
                if path != self.path and _is_old(path):
                    path.unlink()


def _is_old(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        head = _HEAD.fullmatch(file.readline(300))
    if head is None:  # not one of ours
        return False
    if head[1] == "ended":
        return time.time() - path.stat().st_mtime > _KEEP_ENDED_SECONDS
    return head[3] == socket.gethostname() and not _is_alive(int(head[2]))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
