"""RankSummary: a rank's files on disk, or in a copy of its mirror, read once and unchanged.

docs/internals/invariants.md explains the order of reading.

There may be ten thousand ranks, so summaries are dropped after use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from pathlib import Path
from typing import Literal

import orjson

from datatrove_ckpt.checkpoint import identity, layout, run_limits
from datatrove_ckpt.checkpoint.checksummed_lines import (
    RESTORE,
    WITHOUT_SHARD,
    Json,
    explained,
    is_count,
    read_shard,
    size_of,
)
from datatrove_ckpt.checkpoint.commits import (
    MAX_GAP,
    Commit,
    CommitsDamaged,
    count_unbroken,
    read_commits,
    read_last_chunk,
    scan_commits,
)
from datatrove_ckpt.checkpoint.history import History, read_history
from datatrove_ckpt.checkpoint.journal import read_finished
from datatrove_ckpt.checkpoint.lock import lock_holder
from datatrove_ckpt.checkpoint.recovery import uncommitted_journals
from datatrove_ckpt.common.counts import CompletedWork, DocumentCounts, RunNumbers
from datatrove_ckpt.common.formatting import as_line, cut, number_range
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointError, ConfigError

OTHERS = "others"
"""The causes of dead letters that are too many to be named, in one."""


class Include(Flag):
    """The data to read besides the sums over commits and the owner.

    SETTINGS    all of run.json, with hashes in the place of secrets
    HISTORY     the attempts and the last minutes
    JOURNALS    the number of documents in journals
    COMMITS     the commits; with them, every line of commits and journals is checked
    LETTERS     the causes of dead letters
    """

    SETTINGS = auto()
    HISTORY = auto()
    JOURNALS = auto()
    COMMITS = auto()
    LETTERS = auto()


CHECKED = Include.SETTINGS | Include.JOURNALS | Include.COMMITS
"""What commands read that look for damage, or change something."""


@dataclass(slots=True)
class RankSummary:
    """One rank. A damaged rank has only ``folder``, ``holder``, and ``run`` if it can be read.

    Attributes:
        run: the content of ``run.json``; without ``Include.SETTINGS`` only the owner.
        is_finished: there is no lock file, request cache or journal: a run removes them at its end.
            ``repair`` leaves the lock file, which marks the rank as unfinished.
        journals: the documents in each journal; None: too large to be counted, and the history
            knows their sum.
        written: Unix seconds of the last write to commits or journals; 0.0: complete, or none.
    """

    folder: Path
    run: Json = field(default_factory=dict)
    holder: Json | None = None
    is_finished: bool = False
    history: History = field(default_factory=History)
    paid: run_limits.RunTotals = run_limits.NO_TOTALS
    journals: dict[int, DocumentCounts] | None = field(default_factory=dict)
    open_chunks: list[int] = field(default_factory=list)
    committed: RunNumbers = field(default_factory=RunNumbers)
    last_commit: float | None = None
    commits: dict[int, Commit] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    written: float = 0.0
    damage: CheckpointError | None = None

    @property
    def key(self) -> layout.RankAddress:
        return layout.RankAddress.of(self.folder)

    @property
    def root(self) -> str:
        return self.key.retry

    @property
    def number(self) -> int:
        return self.key.rank

    @property
    def place(self) -> str:
        return describe_chunk(*self.key)

    @property
    def commits_file(self) -> Path:
        return self.folder / layout.COMMITS

    @property
    def dead_letters_file(self) -> Path:
        return self.folder / layout.DEAD_LETTERS

    @property
    def last_chunk_file(self) -> Path:
        return layout.last_chunk_of(self.folder)

    @property
    def settings(self) -> Json:
        return identity.settings_in(self.run)

    @property
    def state(self) -> Literal["running", "finished", "unfinished", "damaged"]:
        if self.damage is not None:
            return "damaged"
        if self.holder:
            return "running"
        if self.is_finished:
            return "finished"
        return "unfinished"

    @property
    def owners(self) -> int:
        return int(self.run.get("owner", {}).get("fence", 0))

    def numbers(self) -> RunNumbers:
        """Returns the sums over all attempts. They do not show whether the newest attempt was
        killed.
        """
        attempts = self.history.attempts
        killed = [attempt for attempt in attempts if attempt.without_a_word]
        numbers = replace(
            self.committed,
            unfinished=self.unfinished,
            unfinished_chunks=len(self.open_chunks),
            exact=self.journals is not None or self.has_said_its_end,
            lost_in_flight=sum(attempt.in_flight or 0 for attempt in killed),
            number_of_attempts=len(attempts) or self.owners,
            killed=len(killed),
            uncertain=sum(
                not attempt.has_sums or attempt.cut_off > 0
                for attempt in attempts
                if attempt.without_a_word or attempt.why in ("stopped", "error")
            ),
            dead_letters=self.causes,
        )
        last = self.history.last
        if last is not None:
            numbers.work = self.paid.at_least_in(last.total)
            numbers.skipped = last.skipped
            together = sum(attempt.last_seen - attempt.started for attempt in attempts)
            numbers.seconds = max(numbers.seconds, last.seconds.total, together)
            if not all(attempt.has_sums for attempt in attempts):
                # The last minute before a kill, or of a running rank, is missing from the history.
                # But each request of a finished document was sent, unless it was cached.
                sent = numbers.done.requests - last.total.cached
                numbers.work.sent = max(numbers.work.sent, sent)
        return numbers

    @property
    def open_journals(self) -> dict[int, DocumentCounts]:
        journals = self.journals or {}
        return {index: journals[index] for index in self.open_chunks if index in journals}

    @property
    def unfinished(self) -> DocumentCounts:
        if self.journals is None:
            assert self.history.last is not None
            return self.history.last.documents - self.committed.counts
        return sum(self.open_journals.values(), DocumentCounts())

    @property
    def has_said_its_end(self) -> bool:
        """Whether the last progress line covers all documents of the newest attempt.

        ``repair`` is also an owner, and writes no history.
        """
        attempts = self.history.attempts
        return bool(attempts) and attempts[-1].has_sums and attempts[-1].number == self.owners

    def dead_letters(self, start: int, end: int) -> Iterator[bytes]:
        if end <= start or not self.dead_letters_file.exists():
            return
        with explained("read", self.dead_letters_file), self.dead_letters_file.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(1 << 20, end - start))):
                yield block
                start += len(block)

    def count_dead_letters(self, start: int, end: int) -> int:
        return sum(block.count(b"\n") for block in self.dead_letters(start, end))


def describe_chunk(retry: str, rank: int | None, chunk_index: int | None = None) -> str:
    parts = [retry] if retry else []
    parts += [f"task {rank}"] if rank is not None else []
    parts += [f"chunk {chunk_index}"] if chunk_index is not None else []
    return ", ".join(parts)


# all ranks ---------------------------------------------------------------------------------------


_GIVE = "Give the run_folder, or that of checkpoints_local_dir."


def find_ranks(checkpoints: Path) -> list[Path]:
    """Returns the ranks' folders, retries last.

    Raises:
        ConfigError: there is no rank.
    """
    with explained("read", checkpoints):
        if not checkpoints.exists():
            raise ConfigError(f"{checkpoints} does not exist. {_GIVE}")
        folders = layout.rank_folders(checkpoints)
    if not folders and layout.sample_folders(checkpoints):
        raise ConfigError(
            f"{checkpoints} holds only samples (run --sample). Start the run without --sample."
        )
    if not folders:
        raise ConfigError(f"{checkpoints} contains no checkpoint: no folder like 00000. {_GIVE}")
    return folders


def read_ranks(checkpoints: Path, want: Include) -> Iterator[RankSummary]:
    for folder in find_ranks(checkpoints):
        yield read_rank(folder, want)


@dataclass(slots=True)
class JobTotals:
    """Sums over ranks and then retries: each document counts once.

    Attributes:
        known: ranks with documents. If a rank cannot be read, its retry counts as if it had read
            the documents first.
        numbers: sums; numbers of requests only if histories were read.
        with_input: how many ranks had an input, as far as histories were read and know it.
    """

    ranks: int = 0
    parts: int = 0
    known: set[int] = field(default_factory=set)
    retried: list[Commit] = field(default_factory=list)
    numbers: RunNumbers = field(default_factory=RunNumbers)
    with_input: int = 0

    @property
    def counts(self) -> DocumentCounts:
        return self.numbers.counts

    def add_rank(self, rank: RankSummary) -> None:
        self.retried += rank.commits.values() if rank.root else ()
        self.add(rank.root, rank.number, rank.numbers())
        if rank.history.last is not None and not rank.root:
            self.with_input = max(self.with_input, rank.history.last.position.tasks or 0)

    def add(self, retry: str, number: int, numbers: RunNumbers) -> None:
        self.parts += 1
        self.ranks += not retry
        read = numbers.counts.read
        if number in self.known:
            numbers = numbers.of_retry()
        if read:
            self.known.add(number)
        self.numbers += numbers


# one rank ----------------------------------------------------------------------------------------


def read_rank(folder: Path, want: Include, max_bytes: int | None = None) -> RankSummary:
    """Reads one rank. Damage is an attribute, and no error.

    Args:
        max_bytes: limit for the journals, and for the dead letters. If the journals are larger,
            the history gives the number of their documents; the last dead letters are read.
    """
    rank = RankSummary(folder)
    try:
        _read(rank, want, max_bytes)
    except CheckpointError as error:  # the data read before is unreliable
        return RankSummary(folder, rank.run, rank.holder, damage=error)
    return rank


def _read(rank: RankSummary, want: Include, max_bytes: int | None) -> None:
    listing = layout.RankListing(rank.folder)
    if layout.LOCK in listing.entries:
        rank.holder = lock_holder(listing.path(layout.LOCK))
    if layout.RUN in listing.entries:
        run = identity.run_with_secrets(listing.path(layout.RUN))
        rank.run = {"owner": run.get("owner", {})}
        if Include.SETTINGS in want:
            rank.run = identity.run_without_secrets(run)
    is_finished = listing.is_finished
    if not rank.run and Include.JOURNALS in want:
        layout.refuse_missing_run_json(rank.folder)
    expected = ExpectedCommits.read(rank.folder, is_finished, rank.run)
    if Include.HISTORY in want and layout.HISTORY in listing.entries:
        rank.history = read_history(listing.path(layout.HISTORY))
    if Include.HISTORY in want and layout.PAID in listing.entries:
        rank.paid = run_limits.read_paid(rank.folder / layout.PAID)
    if Include.JOURNALS in want:
        rank.journals = _read_journals(rank, listing, max_bytes)
    # Whatever the listing says: the files that were read before promise them.
    commits = read_commits(rank.commits_file)
    for commit in commits.values():
        rank.committed.counts += commit.counts
        rank.committed.files += len(commit.files)
        rank.committed.rows += sum(file.rows for file in commit.files)
        rank.committed.seconds = commit.seconds.total
        rank.last_commit = commit.at or None
    rank.committed.chunks = len(commits)
    if Include.COMMITS in want:
        rank.commits = commits
        if rank.journals:  # refuses a journal whose number is far beyond all chunks
            list(uncommitted_journals(rank.folder, commits, 0))
    expected.check(commits)
    rank.open_chunks = [index for index in listing.journals if index not in commits]
    rank.is_finished = is_finished
    if not is_finished:
        rank.written = listing.last_write(
            layout.COMMITS, *map(layout.journal_name, listing.journals)
        )
    if Include.LETTERS in want and rank.committed.counts.dead:
        rank.causes = _causes(
            listing.path(layout.DEAD_LETTERS),
            listing.size(layout.DEAD_LETTERS),
            max_bytes or 1 << 13,
        )


def _read_journals(
    rank: RankSummary,
    listing: layout.RankListing,
    max_bytes: int | None,
) -> dict[int, DocumentCounts] | None:
    if max_bytes is not None and rank.history.last is not None and listing.journals:
        too_large = listing.size(*map(layout.journal_name, listing.journals)) > max_bytes
        if too_large or rank.has_said_its_end:
            return None
    counted = {}
    for index in listing.journals:
        documents = read_finished(Path(listing.path(layout.journal_name(index))), {})
        counted[index] = CompletedWork.of(
            [document.took for _, document in documents if document is not None]
        ).counts
    return counted


# dead letters ------------------------------------------------------------------------------------


def _causes(path: str, size: int, max_bytes: int) -> Counter[str]:
    causes: Counter[str] = Counter()
    with explained("read", path), suppress(FileNotFoundError), open(path, "rb") as file:  # noqa: PTH123 (speed)
        if size > max_bytes:
            file.seek(size - max_bytes)
            file.readline()
        for line in file.read(max_bytes).splitlines():
            with suppress(ValueError, TypeError, AttributeError):
                dead_letter = orjson.loads(
                    line.partition(b',"document":')[0].removesuffix(b"}") + b"}"
                )
                error, _, _ = str(dead_letter.get("error", "")).partition("\n")
                # As much as is kept of a server's answer.
                causes[cut(as_line(error), 2000)] += 1
    return merged_causes(causes)


def merged_causes(causes: Mapping[str, int]) -> Counter[str]:
    texts: dict[str, str] = {}
    merged = Counter[str]()
    for text, count in Counter(causes).most_common():
        numberless = re.sub(r"(?<!HTTP )(?<!\d)\d+", "#", text)
        merged[texts.setdefault(numberless, text)] += count
    return most_common_causes(merged)


def most_common_causes(causes: Mapping[str, int], limit: int = 20) -> Counter[str]:
    named = Counter(causes)
    number_of_others = named.pop(OTHERS, 0)
    frequent = Counter(dict(named.most_common(limit)))
    number_of_others += named.total() - frequent.total()
    if number_of_others:
        frequent[OTHERS] = number_of_others
    return frequent


# lost commits ------------------------------------------------------------------------------------

# Checks that all commits of a rank are still there. Several files hold their number:
#
#     run.json        how many there were when the last owner started
#     last_chunk      all chunks up to this chunk were committed
#     shard.json      how many documents the input had; a finished rank has committed all of them
#
# A missing or old file proves less, but nothing wrong.


_START_OVER = f"{RESTORE}start this task over: remove its folder and its output."


@dataclass(frozen=True)
class ExpectedCommits:
    """The numbers of commits by other files, which are read first, because a run adds commits."""

    folder: Path
    known: int = 0
    last: int | None = None
    documents: int | None = None

    @classmethod
    def read(cls, folder: Path, finished: bool, run: Json) -> ExpectedCommits:
        """Reads the other files.

        Raises:
            CheckpointCorrupt: ``shard.json`` of a finished rank is missing or cannot be read.
        """
        commits = run.get("owner", {}).get("commits", 0)
        # It may be that of a removed folder.
        last = read_last_chunk(layout.last_chunk_of(folder)) if run else None
        documents = None
        if finished:
            path = folder / layout.SHARD
            if not path.exists():
                raise CheckpointCorrupt(path, f" is missing. {WITHOUT_SHARD}")
            documents = read_shard(path).get("documents")
        return cls(folder, commits, last, documents if is_count(documents) else None)

    def check(self, commits: Mapping[int, Commit]) -> None:
        path = self.folder / layout.COMMITS
        number = len(commits)
        unbroken = count_unbroken(commits)
        read = sum(commit.counts.read for commit in commits.values())
        if path.exists():
            listed = f"{path} holds {number} commits"
        else:
            listed = f"{path} is missing"
        last = max(commits, default=0)
        gap = last - number
        lost = ""
        if number < self.known:
            lost = f"but there were {self.known} when the task was last started."
        elif self.last is not None and unbroken <= self.last:
            lost = (
                f"none of them for chunk {unbroken}, but by {layout.last_chunk_of(self.folder)} "
                f"all chunks up to {self.last} are done."
            )
        elif self.documents is not None and read < self.documents:
            lost = (
                f"for {read} documents, but {self.folder / layout.SHARD} says that the finished "
                f"task read {self.documents}."
            )
        elif gap > MAX_GAP:
            lost = f"one of them for chunk {last}, but {gap} chunks before it are not done."
        if lost:
            raise CommitsDamaged(path, f"{listed}, {lost}")


def scan_complete_commits(folder: Path, finished: bool, run: Json) -> tuple[dict[int, Commit], int]:
    """Does ``scan_commits`` for a rank that resumes. Changes nothing."""
    expected = ExpectedCommits.read(folder, finished, run)
    commits, end = scan_commits(folder / layout.COMMITS)
    expected.check(commits)
    for kind, problem, _ in misplaced(commits):
        if kind != "gap":
            raise CheckpointCorrupt(folder / layout.COMMITS, f": {problem}. {_START_OVER}")
    dead_letters = folder / layout.DEAD_LETTERS
    needed = max((commit.dead_letters_size for commit in commits.values()), default=0)
    size = size_of(dead_letters)
    if size < needed:
        raise CheckpointCorrupt(
            dead_letters,
            f" has {size} bytes instead of {needed}: dead letters are lost. {_START_OVER}",
        )
    return commits, end


def misplaced(commits: Mapping[int, Commit]) -> Iterator[tuple[str, str, int | None]]:
    """Yields where commits do not follow each other: kind, description, and a chunk.

    Kinds: ``overlap`` and ``lost`` are damage; a ``gap`` are chunks that are not committed yet, or
    no more.
    """
    chunk_index = ordinal = 0
    for index, commit in sorted(commits.items()):
        first = commit.first_ordinal
        if first < ordinal:
            twice = number_range(first, min(ordinal, commit.next_ordinal))
            yield "overlap", f"an earlier commit also covers documents {twice}", index
        elif index == chunk_index and first > ordinal:
            yield "lost", f"no commit covers documents {number_range(ordinal, first)}", None
        elif index > chunk_index:
            chunks = number_range(chunk_index, index)
            documents = number_range(ordinal, first)
            yield "gap", f"no commit covers documents {documents} (chunks {chunks})", chunk_index
        chunk_index = index + 1
        ordinal = commit.next_ordinal
