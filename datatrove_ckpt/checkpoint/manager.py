"""CheckpointManager: the settings of one rank's checkpoint, and how it is opened.

Opening takes the lock, compares the identity with what this rank and its job have, takes the fence and recovers, in
this order. Whatever fails on the way is undone, so a refused process leaves the rank to its owner, and a finished rank
finished.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog
from datatrove_ckpt.checkpoint.completeness import check_dead_letters, check_sequence, scan_complete_commits
from datatrove_ckpt.checkpoint.dealt_out import count_reshards
from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.identity import Fence, RunClaim
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING, Seconds, make_interval
from datatrove_ckpt.checkpoint.job import join_job
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    CACHE_LOGS,
    COMMITS,
    DEAD_LETTERS,
    HISTORY,
    KEPT_ANSWERS,
    LOCK,
    STAGING,
    check_files,
    is_finished,
    journal_indices,
    journal_path,
    last_chunk_file,
    rank_folder,
    retry_number,
)
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.checkpoint.placement import Placement
from datatrove_ckpt.checkpoint.publishing import WriteChunk
from datatrove_ckpt.checkpoint.rank_files import RankFiles
from datatrove_ckpt.checkpoint.recovery import recover
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.checkpoint.snapshot import Mirror, NoMirror
from datatrove_ckpt.process.shutdown import Shutdown


class CheckpointManager:
    """The checkpoint of one rank, not open yet: settings only.

    Args:
        root: ``checkpoints_local_dir``.
        identity: what makes two runs the same run, as plain JSON.
        write_chunk: steps 2 and 3 of a commit, called in the publisher thread.
        placement: puts the files that were written in place, if ``write_chunk`` does not do that itself.
        sync_seconds: how many seconds of answers a power loss may cost.
        retry_errors: forget cached permanent errors.
        keep_answers: write the answers of committed documents to a file, instead of deleting them.
        accept_changes: continue with another identity, and record that.
        mirror: keeps a copy elsewhere.
        before_first: called before the rank's very first start; an error of it refuses the rank.
        shutdown: how long to wait for a publication at the end; None: until it is done.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        records_per_chunk: int,
        identity: RunIdentity,
        write_chunk: WriteChunk,
        *,
        placement: Placement | None = None,
        sync_seconds: Seconds = 1.0,
        retry_errors: bool = False,
        keep_answers: bool = False,
        accept_changes: bool = False,
        mirror: Mirror | None = None,
        before_first: Callable[[], None] = lambda: None,
        shutdown: Shutdown | None = None,
    ) -> None:
        self._root = root
        self._rank = rank
        self._folder = rank_folder(root, rank)
        self._last_chunk = last_chunk_file(root, rank)
        self._records_per_chunk = records_per_chunk
        self._identity = identity
        self._write_chunk = write_chunk
        self._placement = placement or Placement()
        self._sync_seconds: Seconds = sync_seconds
        self._retry_errors = retry_errors
        self._kept = self._folder / KEPT_ANSWERS if keep_answers else None
        self._accept_changes = accept_changes
        self._mirror = mirror or NoMirror()
        self._before_first = before_first
        self._shutdown = shutdown or Shutdown()

    def open(self) -> OpenCheckpoint:
        """Takes the lock, checks the identity, recovers, and starts the threads.

        Raises:
            CheckpointError: locked, made by another run, damaged, or refused by the disk.
        """
        folder = self._folder
        check_files(folder, self._last_chunk)
        is_new = not folder.exists()
        files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
        files.disk.make_dirs(self._last_chunk.parent)
        finished, unlocked = is_finished(folder), not (folder / LOCK).exists()
        lock = files.Lock(folder / LOCK)
        with ExitStack() as undo:
            # A run that is refused leaves a finished rank finished, and no folder where there was none.
            refused = undo.enter_context(ExitStack())
            if is_new:
                refused.callback(files.disk.remove_dir, folder)
            refused.callback(lock.release, remove=unlocked)
            refuse_half_resharded(self._root)
            claim = RunClaim(folder, self._identity, self._accept_changes, self._reshards())
            scanned = self._check_commits(claim, finished)
            if claim.is_first:
                self._before_first()
            with self._joined():
                refused.pop_all()
                undo.callback(lock.release)
                interrupted = (folder / CACHE).exists()  # a rank that completes removes its cache
                fence, cache = self._take_over(lock, claim, len(scanned[0]) if scanned else 0, undo)
            log = CommitLog(folder / COMMITS, scanned if lock.works else None)
            if self._retry_errors:
                cache.forget_errors()
            point = recover(folder, self._last_chunk, log, cache, self._records_per_chunk)
            point.interrupted, point.forked = interrupted and not claim.is_first, claim.forked
            interval = make_interval(self._sync_seconds, SYNC_TUNING)
            rank_files = RankFiles(folder, self._last_chunk, cache, log, fence, interval, point)
            rank_files.start_history()
            undo.pop_all()
        settings = self._records_per_chunk, self._write_chunk, self._placement, self._mirror, self._shutdown
        checkpoint = OpenCheckpoint(folder, lock, fence, rank_files, point, *settings)
        checkpoint.start()
        return checkpoint

    def _reshards(self) -> int:
        """How many times the input was dealt out anew. The dead letters that a retry reads are no part of it."""
        if retry_number(self._root.name) is not None:
            return 0
        return count_reshards(self._root, self._rank, self._identity.fields.get("tasks"))

    def _joined(self) -> AbstractContextManager[None]:
        """Ranks retry their dead letters when they like, with settings of their own: a retry is no job."""
        if retry_number(self._root.name) is not None:
            return nullcontext()
        return join_job(self._root, self._rank, self._identity, self._accept_changes)

    def _check_commits(self, claim: RunClaim, finished: bool) -> tuple[dict[int, Commit], int] | None:
        """Scans the commits of an earlier owner. Raises if some are lost, before anything is changed."""
        if claim.is_first:
            return None
        commits, size = scan_complete_commits(self._folder, finished)
        check_sequence(self._folder / COMMITS, commits)
        check_dead_letters(self._folder / DEAD_LETTERS, commits)
        return commits, size

    def _take_over(
        self, lock: files.Lock, claim: RunClaim, commits: int, undo: ExitStack
    ) -> tuple[Fence, RequestCache]:
        """Makes this process the rank's owner, and opens the request cache."""
        if claim.is_first and self._last_chunk.exists():
            # Of a folder that was removed to start the rank over. It would name chunks that nobody has committed.
            files.disk.remove(self._last_chunk)
            files.disk.sync_dir(self._last_chunk.parent)
        if lock.works and (claim.forked is not None or not claim.is_first):
            # SQLite has its own lock, and its holder must not be fenced off: open the cache before the fence moves.
            cache = self._open_cache(undo, claim.is_first)
            if self._placement.is_later:
                # On a full disk run.json needs their room. They are made again from the journals, which stay.
                files.disk.remove_tree(self._folder / STAGING)
            return claim.take(commits), cache
        fence = claim.take(commits)
        if not lock.works:
            self._detach()
        return fence, self._open_cache(undo, claim.is_first and claim.forked is not None)

    def _open_cache(self, undo: ExitStack, is_fork: bool = False) -> RequestCache:
        cache = RequestCache(self._folder / CACHE, self._kept)
        undo.callback(cache.close)
        if is_fork:  # its answers came from a run whose chunks may have had another size
            cache.renumber(self._records_per_chunk)
        return cache

    def _detach(self) -> None:
        """Without locks, an earlier owner may still have these files open, until it checks the fence."""
        for chunk_index in journal_indices(self._folder):
            files.disk.detach(journal_path(self._folder, chunk_index))
        for suffix in ("", *CACHE_LOGS):
            files.disk.detach(self._folder / (CACHE + suffix))
        files.disk.detach(self._folder / COMMITS)
        files.disk.detach(self._folder / HISTORY)
