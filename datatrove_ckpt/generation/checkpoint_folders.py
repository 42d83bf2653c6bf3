"""The folders of checkpoints in a runner's settings: refused before anything runs, if they cannot work."""

from __future__ import annotations

from collections.abc import Mapping

from datatrove.pipeline.writers.disk_base import DiskWriter
from fsspec.utils import get_protocol

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.mirror.object_store import check_url
from datatrove_ckpt.output.folders import check_output_folder


def check_checkpoint_folders(
    local: str | None, remote: str | None, writer: DiskWriter, needed_by: Mapping[str, bool]
) -> None:
    """Checks ``checkpoints_local_dir`` and ``checkpoints_remote_dir``.

    Args:
        needed_by: settings that need checkpoints, as beginnings of sentences that end in "kept with checkpoints", and
            whether they are set.

    Raises:
        ConfigError: names the setting.
    """
    if local is None:
        for what, is_set in needed_by.items():
            if is_set:
                raise ConfigError(f"{what} kept with checkpoints; set checkpoints_local_dir.")
        if remote is not None:
            raise ConfigError("checkpoints_remote_dir: mirrors checkpoints_local_dir; set that, too.")
        return
    if get_protocol(local) not in ("file", "local"):
        raise ConfigError(f"checkpoints_local_dir: {local!r} must be a local directory.")
    check_output_folder(writer, local)
    if remote is not None:
        check_url("checkpoints_remote_dir", remote)
