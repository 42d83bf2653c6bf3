"""What a rank's output may not be, as far as the rank can tell from its tasks and the steps before it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.output.committed import OutputCheck, RankCommits
from datatrove_ckpt.output.folders import refuse_own_output
from datatrove_ckpt.output.writers import check_rank_in_template
from datatrove_ckpt.readers.pipeline import steps_before


def check_output_of_rank(writer: DiskWriter, documents: Iterable[Document], world_size: int) -> None:
    """
    Raises:
        ConfigError: several tasks would write one file, or the next start would read the output as input.
    """
    check_rank_in_template(writer, world_size)
    refuse_own_output((step for step, _, _ in steps_before(documents)), writer)


def refuse_strangers_without_checkpoint(writer: DiskWriter, rank: int) -> None:
    """Refuses a rank that keeps no checkpoint while files are there that it would not overwrite. Local folders only.

    Raises:
        OutputMismatch: names some of them.
    """
    if writer.output_folder.is_local():
        nowhere = Path("no checkpoint")
        check, commits = OutputCheck(writer, nowhere), RankCommits(nowhere, rank)
        check.refuse_strangers(commits, check.look([commits], rank))
