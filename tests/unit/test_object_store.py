"""What every back end of the store does: mirrors, steps of trainings and claims rely on it."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.common import object_store
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.testing.crashes import crash_at


@pytest.fixture(params=["local", "memory", "bucket"])
def store(request, tmp_path):
    if request.param == "local":
        yield ObjectStore(str(tmp_path / "store"))
    elif request.param == "memory":
        yield ObjectStore("memory://store")
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    else:
        request.getfixturevalue("hub").create_repo("org/job", kind="bucket")
        yield ObjectStore("hf://buckets/org/job/store", apart=True)


def test_each_method_does_one_thing(store, tmp_path):
    assert store.names() == {}
    assert store.read("missing", 9) is None
    with pytest.raises(FileNotFoundError):
        list(store.blocks("missing"))
    store.delete("missing")
    store.delete_tree("missing")
    store.put("b", b"old")
    store.put("b", b"content")
    (tmp_path / "file").write_bytes(b"of a file")
    store.put("folder/deep/a", tmp_path / "file")
    store.copy("b", "folder/b", b"content")
    assert [*store.names()] == ["b", "folder"]
    assert [*store.names("folder")] == ["b", "deep"]
    assert store.names()["b"] > 0
    assert (store.read("b", 7), store.read("b", 6)) == (b"content", None)
    assert store.read("folder/b", 9) == b"content"
    assert b"".join(store.blocks("folder/deep/a")) == b"of a file"
    store.delete("b")
    assert [*store.names()] == ["folder"]
    store.delete_tree("folder")
    assert store.names() == {}


def test_a_crash_at_each_effect_leaves_it_done_or_not_done(tmp_path):
    folder, number, seen = tmp_path / "store", 0, []
    while not seen or seen[-1]:
        store = ObjectStore(str(folder))
        store.delete_tree("")
        store.put("a", b"old")
        with crash_at(number, folder) as disk:
            store.put("a", b"new")
            store.copy("a", "c", b"new")
            store.delete("a")
            store.delete_tree("")
        seen.append({name: store.read(name, 9) for name in store.names()})
        number += 1
    assert disk.crashed_at is None
    assert seen == [{"a": b"old"}, {"a": b"new"}, {"a": b"new", "c": b"new"}, {"c": b"new"}, {}]


@pytest.fixture
def waits(monkeypatch):
    seen = []
    monkeypatch.setattr(object_store.time, "sleep", seen.append)
    yield seen
    MemoryFileSystem.store.clear()


def test_who_comes_late_replaces_no_owner_where_the_store_can_tell(waits):
    store = ObjectStore("memory://store")
    for name in (b"first", b"late"):
        store.create("owner", name)
    assert (store.read("owner", 9), len(waits)) == (b"first", 2)


def test_an_older_library_without_conditions_puts_and_waits(waits, monkeypatch):
    monkeypatch.setattr(object_store, "CREATES_ONCE", {"memory"})
    pipe = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, data: pipe(self, path, data)
    )
    store = ObjectStore("memory://store")
    store.create("owner", b"me")
    assert (store.read("owner", 9), len(waits)) == (b"me", 1)
