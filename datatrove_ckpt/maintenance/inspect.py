"""Reads what each rank of a checkpoint has on disk. Changes nothing, and works during a run.

``CHECKPOINTS/retry-00001`` and the like are checkpoints of their own, for retries of dead letters. Their output goes to
the same folder. ``RankFolder.root`` names the retry that a rank belongs to; "" is CHECKPOINTS itself.

A rank is finished if it has neither lock file, nor request cache, nor journal: a run removes the first two when all
documents are committed. ``repair`` leaves the lock file in place, which marks the rank as unfinished.
"""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, CommitsDamaged, DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.completeness import Expected
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.foreign import check_not_headless
from datatrove_ckpt.checkpoint.identity import not_readable, read_run
from datatrove_ckpt.checkpoint.journal import JOURNAL_ADVICE, read_finished
from datatrove_ckpt.checkpoint.layout import (
    COMMITS,
    DEAD_LETTERS,
    HISTORY,
    LOCK,
    RETRIES,
    RUN,
    check_files,
    is_finished,
    journal_indices,
    journal_path,
    last_chunk_file,
    rank_folder,
    rank_numbers,
)
from datatrove_ckpt.checkpoint.recovery import uncommitted_journals
from datatrove_ckpt.checkpoint.versions import settings_in
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointError, ConfigError

_BLOCK = 1 << 20


@dataclass(frozen=True)
class RankFolder:
    """One rank's folder."""

    root: str
    number: int
    folder: Path

    @property
    def key(self) -> tuple[str, int]:
        return self.root, self.number

    @property
    def commits_file(self) -> Path:
        return self.folder / COMMITS

    @property
    def dead_letters_file(self) -> Path:
        return self.folder / DEAD_LETTERS

    @property
    def last_chunk_file(self) -> Path:
        return last_chunk_file(self.folder.parent, self.number)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The content of ``run.json``; empty if there is none.

        Raises:
            CheckpointCorrupt: it cannot be read.
            VersionMismatch: a newer version of this program wrote it.
        """
        path = self.folder / RUN
        if not path.exists():
            return {}
        return read_run(path)

    @property
    def settings(self) -> dict[str, Any]:
        """The identity in ``run.json``: the settings that all ranks of a run share."""
        return settings_in(self.identity)

    def commits(self) -> dict[int, Commit]:
        """The commits by chunk index, in the order in which they were written.

        Raises:
            CheckpointCorrupt: the log is damaged.
        """
        return read_commits(self.commits_file)

    def dead_letters(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` of the dead letters file, in blocks."""
        if end <= start or not self.dead_letters_file.exists():
            return
        with explained("read", self.dead_letters_file), self.dead_letters_file.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(_BLOCK, end - start))):
                yield block
                start += len(block)

    def count_dead_letters(self, start: int, end: int) -> int:
        """The number of dead letters between two byte offsets."""
        return sum(block.count(b"\n") for block in self.dead_letters(start, end))

    def journals(self) -> list[int]:
        """The chunks that have a journal."""
        return journal_indices(self.folder)

    def documents_in_journal(self, chunk_index: int) -> tuple[dict[int, str], DocumentCounts]:
        """The finished documents in a journal: fingerprints by ordinal, and counts. None if a run has just removed it.

        Raises:
            CheckpointCorrupt: the journal is damaged.
        """
        found, counts = dict[int, str](), DocumentCounts()
        for _, one in read_finished(journal_path(self.folder, chunk_index), found):
            if one is not None:
                counts.count(one.outcome, *one.numbers)
        return found, counts

    @property
    def is_finished(self) -> bool:
        return is_finished(self.folder)

    def holder(self) -> dict[str, Any] | None:
        """Host and pid of the process that works on this rank now; None if there is none."""
        return files.lock_holder(self.folder / LOCK)


def find_ranks(checkpoints: Path) -> list[RankFolder]:
    """All ranks that have a folder, those of ``checkpoints`` itself first.

    Raises:
        ConfigError: there is no rank, or this user may not read one.
    """
    try:
        found = list(_ranks("", checkpoints))
        for retry in sorted(checkpoints.glob(RETRIES)):
            found += _ranks(retry.name, retry)
        for rank in found:
            check_readable(rank.folder)
    except PermissionError as error:
        raise not_permitted(checkpoints, error) from None
    if not found:
        raise no_checkpoint(checkpoints)
    return found


def no_checkpoint(checkpoints: Path) -> ConfigError:
    """The error for a folder without ranks."""
    if not checkpoints.exists():
        return ConfigError(f"{checkpoints} does not exist. Give the folder that checkpoints_local_dir names.")
    return ConfigError(
        f"{checkpoints} contains no checkpoint: there is no folder like 00000 in it. Give the folder that "
        "checkpoints_local_dir names."
    )


def not_permitted(checkpoints: Path, error: PermissionError) -> ConfigError:
    """The error for a checkpoint that this user may not read."""
    share = f", or ask that user for: chmod -R g+rX {checkpoints}"
    return ConfigError(not_readable(error.filename) + share)


def check_readable(folder: Path) -> None:
    """Checks the files that tell the state of the rank.

    Raises:
        PermissionError: one cannot be read.
        CheckpointCorrupt: one is no file. Whoever opened a pipe would wait for ever.
    """
    names = (RUN, COMMITS, HISTORY, *(journal_path(folder, index).name for index in journal_indices(folder)))
    for path in (folder / name for name in names):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        if not is_file:
            raise CheckpointCorrupt(f"{path} is not a file. Move it away, or restore it from a copy.")


def _ranks(root: str, folder: Path) -> Iterable[RankFolder]:
    if not folder.is_dir():
        return []
    return [RankFolder(root, number, rank_folder(folder, number)) for number in rank_numbers(folder)]


def name_place(root: str, rank: int | None, chunk_index: int | None = None) -> str:
    """A rank or a chunk by its name for people: "retry-00001, rank 3, chunk 7"."""
    parts = [root] if root else []
    parts += [f"rank {rank}"] if rank is not None else []
    parts += [f"chunk {chunk_index}"] if chunk_index is not None else []
    return ", ".join(parts)


@dataclass(slots=True)
class RankStatus:
    """The state and counts of one rank.

    ``state``: "running", "finished", "unfinished", or "damaged" (see ``error``). ``counts`` and ``chunks``: what is
    committed. ``journals``: how many documents the journal of each uncommitted chunk holds. ``unfinished``: the counts
    of these documents.
    """

    root: str
    rank: int
    state: str
    chunks: int = 0
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    journals: dict[int, int] = field(default_factory=dict)
    unfinished: DocumentCounts = field(default_factory=DocumentCounts)
    last_commit: str | None = None
    holder: dict[str, Any] | None = None
    error: str | None = None
    can_be_rebuilt: bool = False
    """Only ``commits.jsonl`` is damaged, and ``repair`` can rebuild it."""
    may_lack_commits: bool = False
    """The rank is finished, and nothing shows how many commits it had."""

    def to_json(self) -> dict[str, Any]:
        """For ``--json``, where ``counts`` has been called "tally" since 0.1."""
        return {
            "tally" if name == "counts" else name: value
            for name, value in asdict(self).items()
            if name not in ("can_be_rebuilt", "may_lack_commits")
        }


def summarise(rank: RankFolder) -> tuple[RankStatus, dict[int, Commit]]:
    """The status of one rank, and its commits."""
    summary = RankStatus(rank.root, rank.number, "damaged", holder=rank.holder())
    try:
        check_files(rank.folder, rank.last_chunk_file)
        # The state is read first: a chunk that a run finishes meanwhile then counts as unfinished, not as lost.
        state = "running" if summary.holder else "finished" if rank.is_finished else "unfinished"
        expected = Expected.read(rank.folder)  # before the commits, to which a run adds meanwhile
        journals, commits = _read(rank, expected)
    except CheckpointError as error:
        summary.error = str(error)
        summary.can_be_rebuilt = isinstance(error, CommitsDamaged)
        return summary, {}
    summary.state, summary.may_lack_commits = state, expected.leaves_doubt
    for commit in commits.values():
        summary.counts.add(commit.counts)
    summary.chunks = len(commits)
    for index, counts in journals.items():
        if index not in commits:
            summary.journals[index] = counts.read
            summary.unfinished.add(counts)
    if commits:
        changed = datetime.datetime.fromtimestamp(rank.commits_file.stat().st_mtime, datetime.UTC)
        summary.last_commit = changed.isoformat(timespec="seconds")
    return summary, commits


def _read(rank: RankFolder, expected: Expected) -> tuple[dict[int, DocumentCounts], dict[int, Commit]]:
    """What is in each journal, and the commits.

    Raises:
        CheckpointError: a run would refuse the folder, too.
    """
    identity = rank.identity
    check_not_headless(rank.folder)
    journals = {index: rank.documents_in_journal(index) for index in rank.journals()}
    commits = rank.commits()
    expected.check(commits)
    per_chunk = identity.get("records_per_chunk") or 0
    for index, first, end in uncommitted_journals(rank.folder, commits, per_chunk):
        strangers = [
            ordinal for ordinal in (journals[index][0] if index in journals else ()) if not first <= ordinal < end
        ]
        if strangers and per_chunk:
            path = journal_path(rank.folder, index)
            raise CheckpointCorrupt(f"{path}: document {strangers[0]} does not belong there. {JOURNAL_ADVICE}")
    return {index: counts for index, (_, counts) in journals.items()}, commits
