"""RankLease: this process owns a rank. Publishing a rank's output needs its lease."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.checkpoint.files import Lock
from datatrove_ckpt.checkpoint.layout import journal_indices
from datatrove_ckpt.checkpoint.ledger import RankLedger, Want, read_rank
from datatrove_ckpt.checkpoint.rank_files import Mirror, RankFiles


@dataclass(eq=False)
class RankLease:
    """A rank that this process has taken. Made by ``LockedRank.take``;
    ``OpenCheckpoint.close`` gives it back.

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
        """Raises an error if nothing may be published now, usually ``Fenced``."""
        self.files.fence.check(thorough=True)
        if self.mirror is not None:
            self.mirror.check(not self.files.log.commits, self.stopping)

    def check_spending(self) -> None:
        """Raises an error if no batch may be paid for now. Brings the mirror up to date."""
        self.check()
        if self.mirror is not None:
            self.mirror.save(self.stopping)

    def read_rank(self, folder: Path, want: Want) -> RankLedger:
        """Reads a rank from its files; this rank from memory if locks exclude other writers."""
        if folder != self.files.folder or not self.lock.works:
            return read_rank(folder, want)
        journals = journal_indices(folder)
        commits = dict(self.files.log.commits)
        open_chunks = [index for index in journals if index not in commits]
        run = {"owner": self.files.fence.owner}
        return RankLedger(folder, run, open_chunks=open_chunks, commits=commits)
