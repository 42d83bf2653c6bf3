"""Errors of the system outside checkpoints and output: what happened, where, and what to do.

Most come from ``logging_dir``, which datatrove writes: an error of a full disk names no file.
"""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path

from datatrove_ckpt.checkpoint.identity import not_readable
from datatrove_ckpt.checkpoint.lines import too_large
from datatrove_ckpt.common.retrying import hub_refusal
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.errors.names import setting_name
from datatrove_ckpt.run_folder.run_plan import RunPlan

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def explain(error: OSError, plan: RunPlan) -> Exception:
    """Returns the error as a message with the job's folders; unchanged if these add nothing."""
    logs = plan.logging_dir
    refused = hub_refusal(error)
    if refused:
        there = re.match("hf://[a-z]+s/([^/]+/[^/]+)", logs.resolve_paths(""))
        if there and there[1] in refused:
            return StorageFailed(f"{refused}.", setting="logging_dir")
        return StorageFailed(f"{refused}.")
    folders = {}
    if logs.is_local():
        folders = {"logging_dir": Path(logs.resolve_paths(""))}
    folders.update(("checkpoints_local_dir", root) for _, root in plan.kept)
    if error.errno in _FULL:
        places = [*folders.items(), ("TMPDIR", tempfile.gettempdir())]
        where = error.filename or " or ".join(f"{name} {folder}" for name, folder in places)
        advice = "Free some space and run the same command again; everything saved so far is kept."
        if error.errno == errno.EFBIG:
            advice = too_large()
        return StorageFailed(f"{error.strerror}: {where}. {advice}")
    if error.errno not in _CLOSED or not isinstance(error.filename, str):
        return error
    path = Path(error.filename).absolute()  # a folder above that of a setting was to be made for it
    near = (
        name
        for name, folder in folders.items()
        if path.is_relative_to(folder) or folder.is_relative_to(path)
    )
    setting = next(near, "")
    shown = setting_name(setting)
    if setting == "checkpoints_local_dir" and error.errno != errno.EROFS:
        return StorageFailed(f"{not_readable(error.filename)}, or choose another {shown}.")
    where = ""
    other = ", or mount it writable,"
    if setting:
        where = f" ({shown})"
        other = f", or mount it writable, or choose another {shown},"
    if any(map(path.is_relative_to, plan.inputs)):
        other = " to read it,"
    return StorageFailed(
        f"{error.filename}{where}: {error.strerror}. Give this user the permission{other} and run "
        "the same command again; everything saved so far is kept."
    )
