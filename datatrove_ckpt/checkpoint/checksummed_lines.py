"""Writes and reads lines with a checksum: JSON objects whose first key is a checksum of the rest.

A crash tears the last write: the next attempt cuts off bad bytes at the end of a file. A bad line
before a good line is damage that no crash explains.

A kill leaves a prefix without a line break. Power loss may also replace any block of a line by NUL
bytes (``may_be_torn``).
"""

import errno
import os
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CheckpointCorrupt, StorageFailed
from datatrove_ckpt.process.open_files import refuse_exhaustion


@contextmanager
def explained(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the operating system and of SQLite into ``StorageFailed``, or
    ``TooManyOpenFiles``.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        refuse_exhaustion(error, f"Could not {action} {path}")
        cause = getattr(error, "strerror", None) or error
        raise StorageFailed(
            f"Could not {action} {path}: {cause}. {_advice(error, path)}"
        ) from error


def _advice(error: Exception, path: str | os.PathLike[str]) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error):
        return "Free some space and run again; what is saved is kept."
    # Of a removed file, SQLite reports a read-only database or an I/O error.
    is_gone = code is None and not Path(path).parent.exists()
    if is_gone or code in (errno.ENOENT, errno.ESTALE):
        return (
            "It was removed, moved or unmounted during the run. Put it back, and run again (a "
            "mirror comes back by itself); or start over in other folders."
        )
    if code == errno.EACCES:
        return (
            "Run this as the user who made the checkpoints, let that user run chmod -R g+rX "
            "there, or choose another folder."
        )
    if code in (errno.EPERM, errno.EROFS) or "readonly" in str(error):
        return "Give this user the permission, or choose another folder, and run again."
    return "Check the disk and run again; what is saved is kept."


Json = JsonObject

RESTORE = (
    "Restore it from a copy. With a mirror, move the task's folder away while no task runs, and "
    "run again. With neither, "
)
"""Advice for a damaged file, as the beginning of a sentence."""

PREFIX = b'{"xxh":"'
BODY_AT = len(PREFIX) + 16 + len(b'",')


def add_checksum(body: bytes) -> bytes:
    fields = body[1:]
    digest = xxhash.xxh3_64_hexdigest(fields).encode()
    return b"".join((PREFIX, digest, b'",', fields, b"\n"))  # faster than %


def verified_body(line: bytes) -> bytes | None:
    if not line.endswith(b"\n") or not line.startswith(PREFIX):
        return None
    fields = line[BODY_AT:-1]
    if line[len(PREFIX) : BODY_AT] != b'%s",' % xxhash.xxh3_64_hexdigest(fields).encode():
        return None
    return b"{" + fields


@dataclass(slots=True)
class ChecksummedLine:
    """A whole line: its offset and length in bytes (with the newline), and its JSON object."""

    offset: int
    length: int
    body: bytes


def read_lines(
    path: Path, advice: str = "Restore the file from a copy.", synced: bool = False
) -> Iterator[ChecksummedLine]:
    """Yields the file's whole lines, up to a torn tail. A missing file has none.

    Args:
        synced: whether each line was synced before the next, so that a crash tears at most one.

    Raises:
        CheckpointCorrupt: a bad line with a good line after it, or a file that starts with a line
            of another format.
    """
    torn_at = 0
    for number, raw, line in scan_lines(path):
        if line is not None and not torn_at:
            yield line
            continue
        if torn_at and (synced or line is not None):
            damage = f"line {torn_at}: the line is damaged, and lines follow it"
        elif (synced or number == 1) and not may_be_torn(raw):
            damage = f"line {number}: it is damaged, or of another program"
        else:
            torn_at = torn_at or number
            continue
        raise CheckpointCorrupt(path, f", {damage}, so no crash did this. {advice}")


def may_be_torn(raw: bytes) -> bool:
    return not raw.endswith(b"\n") or b"\0" in raw


def scan_lines(path: Path) -> Iterator[tuple[int, bytes, ChecksummedLine | None]]:
    with explained("read", path), suppress(FileNotFoundError), path.open("rb") as file:
        offset = 0
        for number, raw in enumerate(file, 1):
            body = verified_body(raw)
            yield number, raw, None if body is None else ChecksummedLine(offset, len(raw), body)
            offset += len(raw)


def last_lines(path: Path | str, max_bytes: int | None, first: int = 0) -> list[bytes]:
    """Returns the unparsed lines of a file, without a torn last line. A missing file has none.

    Args:
        max_bytes: number of bytes to read at the end; None: all.
        first: number of bytes to read at the beginning if ``max_bytes`` does not reach there.
    """
    data = b""
    with explained("read", path), suppress(FileNotFoundError), open(path, "rb") as file:  # noqa: PTH123 (speed)
        if max_bytes is not None and (size := os.fstat(file.fileno()).st_size) > first + max_bytes:
            data = b"".join(file.readlines(first)) if first else b""
            file.seek(size - max_bytes)
            file.readline()
        data += file.read()
    return whole_lines(data)


def content_of(path: Path) -> bytes | None:
    with explained("read", path), suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def size_of(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0


def whole_lines(data: bytes) -> list[bytes]:
    lines = data.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        return lines[:-1]
    return lines


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


# ``run.json``, ``job.json`` and ``shard.json`` are one line with a checksum, replaced as a whole.

SHARD_VERSION = 2
"""``version`` in ``shard.json``. 1 has no checksum."""
WITHOUT_SHARD = "Restore it from a copy, or write {} into it if the input is the same."


def checksummed_json(fields: Json, indent: bool = True) -> bytes:
    return add_checksum(orjson.dumps(fields, option=orjson.OPT_INDENT_2 if indent else None))


def read_checksummed_json(data: bytes, checksummed: Collection[int]) -> Json:
    """Returns the JSON object in a file's bytes.

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    body = verified_body(data)
    if body is None and data.startswith(PREFIX):
        raise ValueError("its checksum is wrong: it is damaged, or was edited")
    fields = orjson.loads(data if body is None else body)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    if body is None and fields.get("format", fields.get("version")) in checksummed:
        raise ValueError("its checksum is missing: it is damaged, or was edited")
    return fields


def read_shard(path: Path) -> Json:
    data = content_of(path)
    if data is None:
        return {}
    try:
        return read_checksummed_json(data, (SHARD_VERSION,))
    except ValueError as error:
        raise CheckpointCorrupt(
            path,
            f" cannot be read ({error}). {WITHOUT_SHARD}",
        ) from error
