"""The mirror of a rank's checkpoint, as its step names it. What it needs is imported where there is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process.preemption import Preemption

if TYPE_CHECKING:
    from datatrove_ckpt.mirror.mirror import RemoteMirror


def restore_from_mirror(step: Step, rank: int, preemption: Preemption) -> None:
    """Copies from the mirror the parts of the checkpoint that this node does not have."""
    if step.checkpoints_remote_dir is not None:
        from datatrove_ckpt.mirror.restore import restore_rank

        with preemption.interruptible():
            restore_rank(step.checkpoints_remote_dir, step.checkpoints_root, rank, retries=step.retry_dead_letters)


@contextmanager
def naming_mirror(step: Step) -> Iterator[None]:
    """Says of a damaged checkpoint how it comes back from the mirror, if there is one that has it."""
    try:
        yield
    except CheckpointCorrupt as error:
        named, found = re.search(rf"{re.escape(str(step.checkpoints_root))}/\d{{5,}}(?=/)", str(error)), None
        if step.checkpoints_remote_dir is not None and named is not None:
            from datatrove_ckpt.mirror.job import newest_manifest

            folder = Path(named[0])
            with suppress(OSError, CkptError):
                found = newest_manifest(url := f"{step.checkpoints_remote_dir}/{folder.name}")
        if found is None or not found.files:
            raise
        raise CheckpointCorrupt(
            f"{error} The mirror {url} has this task as of {found.when}: to go on from there, move its folder away "
            f"(mv {shlex.quote(str(folder))} {shlex.quote(f'{folder}.damaged')}), and run the same command again."
        ) from error


def open_mirror(
    step: Step, folder: Path, rank: int, identity: RunIdentity, preemption: Preemption
) -> RemoteMirror | None:
    """What copies a rank's folder from now on; None without a mirror.

    Raises:
        CheckpointMismatch: the mirror holds ranks of another run.
    """
    if (remote := step.checkpoints_remote_dir) is None:
        return None
    from datatrove_ckpt.mirror.job import join_mirrored_job
    from datatrove_ckpt.mirror.mirror import RemoteMirror

    shared: dict[str, bytes] = {}
    if not step.retry_dead_letters:  # of the ranks of other nodes, this one sees the mirror only
        with preemption.interruptible():
            shared = join_mirrored_job(remote, step.checkpoints_root, rank, identity, step.accept_changes)
    url = f"{remote}/{folder.relative_to(step.checkpoints_root)}"
    return RemoteMirror(url, folder, step.mirror_seconds, preemption.shutdown, shared)
