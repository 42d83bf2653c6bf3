"""A checkpoint without a runner: chunks fill and complete, each class keeps to its thread, each
object is whole.
"""

import errno
import fcntl
import itertools
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from datatrove_ckpt.checkpoint import fence, layout, open_checkpoint, rank_summary
from datatrove_ckpt.checkpoint.chunks import ChunkTracker, no_position
from datatrove_ckpt.checkpoint.commits import Commit, read_commits
from datatrove_ckpt.checkpoint.identity import run_with_secrets
from datatrove_ckpt.checkpoint.layout import CACHE_FILES, journal_name
from datatrove_ckpt.checkpoint.publish_intents import Placement
from datatrove_ckpt.checkpoint.rank_summary import CHECKED, Include
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, Fenced
from tests.crashes import WatchedDisk, disk_in_place
from tests.open_checkpoints import answer_and_finish, opened, write_chunk

# chunks ------------------------------------------------------------------------------------------


def tracker(folder, point=None):
    complete = []
    return ChunkTracker(folder, 2, point or ResumePoint(), complete.append), complete


def admit(chunks, ordinal):
    return chunks.admit(f"input {ordinal}", no_position)


def test_a_chunk_that_was_committed_already_is_passed_and_its_last_document_compared(
    tmp_path,
):
    done = {1: Commit(1, 2, DocumentCounts(read=1), last_input="input 2")}
    chunks, complete = tracker(tmp_path, ResumePoint(done=done))
    first = [admit(chunks, ordinal) for ordinal in range(2)]
    assert chunks.admit("input 2", no_position) is None
    slot = admit(chunks, 3)
    assert (slot.ordinal, slot.chunk.index, slot.cached) == (3, 2, False)
    assert slot.chunk.capacity == 2
    assert complete == []
    assert (first[0].chunk.index, first[0].chunk.first_ordinal) == (0, 0)
    chunks, _ = tracker(tmp_path, ResumePoint(next_chunk=1, next_ordinal=2, done=done))
    with pytest.raises(
        CheckpointMismatch,
        match="Document 2 of this task is not the one finished before",
    ):
        chunks.admit("another", no_position)


def test_an_input_that_ends_before_the_answers_that_are_kept_has_shrunk(tmp_path):
    chunks, _ = tracker(tmp_path, ResumePoint(last_cached=1))
    assert admit(chunks, 0).cached
    with pytest.raises(CheckpointMismatch, match="the reader's limit has shrunk"):
        chunks.end_of_input()
    assert admit(chunks, 1).cached
    chunks.end_of_input()


# the whole ---------------------------------------------------------------------------------------


def run(checkpoint, number):
    for ordinal in range(number):
        answer_and_finish(checkpoint, ordinal, "dead" if ordinal % 2 else "written")
    checkpoint.end_of_input()
    while not checkpoint.all_committed:
        time.sleep(0.001)
        checkpoint.raise_failure()


# writing --------------------------------------------------------------------------------------------


@contextmanager
def as_one_group(checkpoint):
    """The disk is busy while the block hands documents over."""
    is_busy = threading.Event()
    is_free = threading.Event()
    work = partial(checkpoint.change, lambda rank_files: is_busy.set() or is_free.wait(60))
    threading.Thread(target=work).start()
    assert is_busy.wait(60)
    yield
    is_free.set()
    until_written(checkpoint)


def until_written(checkpoint):
    """Returns when all that was handed over is written, and synced if a sync was due."""
    for _ in range(2):
        checkpoint.change(lambda rank_files: None)


def of_documents(disk):
    """The effects on the journal and the answers of the first chunk."""
    names = (journal_name(0), *CACHE_FILES)
    return [label for label in disk.happened if label.endswith(names)]


def test_what_is_written_is_synced_once_in_sync_seconds_and_not_once_in_a_group(
    tmp_path, monkeypatch
):
    """On a slow disk a sync takes 200 milliseconds, and a group comes each few milliseconds."""
    now = [0.0]
    monkeypatch.setattr(open_checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    checkpoint = opened(tmp_path, records_per_chunk=100, sync_seconds=600.0)
    until_written(checkpoint)
    written = ["commit replay.sqlite3", "write chunk_00000.jsonl"]
    synced = ["sync chunk_00000.jsonl", "sync replay.sqlite3-wal"]
    happened = []
    with disk_in_place(disk := WatchedDisk()):
        for ordinal, seconds in enumerate([0, 1, 2, 599, 600, 601, 1199, 1200, 1201]):
            now[0] = float(seconds)
            with as_one_group(checkpoint):
                answer_and_finish(checkpoint, ordinal)
            happened.append((seconds, of_documents(disk)))
            disk.happened.clear()
        checkpoint.close()
    # The seconds count from the first write after a sync; here also from the history's first line.
    expected = {600: synced + written, 1200: synced + written}
    assert happened == [(seconds, expected.get(seconds, written)) for seconds, _ in happened]


def no_locks(fd, how):
    raise OSError(errno.ENOLCK, "no locks")


class TakenOver(Placement):
    """Another process takes the rank over between the last check of a publication and its
    commit.
    """

    def __init__(self, folder):
        self.folder = folder

    def wait(self, chunk_index, waiting):
        self.newer = opened(self.folder)
        waiting.done()


def test_an_owner_that_was_taken_over_after_it_published_commits_and_removes_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    placement = TakenOver(tmp_path)
    older = opened(tmp_path, placement=placement)
    with pytest.raises(Fenced):
        run(older, 2)
    files = older.lease.files
    note = partial(files.batches.note, 1, "filled")
    for change in (partial(files.write, [], {}), note, older.lease.check):
        with pytest.raises(Fenced):
            change()
    older.close()
    newer = placement.newer
    assert list(newer.resumed.journals) == [0]
    assert (tmp_path / "00000/chunk_00000.jsonl").stat().st_size > 0
    assert newer.lease.read_rank(tmp_path / "00000", Include.COMMITS).commits == {}
    run(newer, 2)
    newer.close(completed=True)
    assert set(read_commits(tmp_path / "00000/commits.jsonl")) == {0}


def test_a_takeover_while_a_check_reads_the_owner_is_found_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    older = opened(tmp_path)
    found = []

    def read_and_lose(path):
        monkeypatch.undo()
        found.append(run_with_secrets(path))
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", no_locks)
            found.append(opened(tmp_path))
        return found[0]

    monkeypatch.setattr(fence, "run_with_secrets", read_and_lose)
    older.lease.check()
    with pytest.raises(Fenced):
        older.lease.files.write([], {})
    for checkpoint in (older, found[1]):
        checkpoint.close()


def test_a_journal_is_on_the_disk_before_its_output_is_written(tmp_path):
    """A power loss may otherwise leave the output of documents that nothing remembers, and that are
    paid once more.
    """
    before = {}

    def write_chunk_and_look(index, documents):
        effects = [label for label in disk.happened if label.endswith(f"chunk_0000{index}.jsonl")]
        before[index] = effects[-1]
        return write_chunk(index, documents)

    with disk_in_place(disk := WatchedDisk()):
        checkpoint = opened(tmp_path, write_chunk_and_look, sync_seconds=3600.0)
        run(checkpoint, 4)
        checkpoint.close(completed=True)
    assert before == {0: "sync chunk_00000.jsonl", 1: "sync chunk_00001.jsonl"}
    assert "sync dead_letters.jsonl" in disk.happened


def test_a_chunk_whose_output_lacks_a_document_is_not_committed(tmp_path):
    mirror = Mock()
    checkpoint = opened(
        tmp_path,
        lambda index, documents: write_chunk(index, [next(iter(documents))]),
        mirror=mirror,
    )
    with pytest.raises(CheckpointCorrupt, match="holds 0 documents instead of 2"):
        run(checkpoint, 2)
    checkpoint.close(completed=True)
    mirror.stop.assert_called_with(False)
    assert (tmp_path / "00000/lock").exists()


@pytest.mark.parametrize("locks", [True, False])
def test_an_open_rank_knows_its_commits_but_reads_them_where_an_owner_before_it_may_still_write(
    tmp_path, monkeypatch, locks
):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    checkpoint = opened(tmp_path)
    run(checkpoint, 2)

    def known():
        found = checkpoint.lease.read_rank(tmp_path / "00000", Include.COMMITS)
        assert found.run
        return set(found.commits)

    assert known() == {0}
    (tmp_path / "00000/commits.jsonl").write_bytes(b"")  # as by another process
    (tmp_path / "last_chunk/00000.txt").unlink()
    assert known() == ({0} if locks else set())
    checkpoint.close(completed=True)


READS = [
    (layout, "RankListing"),
    (rank_summary.identity, "run_with_secrets"),
    (rank_summary, "read_last_chunk"),
    (rank_summary, "read_shard"),
    (rank_summary, "read_history"),
    (rank_summary, "read_finished"),
    (rank_summary, "read_commits"),
]


@pytest.mark.parametrize(
    "want",
    [CHECKED | Include.HISTORY, Include.HISTORY | Include.JOURNALS],
    ids=["checked", "summed"],
)
def test_a_chunk_that_is_committed_between_any_two_reads_of_a_ledger_is_seen(
    tmp_path, monkeypatch, want
):
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        reads = ledger_reads(folder, moment, want, monkeypatch)
        if reads <= moment:
            break
    assert moment >= 6


def ledger_reads(folder, moment, want, monkeypatch):
    """Reads a rank whose second chunk is committed before read number ``moment``.

    Returns the number of reads.
    """
    may_publish, reads = threading.Event(), 0

    def write_later(index, documents):
        assert index == 0 or may_publish.wait(300)
        return write_chunk(index, documents)

    def reading(read, *given, **named):
        nonlocal reads
        if reads == moment:
            may_publish.set()
            while checkpoint.publishing:
                time.sleep(0.001)
        reads += 1
        return read(*given, **named)

    checkpoint = opened(folder, write_later)
    for ordinal in range(4):
        answer_and_finish(checkpoint, ordinal)
    checkpoint.flush()
    with monkeypatch.context() as patched:
        for module, name in READS:
            patched.setattr(module, name, partial(reading, getattr(module, name)))
        rank = rank_summary.read_rank(folder / "00000", want)
    may_publish.set()
    checkpoint.close()
    assert rank.damage is None
    assert rank.committed.counts.read + rank.unfinished.read == 4, (
        f"before read {moment} of {reads}"
    )
    return reads
