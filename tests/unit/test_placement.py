"""Chunks whose files are put in place later than they are written."""

import threading

from datatrove_ckpt.checkpoint import files, open_checkpoint
from datatrove_ckpt.checkpoint.open_checkpoint import MAX_PUBLISHING
from datatrove_ckpt.checkpoint.publish_intents import Placement
from datatrove_ckpt.errors import StorageFailed
from tests.open_checkpoints import answer_and_finish, opened


class Held(Placement):
    """Keeps chunks until the test puts them in place."""

    def __init__(self):
        self.waiting = {}
        self.arrived = threading.Semaphore(0)
        self.hurried = threading.Event()

    def wait(self, chunk_index, waiting):
        self.waiting[chunk_index] = waiting
        self.arrived.release()

    def flush(self):
        self.hurried.set()


def finish_chunks(checkpoint, held, number):
    for ordinal in range(2 * number):
        answer_and_finish(checkpoint, ordinal)
    for _ in range(number):
        assert held.arrived.acquire(timeout=300)


def free(monkeypatch, share):
    monkeypatch.setattr(open_checkpoint, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(open_checkpoint, "reserve_bytes", lambda folder: 1000)
    monkeypatch.setattr(open_checkpoint, "free_bytes", lambda folder: int(1000 * share))


def test_chunks_wait_in_any_number_and_are_committed_in_any_order(tmp_path, monkeypatch):
    free(monkeypatch, 2.0)
    held = Held()
    checkpoint = opened(tmp_path, placement=held, placed_later=True)
    finish_chunks(checkpoint, held, MAX_PUBLISHING + 3)
    assert checkpoint.publishing == MAX_PUBLISHING + 3
    assert not checkpoint.publishing_behind
    assert len(list((tmp_path / "00000").glob("chunk_*.jsonl"))) == MAX_PUBLISHING + 3
    for index in (3, 1):
        held.waiting[index].done()
    checkpoint.flush()
    assert checkpoint.publishing == MAX_PUBLISHING + 1
    assert not held.hurried.is_set()
    checkpoint.end_of_input()
    assert held.hurried.wait(300)
    checkpoint.close()
    again = opened(tmp_path, placement=Held(), placed_later=True)
    assert sorted(again.resumed.done) == [1, 3]
    again.close()


def test_only_a_disk_that_is_nearly_full_holds_up_new_documents(tmp_path, monkeypatch, log):
    held = Held()
    checkpoint = opened(tmp_path, placement=held, placed_later=True)
    finish_chunks(checkpoint, held, MAX_PUBLISHING + 1)
    log.clear()
    for share, behind in (
        (2.0, False),
        (0.5, True),
        (0.5, True),
        (1.05, True),
        (2.0, False),
        (0.5, True),
    ):
        free(monkeypatch, share)
        assert checkpoint.publishing_behind is behind
    held.waiting[0].done()  # with so few chunks waiting, the room is not theirs
    checkpoint.flush()
    assert not checkpoint.publishing_behind
    assert len(log) == 2, "each time that it begins"
    assert "only 500 B of the reserve of 1000 B are free" in log[0]
    checkpoint.close()


def test_a_full_disk_gets_the_room_of_what_was_staged_before_the_rank_is_taken(
    tmp_path, monkeypatch
):
    opened(tmp_path, placement=Held(), placed_later=True).close()
    staged = tmp_path / "00000/staging/0123abcd/chunk_00000/00000.parquet"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"content")
    write = files.Disk.write

    def is_full(disk, fd, data, path):
        if path.name.startswith("run.json") and staged.exists():
            raise StorageFailed("No space left on device")
        write(disk, fd, data, path)

    monkeypatch.setattr(files.Disk, "write", is_full)
    opened(tmp_path, placement=Held(), placed_later=True).close()
    assert not staged.exists()
