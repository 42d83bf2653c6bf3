"""RankLease: this process owns a rank. Whatever publishes a rank's output is made with the lease of the rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import Commit, read_commits
from datatrove_ckpt.checkpoint.files import Lock
from datatrove_ckpt.checkpoint.layout import COMMITS
from datatrove_ckpt.checkpoint.rank_files import Mirror, RankFiles


@dataclass(eq=False)
class RankLease:
    """A rank that this process has taken. Made by ``CheckpointManager.take``; ``OpenCheckpoint.close`` gives it back.

    Methods may be called in any thread.

    Args:
        files: the rank's open files. They belong to the storage thread, see ``RankFiles``.
        mirror: keeps a copy elsewhere.
    """

    lock: Lock
    files: RankFiles
    mirror: Mirror | None
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set once the rank ends: nothing more is published."""

    def check(self) -> None:
        """Raises what forbids to publish now, above all that another process has taken the rank over."""
        self.files.fence.check(thorough=True)
        if self.mirror is not None:
            self.mirror.check(not self.files.log.commits, self.stopping)

    def read_commits(self, path: Path) -> dict[int, Commit]:
        """``read_commits``, but the rank's own from memory: others write to its file only where locks do not work."""
        is_known = self.lock.works and path == self.files.folder / COMMITS
        if is_known:
            return dict(self.files.log.commits)
        return read_commits(path)
