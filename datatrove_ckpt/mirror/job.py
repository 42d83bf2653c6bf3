"""``job.json`` of a mirror: the identity that all ranks of a job share, for nodes that see no other rank's folder.

Ranks with disks of their own see each other on the mirror alone. datatrove skips finished ranks, so nobody restores
them, and a job with another number of tasks would read their documents once more. So each rank that starts compares
itself with the mirror's ``job.json``; if that is missing or another one, with the newest version of every rank that
only the mirror has. Then its first upload
writes ``job.json`` anew, and the next ranks read one object.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import RunIdentity, compare, parse_run, refusal, stamped, way_back
from datatrove_ckpt.checkpoint.job import Counts, JobChanges, KeptRun, compare_kept, job_content, name_tasks
from datatrove_ckpt.checkpoint.layout import COMMITS, JOB, RUN, SHARES, is_journal, is_rank, rank_folder
from datatrove_ckpt.checkpoint.lines import Json, seal, sealed_json, unseal
from datatrove_ckpt.checkpoint.shares import Shares
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, StorageFailed
from datatrove_ckpt.mirror.manifests import Manifest, Seal, Versions, without_seal
from datatrove_ckpt.mirror.object_store import ObjectStore
from datatrove_ckpt.retrying import failure_line

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
        CheckpointMismatch: another rank belongs to another run; the message names each field with both values. Or see
            ``_compare_shares``.
        ConfigError: the bucket does not exist.
    """
    store, missing = ObjectStore(url), {}
    try:
        if (shares := _compare_shares(store, root)) is not None:
            missing[SHARES] = shares
        job = _read_job(store)
        if job and not compare(job, identity, with_output=True):
            return missing
        others = _compare(store, root, job, identity, lambda change: True, rank)
        if others.changes and (not accept_changes or others.is_layout):
            what = f"The checkpoints of other tasks on the mirror {store.url} ({name_tasks(others.ranks)}) were"
            raise refusal(what, others.changes, way_back(others.changes, identity))
        missing[JOB] = job_content(identity, job, others)
    except OSError as error:  # the rank has its folder, else it would not have come so far
        logger.warning(f"Could not compare this rank with those on the mirror {url} ({failure_line(error)}).")
    return missing


def compare_mirrored_job(url: str, root: Path, identity: RunIdentity, counts: Counts) -> JobChanges:
    """Compares a job that is about to start with the ranks that only its mirror has. Changes nothing.

    Each rank that starts does that, too, so a mirror that cannot be read is not said here.

    Raises:
        CheckpointMismatch: the mirror is that of an earlier number of tasks.
    """
    store = ObjectStore(url)
    try:
        _compare_shares(store, root, copy=False)
        job = _read_job(store)
        if job and not compare(job, identity):
            return JobChanges()
        return _compare(store, root, job, identity, counts)
    except OSError:
        return JobChanges()


def restore_shares(url: str, folder: Path, trusted: bool = True) -> None:
    """Copies ``shares.json`` of a mirror into a folder that has none, or an older one. Raises OSError.

    Args:
        trusted: False: for a command that only looks. It needs no key, and a mirror without ranks is none.

    Raises:
        CheckpointMismatch, CheckpointCorrupt, ConfigError: see ``_compare_shares``.
    """
    _compare_shares(ObjectStore(url), folder, trusted)


def restore_job(url: str, folder: Path) -> None:
    """Copies ``job.json`` of a mirror, if there is one, into a copy of its ranks. Raises OSError."""
    if job := _read_job(ObjectStore(url)):
        (folder / JOB).write_bytes(sealed_json(stamped(job)))


def upload_shares(url: str, root: Path) -> None:
    """Uploads ``shares.json``, if there is one, before any rank is there.

    Raises:
        StorageFailed: it could not be uploaded.
    """
    if not (root / SHARES).exists():
        return
    try:
        ObjectStore(url).put(SHARES, _sealed(url, (root / SHARES).read_bytes()))
    except OSError as error:
        raise StorageFailed(
            f"Could not upload {SHARES} to {url}: {failure_line(error)}. Correct that, and run the same command again."
        ) from error


def _sealed(url: str, shares: bytes) -> bytes:
    """``shares.json`` as a mirror has it: with an HMAC like that of a version, if there is a key."""
    return seal(Seal(url).add(SHARES, unseal(shares) or shares))


def _compare_shares(store: ObjectStore, root: Path, trusted: bool = True, copy: bool = True) -> bytes | None:
    """Compares ``shares.json`` of a mirror with that of a folder, and copies a newer one from the mirror.

    Returns what the mirror lacks.

    Raises:
        CheckpointMismatch: the mirror has ranks from before ``reshard``, or dealt out otherwise: what has moved between
            ranks since would be lost or twice. Or it has no rank: nothing shows that its shares are those of this run.
        CheckpointCorrupt, ConfigError: the mirror's is damaged, or not sealed with the key.
    """
    here, mirrored = root / SHARES, store.read(SHARES, _MAX_SHARES_BYTES)
    ours = here.read_bytes() if here.exists() else None
    upload = None if ours is None else _sealed(store.url, ours)
    if mirrored == upload:
        return None
    where = f"{store.url}/{SHARES}"
    if not any(is_rank(name) for name in store.names()):
        if ours is not None or not trusted:  # a new mirror gets shares.json before it gets any rank
            return upload
        raise CheckpointMismatch(
            f"{where} deals out an input to other tasks, and no task is on this mirror, so nothing shows that it is "
            "the input of this run. If another node has just started it, run the same command again once a task of it "
            "is there. Otherwise remove this file, or set checkpoints_remote_dir to another, empty place."
        )
    number = 0 if ours is None else Shares.from_bytes(ours, here).round
    body, older = unseal(mirrored or b"") or mirrored or b"", 0
    try:
        if mirrored is not None:
            older = Shares.from_bytes(mirrored, where).round
            if ours is not None and without_seal(body) == (unseal(ours) or ours):  # the key is new, or another one
                return upload
            if trusted:
                Seal(store.url).check(SHARES, body)
    except CheckpointCorrupt as error:
        if ours is None:
            raise
        logger.warning(f"{error} This node does not need it, and uploads its own.")
        return upload
    if older > number:
        if copy:
            files.disk.make_dirs(root)
            files.disk.replace(here, seal(without_seal(body)))
        return None
    raise CheckpointMismatch(
        f"checkpoints_remote_dir: {store.url} holds this run as it was before `datatrove-ckpt reshard` dealt it "
        f"out anew, or dealt out otherwise (number {number}; the mirror has {f'number {older}' if older else 'none'}). "
        "A node that restores a task from there would lose or repeat documents. Set checkpoints_remote_dir to another, "
        "empty place, or to null."
    )


def _read_job(store: ObjectStore) -> Json:
    """The content of ``job.json``; empty if there is none, or a damaged one, which proves nothing.

    Raises:
        VersionMismatch: a newer version of this program wrote it.
    """
    try:
        return parse_run(f"{store.url}/{JOB}", store.read(JOB, _MAX_BYTES) or b"")
    except CheckpointCorrupt:
        return {}


def _compare(
    store: ObjectStore, root: Path, job: Json, identity: RunIdentity, counts: Counts, without: int | None = None
) -> JobChanges:
    ranks = [int(name) for name in store.names() if is_rank(name)]
    ranks = [rank for rank in ranks if rank != without and not (rank_folder(root, rank) / RUN).exists()]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda rank: newest_manifest(f"{store.url}/{rank:05d}"), ranks)
        kept = {rank: _kept(manifest) for rank, manifest in zip(ranks, found, strict=True) if manifest is not None}
    return compare_kept(kept, job, identity, counts)


def newest_manifest(url: str) -> Manifest | None:
    """The newest version of a rank that can be read. A rank that is restored refuses damaged ones."""
    mirrored = Versions(url)
    return mirrored.newest(mirrored.all_versions(), mirrored.read_manifest, [])


def _kept(manifest: Manifest) -> KeptRun:
    holds_work = bool(manifest.answers) or any(name == COMMITS or is_journal(name) for name in manifest.files)
    # Whether a process works on it is not known: a run is stopped before its output is moved.
    return KeptRun(manifest.run, lambda: holds_work, lambda: manifest.finished, lambda: False)
