"""Removes output files; from a repository on the hub many in one commit, because commits are few."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_uploads import HubUploads
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.remote_errors import failure_text, file_system_call

_MOST_FILES = 1000  # without content, a commit takes more than it does of new files


def remove_output(folder: DataFolder, names: Sequence[str]) -> None:
    """Removes those of the files that exist.

    Raises:
        OutputFailed, StorageFailed: they could not be removed.
    """
    if (hub := HubFolder.of(folder)) is not None:
        remove_files(hub, names)
        return
    for name in names:
        remove_file(folder, name)


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
            f"{where} could not be removed: {failure_text(error)}. Run the same command again."
        ) from error


def remove_files(hub: HubFolder, names: Sequence[str]) -> None:
    """Removes those of the files that exist. Waits for a hub that refuses for now.

    Raises:
        OutputFailed: they could not be removed.
    """
    uploads = HubUploads(hub, StoppableCalls())
    for start in range(0, len(names), _MOST_FILES):
        part = names[start : start + _MOST_FILES]
        # Again before each attempt: the hub refuses to remove what is not there, and an answer may have got lost.
        uploads.looked(f"{plural(len(part), 'file')} could not be removed", partial(_remove, hub, part))


def _remove(hub: HubFolder, names: Sequence[str]) -> None:
    from huggingface_hub import CommitOperationDelete

    there = [hub.full_name(name) for name in hub.look_up(names)]
    if not there:
        return
    if hub.is_bucket:
        hub.api().batch_bucket_files(hub.repo, delete=there)
        return
    hub.api().create_commit(
        hub.repo,
        [CommitOperationDelete(path) for path in there],
        commit_message=f"Remove {plural(len(there), 'file')}: datatrove-ckpt repair",
        repo_type=hub.kind,
        revision=hub.branch,
    )
