"""Folders of ranks as runs leave them, made without a run: for ``status`` and the commands that
read many ranks.
"""

import os
import socket

import orjson

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, checksummed_json
from datatrove_ckpt.checkpoint.commits import Commit, OutputFile
from datatrove_ckpt.checkpoint.fence import new_owner
from datatrove_ckpt.checkpoint.history import AttemptEnd, AttemptStart, ProgressRecord
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.common.counts import DocumentCounts, InputPosition, Seconds, WorkCounts
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_state import read_run_state

ELSEWHERE = "node7"
"""A host that is not this one: nobody here can see its locks."""
HERE = socket.gethostname()
REQUESTS, PROMPT, COMPLETION = 2, 100, 50
"""Of each document."""


def counts(documents, dead=0):
    work = documents * REQUESTS, documents * PROMPT, documents * COMPLETION
    return DocumentCounts(documents, documents - dead, 0, dead, *work)


def work(documents, **more):
    """What it took to finish so many documents."""
    tokens = {"prompt_tokens": documents * PROMPT, "completion_tokens": documents * COMPLETION}
    requests = documents * REQUESTS
    return WorkCounts(
        **{"documents": documents, "requests": requests, "sent": requests, **tokens, **more}
    )


def minute(at, documents, total=None, attempt=1, **changes):
    """A minute line. The input is counted in rows, a document each."""
    position = InputPosition(documents, total, "rows" if total is not None else None)
    fields = {
        "documents": counts(documents),
        "chunks": 0,
        "total": work(documents),
        "own": work(documents),
        "in_flight": 4,
        "waiting": 2,
        "in_work": 6,
        "position": position,
        "seconds": Seconds(1, 1),
    }
    return ProgressRecord(at=at, attempt=attempt, **fields | changes)


def minutes(start, number, per_minute, total=None):
    """Minute lines of a rank that works at one speed, from its start on."""
    return [
        minute(start + 60 * n, per_minute * n, total, seconds=Seconds(60 * n, 60 * n))
        for n in range(number + 1)
    ]


def start(at, attempt=1, host=ELSEWHERE, job=None):
    return AttemptStart(at=at, attempt=attempt, host=host, pid=42, job=job, v="0.2.0")


def stopped(at, attempt=1):
    return AttemptEnd(at=at, attempt=attempt, why="stopped", what="SIGTERM")


def done(at, attempt=1):
    return AttemptEnd(at=at, attempt=attempt, why="done")


def failed(at, what, attempt=1):
    return AttemptEnd(at=at, attempt=attempt, why="error", what=what)


def commit(index, per_chunk, dead=0, letters=0):
    return Commit(
        index,
        index * per_chunk,
        counts(per_chunk, dead),
        [OutputFile(f"00000_chunk_{index:05d}.jsonl", 1000, "0" * 32)],
        {"file": "a.jsonl", "at": [index]},
        "",
        letters,
    )


def write_rank(
    root,
    number=0,
    history=(),
    *,
    chunks=0,
    per_chunk=10,
    journal=0,
    finished=False,
    letters=(),
    attempts=1,
    **settings,
):
    """Writes the folder of one rank.

    Args:
        chunks: number of committed chunks.
        journal: number of documents in the journal of the chunk after them.
        letters: kind and error of each dead letter, all of them of the last chunk.
        attempts: number of starts.
    """
    folder = layout.rank_folder(root, number)
    folder.mkdir(parents=True)
    owner = new_owner(attempts, {}, 0) | {"host": ELSEWHERE, "pid": 42, "nonce": f"{number:016x}"}
    run = {"format": FORMAT, "records_per_chunk": per_chunk, **settings, "owner": owner}
    (folder / layout.RUN).write_bytes(checksummed_json(run))
    dead = [
        orjson.dumps({"kind": kind, "error": error, "document": {}}) + b"\n"
        for kind, error in letters
    ]
    size = len(b"".join(dead))
    lines = [commit(index, per_chunk) for index in range(chunks - 1)]
    lines += [commit(chunks - 1, per_chunk, len(dead), size)] if chunks else []
    (folder / layout.COMMITS).write_bytes(b"".join(add_checksum(line.to_json()) for line in lines))
    if dead:
        (folder / layout.DEAD_LETTERS).write_bytes(b"".join(dead))
    if journal:
        documents = [
            FinishedDocument(
                chunks * per_chunk + index,
                "written",
                f"{index}",
                b"{}",
                REQUESTS,
                PROMPT,
                COMPLETION,
            )
            for index in range(journal)
        ]
        layout.journal_path(folder, chunks).write_bytes(
            b"".join(one.to_line() for one in documents)
        )
    records = list(history)
    if records:
        (folder / layout.HISTORY).write_bytes(b"".join(record.to_line() for record in records))
    if finished:
        finish(folder)
    else:
        (folder / layout.LOCK).write_bytes(b"{}")
    return folder


def finish(folder):
    """Leaves the folder as a finished rank does."""
    (folder / layout.SHARD).write_bytes(b"{}")
    (folder / layout.LOCK).unlink(missing_ok=True)


def place_at(checkpoints):
    """The place that a user names by its folder."""
    return RunLocation(str(checkpoints), checkpoints, [str(checkpoints)])


def together(folder):
    """The numbers of all tasks and attempts."""
    return read_run_state(place_at(folder / "checkpoints")).together


def grow_old(folder, seconds):
    """As if so much time had passed since what is in the folder was written."""
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))
