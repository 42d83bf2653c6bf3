"""Checks of one folder before a run: each writes or locks in a probe folder, and reports.

No rank's folder, lock or database is touched. A checkpoint needs locks, appends, renames, and syncs
that reach permanent storage: ``file_system`` finds in /proc/mounts what a folder lacks of them.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import CACHE, LOCK
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.common.formatting import byte_size, duration
from datatrove_ckpt.common.retrying import failure_line, file_system_call, hub_refusal
from datatrove_ckpt.config.paths import existing_part
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.run_folder.finding import Finding, RemoteFailed, with_timeout

MOUNTS = Path("/proc/mounts")

_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "wekafs",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.sshfs",
    "9p",
    "virtiofs",
}
_OBJECT_STORES = {
    "s3fs",
    "mountpoint-s3",
    "goofys",
    "gcsfuse",
    "blobfuse",
    "blobfuse2",
    "rclone",
    "hf-mount",
}
# Mount options that make locks visible to this machine only.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}


class Mount(NamedTuple):
    point: Path
    kind: str
    source: str
    options: frozenset[str]


class FilesystemTraits(NamedTuple):
    """The properties of a file system that matter for checkpoints.

    Attributes:
        name: its usual name.
        lasts: files survive a restart of this machine.
        shared: other machines see the same files.
        concern: a warning in a sentence.
        unsupported: a checkpoint cannot be kept on it.
    """

    name: str
    lasts: bool = True
    shared: bool = False
    concern: str = ""
    unsupported: bool = False


def find_mount(path: Path, mounts: str) -> Mount | None:
    deepest = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        mount = Mount(point, fields[2], fields[0], frozenset(fields[3].split(",")))
        # The later mount at a point counts.
        is_deeper = deepest is None or point.is_relative_to(deepest.point)
        if is_deeper and path.is_relative_to(point):
            deepest = mount
    return deepest


def traits(mount: Mount | None) -> FilesystemTraits:
    if mount is None:
        return FilesystemTraits("a file system of unknown kind")
    if mount.kind in _IN_MEMORY:
        return FilesystemTraits(
            f"{mount.kind} (memory)",
            lasts=False,
            concern="It is lost when the machine or container stops.",
        )
    if mount.kind == "overlay":
        return FilesystemTraits(
            "overlay (a container's own layer)",
            lasts=False,
            concern="It is lost when the container is removed: mount a volume.",
        )
    if mount.kind in _NETWORK:
        concern = ""
        local = sorted(mount.options & _LOCAL_LOCKS)
        if local:
            concern = (
                f"It is mounted with {local[0]}: locks do not keep out a process on another node; "
                "the other process is noticed only after it has started. Mount it with locks that "
                "all nodes see (Lustre: flock; NFS: without nolock and local_lock)."
            )
        elif mount.kind == "lustre" and "flock" not in mount.options:
            concern = (
                "It is mounted without flock: mount it with -o flock, or two processes for a task "
                "notice each other late."
            )
        elif mount.kind == "nfs" and not any(
            option.startswith("vers=4") for option in mount.options
        ):
            concern = (
                "Locks of NFS 3 need lockd (NLM) on the server and are lost when it restarts; NFS "
                "4 has its own."
            )
        return FilesystemTraits(f"{mount.kind} (shared)", shared=True, concern=concern)
    if (
        mount.kind.startswith("fuse")
        and {mount.kind.removeprefix("fuse."), mount.source} & _OBJECT_STORES
    ):
        text = (
            "It cannot append to a file. Keep checkpoints on a disk, and mirror them to the "
            "store by its URL."
        )
        return FilesystemTraits(
            f"{mount.kind} (an object store)", shared=True, concern=text, unsupported=True
        )
    return FilesystemTraits(f"{mount.kind} (local)")


def file_system(folder: Path) -> FilesystemTraits:
    mounts = ""
    if MOUNTS.exists():
        mounts = MOUNTS.read_text(errors="replace")
    return traits(find_mount(existing_part(folder.absolute()).resolve(), mounts))


PROBE = ".datatrove-ckpt-probe-"


# A remote folder ---------------------------------------------------------------------------------


_CONTENT = b"datatrove-ckpt"


def probe_object(folder: DataFolder) -> Finding:
    """Uploads an object to a datatrove ``DataFolder``, compares its size as a run does, and deletes
    it.

    Raises:
        RemoteFailed: the upload failed, or the object has a wrong size.
    """
    name = f"{PROBE}{secrets.token_hex(4)}"
    url = folder.resolve_paths("")
    remote = folder.resolve_paths(name)
    try:
        with file_system_call():
            start = time.monotonic()
            folder = _upload(folder, name)
            folder.invalidate_cache(name)
            arrived = folder.info(name)["size"]
            seconds = time.monotonic() - start
    except OSError as error:
        with suppress(Exception):
            folder.rm_file(name)
        raise RemoteFailed(f"{remote} could not be written: {failure_line(error)}.") from error
    text = f"{url}: a small object was written in {duration(seconds)}"
    finding = Finding("ok", "reachable", f"{text} and deleted.")
    try:
        with file_system_call():
            folder.rm_file(name)
    except OSError as error:
        text = (
            f"{remote} was written but could not be deleted: {failure_line(error)}. Delete it by "
            "hand. A run deletes nothing in its output; in its mirror, allow it."
        )
        finding = Finding("warning", "reachable", text)
    if arrived != len(_CONTENT):
        raise RemoteFailed(
            f"{remote} has {arrived} bytes after its upload instead of {len(_CONTENT)}."
        )
    return finding


def _upload(folder: DataFolder, name: str) -> DataFolder:
    """Uploads into the folder, or the nearest folder above it that exists. Returns that folder."""
    try:
        folder.pipe_file(name, _CONTENT)
        return folder
    except FileNotFoundError:
        # This file system has real folders, which a run makes; a missing bucket it does not make.
        above = folder.fs._parent(folder.path)
        if above.strip("/") not in ("", folder.path.strip("/")):
            with suppress(Exception):
                return _upload(DataFolder(above, fs=folder.fs), name)
        raise


_LEAST_FREE = 1 << 26  # bytes, for one chunk
_ON_ONE_NODE = (
    "Tasks may run on other nodes: if those do not see this folder, choose one that all nodes see."
)


# Local folders -----------------------------------------------------------------------------------


def check_checkpoints(folder: Path, mirrored: bool, moves: bool) -> Iterator[Finding]:
    """Checks ``checkpoints_local_dir``. ``moves``: tasks may restart on other nodes."""
    yield from _try_locally(folder, _check_lock, _check_sqlite)
    yield _check_kind(file_system(folder), mirrored, moves)
    yield check_room(folder)


def check_local_output(folder: Path, moves: bool) -> Iterator[Finding]:
    yield from _try_locally(folder)
    kind = file_system(folder)
    if not kind.lasts:
        yield Finding("warning", "file system", f"{kind.name}. {kind.concern}")
    elif moves and not kind.shared:
        yield Finding("warning", "file system", f"{kind.name}. {_ON_ONE_NODE}")
    yield check_room(folder)


def _try_locally(folder: Path, *tries: Callable[[Path], Finding]) -> Iterator[Finding]:
    """Checks that the folder can be written, then runs ``tries``, each with a hidden folder inside
    it, or inside its nearest parent that exists.
    """
    probe = existing_part(folder) / f"{PROBE}{secrets.token_hex(4)}"
    try:
        try:
            files.disk.make_dir(probe)
            files.disk.replace(probe / "written", _CONTENT)
            made = "" if folder.is_dir() else f" (will be created in {probe.parent})"
            yield Finding("ok", "writable", f"{folder}{made}")
            yield from (attempt(probe) for attempt in tries)
        finally:
            files.disk.remove_tree(probe)
    except (CheckpointError, OSError) as error:
        yield Finding("problem", "writable", f"{folder}: {error}")


def _check_kind(kind: FilesystemTraits, mirrored: bool, moves: bool) -> Finding:
    text = f"{kind.name}. {kind.concern}".rstrip()
    if kind.unsupported:
        return Finding("problem", "file system", text)
    if not kind.lasts and mirrored:
        return Finding(
            "ok", "file system", f"{text} The mirror (checkpoints_remote_dir) outlives it."
        )
    if not kind.lasts:
        text += " Or keep a mirror: set checkpoints_remote_dir."
    elif moves and not mirrored and not kind.shared:
        return Finding(
            "warning", "file system", f"{text} {_ON_ONE_NODE} Or set checkpoints_remote_dir."
        )
    return Finding("warning" if kind.concern else "ok", "file system", text)


def check_room(folder: Path) -> Finding:
    """Compares free bytes with the least that a run needs.

    The probe notices a quota that is used up, and a file system without free inodes.
    """
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    text = f"{byte_size(free)} free."
    if free >= _LEAST_FREE:
        return Finding("ok", "room", text)
    return Finding("problem", "room", f"{text} Free some space, or choose another folder.")


def _check_lock(probe: Path) -> Finding:
    lock = Lock(probe / LOCK)
    lock.release()
    if lock.works:
        return Finding("ok", "locks", "the file system has locks (tried on this machine only).")
    text = (
        "the file system has no locks. Of two processes for one task, the first notices the "
        "second only after that has started: start no task twice, or choose a folder with locks."
    )
    return Finding("warning", "locks", text)


def _check_sqlite(probe: Path) -> Finding:
    try:
        cache = RequestCache(probe / CACHE)
    except CheckpointError as error:
        return Finding("problem", "SQLite", f"the request cache cannot be opened here: {error}")
    cache.close()
    return Finding("ok", "SQLite", "WAL without shared memory works.")


# Remote folders ----------------------------------------------------------------------------------


def check_remote(location: str | DataFolder) -> Iterator[Finding]:
    """Writes an object to a folder of any kind, reads its size, and deletes it."""
    folder = get_datafolder(location)
    url = folder.resolve_paths("")
    hub = HubFolder.of(folder)
    if hub is not None and not hub.is_bucket:
        text = (
            "each write is a commit (a task makes several), of which the hub allows 128 an "
            "hour. Use hf://buckets/"
        )
        yield Finding(
            "warning", "reachable", f"{url} is not tested: {text}OWNER/NAME/FOLDER instead."
        )
        return
    try:
        yield with_timeout(partial(probe_object, folder), url)
    except RemoteFailed as error:
        advice = "" if hub_refusal(error) else " Correct the address, the key or its permissions."
        yield Finding("problem", "reachable", f"{error}{advice}")
