"""``job.json`` of a mirror: the identity that all ranks of a job share, for nodes that see no other rank's folder.

Ranks with disks of their own see each other on the mirror alone. datatrove skips finished ranks, so nobody restores
them, and a job with another number of tasks would read their documents once more. So each rank that starts compares
itself with the mirror's ``job.json``; if that is missing or another one, with the newest version of every rank that
only the mirror has. Then its first upload
writes ``job.json`` anew, and the next ranks read one object.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import Change, RunIdentity, check_run, compare, refusal, way_back
from datatrove_ckpt.checkpoint.job import JobChanges, KeptRun, compare_kept, job_content, name_tasks
from datatrove_ckpt.checkpoint.layout import COMMITS, JOB, RUN, SHARES, is_journal, is_rank, rank_folder
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.versions import check_format
from datatrove_ckpt.errors import CheckpointMismatch, StorageFailed
from datatrove_ckpt.mirror.manifests import Damaged, Manifest, Versions
from datatrove_ckpt.mirror.object_store import ObjectStore
from datatrove_ckpt.remote_errors import failure_text

_MAX_BYTES = 2**26
_MAX_SHARES_BYTES = 2**30
_THREADS = 32


def join_mirrored_job(url: str, root: Path, rank: int, identity: RunIdentity, accept_changes: bool) -> dict[str, bytes]:
    """Compares a rank that starts with the ranks that only the mirror has.

    Args:
        url: ``checkpoints_remote_dir``.
        root: ``checkpoints_local_dir``. The ranks in it are compared by ``join_job``.

    Returns:
        What the mirror lacks, by name. The rank's mirror uploads it, because a remote may hang.

    Raises:
        CheckpointMismatch: another rank belongs to another run; the message names each field with both values. Or the
            mirror is that of an earlier number of tasks.
        ConfigError: the bucket does not exist.
    """
    store, missing = ObjectStore(url), {}
    try:
        if (shares := _newer_shares(store, root)) is not None:
            _refuse_older(store, shares)
            missing[SHARES] = shares
        job = _read_job(store)
        if job and not compare(job, identity):
            return missing
        others = _compare(store, root, job, identity, lambda change: True, rank)
        if others.changes and (not accept_changes or others.is_layout):
            what = f"The checkpoints of other tasks on the mirror {store.url} ({name_tasks(others.ranks)}) were"
            raise refusal(what, others.changes, way_back(others.changes, identity))
        missing[JOB] = job_content(identity, job, others)
    except OSError as error:  # the rank has its folder, else it would not have come so far
        logger.warning(f"Could not compare this rank with those on the mirror {url} ({failure_text(error)}).")
    return missing


def compare_mirrored_job(url: str, root: Path, identity: RunIdentity, counts: Callable[[Change], bool]) -> JobChanges:
    """Compares a job that is about to start with the ranks that only its mirror has. Changes nothing.

    Each rank that starts does that, too, so a mirror that cannot be read is not said here.

    Raises:
        CheckpointMismatch: the mirror is that of an earlier number of tasks.
    """
    store = ObjectStore(url)
    try:
        if (root / SHARES).exists():
            _refuse_older(store, (root / SHARES).read_bytes())
        job = _read_job(store)
        if job and not compare(job, identity):
            return JobChanges()
        return _compare(store, root, job, identity, counts)
    except OSError:
        return JobChanges()


def _refuse_older(store: ObjectStore, shares: bytes) -> None:
    """Refuses a mirror with ranks from before ``reshard``. What has moved between ranks since would be lost or twice.

    A new mirror gets ``shares.json`` before it gets any rank.
    """
    older, number = _number(store.read(SHARES, _MAX_SHARES_BYTES)), _number(shares)
    if older < number and any(is_rank(name) for name in store.names()):
        raise CheckpointMismatch(
            f"checkpoints_remote_dir: {store.url} holds this run as it was before `datatrove-ckpt reshard` dealt it "
            f"out anew (number {number}; the mirror has {f'number {older}' if older else 'none'}). A node that "
            "restores a task from there would lose or repeat documents. Set checkpoints_remote_dir to another, empty "
            "place, or to null."
        )


def restore_shares(url: str, folder: Path) -> None:
    """Copies ``shares.json`` of a mirror into a folder that has none, or an older one. Raises OSError.

    Raises:
        CheckpointMismatch: the mirror is that of an earlier number of tasks.
    """
    store = ObjectStore(url)
    if (shares := _newer_shares(store, folder)) is not None:
        _refuse_older(store, shares)


def upload_shares(url: str, root: Path) -> None:
    """Uploads ``shares.json``, if there is one, before any rank is there.

    Raises:
        StorageFailed: it could not be uploaded.
    """
    if not (root / SHARES).exists():
        return
    try:
        ObjectStore(url).put(SHARES, (root / SHARES).read_bytes())
    except OSError as error:
        raise StorageFailed(
            f"Could not upload {SHARES} to {url}: {failure_text(error)}. Correct that, and run the same command again."
        ) from error


def _newer_shares(store: ObjectStore, root: Path) -> bytes | None:
    """This node's ``shares.json`` if the mirror has none or an older one. A newer one is copied to this node."""
    mirrored = store.read(SHARES, _MAX_SHARES_BYTES)
    here = (root / SHARES).read_bytes() if (root / SHARES).exists() else None
    if mirrored == here:
        return None
    if _number(mirrored) > _number(here):
        files.disk.make_dirs(root)
        files.disk.replace(root / SHARES, mirrored or b"")
        return None
    return here


def _number(shares: bytes | None) -> int:
    try:
        return int(orjson.loads(shares or b"{}")["round"])
    except (KeyError, TypeError, ValueError):
        return 0  # none, or one that a kill has cut off


def _read_job(store: ObjectStore) -> Json:
    """The content of ``job.json``; empty if there is none, or a damaged one, which proves nothing.

    Raises:
        VersionMismatch: a newer version of this program wrote it.
    """
    try:
        read = orjson.loads(store.read(JOB, _MAX_BYTES) or b"")
        check_format(f"{store.url}/{JOB}", read)
        content: Json = check_run(read)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return content


def _compare(
    store: ObjectStore,
    root: Path,
    job: Json,
    identity: RunIdentity,
    counts: Callable[[Change], bool],
    without: int | None = None,
) -> JobChanges:
    ranks = [int(name) for name in store.names() if is_rank(name)]
    ranks = [rank for rank in ranks if rank != without and not (rank_folder(root, rank) / RUN).exists()]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda rank: _newest(f"{store.url}/{rank:05d}"), ranks)
        kept = {rank: _kept(manifest) for rank, manifest in zip(ranks, found, strict=True) if manifest is not None}
    return compare_kept(kept, job, identity, counts)


def _newest(url: str) -> Manifest | None:
    """The newest version of a rank that can be read. A rank that is restored refuses damaged ones."""
    mirrored = Versions(url)
    for version in reversed(mirrored.all_versions()):
        try:
            return mirrored.read_manifest(version)
        except Damaged:
            continue
    return None


def _kept(manifest: Manifest) -> KeptRun:
    holds_work = bool(manifest.answers) or any(name == COMMITS or is_journal(name) for name in manifest.files)
    return KeptRun(manifest.run, lambda: holds_work, lambda: manifest.finished)
