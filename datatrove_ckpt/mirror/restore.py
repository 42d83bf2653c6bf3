"""Decides, before a rank with a mirror opens its checkpoint: use the folder, restore, or refuse.

    this node has  the mirror has                     what happens
    nothing        nothing                            the rank starts
    nothing        versions                           the newest complete one is restored; if
                                                      there is none: refused
    a folder       nothing, or versions made by       the folder is used: it contains all that
                   owners of this folder              its mirror does; if another node owned the
                                                      mirror since, all output under the rank's
                                                      names counts as its own
    a folder       more: another node continued       the newest complete version is restored; the
                   this run                           folder is set aside as 00000.replaced-1
    a folder       another run's checkpoint, or one   refused: neither continues the other, unless
                   of another first start             this one was killed before its first version
    nothing        cannot be reached                  refused: starting from nothing costs money
    a folder       cannot be reached                  the folder is used, with a warning
    either         a bucket that does not exist       refused: without a mirror, a lost node costs
                                                      all its work

``run.json`` and the versions name owners by their nonces. The more advanced checkpoint is chosen,
and never mixed with the other: answers and chunks that only the other had are made again.

The folder is built beside its final place and renamed, so a crash leaves nothing or all of it. A
restored checkpoint gets a new owner. Its ``earlier`` owners include owners of damaged versions, so
that these are not tried again.

In the copies that ``status``, ``report`` and ``verify`` read, an empty lock file marks an
unfinished rank.

``repair`` restores ranks from their mirror and uploads them again. The upload is a new version of a
new owner: a node with the old folder restores it at its next start, and a process that still works
on the rank stops.
"""

import datetime
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint import files, identity, layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, checksummed_json
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.checkpoint.fence import new_owner
from datatrove_ckpt.checkpoint.job_file import (
    JobChanges,
    RankBinding,
    compare_runs,
    job_content,
    refuse_changes,
)
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.open_checkpoint import Snapshot
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, CkptError, StorageFailed
from datatrove_ckpt.mirror.manifests import (
    MAX_OBJECT_BYTES,
    Manifest,
    MirrorDamaged,
    Ownership,
    Version,
    VersionStore,
    VersionWriter,
    contains_version,
    decode_answers,
)

_WITHOUT = " To start without the mirror, remove checkpoints_remote_dir."


def restore_rank(url: str, root: Path, rank: int, retries: bool) -> None:
    """Restores a rank if the mirror holds more than this node, see ``restore``.

    Args:
        retries: also restore the rank's retries of dead letters.
    """
    folder = layout.rank_folder(root, rank).name
    restore(f"{url}/{folder}", root / folder)
    if retries:
        try:
            names = ObjectStore(url).names()
        except OSError as error:
            raise unreadable(url, error, _WITHOUT) from error
        for name in filter(layout.is_retry, names):
            restore(f"{url}/{name}/{folder}", root / name / folder)


def restore_outdated(url: str, root: Path, needed: Collection[int]) -> None:
    """Restores the ranks, and their retries, of which the mirror holds more than this node.

    Args:
        needed: ranks that are also restored if this node has no folder of them.

    Raises:
        StorageFailed: the mirror cannot be read, and this node lacks a needed rank.
        CheckpointError, ConfigError: see ``restore``.
    """
    try:
        names = find_outdated(url, root, needed)
    except OSError:  # ``restore`` refuses missing folders; existing folders are used unchanged
        folders = [layout.rank_folder(root, rank) for rank in needed]
        names = [folder.name for folder in folders if not (folder / layout.RUN).exists()]
    in_threads(lambda name: restore(f"{url}/{name}", root / name), names)


def find_outdated(url: str, root: Path, needed: Collection[int] | None = None) -> list[str]:
    """Returns the folders of the ranks that ``restore_outdated`` restores. Raises OSError.

    Args:
        needed: see ``restore_outdated``; None: all ranks that the mirror has.
    """

    def is_outdated(name: str) -> bool:
        owner = _owner_of(root / name)
        if owner is None:
            return True
        ownerships, versions = VersionStore(f"{url}/{name}").listing()
        if not versions:
            return False
        return not contains_version(owner, versions[-1]) or _has_another_owner(ownerships, owner)

    names = list(rank_names(ObjectStore(url)))
    if needed is not None:
        ranks = set(needed)
        if root.is_dir():
            ranks.update(layout.rank_numbers(root))
        names = [name for name in names if int(name.rpartition("/")[2]) in ranks]
    return list(compress(names, in_threads(is_outdated, names)))


def _owner_of(folder: Path) -> Json | None:
    if not (folder / layout.RUN).exists():
        return None
    owner: Json = identity.read_run(folder / layout.RUN).get("owner", {"nonce": ""})
    return owner


def _has_another_owner(ownerships: list[Ownership], owner: Json) -> bool:
    nonces = {owner["nonce"], *owner.get("earlier", ())}
    return bool(ownerships) and ownerships[-1].nonce not in nonces


def restore(url: str, folder: Path) -> None:
    """Restores a rank's folder from its mirror, if the mirror holds work that the folder lacks.

    Raises:
        StorageFailed: there is no folder, and the mirror cannot be read.
        CheckpointCorrupt: no version is complete.
        CheckpointMismatch: folder and mirror were started separately.
        CheckpointLocked: a process works on the folder.
        ConfigError: the bucket does not exist; or the mirror is signed, and there is no key.
    """
    owner = _owner_of(folder)
    mirrored = VersionStore(url)
    try:
        ownerships, versions = mirrored.listing()
        manifests_lost = owner is None and not versions and bool(mirrored.list_objects())
    except OSError as error:
        if owner is None:
            raise unreadable(url, error, _WITHOUT) from error
        logger.warning(
            f"Could not read the mirror {url} ({failure_line(error)}). Continuing with {folder} as "
            "it is."
        )
        return
    if manifests_lost:
        raise _no_complete_version(url, "There are objects, but no version.")
    if not versions:
        return
    try:
        if owner is not None and contains_version(owner, versions[-1]):
            # If the mirror is signed and there is no key, no upload of this node could be restored.
            # A wrong signature does not matter here: this version is not needed.
            with suppress(MirrorDamaged, CheckpointCorrupt):
                mirrored.read_manifest(versions[-1], trusted=True)
            # The other node may have published files, and was lost before its first version.
            if _has_another_owner(ownerships, owner):
                files.disk.remove(folder / layout.PUBLISHING)
            return
        _restore_newest(mirrored, versions, folder, owner)
    except OSError as error:
        raise unreadable(url, error, _WITHOUT) from error


def _restore_newest(
    mirrored: VersionStore, versions: list[Version], folder: Path, owner: Json | None
) -> None:
    if owner is not None:
        _refuse_unrelated(mirrored, versions, folder, owner)
    files.disk.make_dirs(folder.parent)
    with ExitStack() as stack:
        guard = Lock(folder.with_name(f"{folder.name}.restoring.lock"))
        stack.callback(guard.release, remove=True)
        staging = folder.with_name(f"{folder.name}.restoring")
        built = _build_newest(mirrored, versions, staging)
        if built is None:
            return
        version, manifest = built
        aside = files.free_name(folder, ".replaced-")
        if folder.exists():
            stack.callback(Lock(folder / layout.LOCK).release)
            files.disk.rename(folder, aside)
        # A file for people, which may name chunks that the restored folder lacks.
        last_chunk = layout.last_chunk_of(folder)
        if last_chunk.exists():
            files.disk.remove(last_chunk)
            files.disk.sync_dir(last_chunk.parent)
        files.disk.rename(staging, folder)
        files.disk.sync_dir(folder.parent)
    logger.info(
        f"Restored {folder} from version {version.number} at {mirrored.url}, uploaded at "
        f"{manifest.uploaded_at}."
    )
    if owner is not None:
        logger.warning(
            f"Another node has continued the task of {folder} (version {version.number} at "
            f"{mirrored.url}). The old folder is kept as {aside}."
        )


def _refuse_unrelated(
    mirrored: VersionStore, versions: list[Version], folder: Path, owner: Json
) -> None:
    ours = {owner["nonce"], *owner.get("earlier", ())}
    theirs = {version.nonce for version in versions}
    for version in versions:
        with suppress(MirrorDamaged):
            theirs |= set(mirrored.read_manifest(version).run["owner"]["earlier"])
    if not ours & theirs and not _began_with_mirror(folder):
        raise CheckpointMismatch(
            f"{folder} and its mirror {mirrored.url} were started separately. Remove one."
        )


def _began_with_mirror(folder: Path) -> bool:
    """Whether a rank without commits was killed before its first version: it published nothing."""
    root = layout.checkpoints_of(folder)
    home = root / layout.HOME
    return (
        home.exists()
        and orjson.loads(home.read_bytes())["home"] != str(root.absolute())
        and not read_commits(folder / layout.COMMITS)
    )


def _build_newest(
    mirrored: VersionStore, versions: list[Version], staging: Path
) -> tuple[Version, Manifest] | None:
    problems = list[str]()

    def build(version: Version) -> tuple[Version, Manifest]:
        manifest = mirrored.read_manifest(version, trusted=True)
        _download(mirrored, manifest, versions, staging)
        return version, manifest

    built = mirrored.newest(versions, build, problems)
    if built is not None:
        if problems:
            logger.warning(
                f"Using version {built[0].number} of {built[1].uploaded_at} from the mirror "
                f"{mirrored.url}, because newer ones are damaged: {'; '.join(problems)}. Their "
                "work is repeated."
            )
        return built
    if not mirrored.list_objects():
        # Only the first version is written before any object, and it is empty. A kill has torn its
        # manifest.
        logger.warning(
            f"{problems[0]}. Nothing else was mirrored to {mirrored.url}. The task starts from "
            "nothing."
        )
        for version in versions:
            mirrored.store.delete(version.file)
        return None
    raise _no_complete_version(mirrored.url, "\n  ".join(problems))


def _no_complete_version(url: str, problems: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"No version at {url} is complete:\n  {problems}\nBring the objects back (some buckets "
        f"keep old ones), and run again; or remove {url} and the task's output files, to pay "
        "again."
    )


def _download(
    mirrored: VersionStore, manifest: Manifest, versions: list[Version], staging: Path
) -> None:
    files.disk.remove_tree(staging)
    files.disk.make_dir(staging)
    for file, parts in manifest.files.items():
        files.disk.write_new(staging / file, map(mirrored.read_object, parts))
    if not manifest.finished:
        path = staging / layout.CACHE  # even if it is empty: an unfinished rank always has one
        with closing(RequestCache(path)) as cache:  # its end moves SQLite's log into the database
            for part in manifest.answers:
                cache.put(decode_answers(mirrored.read_object(part)))
        files.disk.sync(path)
    try:
        commits = len(read_commits(staging / layout.COMMITS))
    except CheckpointCorrupt as error:
        raise MirrorDamaged(str(error)) from error
    owner = manifest.run["owner"]
    earlier = dict(owner["earlier"])
    for version in versions:
        if earlier.get(version.nonce, 0) is not None:
            earlier[version.nonce] = version.number
    owner = {**owner, **new_owner(owner.get("fence", 0), earlier, commits)}
    files.disk.write_new(staging / layout.RUN, [checksummed_json({**manifest.run, "owner": owner})])
    files.disk.sync_dir(staging)


class CopiedRank(NamedTuple):
    """``when``: Unix seconds of its upload; 0.0: unknown."""

    version: Version
    when: float


class MirrorReader:
    """Copies some files of a mirror; each ``refresh`` updates the copy.

    Args:
        wants_file: whether a file is needed, by its name and its size in bytes. ``run.json`` is
            always copied.
    """

    def __init__(self, url: str, folder: Path, wants_file: Callable[[str, int], bool]) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url
        self.ranks: dict[str, CopiedRank] = {}
        """The copied ranks, by address."""
        self._folder = folder
        self._wants_file = wants_file

    def refresh(self) -> None:
        """Copies the ranks that have a newer version than the copy.

        Raises:
            StorageFailed, CheckpointCorrupt, ConfigError: see ``restore``.
        """
        try:
            names = list(rank_names(self._store))
            for name, copied in zip(names, in_threads(self._copy, names), strict=True):
                if copied is not None:
                    self.ranks[name] = copied
            restore_job(self.url, self._folder)
        except OSError as error:
            raise unreadable(self.url, error) from error

    def _copy(self, name: str) -> CopiedRank | None:
        mirrored = VersionStore(f"{self.url}/{name}")
        previous = self.ranks.get(name, CopiedRank(Version(0, ""), 0.0))
        newer = [version for version in mirrored.all_versions() if version > previous.version]
        problems = list[str]()

        def copy(version: Version) -> CopiedRank:
            manifest = mirrored.read_manifest(version)
            self._write(mirrored, manifest, self._folder / name)
            when = 0.0
            with suppress(ValueError):
                when = datetime.datetime.fromisoformat(manifest.uploaded_at).timestamp()
            return CopiedRank(version, when)

        copied = mirrored.newest(newer, copy, problems)
        if copied is None and problems and name not in self.ranks:
            raise _no_complete_version(mirrored.url, "\n  ".join(problems))
        return copied

    def _write(self, mirrored: VersionStore, manifest: Manifest, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, size in manifest.sizes.items() if self._wants_file(name, size)]
        contents = {
            name: [mirrored.read_object(part) for part in manifest.files[name]] for name in names
        }
        # The folder changes from here on.
        for path in folder.iterdir():
            if path.name not in contents:
                path.unlink()
        for name, blocks in contents.items():
            (folder / name).write_bytes(b"".join(blocks))
        (folder / layout.RUN).write_bytes(checksummed_json(manifest.run))
        if not manifest.finished:
            (folder / layout.LOCK).touch()


def unreadable(url: str, error: Exception, advice: str = "") -> StorageFailed:
    return StorageFailed(
        f"Could not read the mirror {url}: {failure_line(error)}. Correct that (network, "
        f"credentials).{advice}"
    )


def rank_names(store: ObjectStore) -> Iterator[str]:
    for name in store.names():
        if layout.is_rank(name):
            yield name
        elif layout.is_retry(name):
            yield from (f"{name}/{rank}" for rank in store.names(name) if layout.is_rank(rank))


def restore_ranks(url: str, names: Iterable[str], folder: Path) -> None:
    """Restores whole ranks into an extra folder, with ``job.json``.

    Args:
        names: the ranks' folders, such as "00000" or "retry-00001/00000".

    Raises:
        StorageFailed, CheckpointCorrupt, ConfigError: see ``restore``.
    """
    try:
        for name in names:
            restore(f"{url}/{name}", folder / name)
        restore_job(url, folder)
    except OSError as error:
        raise unreadable(url, error) from error


def upload_rank(url: str, folder: Path) -> None:
    """Uploads a rank's folder as a new version, which is finished if the folder is.

    No process may work on the folder.

    Raises:
        StorageFailed: the folder could not be uploaded. The newest version stays the same.
    """
    snapshot = Snapshot.of(folder)
    if (folder / layout.CACHE).exists():
        with closing(RequestCache(folder / layout.CACHE)) as cache:
            snapshot = snapshot.with_answers(cache)
    uploads = VersionWriter(VersionStore(url))
    try:
        uploads.start_version(identity.parse_run(folder / layout.RUN, snapshot.run), snapshot)
        for name in snapshot.sizes:
            with (folder / name).open("rb") as file:
                while data := file.read(MAX_OBJECT_BYTES):
                    uploads.add(name, data)
        uploads.add_answers(snapshot)
        uploads.publish(finished=layout.is_finished(folder))
    except OSError as error:
        raise StorageFailed(
            f"Could not upload the changed task to {url}: {failure_line(error)}. Correct that, "
            "and run again."
        ) from error


def upload_finished_ranks(url: str, root: Path) -> None:
    """Uploads the finished ranks that a mirror lacks, including retries: a mirror may be set later,
    or have been away.

    A failure only warns; the next start tries again.

    ``check_job`` must have refused the mirror of another run before.
    """
    finished = {
        f"{url}/{layout.RankAddress.of(folder)}": folder
        for folder in layout.rank_folders(root)
        if layout.is_finished(folder)
    }
    try:
        uploaded = sum(in_threads(_upload_missing, finished, finished.values()))
        if uploaded:
            logger.info(f"Uploaded {plural(uploaded, 'finished task')} to the mirror {url}.")
    except (OSError, StorageFailed) as error:
        logger.warning(
            f"Could not upload finished tasks to the mirror {url} ({failure_line(error)}). Tried "
            "again later."
        )


def _upload_missing(url: str, folder: Path) -> bool:
    """Uploads a finished rank, and returns True, unless the mirror has it, or work of another node.

    A kill in the first upload leaves an empty version 1.
    """
    mirrored = VersionStore(url)
    versions = [version for version in mirrored.all_versions() if version.number > 1]
    newest = mirrored.newest(versions, mirrored.read_manifest, [])
    if newest is not None and newest.finished:
        return False
    owner = _owner_of(folder)
    if versions and (owner is None or not contains_version(owner, versions[-1])):
        return False
    upload_rank(url, folder)
    return True


# job.json ----------------------------------------------------------------------------------------

# The identity that all ranks of a job share, for nodes with separate disks. Each starting rank
# compares itself with the mirror's ``job.json``; if that is missing or differs, with the newest
# version of every rank that only the mirror has. Its first upload then writes ``job.json``.


def join_mirrored_job(
    url: str, root: Path, rank: int, run_identity: identity.RunIdentity, accept_changes: bool
) -> bytes | None:
    """Compares a rank that starts with the ranks that only the mirror has.

    Returns:
        Content of ``job.json`` if the mirror lacks it. The rank's mirror uploads it, because a
        remote may hang.

    Raises:
        CheckpointMismatch: another rank belongs to another run.
        ConfigError: the bucket does not exist.
    """
    try:
        job, differences = _compare(url, root, run_identity, without=rank, with_output=True)
        if differences is None:
            return None
        if differences.changes and (not accept_changes or differences.is_layout):
            raise refuse_changes(url, differences)
        return job_content(run_identity, job, differences)
    except OSError as error:  # the rank has its folder, else it would not have come so far
        logger.warning(
            f"Could not compare this task with those on the mirror {url} ({failure_line(error)})."
        )
        return None


def compare_mirrored_job(
    url: str, root: Path, run_identity: identity.RunIdentity, only_tasks: bool
) -> JobChanges:
    """Compares a job with the ranks that only its mirror has. Changes nothing.

    Each rank compares again at its start, so an unreadable mirror is not reported here.
    """
    with suppress(OSError):
        _, differences = _compare(url, root, run_identity, only_tasks)
        if differences is not None:
            return differences
    return JobChanges()


def restore_job(url: str, folder: Path) -> None:
    job = read_job(url)
    if job:
        (folder / layout.JOB).write_bytes(checksummed_json(identity.stamped(job)))


def restore_recorded(url: str, root: Path) -> None:
    store = ObjectStore(url)
    folder = root / layout.RECORDED
    with suppress(OSError):  # the rank has its folder, or another error has come before
        names = [name for name in store.names(layout.RECORDED) if not (folder / name).exists()]
        contents = in_threads(lambda name: store.read(f"{layout.RECORDED}/{name}", 2**20), names)
        for name, data in zip(names, contents, strict=True):
            if data is not None:
                files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
                files.disk.replace(folder / name, data)


def read_job(url: str) -> Json:
    """Is empty if ``job.json`` is missing or damaged.

    Raises:
        VersionMismatch: a newer version of this program wrote it.
    """
    store = ObjectStore(url)
    try:
        return identity.parse_run(f"{store.url}/{layout.JOB}", store.read(layout.JOB, 2**26) or b"")
    except CheckpointCorrupt:
        return {}


def _compare(
    url: str,
    root: Path,
    run_identity: identity.RunIdentity,
    only_tasks: bool = False,
    without: int | None = None,
    with_output: bool = False,
) -> tuple[Json, JobChanges | None]:
    store = ObjectStore(url)
    job = read_job(url)
    if job and not compare(job, run_identity, with_output=with_output):
        return job, None
    ranks = [
        rank
        for rank in map(int, filter(layout.is_rank, store.names()))
        if rank != without and not (layout.rank_folder(root, rank) / layout.RUN).exists()
    ]
    manifests = in_threads(lambda rank: newest_manifest(f"{store.url}/{rank:05d}"), ranks)
    manifest_of = {
        rank: manifest
        for rank, manifest in zip(ranks, manifests, strict=True)
        if manifest is not None
    }

    def state_of(rank: int) -> RankBinding:
        manifest = manifest_of[rank]
        holds_work = bool(
            manifest.answers
            or manifest.files.keys() & {layout.BATCHES, layout.COMMITS}
            or any(map(layout.is_journal, manifest.files))
        )
        # It is unknown whether a process works on the rank: the run is stopped before its output
        # moves.
        return RankBinding(holds_work, manifest.finished, is_live=False)

    runs = {rank: manifest.run for rank, manifest in manifest_of.items()}
    return job, compare_runs(runs, state_of, job, run_identity, only_tasks)


def newest_manifest(url: str) -> Manifest | None:
    mirrored = VersionStore(url)
    return mirrored.newest(mirrored.all_versions(), mirrored.read_manifest, [])


def restore_advice(url: str, folder: Path, min_size: int) -> str:
    """Returns how to continue a damaged rank from its mirror, with a space before it; "" if the
    mirror does not have it.

    Args:
        min_size: bytes of commits that the mirror must have.
    """
    manifest = None
    with suppress(OSError, CkptError):
        manifest = newest_manifest(url)
    if manifest is None or not manifest.files or manifest.sizes.get(layout.COMMITS, 0) < min_size:
        return ""
    return (
        f" The mirror {url} has this task as of {manifest.uploaded_at}. To take that, move its "
        f"folder away while no task runs (mv {shlex.quote(str(folder))} "
        f"{shlex.quote(f'{folder}.damaged')}), and run again."
    )
