"""OutputFolder: checks who may use a rank's output folder, whose it is, and which files are there.

It writes no output and needs no lease: most refusals come before the rank is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from datatrove_ckpt.checkpoint.layout import rank_numbers
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.output.committed import (
    CommittedFile,
    FoundFiles,
    OutputCheck,
    RankCommits,
    has_commits,
)
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access, private_if_made
from datatrove_ckpt.output.hub_uploads import HubReads
from datatrove_ckpt.output.names import FileNames
from datatrove_ckpt.output.stoppable import StoppableCalls

T = TypeVar("T")


class OutputFolder:
    """The output folder of one rank.

    Args:
        check: compares the folder with what the checkpoints say.
        scratch: the rank's checkpoint, below which files for a remote output folder are staged.
        prefix: stands before the chunk index in file names.
    """

    def __init__(self, check: OutputCheck, rank: int, scratch: Path, prefix: str) -> None:
        self.writer = check.writer
        self.check = check
        self.rank = rank
        self.scratch = scratch
        self.names = FileNames(check.writer, rank, prefix, check.root)
        self.hub = HubFolder.of(check.writer.output_folder)
        self.retry = ""
        if prefix:
            self.retry = scratch.parent.name
        self.is_first = False
        """Whether ``refuse_existing`` was called, and refused nothing."""
        self.calls = StoppableCalls()
        """All calls and pauses for the folder, also those of the target.

        ``ChunkOutput.stop`` ends them.
        """

    def refuse_existing(self) -> None:
        """Call it before the first start of a rank.

        Raises OutputMismatch for files that this rank would write.
        """
        self.check_access()
        commits = RankCommits(self.check.root, self.rank)
        self.check.refuse_foreign(self.rank, self.look(commits), root=self.retry)
        self.claim()
        self.is_first = True

    def check_moved(self) -> None:
        """Call it before the first start of a job with another output folder. Compares names and
        sizes.

        Raises:
            OutputMismatch: committed files are not in this folder, or it belongs to another run.
        """
        root = self.check.root
        commits = [RankCommits(root, rank) for rank in rank_numbers(root)]
        committed = self.check.by_name(commits)
        if committed:
            look = partial(self.check.look, committed, contents=False)
            self.check.refuse_lost(committed, self._list(committed, look))

    def check_access(self) -> None:
        """Call it before the folder is listed."""
        if self.hub is not None:
            has_begun = has_commits(self.check.root)
            check_access(self.hub, private_if_made(self.writer, has_begun), self.calls)

    def claim(self) -> None:
        self._call(
            "cannot be claimed for this run", partial(self.check.owner.claim, self.check.is_unused)
        )

    def look(self, commits: RankCommits, others: bool = True) -> FoundFiles:
        """Compares the folder with what the rank has committed.

        ``others``: also looks for uncommitted files.
        """
        committed = self.check.by_name([commits])
        return self._list(committed, partial(self.check.look, committed, self.rank, others))

    def _list(
        self, committed: Mapping[str, CommittedFile], look: Callable[[], FoundFiles]
    ) -> FoundFiles:
        if self.hub is not None:  # it may not show yet what it has committed
            return HubReads(self.hub, self.calls).listed(look, committed.values())
        return self._call("cannot be listed", look)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        where = self.check.where
        if self.writer.output_folder.is_local():
            with explained("read", Path(where).absolute()):
                return call()
        if self.hub is not None:
            return HubReads(self.hub, self.calls).looked(what, call)
        return self.calls.retry(f"{where} {what}", call)
