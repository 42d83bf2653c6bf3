"""``job.json``: the identity that all ranks of a job share.

The ranks' ``run.json`` files are the truth. ``job.json`` records that they were compared, so that a
starting rank reads one file instead of a thousand. A rank that finds no matching ``job.json`` takes
``job.lock``, compares itself with all other ranks, replaces ``job.json``, and holds the lock until
its ``run.json`` is written. After a crash in between, the next rank that differs compares again.

A rank is compared if it holds work, or if the process that wrote its ``run.json`` still has its
lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import (
    OUTPUT_FOLDER,
    Change,
    RunIdentity,
    compare,
    describe_alike,
    holds_work,
    new_records,
    read_run,
    records,
    refusal,
    run_with_secrets,
    stamped,
    without_its_secrets,
)
from datatrove_ckpt.checkpoint.layout import (
    JOB,
    JOB_LOCK,
    LOCK,
    RUN,
    is_finished,
    rank_folder,
    rank_numbers,
    retry_folders,
)
from datatrove_ckpt.checkpoint.lines import Json, sealed_json
from datatrove_ckpt.errors import CheckpointError, CheckpointLocked

_GUARD_SECONDS = 60.0
_POLL_SECONDS = 0.02


@dataclass
class JobChanges:
    """How a job differs from its ranks.

    Attributes:
        changes: each difference once.
        ranks: the ranks that differ, in ascending order.
        empty: ranks that differ and hold no work, so that they may start over with the new
            settings.
    """

    changes: list[Change] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)

    @property
    def is_layout(self) -> bool:
        return any(change.is_layout for change in self.changes)

    def add(self, rank: int, changes: Iterable[Change]) -> None:
        self.ranks.append(rank)
        self.changes += [change for change in changes if change not in self.changes]

    def join(self, other: JobChanges) -> None:
        self.ranks = sorted([*self.ranks, *other.ranks])
        self.changes += [change for change in other.changes if change not in self.changes]
        self.empty += other.empty


class KeptRun(NamedTuple):
    """A rank's ``run.json``, and its state: a rank with work, or at work, is bound to its run."""

    run: Json
    holds_work: Callable[[], bool]
    is_finished: Callable[[], bool]
    is_live: Callable[[], bool]


@contextmanager
def join_job(
    root: Path,
    rank: int,
    identity: RunIdentity,
    accept_changes: bool,
    check_output: Callable[[], None],
) -> Iterator[None]:
    """Compares a starting rank with the other ranks of its job. The block writes ``run.json``.

    Args:
        root: ``checkpoints_local_dir``.
        check_output: called before ``job.json`` names another output folder; its error refuses the
            rank.

    Raises:
        CheckpointMismatch: another rank belongs to another run; the message names each field with
            both values.
        CheckpointLocked: another process has kept ``job.lock`` for a minute.
    """
    guard = None if _is_current(root, identity) else _guard(root, identity)
    try:
        if guard is not None and not _is_current(root, identity):
            content = _next_job(root, rank, identity, accept_changes)
            if _read(root).get(OUTPUT_FOLDER) != identity.fields.get(OUTPUT_FOLDER):
                check_output()
            files.disk.replace(root / JOB, content)
        yield
    finally:
        if guard is not None:
            guard.release(remove=True)
    # Another job started at the same instant.
    if changes := compare(_read(root), identity, with_output=True):
        raise _refusal(root, JobChanges(changes, [rank]))


def recorded_output(root: Path, runs: Iterable[Json]) -> str | None:
    """Returns the output folder of the last start, which finished ranks may not name.

    Args:
        runs: the content of each ``run.json``, for a folder without ``job.json``.
    """
    contents = list(runs)
    with suppress(CheckpointError):  # ``verify`` reports damage elsewhere
        contents.insert(0, _read(root))
    folders = (content.get(OUTPUT_FOLDER) for content in contents)
    return next((str(folder) for folder in folders if folder), None)


def note_output(root: Path, folder: str) -> None:
    """Writes the output folder into ``job.json``. No running rank may write elsewhere.

    Raises:
        CheckpointError: ``job.json`` is damaged, or cannot be written.
    """
    if _read(root).get(OUTPUT_FOLDER, folder) == folder:
        return
    with suppress(CheckpointLocked):  # a rank that starts writes it
        guard = files.Lock(root / JOB_LOCK)
        try:
            job = _read(root)  # a rank may have written it since
            files.disk.replace(root / JOB, sealed_json(stamped({**job, OUTPUT_FOLDER: folder})))
        finally:
            guard.release(remove=True)


def compare_job(
    root: Path,
    identity: RunIdentity,
    ranks: Collection[int] | None = None,
    only_tasks: bool = False,
) -> JobChanges:
    """Compares a job that is about to start with its ranks, finished ones included. Changes
    nothing.

    Args:
        ranks: the ranks to compare if ``job.json`` agrees with the job; None: all that have a
            folder.
        only_tasks: see ``compare_kept``.
    """
    job = _read(root)
    if ranks is None or not job or compare(job, identity):
        ranks = rank_numbers(root) if root.exists() else []
    return _compare_ranks(root, ranks, identity, only_tasks)


def refuse_other_tasks(root: Path, identity: RunIdentity) -> None:
    """Raises:
    CheckpointMismatch: the ranks have another number of tasks; with both numbers, and the way out.
    """
    found = compare_job(root, identity, only_tasks=True)
    if found.changes:
        what = f"The checkpoints in {root} ({name_tasks(found.ranks)}) were"
        raise refusal(what, found.changes)


def name_tasks(ranks: list[int]) -> str:
    noun = "task" if len(ranks) == 1 else "tasks"
    shown = f"{noun} {', '.join(map(str, ranks[:5]))}"
    if len(ranks) <= 5:
        return shown
    return f"{shown}, ... ({len(ranks)} in all)"


def recorded_settings(root: Path) -> Json:
    """Returns the settings of a folder's run; empty if no undamaged file has them."""
    ranks = rank_numbers(root) if root.is_dir() else []
    for path in [root / JOB, *(rank_folder(root, rank) / RUN for rank in ranks)]:
        with suppress(CheckpointError):  # the reader of the other files reports the damage
            if path.exists() and (content := read_run(path)).get("tasks"):
                return content
    return {}


def _read(root: Path) -> Json:
    path = root / JOB
    if path.exists():
        return read_run(path)
    return {}


def _is_current(root: Path, identity: RunIdentity) -> bool:
    """Whether ``job.json`` agrees, code and output folder included, and holds no plain secret."""
    if (path := root / JOB).exists():
        job = run_with_secrets(path)
    else:
        job = {}
    clean = without_its_secrets(job)
    is_same = job == clean and not compare(job, identity, with_output=True)
    is_same = is_same and not new_records(job.get("accepted_changes", []), identity)
    return bool(job) and is_same and describe_alike(job, identity.fields)


def _guard(root: Path, identity: RunIdentity) -> files.Lock | None:
    """Takes ``job.lock``; returns None if another rank wrote a matching ``job.json`` meanwhile."""
    deadline = time.monotonic() + _GUARD_SECONDS
    while True:
        try:
            return files.Lock(root / JOB_LOCK)
        except CheckpointLocked:
            if _is_current(root, identity):
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _next_job(root: Path, rank: int, identity: RunIdentity, accept: bool) -> bytes:
    others = _compare_ranks(
        root, [other for other in rank_numbers(root) if other != rank], identity
    )
    if others.changes and (not accept or others.is_layout):
        raise _refusal(root, others)
    return job_content(identity, _read(root), others)


def job_content(identity: RunIdentity, before: Json, others: JobChanges) -> bytes:
    accepted = [*before.get("accepted_changes", []), *records(others.changes)]
    accepted += new_records(accepted, identity)
    job = {**identity.kept, **({"accepted_changes": accepted} if accepted else {})}
    return sealed_json(job)


def _refusal(root: Path, found: JobChanges) -> Exception:
    what = f"The checkpoints of other tasks in {root} ({name_tasks(found.ranks)}) were"
    return refusal(what, found.changes)


def _compare_ranks(
    root: Path, ranks: Iterable[int], identity: RunIdentity, only_tasks: bool = False
) -> JobChanges:
    kept = {}
    for rank in ranks:
        folder = rank_folder(root, rank)
        if (folder / RUN).exists():
            run = read_run(folder / RUN)
            is_live = partial(_is_live, folder, run)
            kept[rank] = KeptRun(
                run, partial(holds_work, folder), partial(is_finished, folder), is_live
            )
    return compare_kept(kept, _read(root), identity, only_tasks)


def compare_kept(
    kept: Mapping[int, KeptRun], job: Json, identity: RunIdentity, only_tasks: bool
) -> JobChanges:
    """Compares a job with its ranks' files.

    Args:
        job: the content of ``job.json``; empty if there is none.
        only_tasks: compare the number of tasks, and nothing else.
    """
    found = JobChanges()
    contents = [job, *(each.run for each in kept.values())]
    accepted = [
        (change.get("field"), change.get("old"), change.get("new"))
        for content in contents
        for change in content.get("accepted_changes", [])
    ]
    for rank, each in kept.items():
        changes = compare(each.run, identity, with_output=True)
        if only_tasks:
            changes = [change for change in changes if change.field == "tasks"]
        if any(change.field == OUTPUT_FOLDER for change in changes) and not each.is_live():
            changes = [change for change in changes if change.field != OUTPUT_FOLDER]
        if changes and not each.holds_work() and not each.is_live():
            found.empty.append(rank)
            continue
        if each.is_finished():
            changes = [
                change
                for change in changes
                if (change.field, change.old, change.new) not in accepted
            ]
        if changes:
            found.add(rank, changes)
    return found


def _is_live(folder: Path, run: Json) -> bool:
    """Whether another process that wrote ``run.json`` works on the rank."""
    holder = files.lock_holder(folder / LOCK)
    owner = run.get("owner", {})
    return holder is not None and all(
        holder.get(name) == owner.get(name) for name in ("host", "pid")
    )


def removed_ranks(root: Path, missing: Iterable[int]) -> list[int]:
    """Returns the missing ranks that have a last_chunk file or a retry of dead letters."""
    folders = (root / "last_chunk", *retry_folders(root))
    named = {path.stem for folder in folders for path in folder.glob("*")}
    places = {rank: rank_folder(root, rank) for rank in missing}
    # Checked again: a rank may have started after the listing, and have finished a chunk.
    return [
        rank
        for rank, folder in places.items()
        if folder.name in named and not (folder / RUN).exists()
    ]
