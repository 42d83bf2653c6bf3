"""What kind of file system a folder lies on, and what that means for checkpoints: read from /proc/mounts.

SQLite in its usual WAL mode shares memory between processes, which no network file system offers. The request cache
takes its lock once and for good (``locking_mode=EXCLUSIVE``) and needs none, so a file system has to offer four things:
locks, appends, renames, and syncs that reach something that lasts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/mounts")

_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "lustre": "Lustre",
    "gpfs": "GPFS",
    "beegfs": "BeeGFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "smb3": "SMB",
    "wekafs": "WekaFS",
    "fuse.glusterfs": "GlusterFS",
    "fuse.juicefs": "JuiceFS",
    "fuse.sshfs": "sshfs",
    "9p": "9p",
    "virtiofs": "virtiofs",
}
_OBJECT_STORES = ("s3fs", "mountpoint-s3", "goofys", "gcsfuse", "blobfuse", "blobfuse2", "rclone", "hf-mount")
# Locks that only this machine sees.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    point: Path
    kind: str
    source: str
    options: frozenset[str]


@dataclass(frozen=True)
class FilesystemTraits:
    """What a file system is good for.

    Attributes:
        name: what people call it.
        lasts: what is on it outlives this machine's next start.
        shared: other machines see it.
        concerns: what to know or to do, a sentence each; empty if there is nothing.
        unfit: no place for a checkpoint.
    """

    name: str
    lasts: bool = True
    shared: bool = False
    concerns: tuple[str, ...] = ()
    unfit: bool = False


def find_mount(path: Path, mounts: str) -> Mount | None:
    """The mount that a resolved path lies on; None if the text of /proc/mounts does not say."""
    found = None
    for line in mounts.splitlines():
        fields = [_unescape(field) for field in line.split(" ")]
        if len(fields) < 4 or not path.is_relative_to(fields[1]):
            continue
        mount = Mount(Path(fields[1]), fields[2], fields[0], frozenset(fields[3].split(",")))
        if found is None or len(mount.point.parts) >= len(found.point.parts):  # of two on one point, the later one
            found = mount
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def nature(mount: Mount | None) -> FilesystemTraits:
    """What the mount's kind and options say."""
    if mount is None:
        return FilesystemTraits("a file system of unknown kind")
    if mount.kind in _IN_MEMORY:
        return FilesystemTraits(
            f"{mount.kind} (memory)", lasts=False, concerns=("It is lost when the machine or container stops.",)
        )
    if mount.kind == "overlay":
        concerns = ["It is lost when the container is removed: mount a volume."]
        if "volatile" in mount.options:
            concerns.append("It is mounted as volatile: syncs do nothing.")
        return FilesystemTraits("overlay (a container's own layer)", lasts=False, concerns=tuple(concerns))
    if mount.kind in _NETWORK:
        return FilesystemTraits(f"{_NETWORK[mount.kind]} (shared)", shared=True, concerns=_network_concerns(mount))
    if mount.kind.startswith("fuse") and _is_object_store(mount):
        return FilesystemTraits(
            f"{mount.kind} (an object store)",
            shared=True,
            concerns=(
                "It cannot append to a file. Keep checkpoints on a disk, and mirror them to the store by its URL.",
            ),
            unfit=True,
        )
    return FilesystemTraits(f"{mount.kind} (local)")


def _is_object_store(mount: Mount) -> bool:
    names = {mount.kind.removeprefix("fuse."), mount.source}
    return any(name in names for name in _OBJECT_STORES)


def _network_concerns(mount: Mount) -> tuple[str, ...]:
    local = sorted(mount.options & _LOCAL_LOCKS)
    if local:
        return (
            f"It is mounted with {local[0]}: a process on another node is not kept out by locks, only by the fence, "
            "after it has begun. Mount it with locks that all nodes see (Lustre: flock; NFS: without nolock and "
            "local_lock).",
        )
    if mount.kind == "lustre" and "flock" not in mount.options:
        return ("It is mounted without flock: mount it with -o flock, or only the fence keeps two processes apart.",)
    if mount.kind == "nfs" and not any(option.startswith("vers=4") for option in mount.options):
        return ("Locks of NFS 3 need lockd (NLM) on the server and are lost when it restarts; NFS 4 has its own.",)
    return ()
