"""Names the files of a checkpoint. The names are part of the format on disk.

<checkpoints_local_dir>/job.json                                 the identity that all ranks share
<checkpoints_local_dir>/last_chunk/00000.txt
<checkpoints_local_dir>/00000/run.json, commits.jsonl, ...       rank 0
<checkpoints_local_dir>/retry-00001/00000/...                    rank 0's first retry of its dead
letters
<checkpoints_local_dir>/sample-00001/...                         the first ``run --sample``, with
ranks of its own
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint import checksummed_lines
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch

JOB = "job.json"
JOB_LOCK = "job.lock"
RUN = "run.json"
COMMITS = "commits.jsonl"
LOCK = "lock"
CACHE = "replay.sqlite3"
CACHE_LOGS = ("-wal", "-journal")
"""Endings that SQLite adds to a database's name for its logs."""
CACHE_FILES = (CACHE, *(CACHE + suffix for suffix in CACHE_LOGS))
DEAD_LETTERS = "dead_letters.jsonl"
SHARD = "shard.json"
"""The rank's input files and the number of skipped lines. Written when the input has ended."""
COLUMNS = "columns.arrow"
"""Types of the input's columns: a file of the job, and a copy of each rank for its mirror."""
KEPT_ANSWERS = "answers.jsonl"
"""Answers of committed documents, if the user keeps them."""
BATCHES = "batches.jsonl"
"""The rank's batches of requests at a provider, see ``batch_log``."""
BATCHES_FOLDER = "batches"
"""Their requests, until the answers are there."""
HISTORY = "history.jsonl"
"""Events of the rank's attempts, with their times. For people: recovery does not need the file."""
PAID = "paid"
"""Cost of the rank's attempts, written if the run has limits (see ``run_limits``)."""
FILES = (RUN, COMMITS, LOCK, DEAD_LETTERS, HISTORY, *CACHE_FILES)
"""Names in a rank's folder that must be files if they exist, besides journals."""
STAGING = "staging"
"""Finished files that wait for their upload to a remote folder."""
OUTPUT_STAGING = ".datatrove-ckpt-staging"
"""The hidden folder below a local output folder, and the prefix of probes below a remote one.

Readers skip it.
"""
OWNER = "datatrove-ckpt-owner-"
"""Part of the name of the file beside an output folder that names its owner."""
PUBLISHING = "publishing.jsonl"
"""Hashes of files that the rank may have published (see ``publish_intents``)."""
HOME = "home"
"""File below ``checkpoints_local_dir`` that holds where the run began.

The owner record of the output folder names this origin (see ``output/output_folder.py``).
"""
KEPT_INPUT = "input"
"""Folder below a run folder with rows that only the process had that began the run."""
BEGAN_IN = ".began_in"
"""File beside these rows with the path of their folder when the run began.

Documents have this path, wherever the run folder is now.
"""
RETRY_INPUT = "input.jsonl"
"""File in the folder of a retry: the dead letters that the retry processes."""
CHECKPOINT_LINES = (
    COMMITS,
    DEAD_LETTERS,
    KEPT_ANSWERS,
    HISTORY,
    PUBLISHING,
    RETRY_INPUT,
    BATCHES,
)
"""Files of JSON lines that are no journals."""
RECORDED = "recorded"
"""Folder below ``checkpoints_local_dir`` with recorded documents, for the replay check."""
MAX_RECORDED = 64
VOID = "void.json"
"""File in it that ends the recording of documents, with its cause."""
RETRIES = "retry-"
"""Prefix of the folders of retries below ``checkpoints_local_dir``."""
SAMPLES = "sample-"
"""Prefix of the folders of ``run --sample`` below ``checkpoints_local_dir``."""
SAMPLED = "sampled.json"
"""File in the folder of a sample: the run's documents that the sample has."""
TUNED = "tuned.json"
"""File in the folder of a sample of ``tune``: its settings, and how fast they are."""

# [0-9], because \d also matches the digits of other scripts.
_RANK = re.compile(r"[0-9]{5,}")
_JOURNAL = re.compile(r"chunk_([0-9]{5,18})\.jsonl")
# Not every name with an underscore, as for Spark and pyarrow: a file `_a.jsonl` would be lost.
_HIDDEN = re.compile(r"(?:^|/)(?:\.|_temporary(?=/|$))")
_NUMBER = re.compile(r"[0-9]{5,18}")


def is_input(name: str, pattern: str | None) -> bool:
    """Whether a listed file is input: no internal file, and neither the file nor a folder of it is
    hidden or Spark's ``_temporary``, unless the pattern names these. A staged file and an owner's
    record are internal.
    """
    is_internal = OUTPUT_STAGING in name or OWNER in name
    named = 0
    if pattern and has_magic(pattern):  # else it is how a name ends
        named = len(_HIDDEN.findall(pattern))
    return not is_internal and len(_HIDDEN.findall(name)) <= named


def rank_folder(root: Path, rank: int) -> Path:
    return root / f"{rank:05d}"


def is_rank(name: str) -> bool:
    return _RANK.fullmatch(name) is not None and name == f"{int(name):05d}"


def rank_numbers(root: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(root) if is_rank(name))  # noqa: PTH208 (speed)


class RankAddress(NamedTuple):
    """Names a rank's folder. ``retry``: folder of a retry, such as "retry-00001"; else ""."""

    retry: str
    rank: int

    @classmethod
    def of(cls, folder: Path | str) -> RankAddress:
        parents, _, name = str(folder).rstrip("/").rpartition("/")
        parent = parents.rpartition("/")[2]
        return cls(parent if is_retry(parent) else "", int(name))

    def __str__(self) -> str:
        return f"{self.retry}/{self.rank:05d}".lstrip("/")


def checkpoints_of(folder: Path) -> Path:
    root = folder.parent
    return root.parent if is_retry(root.name) else root


def rank_folders(root: Path) -> list[Path]:
    roots = [folder for folder in (root, *retry_folders(root)) if folder.is_dir()]
    return [rank_folder(folder, rank) for folder in roots for rank in rank_numbers(folder)]


def folders_of(root: Path, rank: int) -> list[Path]:
    return [rank_folder(folder, rank) for folder in (root, *retry_folders(root))]


def last_chunk_of(folder: Path) -> Path:
    return folder.parent / "last_chunk" / f"{folder.name}.txt"


def is_written_by_datatrove(last_chunk: Path) -> bool:
    """Whether datatrove's own runner wrote the file: unlike ours, it ends without a line break.

    A kill can leave datatrove's file empty, but not ours.
    """
    try:
        return last_chunk.is_file() and not last_chunk.read_bytes().endswith(b"\n")
    except OSError:
        return False


def journal_path(folder: Path, chunk_index: int) -> Path:
    return folder / journal_name(chunk_index)


def journal_name(chunk_index: int) -> str:
    return f"chunk_{chunk_index:05d}.jsonl"


def is_journal(name: str) -> bool:
    match = _JOURNAL.fullmatch(name)
    return match is not None and name == journal_name(int(match[1]))


def is_mirrored(name: str) -> bool:
    return is_journal(name) or name in (
        BATCHES,
        COLUMNS,
        COMMITS,
        DEAD_LETTERS,
        HISTORY,
        RETRY_INPUT,
        SHARD,
    )


class RankListing:
    """Lists a rank's folder in few system calls, because a run may have ten thousand ranks.

    A missing folder is empty.

    Raises:
        CheckpointCorrupt: a folder has the name of a file.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = str(folder)
        self.entries = {}
        with (
            checksummed_lines.explained("read", folder),
            suppress(FileNotFoundError),
            os.scandir(folder) as entries,
        ):
            self.entries = {entry.name: entry for entry in entries}
        self.journals = sorted(int(name[6:-6]) for name in self.entries if is_journal(name))
        for name in (*FILES, *map(journal_name, self.journals)):
            if name in self.entries and not self.entries[name].is_file():
                raise CheckpointCorrupt(
                    Path(self.path(name)),
                    " is not a file. Move it away, and restore the file from a copy.",
                )

    @property
    def is_finished(self) -> bool:
        """A complete rank has run.json, and neither lock, request cache nor journals."""
        return RUN in self.entries and not {LOCK, CACHE} & self.entries.keys() and not self.journals

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _stats(self, names: Iterable[str]) -> Iterator[os.stat_result]:
        for name in names:
            with suppress(KeyError, FileNotFoundError):
                yield self.entries[name].stat()

    def size(self, *names: str) -> int:
        return sum(status.st_size for status in self._stats(names))

    def last_write(self, *names: str) -> float:
        return max((status.st_mtime for status in self._stats(names)), default=0.0)


def journal_indices(folder: Path) -> list[int]:
    return RankListing(folder).journals


def is_finished(folder: Path) -> bool:
    return RankListing(folder).is_finished


def retry_folder(root: Path, number: int) -> Path:
    return root / f"retry-{number:05d}"


def retry_folders(root: Path) -> list[Path]:
    return _numbered_folders(root, RETRIES)


def sample_folders(root: Path) -> list[Path]:
    return _numbered_folders(root, SAMPLES)


def _numbered_folders(root: Path, prefix: str) -> list[Path]:
    # Each rank calls this, so thousands of names may take a millisecond.
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(root)  # noqa: PTH208 (speed)
        numbered = (name for name in names if name.startswith(prefix))
        return sorted(root / name for name in numbered if _NUMBER.fullmatch(name, len(prefix)))
    return []


def is_retry(name: str) -> bool:
    return name.startswith(RETRIES) and _NUMBER.fullmatch(name, len(RETRIES)) is not None


def refuse_missing_run_json(folder: Path) -> None:
    """Refuses a folder that holds a checkpoint without ``run.json``, or one of datatrove's runner.

    Raises:
        CheckpointMismatch: the message names the setting that continues datatrove's run.
    """
    if (folder / RUN).exists():
        return
    if is_written_by_datatrove(last_chunk_of(folder)):
        raise CheckpointMismatch(
            f"{folder.parent} is a checkpoint of datatrove's own InferenceRunner, which wrote "
            f"{last_chunk_of(folder)}. {advice_to_continue_datatrove(folder.parent)}"
        )
    listing = RankListing(folder)
    journals = [journal_name(index) for index in listing.journals[:3]]
    foreign = [
        name for name in (COMMITS, CACHE, DEAD_LETTERS) if name in listing.entries
    ] + journals
    if foreign:
        raise CheckpointMismatch(
            f"{folder} holds {', '.join(foreign)} but no {RUN}. If datatrove's own InferenceRunner "
            f"made it: {advice_to_continue_datatrove(folder.parent)} If {RUN} is lost: "
            f"{checksummed_lines.RESTORE}start this task over: move the folder away."
        )


def advice_to_continue_datatrove(checkpoints: Path | str) -> str:
    return (
        "To continue that run, stop it, choose other folders, and set finished_from: "
        f"[{checkpoints}, OUTPUT]. To start over, leave finished_from out."
    )
