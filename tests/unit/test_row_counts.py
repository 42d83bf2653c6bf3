"""The rows of JSONL files are counted once: the next process knows them, until a file changes."""

import os
import threading

import pytest
from loguru import logger

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.readers.blocks import BlockInput
from datatrove_ckpt.readers.jsonl import LineBlocks


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DATATROVE_CKPT_CACHE", folder.as_posix())
    return folder


@pytest.fixture
def counted(monkeypatch):
    """The files whose lines were counted."""
    names = []
    count = LineBlocks.index

    def spied(self):
        names.append(self.name)
        return count(self)

    monkeypatch.setattr(LineBlocks, "index", spied)
    return names


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text(
            "".join(f'{{"text": "{i}"}}\n' for i in range(number + 1))
        )
    return folder


def rows(folder):
    return sum(block.rows for block in BlockInput(JsonlReader(folder.as_posix())))


def test_each_file_is_counted_once_and_what_is_new_or_has_changed_again(folder, counted):
    assert rows(folder) == 6
    assert sorted(counted) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    counted.clear()
    assert rows(folder) == 6
    assert counted == []
    with (folder / "1.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    (folder / "3.jsonl").write_text('{"text": "new"}\n')
    assert rows(folder) == 8
    assert sorted(counted) == ["1.jsonl", "3.jsonl"]


def test_a_file_of_the_same_size_is_counted_again_if_content_or_time_differ(folder, counted):
    rows(folder)
    path = folder / "2.jsonl"
    time = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"}\n{", b"}  {"))
    os.utime(path, ns=(time, time))
    counted.clear()
    assert rows(folder) == 4
    os.utime(folder / "0.jsonl", ns=(time + 10**9, time + 10**9))
    assert rows(folder) == 4
    assert counted == ["2.jsonl", "0.jsonl"]


@pytest.mark.parametrize("damage", [b"", b"\0" * 90, b"[]"], ids=["empty", "zeros", "other"])
def test_counts_that_power_loss_has_damaged_are_counted_once_again(folder, cache, counted, damage):
    rows(folder)
    for path in cache.glob("*.json"):
        path.write_bytes(damage)
    assert rows(folder) == rows(folder) == 6
    assert len(counted) == 6


def test_without_a_place_for_counts_each_start_counts(folder, cache, counted, monkeypatch, log):
    cache.write_text("no folder")
    assert rows(folder) == rows(folder) == 6
    assert len(counted) == 6
    warned = [line for line in log if line.startswith("WARNING")]
    assert "so the next start counts again" in warned[0]
    monkeypatch.setenv("DATATROVE_CKPT_CACHE", "")
    assert rows(folder) == 6
    assert len(counted) == 9
    assert [line for line in log if line.startswith("WARNING")] == warned
    assert len(warned) == 2


def test_one_process_counts_and_the_others_wait_for_it(folder, cache, counted):
    first = BlockInput(JsonlReader(folder.as_posix()))
    counted.clear()
    for kept in cache.glob("*.json"):
        kept.unlink()
    waits, found = threading.Event(), []
    handler = logger.add(lambda message: waits.set() if "One process counts" in message else None)
    counts = first._counts
    with counts.counting():
        other = threading.Thread(target=lambda: found.append(rows(folder)))
        other.start()
        assert waits.wait(300)
        for number in range(3):
            counts.put(number, first._index[number])
    other.join(300)
    logger.remove(handler)
    assert found == [6]
    assert counted == []
