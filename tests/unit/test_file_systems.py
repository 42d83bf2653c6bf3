"""Lines of /proc/mounts, as real machines have them, and what they mean for a checkpoint."""

from pathlib import Path

import pytest

from datatrove_ckpt.run_folder.environment_checks import Mount, find_mount, traits
from tests import golden

TEXT = """\
/dev/nvme0n1p1 / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0
/dev/nvme1n1 /scratch xfs rw,noatime 0 0
nas:/home /home nfs4 rw,vers=4.2,hard,local_lock=none 0 0
nas:/with\\040space /with\\040space nfs rw,vers=3,nolock 0 0
10.0.0.1@tcp:/fs /lustre lustre rw,flock,lazystatfs 0 0
tmpfs /scratch/inner tmpfs rw 0 0
/dev/nvme2n1 /scratch/inner btrfs rw 0 0
"""


@pytest.mark.parametrize(
    "path, point, kind",
    [
        ("/", "/", "ext4"),
        ("/scratch2", "/", "ext4"),
        ("/scratch/a/b", "/scratch", "xfs"),
        ("/scratch/inner/a", "/scratch/inner", "btrfs"),
        ("/with space/run", "/with space", "nfs"),
    ],
)
def test_a_path_lies_on_the_deepest_mount_above_it_and_the_last_one_there(path, point, kind):
    mount = find_mount(Path(path), TEXT)
    assert (str(mount.point), mount.kind) == (point, kind)


def of(kind, options="rw", source="somewhere"):
    return traits(Mount(Path("/m"), kind, source, frozenset(options.split(","))))


@pytest.mark.parametrize("code", golden.sections("file_systems"))
def test_what_is_wrong_with_a_file_system_is_said(code):
    golden.show("file_systems", code, {"of": of})


def test_only_what_outlives_the_machine_lasts_and_only_object_stores_are_unsupported():
    assert [kind for kind in ("tmpfs", "ramfs", "overlay", "ext4", "nfs4") if of(kind).lasts] == [
        "ext4",
        "nfs4",
    ]
    assert of("fuse.mountpoint-s3").unsupported
    assert of("fuse", source="mountpoint-s3").unsupported
    assert not of("fuse.sshfs").unsupported
    assert traits(None).lasts
