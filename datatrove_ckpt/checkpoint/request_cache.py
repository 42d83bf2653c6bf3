"""RequestCache: every answer of a document that is not committed, so that no answer is requested twice.

There is one SQLite connection, owned by the storage thread. ``locking_mode=EXCLUSIVE`` is set before WAL mode, so that
SQLite needs no shared memory; this also works on network file systems, where plain WAL does not. ``synchronous=NORMAL``
writes the log at every commit and rarely syncs it: a commit survives kill -9 at once, and power loss once ``sync`` was
called. Losing the last commits loses answers, never consistency.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import xxhash

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointLocked, StorageFailed


def payload_hash(payload: bytes) -> str:
    """Returns the xxh128 of a final payload: JSON with sorted keys, model and default parameters included."""
    return str(xxhash.xxh3_128_hexdigest(payload))


class AnswerKey(NamedTuple):
    """Identifies a request of a document. ``occurrence``: counts equal payloads within one rollout, from 0."""

    rollout_idx: int
    payload_hash: str
    occurrence: int


class Answer(NamedTuple):
    """JSON of a result, or the text of a permanent error. Exactly one is set."""

    result: bytes | None
    error_message: str | None


class CachedRequest(NamedTuple):
    """A row of the table."""

    chunk_index: int
    ordinal: int
    doc_id: str
    key: AnswerKey
    answer: Answer


_INSERT = (
    "INSERT OR REPLACE INTO request_cache (rowid, chunk_index, doc_id, rollout_idx, payload_hash, result, "
    "error_message, ordinal, occurrence) VALUES "
)
_ROW = "(?,?,?,?,?,?,?,?,?)"
_Row: TypeAlias = tuple[int | str | bytes | None, ...]
_ROWS_AT_ONCE = 64
# More than the database and its log have before the first answer.
_EMPTY_BYTES = 1 << 20


def has_answers(path: Path) -> bool:
    """Whether the file holds an answer. Reads a copy, because opening the file would lock out its owner.

    A file that is larger than an empty one, or that cannot be read, counts as one with answers.
    """
    found = [file for file in (path, path.with_name(f"{path.name}-wal")) if file.exists()]
    if not found or sum(file.stat().st_size for file in found) > _EMPTY_BYTES:
        return bool(found)
    with tempfile.TemporaryDirectory() as folder:
        for file in found:
            shutil.copy(file, folder)
        connection = sqlite3.connect(Path(folder) / path.name)
        try:
            return bool(connection.execute("SELECT EXISTS(SELECT 1 FROM request_cache)").fetchone()[0])
        except sqlite3.Error as error:
            return "no such table" not in str(error)  # the process died before it had made the table
        finally:
            connection.close()


class RequestCache:
    """``replay.sqlite3`` of one rank.

    Raises:
        CheckpointCorrupt: the file is not a database.
        CheckpointLocked: another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with files.explained("open", path):
                self._connection = self._open()
        except StorageFailed as error:
            if "database is locked" in str(error.__cause__):
                raise CheckpointLocked(
                    f"Another process works on this rank: it has {path} open. Wait for it to end, or stop it, and run "
                    "the same command again."
                ) from error
            if isinstance(error.__cause__, sqlite3.DatabaseError) and "not a database" in str(error.__cause__):
                raise CheckpointCorrupt(
                    f"{path} is not a SQLite database. Remove it (and its -wal file) and run the same command again: "
                    "only the answers of unfinished documents are requested again."
                ) from error
            raise
        self.unsynced = False
        self._name_synced = False
        with files.explained("read", path):
            self.last_answer: int = self._connection.execute(
                "SELECT ifnull(max(rowid), 0) FROM request_cache"
            ).fetchone()[0]
        """Number of the last answer that was put. Numbers only grow while the database is open."""

    def _open(self) -> sqlite3.Connection:
        # No autocommit: a transaction begins with the first write and ends in ``files.disk.commit``.
        # SQLite would make it with the mode 0644, and gives its -wal and -journal files the mode of the database.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE))
        connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level="DEFERRED", timeout=0)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.executescript(resources.files(__package__).joinpath("schema.sql").read_text())
        except BaseException:
            connection.close()
            raise
        return connection

    def put(self, group: Iterable[CachedRequest]) -> None:
        """Writes the group in one transaction."""
        # We number the rows, because SQLite would reuse the numbers of deleted rows.
        rows: list[_Row] = [
            (n, r.chunk_index, r.doc_id, r.key.rollout_idx, r.key.payload_hash, *r.answer, r.ordinal, r.key.occurrence)
            for n, r in enumerate(group, self.last_answer + 1)
        ]
        self.last_answer += len(rows)
        with files.explained("write to", self.path):
            self._insert(rows)
        files.disk.commit(self._connection, self.path)
        self.unsynced = True

    def _insert(self, rows: list[_Row]) -> None:
        # The sqlite3 module releases the GIL at each execution of a statement and must wait to get it back, and
        # ``executemany`` executes once per row. Groups are powers of two, so there are few statements to prepare.
        start = 0
        while missing := len(rows) - start:
            size = min(_ROWS_AT_ONCE, 1 << (missing.bit_length() - 1))
            values = list(chain.from_iterable(rows[start : start + size]))
            self._connection.execute(_INSERT + ",".join([_ROW] * size), values)
            start += size

    def ordinals(self) -> set[int]:
        """Returns the ordinals of the documents that have answers."""
        with files.explained("read", self.path):
            return {row[0] for row in self._connection.execute("SELECT DISTINCT ordinal FROM request_cache")}

    def chunks(self) -> set[int]:
        """Returns the indices of the chunks that have answers."""
        with files.explained("read", self.path):
            return {row[0] for row in self._connection.execute("SELECT DISTINCT chunk_index FROM request_cache")}

    def answers(self, ordinal: int) -> dict[AnswerKey, Answer]:
        """Returns every answer of one document."""
        query = (
            "SELECT rollout_idx, payload_hash, occurrence, result, error_message FROM request_cache WHERE ordinal = ?"
        )
        with files.explained("read", self.path):
            return {AnswerKey(*row[:3]): Answer(*row[3:]) for row in self._connection.execute(query, (ordinal,))}

    def answers_since(self, number: int, ordinals: Iterable[int]) -> list[CachedRequest]:
        """Returns the answers of these documents that were put after answer ``number``."""
        query = (
            "SELECT chunk_index, doc_id, rollout_idx, payload_hash, occurrence, result, error_message "
            "FROM request_cache WHERE ordinal = ? AND rowid > ?"
        )
        found = []
        with files.explained("read", self.path):
            for ordinal in ordinals:
                for row in self._connection.execute(query, (ordinal, number)):
                    found.append(CachedRequest(row[0], ordinal, row[1], AnswerKey(*row[2:5]), Answer(*row[5:])))
        return found

    def drop_chunk(self, chunk_index: int) -> None:
        """Deletes the answers of a committed chunk."""
        with files.explained("write to", self.path):
            self._connection.execute("DELETE FROM request_cache WHERE chunk_index = ?", (chunk_index,))
        files.disk.commit(self._connection, self.path)
        self.unsynced = True

    def forget_errors(self) -> None:
        """Deletes permanent errors, so that those requests are sent again: the server may be fixed by now."""
        with files.explained("write to", self.path):
            self._connection.execute("DELETE FROM request_cache WHERE error_message IS NOT NULL")
        files.disk.commit(self._connection, self.path)

    def sync(self) -> None:
        """Makes what was put survive power loss. Does nothing if nothing was put since the last sync."""
        wal = self.path.with_name(self.path.name + "-wal")
        if self.unsynced and wal.exists():
            files.disk.sync(wal)
            if not self._name_synced:  # SQLite syncs the log's name only at its next checkpoint
                files.disk.sync_dir(self.path.parent)
                self._name_synced = True
        self.unsynced = False

    def close(self) -> None:
        self._connection.close()

    def abandon(self) -> None:
        """Leaves the database open until this process ends, because another process owns it by now.

        Closing the connection would write the log into the database while that process uses it. The garbage collector
        would close it, too, so we leak one reference (Python 3.11 has no setting for this).
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def remove(self) -> None:
        """Closes the database and removes its files."""
        self.close()
        for suffix in ("", "-wal", "-journal"):
            files.disk.remove(self.path.with_name(self.path.name + suffix))
