"""What one rank must do again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from datatrove_ckpt.checkpoint.commits import Commit
from datatrove_ckpt.checkpoint.ledger import RankLedger, name_place
from datatrove_ckpt.common.formatting import plural, ranges


@dataclass
class Redo:
    """What one rank must do again.

    Attributes:
        before: the log as it was read; None: it is damaged.
        kept: the commits to keep, in the order of the lines.
        commits: those to take back.
        lost: chunks without a commit.
        letters: ranges of bytes in the dead letters file that belong to commits that are not kept.
    """

    rank: RankLedger
    before: dict[int, Commit] | None
    kept: list[Commit] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    letters: list[tuple[int, int]] = field(default_factory=list)

    def describe(self) -> Iterator[str]:
        place = self.rank.place
        if self.before is None:
            yield (
                f"{place}: rebuild {self.rank.commits_file} from the "
                f"{plural(len(self.kept), 'commit')} that can be "
                "proved; all other chunks are processed again, and their requests are paid again"
            )
        for commit in self.commits:
            what = (
                f"take back its commit, to have {plural(commit.counts.read, 'document')} "
                "processed again"
            )
            if commit.counts.dead:
                what += f", {plural(commit.counts.dead, 'dead letter')} among them"
            if commit.files:
                what += f"; remove {', '.join(file.path for file in commit.files)}"
            yield f"{name_place(*self.rank.key, commit.chunk_index)}: {what}"
        if self.lost:
            yield f"{place}: mark as not done the chunks {ranges(self.lost)}"
