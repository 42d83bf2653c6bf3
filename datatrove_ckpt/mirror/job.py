"""``job.json`` of a mirror: the identity that all ranks of a job share, for nodes with separate
disks. The types of the input's columns, which they share, too, lie beside it.

Each starting rank compares itself with the mirror's ``job.json``; if that is missing or differs,
with the newest version of every rank that only the mirror has. Its first upload then writes
``job.json``.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.identity import (
    JobChanges,
    RankBinding,
    RunIdentity,
    compare,
    compare_runs,
    job_content,
    parse_run,
    refuse_changes,
    stamped,
)
from datatrove_ckpt.checkpoint.lines import Json, sealed_json
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError
from datatrove_ckpt.mirror import manifests


def join_mirrored_job(
    url: str, root: Path, rank: int, identity: RunIdentity, accept_changes: bool
) -> bytes | None:
    """Compares a rank that starts with the ranks that only the mirror has.

    Args:
        url: ``checkpoints_remote_dir``.
        root: ``checkpoints_local_dir``. The ranks in it are compared by ``join_job``.

    Returns:
        The ``job.json`` that the mirror lacks. The rank's mirror uploads it, because a remote may
        hang.

    Raises:
        CheckpointMismatch: another rank belongs to another run.
        ConfigError: the bucket does not exist.
    """
    try:
        job, others = _compare(url, root, identity, without=rank, with_output=True)
        if others is None:
            return None
        if others.changes and (not accept_changes or others.is_layout):
            raise refuse_changes(url, others)
        return job_content(identity, job, others)
    except OSError as error:  # the rank has its folder, else it would not have come so far
        logger.warning(
            f"Could not compare this task with those on the mirror {url} ({failure_line(error)})."
        )
        return None


def compare_mirrored_job(
    url: str, root: Path, identity: RunIdentity, only_tasks: bool
) -> JobChanges:
    """Compares a job with the ranks that only its mirror has. Changes nothing.

    Each rank that starts does that, too, so a mirror that cannot be read is not reported here.
    """
    with suppress(OSError):
        _, others = _compare(url, root, identity, only_tasks)
        if others is not None:
            return others
    return JobChanges()


def restore_job(url: str, folder: Path) -> None:
    """Copies ``job.json`` of a mirror, if there is one, into a copy of its ranks.

    Raises OSError.
    """
    job = read_job(url)
    if job:
        (folder / layout.JOB).write_bytes(sealed_json(stamped(job)))


def read_job(url: str) -> Json:
    """Returns the content of ``job.json``; empty if it is missing or damaged.

    Raises:
        VersionMismatch: a newer version of this program wrote it.
    """
    store = ObjectStore(url)
    try:
        return parse_run(f"{store.url}/{layout.JOB}", store.read(layout.JOB, 2**26) or b"")
    except CheckpointCorrupt:
        return {}


def _compare(
    url: str,
    root: Path,
    identity: RunIdentity,
    only_tasks: bool = False,
    without: int | None = None,
    with_output: bool = False,
) -> tuple[Json, JobChanges | None]:
    """Returns the mirror's ``job.json``, and the changes; None: it is of this run."""
    store = ObjectStore(url)
    names = store.names()
    job = read_job(url)
    if job and not compare(job, identity, with_output=with_output):
        return job, None
    ranks = [int(name) for name in names if layout.is_rank(name)]
    ranks = [
        rank
        for rank in ranks
        if rank != without and not (layout.rank_folder(root, rank) / layout.RUN).exists()
    ]
    found = manifests.in_threads(lambda rank: newest_manifest(f"{store.url}/{rank:05d}"), ranks)
    kept = {
        rank: manifest for rank, manifest in zip(ranks, found, strict=True) if manifest is not None
    }

    def state_of(rank: int) -> RankBinding:
        manifest = kept[rank]
        names = [
            name
            for name in manifest.files
            if name in (layout.BATCHES, layout.COMMITS) or layout.is_journal(name)
        ]
        # It is unknown whether a process works on the rank: the run is stopped before its output
        # moves.
        return RankBinding(bool(manifest.answers or names), manifest.finished, is_live=False)

    runs = {rank: manifest.run for rank, manifest in kept.items()}
    return job, compare_runs(runs, state_of, job, identity, only_tasks)


def newest_manifest(url: str) -> manifests.Manifest | None:
    """Returns the newest version of a rank that can be read.

    A rank that is restored refuses damaged ones.
    """
    mirrored = manifests.Versions(url)
    return mirrored.newest(mirrored.all_versions(), mirrored.read_manifest, [])


def restore_advice(url: str, folder: Path, least: int = 0) -> str:
    """Returns how to continue a damaged rank from its mirror, with a space before it; "" if the
    mirror does not have it.

    Args:
        least: bytes of commits that the mirror must have.
    """
    found = None
    with suppress(OSError, CkptError):
        found = newest_manifest(url)
    if found is None or not found.files:
        return ""
    if found.sizes.get(layout.COMMITS, 0) < least:
        return ""
    return (
        f" The mirror {url} has this task as of {found.when}: to go on from there, move its folder "
        f"away while no task runs (mv {shlex.quote(str(folder))} "
        f"{shlex.quote(f'{folder}.damaged')}), and run the same command again."
    )
