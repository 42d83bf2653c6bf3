"""Reads the files of one rank into a ``RankState``: few system calls, because there may be ten thousand ranks.

What a file says is taken as it is, as long as it is whole. If anything is odd, ``inspect.summarise`` looks at the rank
again, slowly, and says what is wrong in the words that ``verify`` and a run use.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.commit_sums import CommitSums, sum_commits, sum_journal
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.completeness import documents_of
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.history_records import InputPosition, Progress
from datatrove_ckpt.checkpoint.identity import parse_run
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.versions import RESHARDS
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointError, StorageFailed
from datatrove_ckpt.maintenance.inspect import RankFolder, check_readable, summarise
from datatrove_ckpt.maintenance.judge import judge
from datatrove_ckpt.maintenance.rank_history import RecentHistory, read_recent
from datatrove_ckpt.maintenance.run_state import OTHERS, RankState

MAX_CAUSES = 20
_MAX_CAUSE = 120
_COUNTS = tuple(DocumentCounts.__dataclass_fields__)
_DIGITS = re.compile(r"(?<!HTTP )(?<!\d)\d+")


@dataclass(frozen=True, slots=True)
class Limits:
    """How many bytes to read of a rank, at most. Documents and dead letters may be large.

    Attributes:
        journals: if they are larger, the history tells how many documents are in them.
        letters: of its dead letters, the last ones are read.
    """

    journals: int
    letters: int


def read_rank(root: str, number: int, folder: str, limits: Limits, now: float, copied_at: float | None) -> RankState:
    """The state of one rank. Damage makes the state "damaged", and is no error.

    Args:
        folder: the rank's.
        now: the time, in Unix seconds.
        copied_at: when the version was uploaded that ``folder`` is a copy of; None: it is no copy.

    Raises:
        PermissionError: one of its files may not be read.
    """
    rank = RankState(root, number, Path(folder), "damaged", is_copy=copied_at is not None)
    try:
        found = _Files(folder)
        recent, is_finished = _read(rank, found, limits)
    except CheckpointError:
        _look_closely(rank)
        if rank.state == "damaged":
            return rank
        found, recent, is_finished = _Files(folder), RecentHistory(), rank.state == "finished"
        rank.last_commit = _modified(found, layout.COMMITS) if rank.chunks else None
    judge(rank, recent, is_finished, now, copied_at)
    if rank.state in ("lost", "running") and not rank.is_copy:  # it worked until then at least
        rank.last_change = min(now, max(_changed(found, layout.COMMITS), default=0.0))
    times = [recent.last_at, rank.last_commit, rank.last_change or None]
    if recent.last_at is None:
        times += _changed(found, layout.RUN, layout.CACHE)
    rank.last_word = max((time for time in times if time is not None), default=None)
    return rank


class _Files:
    """What is in a rank's folder.

    Raises:
        CheckpointCorrupt: it needs a closer look.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.journals: dict[int, str] = {}
        try:
            with explained("read", folder), os.scandir(folder) as entries:
                self.entries = {entry.name: entry for entry in entries}
        except StorageFailed as error:
            if isinstance(error.__cause__, NotADirectoryError):
                raise CheckpointCorrupt(f"{folder} is not a folder.") from error
            raise
        for name, entry in self.entries.items():
            if name in _NAMES or name.startswith("chunk_"):
                if not entry.is_file():
                    raise CheckpointCorrupt(f"{entry.path} is not a file.")
                if name not in _NAMES and name.endswith(".jsonl"):
                    if not layout.is_journal(name):
                        raise CheckpointCorrupt(f"{entry.path} is not a journal.")
                    self.journals[int(name[6:-6])] = name

    @property
    def is_finished(self) -> bool:
        """See ``layout.is_finished``."""
        missing = layout.LOCK not in self.entries and layout.CACHE not in self.entries
        return layout.RUN in self.entries and missing and not self.journals

    def size(self, name: str) -> int:
        """In bytes; 0 if there is no such file."""
        with suppress(FileNotFoundError):
            return self.entries[name].stat().st_size if name in self.entries else 0
        return 0

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


_NAMES = frozenset((layout.RUN, layout.COMMITS, layout.LOCK, layout.DEAD_LETTERS, layout.HISTORY, layout.CACHE))


def _read(rank: RankState, found: _Files, limits: Limits) -> tuple[RecentHistory, bool]:
    """Fills in what the files say. Returns the history, and whether the rank is finished.

    Raises:
        CheckpointError: something needs a closer look.
    """
    rank.holder = files.lock_holder(found.path(layout.LOCK)) if layout.LOCK in found.entries else None
    run = _run(found)
    documents = documents_of(Path(found.path(layout.SHARD))) if found.is_finished else None
    last_chunk = _last_chunk(found.folder) if run and not rank.is_copy else None
    recent = read_recent(found.path(layout.HISTORY)) if layout.HISTORY in found.entries else RecentHistory()
    # In this order: a chunk that is committed meanwhile has left its journal, and is counted as committed.
    owner = run.get("owner", {})
    has_ended = _has_ended(recent, int(owner.get("fence", 0)))
    journals = _read_journals(found, limits, recent, has_ended)
    sums = sum_commits(found.path(layout.COMMITS)) if layout.COMMITS in found.entries else CommitSums()
    least = owner.get("commits", 0)
    if sums is None or len(sums.indices) < least or (last_chunk is not None and last_chunk >= sums.unbroken):
        raise CheckpointCorrupt(f"{found.folder}: the commits need a closer look.")
    if documents is not None and sums.counts.read < documents:
        raise CheckpointCorrupt(f"{found.folder}: commits are missing.")
    rank.counts, rank.chunks, rank.files, rank.last_commit = sums.counts, len(sums.indices), sums.files, sums.at
    if rank.last_commit is None and sums.indices and not rank.is_copy:
        rank.last_commit = _modified(found, layout.COMMITS)
    rank.journals = sum(index not in sums.indices for index in found.journals)
    rank.unfinished = _unfinished(journals, recent.last, sums)
    rank.exact = journals is not None or has_ended
    rank.attempts, rank.number_of_attempts = recent.attempts, int(owner.get("fence", 0))
    rank.seconds = sums.seconds
    if (last := recent.last) is not None:
        rank.position, rank.work, rank.seconds = last.position, last.total, max(rank.seconds, last.seconds.total)
    rank.reshards = run.get(RESHARDS, 0)
    if rank.reshards and not found.is_finished and (last is None or last.attempt < rank.number_of_attempts):
        rank.position = InputPosition()  # of the share before
    if (letters := found.size(layout.DEAD_LETTERS)) and rank.counts.dead:
        rank.dead_letters = _causes(found.path(layout.DEAD_LETTERS), letters, limits.letters)
    return recent, found.is_finished


def _run(found: _Files) -> Json:
    """The content of run.json; only the values that are used are checked."""
    if layout.RUN not in found.entries:
        if found.journals or {layout.COMMITS, layout.CACHE, layout.DEAD_LETTERS} & found.entries.keys():
            raise CheckpointCorrupt(f"{found.folder} holds no {layout.RUN}.")
        return {}
    path = found.path(layout.RUN)
    with explained("read", path), open(path, "rb") as file:  # noqa: PTH123 (speed)
        return parse_run(path, file.read())


def _last_chunk(folder: str) -> int | None:
    """What ``read_last_chunk`` returns for a file as a run writes it; None for any other."""
    root, _, name = folder.rpartition("/")
    with suppress(OSError, ValueError), open(f"{root}/last_chunk/{name}.txt", "rb") as file:  # noqa: PTH123 (speed)
        return int(file.read(20))
    return None


def _read_journals(
    found: _Files, limits: Limits, recent: RecentHistory, has_ended: bool
) -> dict[int, DocumentCounts] | None:
    """The counts of each journal; None if the history knows their sum, and they need not or may not be read.

    Raises:
        CheckpointCorrupt: one needs a closer look.
    """
    too_large = sum(map(found.size, found.journals.values())) > limits.journals
    if recent.last is not None and found.journals and (too_large or has_ended):
        return None
    return {index: sum_journal(found.path(name)) for index, name in found.journals.items()}


def _has_ended(recent: RecentHistory, fence: int) -> bool:
    """Whether the newest attempt could say that it ended: then its last progress line knows of every document.

    Args:
        fence: the owner's. ``reshard`` is an owner, too, and its journals may hold documents of another rank.
    """
    return bool(recent.attempts) and recent.attempts[-1].ended is not None and recent.attempts[-1].number == fence


def _unfinished(journals: dict[int, DocumentCounts] | None, last: Progress | None, sums: CommitSums) -> DocumentCounts:
    if journals is None:
        assert last is not None
        done, committed = last.documents, sums.counts
        return DocumentCounts(*(max(0, getattr(done, name) - getattr(committed, name)) for name in _COUNTS))
    unfinished = DocumentCounts()
    for counts in (counts for index, counts in journals.items() if index not in sums.indices):
        unfinished.add(counts)
    return unfinished


def _changed(found: _Files, *names: str) -> list[float]:
    """When these files and the journals were changed: a line of the history may be a minute older."""
    times = [_modified(found, name) for name in (*names, *found.journals.values())]
    return [time for time in times if time is not None]


def _modified(found: _Files, name: str) -> float | None:
    with suppress(KeyError, FileNotFoundError):
        return found.entries[name].stat().st_mtime
    return None


def _look_closely(rank: RankState) -> None:
    """Takes over what the slow way finds. It may be nothing: a run changes files while they are read."""
    try:
        if rank.folder.is_dir():
            check_readable(rank.folder)
    except CheckpointError as error:
        rank.trouble, rank.reason = "damaged", str(error)
        return
    summary, commits = summarise(RankFolder(rank.root, rank.rank, rank.folder))
    if summary.error is not None:
        rank.trouble, rank.reason = "damaged", summary.error
        return
    rank.state = "finished" if summary.state == "finished" else "unfinished"
    rank.holder, rank.counts, rank.chunks = summary.holder, summary.counts, len(commits)
    rank.unfinished, rank.journals = summary.unfinished, len(summary.journals)
    rank.files = sum(len(commit.files) for commit in commits.values())


# dead letters --------------------------------------------------------------------------------------------------------


def _causes(path: str, size: int, most: int) -> Counter[str]:
    """How often each cause occurs in the last ``most`` bytes of the dead letters. Numbers in a cause are left out."""
    causes: Counter[str] = Counter()
    with suppress(FileNotFoundError), explained("read", path), open(path, "rb") as file:  # noqa: PTH123 (speed)
        if size > most:
            file.seek(size - most)
            file.readline()
        for line in file.read(most).splitlines():
            with suppress(ValueError, TypeError, AttributeError):
                letter = orjson.loads(line.partition(b',"document":')[0].removesuffix(b"}") + b"}")
                causes[_cause(str(letter.get("kind", "")), str(letter.get("error", "")))] += 1
    return few(causes)


def _cause(kind: str, error: str) -> str:
    first = "".join(character if character.isprintable() else " " for character in error.partition("\n")[0])
    text = first if kind in ("", "str") or first.startswith(kind) else f"{kind}: {first}"
    text = _DIGITS.sub("#", text)
    return text if len(text) <= _MAX_CAUSE else f"{text[:_MAX_CAUSE]}..."


def few(causes: Counter[str]) -> Counter[str]:
    """The most frequent causes; the others in one."""
    kept = Counter(dict(causes.most_common(MAX_CAUSES)))
    if others := causes.total() - kept.total():
        kept[OTHERS] += others
    return kept
