"""Removes files from a repository on the hub: many in one commit, because commits are few."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from datatrove_ckpt.formatting import plural
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_uploads import HubUploads
from datatrove_ckpt.output.stoppable import StoppableCalls

_MOST_FILES = 1000  # without content, a commit takes more than it does of new files


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
