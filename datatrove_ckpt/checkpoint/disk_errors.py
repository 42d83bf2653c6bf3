"""What errors of the disk mean: ``StorageFailed``, with what to do."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.formatting import byte_size
from datatrove_ckpt.process.open_files import is_caused_by_limit, limit_reached


@contextmanager
def explained(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the operating system and of SQLite into ``StorageFailed``, or ``TooManyOpenFiles``."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if is_caused_by_limit(error):
            raise limit_reached(f"Could not {action} {path}") from error
        raise StorageFailed(f"Could not {action} {path}: {_cause(error)}. {_advice(action, error, path)}") from error


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def too_large() -> str:
    """What to do about a file that may not grow."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "Its file system takes no larger files: choose a folder on another one, or lower records_per_chunk."
    return (
        f"No file of this process may have more than {byte_size(limit)}: raise that limit (ulimit -f) and run the same "
        "command again; everything saved so far is kept."
    )


def _advice(action: str, error: Exception, path: str | os.PathLike[str]) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error):
        return "Free some space and run the same command again; everything saved so far is kept."
    is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if code == errno.EFBIG or (is_limited and "disk I/O error" in str(error)):  # as SQLite says it
        return too_large()
    if code == errno.ENOENT and action == "make the folder" and Path(path).parent.is_dir():
        return f"{Path(path).parent} takes no folders. Choose another folder and run the same command again."
    if _was_removed(error, path):
        return (
            "It was removed or moved during the run, or its file system was unmounted. What only it held is "
            "lost. Put it back (a copy, the mount; a mirror comes back by itself) and run the same command again. If "
            "it is gone for good, start over with another checkpoints_local_dir, output_folder and logging_dir."
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) or "readonly" in str(error):
        return "Make it writable for this user (or choose another folder) and run the same command again."
    if code in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return "A folder has a file's place, or a file a folder's: move it away and run the same command again."
    return "Check the disk and run the same command again; everything saved so far is kept."


def _was_removed(error: Exception, path: str | os.PathLike[str]) -> bool:
    """SQLite names other causes for it: a database that is only readable, or an I/O error."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ESTALE)
    return not Path(path).parent.exists()
