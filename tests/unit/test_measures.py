"""What is probed, and that nothing of it stays: not after an error, not in a folder that was not
there.
"""

import errno

import pytest
from datatrove.io import get_datafolder
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.preflight.checks import (
    RemoteFailed,
    probe_folder,
    probe_object,
)
from datatrove_ckpt.testing import disk_in_place
from tests.disk_errors import FailingDisk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_at_any_effect_keeps_nothing_of_the_probe(tmp_path, code):
    number = 0
    while True:
        disk = FailingDisk(number, code)
        with disk_in_place(disk):
            try:
                with probe_folder(tmp_path / "checkpoints") as probe:
                    files.disk.replace(probe / "written", b"datatrove-ckpt")
                failed = False
            except StorageFailed:
                failed = True
        if disk.failed_at is None:
            break
        assert failed, f"{disk.failed_at} was refused, and nobody said so"
        left = list(tmp_path.iterdir())
        # The last effect: it could not be removed, which was said.
        if disk.failed_at.startswith("remove_tree"):
            for path in left:
                path.rename(path.with_name("removed-by-hand"))
            break
        assert left == [], disk.failed_at
        number += 1
    assert number > 3


# Remote folders ----------------------------------------------------------------------------------


def upload_fails(folder, kind, said):
    with pytest.raises(kind, match=said), probe_object(folder) as upload:
        upload(b"1234")


def test_an_object_that_arrives_short_or_not_at_all_is_said_and_removed(
    monkeypatch,
):
    folder = get_datafolder("memory://measures/refuses")

    def short(self, path, value, **settings):
        with self.open(path, "wb") as file:
            file.write(value[:-1])

    def refuse(self, path, value=None, **settings):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", short)
    upload_fails(folder, RemoteFailed, r"memory://.*has 3 bytes after its upload instead of 4")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    upload_fails(folder, RemoteFailed, r"could not be written: PermissionError: 403 Forbidden")
    assert folder.list_files() == []


def test_a_bucket_that_is_missing_is_not_made_and_a_folder_is_made_and_removed(
    monkeypatch,
):
    made = []
    folders = {"bucket"}

    def pipe(self, path, value, **settings):
        if self._parent(path).lstrip("/") not in folders:
            raise FileNotFoundError(path)
        with self.open(path, "wb") as file:
            file.write(value)

    def makedirs(self, path, exist_ok=False):
        made.append(path)
        folders.add(path.lstrip("/"))

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    monkeypatch.setattr(MemoryFileSystem, "makedirs", makedirs)
    monkeypatch.setattr(MemoryFileSystem, "exists", lambda self, path: path.lstrip("/") in folders)
    monkeypatch.setattr(
        MemoryFileSystem, "rmdir", lambda self, path: folders.discard(path.lstrip("/"))
    )
    upload_fails(get_datafolder("memory://missing/deep/er"), RemoteFailed, "could not be written")
    assert made == []
    with probe_object(get_datafolder("memory://bucket/deep")) as upload:
        upload(b"1234")
    assert made == ["/bucket/deep"]
    assert folders == {"bucket"}
