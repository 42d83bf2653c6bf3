"""Which keys and types every file of a run has, also those that it has only while it runs."""

import re
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import verified_body
from datatrove_ckpt.common.object_store import ObjectStore

_OUTPUT = re.compile(r"staging|_chunk_")
"""What the user's writer makes."""
_STAGED = re.compile(r"\.new$|\.[0-9a-f]{8}$")
_NUMBERS = ((re.compile(r"[0-9a-f]{16,}"), "H"), (re.compile(r"\d+"), "N"))
_TYPES = {int: "number", float: "number", str: "text", bool: "bool"}


class Shapes:
    """Keys with their types, by the name of a file, without its folder.

    Numbers in names are N, hashes H.
    """

    def __init__(self):
        self._found = defaultdict(lambda: defaultdict(set))

    def note(self, path, data):
        if _OUTPUT.search(str(path)):
            return
        name = _plain(_STAGED.sub("", Path(path).name))
        for content in _contents(bytes(data)):
            self._add(self._found[name], content, "")

    def note_tables(self, path):
        """Of a database that another connection may have open."""
        with tempfile.TemporaryDirectory() as folder:
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, folder)
            with closing(sqlite3.connect(Path(folder, path.name))) as connection:
                for (statement,) in connection.execute(
                    "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
                ):
                    self._found["replay.sqlite3"][" ".join(statement.split())].add("sql")
                for (result,) in connection.execute(
                    "SELECT result FROM request_cache WHERE result IS NOT NULL"
                ):
                    self._add(self._found["replay.sqlite3"], orjson.loads(result), ".result")

    def _add(self, found, content, path):
        if isinstance(content, dict) and content:
            for name, inner in content.items():
                self._add(found, inner, f"{path}.{_plain(name)}")
        elif isinstance(content, list) and content:
            for inner in content:
                self._add(found, inner, f"{path}[]")
        else:
            found[path or "."] |= {_TYPES.get(type(content))} - {None}

    def found(self):
        """Without what is empty at times, which may depend on the time."""
        return {
            name: {
                key: " or ".join(sorted(kinds))
                for key, kinds in sorted(keys.items())
                if kinds or not any(other.startswith((f"{key}.", f"{key}[")) for other in keys)
            }
            for name, keys in sorted(self._found.items())
        }


def _contents(data):
    """Of a file, or of its lines; sealed or not."""
    try:
        return [orjson.loads(verified_body(data) or data)]
    except orjson.JSONDecodeError:
        lines = data.splitlines(keepends=True)
        return [orjson.loads(verified_body(line) or line) for line in lines]


def _plain(name):
    for pattern, sign in _NUMBERS:
        name = pattern.sub(sign, name)
    return name


class _Disk(files.Disk):
    def __init__(self, shapes):
        super().__init__()
        self._shapes = shapes

    def write(self, fd, data, path):
        super().write(fd, data, path)
        self._shapes.note(path, data)
        lock = path.with_name("lock")
        if lock.exists() and lock.stat().st_size:
            self._shapes.note(lock, lock.read_bytes())

    def commit(self, connection, path):
        super().commit(connection, path)
        self._shapes.note_tables(path)


@contextmanager
def shapes_of_all_writes():
    """Notes each change of a file, on the disk and on a remote."""
    shapes = Shapes()
    before, files.disk = files.disk, _Disk(shapes)
    put = ObjectStore.put

    def noted(store, name, content):
        put(store, name, content)
        shapes.note(name, content)

    try:
        with patch.object(ObjectStore, "put", noted):
            yield shapes
    finally:
        files.disk.close()
        files.disk = before


def shapes_of(folder):
    """The files that a release has left."""
    shapes = Shapes()
    for path in folder.glob("*/**/*"):  # what lies right there says how it was made
        if path.suffix == ".sqlite3":
            shapes.note_tables(path)
        elif path.is_file() and "-wal" not in path.name and path.stat().st_size:
            shapes.note(path, path.read_bytes())
    return shapes.found()
