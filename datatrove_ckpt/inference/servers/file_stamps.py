"""Stamps of the files that a server is started with: equal as long as nobody changes the files.

A stamp is made of what ``stat`` says: no file is read. Of a folder it covers the files in it and those one level down,
at most ``_MOST_FILES`` of each. Nothing here raises for a path that does not exist or cannot be read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeAlias

_MOST_FILES = 1000  # stamped, per level of a folder
_MOST_NAMES = 10_000  # listed, per level of a folder: one may hold millions
_BETWEEN = re.compile(r"[\s,=]+")
Stamp: TypeAlias = list[tuple[str, int, int, int]]
"""Files with their modification time in nanoseconds, size in bytes, and inode."""


def stamp(path: str, suffix: str = "") -> Stamp:
    """Changes when the file, or a file in the folder, changes. Empty for what is no path, such as a model's name.

    Args:
        suffix: of a folder, leave out files whose names do not end so.
    """
    root = Path(os.path.expandvars(path))
    with suppress(RuntimeError):  # there is no such user
        root = root.expanduser()
    found = _files([root])
    for level in (f"*{suffix}", f"*/*{suffix}"):
        with suppress(OSError, ValueError):
            found += _files(sorted(islice(root.glob(level), _MOST_NAMES)))[:_MOST_FILES]
    return found


def _files(paths: Iterable[Path]) -> Stamp:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):  # the times of devices and pipes change with their use
                found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
    return found


def stamps_of_arguments(argv: Sequence[str], known: Collection[str]) -> dict[str, dict[str, Stamp]]:
    """From the names of flags to the stamps of the files and folders that their values name.

    A value may be a path, NAME=PATH, several of them with commas or blanks between, or JSON that contains some.

    Args:
        argv: the command line.
        known: paths that need no stamp.
    """
    stamps: dict[str, dict[str, Stamp]] = {}
    flag = "the command"
    for argument in argv:
        value = argument
        if argument.startswith("-"):
            flag, _, value = argument.partition("=")
        texts = {value, *re.split(r'\\*"', value)}
        texts |= {text.partition("=")[2] for text in texts} | {part for text in texts for part in _BETWEEN.split(text)}
        for path in sorted(texts - {*known, ""}):
            if found := stamp(path):
                stamps.setdefault(flag, {})[path] = found
    return stamps
