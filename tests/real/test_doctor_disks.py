"""The doctor on disks that are really full, read-only, out of inodes, or not what they seem.

Needs root and Linux.
"""

from datatrove_ckpt.preflight.checks import Finding, check_checkpoints, check_local_output
from tests.real.test_full_disk import command, fill, mounted, tmpfs

FILES = 20


def checkpoints(folder):
    return {check.what: check for check in check_checkpoints(folder, FILES)}


def output(folder):
    return {check.what: check for check in check_local_output(folder, FILES)}


def test_a_full_disk_is_a_problem_and_keeps_nothing(tmp_path):
    with tmpfs(tmp_path / "disk", 512) as disk:
        fill(disk, leave=0)
        found = checkpoints(disk / "checkpoints") | output(disk / "output")
        assert sorted(path.name for path in disk.iterdir()) == ["filler"]
    assert found["writable"].state == "problem"
    assert "Free some space" in found["writable"].message
    assert found["room"].state == "problem"


def test_a_disk_without_inodes_is_a_problem(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=100m,nr_inodes=12", "tmpfs") as disk:
        room = checkpoints(disk / "checkpoints")["room"]
    assert room.state == "problem"
    assert "At least 20 inodes are needed" in room.message


def test_a_read_only_disk_is_a_problem(tmp_path):
    with tmpfs(tmp_path / "disk", 4096) as disk:
        command("mount", "-o", "remount,ro", str(disk))
        for check in (checkpoints(disk)["writable"], output(disk / "deep" / "output")["writable"]):
            assert check.state == "problem"
            assert "Make it writable for this user (or choose another folder)" in check.message


def test_the_kind_of_a_mounted_disk_is_said(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * 2**20))
    command("mkfs.ext4", "-q", str(image))
    with mounted(tmp_path / "with space", "-o", "loop", str(image)) as disk:
        assert checkpoints(disk / "c")["file system"] == Finding(
            "ok", "file system", "ext4 (local)."
        )
    with tmpfs(tmp_path / "memory", 4096) as disk:
        assert checkpoints(disk / "c")["file system"].state == "warning"
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    with mounted(tmp_path / "layer", "-t", "overlay", "-o", layers, "overlay") as disk:
        message = checkpoints(disk / "c")["file system"].message
    assert message.startswith(
        "overlay (a container's own layer). It is lost when the container is removed"
    )
