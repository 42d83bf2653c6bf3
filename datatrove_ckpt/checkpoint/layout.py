"""The names of a checkpoint's files. They are part of the format on disk: older and newer versions read them.

<checkpoints_local_dir>/job.json                                 the identity that all ranks share
<checkpoints_local_dir>/last_chunk/00000.txt
<checkpoints_local_dir>/00000/run.json, commits.jsonl, ...       rank 0
<checkpoints_local_dir>/retry-00001/00000/...                    rank 0's first retry of its dead letters
"""

from __future__ import annotations

import re
from pathlib import Path

JOB = "job.json"
JOB_LOCK = "job.lock"
RUN = "run.json"
COMMITS = "commits.jsonl"
LOCK = "lock"
CACHE = "replay.sqlite3"
DEAD_LETTERS = "dead_letters.jsonl"
STAGING = "staging"
"""Finished files that wait for their upload to a remote folder."""
RETRY_INPUT = "input.jsonl"
"""In the folder of a retry: the dead letters that it processes."""
RETRIES = "retry-*"
"""Pattern of the folders of retries, below ``checkpoints_local_dir``."""

_RANK = re.compile(r"\d{5,}")
_JOURNAL = re.compile(r"chunk_(\d{5,})\.jsonl")
_RETRY = re.compile(r"retry-(\d{5,})")


def rank_folder(root: Path, rank: int) -> Path:
    """The folder of one rank below ``checkpoints_local_dir``, or below the folder of a retry."""
    return root / f"{rank:05d}"


def rank_numbers(root: Path) -> list[int]:
    """The ranks that have a folder below ``checkpoints_local_dir`` or below a retry's folder, in ascending order."""
    return sorted(int(path.name) for path in root.iterdir() if _RANK.fullmatch(path.name))


def last_chunk_file(root: Path, rank: int) -> Path:
    """The file that shows people and other tools the rank's progress."""
    return root / "last_chunk" / f"{rank:05d}.txt"


def journal_path(folder: Path, chunk_index: int) -> Path:
    """The journal of a chunk in a rank's folder."""
    return folder / f"chunk_{chunk_index:05d}.jsonl"


def journal_indices(folder: Path) -> list[int]:
    """The chunks that have a journal in a rank's folder, in ascending order."""
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _JOURNAL.fullmatch(path.name)))


def is_finished(folder: Path) -> bool:
    """Whether the rank is completed: then it has removed its lock and its request cache, and kept run.json."""
    return (folder / RUN).exists() and not (folder / LOCK).exists() and not (folder / CACHE).exists()


def retry_folder(root: Path, number: int) -> Path:
    """The folder of the ``number``-th retry of dead letters, counted from 1."""
    return root / f"retry-{number:05d}"


def retry_number(name: str) -> int | None:
    """Returns the number of a retry from the name of its folder; None if the folder is not a retry's."""
    match = _RETRY.fullmatch(name)
    return int(match[1]) if match else None
