"""Whether datatrove's run is still on, as far as this host shows it.

datatrove's runner keeps ``replay.sqlite3`` open from the moment on when its server answers, until it ends; its output
files while it writes them; and its executor the log file of the task for the whole time. It takes no lock. So a process
of this host is found in ``/proc``; those of other users cannot be looked into. A process on another node shows only in
the age of what it wrote.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint.layout import CACHE, CACHE_LOGS
from datatrove_ckpt.formatting import duration, safe_text
from datatrove_ckpt.preflight.checks import file_system

_PROC = Path("/proc")
_YOUNG = 600.0  # seconds
_MOST_TEXT = 60


class Holder(NamedTuple):
    """A process that has a file open to write to it. ``command``: the name of its program and script."""

    pid: int
    command: str
    path: Path


def find_holder(paths: Iterable[Path]) -> Holder | None:
    """The first other process found that has one of the files open to write to it.

    Files are told apart by their inodes, so it does not matter by which name, or in which container, it was opened.
    """
    by_name: dict[str, list[Path]] = {}
    for path in paths:
        by_name.setdefault(path.name, []).append(path)
    for process in _PROC.iterdir() if by_name and _PROC.is_dir() else ():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            for descriptor, name in _open_files(process):
                for path in by_name.get(name, ()):
                    if _is_written(process, descriptor) and _is_same(descriptor, path):
                        return Holder(int(process.name), _command(process), path.absolute())
    return None


def _open_files(process: Path) -> Iterator[tuple[Path, str]]:
    """Descriptors with the names of their files; none if the process has ended, or belongs to another user."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield descriptor, descriptor.readlink().name


def _is_written(process: Path, descriptor: Path) -> bool:
    with suppress(OSError, ValueError, IndexError):
        for line in (process / "fdinfo" / descriptor.name).read_text().splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _is_same(descriptor: Path, path: Path) -> bool:
    try:
        return descriptor.samefile(path)
    except OSError:
        return False


def _command(process: Path) -> str:
    """Its program and the first argument, a script mostly. Later ones may hold secrets."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "unknown"
    first = words[1:3] if words[1:2] == ["-m"] else words[1:2]
    if any("=" in word for word in first) or (len(first) == 1 and first[0].startswith("-")):
        first = []
    return safe_text(" ".join([Path(words[0]).name, *first]).strip())[:_MOST_TEXT]


def open_files(folder: Path) -> Iterator[Path]:
    """The files of a rank's folder that datatrove may have open."""
    yield folder / CACHE
    yield from (folder / (CACHE + suffix) for suffix in CACHE_LOGS)
    yield from folder.glob("chunk_*.jsonl")


def warn_of_young(paths: Iterable[Path]) -> str:
    """What is to be said if another node may still write to these files; "" if not."""
    newest: tuple[float, Path] | None = None
    for path in paths:
        with suppress(OSError):
            changed = path.stat().st_mtime
            newest = (changed, path) if newest is None or changed > newest[0] else newest
    if newest is None or (age := max(0.0, time.time() - newest[0])) >= _YOUNG or not file_system(newest[1]).shared:
        return ""
    return (
        f"the newest file, {newest[1]}, is {duration(age)} old. Other nodes share its file system, and a process there "
        "cannot be seen: make sure that datatrove's run is stopped on all nodes"
    )
