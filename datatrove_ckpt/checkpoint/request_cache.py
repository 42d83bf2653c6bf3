"""RequestCache holds every answer of an uncommitted document, so that no request is sent twice.

The storage thread owns the only SQLite connection. ``locking_mode=EXCLUSIVE`` before WAL mode needs
no shared memory, so it works on network file systems. ``synchronous=NORMAL`` writes the log at
every commit and rarely syncs it: a commit survives kill -9, and power loss after ``sync``.
Losing the last commits loses answers, never consistency.

An empty cache replaces a damaged cache, which is set aside with a warning. A row that does not
match its checksum is ignored, with a warning, until its chunk is committed or an equal request
replaces it.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, explained, scan_lines, size_of
from datatrove_ckpt.checkpoint.layout import CACHE_LOGS
from datatrove_ckpt.checkpoint.lock import check_sqlite_locks
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointLocked, StorageFailed


def payload_hash(payload: bytes) -> str:
    """Returns the xxh128 of a final payload, which is JSON with sorted keys."""
    return xxhash.xxh3_128_hexdigest(payload)


_PIECE = ":"
"""Separates a hash from the number of a piece; no hash has it."""
_IS_PIECE = f"instr(payload_hash, '{_PIECE}') > 0"


class AnswerKey(NamedTuple):
    """Identifies a request of a document, or a piece of its half-written answer.

    ``occurrence`` counts equal payloads within one rollout, from 0. A piece has the key of its
    answer, with the number of its first token behind the hash.
    """

    rollout_idx: int
    payload_hash: str
    occurrence: int

    def piece(self, number: int) -> AnswerKey:
        return self._replace(payload_hash=f"{self.payload_hash}{_PIECE}{number}")

    @property
    def is_piece(self) -> bool:
        return _PIECE in self.payload_hash


class CachedAnswer(NamedTuple):
    """Exactly one of a result's JSON and a permanent error's text is set."""

    result: bytes | None
    error_message: str | None


class CachedRequest(NamedTuple):
    """A row. ``ends_pieces``: whether it replaces the pieces of its answer."""

    chunk_index: int
    ordinal: int
    doc_id: str
    key: AnswerKey
    answer: CachedAnswer
    ends_pieces: bool = False

    def to_json(self) -> JsonObject:
        result = self.answer.result
        return {
            "ordinal": self.ordinal,
            "doc_id": self.doc_id,
            "key": [*self.key],
            "result": None if result is None else result.decode(),
        }

    @classmethod
    def from_json(cls, body: bytes) -> CachedRequest:
        row = orjson.loads(body)
        result = row["result"]
        answer = CachedAnswer(None if result is None else result.encode(), row.get("error_message"))
        chunk_index = row.get("chunk_index", 0)
        request = cls(chunk_index, row["ordinal"], row["doc_id"], AnswerKey(*row["key"]), answer)
        if not _is_intact((*_values(request), None)):
            raise ValueError("values of other types")
        return request


CacheRow = tuple[Any, ...]
"""Values of a row. ``Any``, because a damaged one may hold any type in any column."""

_COLUMNS = (
    "chunk_index, ordinal, doc_id, rollout_idx, payload_hash, occurrence, result, "
    "error_message, checksum"
)
_TYPES = (int, int, str, int, str, int, bytes | None, str | None, object)
_INSERT = f"INSERT OR REPLACE INTO request_cache (rowid, {_COLUMNS}) VALUES "
_ROW = "(?,?,?,?,?,?,?,?,nullif(?,''),?)"
_DELETE_PIECES = (
    "DELETE FROM request_cache WHERE ordinal = ? AND rollout_idx = ? AND payload_hash >= ? "
    "AND payload_hash < ? AND occurrence = ?"
)
_DOCUMENTS_AT_ONCE = 256
T = TypeVar("T")


def has_answers(path: Path) -> bool:
    """Whether the file holds an answer. Reads a copy, which does not lock out the owner.

    Large or unreadable files count as files with answers.
    """
    existing = [file for file in (path, *_logs(path)) if file.exists()]
    # More bytes than the database and its log have without answers.
    if not existing or sum(map(size_of, existing)) > 1 << 20:
        return bool(existing)
    with tempfile.TemporaryDirectory() as folder:
        for file in existing:
            shutil.copy(file, folder)
        with closing(sqlite3.connect(Path(folder) / path.name)) as connection:
            try:
                return bool(
                    connection.execute("SELECT EXISTS(SELECT 1 FROM request_cache)").fetchone()[0]
                )
            except sqlite3.Error as error:
                # The process died before it made the table.
                return "no such table" not in str(error)


class RequestCache:
    """``replay.sqlite3`` of one rank.

    Args:
        archive: the file that receives the answers of committed chunks; None: they are deleted.

    Raises:
        CheckpointLocked: another process has the file open.
        StorageFailed: the disk refuses the file. A damaged database is set aside without an error.
    """

    def __init__(self, path: Path, archive: Path | None = None) -> None:
        self.path = path
        self.archive = archive
        self.last_answer = 0
        """Number of the last answer that was put. Numbers only grow while the database is open."""
        try:
            self._connection = self._open()
        except StorageFailed as error:
            if "database is locked" in str(error.__cause__):
                check_sqlite_locks(path)
                raise CheckpointLocked(
                    f"Another process works on this task: it has {path} open. Wait for it, or "
                    "stop it, and run again."
                ) from error
            self._set_aside(error)
        numbers = self._read("SELECT ifnull(max(rowid), 0) FROM request_cache")
        self.last_answer = max(self.last_answer, numbers[0][0] if numbers else 0)

    def _open(self) -> sqlite3.Connection:
        with explained("open", self.path):
            connection = _connect(self.path)
            self._inode = self.path.stat().st_ino
            self.log = files.AppendFile(_logs(self.path)[0])
            """SQLite appends to it, and syncs its name only at its next checkpoint."""
            return connection

    # damage --------------------------------------------------------------------------------------

    def _set_aside(
        self, error: StorageFailed, connection: sqlite3.Connection | None = None
    ) -> None:
        has_no_name = not self.path.parent.exists()  # see ``old_answers``
        code = getattr(error.__cause__, "sqlite_errorcode", 0)
        # The lowest byte is the kind of the error.
        is_damage = isinstance(error.__cause__, NotARequestCache) or code & 0xFF in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        )
        if has_no_name or not is_damage:
            raise error
        if connection is not None:
            if self.path.stat().st_ino != self._inode:
                raise error  # another process has replaced the file: the fence names it
            _close(connection)
        when = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.damaged-{when}")
        for suffix in ("", *CACHE_LOGS):
            source = self.path.with_name(self.path.name + suffix)
            if source.exists():
                files.disk.rename(source, aside.with_name(aside.name + suffix))
        files.disk.sync_dir(self.path.parent)
        logger.warning(
            f"The request cache {self.path} is damaged ({error.__cause__}). It is kept as "
            f"{aside}. Its answers are requested again."
        )
        self._connection = self._open()

    def _attempt(self, action: Callable[[], T], again: Callable[[], T]) -> T:
        try:
            return action()
        except StorageFailed as error:
            self._set_aside(error, self._connection)
            return again()

    def _read(self, query: str, values: CacheRow = ()) -> list[CacheRow]:
        def action() -> list[CacheRow]:
            with explained("read", self.path):
                return self._connection.execute(query, values).fetchall()

        return self._attempt(action, list)

    def _write(self, change: Callable[[], object], anew: bool = False) -> None:
        """``anew``: a database that replaces a damaged one is also changed."""

        def action() -> None:
            with explained("write to", self.path):
                change()
            files.disk.commit(self._connection, self.path)

        self._attempt(action, action if anew else lambda: None)
        self.log.is_unsynced = True

    def _delete(self, which: str, values: CacheRow = ()) -> None:
        self._write(
            lambda: self._connection.execute(f"DELETE FROM request_cache WHERE {which}", values)
        )

    # answers -------------------------------------------------------------------------------------

    def put(self, group: Iterable[CachedRequest]) -> None:
        # We number the rows: SQLite would reuse the numbers of deleted rows.
        rows: list[CacheRow] = []
        ended: list[CacheRow] = []
        for n, r in enumerate(group, self.last_answer + 1):
            values = _values(r)
            *columns, result, error = values
            # The sqlite3 module searches an adapter for each value of bytes, and each None.
            rows.append((n, *columns, result and bytearray(result), error or "", _checksum(values)))
            if r.ends_pieces:
                first = r.key.payload_hash + _PIECE
                after = r.key.payload_hash + chr(ord(_PIECE) + 1)
                ended.append((r.ordinal, r.key.rollout_idx, first, after, r.key.occurrence))
        self.last_answer += len(rows)
        self._write(lambda: self._insert(rows, ended), anew=True)

    def _insert(self, rows: list[CacheRow], ended: list[CacheRow]) -> None:
        # The sqlite3 module releases the GIL at each statement, and ``executemany`` executes one
        # per row. Groups are powers of two, so there are few statements to prepare.
        start = 0
        while missing := len(rows) - start:
            size = min(64, 1 << (missing.bit_length() - 1))
            values = list(chain.from_iterable(rows[start : start + size]))
            self._connection.execute(_INSERT + ",".join([_ROW] * size), values)
            start += size
        if ended:
            self._connection.executemany(_DELETE_PIECES, ended)

    def count(self) -> int:
        query = f"SELECT count(*) FROM request_cache WHERE NOT {_IS_PIECE}"
        return sum(number for (number,) in self._read(query))

    def answer_counts(self) -> Iterator[tuple[int, int]]:
        """Yields the ordinal of each document, the highest first, and the number of its answers,
        which is 0 if it has only pieces of answers.

        A damaged row may add an ordinal, but none above the highest intact row, which shows whether
        the input has shrunk.
        """
        query = (
            f"SELECT ordinal, count(*) - sum({_IS_PIECE}) FROM request_cache WHERE ordinal < ? "
            f"GROUP BY ordinal ORDER BY ordinal DESC LIMIT {_DOCUMENTS_AT_ONCE}"
        )
        below = 2**63 - 1
        is_intact = False
        before = None
        while before != below:
            before = below
            for ordinal, number in self._read(query, (below,)):
                # A damaged index may hold anything, in any order.
                if isinstance(ordinal, int) and ordinal < below:
                    below = ordinal
                    is_intact = is_intact or bool(self.answers(ordinal))
                    if is_intact:
                        yield ordinal, number

    def chunks(self) -> set[int]:
        rows = self._read("SELECT DISTINCT chunk_index FROM request_cache")
        return {index for (index,) in rows if isinstance(index, int)}

    def answers(self, ordinal: int) -> dict[AnswerKey, CachedAnswer]:
        """Returns intact answers, and pieces of answers; warns of damaged rows."""
        rows = self._read(f"SELECT {_COLUMNS} FROM request_cache WHERE ordinal = ?", (ordinal,))
        requests = [_request(row) for row in rows if _is_intact(row)]
        if damaged := len(rows) - len(requests):
            logger.warning(
                f"Saved answers of document {ordinal} in {self.path} are damaged ({damaged}). They "
                "are requested again."
            )
        return {request.key: request.answer for request in requests}

    def answers_since(self, number: int, ordinals: Iterable[int]) -> list[CachedRequest]:
        query = f"SELECT {_COLUMNS} FROM request_cache WHERE ordinal = ? AND rowid > ?"
        rows = [row for ordinal in ordinals for row in self._read(query, (ordinal, number))]
        return [_request(row) for row in rows if _is_intact(row)]

    def drop_chunk(self, chunk_index: int) -> None:
        if self.archive is not None:
            ordinal_rows = self._read(
                "SELECT DISTINCT ordinal FROM request_cache WHERE chunk_index = ?", (chunk_index,)
            )
            ordinals = sorted(ordinal for (ordinal,) in ordinal_rows if isinstance(ordinal, int))
            for start in range(0, len(ordinals), _DOCUMENTS_AT_ONCE):
                rows = self.answers_since(0, ordinals[start : start + _DOCUMENTS_AT_ONCE])
                answers = [
                    row.to_json()
                    for row in rows
                    if row.answer.result is not None and not row.key.is_piece
                ]
                files.disk.append(
                    self.archive, b"".join(add_checksum(orjson.dumps(answer)) for answer in answers)
                )
        self._delete("chunk_index = ?", (chunk_index,))

    def forget_errors(self) -> None:
        self._delete("error_message IS NOT NULL")

    def forget_pieces(self) -> None:
        self._delete(_IS_PIECE)

    def sync(self) -> None:
        if self.log.path.exists():
            self.log.sync()

    def close(self) -> None:
        self._connection.close()

    def abandon(self) -> None:
        """Leaves the database open until this process ends, because another process owns it now.

        Closing the connection would write the log into the database, and delete it, while that
        process uses both. One reference is leaked, because the garbage collector or Python's exit
        would close it. Python 3.11 has no public way (``Connection.setconfig`` is new in 3.12).
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def remove(self) -> None:
        self.close()
        for path in (self.path, *_logs(self.path)):
            files.disk.remove(path)


def _values(r: CachedRequest) -> CacheRow:
    return r.chunk_index, r.ordinal, r.doc_id, *r.key, *r.answer


def _request(row: CacheRow) -> CachedRequest:
    chunk_index, ordinal, doc_id = row[:3]
    return CachedRequest(
        chunk_index, ordinal, doc_id, AnswerKey(*row[3:6]), CachedAnswer(*row[6:8])
    )


# damage ------------------------------------------------------------------------------------------

# Damage is an SQLite error "corrupt" or "not a database", a log whose database is missing, and a
# database with another schema. An error of the disk (I/O error, no space, no permission) is not
# damage: the data may be intact. The file may come with a copied folder, so it is not trusted:
# SQLite runs nothing that a schema names (``trusted_schema=OFF``), loads no extension, and refuses
# triggers and views.

_TABLE = "request_cache"
_OBJECTS = {
    ("table", _TABLE),
    ("index", f"sqlite_autoindex_{_TABLE}_1"),
    ("index", "request_cache_chunk"),
}


class NotARequestCache(sqlite3.DatabaseError):
    """The file may be another database."""


def _connect(path: Path) -> sqlite3.Connection:
    # A kill while the first cache is made may leave an empty file and its journal, but never a log
    # without its database.
    if not size_of(path) and any(_needs_database(log) for log in _logs(path)):
        raise NotARequestCache("the database is missing or empty, but its log is not")
    # SQLite would use mode 0644; its -wal and -journal files get the database's mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE))
    # No autocommit: a transaction begins with the first write and ends in ``files.disk.commit``.
    connection = sqlite3.connect(
        path, check_same_thread=False, isolation_level="DEFERRED", timeout=0
    )
    # A damaged row may hold any bytes: its checksum shows that, and an exception would end the run.
    connection.text_factory = lambda data: data.decode(errors="replace")
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        objects = set(connection.execute("SELECT type, name FROM sqlite_schema"))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({_TABLE})")]
        # A kill may have come before the table was made.
        if not objects <= _OBJECTS or (columns and sorted(columns) != sorted(_COLUMNS.split(", "))):
            raise NotARequestCache("it has another schema than a request cache")
        connection.executescript(resources.files(__package__).joinpath("schema.sql").read_text())
    except BaseException as error:
        _close(connection)
        if isinstance(error, UnicodeDecodeError):  # SQLite's error quotes the damaged schema
            raise NotARequestCache("its schema is damaged") from error
        raise
    return connection


def _checksum(values: CacheRow) -> int:
    chunk, ordinal, doc_id, rollout, payload, occurrence, result, error = values
    kind = "" if result is None else "r"
    head = f"{chunk}\0{ordinal}\0{doc_id}\0{rollout}\0{payload}\0{occurrence}\0{kind}\0"
    head += "" if error is None else f"e{error}"
    data = result if isinstance(result, bytes) else b""
    seed = xxhash.xxh3_64_intdigest(head.encode(errors="surrogatepass"))
    return int(xxhash.xxh3_64_intdigest(data, seed)) - 2**63


def _is_intact(row: CacheRow) -> bool:
    """Whether a row matches its last column, the checksum.

    Rows of 0.1 have no checksum; only their types are checked.
    """
    result, error, checksum = row[6:]
    if not all(map(isinstance, row, _TYPES)) or (result is None) == (error is None):
        return False
    return checksum is None or checksum == _checksum(row[:-1])


def _logs(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in CACHE_LOGS]


def _needs_database(log: Path) -> bool:
    if not log.name.endswith("-journal"):
        return size_of(log) > 0
    if not log.exists():
        return False
    with log.open("rb") as file:
        header = file.read(20)
    pages = header[16:]  # of the database before the transaction
    return any(pages)


def _close(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        connection.close()


# ``answers.jsonl``: the answers of committed documents, if the user keeps them for a run with
# another prompt. After a crash they may be appended twice, which is harmless: the rows have keys.
# Nothing is synced: a power loss costs answers that may never be needed, and damaged lines are
# skipped.


def read_answers(path: Path) -> Iterator[CachedRequest]:
    for _, _, line in scan_lines(path):
        if line is not None:
            yield CachedRequest.from_json(line.body)
