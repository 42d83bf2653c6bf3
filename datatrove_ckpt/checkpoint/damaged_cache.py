"""How a damaged request cache is recognised, and set aside. The request cache itself is in ``request_cache``.

Damage is what SQLite calls corrupt or no database, a log whose database is gone, and a database with another schema
than ours. An error of the disk (I/O error, no space, no permission) is not damage: the data may be intact.

The file may come from anywhere, for example with a copied folder. So SQLite runs nothing that a schema names
(``trusted_schema=OFF``), loads no extension, and a database with a trigger or a view is refused.
"""

from __future__ import annotations

import datetime
import errno
import os
import sqlite3
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import CACHE_LOGS

KEPT = 3
"""How many damaged caches are kept beside the current one."""

Row: TypeAlias = tuple[Any, ...]
"""Values of a row. ``Any``, because a damaged one may hold any type in any column."""

_TABLE = "request_cache"
_OBJECTS = {
    ("table", _TABLE),
    ("index", f"sqlite_autoindex_{_TABLE}_1"),
    ("index", "request_cache_chunk"),
}
# In the order in which a table of 0.1 has them, to which ``checksum`` was added.
_COLUMNS = ["chunk_index", "doc_id", "rollout_idx", "payload_hash", "result", "error_message", "ordinal", "occurrence"]
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class NotOurs(sqlite3.DatabaseError):
    """The file may be a database, but it is no request cache."""


def is_damage(error: BaseException | None) -> bool:
    """Whether an error means that the database is damaged; not that the disk failed."""
    code = getattr(error, "sqlite_errorcode", None)
    # The lowest byte is the kind of the error; the others are details.
    return isinstance(error, NotOurs) or (isinstance(code, int) and code & 0xFF in _DAMAGE)


def connect(path: Path) -> sqlite3.Connection:
    """Opens the request cache, or makes an empty one.

    Raises:
        sqlite3.Error, OSError: see ``is_damage``.
    """
    for name in (path, *_logs(path)):
        if name.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(name))
    # A kill while the first cache is made may leave an empty file. It never leaves a log without its database.
    if not _size(path) and any(_size(log) for log in _logs(path)):
        raise NotOurs("the database is missing or empty, but its log is not")
    # SQLite would make it with the mode 0644, and gives its -wal and -journal files the mode of the database.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE))
    # No autocommit: a transaction begins with the first write and ends in ``files.disk.commit``.
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level="DEFERRED", timeout=0)
    # A damaged row may hold any bytes. Its checksum shows that, an exception would end the run.
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        columns = _check_schema(connection)
        connection.executescript(resources.files(__package__).joinpath("schema.sql").read_text())
        if columns and "checksum" not in columns:
            connection.execute(f"ALTER TABLE {_TABLE} ADD COLUMN checksum INTEGER")
    except BaseException:
        close(connection)
        raise
    return connection


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _check_schema(connection: sqlite3.Connection) -> list[str]:
    """Returns the table's columns; none if a kill came before it was made."""
    found = set(connection.execute("SELECT type, name FROM sqlite_schema"))
    columns = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({_TABLE})")]
    if not found <= _OBJECTS or (
        columns and sorted(columns) not in (sorted(_COLUMNS), sorted([*_COLUMNS, "checksum"]))
    ):
        raise NotOurs("it has another schema than a request cache")
    return columns


def close(connection: sqlite3.Connection) -> None:
    """Closes a connection whose database may be damaged."""
    with suppress(sqlite3.Error):
        connection.close()


def set_aside(path: Path) -> Path:
    """Renames the database and its logs, and removes the oldest ones of those that were renamed before.

    Returns:
        The database's new path.
    """
    when = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.damaged-{when}")
    for suffix in ("", *CACHE_LOGS):
        source = path.with_name(path.name + suffix)
        if source.exists():
            files.disk.rename(source, aside.with_name(aside.name + suffix))
    kept: dict[str, list[Path]] = {}
    for found in sorted(path.parent.glob(f"{path.name}.damaged-*")):
        kept.setdefault(found.name.partition("Z")[0], []).append(found)
    for old in list(kept.values())[:-KEPT]:
        for found in old:
            files.disk.remove(found)
    files.disk.sync_dir(path.parent)
    return aside


def checksum(values: Row) -> int:
    """A checksum of a row's other columns, as SQLite's signed integer. The last two are result and error message."""
    chunk, ordinal, doc_id, rollout, payload, occurrence, result, error = values
    head = f"{chunk}\0{ordinal}\0{doc_id}\0{rollout}\0{payload}\0{occurrence}\0{'' if result is None else 'r'}\0"
    head += "" if error is None else f"e{error}"
    data = result if isinstance(result, bytes) else b""
    seed = xxhash.xxh3_64_intdigest(head.encode(errors="surrogatepass"))
    return int(xxhash.xxh3_64_intdigest(data, seed)) - 2**63


def is_intact(row: Row) -> bool:
    """Whether a row fits its checksum, which comes last. Rows of 0.1 have none; only their types are checked."""
    chunk_index, ordinal, doc_id, rollout_idx, payload, occurrence, result, error, found = row
    numbers = (chunk_index, ordinal, rollout_idx, occurrence)
    if not all(isinstance(number, int) for number in numbers) or not all(
        isinstance(text, str) for text in (doc_id, payload)
    ):
        return False
    if not isinstance(result, bytes | None) or not isinstance(error, str | None) or (result is None) == (error is None):
        return False
    return found is None or found == checksum(row[:-1])


def _logs(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in CACHE_LOGS]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
