"""The hub may list a folder as it was before its newest commits. So what seems lost there is looked at again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.layout import COMMITS
from datatrove_ckpt.output.hub import HubFile, HubFolder
from datatrove_ckpt.output.hub_uploads import HubUploads
from datatrove_ckpt.output.names import plain
from datatrove_ckpt.output.stoppable import StoppableCalls

LAG_LOOKS = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further look at files that the hub does not show yet."""

_SHOWN_BY_NOW_SECONDS = 600.0


def looks_for(folders: Iterable[Path]) -> tuple[float, ...]:
    """How often to look again, from the age of the newest commit in these ranks' folders: old ones are shown by now."""
    newest = 0.0
    for folder in folders:
        with suppress(FileNotFoundError):
            newest = max(newest, (folder / COMMITS).stat().st_mtime)
    return LAG_LOOKS if time.time() - newest < _SHOWN_BY_NOW_SECONDS else LAG_LOOKS[:1]


def look_again(hub: HubFolder, lost: Iterable[OutputFile], looks: Iterable[float]) -> dict[str, HubFile]:
    """Returns those files that the hub shows now, among the ones that it seemed to lack or to have changed.

    They are looked up in the newest commit itself, which a branch's name may lag behind.

    Raises:
        OutputFailed: the hub cannot be asked.
    """
    calls = StoppableCalls()
    uploads, shown = HubUploads(hub, calls), dict[str, HubFile]()
    left = {plain(file.path): file for file in lost}
    for seconds in looks:
        if not left:
            break
        calls.sleep(seconds)
        shown |= uploads.look_up(list(left))
        left = {
            name: file
            for name, file in left.items()
            if name not in shown or not shown[name].holds(file.size, file.hub_hash)
        }
    return shown
