"""Removes output files; from a repository on the hub many in one commit, because commits are
few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.retrying import failure_line, file_system_call
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_uploads import HubReads
from datatrove_ckpt.output.stoppable import StoppableCalls

_MOST_REMOVED = 1000  # files in a commit


def remove_output(folder: DataFolder, names: Sequence[str]) -> None:
    """Removes those of the files that exist. Raises OutputFailed and StorageFailed."""
    hub = HubFolder.of(folder)
    if hub is not None:
        reads = HubReads(hub, StoppableCalls())
        for start in range(0, len(names), _MOST_REMOVED):
            part = names[start : start + _MOST_REMOVED]
            # Looked up at each attempt: the hub refuses to remove missing files.
            reads.looked(
                f"{plural(len(part), 'file')} could not be removed", partial(_remove, hub, part)
            )
        return
    for name in names:
        remove_file(folder, name)
    if folder.is_local():
        sync_parents(Path(folder.resolve_paths("")), names)


def remove_file(folder: DataFolder, name: str) -> None:
    if folder.is_local():
        files.disk.remove(Path(folder.resolve_paths(name)))
        return
    try:
        with file_system_call():
            folder.rm_file(name)
    except FileNotFoundError:
        return
    except OSError as error:
        where = folder.resolve_paths(name)
        raise OutputFailed(
            f"{where} could not be removed: {failure_line(error)}. Run the same command again."
        ) from error


def sync_parents(root: Path, names: Iterable[str]) -> None:
    """Syncs the folders of created or removed names below a root."""
    for folder in {(root / name).parent for name in names}:
        if folder.is_dir():
            files.disk.sync_dir(folder)


def _remove(hub: HubFolder, names: Sequence[str]) -> None:
    there = [hub.full_name(name) for name in hub.look_up(names)]
    if there:
        hub.remove(there, f"Remove {plural(len(there), 'file')}: datatrove-ckpt repair")
