"""A disk that loses power: a subclass of ``files.Disk`` that stands in for it during a test."""

import copy
import os
import shutil
from pathlib import Path

from datatrove_ckpt.checkpoint.layout import CACHE
from tests.crashes import EFFECTS, CopyingDisk, CrashingDisk, path_of


class _File:
    """A file's content, and the part of it that survives power loss."""

    def __init__(self, durable=b""):
        self.durable = durable
        self.content = durable


Names = dict[Path, "_File | None"]
"""Files by path; None stands for a folder."""


class PowerLossDisk(CrashingDisk):
    """A disk that loses power: data that was not synced may be lost, all or in part.

    The survivors are every combination of *contents* (of each file: only what was synced; all;
    synced and half of the rest; all, but the last block is zeros; and, so that files disagree,
    alternate files all or nothing) and *names* (of each folder: as at its last sync; as now).
    Everything counts as synced when the disk is made. SQLite does not write through this class, so
    its files are read whenever another effect happens, and count as synced when their log is.
    """

    BLOCK = 64  # bytes; smaller than a real one, as everything in tests is

    def __init__(self, crash_at, folder, torn=False, counted=EFFECTS):
        super().__init__(crash_at, folder, torn, counted)
        found = folder.rglob("*")
        self._now = {path: None if path.is_dir() else _File(path.read_bytes()) for path in found}
        self._durable = dict(self._now)

    def before(self, name, args, label):
        if self.crashed_at is None and (name == "rename" or len(self.happened) == self._crash_at):
            self._look()
        super().before(name, args, label)

    def after(self, name, args):
        if name == "sync":
            self._look()
            self._synced(path_of(args))
        elif name == "rename":
            self._now[path_of(args)] = self._now.pop(args[0])
        elif name == "link":
            self._look()
            self._now[path_of(args)] = self._now[args[0]]

    def _look(self):
        """Records what is on the real disk now."""
        before = self._now
        self._now = {}
        for folder, folders, names in os.walk(self._folder):
            self._now.update(dict.fromkeys(Path(folder, name) for name in folders))
            for path in (Path(folder, name) for name in names):
                file = before.get(path) or _File()
                file.content = path.read_bytes()
                self._now[path] = file

    def _synced(self, path):
        if path.is_dir():
            for known in [known for known in self._durable if known.parent == path]:
                del self._durable[known]
            self._durable.update(
                {known: file for known, file in self._now.items() if known.parent == path}
            )
            return
        # SQLite syncs its database before it relies on it, and what it wrote there is at least as
        # old as its log.
        also = path.with_name(path.name.removesuffix("-wal"))
        for synced in {path, also}:
            if (file := self._now.get(synced)) is not None:
                file.durable = file.content

    def survivors(self):
        for names, name in ((self._durable, "old names"), (self._now, "new names")):
            for content in ("synced", "all", "half", "torn", "odd", "even"):
                self._put(names, content)
                yield f"{content} content, {name}"

    def _put(self, names, content):
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for index, path in enumerate(sorted(names)):
            # A folder whose name is lost takes its content with it.
            if not path.parent.is_dir():
                continue
            file = names[path]
            if file is None:
                path.mkdir()
            else:
                path.write_bytes(self._survives(path, file, content, index))

    def _survives(self, path, file, content, index):
        # SQLite syncs its log before it writes to the database, and the database before it restarts
        # the log. So the database survives as it is now. If it changed since our last sync, SQLite
        # has synced the log.
        database = self._now.get(path.with_name(path.name.removesuffix("-wal")))
        if path.name == CACHE or (
            path.name.endswith("-wal")
            and database is not None
            and database.content != database.durable
        ):
            return file.content
        if content == "synced" or (content in ("odd", "even") and index % 2 == (content == "even")):
            return file.durable
        grown = file.content.startswith(file.durable) and len(file.content) > len(file.durable)
        if content == "half" and grown:
            return file.content[: (len(file.durable) + len(file.content) + 1) // 2]
        if content == "torn" and grown:
            kept = max(len(file.durable), len(file.content) - self.BLOCK)
            return file.content[:kept] + bytes(len(file.content) - kept)
        return file.content


class CopyingPowerLossDisk(CopyingDisk, PowerLossDisk):
    """A disk that keeps what a power loss before each effect would leave."""

    def __init__(self, folder, torn=False, counted=EFFECTS):
        super().__init__(folder, torn, counted)
        self._kept = []

    def before(self, name, args, label):
        if name == "rename":
            self._look()
        super().before(name, args, label)

    def keep(self):
        self._look()
        self._kept.append(copy.deepcopy((self._now, self._durable)))

    def put_back(self, point):
        self._now, self._durable = self._kept[point]
        return self.survivors()
