"""Removes output files; from a repository on the hub many in one commit, because commits are few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_commits import remove_files
from datatrove_ckpt.retrying import failure_line, file_system_call


def remove_output(folder: DataFolder, names: Sequence[str]) -> None:
    """Removes those of the files that exist.

    Raises:
        OutputFailed, StorageFailed: they could not be removed.
    """
    hub = HubFolder.of(folder)
    if hub is not None:
        remove_files(hub, names)
        return
    for name in names:
        remove_file(folder, name)
    if folder.is_local():
        sync_parents(Path(folder.resolve_paths("")), names)


def remove_file(folder: DataFolder, name: str) -> None:
    """Removes a file that is not on the hub, if it exists.

    Raises:
        OutputFailed, StorageFailed: it could not be removed.
    """
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
    """Returns when the names below a folder, and that they are gone, survive a power loss."""
    for folder in {(root / name).parent for name in names}:
        if folder.is_dir():
            files.disk.sync_dir(folder)
