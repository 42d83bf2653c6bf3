"""Which file system a folder is on, and what that means for checkpoints. Read from /proc/mounts.

SQLite in its usual WAL mode shares memory between processes, which no network file system offers. The request cache
takes its lock once and keeps it (``locking_mode=EXCLUSIVE``), so it needs no shared memory. A file system must offer
four things: locks, appends, renames, and syncs that reach permanent storage.
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
# Mount options that make locks visible to this machine only.
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
    """The properties of a file system that matter for checkpoints.

    Attributes:
        name: its usual name.
        lasts: files survive a restart of this machine.
        shared: other machines see the same files.
        concerns: warnings, one sentence each.
        unsupported: a checkpoint cannot be kept on it.
    """

    name: str
    lasts: bool = True
    shared: bool = False
    concerns: tuple[str, ...] = ()
    unsupported: bool = False


def find_mount(path: Path, mounts: str) -> Mount | None:
    """The mount that a resolved path is on; None if ``mounts``, the text of /proc/mounts, does not tell."""
    found = None
    for line in mounts.splitlines():
        fields = [_unescape(field) for field in line.split(" ")]
        if len(fields) < 4 or not path.is_relative_to(fields[1]):
            continue
        mount = Mount(Path(fields[1]), fields[2], fields[0], frozenset(fields[3].split(",")))
        # Of two mounts at one point, the later one counts.
        if found is None or len(mount.point.parts) >= len(found.point.parts):
            found = mount
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def traits(mount: Mount | None) -> FilesystemTraits:
    """The traits that follow from the mount's type and options."""
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
            unsupported=True,
        )
    return FilesystemTraits(f"{mount.kind} (local)")


def _is_object_store(mount: Mount) -> bool:
    names = {mount.kind.removeprefix("fuse."), mount.source}
    return any(name in names for name in _OBJECT_STORES)


def _network_concerns(mount: Mount) -> tuple[str, ...]:
    local = sorted(mount.options & _LOCAL_LOCKS)
    if local:
        return (
            f"It is mounted with {local[0]}: locks do not keep out a process on another node; the other process is "
            "noticed only after it has started. Mount it with locks that all nodes see "
            "(Lustre: flock; NFS: without nolock and local_lock).",
        )
    if mount.kind == "lustre" and "flock" not in mount.options:
        return (
            "It is mounted without flock: mount it with -o flock, or two processes for a rank notice each other late.",
        )
    if mount.kind == "nfs" and not any(option.startswith("vers=4") for option in mount.options):
        return ("Locks of NFS 3 need lockd (NLM) on the server and are lost when it restarts; NFS 4 has its own.",)
    return ()
