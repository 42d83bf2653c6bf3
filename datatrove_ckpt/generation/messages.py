"""What a rank logs at its start and its end."""

from __future__ import annotations

from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.formatting import plural, plural_is
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.progress import Progress
from datatrove_ckpt.process.shutdown import Shutdown


@dataclass(frozen=True)
class RankMessages:
    """The log lines of one rank.

    Attributes:
        folder: its ``checkpoints_local_dir``; None: it has no checkpoint.
        retrying: it processes dead letters.
    """

    rank: int
    folder: str | None
    checkpoint: Checkpoint
    progress: Progress
    retrying: bool = False

    def started(self) -> None:
        """Warns of missing locks, and says what is resumed."""
        if not self.checkpoint.has_locks:
            logger.warning(
                f"{self.folder} has no working file locks: do not start a second process for rank {self.rank}. A "
                "second process takes over the rank, and this one stops before its next write."
            )
        point = self.checkpoint.resumed
        if not point.is_fresh:
            done, written = plural_is(point.finished.read, "document"), point.counts.written
            answers = "1 answer waits" if point.answers == 1 else f"{point.answers} answers wait"
            logger.info(f"Resuming: {done} done ({written} in output files), {answers}.")

    def stopped(self, shutdown: Shutdown) -> None:
        """A stop was requested."""
        if self.checkpoint.error is not None:
            logger.error(f"Rank {self.rank}: a part of its work could not be saved: {self.checkpoint.error}")
        if self.folder is None:
            saved = ". There is no checkpoint (checkpoints_local_dir is not set), so the same command starts over."
        elif self.checkpoint.error is not None:
            saved = (
                ". What was saved before that stays. Correct the cause, and run the same command again to resume; the "
                "rest is done again."
            )
        else:
            given_up = f"{plural(shutdown.given_up, 'request')} in flight {'was' if shutdown.given_up == 1 else 'were'}"
            saved = (
                f", saved: {plural(self.progress.documents, 'document')} of this run and every answer. "
                f"{f'{given_up} given up. ' if shutdown.given_up else ''}Run the same command again to resume."
            )
        logger.warning(f"Rank {self.rank}: interrupted by {shutdown.cause} after {shutdown.seconds:.1f} s{saved}")

    def done(self, where: str) -> None:
        """All documents are in the output folder, which is named."""
        counts = self.checkpoint.counts
        if counts.dropped == counts.read > 0:
            logger.warning(
                f"Rank {self.rank}: the rollout returned None for each document, which drops it, so none is in the "
                "output. Does the rollout lack a return?"
            )
        if not counts.read:
            logger.success(f"Rank {self.rank}: there are no documents in its input.{self.progress.skipped}")
            return
        logger.success(
            f"Rank {self.rank}: {counts.written} of {plural(counts.read, 'document')} written to {where} "
            f"({counts.dropped} dropped, {plural(counts.dead, 'dead letter')}); {plural(counts.requests, 'request')}, "
            f"of which {self.progress.sent} {'was' if self.progress.sent == 1 else 'were'} sent in this run, "
            f"{plural(counts.prompt_tokens, 'prompt token')}, {plural(counts.completion_tokens, 'completion token')}."
            f"{counts.odd_answers}{self.progress.skipped} {self._again(counts.dead)}"
        )

    def _again(self, dead: int) -> str:
        """What the same command would do."""
        if self.folder is None:
            return "There is no checkpoint (checkpoints_local_dir is not set): the same command starts over."
        if self.retrying and dead:
            return f"If you run the same command again, it tries {plural(dead, 'dead letter')} once more."
        return "If you run the same command again, it has nothing to do."
