"""What a checkpoint has kept: the content of its files, and how many answers, seen from outside
while its run is on.

An answer is written down a moment after it came. So a test that says exactly what a kill -9 may
cost waits until those are kept that are not to be lost.
"""

import shutil
import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

from datatrove_ckpt.checkpoint.checksummed_lines import (
    checksummed_json,
    read_checksummed_json,
    read_lines,
)
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from tests.yaml_jobs import read_rows


def content_of(path):
    """Of ``run.json``, ``job.json`` or ``shard.json``, without its checksum."""
    return read_checksummed_json(path.read_bytes(), ())


def edit(path, **changes):
    """Changes such a file as a program does: its checksum is right."""
    path.write_bytes(checksummed_json(content_of(path) | changes))


def until_kept(checkpoints, number):
    """Waits until there are so many answers, of all ranks."""
    deadline = time.monotonic() + 300
    while (kept := answers_kept(checkpoints)) < number:
        assert time.monotonic() < deadline, f"{kept} of {number} answers are kept"
        time.sleep(0.01)


def answers_kept(checkpoints):
    return sum(_kept(rank) for rank in checkpoints.glob("[0-9]*"))


def results_kept(checkpoints):
    """Returns for each rank the ordinals of its finished documents, and the saved results, each
    with its ordinal, of the others.
    """
    found = {}
    for rank in checkpoints.glob("[0-9]*"):
        cached, finished, commits = read_rank(rank)
        done = {*finished, *committed(commits)}
        left = [(ordinal, result) for ordinal, result in cached if ordinal not in done]
        found[int(rank.name)] = done, left
    return found


def _kept(rank):
    cached, finished, commits = read_rank(rank)
    known = committed(commits)
    return (
        sum(commit.counts.requests for commit in commits)
        + sum(requests for ordinal, requests in finished.items() if ordinal not in known)
        + sum(ordinal not in known and ordinal not in finished for ordinal, _ in cached)
    )


def read_rank(rank):
    # In the order in which an answer moves on, so that none is missed; those seen twice are told by
    # their ordinal.
    cached = _cached(rank / "replay.sqlite3")
    finished = {}
    for path in rank.glob("chunk_*.jsonl"):
        with suppress(FileNotFoundError):  # committed meanwhile
            for line in read_lines(path):
                document = FinishedDocument.from_body(line.body)
                finished[document.ordinal] = document.requests
    return cached, finished, read_commits(rank / "commits.jsonl").values()


def committed(commits):
    return {
        ordinal
        for commit in commits
        for ordinal in range(commit.first_ordinal, commit.next_ordinal)
    }


def _cached(path):
    """The ordinal and the result of each answer. Of a copy: the run has the file for itself."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in path.parent.glob(f"{path.name}*"):
                shutil.copy(name, folder)
            with closing(sqlite3.connect(Path(folder, path.name))) as connection:
                return connection.execute("SELECT ordinal, result FROM request_cache").fetchall()
        except (FileNotFoundError, sqlite3.DatabaseError):
            # Not yet there, or copied while it changed.
            return []


def commits(folder, rank=0):
    return read_rows(folder / "checkpoints" / f"{rank:05d}" / "commits.jsonl")
