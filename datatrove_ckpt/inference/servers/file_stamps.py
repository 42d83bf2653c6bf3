"""Stamps of the files that a server is started with: equal as long as nobody changes the files.

A stamp is made of what ``stat`` says: no file is read. Of a folder it covers the files in it and those one level down,
at most ``_MOST_FILES`` of each. Nothing here raises for a path that does not exist or cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

_MOST_FILES = 1000  # stamped, per level of a folder
_MOST_NAMES = 10_000  # listed, per level of a folder: one may hold millions
_MOST_PATHS = 1000  # tried, per argument: one may be a long text
_LONGEST_PATH = 4096  # characters

Stamp = tuple[int, int, int]
"""Modification time in nanoseconds, size in bytes, inode."""
FolderStamp = list[tuple[str, Stamp | None]]
"""Paths of files with their stamps; None for a link that leads nowhere."""


def stamp(path: str) -> Stamp | FolderStamp | None:
    """Changes when the file, or a file in the folder, changes. None for what is no path, such as a model's name."""
    expanded = _expanded(path)
    status = _status(expanded) if path else None
    if status is None:
        return None
    return stamp_of_folder(expanded) if stat.S_ISDIR(status.st_mode) else _of_file(status)


def stamp_of_folder(folder: Path, suffix: str = "") -> FolderStamp:
    """The stamps of its files.

    Args:
        suffix: leave out files whose names do not end so.
    """
    here = sorted(islice(_entries(folder), _MOST_NAMES), key=lambda entry: entry.name)
    folders = [Path(entry.path) for entry in here if _is_folder(entry) and entry.name != "__pycache__"]
    below = islice(chain.from_iterable(map(_entries, folders)), _MOST_NAMES)
    return [*_of_files(here, suffix), *_of_files(sorted(below, key=lambda entry: entry.path), suffix)]


def stamps_of_arguments(argv: Sequence[str], known: Collection[str]) -> dict[str, object]:
    """From the names of flags to the stamps of the files and folders that their values name.

    A value may be a path, ``NAME=PATH``, several of them with commas or blanks between, or JSON that contains some.

    Args:
        argv: the command line.
        known: paths that need no stamp.
    """
    skipped = {_expanded(path).absolute() for path in known}
    stamps: dict[str, dict[str, object]] = {}
    flag = "the command"
    for argument in argv:
        value = argument
        if argument.startswith("-"):
            flag, _, value = argument.partition("=")
        for path in islice(_possible_paths(value), _MOST_PATHS):
            found = stamp(path)
            if found is not None and _expanded(path).absolute() not in skipped:
                stamps.setdefault(flag, {})[path] = found
    return dict(stamps)


def _possible_paths(value: object) -> Iterator[str]:
    """Every text in a value that may be a path."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _possible_paths(item)
        return
    if not isinstance(value, str):
        return
    if value.lstrip()[:1] in ("[", "{"):
        try:
            yield from _possible_paths(json.loads(value))
        except (ValueError, RecursionError):
            pass  # a text
        else:
            return
    for text in (value, *re.split(r"[,\s]+", value)):
        starts = (0, *(place.end() for place in re.finditer("=", text)))
        yield from (text[start:] for start in starts if 0 < len(text) - start <= _LONGEST_PATH)


def _expanded(path: str) -> Path:
    expanded = Path(os.path.expandvars(path))
    try:
        return expanded.expanduser()
    except RuntimeError:  # there is no such user
        return expanded


def _status(path: Path) -> os.stat_result | None:
    """Of a file or folder. None if there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    # The times of devices and pipes change with their use.
    return status if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else None


def _of_file(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _of_files(entries: Sequence[os.DirEntry[str]], suffix: str) -> FolderStamp:
    files = (entry for entry in entries if entry.name.endswith(suffix) and not _is_folder(entry))
    statuses = ((entry.path, _status(Path(entry.path))) for entry in islice(files, _MOST_FILES))
    return [(path, status and _of_file(status)) for path, status in statuses]


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
