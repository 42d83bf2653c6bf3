"""Errors of the operating system outside checkpoints and output: what happened, where, and what to do.

They come from ``logging_dir`` above all: datatrove writes it, and an error of a full disk names no file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from datatrove_ckpt.checkpoint.identity import not_readable
from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.preflight.run_plan import RunPlan

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL_BYTES = 1 << 20  # less free space than this counts as none


def explain(error: OSError, plan: RunPlan) -> Exception:
    """The error as a message for the user, with the folders of the job; itself if there is nothing to add."""
    folders = dict(_local_folders(plan))
    if error.errno in _FULL:
        return StorageFailed(
            f"{error.strerror}: {error.filename or _which(folders)}. Free some space and run the same command again; "
            "everything saved so far is kept."
        )
    if error.errno not in _CLOSED or not isinstance(error.filename, str):
        return error
    path = Path(error.filename).absolute()
    setting = next((name for name, folder in folders.items() if path.is_relative_to(folder)), None)
    if setting == "checkpoints_local_dir" and error.errno != errno.EROFS:
        return StorageFailed(f"{not_readable(error.filename)}, or choose another checkpoints_local_dir.")
    where = f" (in {setting})" if setting else ""
    other = f", or choose another {setting}," if setting else ""
    return StorageFailed(
        f"{error.filename}{where}: {error.strerror}. Give this user the permission, or mount it writable{other} and "
        "run the same command again; everything saved so far is kept."
    )


def _local_folders(plan: RunPlan) -> Iterator[tuple[str, Path]]:
    if plan.logging_dir.is_local():
        yield "logging_dir", Path(plan.logging_dir.resolve_paths(""))
    yield from (("checkpoints_local_dir", root) for _, root in plan.kept)
    yield "TMPDIR", Path(tempfile.gettempdir())


def _which(folders: dict[str, Path]) -> str:
    """The folders that are full; all of them if that cannot be seen, as with quotas."""
    full = {name: folder for name, folder in folders.items() if _is_full(folder)}
    return " or ".join(f"{name} {folder}" for name, folder in (full or folders).items())


def _is_full(folder: Path) -> bool:
    found = os.statvfs(existing_part(folder))
    return found.f_bavail * found.f_frsize < _FULL_BYTES or (found.f_files > 0 and found.f_favail == 0)
