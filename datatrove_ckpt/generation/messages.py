"""What a rank logs at its start and its end."""

from __future__ import annotations

from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.formatting import plural
from datatrove_ckpt.generation.progress import Progress
from datatrove_ckpt.generation.scheduler import Checkpoint
from datatrove_ckpt.process.shutdown import Shutdown


@dataclass(frozen=True)
class RankMessages:
    """The log lines of one rank. ``folder``: its ``checkpoints_local_dir``; None: it has no checkpoint."""

    rank: int
    folder: str | None
    checkpoint: Checkpoint
    progress: Progress

    def started(self) -> None:
        """Warns of missing locks, and says what is resumed."""
        if not self.checkpoint.has_locks:
            logger.warning(
                f"{self.folder} has no working file locks: do not start a second process for rank {self.rank}. A "
                "second process takes over the rank, and this one stops before its next write."
            )
        point = self.checkpoint.resumed
        if not point.is_fresh:
            logger.info(
                f"Resuming: {plural(self.checkpoint.counts.read, 'document')} committed, and "
                f"{sum(len(journal.recovered) for journal in point.journals.values())} saved in "
                f"{plural(len(point.journals), 'unfinished chunk')}; {plural(len(point.cached), 'document')} "
                "with saved answers to finish."
            )

    def stopped(self, shutdown: Shutdown) -> None:
        """A stop was requested."""
        if self.checkpoint.error is not None:
            logger.error(f"Rank {self.rank}: a part of its work could not be saved: {self.checkpoint.error}")
        kept = (
            f"the {self.progress.documents} documents that this run finished are saved, and so is every answer; "
            f"{shutdown.given_up} requests in flight were given up. Run the same command again to resume."
            if self.folder is not None
            else "there is no checkpoint (checkpoints_local_dir is not set), so the same command starts over."
        )
        logger.warning(f"Rank {self.rank}: stopped by {shutdown.cause} after {shutdown.seconds:.1f} s; {kept}")

    def done(self, where: str) -> None:
        """All documents are in the output folder, which is named."""
        counts = self.checkpoint.counts
        resume = (
            "If you run the same command again, it has nothing to do."
            if self.folder is not None
            else "There is no checkpoint (checkpoints_local_dir is not set): the same command starts over."
        )
        logger.success(
            f"Rank {self.rank}: {counts.written} of {counts.read} documents written to {where} "
            f"({counts.dropped} dropped, {counts.dead} dead letters); {counts.requests} requests, of which "
            f"{self.progress.requests} were sent in this run, {counts.prompt_tokens} prompt tokens, "
            f"{counts.completion_tokens} completion tokens.{self.progress.skipped} {resume}"
        )
