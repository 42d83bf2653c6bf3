"""The fence, by which a process finds out that a newer process owns its rank.

The owner is the process that started last. Each start takes the next fencing number, and a process
that finds another owner in ``run.json`` stops before its next write. The fence serves where locks
(``lock.Lock``) fail: on file systems without locks, and in clusters that restart a lost node's job
while the old process still runs. Between a check and the write that follows, both processes may
write for microseconds; both write whole, valid lines.

An owner's record lists the nonces of earlier owners whose work this folder holds: all of it (null),
or up to a version of the mirror (see ``mirror/restore.py``). It also holds the number of commits at
its start, so that the next owner notices lost commits.
"""

import os
import secrets
import socket
from pathlib import Path

from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, checksummed_json, explained
from datatrove_ckpt.checkpoint.compare import (
    compare,
    describe_alike,
    mismatch_error,
    new_records,
    records,
)
from datatrove_ckpt.checkpoint.identity import RunIdentity, read_run, run_with_secrets
from datatrove_ckpt.checkpoint.request_cache import has_answers
from datatrove_ckpt.errors import Fenced, StorageFailed


def new_owner(fence: int, earlier: dict[str, int | None], commits: int) -> Json:
    return {
        "fence": fence,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
        "earlier": earlier,
        "commits": commits,
    }


class Fence:
    """Checks that this process still owns a rank. Thread-safe."""

    def __init__(self, path: Path, owner: Json) -> None:
        self._path = path
        self.owner = owner
        self.number: int = owner["fence"]
        """The number of the attempt, counted from 1 over all processes that owned the rank."""
        self.lost = False
        """Whether a check found another owner."""
        self._seen = (0, 0)

    def check(self, thorough: bool = False) -> None:
        """Checks that this process is still the owner.

        Args:
            thorough: read the file. Otherwise only compare its attributes, which takes a
                microsecond.

        Raises:
            Fenced: another process has started since.
        """
        # A network file system may cache attributes for seconds; opening a file refreshes them.
        with explained("look at", self._path):
            status = self._path.stat()
        stamp = status.st_ino, status.st_mtime_ns
        if not thorough and stamp == self._seen:
            return
        owner = run_with_secrets(self._path).get("owner", {})
        if owner != self.owner:
            self.lost = True
            raise Fenced(
                f"Another process has taken over {self._path.parent}: {owner.get('host')} pid "
                f"{owner.get('pid')}, start number {owner.get('fence')}; this process, number "
                f"{self.owner['fence']}, writes nothing more."
            )
        # The attributes from before the read: a new owner may have come after it.
        self._seen = stamp

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, StorageFailed):
            try:
                self.check(thorough=True)
            except Fenced as fenced:
                return fenced
            except StorageFailed:
                pass
        return error


class RunClaim:
    """Checks a run's identity against a rank's folder; ``take`` makes this process the owner.

    Args:
        accept_changes: record a different identity, with the time, instead of refusing it. A folder
            without any work takes any identity.

    Raises:
        CheckpointMismatch: the checkpoint belongs to another run.
    """

    def __init__(self, folder: Path, identity: RunIdentity, accept_changes: bool = False) -> None:
        self._path = folder / layout.RUN
        self._fields = identity.stored
        self._accepted = []
        self.before: Json = {}
        """The content of ``run.json``; empty if no process has owned the rank."""
        if self._path.exists():
            self.before = old = read_run(self._path)
            changes = compare(old, identity)
            if not describe_alike(old, identity.fields):
                logger.warning(
                    f"{self._path}: another version of datatrove-ckpt described this run's code, "
                    "so it is not compared this time."
                )
            self._accepted += old.get("accepted_changes", [])
            if changes and holds_work(folder):
                if not accept_changes or any(change.is_layout for change in changes):
                    raise mismatch_error(f"The checkpoint {folder} was", changes)
                self._accepted += records(changes)
        else:
            layout.refuse_missing_run_json(folder)
        self._accepted += new_records(self._accepted, identity)

    def take(self, commits: int | None = None) -> Fence:
        """Writes ``run.json``, which an earlier owner notices before its next write."""
        before = self.before.get("owner", {})
        if commits is None:
            commits = before.get("commits", 0)
        earlier = before.get("earlier", {})
        if "nonce" in before:
            earlier = {**earlier, before["nonce"]: None}
        owner = new_owner(before.get("fence", 0) + 1, earlier, commits)
        content = {**self._fields, "owner": owner}
        if self._accepted:
            content["accepted_changes"] = self._accepted
        files.disk.replace(self._path, checksummed_json(content))
        return Fence(self._path, owner)


def holds_work(folder: Path) -> bool:
    listing = layout.RankListing(folder)
    journals = map(layout.journal_name, listing.journals)
    is_written = listing.size(layout.COMMITS, layout.BATCHES, *journals) > 0
    return is_written or has_answers(folder / layout.CACHE)
