"""Lines of /proc/mounts, as real machines have them, and what they mean for a checkpoint."""

from pathlib import Path

from datatrove_ckpt.run_folder import environment_checks
from datatrove_ckpt.run_folder.environment_checks import Mount, traits
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


def of(kind, options="rw", source="somewhere"):
    return traits(Mount(Path("/m"), kind, source, frozenset(options.split(","))))


test_what_is_wrong_with_a_file_system_is_said = golden.shows(
    "file_systems", globals(), vars(environment_checks)
)
