"""Whether all commits of a rank are still there. Several files say how many there must be.

    run.json        how many there were when the last owner started
    last_chunk      all chunks up to this one were committed
    shard.json      how many documents the input had; a finished rank has committed all of them

Each of them may be missing, or older than the log: then it proves less, but nothing wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import MAX_GAP, Commit, CommitsDamaged, CommitSums, read_last_chunk, scan_commits
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import COMMITS, RUN, SHARD, is_finished, last_chunk_of
from datatrove_ckpt.checkpoint.lines import Json, is_count
from datatrove_ckpt.checkpoint.sealed import read_shard
from datatrove_ckpt.errors import CheckpointCorrupt

_START_OVER = "Restore the file from a copy, or start this rank over: remove its folder and its output."


@dataclass(frozen=True)
class Expected:
    """What the other files say about a rank's commits. To be read before the commits, to which a run adds meanwhile.

    Attributes:
        known: number of commits when the rank's last owner started.
        last: the chunk up to which all were committed; None: nothing says it.
        documents: number of documents of a finished rank; None: nothing says it, or the rank is not finished.
    """

    folder: Path
    finished: bool
    known: int = 0
    last: int | None = None
    documents: int | None = None

    @classmethod
    def read(cls, folder: Path, finished: bool | None = None, run: Json | None = None) -> Expected:
        """Reads them.

        Args:
            folder: the rank's folder.
            finished: whether the rank is finished; None: look.
            run: the content of its ``run.json``; None: read it.

        Raises:
            CheckpointCorrupt: ``run.json`` or ``shard.json`` cannot be read.
        """
        if finished is None:
            finished = is_finished(folder)
        if run is None:
            run = read_run(folder / RUN) if (folder / RUN).exists() else {}
        known = run.get("owner", {}).get("commits", 0)
        last = read_last_chunk(last_chunk_of(folder)) if run else None  # it may be that of a removed folder
        return cls(folder, finished, known, last, documents_of(folder / SHARD) if finished else None)

    def check(self, commits: CommitSums) -> None:
        """Checks that no commit is lost, as far as that can be known.

        Raises:
            CommitsDamaged: a commit is lost.
        """
        path, number = self.folder / COMMITS, len(commits.indices)
        found = f"{path} holds {number} commits" if path.exists() else f"{path} is missing"
        if number < self.known:
            raise CommitsDamaged(path, f"{found}, but there were {self.known} when the rank was last started.")
        if self.last is not None and commits.unbroken <= self.last:
            raise CommitsDamaged(
                path,
                f"{found}, none of them for chunk {commits.unbroken}, but {last_chunk_of(self.folder)} says that all "
                f"chunks up to {self.last} are done.",
            )
        if self.documents is not None and commits.counts.read < self.documents:
            raise CommitsDamaged(
                path,
                f"{found}, for {commits.counts.read} documents, but {self.folder / SHARD} says that this finished rank "
                f"has read {self.documents}.",
            )
        last = max(commits.indices, default=0)
        if (gap := last - number) > MAX_GAP:
            raise CommitsDamaged(path, f"{path} names chunk {last}, but {gap} chunks before it are not done.")


def scan_complete_commits(folder: Path, finished: bool | None = None) -> tuple[dict[int, Commit], int]:
    """The commits of a rank's folder, as ``scan_commits`` returns them. Changes nothing.

    Args:
        finished: whether the rank is finished; None: look.

    Raises:
        CommitsDamaged: a commit is lost or damaged.
        CheckpointCorrupt: a line of another version, or ``run.json`` cannot be read.
    """
    expected = Expected.read(folder, finished)
    scanned = scan_commits(folder / COMMITS)
    expected.check(CommitSums.of(scanned[0].values()))
    return scanned


def documents_of(shard: Path) -> int | None:
    """The number of documents that a finished rank has read, as ``shard.json`` says."""
    documents = read_shard(shard).get("documents")
    return documents if is_count(documents) else None


def check_sequence(path: Path, commits: dict[int, Commit]) -> None:
    """Checks that each commit starts where the commits before it end, or after that.

    Raises:
        CheckpointCorrupt: one does not.
    """
    expected = ordinal = 0
    for index, commit in sorted(commits.items()):
        follows = commit.first_ordinal == ordinal if index == expected else commit.first_ordinal >= ordinal
        if not follows:
            raise CheckpointCorrupt(
                f"{path}: the commit of chunk {index} starts at document {commit.first_ordinal}, which does not follow "
                f"the commits before it (document {ordinal}). {_START_OVER}"
            )
        expected, ordinal = index + 1, commit.next_ordinal


def check_dead_letters(path: Path, commits: dict[int, Commit]) -> None:
    """Checks that dead_letters.jsonl is as long as the last commit says.

    Raises:
        CheckpointCorrupt: it is shorter.
    """
    needed = max((commit.dead_letters_size for commit in commits.values()), default=0)
    size = path.stat().st_size if path.exists() else 0
    if size < needed:
        raise CheckpointCorrupt(
            f"{path} has {size} bytes instead of {needed}: dead letters of committed chunks are lost. Restore the file "
            "from a copy or from the mirror. If there is none, start this rank over: remove its folder and its output."
        )
