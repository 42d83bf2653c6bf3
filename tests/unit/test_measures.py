"""What is probed, and that nothing of it stays: not after an error, not in a folder that was not
there.
"""

from unittest.mock import Mock

import pytest
from datatrove.io import get_datafolder
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.run_folder.environment_checks import check_local, probe_object
from datatrove_ckpt.run_folder.finding import RemoteFailed
from tests.crashes import disk_in_place
from tests.disk_errors import FailingDisk


@pytest.mark.parametrize("permanent", [False, True])
def test_a_disk_that_refuses_any_effect_is_quoted_and_keeps_nothing_of_the_probe(
    tmp_path, permanent
):
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = FailingDisk(number, permanent=permanent)
        with disk_in_place(disk):
            findings = [*check_local(folder / "checkpoints", moves=False)]
        problems = [one.message for one in findings if one.state == "problem"]
        assert bool(problems) == bool(disk.failed_at)
        for message in problems:
            assert f"{disk.refused[-1]}:" in message
        if not permanent and "remove_tree" not in str(disk.failed_at):
            assert not list(folder.iterdir()), disk.failed_at
    assert not disk.failed_at


# Remote folders ----------------------------------------------------------------------------------


def upload_fails(folder, said):
    with pytest.raises(RemoteFailed, match=said):
        probe_object(folder)


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
    upload_fails(folder, r"memory://.*has 13 bytes after its upload instead of 14")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    upload_fails(folder, r"could not be written: PermissionError: 403 Forbidden")
    assert folder.list_files() == []


@pytest.mark.usefixtures("empty_memory_file_system")
def test_an_object_that_cannot_be_deleted_is_told_and_no_problem(monkeypatch):
    """A run goes on without deleting; its mirror keeps old versions."""
    refused = Mock(side_effect=PermissionError("403 Forbidden"))
    monkeypatch.setattr(MemoryFileSystem, "rm_file", refused)
    found = probe_object(get_datafolder("memory://measures/keeps"))
    assert found.state == "warning"
    assert (
        "could not be deleted: PermissionError: 403 Forbidden. Delete it by hand" in found.message
    )


def test_a_bucket_that_is_missing_is_not_made_and_a_folder_that_is_missing_is_no_mistake(
    monkeypatch,
):
    folders = {"bucket"}

    def pipe(self, path, value, **settings):
        if self._parent(path).lstrip("/") not in folders:
            raise FileNotFoundError(path)
        with self.open(path, "wb") as file:
            file.write(value)

    def makedirs(self, path, exist_ok=False):
        raise AssertionError(path)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    monkeypatch.setattr(MemoryFileSystem, "makedirs", makedirs)
    upload_fails(get_datafolder("memory://missing/deep/er"), "could not be written")
    probe_object(get_datafolder("memory://bucket/deep/er"))
    assert MemoryFileSystem().find("/bucket") == []
