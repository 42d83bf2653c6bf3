"""Finds the file system of a folder in /proc/mounts, and what it lacks for a checkpoint.

A checkpoint needs locks, appends, renames, and syncs that reach permanent storage.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.config.paths import existing_part

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
