"""Compares the ranks of a job: ``job.json`` holds the identity that all ranks share.

The ranks' ``run.json`` files are the truth. ``job.json`` records that they were compared, so that a
starting rank reads one file instead of a thousand. A rank that finds no matching ``job.json`` takes
``job.lock``, compares itself with all other ranks, replaces ``job.json``, and holds the lock until
its ``run.json`` is written. After a crash in between, the next rank that differs compares again. A
rank is compared if it holds work, or if the process that wrote its ``run.json`` still has its lock.
"""

import datetime
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, checksummed_json
from datatrove_ckpt.checkpoint.compare import (
    SettingChange,
    compare,
    describe_alike,
    mismatch_error,
    new_records,
    records,
)
from datatrove_ckpt.checkpoint.fence import holds_work
from datatrove_ckpt.checkpoint.identity import (
    OUTPUT_FOLDER,
    RunIdentity,
    read_run,
    run_with_secrets,
    run_without_secrets,
    stamped,
)
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder
from datatrove_ckpt.errors import CheckpointError, CheckpointLocked, CheckpointMismatch


@dataclass
class JobChanges:
    """The differences between a job and its ranks.

    Attributes:
        empty: ranks that differ and hold no work, so that they may start over with the new
            settings.
    """

    by_rank: dict[int, list[SettingChange]] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)

    @property
    def changes(self) -> list[SettingChange]:
        each_once = []
        for changes in self.by_rank.values():
            each_once += [change for change in changes if change not in each_once]
        return each_once

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def is_layout(self) -> bool:
        return any(change.is_layout for change in self.changes)


class RankBinding(NamedTuple):
    holds_work: bool
    is_finished: bool
    is_live: bool


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
        check_output: called before ``job.json`` names another output folder; its error refuses the
            rank.

    Raises:
        CheckpointMismatch: another rank belongs to another run.
        CheckpointLocked: another process has kept ``job.lock`` for a minute.
    """
    guard = None if _is_current(root, identity) else _lock_job(root, identity)
    try:
        if guard is not None and not _is_current(root, identity):
            ranks = [other for other in layout.rank_numbers(root) if other != rank]
            differences = _compare_ranks(root, ranks, identity)
            if differences.changes and (not accept_changes or differences.is_layout):
                raise refuse_changes(root, differences)
            data = job_content(identity, _read_job(root), differences)
            if _read_job(root).get(OUTPUT_FOLDER) != identity.fields.get(OUTPUT_FOLDER):
                check_output()
            files.disk.replace(root / layout.JOB, data)
        yield
    finally:
        if guard is not None:
            guard.release(remove=True)
    # Another job started at the same instant.
    if changes := compare(_read_job(root), identity, with_output=True):
        raise refuse_changes(root, JobChanges({rank: changes}))


def recorded_runs(root: Path) -> Iterator[Json]:
    """Yields the content of ``job.json`` and of each rank's ``run.json``.

    Skips damaged files, which other readers report.
    """
    for path in _run_files(root):
        with suppress(CheckpointError):
            if path.exists():
                yield read_run(path)


def _run_files(root: Path) -> Iterator[Path]:
    yield root / layout.JOB
    if root.is_dir():  # a caller that needs only the first file does not list the ranks
        for rank in layout.rank_numbers(root):
            yield layout.rank_folder(root, rank) / layout.RUN


def recorded_output(root: Path) -> str | None:
    """Returns the output folder of the last start. Finished ranks may name an older one."""
    folders = (run.get(OUTPUT_FOLDER) for run in recorded_runs(root))
    return next((str(folder) for folder in folders if folder), None)


def record_output_folder(root: Path, folder: str) -> None:
    """Writes the output folder into ``job.json``. No running rank may write elsewhere."""
    if _read_job(root).get(OUTPUT_FOLDER, folder) == folder:
        return
    with suppress(CheckpointLocked):  # a starting rank holds the lock, and writes the folder
        guard = Lock(root / layout.JOB_LOCK)
        try:
            job = _read_job(root)  # a rank may have written it since
            data = checksummed_json(stamped({**job, OUTPUT_FOLDER: folder}))
            files.disk.replace(root / layout.JOB, data)
        finally:
            guard.release(remove=True)


def record_change(root: Path, path: str, old: str, new: str) -> None:
    """Adds an accepted change of requests or results to ``job.json``, unless another rank has.

    It is no setting, so it has no ``field``.

    Raises:
        CheckpointError: ``job.json`` is damaged, or cannot be written; or another process has kept
            ``job.lock`` for a minute.
    """
    guard = _lock_job(root)
    try:
        job = _read_job(root)
        accepted = job.get("accepted_changes", [])
        change = {"path": path, "old": old, "new": new}
        if any(change.items() <= other.items() for other in accepted):
            return
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        accepted = [*accepted, {"when": when, **change}]
        data = checksummed_json(stamped({**job, "accepted_changes": accepted}))
        files.disk.replace(root / layout.JOB, data)
    finally:
        if guard is not None:
            guard.release(remove=True)


def compare_job(
    root: Path,
    identity: RunIdentity,
    ranks: Collection[int] | None,
    only_tasks: bool,
) -> JobChanges:
    """Compares a job that is about to start with its ranks, finished ones included. Changes
    nothing.

    Args:
        ranks: the ranks to compare if ``job.json`` agrees with the job; None: all ranks with a
            folder.
    """
    job = _read_job(root)
    if ranks is None or not job or compare(job, identity):
        ranks = layout.rank_numbers(root) if root.exists() else []
    return _compare_ranks(root, ranks, identity, only_tasks)


def name_tasks(ranks: list[int]) -> str:
    noun = "task" if len(ranks) == 1 else "tasks"
    text = f"{noun} {', '.join(map(str, ranks[:5]))}"
    if len(ranks) <= 5:
        return text
    return f"{text}, ... ({len(ranks)} in all)"


def recorded_settings(root: Path) -> Json:
    return next((run for run in recorded_runs(root) if run.get("tasks")), {})


def _job_with_secrets(root: Path) -> Json:
    path = root / layout.JOB
    if path.exists():
        return run_with_secrets(path)
    return {}


def _read_job(root: Path) -> Json:
    return run_without_secrets(_job_with_secrets(root))


def _is_current(root: Path, identity: RunIdentity) -> bool:
    job = _job_with_secrets(root)
    clean = run_without_secrets(job)
    is_same = job == clean and not compare(job, identity, with_output=True)
    is_same = is_same and not new_records(job.get("accepted_changes", []), identity)
    return bool(job) and is_same and describe_alike(job, identity.fields)


def _lock_job(root: Path, identity: RunIdentity | None = None) -> Lock | None:
    """Takes ``job.lock``. Returns None once another rank has written a matching ``job.json``."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return Lock(root / layout.JOB_LOCK)
        except CheckpointLocked:
            if identity is not None and _is_current(root, identity):
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def job_content(identity: RunIdentity, before: Json, differences: JobChanges) -> bytes:
    accepted = [*before.get("accepted_changes", []), *records(differences.changes)]
    accepted += new_records(accepted, identity)
    job = {**identity.stored, **({"accepted_changes": accepted} if accepted else {})}
    return checksummed_json(job)


def refuse_changes(
    root: Path | str,
    differences: JobChanges,
    advice: str = "",
    may_mix: bool = True,
    evidence: str = "",
) -> CheckpointMismatch:
    subject = f"{evidence}The checkpoints in {root} ({name_tasks(differences.ranks)}) were"
    return mismatch_error(subject, differences.changes, advice, may_mix)


def _compare_ranks(
    root: Path, ranks: Iterable[int], identity: RunIdentity, only_tasks: bool = False
) -> JobChanges:
    runs = {}
    for rank in ranks:
        path = layout.rank_folder(root, rank) / layout.RUN
        if path.exists():
            runs[rank] = read_run(path)

    def state_of(rank: int) -> RankBinding:
        folder = layout.rank_folder(root, rank)
        holder = lock_holder(folder / layout.LOCK)
        owner = runs[rank].get("owner", {})
        # Whether another process that wrote ``run.json`` works on the rank.
        is_live = holder is not None and all(
            holder.get(name) == owner.get(name) for name in ("host", "pid")
        )
        return RankBinding(holds_work(folder), layout.is_finished(folder), is_live)

    return compare_runs(runs, state_of, _read_job(root), identity, only_tasks)


def compare_runs(
    runs: Mapping[int, Json],
    state_of: Callable[[int], RankBinding],
    job: Json,
    identity: RunIdentity,
    only_tasks: bool,
) -> JobChanges:
    differences = JobChanges()
    accepted = [
        (change.get("field"), change.get("old"), change.get("new"))
        for fields in (job, *runs.values())
        for change in fields.get("accepted_changes", [])
    ]
    for rank, run in runs.items():
        changes = compare(run, identity, with_output=True)
        if only_tasks:
            changes = [change for change in changes if change.field == "tasks"]
        if not changes:
            continue
        state = state_of(rank)
        if not state.is_live:
            changes = [change for change in changes if change.field != OUTPUT_FOLDER]
        if state.is_finished:
            changes = [
                change
                for change in changes
                if (change.field, change.old, change.new) not in accepted
            ]
        if changes and not state.holds_work and not state.is_live:
            differences.empty.append(rank)
        elif changes:
            differences.by_rank[rank] = changes
    return differences


def removed_ranks(root: Path, missing: Iterable[int]) -> list[int]:
    folders = (root / "last_chunk", *layout.retry_folders(root))
    named = {path.stem for folder in folders for path in folder.glob("*")}
    folder_of = {rank: layout.rank_folder(root, rank) for rank in missing}
    # Checked again: a rank may have started after the listing, and have finished a chunk.
    return [
        rank
        for rank, folder in folder_of.items()
        if folder.name in named and not (folder / layout.RUN).exists()
    ]
