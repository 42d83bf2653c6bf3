"""What every store does: mirrors, steps of trainings, claims and owners of outputs rely on it.

A new store is one more row of ``STORES`` (tests/stores.py).
"""

import hashlib
from itertools import groupby
from urllib.error import HTTPError

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.common import object_store
from datatrove_ckpt.common.object_store import ObjectStore
from tests.crashes import crash_at


@pytest.fixture
def store(store_kind, tmp_path, waits):
    return ObjectStore(store_kind.url(tmp_path), apart=True)


@pytest.fixture
def waits(monkeypatch):
    seen = []
    monkeypatch.setattr(object_store.time, "sleep", seen.append)
    return seen


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
    store.put("folder/b", b"old")
    store.copy("b", "folder/b", b"content")
    store.copy("b", "other/new/b", b"content")
    store.create("folder/new", b"")
    assert [*store.names()] == ["b", "folder", "other"]
    assert store.read("other/new/b", 9) == b"content"
    assert [*store.names("folder")] == ["b", "deep", "new"]
    assert store.names()["b"] > 0
    assert (store.read("b", 7), store.read("b", 6)) == (b"content", None)
    assert store.read("folder/b", 9) == b"content"
    assert store.read("folder/new", 9) == b""
    assert b"".join(store.blocks("folder/deep/a")) == b"of a file"
    told = store.md5("b")
    assert len(told) != 32 or told == hashlib.md5(b"content").hexdigest()
    store.delete("b")
    assert [*store.names()] == ["folder", "other"]
    store.delete_tree("folder")
    store.delete_tree("other")
    assert store.names() == {}


def test_who_creates_late_replaces_nothing(store_kind, store, waits):
    for name in (b"first", b"late"):
        store.create("owner", name)
    assert store.read("owner", 9) == b"first"
    # The others are seen by all only after a while.
    assert len(waits) == 2 * (not store_kind.creates_once)


def test_of_two_that_create_at_once_all_see_one(store_kind, store, waits, monkeypatch):
    """The second one comes when the first one has looked, and is about to write."""
    owner, name = store_kind.writes
    write = getattr(owner, name)
    late = [b"second"]

    def other_first(*arguments, **options):
        while late:
            store.create("owner", late.pop())
        return write(*arguments, **options)

    monkeypatch.setattr(owner, name, other_first)
    store.create("owner", b"first")
    assert not late
    assert store.read("owner", 9) == (b"second" if store_kind.creates_once else b"first")
    assert [*store.names()] == ["owner"]


def test_a_store_with_the_protocol_of_s3_may_know_no_conditions(monkeypatch, waits):
    monkeypatch.setattr(object_store, "CREATES_ONCE", {"memory"})
    pipe = MemoryFileSystem.pipe_file

    def not_implemented(self, path, data, mode=None):
        if mode:
            raise HTTPError("", 501, "Not Implemented", {}, None)
        pipe(self, path, data)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", not_implemented)
    store = ObjectStore("memory://store")
    store.create("owner", b"me")
    assert (store.read("owner", 9), len(waits)) == (b"me", 1)


def test_a_crash_at_each_effect_leaves_it_done_or_not_done_and_all_can_be_done_again(
    store, tmp_path
):
    def effects():
        store.delete_tree("")
        store.put("a", b"new")
        store.create("b", b"created")
        store.create("b", b"late")
        store.copy("a", "c", b"new")
        store.delete("a")

    def content():
        return {name: store.read(name, 9) for name in store.names()}

    (tmp_path / "kept").mkdir()
    seen, disk = [], None
    while disk is None or disk.crashed_at:
        store.delete_tree("")
        store.put("a", b"old")
        with crash_at(len(seen), tmp_path / "kept") as disk:
            effects()
        seen.append(content())
        effects()
        assert content() == {"b": b"created", "c": b"new"}
    assert [state for state, _ in groupby(seen)] == [
        {"a": b"old"},
        {},
        {"a": b"new"},
        {"a": b"new", "b": b"created"},
        {"a": b"new", "b": b"created", "c": b"new"},
        {"b": b"created", "c": b"new"},
    ]
